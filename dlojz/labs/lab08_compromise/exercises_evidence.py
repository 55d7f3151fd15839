"""Exercises of lab 08 on rates: shares of a peak, layouts in paired rounds, and the challenge of the fewest GPUs."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, shortest, significant
from dlojz.cost_model.step import SECONDS_PER_DAY
from dlojz.labs.kit.exercise import Said, Wrong
from dlojz.labs.kit.exercise_texts import MistakeWay, Texts
from dlojz.labs.kit.judges import Case, Numbers

TEXTS = Texts(__file__)

MODEL_OPERATIONS: Final = 6
"""Per parameter and token: 2 in forward, 4 in backward."""
RECOMPUTED: Final = 8
"""The same with a second forward."""


def shares_of_peak(parameters: float, tokens_per_s: float, gpus: int, peak_flops: float, recompute: bool) -> Numbers:
    """Return (MFU, HFU): the model's operations per second over the peak of all GPUs, and those really computed.

    Args:
        parameters: of the model.
        tokens_per_s: trained by all GPUs together.
        peak_flops: of one GPU, FLOP/s.
        recompute: whether activations are computed again.

    Source: Chowdhery et al. 2022 (PaLM, arXiv 2204.02311), appendix B.
    """
    # share of the peak for each operation per parameter and token
    rate = parameters * tokens_per_s / (gpus * peak_flops)
    return MODEL_OPERATIONS * rate, (RECOMPUTED if recompute else MODEL_OPERATIONS) * rate


def _training_told(case: Case) -> Said:
    parameters, tokens_per_s, gpus, peak, recompute = case
    return TEXTS.sentence(
        "shares-of-peak",
        "the case",
        parameters=significant(parameters),
        tokens_per_s=shortest(tokens_per_s),
        gpus=gpus,
        peak=significant(peak),
        recompute=recompute,
    )


SHARES = TEXTS.exercise(
    "shares-of-peak",
    shares_of_peak,
    cases=(
        (175e9, 140_000.0, 1024, 312e12, True),
        (22e9, 9_500.0, 8, 312e12, False),
        (7e9, 52_000.0, 16, 989e12, True),
        (875_000.0, 3_100.0, 4, 4e10, False),
    ),
    parts=(Said("the MFU", "la MFU"), Said("the HFU", "la HFU")),
    told=_training_told,
    mistakes={
        "the MFU counts recomputation": MistakeWay(
            "return MODEL_OPERATIONS → return (RECOMPUTED if recompute else MODEL_OPERATIONS)", part=0
        ),
        "the MFU always takes 8 operations": MistakeWay("return MODEL_OPERATIONS → return RECOMPUTED", part=0),
        "the MFU counts the forward alone": MistakeWay("return MODEL_OPERATIONS → return 2", part=0),
        "the MFU counts the backward alone": MistakeWay("return MODEL_OPERATIONS → return 4", part=0),
        "you divide by the peak of one GPU": MistakeWay("gpus * peak_flops → peak_flops", part=0),
        "the MFU is in per cent": MistakeWay("return MODEL_OPERATIONS → return 100 * MODEL_OPERATIONS", part=0),
        "the HFU leaves recomputation out": MistakeWay("RECOMPUTED → MODEL_OPERATIONS", part=1),
        "the HFU always takes 8 operations": MistakeWay("else MODEL_OPERATIONS → else RECOMPUTED", part=1),
        "the HFU repeats the backward too": MistakeWay("RECOMPUTED → 12", part=1),
    },
    tolerance=1e-6,
)


def compare_rounds(first_s: Sequence[float], second_s: Sequence[float]) -> Numbers:
    """Return (ratio, p): the median of second over first by round, and the sign test of the wins.

    p is that of the two-sided sign test: if neither were faster, each round that is no tie would be won by either with
    probability 1/2.

    Source: Conover 1999, "Practical Nonparametric Statistics", §3.4.
    """
    # within a round both meet the same disturbances, which the ratio cancels
    ratios = [second_round / first_round for first_round, second_round in zip(first_s, second_s, strict=True)]
    return statistics.median(ratios), min(1.0, 2 * _tail(*_wins(first_s, second_s)))


def _wins(first_s: Sequence[float], second_s: Sequence[float]) -> tuple[int, int]:
    """Rounds won by the one that won more, and rounds that are no ties."""
    pairs = list(zip(first_s, second_s, strict=True))
    first_wins, second_wins = sum(a < b for a, b in pairs), sum(a > b for a, b in pairs)
    return max(first_wins, second_wins), first_wins + second_wins


def _tail(wins: int, rounds: int) -> float:
    """Probability of at least so many heads."""
    # a fair coin: each of the 2^rounds results is as likely
    return sum(math.comb(rounds, k) for k in range(wins, rounds + 1)) / 2**rounds


def _one_way(first_s: Sequence[float], second_s: Sequence[float], sign: int) -> float:
    """How likely the first of the two, or the second, wins as many rounds or more."""
    pairs = list(zip(first_s, second_s, strict=True))
    wins, losses = sum(sign * (b - a) > 0 for a, b in pairs), sum(sign * (b - a) < 0 for a, b in pairs)
    return _tail(wins, wins + losses)


def _rounds() -> Iterator[Case]:
    """Noise that hits both of a round alike, and is larger than what sets them apart."""
    dice = random.Random(4)
    for count, edge in ((8, 1.05), (12, 1.02), (9, 1.0), (15, 0.97), (7, 1.3), (10, 1.01)):
        first_s, second_s = [], []
        for _ in range(count):
            weather = dice.choice((1.0, 1.1, 1.6, 2.3))
            first_s.append(round(0.02 * weather * dice.uniform(0.98, 1.02), 5))
            second_s.append(round(0.02 * edge * weather * dice.uniform(0.98, 1.02), 5))
        second_s[0] = first_s[0]  # a tie
        yield first_s, second_s


_WON = "*_wins(first_s, second_s)"

PAIRED = TEXTS.exercise(
    "paired-rounds",
    compare_rounds,
    cases=_rounds,
    parts=(Said("the ratio", "le rapport"), Said("p", "p")),
    told=Said("For the rounds {0} and {1}", "Pour les tours {0} et {1}"),
    mistakes={
        "your ratio is the other way round": MistakeWay(
            "second_round / first_round → first_round / second_round", part=0
        ),
        "ratio of unpaired medians": MistakeWay(
            "statistics.median(ratios) → statistics.median(second_s) / statistics.median(first_s)", part=0
        ),
        "ratio of unpaired means": MistakeWay(
            "statistics.median(ratios) → statistics.fmean(second_s) / statistics.fmean(first_s)", part=0
        ),
        "ratio of the best times": MistakeWay("statistics.median(ratios) → min(second_s) / min(first_s)", part=0),
        "you take the mean of the ratios": MistakeWay("statistics.median → statistics.fmean", part=0),
        "your p is one-sided": MistakeWay("2 * _tail → _tail", part=1),
        "p above 1": MistakeWay("min(1.0, → (", part=1),
        "you count ties among the rounds": MistakeWay(f"{_WON} → _wins(first_s, second_s)[0], len(first_s)", part=1),
        "you take the probability of exactly so many wins": MistakeWay(
            f"_tail({_WON}) → math.comb(*_wins(first_s, second_s)[::-1]) / 2 ** _wins(first_s, second_s)[1]", part=1
        ),
        "you return 1 − p": MistakeWay("min(1.0, → 1 - min(1.0,", part=1),
        **{
            key: MistakeWay(lambda first_s, second_s, p=p: p(*_wins(first_s, second_s)), part=1)
            for key, p in {
                "you give the share of the rounds won": lambda wins, n: wins / n,
                "that is how likely as many tosses in a row come down alike": lambda wins, n: 0.5**wins,
                "that is how likely one wins every round": lambda wins, n: 2 * 0.5**n,
                "you count only results that are more one-sided": lambda wins, n: min(1.0, 2 * _tail(wins + 1, n)),
            }.items()
        },
        "the other side is not counted": tuple(
            MistakeWay(lambda first_s, second_s, sign=sign: _one_way(first_s, second_s, sign), part=1)
            for sign in (1, -1)
        ),
        "you take differences in seconds": MistakeWay(
            "second_round / first_round → second_round - first_round", part=0
        ),
        "you take the geometric mean of the ratios": MistakeWay(
            "statistics.median → statistics.geometric_mean", part=0
        ),
        "upper middle in place of the median": MistakeWay(
            "statistics.median(ratios) → sorted(ratios)[len(ratios) // 2]", part=0
        ),
        "each list sorted by itself": MistakeWay(
            "zip(first_s, second_s, → zip(sorted(first_s), sorted(second_s),", part=0
        ),
    },
    tolerance=1e-6,
)


DEADLINES: Final = (45.0, 30.0, 19.0)
"""Days that the challenge allows."""
CHALLENGE_MODEL, CHALLENGE_SITE, CHALLENGE_BATCH, CHALLENGE_TOKENS = "megatron-18b", "jean_zay_a100", 512, 100e9
CHALLENGE_GPUS: Final = tuple(range(8, 129, 8))
ENGINE: Final = "megatron-core"
SEQUENCE: Final = 2048
FIELDS: Final = ("dp", "tp", "pp", "zero", "micro_batch", "checkpointing")


def days_of(estimated_s: float) -> float:
    """Compute the days of the challenge's training from the seconds of a step."""
    # steps = tokens / (samples × tokens of a sample)
    return estimated_s * CHALLENGE_TOKENS / (CHALLENGE_BATCH * SEQUENCE) / SECONDS_PER_DAY


def _fewest(answer: Callable[..., Any]) -> float:
    """Add up the GPUs of the layouts for all deadlines."""
    from dlojz.planner.ask import plan

    total = 0
    for days in DEADLINES:
        layout = answer(days)
        if not isinstance(layout, Mapping) or set(layout) != set(FIELDS):
            raise TEXTS.wrong("fewest-gpus", "no such dictionary", FIELDS=", ".join(FIELDS))
        try:
            gpus = int(layout["dp"]) * int(layout["tp"]) * int(layout["pp"])
        except (TypeError, ValueError):
            raise Wrong("dp, tp and pp are whole numbers.", "dp, tp et pp sont des nombres entiers.") from None
        if gpus not in CHALLENGE_GPUS:
            raise TEXTS.wrong("fewest-gpus", "another number of GPUs", gpus=gpus, CHALLENGE_GPUS=CHALLENGE_GPUS[-1])
        try:
            # simulate=1: the fastest layout alone; the chosen one is judged by its own estimate
            challenge_plan = plan(CHALLENGE_MODEL, CHALLENGE_SITE, gpus, CHALLENGE_BATCH, engines=ENGINE, simulate=1)
            took = days_of(challenge_plan.choose(**layout).estimated_s)
        except LabError as error:
            raise Wrong(str(error), str(error)) from None
        if took > days:
            late = decimal(took, 1)
            raise TEXTS.wrong("fewest-gpus", "too late", days=shortest(days), late=late)
        total += gpus
    return float(total)


FEWEST_GPUS = TEXTS.challenge("fewest-gpus", _fewest, target=80)
