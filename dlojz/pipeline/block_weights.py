"""What each block of a model weighs: in parameters, in FLOPs, in measured seconds.

Layer 2. Invariant: counts are made on the meta device, so a model of any size is weighed without its memory; seconds
are those of blocks that really ran, one block in memory at a time. torch is imported by the functions, not here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

from dlojz import models
from dlojz.config import RunConfig
from dlojz.pipeline.partition import Weight
from dlojz.pipeline.partition_peers import pattern_weights
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.units import format_count, format_seconds

if TYPE_CHECKING:
    from torch import Tensor, nn

Measure = Literal["parameters", "flops", "time", "uniform", "regex"]
MEASURES: tuple[Measure, ...] = get_args(Measure)
REPETITIONS = 5
Tell = Callable[[int, int], None]
"""Called with the number of blocks done and of all blocks."""


@dataclass(frozen=True)
class BlockWeights:
    """The blocks of a model in order: the class of each, and what it weighs.

    ``unit`` is empty for parameters, `FLOP` (forward pass of one sample, two per multiply-add), `s` (forward and
    backward of one micro-batch), or `blocks` (uniform and regex).
    """

    by: Measure
    kinds: tuple[str, ...]
    weights: tuple[Weight, ...]
    unit: str

    def text(self, weight: Weight) -> str:
        """A weight, or a sum of some, as people read it: with its prefix and its unit."""
        if self.unit == "s":
            return format_seconds(weight)
        if self.unit == "blocks":
            more = "s" if weight > 1 else ""
            return say(en=f"{weight} block{more}", fr=f"{weight} bloc{more}")
        return format_count(weight, self.unit if self.unit == "FLOP" else "")

    def title(self) -> str:
        """What is weighed, in the reader's language."""
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
    """Measured seconds of each block, for one micro-batch: medians over repetitions, in fp32."""

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
        tell: told how many blocks have been timed.

    Raises:
        LabError: an unknown way to weigh, a pattern without `regex` or `regex` without one, a pattern found nowhere.
    """
    if by not in MEASURES:
        raise LabError(one_of(say(en="way to weigh blocks", fr="façon de peser les blocs"), by, MEASURES))
    if (by == "regex") != (pattern is not None):
        raise LabError(
            say(
                en="the pattern belongs to the weights by regex: give both (by regex, pattern Attention), or neither.",
                fr="le motif va avec les poids par regex : donnez les deux (par regex, motif Attention), ou aucun.",
            )
        )
    counted = _counted(config.model, config.image_size, config.sequence_length, config.num_classes)
    kinds = tuple(block.kind for block in counted)
    if by == "parameters":
        return BlockWeights(by, kinds, tuple(block.parameters for block in counted), "")
    if by == "flops":
        return BlockWeights(by, kinds, tuple(block.flops for block in counted), "FLOP")
    if by == "time":
        return BlockWeights(by, kinds, block_times(config, tell=tell).step_s, "s")
    ones = (1,) * len(kinds) if pattern is None else pattern_weights(kinds, pattern)
    return BlockWeights(by, kinds, ones, "blocks")


@dataclass(frozen=True)
class _Block:
    kind: str
    parameters: int
    flops: int


@lru_cache(maxsize=64)
def _counted(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int | None
) -> tuple[_Block, ...]:
    """Class, parameters and FLOPs of every block; those that print alike and read the same shape are run once."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    built, x = _on_meta(model, image_size, sequence_length, num_classes)
    known: dict[tuple[str, torch.Size], tuple[int, Tensor]] = {}
    counted: list[_Block] = []
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels are opaque to the counter
        for block in built.eval().blocks:
            kind = (repr(block), x.shape)
            if kind not in known:
                with FlopCounterMode(display=False) as counter:
                    output = block(x)
                known[kind] = (int(counter.get_total_flops()), output)
            flops, x = known[kind]
            parameters = sum(parameter.numel() for parameter in block.parameters())
            counted.append(_Block(type(block).__name__, parameters, flops))
    return tuple(counted)


def _on_meta(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int | None, samples: int = 1
) -> tuple[Any, Tensor]:
    """The model without memory, and an input of the right shape without values."""
    import torch

    entry = models.spec(model)
    with torch.device("meta"):
        built = models.build(model, image_size=image_size, sequence_length=sequence_length, num_classes=num_classes)
        if entry.family == "image":
            side = image_size or entry.image_size or 1
            return built, torch.empty(samples, entry.in_channels or 3, side, side)
        return built, torch.empty(samples, sequence_length or entry.sequence_length or 1, dtype=torch.long)


def block_times(
    config: RunConfig, repetitions: int = REPETITIONS, tell: Tell | None = None, every_block: bool = False
) -> BlockTimes:
    """Run the forward and the backward pass of every block, and take the medians of their durations.

    One block at a time is given memory and random weights, runs once to warm up, then `repetitions` times, in fp32
    and in training mode. The first block computes no gradient of its input, as in a training step.

    Args:
        config: model, input size, micro-batch, and device (`cpu`, or a GPU if there is one).
        repetitions: at least 1; the warm-up is not counted.
        tell: told how many blocks are done, out of how many.
        every_block: time also the blocks that print alike and read the same shape as one already timed, which are the
            same program; without it their times are the same figure.

    Raises:
        LabError: if no repetition is asked for.
    """
    import torch

    if repetitions < 1:
        raise LabError(
            say(
                en=f"a block is timed at least once, but repetitions={repetitions} was received: use {REPETITIONS}.",
                fr=f"un bloc est chronométré au moins une fois, mais repetitions={repetitions} a été reçu : "
                f"prenez {REPETITIONS}.",
            )
        )
    if config.device == "cuda" and not torch.cuda.is_available():
        raise LabError(
            say(
                en="device='cuda' was asked for, but torch finds no GPU here: use device='cpu', or time the blocks "
                "where the GPU is.",
                fr="device='cuda' a été demandé, mais torch ne trouve pas de GPU ici : prenez device='cpu', ou "
                "chronométrez les blocs là où est le GPU.",
            )
        )
    device = torch.device("cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu")
    built, x = _on_meta(
        config.model, config.image_size, config.sequence_length, config.num_classes, config.layout.micro_batch
    )
    known: dict[tuple[str, torch.Size, bool], tuple[float, float, Tensor]] = {}
    forward_s, backward_s = [], []
    for number, block in enumerate(built.train().blocks):
        kind = (repr(block), x.shape, number == 0)
        if every_block or kind not in known:
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
        block.zero_grad(set_to_none=True)
        given.grad = None
        begin_s = now_s()
        output = block(given)
        forward_end_s = now_s()
        gradient = torch.ones_like(output) if gradient is None else gradient
        start_s = now_s()
        output.backward(gradient)
        if repetition:
            yield forward_end_s - begin_s, now_s() - start_s
