"""The exact cut into stages: known answers, every other cut tried, ties, floats, refusals."""

import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import combinations, pairwise

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.pipeline.partition import Partition, exact, total_time

BERT_LARGE = [52_559_872, *[12_596_224] * 24, 0, 52_559_872]


@pytest.mark.parametrize(
    "weights, stages, bottleneck, bounds",
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], 3, 17, [0, 5, 7, 9]),  # Skiena, the example of the linear partition problem
        ([1, 2, 3, 4, 5, 6], 2, 11, [0, 4, 6]),  # torchgpipe's tests
        ([0, 1, 2, 3, 3, 3], 4, 3, [0, 3, 4, 5, 6]),  # DeepSpeed's tests, as the next two
        ([0.0, 1.1, 1.9, 3.0, 30.0], 2, 30, [0, 4, 5]),
        ([0.0, 1.1, 30.0, 3.0], 3, 30, [0, 2, 3, 4]),
        ([7, 2, 5, 10, 8], 2, 18, [0, 3, 5]),
        ([1] * 9, 3, 3, [0, 3, 6, 9]),
        ([4, 20, 2, 13, 4, 1, 3, 1, 4, 6, 4], 4, 20, None),
        (BERT_LARGE, 8, 52_559_872, None),
        ([5], 1, 5, [0, 1]),
        ([0, 0, 0], 3, 0, [0, 1, 2, 3]),
    ],
)
def test_partition_exact_gives_known_answers(
    weights: list[float], stages: int, bottleneck: float, bounds: list[int] | None
) -> None:
    cut = exact(weights, stages)
    assert cut.bottleneck == bottleneck
    assert bounds is None or list(cut.bounds) == bounds


def _all_cuts(weights: Sequence[float], stages: int) -> Iterator[tuple[Fraction, Fraction, tuple[int, ...]]]:
    """Bottleneck, minus the lightest load, and bounds of every cut without empty stages; sums without rounding."""
    prefix = [Fraction(0)]
    for weight in weights:
        prefix.append(prefix[-1] + Fraction(weight))
    for inner in combinations(range(1, len(weights)), stages - 1):
        bounds = (0, *inner, len(weights))
        loads = [prefix[bounds[s + 1]] - prefix[bounds[s]] for s in range(stages)]
        yield max(loads), -min(loads), bounds


def test_4000_random_cuts_are_the_best_of_all() -> None:
    """Bottleneck, then spread, then the order of the bounds, all at once: the first of all cuts in that order."""
    generator = random.Random(0)
    for _ in range(4000):
        weights = [generator.randint(1, 20) for _ in range(generator.randint(6, 14))]
        stages = generator.randint(2, 5)
        prefix = [sum(weights[:end]) for end in range(len(weights) + 1)]
        tried = []
        for inner in combinations(range(1, len(weights)), stages - 1):
            bounds = (0, *inner, len(weights))
            loads = [prefix[stop] - prefix[start] for start, stop in pairwise(bounds)]
            tried.append((max(loads), -min(loads), bounds))
        assert exact(weights, stages).bounds == min(tried)[2], (weights, stages)


@pytest.mark.parametrize(
    "draw",
    [
        lambda generator: generator.random(),
        lambda generator: generator.choice([0.1, 0.2, 0.3, 0.7]),  # sums that rounding makes unequal
        lambda generator: generator.choice([0, 0, 1, 2.5]),
        lambda generator: 10.0 ** generator.randint(-200, 200),
        lambda generator: 2**53 + generator.randint(0, 5),  # beyond what floats tell apart
    ],
)
def test_partition_exact_cuts_floats_and_zeros_without_rounding(draw: object) -> None:
    assert callable(draw)
    generator = random.Random(1)
    for _ in range(60):
        weights = [draw(generator) for _ in range(generator.randint(3, 9))]
        stages = generator.randint(1, min(4, len(weights)))
        assert exact(weights, stages).bounds == min(_all_cuts(weights, stages))[2], (weights, stages)


@pytest.mark.parametrize(
    "blocks, stages, sizes", [(10, 4, [2, 2, 3, 3]), (7, 7, [1] * 7), (11, 3, [3, 4, 4]), (5, 1, [5])]
)
def test_partition_exact_gives_equal_blocks_left_over_to_the_last_stages(
    blocks: int, stages: int, sizes: list[int]
) -> None:
    assert list(exact([1] * blocks, stages).loads) == sizes


def test_what_a_partition_tells() -> None:
    cut = Partition((0, 1, 3), (4, 1, 1))
    assert cut.num_stages == 2 and cut.stages == (slice(0, 1), slice(1, 3))
    assert cut.loads == (4, 2) and cut.bottleneck == 4 and cut.spread == 2 and cut.imbalance == pytest.approx(4 / 3)
    assert all(isinstance(load, int) for load in cut.loads)
    assert Partition((0, 1, 2), (0, 0)).imbalance == 1
    assert cut.weighed([1, 5, 5]).loads == (1, 10)
    assert Partition((0, 3, 3), (0.1, 0.2, 0.3)).loads == (0.6, 0)  # rounded once: 0.1 + 0.2 + 0.3 is not 0.6
    assert Partition((0, 4), (1, 0.1, 0.2, 0.3)).loads == (1.6,)


def test_arrays_are_weights_too() -> None:
    import numpy as np

    cut = exact(np.array([1, 2, 3, 4, 5, 6]), 2)
    assert cut.bounds == (0, 4, 6) and cut.weights == (1, 2, 3, 4, 5, 6) and type(cut.bottleneck) is int
    assert exact(np.array([0.5, 0.5, 1.0]), 2).bottleneck == 1.0


def test_the_time_of_a_step() -> None:
    """Σ + (m − 1) max: 4 equal stages and 9 micro-batches take (m + p − 1) of a stage, as the course says."""
    assert total_time([3, 3, 3, 3], 9) == (9 + 4 - 1) * 3
    assert total_time([1, 2, 1], 1) == 4
    assert total_time([1.5, 0.5], 3) == 2 + 2 * 1.5


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: exact([1, 2, 3], 4), ["at least one block", "4 stages", "3", "use at most 3 stages"]),
        (lambda: exact([], 1), ["at least one block", "0", "a list with blocks"]),
        (lambda: exact([1, 2], 0), ["at least 1", "0", "1 to 2"]),
        (lambda: exact([1, 2], True), ["True"]),
        (lambda: exact([1, -2], 1), ["block 1", "-2"]),
        (lambda: exact([1, float("nan")], 1), ["block 1", "nan"]),
        (lambda: exact([float("inf"), 1], 1), ["block 0", "inf"]),
        (lambda: exact(["3"], 1), ["block 0", "'3'"]),  # type: ignore[list-item]
        (lambda: Partition((0, 2, 1, 3), (1, 1, 1)), ["[0, 2, 1, 3]", "rise from 0 to 3"]),
        (lambda: Partition((0, 2), (1, 1, 1)), ["[0, 2]"]),
        (lambda: total_time([1], 0), ["at least 1 micro-batch", "0"]),
    ],
)
def test_partition_and_exact_refuse_in_one_sentence(call: object, words: list[str]) -> None:
    assert callable(call)
    for language in ("fr", "en"):
        use_language(language)
        with pytest.raises(LabError) as refused:
            call()
        assert str(refused.value).count(". ") == 0 and str(refused.value).endswith(".")
    for word in words:
        assert word in str(refused.value)


def test_partition_loads_no_torch() -> None:
    code = (
        "import sys, dlojz.pipeline.partition, dlojz.pipeline.partition as b\n"
        "print([m for m in ('torch', 'matplotlib', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
