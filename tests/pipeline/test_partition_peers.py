"""The cuts of DeepSpeed and torchgpipe: theirs, ties included."""

import random

import pytest
from deepspeed.runtime.utils import partition_balanced, partition_uniform

from dlojz.base.errors import LabError
from dlojz.pipeline.partition import PEERS, balanced_like_deepspeed, exact, like_torchgpipe, pattern_weights, uniform

NAMES = ["Stem", "MBConvBlock", "MBConvBlock", "AttentionBlock", "AttentionBlock", "Head"]


def test_deepspeed_cuts_the_same() -> None:
    generator = random.Random(0)
    for case in range(600):
        blocks = generator.randint(1, 20)
        stages = generator.randint(1, blocks)
        weights = [
            (generator.randint(0, 20), generator.randint(0, 1), generator.random())[case % 3] for _ in range(blocks)
        ]
        theirs = tuple(int(bound) for bound in partition_balanced(weights, stages))
        assert balanced_like_deepspeed(weights, stages).bounds == theirs, (weights, stages)
        assert uniform(blocks, stages).bounds == tuple(partition_uniform(blocks, stages))


def test_deepspeed_known_answers() -> None:
    worst = [4, 20, 2, 13, 4, 1, 3, 1, 4, 6, 4]
    assert balanced_like_deepspeed(worst, 4).bounds == (0, 2, 4, 9, 11)
    assert balanced_like_deepspeed(worst, 4).bottleneck == 24 and exact(worst, 4).bottleneck == 20
    assert balanced_like_deepspeed([1, 1, 1, 1, 1], 4).spread == 1
    assert balanced_like_deepspeed([0, 1, 2, 3, 3, 3], 4).bounds == (0, 3, 4, 5, 6)
    assert balanced_like_deepspeed([0.0, 1.1, 1.9, 3.0, 30.0], 2).bounds == (0, 4, 5)
    assert balanced_like_deepspeed([0.0, 1.1, 30.0, 3.0], 3).bounds == (0, 2, 3, 4)
    bert = [52_559_872, *[12_596_224] * 24, 0, 52_559_872]
    assert balanced_like_deepspeed(bert, 8).bottleneck == 52_559_872


def test_uniform_gives_the_first_stages_what_is_left_over() -> None:
    assert uniform(10, 4).bounds == (0, 3, 6, 8, 10)
    with pytest.raises(LabError, match="use at most 3 stages"):
        uniform(3, 4)


@pytest.mark.parametrize(
    "weights, stages, bounds",
    [
        ([1, 2, 3, 4, 5, 6], 2, (0, 4, 6)),  # torchgpipe's tests
        ([14, 12, 18, 19, 11, 13, 12, 17], 5, (0, 1, 2, 3, 4, 8)),  # 53 where 29 would do
        ([7, 7, 7, 7, 7], 3, (0, 1, 2, 5)),  # alike: nothing weighs anything, nothing is moved
        ([0, 0, 0, 1, 1], 3, (0, 4, 4, 5)),  # an empty stage, as torchgpipe gives it
    ],
)
def test_torchgpipe_known_answers(weights: list[int], stages: int, bounds: tuple[int, ...]) -> None:
    assert like_torchgpipe(weights, stages).bounds == bounds


@pytest.mark.parametrize(
    "weights, stages",
    [
        ([0, 0, 30, 0, 30, 0, 0, 0, 30, 30], 7),  # torchgpipe itself never answers
        ([0, 1, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1], 10),
        ([30, 0, 5, 0, 0, 0, 30, 30], 6),  # torchgpipe's stages overlap: lengths 1, 2, 4, 1, −1, 1
    ],
)
def test_torchgpipe_where_its_ties_lead_nowhere(weights: list[int], stages: int) -> None:
    """The paper's own choice among equals ends with heaviest ≤ lightest + 1, on the scaled weights."""
    cut = like_torchgpipe(weights, stages)
    assert cut.weighed([weight / max(weights) for weight in weights]).spread <= 1


@pytest.mark.parametrize("peer", PEERS)
def test_no_peer_beats_the_optimum(peer: str) -> None:
    generator = random.Random(5)
    for _ in range(200):
        weights = [generator.randint(0, 9) for _ in range(generator.randint(5, 12))]
        stages = generator.randint(1, 5)
        assert PEERS[peer](weights, stages).bottleneck >= exact(weights, stages).bottleneck


def test_by_pattern_is_deepspeed_s_type() -> None:
    assert pattern_weights(NAMES, "attention") == (0, 0, 0, 1, 1, 0)
    assert pattern_weights(NAMES, "^(MBConv|Att)") == (0, 1, 1, 1, 1, 0)
    cut = balanced_like_deepspeed(pattern_weights(NAMES, "block"), 2)
    assert cut.loads == (2, 2) and cut.bounds == tuple(int(b) for b in partition_balanced([0, 1, 1, 1, 1, 0], 2))


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: pattern_weights(NAMES, "Transformer"), ["'Transformer'", "no block", "Stem, MBConvBlock"]),
        (lambda: pattern_weights(NAMES, "("), ["'('", "no regular expression"]),
        (lambda: balanced_like_deepspeed([1, 2], 3), ["use at most 2 stages"]),
        (lambda: like_torchgpipe([1, -1], 1), ["block 1", "-1"]),
    ],
)
def test_balanced_like_deepspeed_and_like_torchgpipe_refuse_bad_arguments(call: object, words: list[str]) -> None:
    assert callable(call)
    with pytest.raises(LabError) as refused:
        call()
    for word in words:
        assert word in str(refused.value)
