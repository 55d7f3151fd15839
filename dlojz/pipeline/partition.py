"""Partition a list of blocks into pipeline stages with the smallest bottleneck, and weigh the blocks of a model.

A stage is a run of neighbouring blocks, none empty. `exact` is exact for floats too: a float is a whole number of some
power of two, and the search compares whole numbers only. Blocks are weighed in parameters or FLOPs (on the meta
device), or in measured seconds, with one block in memory at a time. torch is imported by the functions, not here.

Sources: Skiena, "The Algorithm Design Manual", §8.5 (the linear partition problem and its dynamic programme); Pinar &
Aykanat 2004, "Fast optimal load balancing algorithms for 1D partitioning" (J. Parallel Distrib. Comput. 64), for
searching the bottleneck with a test that says whether a given one can be reached.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, format_count, format_seconds, one_of, refusal, say
from dlojz.config.fields import PATTERN, explicit_bounds
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig

if TYPE_CHECKING:
    from torch import Tensor, nn


TEXTS = Sentences(Path(__file__).parent / "data" / "partition.md")

Weight = int | float


@dataclass(frozen=True)
class Partition:
    """Partition of blocks into stages: stage s holds blocks `bounds[s]` to `bounds[s + 1]`, the latter excluded.

    Args:
        bounds: k + 1 whole numbers for k stages, from 0 to the number of blocks, never decreasing.
        weights: one per block, at least 0, in any one unit (parameters, FLOPs, seconds).

    Raises:
        LabError: if the bounds are no cut of these blocks, or a weight is negative or not finite.
    """

    bounds: tuple[int, ...]
    weights: tuple[Weight, ...]

    def __post_init__(self) -> None:
        check_weights(self.weights)
        bounds, blocks = self.bounds, len(self.weights)
        falling = any(after < before for before, after in pairwise(bounds))
        if len(bounds) < 2 or bounds[0] != 0 or bounds[-1] != blocks or falling:
            raise TEXTS.refusal("bounds", "not rising", blocks=blocks, bounds=list(bounds), half=blocks // 2)

    @property
    def num_stages(self) -> int:
        """k, the number of stages."""
        return len(self.bounds) - 1

    @property
    def stages(self) -> tuple[slice, ...]:
        """The blocks of each stage, as slices of the list of blocks."""
        return tuple(slice(start, stop) for start, stop in pairwise(self.bounds))

    @property
    def loads(self) -> tuple[Weight, ...]:
        """Sum of the weights of each stage; of floats, the exact sum rounded once."""
        return tuple(_total(self.weights[stage]) for stage in self.stages)

    @property
    def bottleneck(self) -> Weight:
        """Load of the heaviest stage, which sets the pace of the pipeline."""
        return max(self.loads)

    @property
    def spread(self) -> Weight:
        """Heaviest load minus lightest load, which DeepSpeed's cut minimises."""
        return max(self.loads) - min(self.loads)

    @property
    def imbalance(self) -> float:
        """Bottleneck ÷ mean load, at least 1; 1 if nothing weighs anything."""
        mean = _total(self.loads) / self.num_stages
        return self.bottleneck / mean if mean else 1.0

    def weighed(self, weights: Sequence[Weight]) -> Partition:
        """Return the same cut under other weights, e.g. seconds instead of parameters.

        Raises:
            LabError: if there is not one weight per block.
        """
        return Partition(self.bounds, check_weights(weights))


def exact(weights: Sequence[Weight], stages: int) -> Partition:
    """Find the contiguous cut with the smallest bottleneck, no stage empty.

    Among several such cuts the one with the smallest spread is taken (its lightest stage is the heaviest possible), and
    among those the first in the order of lists: early stages get fewer blocks, as they keep the activations of more
    micro-batches under 1F1B.

    Args:
        weights: one per block, finite, at least 0; whole numbers of any size, or floats.
        stages: k, at least 1 and at most the number of blocks n.

    Returns:
        The partition. O(k n log n) per bottleneck tried and O(log(Σ ÷ resolution)) of them: bisection over whole
        numbers, each tried by asking which blocks can begin a stage from which the end is reached.

    Raises:
        LabError: if there are fewer blocks than stages, or a weight is negative or not finite.

    Source: Pinar & Aykanat 2004 (bisection on the bottleneck, with a probe); the tie-break is the lab's.
    """
    check_stages(len(weights), stages)
    weights = check_weights(weights)
    integers = _as_integers(weights)
    prefix = [0, *accumulate(integers)]

    def reached(high: int, low: int = 0) -> list[int] | None:
        return _first_cut(prefix, stages, low, high)

    # No bottleneck lies below the mean load, nor below the heaviest block.
    floor = max(-(-prefix[-1] // stages), *integers)
    high = _smallest(lambda tried: reached(tried) is not None, floor, prefix[-1])
    # The spread is smallest where the lightest stage is heaviest: bisect for the first lower limit that fails. The
    # lightest stage weighs no more than the mean: beyond it every limit fails.
    low = _smallest(lambda tried: reached(high, tried) is None, 1, prefix[-1] // stages + 1) - 1
    bounds = reached(high, low)
    if bounds is None:  # cannot be: both limits were reached above
        raise AssertionError("the cut that was found cannot be found again")
    return Partition(tuple(bounds), weights)


def total_time(loads: Sequence[Weight], micro_batches: int) -> float:
    """Compute the time of a flushed pipeline without communication: Σ tᵢ + (m − 1) max tᵢ, in the unit of the loads.

    One micro-batch crosses all stages, the others follow at the pace of the slowest. Σ tᵢ does not depend on the cut,
    so the smallest bottleneck gives the smallest time for every m.

    Args:
        loads: time of each stage for one micro-batch, forward and backward together.

    Raises:
        LabError: if m is below 1.

    Source: Zheng et al. 2022, "Alpa" (arXiv 2201.12023), §5, eq. 2.
    """
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise TEXTS.refusal("stages", "no micro-batch", micro_batches=micro_batches)
    return _total(loads) + (micro_batches - 1) * max(loads)


def check_stages(num_blocks: int, stages: int) -> None:
    """Refuse a number of stages that is not a whole number from 1 to the number of blocks.

    Raises:
        LabError: if a stage would have no block.
    """
    if isinstance(stages, bool) or not isinstance(stages, int) or stages < 1:
        raise TEXTS.refusal("stages", "not whole", stages=stages, most=max(num_blocks, 1))
    if num_blocks < stages:
        en, fr = f"there are {num_blocks} blocks", f"il y a {num_blocks} blocs"
        if num_blocks < 2:
            en, fr = ("there is one", "il n’y en a qu’un") if num_blocks else ("there are 0", "il y en a 0")
        plural = "s" * (num_blocks > 1)
        raise refusal(
            en=f"every stage needs at least one block, but {stages} stages were asked for and {en}: "
            + (f"use at most {num_blocks} stage{plural}." if num_blocks else "give a list with blocks in it."),
            fr=f"il faut au moins un bloc par étage, mais {stages} étages ont été demandés et {fr} : "
            + (f"prenez {num_blocks} étage{plural} au plus." if num_blocks else "donnez une liste qui en contient."),
        )


def check_weights(weights: Sequence[Any]) -> tuple[Weight, ...]:
    """Convert weights, also those of an array, to plain finite numbers.

    Raises:
        LabError: naming the first block whose weight is negative, not finite or no number.
    """
    for block, weight in enumerate(weights):
        is_integer = isinstance(weight, Integral)
        number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not number or not (is_integer or math.isfinite(weight)) or weight < 0:
            raise TEXTS.refusal("weights", "not finite", block=block, weight=weight)
    return tuple(int(weight) if isinstance(weight, Integral) else float(weight) for weight in weights)


def _total(values: Sequence[Weight]) -> Weight:
    return sum(values) if all(isinstance(value, int) for value in values) else math.fsum(values)


def _as_integers(weights: Sequence[Weight]) -> list[int]:
    """Whole numbers in the same ratios: floats over their common power of two."""
    fractions = [Fraction(weight) for weight in weights]
    common = max(fraction.denominator for fraction in fractions)  # powers of two: the largest divides by the others
    return [int(fraction * common) for fraction in fractions]


def _smallest(accepted: Callable[[int], bool], low: int, high: int) -> int:
    """The first whole number from `low` on that is accepted, as all after it are; `high` is."""
    while low < high:
        middle = (low + high) // 2
        if accepted(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _first_cut(prefix: Sequence[int], stages: int, low: int, high: int) -> list[int] | None:
    """Bounds of the first cut, in the order of lists, whose loads all lie from `low` to `high`; None if none does.

    Backwards over the stages: block i may begin stage s if a block j behind it may begin stage s + 1 and the sum of
    blocks i to j lies within the limits. As sums grow with j, these j are a range, and it is enough to know the first
    of it that may begin stage s + 1.
    """
    blocks = len(prefix) - 1
    nowhere = blocks + 1
    following = [blocks] * (blocks + 1)  # first bound from j on that the stages behind can start from
    choices: list[list[int]] = []
    for stage in range(stages - 1, -1, -1):
        chosen = [nowhere] * (blocks + 1)
        earlier = [nowhere] * (blocks + 2)
        # Each later stage still needs a block, and each earlier one has had one.
        for start in range(blocks - (stages - stage), stage - 1, -1):
            base = prefix[start]  # load of blocks start … stop − 1: prefix[stop] − base
            # Stops from `first_stop` to `last_stop` give a load within the limits.
            first_stop = max(start + 1, bisect_left(prefix, base + low))
            last_stop = bisect_right(prefix, base + high) - 1
            stop = following[first_stop] if first_stop <= blocks else nowhere
            if stop <= last_stop:
                chosen[start] = stop
            earlier[start] = start if chosen[start] != nowhere else earlier[start + 1]
        choices.append(chosen)
        following = earlier
    bounds = [0]
    for chosen in reversed(choices):
        # From here the end is not reached within the limits.
        if bounds[-1] > blocks or chosen[bounds[-1]] == nowhere:
            return None
        bounds.append(chosen[bounds[-1]])
    return bounds


# --- as DeepSpeed and torchgpipe cut ----------------------------------------------------------------------------------


def uniform(num_blocks: int, stages: int) -> Partition:
    """Cut into equal numbers of blocks, whatever they weigh; the first stages get those that are left over.

    Returns:
        The partition, every block weighing 1; `.weighed(…)` gives its loads in another unit.

    Raises:
        LabError: if n < k; DeepSpeed leaves the last stages empty.

    Source: DeepSpeed 0.19, `deepspeed.runtime.utils.partition_uniform` (`partition_method='uniform'`).
    """
    check_stages(num_blocks, stages)
    share, remainder = divmod(num_blocks, stages)
    bounds = tuple(stage * share + min(stage, remainder) for stage in range(stages + 1))
    return Partition(bounds, (1,) * num_blocks)


def balanced_like_deepspeed(weights: Sequence[Weight], stages: int) -> Partition:
    """Cut by DeepSpeed's dynamic programme, which minimises the spread of the loads, not the bottleneck.

    For each number of first blocks and of stages it keeps the cut of the least max − min; the least spread of the whole
    may begin with another one, so even the spread is not always minimal. Ties: the last stage begins as late as it can.

    Args:
        weights: one per block; added as floats, as DeepSpeed does.

    Returns:
        The partition, O(k n²).

    Raises:
        LabError: as `exact`.

    Source: DeepSpeed 0.19, `deepspeed.runtime.utils.partition_balanced` (`partition_method='parameters'`, `'type:…'`).
    """
    check_stages(len(weights), stages)
    weights = check_weights(weights)
    blocks = len(weights)
    prefix = [0.0, *accumulate(map(float, weights))]
    heaviest, lightest = [0.0] + [math.inf] * blocks, [math.inf] * (blocks + 1)  # of no stage at all
    starts: list[list[int]] = []
    for stage in range(1, stages + 1):
        extremes = [(math.inf, math.inf)] * (blocks + 1)
        chosen = [0] * (blocks + 1)
        for stop in range(stage, blocks + 1):
            best = math.inf
            # The first stage begins at block 0.
            for start in range(stage - 1, stop if stage > 1 else 1):
                load = prefix[stop] - prefix[start]
                high, low = max(heaviest[start], load), min(lightest[start], load)
                # ≤, as DeepSpeed has it: of equal spreads the last one tried stays.
                if high - low <= best:
                    best, extremes[stop], chosen[stop] = high - low, (high, low), start
        heaviest, lightest = [high for high, _ in extremes], [low for _, low in extremes]
        starts.append(chosen)
    bounds = [blocks]
    for chosen in reversed(starts):
        bounds.append(chosen[bounds[-1]])
    return Partition(tuple(reversed(bounds)), weights)


def like_torchgpipe(weights: Sequence[Weight], stages: int) -> Partition:
    """Cut by torchgpipe's method: from equal numbers of blocks, move one block at a time towards the lightest stage.

    It stops once heaviest ≤ lightest + 1, for weights between 0 and 1. torchgpipe scales by subtracting the smallest
    weight and dividing by the range: cheap blocks then weigh almost nothing, and equal weights nothing at all.

    Of several lightest stages torchgpipe takes the first, the paper the one nearest to the heaviest. With many equal
    weights torchgpipe's choice may never end, or give stages that overlap; only there the paper's is followed.

    Returns:
        The partition, in which stages may be empty; torchgpipe states O(k n³).

    Raises:
        LabError: as `exact`.

    Source: Bárány & Grinberg 2013, "Block partitions of sequences" (arXiv 1308.2452), its algorithm; torchgpipe
    0.0.7, `torchgpipe.balance.blockpartition`, for the scaling and for ties.
    """
    check_stages(len(weights), stages)
    weights = check_weights(weights)
    minimum = min(weights)
    span = max(weights) - minimum
    # 0 to 1: the heaviest block weighs 1, which is by how much loads may differ at the end.
    scaled = [(weight - minimum) / span if span else 0.0 for weight in weights]
    bounds = _evened(scaled, stages, nearest=False)
    if bounds is None:  # as fractions: the proof that the paper's moves come to an end knows no rounding
        exact_span = Fraction(max(weights)) - Fraction(minimum)
        fractions = [(Fraction(weight) - Fraction(minimum)) / exact_span for weight in weights]
        bounds = _evened(fractions, stages, nearest=True)
    if bounds is None:
        raise AssertionError("the paper's algorithm ends, but did not")
    return Partition(bounds, weights)


def _evened(weights: Sequence[float | Fraction], stages: int, nearest: bool) -> tuple[int, ...] | None:
    """Bounds once heaviest ≤ lightest + 1; None if the moves cycle or make stages overlap.

    `nearest`: of equally light stages take the one nearest to the heaviest, not the first.
    """
    share = len(weights) // stages
    bounds = [*(share * stage for stage in range(stages)), len(weights)]
    donor = heavy = -1
    top: float | Fraction = 0
    past_states = set()
    while True:
        loads = [sum(weights[start:stop]) for start, stop in pairwise(bounds)]
        if donor == heavy:  # its load has changed: look again for the heaviest stage, the last one of equals
            top = max(loads)
            heavy = max(stage for stage, load in enumerate(loads) if load == top)
        lightest = [stage for stage, load in enumerate(loads) if load == min(loads)]
        light = min(lightest, key=lambda stage: abs(stage - heavy)) if nearest else lightest[0]
        if top <= loads[light] + 1:
            # Bounds that have crossed each other would be stages that overlap.
            return tuple(bounds) if bounds == sorted(bounds) else None
        donor = light - 1 if heavy < light else light + 1
        state = (heavy, *bounds)
        if state in past_states or min(bounds) < 0 or max(bounds) > len(weights):  # in circles, or off the list
            return None
        past_states.add(state)
        if heavy < light:  # the stage before the lightest gives its last block
            bounds[light] -= 1
        else:  # the stage behind it gives its first
            bounds[donor] += 1


def pattern_weights(names: Sequence[str], pattern: str) -> tuple[int, ...]:
    """Weigh each block 1 if the pattern is found in its name (ignoring case), else 0.

    Raises:
        LabError: if the pattern is no regular expression, or is found in no name.

    Source: DeepSpeed 0.19, `PipelineModule._find_layer_type` (`partition_method='type:PATTERN'`).
    """
    name_list = ", ".join(dict.fromkeys(names))
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise TEXTS.refusal("pattern", "no regular expression", pattern=pattern, error=error, names=name_list) from None
    weights = tuple(int(compiled.search(name) is not None) for name in names)
    if not any(weights):
        raise TEXTS.refusal("pattern", "not found", pattern=pattern, names=name_list)
    return weights


Cut = Callable[[Sequence[Weight], int], Partition]
"""Weights and number of stages to a partition."""

PEERS: Mapping[str, Cut] = {
    "deepspeed": balanced_like_deepspeed,
    "torchgpipe": like_torchgpipe,
    "uniform": lambda weights, stages: uniform(len(weights), stages).weighed(weights),
}


# --- of a layout ----------------------------------------------------------------------------------------------------


def stage_bounds(
    layout: Layout, stages: int, names: Sequence[str], parameters: Sequence[int], flops: Sequence[float] = ()
) -> tuple[int, ...]:
    """Cut a model into the stages of a layout; a bound is a stage's first block, the last one the number of blocks.

    Args:
        layout: its `partition` names the method; its engine counts too, as DeepSpeed has its own rules.
        flops: their FLOPs in a forward pass; needed for `partition="flops"` alone.

    Raises:
        LabError: if some stage would have no block, or no block's name matches.
    """
    blocks = len(names)
    if stages > blocks:
        raise TEXTS.refusal("stages", "more than blocks", pp=layout.pp, stages=stages, blocks=blocks)
    method, deepspeed = layout.partition, layout.engine == "deepspeed"
    cuts = explicit_bounds(method)
    if cuts is not None:
        if len(cuts) != stages - 1 or cuts[-1] >= blocks:
            counts = {"stages": stages, "blocks": blocks, "count": stages - 1}
            raise TEXTS.refusal("bounds", "other number", cuts=",".join(map(str, cuts)), **counts)
        return (0, *cuts, blocks)
    if method.startswith(PATTERN):
        # As DeepSpeed's `PipelineModule._partition_layers`: equal numbers of matching blocks.
        bounds = balanced_like_deepspeed(pattern_weights(names, method.removeprefix(PATTERN)), stages).bounds
    elif method == "uniform":
        # Left-over blocks go to the last stages (DeepSpeed's: the first), as the first keep more micro-batches in
        # flight.
        bounds = (uniform(blocks, stages) if deepspeed else exact([1] * blocks, stages)).bounds
    else:
        weights = [float(weight) for weight in (flops if method == "flops" else parameters)]
        bounds = (balanced_like_deepspeed(weights, stages) if deepspeed else exact(weights, stages)).bounds
    for stage, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            raise TEXTS.refusal("stages", "without a block", partition=layout.partition, stage=stage)
    return bounds


Measure = Literal["parameters", "flops", "time", "uniform", "regex"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
REPETITIONS = 5
Tell = Callable[[int, int], None]
"""Receives the number of blocks done and of all blocks."""


@dataclass(frozen=True)
class BlockWeights:
    """Class and weight of each block of a model, in order.

    ``unit`` is empty for parameters, `FLOP` (forward pass of one sample, two per multiply-add), `s` (forward and
    backward of one micro-batch), or `blocks` (uniform and regex).
    """

    by: Measure
    kinds: tuple[str, ...]
    weights: tuple[Weight, ...]
    unit: str

    def text(self, weight: Weight) -> str:
        """Format a weight, or a sum of some, with its prefix and its unit."""
        if self.unit == "s":
            return format_seconds(weight)
        if self.unit == "blocks":
            plural = "s" if weight > 1 else ""
            return say(en=f"{weight} block{plural}", fr=f"{weight} bloc{plural}")
        return format_count(weight, self.unit if self.unit == "FLOP" else "")

    def title(self) -> str:
        """Return the title of the weights, in the reader's language."""
        return TEXTS.say("titles", self.by)


@dataclass(frozen=True)
class BlockTimes:
    """Seconds of each block for one micro-batch: medians over repetitions, in fp32."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @property
    def step_s(self) -> tuple[float, ...]:
        """Forward and backward together, block by block."""
        return tuple(forward + backward for forward, backward in zip(self.forward_s, self.backward_s, strict=True))


def block_weights(
    config: RunConfig, measure: Measure = "parameters", pattern: str | None = None, tell: Tell | None = None
) -> BlockWeights:
    """Weigh every block of a configuration's model.

    Args:
        config: names the model, the size of its input, and for `time` the micro-batch and the device.
        measure: `parameters`; `flops` of the forward pass; `time`, forward and backward really run; `uniform`, 1 each;
            `regex`, 1 where `pattern` is found in the block's class, else 0 (as DeepSpeed's `type:`).
        tell: called with the number of blocks that have been timed.

    Raises:
        LabError: an unknown way to weigh, a pattern without `regex` or `regex` without one, a pattern found nowhere.
    """
    if measure not in MEASURES:
        raise LabError(one_of(say(en="way to weigh blocks", fr="façon de peser les blocs"), measure, MEASURES))
    if (measure == "regex") != (pattern is not None):
        raise TEXTS.refusal("refusals", "pattern without regex")
    counted = _counted(config.built_model, config.image_size, config.sequence_length, config.num_classes)
    kinds = tuple(kind for kind, _, _ in counted)
    if measure == "parameters":
        return BlockWeights(measure, kinds, tuple(parameters for _, parameters, _ in counted), "")
    if measure == "flops":
        return BlockWeights(measure, kinds, tuple(flops for _, _, flops in counted), "FLOP")
    if measure == "time":
        return BlockWeights(measure, kinds, block_times(config, tell=tell).step_s, "s")
    ones = (1,) * len(kinds) if pattern is None else pattern_weights(kinds, pattern)
    return BlockWeights(measure, kinds, ones, "blocks")


@lru_cache(maxsize=64)
def _counted(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int | None
) -> tuple[tuple[str, int, int], ...]:
    """Class, parameters and FLOPs of every block."""
    from dlojz.models.meta import flops_by_block

    built, sample = _on_meta(model, image_size, sequence_length, num_classes)
    flops = flops_by_block(built.eval(), sample)
    block_parameters = [set(block.parameters()) for block in built.blocks]
    if not built.is_chain:  # the last block calls the others: its own are those that they do not hold
        block_parameters[-1] -= set().union(*block_parameters[:-1])
    return tuple(
        (type(block).__name__, sum(parameter.numel() for parameter in parameters), block_flops)
        for block, parameters, block_flops in zip(built.blocks, block_parameters, flops, strict=True)
    )


def _on_meta(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int | None, samples: int = 1
) -> tuple[Any, Tensor]:
    """The model without memory, and an input of the right shape without values."""
    from dlojz.models.meta import on_meta, sample_inputs

    with on_meta():
        built = models.build(model, image_size=image_size, sequence_length=sequence_length, num_classes=num_classes)
    return built, sample_inputs(model, samples, image_size=image_size, sequence_length=sequence_length)


def block_times(config: RunConfig, repetitions: int = REPETITIONS, tell: Tell | None = None) -> BlockTimes:
    """Measure the forward and backward pass of every block; medians of their durations.

    One block at a time is given memory and random weights, runs once to warm up, then `repetitions` times, in fp32
    and in training mode. The first block computes no gradient of its input, as in a training step. Blocks that print
    alike and read the same shape are the same program and timed once.

    Args:
        config: model, input size, micro-batch, and device (`cpu`, or a GPU if there is one).
        repetitions: at least 1; the warm-up is not counted.
        tell: called with the number of blocks done and of all blocks.

    Raises:
        LabError: if no repetition is asked for, or there is no GPU for device='cuda'.
    """
    import torch

    if repetitions < 1:
        raise TEXTS.refusal("refusals", "no repetition", repetitions=repetitions, usual=REPETITIONS)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise TEXTS.refusal("refusals", "no gpu")
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    built, x = _on_meta(
        config.built_model, config.image_size, config.sequence_length, config.num_classes, config.layout.micro_batch
    )
    if not built.is_chain:
        raise TEXTS.refusal("refusals", "no chain", name=config.model_name)
    times_by_kind: dict[tuple[str, torch.Size, bool], tuple[float, float, Tensor]] = {}
    forward_s, backward_s = [], []
    for number, block in enumerate(built.train().blocks):
        kind = (repr(block), x.shape, number == 0)
        if kind not in times_by_kind:
            # On meta: the shape of what the next block reads, nothing computed.
            with torch.no_grad():
                output = block(x)
            block_input = _real_input(x, config.num_classes, device, gradient=number > 0)
            durations = list(_durations(_with_weights(block, device), block_input, repetitions))
            block.to("meta")  # gives its memory back
            times_by_kind[kind] = (
                statistics.median(forward for forward, _ in durations),
                statistics.median(backward for _, backward in durations),
                output,
            )
        forward, backward, x = times_by_kind[kind]
        forward_s.append(forward)
        backward_s.append(backward)
        if tell:
            tell(number + 1, len(built.blocks))
    return BlockTimes(tuple(forward_s), tuple(backward_s))


def _real_input(shape_of: Tensor, vocabulary: int, device: Any, gradient: bool) -> Tensor:
    import torch

    generator = torch.Generator(device).manual_seed(0)
    if not shape_of.is_floating_point():
        return torch.randint(vocabulary, shape_of.shape, generator=generator, device=device)
    return torch.randn(shape_of.shape, generator=generator, device=device).requires_grad_(gradient)


def _with_weights(block: nn.Module, device: Any) -> nn.Module:
    """The block in memory, with weights that keep its outputs finite; their values do not change its duration."""
    import torch

    block.to_empty(device=device)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.02)
        for module in block.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.reset_running_stats()
    return block


def _durations(block: nn.Module, block_input: Tensor, repetitions: int) -> Iterator[tuple[float, float]]:
    """Seconds of the forward and of the backward pass, the warm-up left out."""
    import torch

    def now_s() -> float:
        if block_input.is_cuda:
            torch.cuda.synchronize()  # a GPU is told what to do and does it later
        return time.perf_counter()

    gradient = None
    for repetition in range(repetitions + 1):
        # Added to old gradients, backward would take longer.
        block.zero_grad(set_to_none=True)
        block_input.grad = None
        begin_s = now_s()
        output = block(block_input)
        forward_end_s = now_s()
        # Made once, and outside of both times.
        gradient = torch.ones_like(output) if gradient is None else gradient
        start_s = now_s()
        output.backward(gradient)
        if repetition:
            yield forward_end_s - begin_s, now_s() - start_s
