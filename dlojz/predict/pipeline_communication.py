"""What one rank of a pipeline sends, receives and averages in one step.

Layer 3. Invariant: counted from the schedule itself and from the shapes of the boundaries, so equal, byte for byte, to
what the probe sees. One micro-batch crosses a boundary between two ranks twice: its activation there, its gradient
back.

Source: Huang et al. 2019, "GPipe" (arXiv 1811.06965), §2.2, for what crosses; Li & Hoefler 2021, "Chimera"
(arXiv 2107.06925), §3.2, for the two copies of each stage of a bidirectional pipeline, whose gradients are added.
"""

from __future__ import annotations

from dlojz import models
from dlojz.config import RunConfig
from dlojz.footprint import Collective, Traffic
from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, FORWARD
from dlojz.pipeline.cuts import schedule_of
from dlojz.pipeline.schedule import Schedule
from dlojz.predict.boundaries import boundaries_of_run
from dlojz.predict.parts import axes_of, bounds_of, part_of, rank_stages
from dlojz.predict.shapes import ModelShapes
from dlojz.predict.states import FP32_BYTES, compute_bytes


def pipeline_traffic(config: RunConfig, shapes: ModelShapes, rank: int) -> list[Traffic]:
    """One rank's traffic in a steady step, without the lab's own control group.

    Args:
        config: a run with pp > 1.
        shapes: of the whole model.
        rank: from 0 to the world size.
    """
    layout = config.layout
    pipeline_rank = axes_of(config, rank)[2]
    schedule = schedule_of(layout)
    bounds = bounds_of(config, shapes)
    sent, received = _messages(config, schedule, pipeline_rank, bounds)
    traffic = [_of("send", "pp", layout.pp, sent), _of("recv", "pp", layout.pp, received)]
    held = {
        (pipe, stage)
        for pipe, ranks in enumerate(schedule.placement)
        for stage, holder in enumerate(ranks)
        if holder == pipeline_rank
    }
    own = part_of(config, shapes, rank)
    numel = {stage: _numel(own, range(bounds[stage], bounds[stage + 1])) for _, stage in held}
    if schedule.pipes > 1:
        traffic.append(_of("all_reduce", "twins", 2, [FP32_BYTES * numel[stage] for _, stage in held]))
    if layout.strategy == "fsdp2":
        traffic += _sharded(config, own)
    elif layout.dp > 1 and layout.engine != "deepspeed":
        traffic.append(_of("all_reduce", "dp", layout.dp, [FP32_BYTES * numel[stage] for _, stage in held]))
    if layout.engine == "deepspeed" and (layout.zero or config.precision != "fp32"):
        traffic.append(_of("all_reduce", "pp", layout.pp, [FP32_BYTES]))  # the gradient's norm, over the stages too
    return [one for one in traffic if one.count]


def _sharded(config: RunConfig, own: ModelShapes) -> list[Traffic]:
    """FSDP2 below torch's pipeline: a block's weights are gathered once per step, its gradients reduced once."""
    dp, blocks = config.layout.dp, len(list(own.blocks()))
    whole = dp * sum(parameter.padded_rows_numel(dp) for parameter in own.parameters)
    return [
        _of("all_gather", "dp", dp, [compute_bytes(config) * whole], blocks),
        _of("reduce_scatter", "dp", dp, [FP32_BYTES * whole], blocks),
    ]


def _messages(
    config: RunConfig, schedule: Schedule, pipeline_rank: int, bounds: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """Bytes of each message that a pipeline rank sends, and of each that it receives."""
    at_block = boundary_bytes(config)
    sent, received = [], []
    for action in schedule.orders[pipeline_rank]:
        for element in action.elements:
            if element.kind not in (FORWARD, BACKWARD, BACKWARD_INPUT):
                continue
            placement, stage = schedule.placement[element.pipe], element.stage
            forward = element.kind == FORWARD
            before, after = (stage - 1, stage + 1) if forward else (stage + 1, stage - 1)
            entering, leaving = (stage, stage + 1) if forward else (stage + 1, stage)
            if 0 <= before < schedule.stages and placement[before] != pipeline_rank:
                received.append(at_block[bounds[entering]])
            if 0 <= after < schedule.stages and placement[after] != pipeline_rank:
                sent.append(at_block[bounds[leaving]])
    return sent, received


def boundary_bytes(config: RunConfig) -> tuple[int, ...]:
    """Bytes of what enters each block of the model for one micro-batch, and last of what leaves it."""
    return tuple(one.message_bytes for one in boundaries_of_run(config))


def sample_bytes(config: RunConfig) -> tuple[int, int]:
    """Bytes of one micro-batch's inputs and of its targets."""
    layout, integer = config.layout, 8
    if models.spec(config.model).family == "text":
        tokens = layout.micro_batch * (config.sequence_length or 1) * integer
        return tokens, tokens
    side = config.image_size or 1
    return layout.micro_batch * 3 * side * side * FP32_BYTES, layout.micro_batch * integer


def samples_bytes(config: RunConfig, rank: int) -> int:
    """What a pipeline rank keeps of a step's samples: all inputs with its first stage, all targets with its last."""
    layout = config.layout
    if layout.pp == 1:
        return 0
    inputs_bytes, targets_bytes = sample_bytes(config)
    held = rank_stages(config, rank)
    last = schedule_of(layout).stages - 1
    of_one = inputs_bytes * (0 in held) + targets_bytes * (last in held)
    # torch takes a step's micro-batches as one batch, and cuts it again.
    copies = 2 if layout.engine == "torch" else 1
    return copies * layout.micro_batches * of_one


def _numel(shapes: ModelShapes, blocks: range) -> int:
    return sum(parameter.numel for parameter in shapes.parameters if parameter.block in blocks)


def _of(collective: Collective, group: str, size: int, messages: list[int], count: int | None = None) -> Traffic:
    return Traffic(
        collective=collective,
        group=group,
        group_size=size,
        count=len(messages) if count is None else count,
        message_bytes=sum(messages),
    )
