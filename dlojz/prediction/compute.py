"""Count FLOPs of a step, bytes of a checkpoint, and costs of a curriculum.

**FLOPs** are counted from shapes on the meta device; two operations per multiply-add.

**Checkpoint**: bytes of the tensors that are written, in every layout: the logical state, replicas once. With Ψ
parameters: 4Ψ of weights in fp32, 4Ψ for each moment (one for momentum, two for Adam, so 12Ψ in all); BatchNorm
statistics of each replica; errors of each rank in the second stage of a compressing optimizer; the own states of
replicas that rarely communicate; 5,056 bytes of each rank's random numbers; 8 bytes of Adam's count of updates. Neither
gradients nor activations. Headers and the manifest make the files a little larger. Source: Rajbhandari et al. 2020
(arXiv 1910.02054), §3.1, for what the states of a training are.

**Curriculum**: a step with short samples costs what a step of a run of that length costs; the peak in memory is that of
the whole length, from the first whole step on.
"""

from __future__ import annotations

from functools import lru_cache

from dlojz import models
from dlojz.base.language import refusing_overflow
from dlojz.config.fields import block_choices
from dlojz.config.optimizers import LOCAL, OPTIMIZERS
from dlojz.config.run_config import RunConfig
from dlojz.models.experts.routing import Routing
from dlojz.models.foreign.names import is_elsewhere
from dlojz.prediction.shapes import (
    AUTOCAST,
    FP32_BYTES,
    WHOLE,
    RankPart,
    Split,
    build_on_meta,
    keys_of,
    model_shapes,
    num_blocks,
    untied_shapes,
)
from dlojz.prediction.states import compute_bytes, error_bytes, is_orthogonalized, state_elements

NEWTON_SCHULZ_STEPS = 5
"""As in `dlojz.by_hand.optimizers.muon.STEPS`, which loads torch."""


def step_flops(config: RunConfig, rank: int = 0) -> float:
    """Count the FLOPs of one rank in one step: forward once, backward twice as much, and recomputation.

    A pipeline rank computes the blocks of its stages; a tensor-parallel one its part of each layer, and all of what is
    not split; a context-parallel one its tokens (see `_context_flops`). Normalisations and activation functions are not
    counted, nor the scores that fused attention kernels recompute in backward (2 % for the lab's small text models);
    the unneeded gradient of the images is. A model from elsewhere is counted as autograd runs it, without what a
    frozen layer or the inputs do not need (see `_traced_flops`). Full checkpointing recomputes the forward pass but for
    the end of each block (see `_not_recomputed`), selective checkpointing no product, or every second one. The products
    of Muon's and Adafactor's update are added (see `update_flops`).

    Source: Korthikanti et al. 2022 (arXiv 2205.05198), appendix A, for the factors 3 and, at most, 4.
    """
    return _passes_flops(config, rank) + update_flops(config)


def update_flops(config: RunConfig) -> float:
    """Count the FLOPs of an update that are products of matrices, on every rank; other optimizers have none.

    Muon: five times X Xᵀ, A A and B X, 4 k² l + 2 k³ with k ≤ l the sides of a hidden matrix; each rank computes all,
    also of what it has a part of. Adafactor: rows times columns, 2 n m for each matrix n × m. Source: see
    `dlojz.by_hand.optimizers.muon`; torch 2.13, `optim/_adafactor.py`.
    """
    spec, flops = OPTIMIZERS[config.optimizer], 0
    if not spec.matrix_states:
        return 0.0
    for parameter in model_shapes(config).trained.parameters:
        if is_orthogonalized(spec, parameter):
            smaller, larger = sorted(parameter.shape)
            flops += NEWTON_SCHULZ_STEPS * (4 * smaller**2 * larger + 2 * smaller**3)
        elif not spec.orthogonal and len(parameter.shape) > 1:
            flops += 2 * parameter.numel
    return float(flops)


def _passes_flops(config: RunConfig, rank: int) -> float:
    """FLOPs of forward and backward of a rank, recomputation included."""
    layout, part = config.layout, RankPart(config, rank)
    if config.experts is not None:
        return _mixed_flops(part)
    if layout.cp > 1:
        repeated_flops = sum(recomputed_flops(config).values())
        # `_context_flops` is of one sample, what is recomputed of the whole step.
        return _context_flops(config) * layout.micro_batch * layout.micro_batches + repeated_flops
    if layout.tp > 1:
        return _split_flops(part) * layout.micro_batch * layout.micro_batches
    traced_flops = _traced_flops(part)
    if traced_flops is not None:
        return traced_flops
    summary = models.describe(
        config.model, config.image_size, sequence_length=config.sequence_length, num_classes=config.num_classes
    )
    # Backward multiplies twice as much as forward: once for the inputs' gradients, once for the weights'.
    sample_flops = 3 * summary.flops
    repeated_flops = 0.0
    if layout.checkpointing in ("full", "every_second") or layout.activation_plan or layout.loss_chunks > 1:
        repeated_flops = sum(recomputed_flops(config).values())
    return (float(sample_flops * layout.micro_batch * layout.micro_batches) + repeated_flops) * _share(part)


def _traced_flops(part: RankPart) -> float | None:
    """Count the FLOPs of a rank's step on a model from elsewhere, product by product, all passes of its blocks.

    None for a model of the catalogue.
    """
    layout = part.config.layout
    if not is_elsewhere(part.config.model):
        return None
    from dlojz.prediction.model_trace import trace_of  # loads torch

    flops_of = trace_of(part).flops_of
    if layout.pp == 1:
        return float(sum(flops_of.values()) * layout.micro_batches)
    loss = flops_of.get("", 0) * part.stages.count(len(part.bounds) - 2)
    # A bidirectional pipeline sends half of the micro-batches each way.
    own_flops = loss + sum(flops_of.get(f"blocks.{block}", 0) for block in part.blocks)
    return float(own_flops * layout.micro_batches) / part.pipes


def recomputed_flops(config: RunConfig) -> dict[int, float]:
    """Count the FLOPs of a step that recompute each block in backward, with whole layers; empty where none is."""
    layout = config.layout
    tokens = config.sequence_length and config.sequence_length // layout.cp
    sizes = (config.built_model, config.image_size, tokens, config.num_classes)
    # `_flops_by_module` counts on shapes, so that one sample stands for all where nothing is rounded.
    samples = layout.micro_batch if config.experts is not None else 1  # capacities are rounded up
    flops_of = _flops_by_module(*sizes, WHOLE, routing=config.routing, samples=samples)
    times = layout.micro_batch * layout.micro_batches / samples
    block_flops = {block: times * flops for block, flops in _recomputed_flops(config, flops_of).items()}
    if layout.cp > 1 and layout.checkpointing in ("none", "full"):  # else the products of attention are kept
        local_flops, ring = _attention_flops(config)
        for block in range(1, keys_of(config).layers + 1):  # the first is the embedding
            if block in block_flops:
                # Counted so far: attention among the rank's own tokens.
                block_flops[block] += times * (ring - local_flops)
    return block_flops


def _mixed_flops(part: RankPart) -> float:
    """FLOPs of a model with mixtures, whose experts compute all rows of their buffers, also empty ones.

    Counted for a whole micro-batch, as capacities are rounded up.
    """
    config, layout = part.config, part.config.layout
    flops_of = _flops_by_module(
        config.built_model,
        None,
        config.sequence_length,
        config.num_classes,
        WHOLE,
        routing=config.routing,
        samples=layout.micro_batch,
    )
    forward = flops_of[""]
    repeated_flops = sum(_recomputed_flops(config, flops_of).values())
    return float(3 * forward + repeated_flops) * layout.micro_batches * _share(part)


def _split_flops(part: RankPart) -> float:
    """FLOPs of one sample on a rank that holds part of each layer, counted on that part."""
    config = part.config
    sizes = (config.image_size, config.sequence_length, config.num_classes)
    flops_of = _flops_by_module(config.built_model, *sizes, part.split)
    forward = sum(flops_of.get(f"blocks.{block}", 0) for block in part.blocks)
    again_of = _recomputed_flops(config, flops_of)
    repeated_flops = sum(again_of.get(block, 0) for block in part.blocks)
    # Both pipes' stages are counted above, but each pipe takes half of the micro-batches.
    return float(3 * forward + repeated_flops) / part.pipes


RING_PASSES = 3.5
"""FLOPs of ring attention forward and backward, of those forward: two products there, and here five, the scores' again.
"""


def _context_flops(config: RunConfig) -> float:
    """FLOPs of one sample on a rank that computes S = T / cp of its tokens, without recomputation."""
    length = (config.sequence_length or 0) // config.layout.cp
    forward = _flops_by_module(config.built_model, None, length, config.num_classes, WHOLE)[""]
    local_flops, ring = _attention_flops(config)
    return 3 * forward + keys_of(config).layers * (RING_PASSES * ring - 3 * local_flops)


def _attention_flops(config: RunConfig) -> tuple[float, float]:
    """FLOPs of a layer's attention forward, for S = T / cp tokens of a sample: among themselves, and round the ring.

    Among themselves 4·S²·N·H, with N heads of width H. A rank of the ring holds two chunks, and computes 2·cp + 1 pairs
    of them, those that causality leaves, each a quarter of that.
    """
    from dlojz.by_hand.context_parallel import pairs_computed  # loads torch

    cp, keys = config.layout.cp, keys_of(config)
    local_flops = 4.0 * ((config.sequence_length or 0) // cp) ** 2 * keys.queries * keys.width
    return local_flops, pairs_computed(cp, "zigzag")[0] / 4 * local_flops


def _share(part: RankPart) -> float:
    """Part of the model's FLOPs, by blocks, that one rank computes per micro-batch of its replica."""
    if part.config.layout.pp == 1:
        return 1.0
    from dlojz.pipeline.partition import block_weights

    flops = block_weights(part.config, "flops").weights
    # A bidirectional pipeline sends half of the micro-batches each way.
    return float(sum(flops[block] for block in part.blocks) / sum(flops)) / part.pipes


def _recomputed_flops(config: RunConfig, flops_of: dict[str, int]) -> dict[int, int]:
    """FLOPs of each block that backward computes again.

    Args:
        flops_of: each module's forward, in the order in which they are called.
    """
    kind, chosen = config.layout.checkpointing, block_choices(config.layout.activation_plan)
    shapes = model_shapes(config)
    if config.layout.loss_chunks > 1:
        # The product of the head, whatever is done with the blocks before it.
        last, whole = num_blocks(shapes) - 1, config.layout.model_copy(update={"loss_chunks": 1})
        repeated = _recomputed_flops(config.model_copy(update={"layout": whole}), flops_of)
        return {**repeated, last: flops_of[f"blocks.{last}.output"]}
    if kind not in ("full", "every_second") and not chosen:
        return {}
    skipped = _not_recomputed(config)
    matrices = {
        parameter.module
        for parameter in shapes.parameters
        if len(parameter.shape) == 2 and parameter.name.endswith(".weight")
    }
    block_flops = {}
    for number in range(num_blocks(shapes)):
        block = f"blocks.{number}"
        modules = [name for name in flops_of if name == block or name.startswith(f"{block}.")]
        if chosen and chosen[number] != "recompute":
            continue
        if kind != "every_second":
            spared = sum(flops_of[name] for name in modules if name in skipped)
            block_flops[number] = flops_of.get(block, 0) - spared
        else:
            # `flops_of` is in the order of the calls: the second product of a block, the fourth, …
            second = [name for name in modules if name in matrices][1::2]
            block_flops[number] = sum(flops_of[name] for name in second if name not in skipped)
    return block_flops


def _not_recomputed(config: RunConfig) -> tuple[str, ...]:
    """The last module of each block, where torch stops recomputing once it has saved all that backward needs.

    Engines that gather weights (FSDP2, DeepSpeed stage 3) make a linear layer save its inputs after the product, so
    they spare convolutions only; FSDP2 sometimes spares linear layers without bias too.
    """
    # A mixture weighs what its experts give, and so needs all of it again.
    mixed = {parameter.block for parameter in model_shapes(config).parameters if parameter.is_expert}
    last_modules = [block[-1].module for block in untied_shapes(config).blocks() if block[-1].block not in mixed]
    if not config.layout.engine_spec.saves_inputs_late:
        return tuple(last_modules)
    convolutions = {parameter.module for parameter in model_shapes(config).parameters if len(parameter.shape) == 4}
    return tuple(module for module in last_modules if module in convolutions)


@lru_cache(maxsize=64)
@refusing_overflow()
def _flops_by_module(
    model: str,
    image_size: int | None,
    sequence_length: int | None,
    num_classes: int,
    split: Split,
    *,
    routing: Routing | None = None,
    samples: int = 1,
) -> dict[str, int]:
    """Forward FLOPs of so many samples within each module of the model, or of one rank's part of it."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from dlojz.models.meta import sample_inputs

    built = build_on_meta(model, image_size, sequence_length, num_classes, split, routing=routing).eval()
    sample = sample_inputs(model, samples, image_size=image_size, sequence_length=sequence_length)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        built(sample)
    # `GPT.blocks.0` becomes `blocks.0`; `Global` and `GPT`, both the whole model, become the empty name.
    return {name.partition(".")[2]: sum(of_op.values()) for name, of_op in counter.get_flop_counts().items()}


RANDOM_STATE_BYTES = 5056
"""Of torch's generator on the CPU (`at::CPUGeneratorImplState`); that of a GPU has 16 bytes more."""

COUNT_BYTES = 8


def checkpoint_bytes(config: RunConfig) -> int:
    """Compute the bytes of all tensors in a checkpoint of this run."""
    shapes, layout = model_shapes(config), config.layout
    optimizer = OPTIMIZERS[config.optimizer]
    # Frozen weights have no moments.
    frozen_bytes = sum(parameter.num_bytes for parameter in shapes.parameters if not parameter.is_trained)
    trained_bytes = sum(parameter.num_bytes for parameter in shapes.trained.parameters)
    moment_bytes = sum(
        parameter.element_bytes * state_elements(optimizer, parameter, parameter.numel)
        for parameter in shapes.trained.parameters
    )
    parameter_bytes = frozen_bytes + trained_bytes + moment_bytes
    cast_bytes = compute_bytes(config) * shapes.float_buffer_elements + shapes.integer_buffer_bytes
    # Engines that cast the weights cast BatchNorm's statistics too; integers, its count of batches, stay.
    replica_bytes = shapes.buffer_bytes if layout.strategy in AUTOCAST else cast_bytes
    # One count for all parameters; what else is one number for each (1-bit LAMB's c_avg and r) is in fp32.
    numbers = optimizer.numbers
    count_bytes = (COUNT_BYTES if numbers else 0) + FP32_BYTES * max(0, numbers - 1) * len(shapes.parameters)
    # Errors of compression differ from rank to rank: each rank's are kept.
    own_bytes = layout.dp * error_bytes(config, shapes.num_parameters)
    if config.optimizer in LOCAL:
        own_bytes = (layout.dp - 1) * FP32_BYTES * optimizer.replica_tensors * shapes.num_parameters
    # BatchNorm statistics of each replica, and of each pipe of a bidirectional schedule.
    replicas = layout.dp * RankPart(config).pipes
    random_bytes = layout.world_size * RANDOM_STATE_BYTES
    return parameter_bytes + count_bytes + own_bytes + replicas * replica_bytes + random_bytes
