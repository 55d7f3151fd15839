"""Exercises of lab 05 on orders: the bubble, 1F1B, what schedules keep, a memory limit, a deadlock, a split backward.

An order is judged by what the simulator makes of it, never by comparing it with another text; an answer under a memory
limit is held to the proven optimum, from the stored table. What cannot be read is refused by a sentence that names the
first thing wrong.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import say, shortest
from dlojz.labs.kit.exercise import Said, Wrong, kind_of
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts
from dlojz.labs.kit.judges import refuse_nothing
from dlojz.pipeline.analysis import fraction, overhead, total_time
from dlojz.pipeline.orders.zero_bubble import list_schedule
from dlojz.pipeline.schedule import Action, Costs, Schedule, parse_action
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.shortest_schedule import optimum
from dlojz.pipeline.simulator import peak_activations, simulate
from dlojz.pipeline.validity import problems

TEXTS = Texts(__file__)

MAX_ACTIONS = 10_000
"""A list that grows beyond this is a loop gone wrong."""
_SHORT = re.compile(r"[FBIW]\d{1,9}")


def read_order(texts: Any, stage: int) -> list[Action]:
    """One rank's order, from texts such as `F0` (or `2F0`, with the stage) or from actions.

    Args:
        texts: what the student's function returned.
        stage: the stage that `F0` means where no stage is written.

    Raises:
        Wrong: for nothing, for something that is no list, or for an entry that is no action.
    """
    refuse_nothing(texts)
    if isinstance(texts, str | Action) or not isinstance(texts, Iterable):
        raise TEXTS.wrong("shared", "no list of actions", kind=kind_of(texts))
    order = []
    for entry in texts:
        order.append(_action(entry, stage))
        if len(order) > MAX_ACTIONS:
            raise TEXTS.wrong("shared", "too many actions", MAX_ACTIONS=MAX_ACTIONS)
    return order


def _action(entry: Any, stage: int) -> Action:
    if isinstance(entry, Action):
        return entry
    if isinstance(entry, str):
        text = entry.strip()
        try:
            return parse_action(f"{stage}{text}" if _SHORT.fullmatch(text) else text)
        except LabError:
            raise TEXTS.wrong("shared", "no action", text=text) from None
    raise TEXTS.wrong("shared", "an entry that is no text", kind=kind_of(entry))


def read_schedule(answer: Any, ranks: int, micro_batches: int) -> Schedule:
    """A whole schedule of one stage per rank: a `Schedule`, or one list of actions per rank.

    Raises:
        Wrong: as `read_order`, and for another number of ranks, stages or micro-batches than asked for.
    """
    if isinstance(answer, Schedule):
        if (answer.ranks, answer.stages, answer.micro_batches) != (ranks, ranks, micro_batches):
            raise TEXTS.wrong(
                "shared",
                "another number of ranks, stages or micro-batches",
                ranks=ranks,
                micro_batches=micro_batches,
                schedule=answer,
            )
        return answer
    refuse_nothing(answer)
    if isinstance(answer, str) or not isinstance(answer, Iterable):
        raise TEXTS.wrong("shared", "no list per rank", kind=kind_of(answer))
    rows = list(answer)
    if len(rows) != ranks:
        raise TEXTS.wrong("shared", "another number of lists", ranks=ranks, rows_count=len(rows))
    return schedule_from([read_order(row, rank) for rank, row in enumerate(rows)], micro_batches)


def schedule_from(orders: list[list[Action]], micro_batches: int) -> Schedule:
    """A schedule of one stage per rank, not checked yet."""
    return Schedule.of("custom", orders, list(range(len(orders))), micro_batches)


def refuse_invalid(schedule: Schedule, memory_limit: float | None = None) -> None:
    """Refuse a schedule that cannot be executed, or keeps too much.

    Raises:
        Wrong: with the size of the case and the first problem.
    """
    violations = problems(schedule, memory_limit)
    if violations:
        raise Wrong(f"{case_of(schedule)}{capital(violations[0])}")


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


PIPELINE_BUBBLE = TEXTS.exercise(
    "pipeline-bubble",
    pipeline_step,
    cases=_pipelines,
    parts=(Said("the length", "la durée"), Said("the fraction", "la fraction"), Said("the overhead", "le surcoût")),
    mistakes={
        "your length counts the bubble twice": MistakeWay(lambda p, m, f, b: (m + 2 * (p - 1)) * (f + b), part=0),
        "that length is the naive way's": MistakeWay(lambda p, m, f, b: m * p * (f + b), part=0),
        "that length is the work of one stage": MistakeWay(lambda p, m, f, b: m * (f + b), part=0),
        "the length is one too many": MistakeWay(lambda p, m, f, b: (m + p) * (f + b), part=0),
        "the length leaves out the draining": MistakeWay(lambda p, m, f, b: (m + p - 1) * f + m * b, part=0),
        "the backward pass is missing": MistakeWay(lambda p, m, f, b: (m + p - 1) * f, part=0),
        "your fraction is the overhead": MistakeWay(lambda p, m, f, b: overhead(p, m), part=1),
        "your fraction is the share of computing": MistakeWay(lambda p, m, f, b: 1 - fraction(p, m), part=1),
        "your fraction is a time": MistakeWay(lambda p, m, f, b: (p - 1) * (f + b), part=1),
        "your overhead is the fraction once more": MistakeWay(lambda p, m, f, b: fraction(p, m), part=2),
        "your overhead is all time over work": MistakeWay(lambda p, m, f, b: 1 + overhead(p, m), part=2),
    },
)


_ORDER_SIZES = ((4, 8), (2, 4), (3, 7), (1, 3), (4, 2), (8, 16), (5, 5))
"""Ranks and micro-batches: fewer micro-batches than ranks, and one rank, among them."""


def _check_order(answer: Callable[..., Any], ranks: int, micro_batches: int) -> None:
    orders = [read_order(answer(rank, ranks, micro_batches), rank) for rank in range(ranks)]
    schedule = schedule_from(orders, micro_batches)
    reference = build("1f1b", ranks, micro_batches)
    if schedule.orders != reference.orders:
        slip = _known(schedule)
        if slip:
            raise Wrong(f"{case_of(schedule)}{slip}")
        refuse_invalid(schedule)
        _compare(schedule, reference)


def _known(schedule: Schedule) -> Said | None:
    """The usual slips, by their order."""
    size = (schedule.ranks, schedule.micro_batches)
    # Per rank: forwards before the first action of another kind, which is its warm-up.
    forwards = [next((n for n, action in enumerate(order) if action.kind != "F"), 0) for order in schedule.orders]
    if schedule.orders == build("gpipe", *size).orders:
        return TEXTS.sentence("one-f-one-b", "this is GPipe")
    if schedule.ranks > 1 and forwards == [min(rank + 1, size[1]) for rank in range(schedule.ranks)] != [
        min(schedule.ranks - rank, size[1]) for rank in range(schedule.ranks)
    ]:
        return TEXTS.sentence("one-f-one-b", "warm-up the wrong way round")
    if schedule.ranks > 1 and forwards == [min(schedule.ranks - rank - 1, size[1]) for rank in range(schedule.ranks)]:
        return TEXTS.sentence("one-f-one-b", "warm-up one forward short")
    return None


def _compare(schedule: Schedule, reference: Schedule) -> None:
    """Valid; but is it as short, and does it keep as little?"""
    peaks, right = peak_activations(schedule), peak_activations(reference)
    for rank, (peak, limit) in enumerate(zip(peaks, right, strict=True)):
        if peak > limit:
            s = "s" if limit > 1 else ""
            raise TEXTS.wrong(
                "one-f-one-b",
                "keeps more than 1F1B",
                case=case_of(schedule),
                rank=rank,
                peak=shortest(peak),
                limit=shortest(limit),
                s=s,
            )
    length, best = simulate(schedule).makespan, simulate(reference).makespan
    if length > best:
        raise Wrong(f"{case_of(schedule)}{_longer(schedule, reference, length, best)}")


def _longer(schedule: Schedule, reference: Schedule, length: float, best: float) -> Said:
    """How long a valid order takes, and the first rank that goes back in another order, or too early."""
    slow = TEXTS.sentence("one-f-one-b", "longer than possible", length=shortest(length), best=shortest(best))
    for rank, (order, right) in enumerate(zip(schedule.orders, reference.orders, strict=True)):
        went_back = [action.micro_batch for action in order if action.kind == "B"]
        if went_back != sorted(went_back):
            later, sooner = next(pair for pair in pairwise(went_back) if pair[0] > pair[1])
            return TEXTS.sentence(
                "one-f-one-b", "backwards in another order", slow=slow, rank=rank, later=later, sooner=sooner
            )
        forwards, expected = (
            next(n for n, action in enumerate(actions) if action.kind == "B") for actions in (order, right)
        )
        if forwards < expected:
            s = "s" if forwards > 1 else ""
            return TEXTS.sentence(
                "one-f-one-b", "turns back early", slow=slow, rank=rank, forwards=forwards, s=s, expected=expected
            )
    return TEXTS.sentence("one-f-one-b", "a rank waits although it could work", slow=slow)


ONE_F_ONE_B = TEXTS.exercise("one-f-one-b", cases=_ORDER_SIZES, trial=_check_order)


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


ORDER_KEPT = TEXTS.exercise(
    "kept-micro-batches",
    kept,
    cases=_places,
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
            + TEXTS.say("memory-cap", "too many micro-batches at once", rank=rank, peaks=shortest(max(peaks)))
        )
    length, best = simulate(schedule).makespan, optimum(ranks, micro_batches, memory_limit=limit).value
    if length > best:
        forward_first = list_schedule(ranks, micro_batches, priority="forward-first", cap=limit)
        waits = schedule.orders == forward_first.orders
        raise Wrong(f"{_case(schedule, limit)}{_too_long(length, best, max(peaks), limit, waits)}")


def _case(schedule: Schedule, limit: int) -> str:
    text = case_of(schedule).removesuffix(": ").rstrip()
    return say(en=f"{text}, {limit} of them kept at most: ", fr=f"{text}, dont {limit} gardés au plus : ")


def _too_long(length: float, best: float, peak: float, limit: int, forwards_first: bool) -> Said:
    slow = TEXTS.sentence("memory-cap", "longer than possible", length=shortest(length), best=shortest(best))
    if forwards_first:
        return TEXTS.sentence("memory-cap", "forwards go first", slow=slow)
    if peak < limit:
        as_without = say(en=", as without a pipeline", fr=", comme sans pipeline") if peak <= 1 else ""
        several = "es" if peak > 1 else ""
        return TEXTS.sentence(
            "memory-cap",
            "memory is left unused",
            slow=slow,
            peak=shortest(peak),
            several=several,
            as_without=as_without,
        )
    return TEXTS.sentence("memory-cap", "a rank waits somewhere", slow=slow)


MEMORY_CAP = TEXTS.exercise("memory-cap", cases=CASES, trial=_check_cap)


RANKS, MICRO_BATCHES = 2, 4
LIMIT = 3
"""Micro-batches that a rank may keep: GPipe, which never deadlocks, keeps 4."""
BLOCKING = Costs(sends="rendezvous")


def _check_unblocked(answer: Callable[..., Any]) -> None:
    schedule = read_schedule(answer(), RANKS, MICRO_BATCHES)
    refuse_invalid(schedule)
    try:
        # With rendezvous a sender waits until the receiver has the message; a cycle of such waits raises LabError.
        length = simulate(schedule, BLOCKING).makespan
    except LabError as error:
        is_1f1b = schedule.orders == build("1f1b", RANKS, MICRO_BATCHES).orders
        raise Wrong(
            (say(en="That is 1F1B still. ", fr="C’est encore 1F1B. ") if is_1f1b else "") + _first_sentence(str(error))
        ) from None
    peak = max(peak_activations(schedule))
    if peak > LIMIT:
        raise TEXTS.wrong("unblock", "too many micro-batches are kept", peak=shortest(peak), LIMIT=LIMIT)
    slow = simulate(build("naive", RANKS, MICRO_BATCHES)).makespan
    if length >= slow:
        raise TEXTS.wrong("unblock", "as long as without a pipeline", length=shortest(length))


def _first_sentence(text: str) -> str:
    """The cycle, without the advice that follows it, which is the answer to another question."""
    return text[0].upper() + text[1:].split(". ", 1)[0] + "."


UNBLOCK = TEXTS.exercise("unblock", cases=((),), trial=_check_unblocked)


BEST, DEADLOCK_KEPT = 13, 2
"""The proven optimum of 2 ranks and 4 micro-batches, F = I = W = 1, and what 1F1B's rank 0 keeps."""


def _check_split(answer: Callable[..., Any]) -> None:
    schedule = read_schedule(answer(), RANKS, MICRO_BATCHES)
    refuse_invalid(schedule)
    if not schedule.splits_backward:
        raise TEXTS.wrong("zero-bubble", "backwards are whole")
    # A second time, now with the limit: a schedule that cannot run is told so before one that keeps too much.
    refuse_invalid(schedule, DEADLOCK_KEPT)
    length = simulate(schedule).makespan
    if length > BEST:
        raise TEXTS.wrong(
            "zero-bubble",
            "not the shortest",
            DEADLOCK_KEPT=DEADLOCK_KEPT,
            length=shortest(length),
            BEST=BEST,
            schedule=_who_waits(schedule),
        )


def _who_waits(schedule: Schedule) -> Said:
    """The first gap that a pending weight gradient could have filled, or else the idlest rank."""
    timeline = simulate(schedule)
    rank = max(range(schedule.ranks), key=lambda candidate: timeline.idle[candidate])
    return TEXTS.sentence("shared", "who waits", rank=rank, idle=shortest(timeline.idle[rank]))


ZERO_BUBBLE = TEXTS.exercise("zero-bubble", cases=((),), trial=_check_split)


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
        halves = TEXTS.sentence("frugal", "backwards in two halves")
        advice = _who_waits(schedule) if schedule.splits_backward else halves
        raise TEXTS.wrong(
            "frugal", "longer than 1F1B", length=shortest(length), allowed=shortest(allowed), advice=advice
        )
    return float(sum(peak_activations(schedule)))


FRUGAL = TEXTS.challenge("frugal", _sum_of_peaks, target=FEWEST)
