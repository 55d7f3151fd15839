"""Which part of a model one rank holds under tensor and pipeline parallelism.

Layer 3. Invariant: pure arithmetic on shapes; the parts of all ranks together hold every element once, but for what
tensor parallelism leaves whole on each rank (normalisations, biases of row-parallel layers, convolutions).

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, for what is split how; Narayanan et al. 2021
(arXiv 2104.04473), §2, for contiguous stages and for the order of the ranks: tensor innermost, pipeline outermost.
"""

from __future__ import annotations

from dataclasses import replace

from dlojz import models
from dlojz.config import RunConfig
from dlojz.pipeline.cuts import schedule_of, stage_bounds
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.schema import LabError
from dlojz.text import say

COLUMN_PARALLEL = frozenset({"qkv", "query", "key", "value", "mlp_expand", "mlp_gate"})
"""Linear layers whose outputs are shared out: a tensor-parallel region begins."""
ROW_PARALLEL = frozenset({"attention_project", "mlp_project", "attention.project"})
"""Linear layers whose inputs are shared out, and whose outputs are summed: the region ends."""
VOCABULARY_PARALLEL = frozenset({"token", "output"})
"""Embedding and output layer of a text model, cut along the vocabulary."""


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


def split_names(config: RunConfig) -> tuple[frozenset[str], frozenset[str]]:
    """Last names of the modules where a tensor-parallel region begins, and where it ends."""
    begins = COLUMN_PARALLEL | (frozenset({"output"}) if models.spec(config.model).family == "text" else frozenset())
    return begins, frozenset(name.rpartition(".")[2] for name in ROW_PARALLEL)


def shared_out(config: RunConfig, parameter: ParameterShape) -> ParameterShape:
    """A parameter as one tensor-parallel rank holds it.

    Raises:
        LabError: if its dimension does not divide by `tp`.
    """
    tp = config.layout.tp
    owner, kind = parameter.module, parameter.name.rpartition(".")[2]
    last = owner.rpartition(".")[2]
    text = models.spec(config.model).family == "text"
    heads = kind == "position_bias"
    if heads or last in COLUMN_PARALLEL or (text and last in VOCABULARY_PARALLEL):
        dim = 0
    elif kind == "weight" and (last in ROW_PARALLEL or owner.endswith("attention.project")):
        dim = 1
    else:
        return parameter
    if parameter.shape[dim] % tp:
        raise LabError(
            say(
                en=f"tp={tp} does not divide the {parameter.shape[dim]} rows of {parameter.name} of {config.model}: "
                "use a tp that divides its heads and widths.",
                fr=f"tp={tp} ne divise pas les {parameter.shape[dim]} lignes de {parameter.name} de {config.model} : "
                "prenez un tp qui divise ses têtes et ses largeurs.",
            )
        )
    shape = list(parameter.shape)
    shape[dim] //= tp
    return replace(parameter, shape=tuple(shape))


def part_of(config: RunConfig, shapes: ModelShapes, rank: int) -> ModelShapes:
    """What one rank holds of a model before data parallelism shares it out further.

    Buffers are shared out in proportion to the parameters of the stages.
    """
    layout = config.layout
    if layout.tp == layout.pp == 1:
        return shapes
    bounds = bounds_of(config, shapes) if layout.pp > 1 else (0, num_blocks(shapes))
    held = {block for stage in rank_stages(config, rank) for block in range(*bounds[stage : stage + 2])}
    parameters = tuple(shared_out(config, parameter) for parameter in shapes.parameters if parameter.block in held)
    whole = sum(parameter.numel for parameter in shapes.parameters if parameter.block in held)
    share = whole / shapes.num_parameters if shapes.num_parameters else 0.0
    return ModelShapes(
        parameters, round(share * shapes.float_buffer_elements), round(share * shapes.integer_buffer_bytes)
    )
