"""Baselines of the partitioner, weights of a model's blocks, and the stages of a layout.

DeepSpeed's three methods and torchgpipe's, reimplemented: given the same weights, each returns the bounds that the tool
returns, ties included. Their quality is counted against `partition.exact`.

A model's blocks are weighed in parameters or FLOPs (on the meta device, without memory), or in measured seconds (one
block in memory at a time). torch is imported by the functions, not here.
"""

from __future__ import annotations

import math
import random
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, get_args

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import format_count, format_seconds, one_of, refusal, say
from dlojz.config.fields import PATTERN, explicit_bounds
from dlojz.config.layout import Layout
from dlojz.config.run_config import RunConfig
from dlojz.pipeline.partition import Partition, Weight, check_stages, check_weights, exact
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.schedule_catalogue import build

if TYPE_CHECKING:
    from torch import Tensor, nn

BLOCKS, STAGES, WEIGHTS = (6, 14), (2, 5), (1, 20)
"""Inclusive ranges of the random cases of `how_often`."""


def uniform(num_blocks: int, stages: int, allow_empty: bool = False) -> Partition:
    """Cut into equal numbers of blocks, whatever they weigh; the first stages get those that are left over.

    Args:
        num_blocks: n, at least 1.
        stages: k.
        allow_empty: leave the last stages empty where n < k, as DeepSpeed does, instead of refusing.

    Returns:
        The partition, every block weighing 1; `.weighed(…)` gives its loads in another unit.

    Raises:
        LabError: if n < k, unless empty stages are allowed.

    Source: DeepSpeed 0.19, `deepspeed.runtime.utils.partition_uniform` (`partition_method='uniform'`).
    """
    check_stages(max(num_blocks, stages) if allow_empty else num_blocks, stages)
    share, more = divmod(num_blocks, stages)
    bounds = tuple(stage * share + min(stage, more) for stage in range(stages + 1))
    return Partition(bounds, (1,) * num_blocks)


def balanced_like_deepspeed(weights: Sequence[Weight], stages: int) -> Partition:
    """Cut by DeepSpeed's dynamic programme, which minimises the spread of the loads, not the bottleneck.

    For each number of first blocks and of stages it keeps the cut of the least max − min; the least spread of the whole
    may begin with another one, so even the spread is not always minimal. Ties: the last stage begins as late as it can.

    Args:
        weights: one per block; added as floats, as DeepSpeed does.
        stages: k.

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
        kept = [(math.inf, math.inf)] * (blocks + 1)
        chosen = [0] * (blocks + 1)
        for stop in range(stage, blocks + 1):
            best = math.inf
            # The first stage begins at block 0.
            for start in range(stage - 1, stop if stage > 1 else 1):
                load = prefix[stop] - prefix[start]
                high, low = max(heaviest[start], load), min(lightest[start], load)
                # ≤, as DeepSpeed has it: of equal spreads the last one tried stays.
                if high - low <= best:
                    best, kept[stop], chosen[stop] = high - low, (high, low), start
        heaviest, lightest = [high for high, _ in kept], [low for _, low in kept]
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

    Args:
        weights: one per block.
        stages: k.

    Returns:
        The partition, in which stages may be empty; torchgpipe states O(k n³).

    Raises:
        LabError: as `exact`.

    Source: Bárány & Grinberg 2013, "Block partitions of sequences" (arXiv 1308.2452), its algorithm; torchgpipe
    0.0.7, `torchgpipe.balance.blockpartition`, for the scaling and for ties.
    """
    check_stages(len(weights), stages)
    weights = check_weights(weights)
    least = min(weights)
    span = max(weights) - least
    # 0 to 1: the heaviest block weighs 1, which is by how much loads may differ at the end.
    scaled = [(weight - least) / span if span else 0.0 for weight in weights]
    bounds = _evened(scaled, stages, nearest=False)
    if bounds is None:  # as fractions: the proof that the paper's moves come to an end knows no rounding
        exact_span = Fraction(max(weights)) - Fraction(least)
        fractions = [(Fraction(weight) - Fraction(least)) / exact_span for weight in weights]
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
    seen = set()
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
        if state in seen or min(bounds) < 0 or max(bounds) > len(weights):  # in circles, or off the list
            return None
        seen.add(state)
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
    listed = ", ".join(dict.fromkeys(names))
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise refusal(
            en=f"the pattern {pattern!r} is no regular expression ({error}): write for example a part of one of "
            f"{listed}.",
            fr=f"le motif {pattern!r} n’est pas une expression régulière ({error}) : écrivez par exemple une "
            f"partie de l’un de ces noms : {listed}.",
        ) from None
    found = tuple(int(compiled.search(name) is not None) for name in names)
    if not any(found):
        raise refusal(
            en=f"the pattern {pattern!r} is found in the name of no block: use one that is found in {listed}.",
            fr=f"le motif {pattern!r} ne se trouve dans le nom d’aucun bloc : prenez-en un qui se trouve dans "
            f"{listed}.",
        )
    return found


Cut = Callable[[Sequence[Weight], int], Partition]
"""Weights and number of stages to a partition."""

PEERS: Mapping[str, Cut] = {
    "deepspeed": balanced_like_deepspeed,
    "torchgpipe": like_torchgpipe,
    "uniform": lambda weights, stages: uniform(len(weights), stages).weighed(weights),
}


@dataclass(frozen=True)
class HowOften:
    """Count of random cases in which a tool misses the smallest bottleneck, with the worst of them."""

    peer: str
    cases: int
    seed: int
    missed: int
    worst_ratio: float
    """Its bottleneck ÷ the smallest one; 1 if it never missed."""
    worst_weights: tuple[Weight, ...]
    worst_stages: int

    @property
    def missed_share(self) -> float:
        """Share of the cases, from 0 to 1."""
        return self.missed / self.cases


def how_often(peer: str, cases: int = 4000, seed: int = 0) -> HowOften:
    """Count how often a tool's cut is not the best, over random lists of blocks.

    6 to 14 blocks of weight 1 to 20, 2 to 5 stages, uniformly random; the same seed gives every peer the same cases.

    Args:
        peer: one of `PEERS`.
        cases: at least 1; 4,000 take a second or two.

    Raises:
        LabError: unknown peer, or fewer than 1 case.
    """
    if peer not in PEERS:
        raise LabError(one_of(say(en="way to cut", fr="méthode de découpage"), peer, PEERS))
    if cases < 1:
        raise refusal(
            en=f"at least 1 case is needed to count anything, but {cases} was received: use 4000.",
            fr=f"il faut au moins 1 cas pour compter, mais {cases} a été reçu : prenez 4000.",
        )
    generator = random.Random(seed)
    missed, worst = 0, (1.0, (), 0)  # type: tuple[int, tuple[float, tuple[Weight, ...], int]]
    for _ in range(cases):
        # Whole numbers: equal loads are equal, without rounding.
        weights = tuple(generator.randint(*WEIGHTS) for _ in range(generator.randint(*BLOCKS)))
        stages = generator.randint(*STAGES)
        best, reached = exact(weights, stages).bottleneck, PEERS[peer](weights, stages).bottleneck
        missed += reached > best
        if reached / best > worst[0]:
            worst = (reached / best, weights, stages)
    return HowOften(peer, cases, seed, missed, *worst)


def schedule_of(layout: Layout) -> Schedule:
    """Build the schedule of a layout's pipeline ranks.

    Raises:
        LabError: if the schedule does not fit the number of ranks, micro-batches or chunks.
    """
    return _built(layout.schedule or "1f1b", layout.pp, layout.micro_batches, layout.chunks)


@lru_cache(maxsize=8)
def _built(name: str, ranks: int, micro_batches: int, chunks: int | None) -> Schedule:
    """Cache: all ranks of a layout ask for the same schedule."""
    return build(name, ranks, micro_batches, chunks=chunks)


def stage_bounds(
    layout: Layout, stages: int, names: Sequence[str], parameters: Sequence[int], flops: Sequence[float] = ()
) -> tuple[int, ...]:
    """Cut a model into the stages of a layout; a bound is a stage's first block, the last one the number of blocks.

    Args:
        layout: its `partition` names the method; its engine counts too, as DeepSpeed has its own rules.
        stages: how many, over all chunks.
        names: class names of the blocks.
        parameters: their numbers of parameters.
        flops: their FLOPs in a forward pass; needed for `partition="flops"` alone.

    Raises:
        LabError: if some stage would have no block, or no block's name matches.
    """
    blocks = len(names)
    if stages > blocks:
        raise refusal(
            en=f"pp={layout.pp} makes {stages} stages, which need a block each, but the model has {blocks}: use "
            f"{blocks} stages or less.",
            fr=f"pp={layout.pp} fait {stages} étages, qui demandent un bloc chacun, mais le modèle en a {blocks} : "
            f"prenez {blocks} étages au plus.",
        )
    method, deepspeed = layout.partition, layout.engine == "deepspeed"
    given = explicit_bounds(method)
    if given is not None:
        if len(given) != stages - 1 or given[-1] >= blocks:
            raise refusal(
                en=f"partition at:{','.join(map(str, given))} was received, but {stages} stages of {blocks} blocks "
                f"need {stages - 1} increasing numbers below {blocks}.",
                fr=f"partition at:{','.join(map(str, given))} a été reçu, mais {stages} étages de {blocks} blocs "
                f"demandent {stages - 1} numéros croissants inférieurs à {blocks}.",
            )
        return (0, *given, blocks)
    if method.startswith(PATTERN):
        # As DeepSpeed's `PipelineModule._partition_layers`: equal numbers of matching blocks.
        bounds = balanced_like_deepspeed(pattern_weights(names, method.removeprefix(PATTERN)), stages).bounds
    elif method == "uniform":
        # Left-over blocks go to the last stages (DeepSpeed's: the first), as the first keep more micro-batches in
        # flight.
        bounds = (uniform(blocks, stages) if deepspeed else exact([1] * blocks, stages)).bounds
    else:
        weights = [float(one) for one in (flops if method == "flops" else parameters)]
        bounds = (balanced_like_deepspeed(weights, stages) if deepspeed else exact(weights, stages)).bounds
    for stage, (start, end) in enumerate(pairwise(bounds)):
        if start == end:
            raise refusal(
                en=f"partition={layout.partition!r} leaves stage {stage} without a block: use partition='uniform' "
                "or fewer stages.",
                fr=f"partition={layout.partition!r} laisse l’étage {stage} sans bloc : prenez "
                "partition='uniform' ou moins d’étages.",
            )
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
            more = "s" if weight > 1 else ""
            return say(en=f"{weight} block{more}", fr=f"{weight} bloc{more}")
        return format_count(weight, self.unit if self.unit == "FLOP" else "")

    def title(self) -> str:
        """Return the title of the weights, in the reader's language."""
        return {
            "parameters": say(en="parameters", fr="paramètres"),
            "flops": say(en="FLOPs of the forward pass of one sample", fr="FLOPs de la passe avant d’un exemple"),
            "time": say(
                en="measured time, forward and backward of one micro-batch",
                fr="temps mesuré, passes avant et arrière d’un micro-batch",
            ),
            "uniform": say(en="number of blocks", fr="nombre de blocs"),
            "regex": say(en="number of blocks that match", fr="nombre de blocs conformes au motif"),
        }[self.by]


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
    config: RunConfig, by: Measure = "parameters", pattern: str | None = None, tell: Tell | None = None
) -> BlockWeights:
    """Weigh every block of a configuration's model.

    Args:
        config: names the model, the size of its input, and for `time` the micro-batch and the device.
        by: `parameters`; `flops` of the forward pass; `time`, forward and backward really run; `uniform`, 1 each;
            `regex`, 1 where `pattern` is found in the block's class, else 0 (as DeepSpeed's `type:`).
        pattern: of `regex`, and of it only.
        tell: called with the number of blocks that have been timed.

    Raises:
        LabError: an unknown way to weigh, a pattern without `regex` or `regex` without one, a pattern found nowhere.
    """
    if by not in MEASURES:
        raise LabError(one_of(say(en="way to weigh blocks", fr="façon de peser les blocs"), by, MEASURES))
    if (by == "regex") != (pattern is not None):
        raise refusal(
            en="the pattern belongs to the weights by regex: give both (by regex, pattern Attention), or neither.",
            fr="le motif va avec les poids par regex : donnez les deux (par regex, motif Attention), ou aucun.",
        )
    counted = _counted(config.built_model, config.image_size, config.sequence_length, config.num_classes)
    kinds = tuple(kind for kind, _, _ in counted)
    if by == "parameters":
        return BlockWeights(by, kinds, tuple(parameters for _, parameters, _ in counted), "")
    if by == "flops":
        return BlockWeights(by, kinds, tuple(flops for _, _, flops in counted), "FLOP")
    if by == "time":
        return BlockWeights(by, kinds, block_times(config, tell=tell).step_s, "s")
    ones = (1,) * len(kinds) if pattern is None else pattern_weights(kinds, pattern)
    return BlockWeights(by, kinds, ones, "blocks")


@lru_cache(maxsize=64)
def _counted(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int | None
) -> tuple[tuple[str, int, int], ...]:
    """Class, parameters and FLOPs of every block."""
    from dlojz.models.meta import flops_by_block

    built, sample = _on_meta(model, image_size, sequence_length, num_classes)
    flops = flops_by_block(built.eval(), sample)
    held = [set(block.parameters()) for block in built.blocks]
    if not built.is_chain:  # the last block calls the others: its own are those that they do not hold
        held[-1] -= set().union(*held[:-1])
    return tuple(
        (type(block).__name__, sum(parameter.numel() for parameter in own), each)
        for block, own, each in zip(built.blocks, held, flops, strict=True)
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
        raise refusal(
            en=f"a block is timed at least once, but repetitions={repetitions} was received: use {REPETITIONS}.",
            fr=f"un bloc est chronométré au moins une fois, mais repetitions={repetitions} a été reçu : "
            f"prenez {REPETITIONS}.",
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise refusal(
            en="device='cuda' was asked for, but torch finds no GPU here: use device='cpu', or time the blocks "
            "where the GPU is.",
            fr="device='cuda' a été demandé, mais torch ne trouve pas de GPU ici : prenez device='cpu', ou "
            "chronométrez les blocs là où est le GPU.",
        )
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    built, x = _on_meta(
        config.built_model, config.image_size, config.sequence_length, config.num_classes, config.layout.micro_batch
    )
    if not built.is_chain:
        raise refusal(
            en=f"the blocks of {config.model_name} form no chain, so that none is timed alone: balance its stages by "
            "parameters or flops.",
            fr=f"les blocs de {config.model_name} ne forment pas une chaîne, et aucun ne se chronomètre donc seul : "
            "équilibrez ses étages par parameters ou flops.",
        )
    known: dict[tuple[str, torch.Size, bool], tuple[float, float, Tensor]] = {}
    forward_s, backward_s = [], []
    for number, block in enumerate(built.train().blocks):
        kind = (repr(block), x.shape, number == 0)
        if kind not in known:
            # On meta: the shape of what the next block reads, nothing computed.
            with torch.no_grad():
                output = block(x)
            given = _real_input(x, config.num_classes, device, gradient=number > 0)
            durations = list(_durations(_with_weights(block, device), given, repetitions))
            block.to("meta")  # gives its memory back
            known[kind] = (
                statistics.median(forward for forward, _ in durations),
                statistics.median(backward for _, backward in durations),
                output,
            )
        forward, backward, x = known[kind]
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


def _durations(block: nn.Module, given: Tensor, repetitions: int) -> Iterator[tuple[float, float]]:
    """Seconds of the forward and of the backward pass, the warm-up left out."""
    import torch

    def now_s() -> float:
        if given.is_cuda:
            torch.cuda.synchronize()  # a GPU is told what to do and does it later
        return time.perf_counter()

    gradient = None
    for repetition in range(repetitions + 1):
        # Added to old gradients, backward would take longer.
        block.zero_grad(set_to_none=True)
        given.grad = None
        begin_s = now_s()
        output = block(given)
        forward_end_s = now_s()
        # Made once, and outside of both times.
        gradient = torch.ones_like(output) if gradient is None else gradient
        start_s = now_s()
        output.backward(gradient)
        if repetition:
            yield forward_end_s - begin_s, now_s() - start_s
