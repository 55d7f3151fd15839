"""Exercises of lab 03 on speed: efficiency of strong and weak scaling, MFU; and the challenge of an all-reduce.

All times are computed from what a case gives, none is measured: a verdict depends on no machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import Judge, expect_numbers
from dlojz.labs.kit.rank_judges import run_on_ranks
from dlojz.labs.lab03_data_parallel.exercises_ring import ring_seconds

if TYPE_CHECKING:
    from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

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
    communication_s = sum(
        ring_seconds(message_bytes, size, alpha_s, beta_s_per_byte) for message_bytes in gradient_bytes
    )
    # Strong: one batch over all ranks; weak: one batch on each. The gradients, and so the ring's time, are the same.
    return alone_s / size / (alone_s / size + communication_s), alone_s / (alone_s + communication_s)


EFFICIENCY = TEXTS.exercise(
    "efficiency",
    efficiencies,
    cases=(
        (256, 2, 1e-3, [4_000_000, 4_096, 260_000], 1e-3, 1e-9),
        (64, 4, 5e-4, [65_536, 512], 2e-3, 5e-8),
        (1024, 8, 2e-4, [8_000_000, 2_000_000, 40_960], 1e-4, 2e-9),
        (32, 1, 1e-3, [1_000], 1e-3, 1e-9),
    ),
    read=lambda answer: expect_numbers(answer, _EFFICIENCIES),
    parts=_EFFICIENCIES,
    mistakes={
        "communication overlaps the computation": (
            "(alone_s / size + communication_s) → max(alone_s / size, communication_s); "
            "(alone_s + communication_s) → max(alone_s, communication_s)"
        ),
        "the two are swapped": lambda *case: efficiencies(*case)[::-1],
        "speed-ups in place of efficiencies": (
            "return alone_s / size → return alone_s; , alone_s / (alone_s → , size * alone_s / (alone_s"
        ),
        "both are the efficiency of strong scaling": lambda *case: (efficiencies(*case)[0],) * 2,
        "both are the efficiency of weak scaling": lambda *case: (efficiencies(*case)[1],) * 2,
        "you send all gradients as one message": "in gradient_bytes → in [sum(gradient_bytes)]",
        "you divide the communication by size": "communication_s = sum( → communication_s = 1 / size * sum(",
        "the communication is missing": lambda *case: (1.0, 1.0),
        "both turned over": lambda *case: tuple(1 / efficiency for efficiency in efficiencies(*case)),
    },
)


def mfu(images_per_s: float, forward_flops: float, processes: int, peak_flops: float) -> float:
    """Model FLOPs utilization: the FLOP/s that the model needs, as a share of the peak of all processes.

    Source: Chowdhery et al. 2022, PaLM (arXiv 2204.02311), §4.1: forward and backward count, recomputation does not.
    """
    return 3 * forward_flops * images_per_s / (processes * peak_flops)


MFU = TEXTS.exercise(
    "mfu",
    mfu,
    cases=(
        (1000.0, 8e9, 8, 312e12),
        (250.0, 4.4e6, 2, 5e10),
        (90.0, 1e9, 1, 4e12),
    ),
    mistakes={
        "you multiply by the number of processes": "/ (processes * peak_flops) → * processes / peak_flops",
        "only the forward pass counts": "3 * → 1 *",
        "backward counts as much as forward": "3 * → 2 *",
        "recomputed forward counted too": "3 * → 4 *",
        "the peak of one process only": "processes * →",
        "in percent": "3 * → 300 *",
        "turned over": lambda rate, flops, processes, peak: 1 / mfu(rate, flops, processes, peak),
        "FLOP/s not divided by the peak": "* peak_flops →",
    },
)

RANKS, ELEMENTS = 4, 24


def _part(rank: int, seed: int) -> Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(100 * seed + rank))


def _all(seed: int) -> Tensor:
    return sum((_part(rank, seed) for rank in range(1, RANKS)), _part(0, seed))


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Tensor]]:
    x = _part(rank, seed)
    answer(x)
    return None, {"sum": x}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """Sums are right; hold what was sent to the rules."""
    # Elements that a ring sends per rank: the challenge is to need fewer messages, not more bytes.
    limit = 2 * (size - 1) * ELEMENTS // size
    for answer in answers:
        library = [call["op"] for call in answer.calls if call["op"] not in ("send", "recv")]
        numel = sum(call["numel"] for call in answer.calls if call["op"] == "send")
        if library or not numel:
            raise TEXTS.wrong(
                "few-messages", "a collective is called", rank=answer.rank, collective=(library or ["all_reduce"])[0]
            )
        if numel > limit:
            raise TEXTS.wrong(
                "few-messages",
                "more elements sent than the rules allow",
                rank=answer.rank,
                numel=numel,
                ELEMENTS=ELEMENTS,
                limit=limit,
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
        # The slowest rank decides, so the score is the rank that sends most messages.
        return float(max(sum(call["op"] == "send" for call in rank_answer.calls) for rank_answer in answers))


FEW_MESSAGES = TEXTS.challenge("few-messages", _FewMessages(), target=4)
