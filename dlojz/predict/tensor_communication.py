"""What the ranks that share each layer send one another in one step.

Layer 3. Invariant: the messages of `tensor_messages`, as often as the rank's stages run each block; equal, byte for
byte, to what the probe counts.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3; Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from dlojz.config import RunConfig
from dlojz.footprint import Collective, Traffic
from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, FORWARD
from dlojz.pipeline.cuts import schedule_of
from dlojz.predict.boundaries import boundaries_of_run
from dlojz.predict.parts import axes_of, bounds_of
from dlojz.predict.shapes import ModelShapes, Split, build_on_meta, split_of
from dlojz.predict.states import AUTOCAST, FP32_BYTES, HALF_BYTES
from dlojz.predict.tensor_messages import BLOCKS, OF_WEIGHTS, Message, Sizes
from dlojz.schema import LabError
from dlojz.text import say

if TYPE_CHECKING:
    from torch import nn

    from dlojz.pipeline.runtime import Boundary


def block_messages(config: RunConfig) -> tuple[tuple[Message, ...], ...]:
    """What each block of the model sends along the tensor axis for one micro-batch, the loss with the last.

    Args:
        config: a run with tp > 1.
    """
    layout, split = config.layout, split_of(config)
    blocks = _blocks(config.model, config.image_size, config.sequence_length, config.num_classes, split)
    boundaries = boundaries_of_run(config)
    half = HALF_BYTES if config.precision != "fp32" else FP32_BYTES
    weight_bytes = FP32_BYTES if layout.strategy in AUTOCAST else half
    found = []
    for number, block in enumerate(blocks):
        entering, leaving = boundaries[number : number + 2]
        sizes = Sizes(
            _all_tokens(entering, split),
            _all_tokens(leaving, split),
            split.sequence_parallel,
            entering.dtype.itemsize,
            half,
            weight_bytes,
            layout.engine == "torch",
        )
        messages = BLOCKS.get(type(block).__name__)
        found.append(tuple(messages(block, sizes)) if messages else ())
    return tuple(found)


def tensor_traffic(config: RunConfig, shapes: ModelShapes, rank: int) -> list[Traffic]:
    """One rank's traffic along the tensor axis in a steady step.

    Args:
        config: the run.
        shapes: of the whole model.
        rank: from 0 to the world size; its pipeline stages alone matter.

    Raises:
        LabError: for engine deepspeed, which splits no layers itself.
    """
    layout = config.layout
    if layout.tp == 1:
        return []
    if layout.engine == "deepspeed":
        raise LabError(_unknown(layout.tp, layout.engine))
    # torch leaves such a gradient as the ranks' parts of a sum, which is settled once, before the update; DDP and FSDP2
    # want it whole after each micro-batch (FSDP2 in a pipeline after the last), and so does the lab's own operator.
    settled = layout.engine == "torch" and (layout.pp > 1 or layout.strategy not in ("ddp", "fsdp2"))
    again = layout.checkpointing != "none"
    count: dict[Collective, int] = {}
    num_bytes: dict[Collective, int] = {}
    for messages, passes in zip(block_messages(config), _passes(config, shapes, rank), strict=True):
        for message in messages:
            forward = message.phase == "forward"
            times = passes.forward if forward else passes.backward
            if forward and again and message.again:
                times += passes.backward
            if settled and times and message.what.startswith(OF_WEIGHTS):
                times = 1
            count[message.collective] = count.get(message.collective, 0) + times
            num_bytes[message.collective] = num_bytes.get(message.collective, 0) + times * message.message_bytes
    return [
        Traffic(collective=name, group="tp", group_size=layout.tp, count=number, message_bytes=num_bytes[name])
        for name, number in count.items()
        if number
    ]


def _unknown(tp: int, engine: str) -> str:
    return say(
        en=f"what engine={engine!r} sends along tp={tp} is not predicted: use engine='by_hand' to predict it; "
        "`dlojz memory` predicts the memory of every engine.",
        fr=f"ce que engine={engine!r} envoie selon tp={tp} n’est pas prédit : prenez engine='by_hand' pour le "
        "prédire ; `dlojz memory` prédit la mémoire de tous les moteurs.",
    )


class _Passes(NamedTuple):
    forward: int
    backward: int


def _passes(config: RunConfig, shapes: ModelShapes, rank: int) -> list[_Passes]:
    """How often a rank runs each block's forward and backward in one step."""
    layout = config.layout
    if layout.pp == 1:
        every = max(one.block for one in shapes.parameters) + 1
        return [_Passes(layout.micro_batches, layout.micro_batches)] * every
    schedule, bounds = schedule_of(layout), bounds_of(config, shapes)
    forward, backward = [0] * bounds[-1], [0] * bounds[-1]
    for action in schedule.orders[axes_of(config, rank)[2]]:
        for element in action.elements:
            # The gradient of a stage's input is what goes through its regions; the weights' half sends the rest.
            passes = {FORWARD: forward, BACKWARD: backward, BACKWARD_INPUT: backward}.get(element.kind)
            if passes is not None:
                for block in range(*bounds[element.stage : element.stage + 2]):
                    passes[block] += 1
    return [_Passes(*each) for each in zip(forward, backward, strict=True)]


def _all_tokens(boundary: Boundary, split: Split) -> tuple[int, ...]:
    """Shape of the whole stream, of which a rank has its own tokens only where the sequence is split."""
    if split.sequence_parallel and len(boundary.shape) == 3 and boundary.dtype.is_floating_point:
        batch, tokens, width = boundary.shape
        return batch, tokens * split.size, width
    return boundary.shape


@lru_cache(maxsize=16)
def _blocks(
    model: str, image_size: int | None, sequence_length: int | None, num_classes: int, split: Split
) -> list[nn.Module]:
    return list(build_on_meta(model, image_size, sequence_length, num_classes, split).blocks)
