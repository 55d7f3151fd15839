"""Exercises of lab 03 on speed: efficiency of strong and weak scaling, MFU; and the challenge of an all-reduce.

All times are computed from what a case gives, none is measured: a verdict depends on no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from dlojz.labs.kit.exercise import Challenge, Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, expect_numbers
from dlojz.labs.kit.rank_judges import run_on_ranks
from dlojz.labs.lab03_data_parallel.exercises_ring import ring_seconds

if TYPE_CHECKING:
    from torch import Tensor

    from dlojz.processes.forks import RankAnswer

_EFFICIENCIES = (
    Said("the efficiency of strong scaling", "l’efficacité en scalabilité forte"),
    Said("the efficiency of weak scaling", "l’efficacité en scalabilité faible"),
)


def efficiencies(
    batch: int, size: int, image_s: float, gradient_bytes: Sequence[int], alpha_s: float, beta_s_per_byte: float
) -> tuple[float, float]:
    """Efficiency of strong and of weak scaling, where a ring all-reduce of each gradient follows the backward pass.

    Source: Amdahl 1967 (fixed work), Gustafson 1988 (work that grows with the processes); the ring's time as above.
    """
    alone_s = batch * image_s
    communication_s = sum(ring_seconds(each, size, alpha_s, beta_s_per_byte) for each in gradient_bytes)
    return alone_s / size / (alone_s / size + communication_s), alone_s / (alone_s + communication_s)


def _steps() -> Iterator[tuple[int, int, float, list[int], float, float]]:
    yield 256, 2, 1e-3, [4_000_000, 4_096, 260_000], 1e-3, 1e-9
    yield 64, 4, 5e-4, [65_536, 512], 2e-3, 5e-8
    yield 1024, 8, 2e-4, [8_000_000, 2_000_000, 40_960], 1e-4, 2e-9
    yield 32, 1, 1e-3, [1_000], 1e-3, 1e-9


def _speed_ups(batch: int, size: int, *rest: Any) -> tuple[float, float]:
    strong, weak = efficiencies(batch, size, *rest)
    return size * strong, size * weak


def _one_message(batch: int, size: int, image_s: float, gradient_bytes: Sequence[int], *rest: float) -> Any:
    return efficiencies(batch, size, image_s, [sum(gradient_bytes)], *rest)


def _shared(batch: int, size: int, image_s: float, gradient_bytes: Sequence[int], alpha_s: float, beta: float) -> Any:
    seconds = sum(ring_seconds(each, size, alpha_s, beta) for each in gradient_bytes) / size
    alone_s = batch * image_s
    return alone_s / size / (alone_s / size + seconds), alone_s / (alone_s + seconds)


def _overlapped(
    batch: int, size: int, image_s: float, gradient_bytes: Sequence[int], alpha_s: float, beta: float
) -> Any:
    seconds = sum(ring_seconds(each, size, alpha_s, beta) for each in gradient_bytes)
    alone_s = batch * image_s
    return alone_s / size / max(alone_s / size, seconds), alone_s / max(alone_s, seconds)


EFFICIENCY = Exercise(
    id="efficiency",
    title=Said("strong and weak scaling", "scalabilité forte et faible"),
    judge=Judge(
        efficiencies,
        cases=_steps,
        read=lambda given: expect_numbers(given, _EFFICIENCIES),
        parts=_EFFICIENCIES,
        mistakes=(
            Mistake(
                _overlapped,
                "You take the longer of computation and communication, as if they overlapped: here one follows the "
                "other, so add them.",
                "Vous prenez la plus longue du calcul et de la communication, comme s’ils se recouvraient : ici, "
                "l’une suit l’autre ; additionnez-les.",
            ),
            Mistake(
                lambda *case: efficiencies(*case)[::-1],
                "The two are swapped: strong scaling, whose batch is divided, comes first.",
                "Les deux sont échangées : la scalabilité forte, où le batch est partagé, vient en premier.",
            ),
            Mistake(
                _speed_ups,
                "Those are speed-ups; efficiency is the speed-up divided by the number of processes, 1 at best.",
                "Ce sont des accélérations ; l’efficacité est l’accélération divisée par le nombre de processus, 1 au "
                "mieux.",
            ),
            Mistake(
                lambda *case: (efficiencies(*case)[0],) * 2,
                "Both are the efficiency of strong scaling; in weak scaling every process reads `batch` images.",
                "Toutes deux sont l’efficacité en scalabilité forte ; en scalabilité faible, chaque processus lit "
                "`batch` images.",
            ),
            Mistake(
                lambda *case: (efficiencies(*case)[1],) * 2,
                "Both are the efficiency of weak scaling; in strong scaling a process reads batch / size images.",
                "Toutes deux sont l’efficacité en scalabilité faible ; en scalabilité forte, un processus lit "
                "batch / size images.",
            ),
            Mistake(
                _one_message,
                "You send all gradients as one message; here each parameter has its own all-reduce, with its own "
                "latencies.",
                "Vous envoyez tous les gradients en un message ; ici chaque paramètre a son all-reduce, et ses "
                "latences.",
            ),
            Mistake(
                _shared,
                "You divide the communication by `size`, but it goes on at the same time on all ranks: its seconds "
                "are not divided.",
                "Vous divisez la communication par `size`, or elle a lieu en même temps sur tous les rangs : ses "
                "secondes ne se partagent pas.",
            ),
            Mistake(
                lambda *case: (1.0, 1.0),
                "The communication is missing: without it, both would be 1.",
                "La communication manque : sans elle, les deux vaudraient 1.",
            ),
            Mistake(
                lambda *case: tuple(1 / each for each in efficiencies(*case)),
                "Turned over: an efficiency is 1 at best.",
                "C’est l’inverse : une efficacité vaut 1 au mieux.",
            ),
        ),
    ),
    praise_en="Right: the seconds of communication stay the same, so they weigh more where each process computes less.",
    praise_fr="Exact : les secondes de communication ne changent pas, et pèsent plus lourd quand chaque processus "
    "calcule moins.",
    hint_en="Write down the seconds of one step: on one process, then on `size` of them in each of the two cases. "
    "Which part of a step changes with the number of images?",
    hint_fr="Écrivez les secondes d’un pas : sur un processus, puis sur `size` dans chacun des deux cas. Quelle partie "
    "du pas change avec le nombre d’images ?",
    nearer_en="The communication is the sum of ring_seconds over gradient_bytes in both cases. Strong: the speed-up is "
    "the old time over the new one, to be divided by size. Weak: the old time over the new one.",
    nearer_fr="La communication est la somme de ring_seconds sur gradient_bytes dans les deux cas. Forte : "
    "l’accélération est l’ancien temps sur le nouveau, à diviser par size. Faible : l’ancien temps sur le nouveau.",
)


def mfu(images_per_s: float, forward_flops: float, processes: int, peak_flops: float, *, passes: float = 3) -> float:
    """Model FLOPs utilization: the FLOP/s that the model needs, as a share of the peak of all processes.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), §4.1: forward and backward count, recomputation does not.
    """
    return passes * forward_flops * images_per_s / (processes * peak_flops)


def _utilizations() -> Iterator[tuple[float, float, int, float]]:
    yield 1000.0, 8e9, 8, 312e12
    yield 250.0, 4.4e6, 2, 5e10
    yield 90.0, 1e9, 1, 4e12


MFU = Exercise(
    id="mfu",
    title=Said("the share of the peak", "la part de la puissance crête"),
    judge=Judge(
        mfu,
        cases=_utilizations,
        mistakes=(
            Mistake(
                lambda rate, flops, processes, peak: processes * processes * mfu(rate, flops, processes, peak),
                "You multiply by the number of processes: images_per_s is the rate of all of them together, and the "
                "peak is that of one, so divide.",
                "Vous multipliez par le nombre de processus : images_per_s est leur débit à tous, et la crête celle "
                "d’un seul ; divisez donc.",
            ),
            Mistake(
                partial(mfu, passes=1),
                "Only the forward pass counts here; the backward pass computes two gradients for each product, twice "
                "the forward's operations.",
                "Seule la passe avant compte ici ; la passe arrière calcule deux gradients par produit, soit deux fois "
                "les opérations de la passe avant.",
            ),
            Mistake(
                partial(mfu, passes=2),
                "Backward counts as much as forward here; it computes the gradients of weights and of inputs: twice.",
                "La passe arrière compte ici autant que la passe avant ; elle calcule les gradients des poids et ceux "
                "des entrées : le double.",
            ),
            Mistake(
                partial(mfu, passes=4),
                "Four times the forward counts a forward that is recomputed; MFU leaves it out.",
                "Quatre fois la passe avant compte une passe avant recalculée ; la MFU ne la compte pas.",
            ),
            Mistake(
                lambda rate, flops, processes, peak: mfu(rate, flops, 1, peak),
                "images_per_s is the rate of all processes together, and all of them could run at the peak: divide by "
                "their number.",
                "images_per_s est le débit de tous les processus réunis, qui pourraient tous atteindre la crête : "
                "divisez par leur nombre.",
            ),
            Mistake(
                lambda rate, flops, processes, peak: 100 * mfu(rate, flops, processes, peak),
                "That is in percent; a share between 0 and 1 is expected.",
                "C’est en pour cent ; on attend une part entre 0 et 1.",
            ),
            Mistake(
                lambda rate, flops, processes, peak: 1 / mfu(rate, flops, processes, peak),
                "Turned over: the operations done per second stand above the peak.",
                "C’est l’inverse : les opérations faites par seconde se divisent par la crête.",
            ),
            Mistake(
                lambda rate, flops, processes, peak: 3 * flops * rate / processes,
                "Those are the FLOP/s of one process; divide them by the peak.",
                "Ce sont les FLOP/s d’un processus ; divisez-les par la crête.",
            ),
        ),
    ),
    praise_en="Right: what the model needs, over what the machine could do.",
    praise_fr="Exact : ce dont le modèle a besoin, sur ce que la machine pourrait faire.",
    hint_en="How many operations does one image need in a training step, as a multiple of its forward pass?",
    hint_fr="Combien d’opérations une image demande-t-elle dans un pas d’entraînement, en multiple de sa passe avant ?",
    nearer_en="Backward takes twice the operations of forward. Operations per second, over processes times peak_flops.",
    nearer_fr="La passe arrière demande deux fois les opérations de la passe avant. Opérations par seconde, sur "
    "processes fois peak_flops.",
)

RANKS, ELEMENTS = 4, 24


def _part(rank: int, seed: int) -> Tensor:
    import torch

    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * seed + rank))


def _all(seed: int) -> Tensor:
    return sum((_part(other, seed) for other in range(1, RANKS)), _part(0, seed))


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Tensor]]:
    x = _part(rank, seed)
    answer(x)
    return None, {"sum": x}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """Sums are right; hold what was sent to the rules."""
    limit = 2 * (size - 1) * ELEMENTS // size
    for one in answers:
        library = [call["op"] for call in one.calls if call["op"] not in ("send", "recv")]
        sent = sum(call["numel"] for call in one.calls if call["op"] == "send")
        if library or not sent:
            raise Wrong(
                en=f"The sum is right, but the rules allow messages between two ranks only, and rank {one.rank} calls "
                f"{(library or ['all_reduce'])[0]}.",
                fr=f"La somme est juste, mais les règles n’admettent que des messages entre deux rangs, et le rang "
                f"{one.rank} appelle {(library or ['all_reduce'])[0]}.",
            )
        if sent > limit:
            raise Wrong(
                en=f"The sum is right, but rank {one.rank} sends {sent} elements of a vector of {ELEMENTS}; the rules "
                f"allow as many as a ring sends, {limit}.",
                fr=f"La somme est juste, mais le rang {one.rank} envoie {sent} éléments pour un vecteur de "
                f"{ELEMENTS} ; les règles en admettent autant que dans un anneau, soit {limit}.",
            )


_JUDGED = Judge(
    lambda rank, size, seed: {"sum": _all(seed)},
    cases=((RANKS, 31),),
    on_ranks=True,
    trial=_trial,
    local=lambda rank, size, seed: {"sum": _part(rank, seed)},
    labels={"sum": Said("the sum", "la somme")},
    inspect=_inspect,
)


class _FewMessages:
    """Judge of the challenge: rules first, then the most messages that one rank sends."""

    on_ranks = True
    cases = ((RANKS, 31),)

    def __call__(self, answer: Callable[..., Any]) -> float:
        _JUDGED(answer)
        ((ranks, seed),) = self.cases
        answers = run_on_ranks(_trial, answer, ranks, seed=seed)
        return float(max(sum(call["op"] == "send" for call in one.calls) for one in answers))


FEW_MESSAGES = Challenge(
    id="few-messages",
    title=Said("challenge: an all-reduce in few messages", "défi : un all-reduce en peu de messages"),
    judge=_FewMessages(),
    praise_en="As few bytes as the ring, and fewer latencies.",
    praise_fr="Aussi peu d’octets que l’anneau, et moins de latences.",
    hint_en="The ring speaks to one neighbour only. Whom else could a rank exchange with, and how much would both then "
    "still have to sum?",
    hint_fr="L’anneau ne parle qu’à un voisin. Avec qui d’autre un rang pourrait-il échanger, et que resterait-il "
    "alors à sommer pour les deux ?",
    nearer_en="Let two ranks exchange halves: each then answers for the sum of one half only. Go on with half of that, "
    "then walk the same way back.",
    nearer_fr="Que deux rangs échangent des moitiés : chacun ne répond alors plus que de la somme d’une moitié. "
    "Continuez avec la moitié de celle-ci, puis refaites le chemin à rebours.",
    target=4,
    unit_en="messages sent by a rank",
    unit_fr="messages envoyés par un rang",
)
