"""Exercises of lab 05 on orders: the bubble, 1F1B, what schedules keep, a memory limit, a deadlock, a split backward.

An order is judged by what the simulator makes of it, never by comparing it with another text; an answer under a memory
limit is held to the proven optimum, from the stored table. What cannot be read is refused by a sentence that names the
first thing wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import a_or_an, say, shortest
from dlojz.labs.kit.exercise import Challenge, Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, refuse_nothing
from dlojz.pipeline.closed_forms import fraction, overhead, total_time
from dlojz.pipeline.optimum.shortest_schedule import optimum
from dlojz.pipeline.orders.zero_bubble import list_schedule
from dlojz.pipeline.schedule import Action, Costs, Schedule, parse_action
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import peak_activations, simulate
from dlojz.pipeline.validity import problems

MAX_ACTIONS = 10_000
"""A list that grows beyond this is a loop gone wrong."""
_SHORT = re.compile(r"[FBIW]\d{1,9}")


def read_order(given: Any, stage: int) -> list[Action]:
    """One rank's order, from texts such as `F0` (or `2F0`, with the stage) or from actions.

    Args:
        given: what the student's function returned.
        stage: the stage that `F0` means where no stage is written.

    Raises:
        Wrong: for nothing, for something that is no list, or for an entry that is no action.
    """
    refuse_nothing(given)
    if isinstance(given, str | Action) or not isinstance(given, Iterable):
        raise Wrong(
            en=f'A list of actions such as ["F0", "B0"] is expected, but {a_or_an(type(given).__name__)} was returned.',
            fr='On attend une liste d’actions comme ["F0", "B0"], mais un objet de type '
            f"{type(given).__name__} a été renvoyé.",
        )
    order = []
    for entry in given:
        order.append(_action(entry, stage))
        if len(order) > MAX_ACTIONS:
            raise Wrong(
                en=f"The order has more than {MAX_ACTIONS} actions: look for a loop that adds too many.",
                fr=f"L’ordre compte plus de {MAX_ACTIONS} actions : cherchez une boucle qui en ajoute trop.",
            )
    return order


def _action(entry: Any, stage: int) -> Action:
    if isinstance(entry, Action):
        return entry
    if isinstance(entry, str):
        text = entry.strip()
        try:
            return parse_action(f"{stage}{text}" if _SHORT.fullmatch(text) else text)
        except LabError:
            raise Wrong(
                en=f"{text!r} is no action: write the kind and the micro-batch, counted from 0, as F0 (forward), B0 "
                "(backward), or I0 and W0 (a backward in two parts). In messages the stage stands in front: 2F0.",
                fr=f"{text!r} n’est pas une action : écrivez le type et le micro-batch, compté à partir de 0, comme F0 "
                "(passe avant), B0 (passe arrière), ou I0 et W0 (une passe arrière en deux parties). Dans les "
                "messages, l’étage vient devant : 2F0.",
            ) from None
    raise Wrong(
        en=f"An order holds texts such as 'F0', but one of its entries is {a_or_an(type(entry).__name__)}.",
        fr=f"Un ordre contient des textes comme 'F0', mais l’un de ses éléments est de type {type(entry).__name__}.",
    )


def read_schedule(given: Any, ranks: int, micro_batches: int) -> Schedule:
    """A whole schedule of one stage per rank: a `Schedule`, or one list of actions per rank.

    Raises:
        Wrong: as `read_order`, and for another number of ranks, stages or micro-batches than asked for.
    """
    if isinstance(given, Schedule):
        size, wanted = (given.ranks, given.stages, given.micro_batches), (ranks, ranks, micro_batches)
        if size != wanted:
            raise Wrong(
                en=f"{ranks} ranks with one stage each and {micro_batches} micro-batches are asked for, but your "
                f"schedule has {size[0]} ranks, {size[1]} stages and {size[2]} micro-batches.",
                fr=f"On demande {ranks} rangs d’un étage chacun et {micro_batches} micro-batches, mais votre "
                f"ordonnancement a {size[0]} rangs, {size[1]} étages et {size[2]} micro-batches.",
            )
        return given
    refuse_nothing(given)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise Wrong(
            en=f"One list of actions per rank is expected, but {a_or_an(type(given).__name__)} was returned.",
            fr=f"On attend une liste d’actions par rang, mais un objet de type {type(given).__name__} a été renvoyé.",
        )
    rows = list(given)
    if len(rows) != ranks:
        raise Wrong(
            en=f"{ranks} lists are expected, one per rank, but {len(rows)} were returned.",
            fr=f"On attend {ranks} listes, une par rang, mais {len(rows)} ont été renvoyées.",
        )
    return schedule_from([read_order(row, rank) for rank, row in enumerate(rows)], micro_batches)


def schedule_from(orders: list[list[Action]], micro_batches: int) -> Schedule:
    """A schedule of one stage per rank, not checked yet."""
    return Schedule.of("custom", orders, list(range(len(orders))), micro_batches)


def refuse_invalid(schedule: Schedule, memory_limit: float | None = None) -> None:
    """Refuse a schedule that cannot be executed, or keeps too much.

    Raises:
        Wrong: with the size of the case and the first problem.
    """
    found = problems(schedule, memory_limit)
    if found:
        raise Wrong(f"{case_of(schedule)}{capital(found[0])}")


def case_of(schedule: Schedule) -> str:
    """What the schedule was asked for, as the beginning of a sentence."""
    return say(
        en=f"With ranks={schedule.ranks} and micro_batches={schedule.micro_batches}: ",
        fr=f"Avec ranks={schedule.ranks} et micro_batches={schedule.micro_batches} : ",
    )


def capital(sentence: str) -> str:
    """A problem as the end of a sentence, closed by a full stop."""
    return sentence if sentence.endswith(".") else f"{sentence}."


_BUBBLE_SIZES = ((4, 9), (4, 8), (2, 4), (8, 16), (5, 1), (1, 6))
_TIMES = ((1, 2), (3, 5), (2, 2))


def pipeline_step(ranks: int, micro_batches: int, forward: float, backward: float) -> tuple[float, float, float]:
    """Of GPipe or 1F1B with equal stages: length of the step, bubble fraction, bubble overhead.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2.1, for the length and the overhead; Huang et al. 2019 (arXiv
    1811.06965), §2.3, for the fraction.
    """
    return (
        total_time(ranks, micro_batches, forward, backward),
        fraction(ranks, micro_batches),
        overhead(ranks, micro_batches),
    )


def _pipelines() -> Iterator[tuple[int, int, int, int]]:
    for ranks, micro_batches in _BUBBLE_SIZES:
        for forward, backward in _TIMES:
            yield ranks, micro_batches, forward, backward


PIPELINE_BUBBLE = Exercise(
    id="pipeline-bubble",
    title=Said("the bubble by hand", "la bulle à la main"),
    judge=Judge(
        pipeline_step,
        cases=_pipelines,
        parts=(Said("the length", "la durée"), Said("the fraction", "la fraction"), Said("the overhead", "le surcoût")),
        mistakes=(
            Mistake(
                lambda p, m, f, b: (m + 2 * (p - 1)) * (f + b),
                "Your length counts the bubble twice: p − 1 forwards fill the pipeline, p − 1 backwards empty it, so "
                "it is (p − 1) (t_f + t_b) in all.",
                "Votre durée compte la bulle deux fois : p − 1 passes avant remplissent le pipeline, p − 1 passes "
                "arrière le vident, soit (p − 1) (t_f + t_b) en tout.",
                part=0,
            ),
            Mistake(
                lambda p, m, f, b: m * p * (f + b),
                "That length is the naive way's, one stage at a time: m·p·(t_f + t_b). In a pipeline the stages work "
                "at the same time, on different micro-batches.",
                "Cette durée est celle de la manière naïve, un étage à la fois : m·p·(t_f + t_b). Dans un pipeline, "
                "les étages travaillent en même temps, sur des micro-batches différents.",
                part=0,
            ),
            Mistake(
                lambda p, m, f, b: m * (f + b),
                "That length is the work of one stage, the ideal time. The last stage cannot begin before the first "
                "micro-batch has crossed the others: add the bubble.",
                "Cette durée est le travail d’un étage, la durée idéale. Le dernier étage ne peut pas commencer avant "
                "que le premier micro-batch ait traversé les autres : ajoutez la bulle.",
                part=0,
            ),
            Mistake(
                lambda p, m, f, b: (m + p) * (f + b),
                "The length is one too many: the first micro-batch crosses p stages, and m − 1 others follow it.",
                "La durée compte un tour de trop : le premier micro-batch traverse p étages, puis m − 1 autres le "
                "suivent.",
                part=0,
            ),
            Mistake(
                lambda p, m, f, b: (m + p - 1) * f + m * b,
                "Your length counts the filling, but not the draining: the gradient of the last micro-batch goes back "
                "through all stages too.",
                "Votre durée compte le remplissage, mais pas la vidange : le gradient du dernier micro-batch retraverse"
                " lui aussi tous les étages.",
                part=0,
            ),
            Mistake(
                lambda p, m, f, b: (m + p - 1) * f,
                "The backward pass is missing: each stage also spends t_b on every micro-batch.",
                "Il manque la passe arrière : chaque étage passe aussi t_b sur chaque micro-batch.",
                part=0,
            ),
            Mistake(
                lambda p, m, f, b: overhead(p, m),
                "Your fraction is the overhead, idle time over work; the fraction compares with all the time there is: "
                "for 4 stages and 8 micro-batches, 3/11 and not 3/8.",
                "Votre fraction est le surcoût, l’attente rapportée au travail ; la fraction se rapporte à tout le "
                "temps disponible : pour 4 étages et 8 micro-batches, 3/11 et non 3/8.",
                part=1,
            ),
            Mistake(
                lambda p, m, f, b: 1 - fraction(p, m),
                "Your fraction is the share of time in which the ranks compute; the bubble is the rest.",
                "Votre fraction est la part du temps où les rangs calculent ; la bulle est le reste.",
                part=1,
            ),
            Mistake(
                lambda p, m, f, b: (p - 1) * (f + b),
                "Your fraction is a time, that of the bubble: divide it by the length of the step.",
                "Votre fraction est un temps, celui de la bulle : divisez-le par la durée du pas.",
                part=1,
            ),
            Mistake(
                lambda p, m, f, b: fraction(p, m),
                "Your overhead is the fraction once more; the overhead is idle time over work, not over all time: it "
                "may well exceed 1.",
                "Votre surcoût est encore la fraction ; le surcoût, c’est l’attente rapportée au travail, et non au "
                "temps total : il peut dépasser 1.",
                part=2,
            ),
            Mistake(
                lambda p, m, f, b: 1 + overhead(p, m),
                "Your overhead is all time over work; it is what exceeds 1: only the idle time counts.",
                "Votre surcoût est le temps total sur le travail ; c’est ce qui dépasse 1 : seule compte l’attente.",
                part=2,
            ),
        ),
    ),
    praise_en="Right: m micro-batches of work, p − 1 of bubble, whatever t_f and t_b. Whenever a bubble is quoted, "
    "ask: over what?",
    praise_fr="Exact : m micro-batches de travail, p − 1 de bulle, quels que soient t_f et t_b. Devant une bulle "
    "annoncée, demandez toujours : rapportée à quoi ?",
    hint_en="Follow the forward pass on the last stage: when does it get the first micro-batch, and how many has it "
    "then to pass? The backward is the mirror image. What exceeds the work is the bubble.",
    hint_fr="Suivez la passe avant sur le dernier étage : quand reçoit-il le premier micro-batch, et combien en a-t-il "
    "ensuite à traiter ? La passe arrière en est l’image dans un miroir. Ce qui dépasse le travail est la bulle.",
    nearer_en="Length: (p − 1)·t_f until the last stage begins, then m·t_f; the same with t_b. The bubble is (p − 1)("
    "t_f + t_b): divide it by the length, then by the work, m(t_f + t_b).",
    nearer_fr="Durée : (p − 1)·t_f avant que le dernier étage commence, puis m·t_f ; de même avec t_b. La bulle est "
    "(p − 1)(t_f + t_b) : divisez-la par la durée, puis par le travail, m(t_f + t_b).",
)


_ORDER_SIZES = ((4, 8), (2, 4), (3, 7), (1, 3), (4, 2), (8, 16), (5, 5))
"""Ranks and micro-batches: fewer micro-batches than ranks, and one rank, among them."""


def _check_order(answer: Callable[..., Any], ranks: int, micro_batches: int) -> None:
    given = [read_order(answer(rank, ranks, micro_batches), rank) for rank in range(ranks)]
    schedule = schedule_from(given, micro_batches)
    reference = build("1f1b", ranks, micro_batches)
    if schedule.orders != reference.orders:
        said = _known(schedule)
        if said:
            raise Wrong(case_of(schedule) + said)
        refuse_invalid(schedule)
        _compare(schedule, reference)


def _known(schedule: Schedule) -> str:
    """The usual slips, by their order."""
    size = (schedule.ranks, schedule.micro_batches)
    forwards = [next((n for n, action in enumerate(order) if action.kind != "F"), 0) for order in schedule.orders]
    if schedule.orders == build("gpipe", *size).orders:
        return say(
            en="this is GPipe, all forwards before the first backward: each rank keeps all micro-batches. 1F1B begins "
            "its backwards as soon as it can.",
            fr="c’est GPipe, toutes les passes avant d’abord : chaque rang garde tous les micro-batches. 1F1B commence "
            "ses passes arrière dès que possible.",
        )
    if schedule.ranks > 1 and forwards == [min(rank + 1, size[1]) for rank in range(schedule.ranks)] != [
        min(schedule.ranks - rank, size[1]) for rank in range(schedule.ranks)
    ]:
        return say(
            en="your warm-up is the wrong way round: the last rank is next to the loss and can go back after 1 "
            "forward; rank 0 is the one that waits longest, so it runs p forwards first.",
            fr="votre démarrage est inversé : le dernier rang calcule la perte et peut repartir après 1 passe avant ; "
            "c’est le rang 0 qui attend le plus longtemps : il exécute d’abord p passes avant.",
        )
    if schedule.ranks > 1 and forwards == [min(schedule.ranks - rank - 1, size[1]) for rank in range(schedule.ranks)]:
        return say(
            en="your warm-up is one forward short: p − 1 − r forwards are right if the loop that follows is (forward, "
            "backward), but before (backward, forward) it takes p − r.",
            fr="il manque une passe avant au démarrage : p − 1 − r suffisent si la boucle qui suit est (avant, "
            "arrière), mais devant (arrière, avant) il en faut p − r.",
        )
    return ""


def _compare(schedule: Schedule, reference: Schedule) -> None:
    """Valid; but is it as short, and does it keep as little?"""
    peaks, right = peak_activations(schedule), peak_activations(reference)
    for rank, (kept, wanted) in enumerate(zip(peaks, right, strict=True)):
        if kept > wanted:
            raise Wrong(
                case_of(schedule)
                + say(
                    en=f"rank {rank} keeps up to {shortest(kept)} micro-batches, but 1F1B keeps {shortest(wanted)} "
                    f"there: it runs {shortest(wanted)} forward{'s' if wanted > 1 else ''}, then a backward before "
                    "each further one.",
                    fr=f"le rang {rank} garde jusqu’à {shortest(kept)} micro-batches, alors que 1F1B n’en garde que "
                    f"{shortest(wanted)} : {shortest(wanted)} passe{'s' if wanted > 1 else ''} avant, puis une passe "
                    "arrière avant chacune des suivantes.",
                )
            )
    length, best = simulate(schedule).makespan, simulate(reference).makespan
    if length > best:
        raise Wrong(case_of(schedule) + _longer(schedule, reference, length, best))


def _longer(schedule: Schedule, reference: Schedule, length: float, best: float) -> str:
    """How long a valid order takes, and the first rank that goes back in another order, or too early."""
    en = f"your order can be executed, but takes {shortest(length)} time units and not {shortest(best)}"
    fr = f"votre ordre s’exécute, mais dure {shortest(length)} unités de temps au lieu de {shortest(best)}"
    for rank, (order, right) in enumerate(zip(schedule.orders, reference.orders, strict=True)):
        went_back = [action.micro_batch for action in order if action.kind == "B"]
        if went_back != sorted(went_back):
            later, sooner = next(pair for pair in pairwise(went_back) if pair[0] > pair[1])
            return say(
                en=f"{en}: rank {rank} runs B{later} before B{sooner}. The gradient of the micro-batch that went "
                "through first comes back first: backwards go by rising numbers.",
                fr=f"{fr} : le rang {rank} exécute B{later} avant B{sooner}. C’est le gradient du premier "
                "micro-batch passé qui revient le premier : les passes arrière vont par numéros croissants.",
            )
        forwards, wanted = (
            next(n for n, action in enumerate(actions) if action.kind == "B") for actions in (order, right)
        )
        if forwards < wanted:
            return say(
                en=f"{en}: rank {rank} turns back after {forwards} forward{'s' if forwards > 1 else ''}, and "
                f"{wanted} fit before the first gradient comes back to it.",
                fr=f"{fr} : le rang {rank} repart en arrière après {forwards} passe{'s' if forwards > 1 else ''} "
                f"avant, alors que {wanted} tiennent avant que le premier gradient lui revienne.",
            )
    return say(
        en=f"{en}: somewhere a rank waits, although it could work.",
        fr=f"{fr} : quelque part, un rang attend alors qu’il pourrait travailler.",
    )


ONE_F_ONE_B = Exercise(
    id="one-f-one-b",
    title=Said("1F1B's order", "l’ordre de 1F1B"),
    judge=Judge(cases=_ORDER_SIZES, trial=_check_order),
    praise_en="Right, for 1 to 8 ranks, with fewer micro-batches than ranks too: as long as GPipe, and far less kept.",
    praise_fr="Exact, de 1 à 8 rangs, et même avec moins de micro-batches que de rangs : aussi long que GPipe, pour "
    "bien moins de mémoire.",
    hint_en="Rank r first runs p − r forwards (m at most): so many go in before the first gradient comes back to it. "
    "Then each backward makes room for one more forward.",
    hint_fr="Le rang r exécute d’abord p − r passes avant (m au plus) : autant entrent avant que le premier gradient "
    "lui revienne. Ensuite, chaque passe arrière fait place à une passe avant de plus.",
    nearer_en="order = the forwards 0 … w − 1 with w = min(ranks - rank, micro_batches); then, for each micro-batch k: "
    'add f"B{k}", and f"F{k + w}" if k + w < micro_batches.',
    nearer_fr="order = les passes avant 0 … w − 1, avec w = min(ranks - rank, micro_batches) ; puis, pour chaque "
    'micro-batch k : ajoutez f"B{k}", et f"F{k + w}" si k + w < micro_batches.',
)


def kept(schedule: str, rank: int, ranks: int, micro_batches: int) -> int:
    """Micro-batches whose activations a rank keeps at most: m for GPipe, min(p − r, m) for 1F1B.

    Source: Narayanan et al. 2021 (arXiv 2006.09503), §2.2.
    """
    return micro_batches if schedule == "gpipe" else min(ranks - rank, micro_batches)


def _places() -> Iterator[tuple[str, int, int, int]]:
    for ranks, micro_batches in ((4, 8), (2, 6), (8, 3), (3, 7)):
        for rank in range(ranks):
            for schedule in ("1f1b", "gpipe"):
                yield schedule, rank, ranks, micro_batches


ORDER_KEPT = Exercise(
    id="kept-micro-batches",
    title=Said("what GPipe and 1F1B keep", "ce que gardent GPipe et 1F1B"),
    judge=Judge(
        kept,
        cases=_places,
        mistakes=(
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else min(p, m),
                "For 1F1B you give what rank 0 keeps; each further rank gets its first gradient sooner and keeps "
                "one fewer.",
                "Pour 1F1B, vous donnez ce que garde le rang 0 ; chaque rang suivant reçoit son premier gradient "
                "plus tôt et en garde un de moins.",
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else p - r,
                "Right as long as there are enough micro-batches; but a rank cannot keep more than there are, m.",
                "C’est juste tant qu’il y a assez de micro-batches ; mais un rang ne peut en garder plus qu’il n’y "
                "en a, m.",
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else min(r + 1, m),
                "For 1F1B the ranks are the wrong way round: the last one, next to the loss, keeps 1.",
                "Pour 1F1B, les rangs sont inversés : c’est le dernier, où se calcule la perte, qui en garde 1.",
            ),
            Mistake(
                lambda schedule, r, p, m: m,
                "For 1F1B you give all micro-batches, as for GPipe: a backward gives back activations before the "
                "last forward. (The names are “gpipe” and “1f1b”.)",
                "Pour 1F1B, vous donnez tous les micro-batches, comme pour GPipe : or une passe arrière rend des "
                "activations avant la dernière passe avant. (Les noms sont « gpipe » et « 1f1b ».)",
            ),
            Mistake(
                lambda schedule, r, p, m: min(p - r, m) if schedule == "gpipe" else m,
                "GPipe and 1F1B are swapped: it is GPipe that keeps all micro-batches.",
                "GPipe et 1F1B sont échangés : c’est GPipe qui garde tous les micro-batches.",
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else 1,
                "For 1F1B you keep one micro-batch on every rank; rank r runs p − r forwards before its first "
                "gradient comes.",
                "Pour 1F1B, vous gardez un micro-batch sur chaque rang ; le rang r exécute p − r passes avant "
                "avant que son premier gradient n’arrive.",
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else min(p - r + 1, m),
                "For 1F1B you count one micro-batch too many: the last rank keeps 1.",
                "Pour 1F1B, vous comptez un micro-batch de trop : le dernier rang en garde 1.",
            ),
            Mistake(
                lambda schedule, r, p, m: p if schedule == "gpipe" else min(p - r, m),
                "GPipe runs all forwards first, so it keeps as many as there are micro-batches, not as there are "
                "ranks.",
                "GPipe exécute d’abord toutes les passes avant : il garde autant de micro-batches qu’il y en a, "
                "et non autant que de rangs.",
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else max(p - r, m),
                "For 1F1B take the smaller of the two numbers: no more than p − r are ever ahead.",
                "Pour 1F1B, prenez le plus petit des deux nombres : jamais plus de p − r ne sont en avance.",
            ),
            Mistake(
                lambda schedule, r, p, m: min(p - r, m),
                "GPipe keeps more: its first backward comes after the last forward.",
                "GPipe garde davantage : sa première passe arrière vient après la dernière passe avant.",
            ),
            Mistake(
                lambda schedule, r, p, m: m if schedule == "gpipe" else min(p - r - 1, m),
                "For 1F1B the micro-batch that is in its own backward is missing: even the last rank keeps 1.",
                "Pour 1F1B, il manque le micro-batch dont la passe arrière est en cours : même le dernier rang en "
                "garde 1.",
            ),
        ),
    ),
    praise_en="Right. GPipe's memory grows with the micro-batches, 1F1B's with the ranks: that is all 1F1B gains, and "
    "it is much.",
    praise_fr="Exact. La mémoire de GPipe croît avec les micro-batches, celle de 1F1B avec les rangs : c’est tout ce "
    "que gagne 1F1B, et c’est beaucoup.",
    hint_en="A forward takes one, its backward gives it back. How many forwards does each rank run before its first "
    "backward?",
    hint_fr="Une passe avant en prend un, sa passe arrière le rend. Combien de passes avant chaque rang exécute-t-il "
    "avant sa première passe arrière ?",
    nearer_en="GPipe: micro_batches, on every rank. 1F1B: min(ranks - rank, micro_batches).",
    nearer_fr="GPipe : micro_batches, sur chaque rang. 1F1B : min(ranks - rank, micro_batches).",
)


CASES = ((4, 8, 3), (4, 8, 2), (3, 6, 2), (4, 6, 4), (2, 6, 1), (4, 8, 8))
"""Ranks, micro-batches, and how many of them each rank may keep."""


def _check_cap(answer: Callable[..., Any], ranks: int, micro_batches: int, limit: int) -> None:
    schedule = read_schedule(answer(ranks, micro_batches, limit), ranks, micro_batches)
    refuse_invalid(schedule)
    peaks = peak_activations(schedule)
    if max(peaks) > limit:
        rank = peaks.index(max(peaks))
        raise Wrong(
            _case(schedule, limit)
            + say(
                en=f"rank {rank} keeps {shortest(max(peaks))}. A forward must wait until a backward has made room: "
                "see the argument cap.",
                fr=f"le rang {rank} en garde {shortest(max(peaks))}. Une passe avant doit attendre qu’une passe "
                "arrière ait fait de la place : voyez l’argument cap.",
            )
        )
    length, best = simulate(schedule).makespan, optimum(ranks, micro_batches, memory_limit=limit).value
    if length > best:
        forward_first = list_schedule(ranks, micro_batches, priority="forward-first", cap=limit)
        waits = schedule.orders == forward_first.orders
        raise Wrong(_case(schedule, limit) + _too_long(length, best, max(peaks), limit, waits))


def _case(schedule: Schedule, limit: int) -> str:
    text = case_of(schedule).removesuffix(": ").rstrip()
    return say(en=f"{text}, {limit} of them kept at most: ", fr=f"{text}, dont {limit} gardés au plus : ")


def _too_long(length: float, best: float, peak: float, limit: int, forwards_first: bool) -> str:
    en = f"the step takes {shortest(length)} time units, and {shortest(best)} are possible"
    fr = f"le pas dure {shortest(length)} unités de temps, alors que {shortest(best)} suffisent"
    if forwards_first:
        return say(
            en=f"{en}. Forwards go first, so a rank waits for one while a backward is ready, and holds up the others: "
            "run a backward as soon as its gradient has come, see the argument priority.",
            fr=f"{fr}. Les passes avant passent d’abord : un rang en attend une quand une passe arrière est prête, et "
            "bloque les autres ; exécutez une passe arrière dès que son gradient est arrivé, voyez l’argument "
            "priority.",
        )
    if peak < limit:
        as_without = say(en=", as without a pipeline", fr=", comme sans pipeline") if peak <= 1 else ""
        several = "es" if peak > 1 else ""
        return say(
            en=f"{en}: no rank keeps more than {shortest(peak)} micro-batch{several}{as_without}; use the memory "
            "there is.",
            fr=f"{fr} : aucun rang ne garde plus de {shortest(peak)} micro-batch{several}{as_without} ; servez-vous "
            "de la mémoire disponible.",
        )
    return say(
        en=f"{en}: somewhere a rank waits, although it could work. Which of a forward and a backward goes first?",
        fr=f"{fr} : quelque part, un rang attend alors qu’il pourrait travailler. D’une passe avant et d’une passe "
        "arrière, laquelle passe d’abord ?",
    )


MEMORY_CAP = Exercise(
    id="memory-cap",
    title=Said("a schedule under a memory limit", "un ordonnancement sous contrainte de mémoire"),
    judge=Judge(cases=CASES, trial=_check_cap),
    praise_en="Right: in every case your schedule is as short as the proven optimum.",
    praise_fr="Exact : dans tous les cas, votre ordonnancement est aussi court que l’optimum prouvé.",
    hint_en="list_schedule makes the orders; you only choose what goes first, and how many micro-batches a rank may "
    "keep. GPipe is forward-first without a cap. What gives memory back?",
    hint_fr="list_schedule écrit les ordres ; vous choisissez seulement ce qui passe d’abord, et combien de "
    "micro-batches un rang peut garder. GPipe, c’est forward-first sans cap. Qu’est-ce qui rend la mémoire ?",
    nearer_en='Two arguments: priority="backward-first", and cap=limit.',
    nearer_fr='Deux arguments : priority="backward-first" et cap=limit.',
)


RANKS, MICRO_BATCHES = 2, 4
LIMIT = 3
"""Micro-batches that a rank may keep: GPipe, which never deadlocks, keeps 4."""
BLOCKING = Costs(sends="rendezvous")


def _check_unblocked(answer: Callable[..., Any]) -> None:
    schedule = read_schedule(answer(), RANKS, MICRO_BATCHES)
    refuse_invalid(schedule)
    try:
        length = simulate(schedule, BLOCKING).makespan
    except LabError as error:
        same = schedule.orders == build("1f1b", RANKS, MICRO_BATCHES).orders
        raise Wrong(
            (say(en="That is 1F1B still. ", fr="C’est encore 1F1B. ") if same else "") + _first_sentence(str(error))
        ) from None
    peak = max(peak_activations(schedule))
    if peak > LIMIT:
        raise Wrong(
            en=f"Nothing deadlocks, but a rank keeps {shortest(peak)} micro-batches, and only {LIMIT} are allowed: "
            "put a backward before the last forward.",
            fr=f"Plus d’interblocage, mais un rang garde {shortest(peak)} micro-batches, et {LIMIT} seulement sont "
            "permis : placez une passe arrière avant la dernière passe avant.",
        )
    slow = simulate(build("naive", RANKS, MICRO_BATCHES)).makespan
    if length >= slow:
        raise Wrong(
            en=f"Nothing deadlocks, but the step takes {shortest(length)} time units, as without a pipeline: one "
            "rank always waits for the other. Let each run at least two forwards before its first backward.",
            fr=f"Plus d’interblocage, mais le pas dure {shortest(length)} unités de temps, comme sans pipeline : "
            "un rang attend toujours l’autre. Laissez chacun exécuter au moins deux passes avant d’abord.",
        )


def _first_sentence(text: str) -> str:
    """The cycle, without the advice that follows it, which is the answer to another question."""
    return text[0].upper() + text[1:].split(". ", 1)[0] + "."


UNBLOCK = Exercise(
    id="unblock",
    title=Said("repair a deadlock", "réparer un interblocage"),
    judge=Judge(cases=((),), trial=_check_unblocked),
    praise_en="Right: whenever one rank sends, the other receives. The price is time or memory, which posting both at "
    "once does not ask for.",
    praise_fr="Exact : quand un rang envoie, l’autre reçoit. Le prix se paie en temps ou en mémoire ; poster les deux "
    "à la fois ne coûte rien de cela.",
    hint_en="Both ranks send at the same time: rank 0 the output of F1, rank 1 the gradient of B0. What if rank 1 "
    "first took that output, by running F1 before B0?",
    hint_fr="Les deux rangs envoient au même moment : le rang 0 la sortie de F1, le rang 1 le gradient de B0. Et si le "
    "rang 1 prenait d’abord cette sortie, en exécutant F1 avant B0 ?",
    nearer_en="Give both ranks the same order, with two or three forwards at its head, then backwards and forwards in "
    "turn.",
    nearer_fr="Donnez aux deux rangs le même ordre, avec deux ou trois passes avant en tête, puis une passe arrière et "
    "une passe avant en alternance.",
)


BEST, DEADLOCK_KEPT = 13, 2
"""The proven optimum of 2 ranks and 4 micro-batches, F = I = W = 1, and what 1F1B's rank 0 keeps."""


def _check_split(answer: Callable[..., Any]) -> None:
    schedule = read_schedule(answer(), RANKS, MICRO_BATCHES)
    refuse_invalid(schedule)
    if not schedule.splits_backward:
        raise Wrong(
            en="Your backwards are whole: write I and W in place of B. Only I makes the rank before go on, W can "
            "wait for a gap.",
            fr="Vos passes arrière sont entières : écrivez I et W au lieu de B. Seul I fait avancer le rang "
            "précédent, W peut attendre un creux.",
        )
    refuse_invalid(schedule, DEADLOCK_KEPT)
    length = simulate(schedule).makespan
    if length > BEST:
        raise Wrong(
            en=f"Valid, within {DEADLOCK_KEPT} micro-batches, but {shortest(length)} time units; {BEST} are "
            f"possible. {_who_waits(schedule)}",
            fr=f"Valide, sans dépasser {DEADLOCK_KEPT} micro-batches, mais {shortest(length)} unités de temps ; on "
            f"peut faire {BEST}. {_who_waits(schedule)}",
        )


def _who_waits(schedule: Schedule) -> str:
    """The first gap that a pending weight gradient could have filled, or else the idlest rank."""
    timeline = simulate(schedule)
    rank = max(range(schedule.ranks), key=lambda one: timeline.idle[one])
    return say(
        en=f"Rank {rank} waits for {shortest(timeline.idle[rank])} of them: which W could it run meanwhile, or which I "
        "should come sooner?",
        fr=f"Le rang {rank} en passe {shortest(timeline.idle[rank])} à attendre : quel W pourrait-il exécuter pendant "
        "ce temps, ou quel I devrait venir plus tôt ?",
    )


ZERO_BUBBLE = Exercise(
    id="zero-bubble",
    title=Said("your own schedule, with the backward split", "votre ordonnancement, passe arrière découpée"),
    judge=Judge(cases=((),), trial=_check_split),
    praise_en="Right: 13 time units in place of 15, with no more memory. No schedule is shorter.",
    praise_fr="Exact : 13 unités de temps au lieu de 15, sans mémoire de plus. Aucun ordonnancement n’est plus court.",
    hint_en="Start from 1F1B and write each B as I, then W. Where does rank 0 wait for a gradient? Rank 1 could send "
    "it sooner if its W came later; but W also gives the memory back.",
    hint_fr="Partez de 1F1B et écrivez chaque B comme I, puis W. Où le rang 0 attend-il un gradient ? Le rang 1 "
    "pourrait l’envoyer plus tôt en retardant ses W ; mais c’est aussi W qui rend la mémoire.",
    nearer_en="Rank 0 stays F0 F1 I0 W0 F2 I1 W1 F3 … Rank 1 always keeps one W back: F0 I0 F1 I1 W0 F2 I2 W1 … and "
    "its last W at the end.",
    nearer_fr="Le rang 0 reste F0 F1 I0 W0 F2 I1 W1 F3 … Le rang 1 garde toujours un W en réserve : F0 I0 F1 I1 W0 F2 "
    "I2 W1 … et son dernier W à la fin.",
)


SIZE = 4, 8
"""Ranks and micro-batches of the challenge."""
FEWEST = 9
"""The least sum of peaks within 1F1B's time, 3 + 3 + 2 + 1: proven with OR-Tools for F, I, W in the order of the
micro-batches."""


def _sum_of_peaks(answer: Callable[..., Any]) -> float:
    """The score: micro-batches kept at most, summed over the ranks."""
    schedule = read_schedule(answer(), *SIZE)
    refuse_invalid(schedule)
    length, allowed = simulate(schedule).makespan, simulate(build("1f1b", *SIZE)).makespan
    if length > allowed:
        raise Wrong(
            en=f"The step takes {shortest(length)} time units, longer than 1F1B's {shortest(allowed)}. "
            f"{_who_waits(schedule) if schedule.splits_backward else 'Backwards in two halves, I and W, leave gaps.'}",
            fr=f"Le pas dure {shortest(length)} unités de temps, plus que les {shortest(allowed)} de 1F1B. "
            + (_who_waits(schedule) if schedule.splits_backward else "Coupez les passes arrière en deux, I et W."),
        )
    return float(sum(peak_activations(schedule)))


FRUGAL = Challenge(
    id="frugal",
    title=Said("challenge: 1F1B's time, less memory", "défi : le temps de 1F1B, moins de mémoire"),
    judge=_sum_of_peaks,
    target=FEWEST,
    unit_en="micro-batches kept",
    unit_fr="micro-batches gardés",
    praise_en="No schedule within that time keeps fewer: the bubble has been traded for memory.",
    praise_fr="Aucun ordonnancement de cette durée n’en garde moins : la bulle est échangée contre de la mémoire.",
    hint_en="With whole backwards, one slot fewer on rank 0 took 39 units. What does the rank before wait for: I or W? "
    "And which of the two gives memory back?",
    hint_fr="Avec des passes arrière entières, une place de moins au rang 0 menait à 39 unités. Qu’attend le rang "
    "précédent : I ou W ? Et lequel des deux rend la mémoire ?",
    nearer_en="list_schedule also takes split=True, a priority that is a function (action, state) whose smallest value "
    "runs first, and one cap per rank. Try caps that sum to 9.",
    nearer_fr="list_schedule accepte aussi split=True, une priorité sous forme de fonction (action, état) dont la plus "
    "petite valeur passe d’abord, et un cap par rang. Essayez des caps dont la somme est 9.",
)
