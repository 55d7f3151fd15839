"""Weigh the blocks of a model: in parameters or FLOPs (on the meta device), or in measured seconds.

What is measured has one block in memory at a time.
torch is imported by the functions, not here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, format_count, format_seconds, one_of, say
from dlojz.config.run_config import RunConfig
from dlojz.pipeline.partition import Weight, pattern_weights

if TYPE_CHECKING:
    from torch import Tensor, nn

TEXTS = Sentences(Path(__file__).parent / "data" / "block_weights.md")

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
        pattern: of `regex`, and of it only.
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
