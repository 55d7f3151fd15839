"""Which part of a model one rank holds under tensor and pipeline parallelism.

Layer 3. Invariant: pure arithmetic on shapes; the parts of all ranks together hold every element once, but for what
tensor parallelism leaves whole on each rank (normalisations, biases of row-parallel layers, shortcuts). How a layer is
shared out, `dlojz.tensor` alone knows.

Source: Narayanan et al. 2021 (arXiv 2104.04473), §2, for contiguous stages and for the order of the ranks: tensor
innermost, pipeline outermost.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.pipeline.cuts import schedule_of, stage_bounds
from dlojz.predict.experts import share_experts
from dlojz.predict.shapes import ModelShapes, share_shapes


def axes_of(config: RunConfig, rank: int) -> tuple[int, int, int]:
    """Position of a rank along the axes (dp, tp, pp)."""
    layout = config.layout
    return rank // layout.tp % layout.dp, rank % layout.tp, rank // (layout.tp * layout.dp)


def num_blocks(shapes: ModelShapes) -> int:
    """Blocks of a model."""
    return max(parameter.block for parameter in shapes.parameters) + 1


def bounds_of(config: RunConfig, shapes: ModelShapes) -> tuple[int, ...]:
    """First block of each stage of a layout's pipeline, and the number of blocks.

    Raises:
        LabError: if the schedule does not fit the layout, or a stage would have no block.
    """
    layout = config.layout
    blocks = num_blocks(shapes)
    stages = layout.pp if layout.engine == "deepspeed" else schedule_of(layout).stages
    if layout.partition == "uniform":
        return stage_bounds(layout, stages, [""] * blocks, [1] * blocks)
    from dlojz.pipeline.block_weights import block_weights  # loads torch

    parameters = block_weights(config, "parameters")
    flops = [float(one) for one in block_weights(config, "flops").weights] if layout.partition == "flops" else []
    return stage_bounds(layout, stages, parameters.kinds, [int(one) for one in parameters.weights], flops)


def rank_stages(config: RunConfig, rank: int) -> tuple[int, ...]:
    """The stages that one rank holds, in order; one that it holds twice (bidirectional schedules) counts twice."""
    if config.layout.pp == 1:
        return (0,)
    pipeline_rank = axes_of(config, rank)[2]
    schedule = schedule_of(config.layout)
    held = [s for ranks in schedule.placement for s, holder in enumerate(ranks) if holder == pipeline_rank]
    return tuple(sorted(held))


def part_of(config: RunConfig, shapes: ModelShapes, rank: int) -> ModelShapes:
    """What one rank holds of a model before data parallelism shares it out further.

    Args:
        config: the run.
        shapes: of the whole model.
        rank: from 0 to the world size.
    """
    layout = config.layout
    if layout.tp > 1:
        shapes = share_shapes(config, axes_of(config, rank)[1])
    if layout.ep > 1:
        shapes = share_experts(shapes, layout.ep)
    if layout.pp == 1:
        return shapes
    bounds = bounds_of(config, shapes)
    held = {block for stage in rank_stages(config, rank) for block in range(*bounds[stage : stage + 2])}
    buffers = tuple(buffer for buffer in shapes.buffers if buffer[0] in held)
    return ModelShapes(
        tuple(parameter for parameter in shapes.parameters if parameter.block in held),
        sum(elements for _, elements, _ in buffers),
        sum(integer_bytes for _, _, integer_bytes in buffers),
        buffers,
    )
