"""Bytes on the fullest rank of a layout, by category, in closed form.

The formulas of `dlojz.prediction.rules_of_thumb` for many layouts at once (the tests compare both). A rank's peak is
the largest of three moments of its step: at the loss, with the logits; in the backward of a layer, with that layer
computed again and its weights gathered; at the end, with the optimizer's temporaries and no activations.

"Allocated" is what tensors hold; "nvidia-smi" adds the reserve: CUDA's context, NCCL's buffers, and fragments of the
allocator.

Symbols: s, b, h, a, t, p, m as in `dlojz.prediction.rules_of_thumb`; w width of the MLP; k width of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dlojz.cost_model.layouts import (
    CHECKPOINTING,
    ENGINES,
    LOSSES,
    OFFLOAD,
    SCHEDULES,
    Layouts,
    Reals,
    alternates,
    distinct,
    habit,
    losses,
    software,
)
from dlojz.cost_model.passes import StageCosts
from dlojz.cost_model.workload import Cut, Workload, routed_rows
from dlojz.hardware.decoder_size import DecoderSize
from dlojz.hardware.evidence import Version

CONTEXT_BYTES: Final = 2.2e9
"""CUDA's context, NCCL and cuBLAS, of one rank: 0.5 + 1.6 + 0.1 GB, as `dlojz.hardware.gpus` has them."""
TEMPORARY_BYTES: Final = 4.3e9
"""Flat buffers of the optimizer's messages and what the allocator keeps for them, at most; a small model's are as large
as its weights. Fitted on half of the Jean Zay readings, whose ranks all hold more than 2 billion weights."""
UPDATE_BYTES: Final = 4
"""Per parameter of the shard: the temporary of torch's AdamW, a root of the second moment in fp32. Fused it has none.

Source: torch, `optim/adamw.py`, `_multi_tensor_adamw`: `exp_avg_sq_sqrt`.
"""
DUMMY_GRADIENTS_SINCE: Final = Version(2, 0)
"""Since which Transformer Engine a product that adds to the accumulated gradient hands autograd a 16-bit tensor of the
weight's shape, one for all weights of that shape, which stays; Megatron-core's logits take theirs from the same store.

Source: Transformer Engine, `pytorch/module/base.py`, `get_dummy_wgrad`, a dictionary by shape and type; Megatron-LM,
`core/tensor_parallel/layers.py`, `LinearWithGradAccumulationAndAsyncCommunication.backward`.
"""
RING_GRADIENT_BYTES: Final = 28
"""Per local token and element of the queries of a rank, in the backward of torch's ring, in fp32: the gradient of the
queries (4), those of keys and values (8), and both of these once more as they are sent and as they arrive (8 + 8).

Source: torch, `distributed/tensor/experimental/_context_parallel/_attention.py`, `_templated_ring_attention_backward`,
whose keys and values are repeated for all heads.
"""
BUCKET_ELEMENTS: Final = 500_000_000
"""That DeepSpeed reduces at a time; with fp32 gradients its bucket and the copy are 2 bytes per element larger.

Source: DeepSpeed, `buffered_allreduce_fallback` of the engine, default 5e8 elements.
"""
ZERO3_REUSE_ELEMENTS: Final = 1_000_000_000
"""DeepSpeed's ZeRO-3 gathers matrix by matrix, and releases one unless it is used again within so many elements."""
ZERO3_AHEAD_ELEMENTS: Final = 50_000_000
"""That DeepSpeed's ZeRO-3 gathers ahead of their use.

Source: DeepSpeed, `runtime/zero/config.py`, `max_reuse_distance` and `prefetch_bucket_size` (defaults), and
`partitioned_param_coordinator.py`, `__params_to_release`.
"""
LIVE_BYTES: Final = 50
"""Per token and unit of width, with full recomputation: one layer's tensors with their gradients, boundary tensors, and
what the allocator keeps besides in pieces that do not fit. Fitted on the same half; those readings depend neither on
the number of heads nor on the tensor-parallel degree."""
KEPT_LIVE_BYTES: Final = 20
"""The same where the layer's tensors are kept anyway: gradients of two of them. Counted."""
LOGIT_BYTES: Final = {"megatron": 10, "torch": 14, "fused": 4, "fused, two metrics": 4}
"""At the loss, per logit. `megatron`: in 16 bit, in fp32, the exponentials (2 + 4 + 4). `torch`, `F.cross_entropy` of
`logits.float()`: in 16 bit, the softmax, both gradients in fp32 (2 + 4 + 4 + 4); a loop that deletes the logits before
the backward, as torchtitan's does, needs 2 less. `fused`: in 16 bit, and its gradient (2 + 2); what metrics of training
take for themselves is not counted.

Source: Megatron-LM, `tensor_parallel/cross_entropy.py`; flash-attention, `losses/cross_entropy.py`: the kernel reads
16-bit logits and writes their gradient alone.
"""
SPLIT_LOGIT_BYTES: Final = 4
"""More per logit where torch's loss is split over tensor-parallel ranks: (gradient + exponential) · factor are tensors.

Source: torch, `distributed/tensor/parallel/loss.py`, `_nll_loss_and_log_softmax_backward`.
"""
IN_PLACE_LOGIT_BYTES: Final = 4
"""Less per logit where the exponentials are written over the fp32 logits.

Source: Megatron-LM, `core/tensor_parallel/cross_entropy.py`, `calculate_predicted_logits`, which the fused form of
`core/fusions/fused_cross_entropy.py` compiles.
"""
FSDP_UNIT_BYTES: Final = (2, 2, 2, 4)
"""Per parameter of a layer in its backward, in 16 bit: gathered; the next one's, gathered ahead; the gradient. And the
former layer's gradient in fp32, being reduced.

Source: torch, `distributed/fsdp/_fully_shard/_fsdp_param_group.py`, as in `dlojz.prediction.engine_memory_sharded`.
"""
FSDP_ROOT_BYTES: Final = (2, 2, 4)
"""Per parameter of embedding and logits: gathered for the whole step; the gradient until backward ends; in fp32, being
reduced, at the end."""
ADAM_STATES: Final = 12
"""Master copy and two moments. Source: Rajbhandari et al. 2020, §3.1."""
FP32_ADAM_STATES: Final = 8
"""The two moments alone."""


@dataclass(frozen=True, eq=False)
class Memories:
    """Bytes of the fullest rank.

    Attributes:
        weights, gradients, optimizer: model states; the optimizer's include the master copy.
        activations: what layers keep for their backward, of all micro-batches in flight.
        edges: what embedding and logits keep at the peak.
        live: at the peak, one layer computed again, buffers of messages and of gathered weights, or the optimizer's.
        reserve: beside tensors.
        host: in the host's memory, of one rank; not part of the total.
    """

    weights: Reals
    gradients: Reals
    optimizer: Reals
    activations: Reals
    edges: Reals
    live: Reals
    reserve: Reals
    host: Reals

    @property
    def total_bytes(self) -> Reals:
        """What `nvidia-smi` shows."""
        states = self.weights + self.gradients + self.optimizer
        return states + self.activations + self.edges + self.live + self.reserve


def in_flight(layouts: Layouts, stage: int) -> Reals:
    """Micro-batches in flight on a stage, in units of all its layers.

    1F1B and ZB-H1: min(p − i, m); GPipe: m; interleaved: ((v − 1)p + 2(p − i) − 1)/v, at most m.

    Source: Narayanan et al. 2021, §2.2; Korthikanti et al. 2022, §4.2.3 (the first stage's L(1 + (p − 1)/(pv))).
    """
    p, m, v = layouts.pp, layouts.micro_batches, layouts.chunks
    stages_left = np.maximum(p - stage, 1)
    plain = np.where(v > 1, ((v - 1) * p + 2 * stages_left - 1) / v, stages_left)
    return np.where(layouts.schedule == SCHEDULES.index("gpipe"), m, np.minimum(plain, m)).astype(float)


def layer_activation_bytes(workload: Workload, layouts: Layouts) -> Reals:
    """Bytes that one layer of a decoder keeps for its backward.

    sbh(10 + 24/t + 5as/(ht)) for the classic layer, all over t with sequence parallelism; without the last term where
    attention's core is computed again or fused; 2sbh with full checkpointing. Without dropout 2sbh and 3as²b/t less.

    Source: Korthikanti et al. 2022, table 2; for gated MLPs, grouped queries and experts the same count of saved
    inputs. Transformer Engine's layers keep the same: `LayerNormLinear` input and normed input, `LayerNormMLP` these
    and both sides of the activation (`pytorch/module/layernorm_linear.py` and `layernorm_mlp.py`,
    `save_for_backward`), fused attention queries, keys, values, output and statistics. That torch's DTensor keeps the
    normed inputs as they were gathered, where Megatron gathers them again, is not counted.
    """
    size = workload.size
    assert size is not None
    t, tokens = layouts.tp, layouts.micro_batch * size.sequence_length / layouts.cp
    h = size.hidden
    masks = layouts.dropout * size.biased
    # Per token, not split by t: inputs of two norms and of the products behind them (4 × 2 bytes), two masks of 1 byte;
    # of latents before and after their norm (2 + 2).
    whole = (8 + 2 * masks) * h + 4 * (size.latent + size.query_latent)
    unsplit = whole / np.where(layouts.sequence_parallel > 0, t, 1)
    # Inputs of the activation and of the product down (2 + 2); gated: gate, up and their product (3 × 2).
    of_hidden = 6 if size.gated else 4
    hidden: float = of_hidden * size.mlp_width
    if size.experts:  # of each row its input, the hidden layer, and the output that is weighed
        hidden = routed_rows(size) * (of_hidden * size.expert_width + 4 * h) + (1 - 1 / size.period) * hidden
        hidden += of_hidden * size.shared_experts * size.expert_width / size.period
    # Queries and attention's output (2 + 2), keys and values (2 + 2).
    split = (4 * size.heads * size.core_width + 4 * size.kv_heads * size.core_width + hidden) / t
    core = (layouts.fused_attention > 0) | (layouts.checkpointing == CHECKPOINTING.index("selective"))
    # Per token: softmax 2, its mask 1, its dropped-out copy 2, for each key and head.
    scores = np.where(core, 0.0, (2.0 + 3 * masks) * size.heads * size.sequence_length / t)
    full = 2 * h / np.where(layouts.sequence_parallel > 0, t, 1)  # the layer's input alone, 2 bytes
    saved_bytes = unsplit + split + scores
    saved_bytes = np.where(alternates(layouts), full + alternate_product_bytes(size, layouts), saved_bytes)
    # The mean of a layer in `checkpointed_every` that keeps its input alone, and of the others, which keep all.
    mean_bytes = saved_bytes + (full - saved_bytes) / layouts.checkpointed_every
    return tokens * np.where(layouts.checkpointing == CHECKPOINTING.index("full"), mean_bytes, saved_bytes)


def alternate_product_bytes(size: DecoderSize, layouts: Layouts) -> Reals:
    """Bytes per token of what a layer keeps beside its input where every second product is computed again.

    Kept are the results of the products with odd numbers (of queries, keys, values, projection, gate, up, down), and
    attention's output with its row statistics in fp32. A row-parallel product's result is whole on every rank; with
    sequence parallelism what becomes of it in the two reduce-scatters is kept too. No backward reads the last product's
    result: eager torch keeps it nevertheless, a compiler does not.

    Source: torchtitan, `parallelisms/parallelize_llama.py`, `_apply_ac_to_transformer_block`: selective, "op"; torch,
    `utils/checkpoint.py`, `_CachingTorchDispatchMode`, and `_functorch/partitioners.py`, which saves what the backward
    needs.
    """
    h, keys, t = size.hidden, size.kv_heads * size.head_size, layouts.tp
    mlp, width, latents = 1.0, float(size.mlp_width), 0
    if size.experts:  # rows, and the width of the hidden layer of a token in all of them
        mlp = routed_rows(size) + 1 - 1 / size.period + (size.shared_experts > 0) / size.period
        width = routed_rows(size) * size.expert_width + (1 - 1 / size.period) * size.mlp_width
        width += size.shared_experts * size.expert_width / size.period
    # Results of queries, values and gate, attention's output (2 bytes each), and its statistics (4 per head).
    kept_width = size.queries + keys
    if size.latent:  # queries, keys with values; or both latents, and the projection in the place of the last product
        latents = size.query_latent + size.latent + size.rotated_width if size.query_latent else 0
        kept_width = 0 if size.query_latent else size.heads * (3 * size.head_size + size.rotated_width)
    split = 2 * (kept_width + size.queries) + 4 * size.heads + 2 * width
    down = 2 * h * mlp if size.gated else 0.0  # the seventh; of a plain MLP the sixth
    scattered = np.where((layouts.sequence_parallel > 0) & (t > 1), 2 * h / t, 0.0)
    return split / t + 2 * latents + scattered + (layouts.compiled == 0) * (down + scattered)


def gathered_key_bytes(size: DecoderSize, layouts: Layouts) -> Reals:
    """Bytes per local token that context parallelism holds in the backward of one layer, of the whole sequence.

    torch's ring gathers keys and values of all heads (2 + 2 bytes of each token), and sums gradients in fp32; where
    they are gathered before attention (Llama 3), keys, values and their gradients (4 + 4) are whole. A ring of
    Transformer Engine holds those of its neighbour alone, which is not counted.

    Source: as `RING_GRADIENT_BYTES`, `_AllGatherRotater`; Llama 3 (arXiv 2407.21783), §3.3.2.
    """
    expanded = (4 * layouts.cp + RING_GRADIENT_BYTES) * size.queries * habit(layouts, "expands_keys")
    whole = 8 * layouts.cp * size.kv_heads * size.head_size * (1 - habit(layouts, "rings"))
    return np.where(layouts.cp > 1, (expanded + whole) / layouts.tp, 0.0)


def dummy_gradient_bytes(size: DecoderSize, layouts: Layouts, counts: Reals) -> Reals:
    """Bytes of Transformer Engine's dummy weight gradients on a stage: 2 per element of each distinct weight shape.

    Args:
        counts: embedding, layers and logits of the stage.
    """
    h, t, keys = size.hidden, layouts.tp, size.kv_heads * size.head_size
    width = size.mlp_width if not size.experts else size.mlp_width * t  # tensor parallelism does not cut experts
    # Rows and columns of what a rank holds of queries, keys and values; attention's output; the MLP; the logits.
    columns = [h + 0.0 * t, size.queries / t, h + 0.0 * t, width / t, h + 0.0 * t]
    rows = [(size.queries + 2 * keys) / t, h + 0.0 * t, (1 + size.gated) * width / t, h + 0.0 * t, size.vocabulary / t]
    first, stop = 0 if counts[1] else 4, 5 if counts[2] else 4
    shapes = list(zip(rows, columns, strict=True))[first:stop]
    elements = np.zeros(len(layouts))
    for index, (height, breadth) in enumerate(shapes):
        is_known = np.zeros(len(layouts), bool)
        for known_height, known_breadth in shapes[:index]:
            is_known |= (height == known_height) & (breadth == known_breadth)
        elements += np.where(is_known, 0.0, height * breadth)
    keeps = (software(layouts, "transformer_engine") >= DUMMY_GRADIENTS_SINCE.number) & (layouts.fused_accumulation > 0)
    return 2.0 * elements * keeps


def _gathered_split(layouts: Layouts) -> Reals:
    """Ranks over which the input of the logits is split while it is kept for the backward."""
    parted = (layouts.sequence_parallel > 0) & (habit(layouts, "keeps_gathered") == 0)
    return np.where(parted, layouts.tp, 1).astype(float)


def states_of(weights: Reals, layouts: Layouts, spread: Reals | float = 1.0) -> tuple[Reals, Reals, Reals, Reals]:
    """Bytes of weights, gradients and optimizer on the device, and of what is in the host's memory.

    16-bit weights (or fp32 ones, which need no master copy), gradients of `gradient_bytes`, 12 of Adam; sharded from
    stage 3, 2 and 1 on. DeepSpeed's pipeline engine keeps an fp32 gradient of its shard; where it accumulates in fp32
    it keeps the 16-bit gradients too. FSDP's shards are fp32, and their own master copy: 4 + 4 + 8; in a pipeline
    its weights stay gathered, and with several micro-batches the gradients whole in fp32 until the last one (with
    ZeRO-3; with ZeRO-2 this is not counted).

    Args:
        weights: on one rank, before ZeRO shards them.
        spread: factor of `spread_of`: experts split over ep ranks are sharded over so many ranks fewer.

    Source: Rajbhandari et al. 2020, §5; DeepSpeed, `stage_1_and_2.py` and `bf16_optimizer.py`; torchtitan,
    `parallelize_llama.py`, `reshard_after_forward` (Llama 3, §3.3.2, does the same), and torch,
    `distributed/pipelining/stage.py`, `set_requires_gradient_sync`; offload as in
    `dlojz.prediction.rules_of_thumb.bytes_per_parameter`.
    """
    d = layouts.zero_shards / spread  # shards of the states
    zero, offload = layouts.zero, layouts.offload
    is_deepspeed = layouts.engine == ENGINES.index("megatron-deepspeed")
    element = layouts.element_bytes
    of_weight = element / np.where(zero == 3, d, 1)
    # DeepSpeed's pipeline accumulates in fp32 beside 16-bit gradients: 4 + 2.
    size = layouts.gradient_bytes + np.where(is_deepspeed & (layouts.gradient_bytes == 4), 2, 0)
    of_gradient = size / np.where(zero >= 2, d, 1)
    states = ADAM_STATES if element == 2 else FP32_ADAM_STATES
    # DeepSpeed adds the rank's shard of fp32 gradients.
    of_adam = states / np.where(zero >= 1, d, 1) + np.where(is_deepspeed & (zero >= 1), 4 / d, 0.0)
    offloaded = offload != OFFLOAD.index("none")
    # In the host's memory: master copy, two moments, gradient, 4 bytes each.
    host = np.where(offloaded, 16 / np.where(zero >= 1, d, 1), 0.0)
    host = host + np.where(offload == OFFLOAD.index("parameters"), of_weight, 0.0)  # the 16-bit weights too
    of_adam = np.where(offloaded, 0.0, of_adam)
    of_gradient = np.where(offloaded & (zero >= 2), 0.0, of_gradient)
    of_weight = np.where(offload == OFFLOAD.index("parameters"), 0.0, of_weight)
    shards = (habit(layouts, "fsdp") > 0) & (zero == 3)
    # FSDP's fp32 shard is weight and master copy in one.
    of_weight, of_gradient = np.where(shards, 4 / d, of_weight), np.where(shards, 4 / d, of_gradient)
    of_adam = np.where(shards, FP32_ADAM_STATES / d, of_adam)
    of_weight = of_weight + stays_gathered(layouts) * element  # gathered, beside the shard
    of_gradient = of_gradient + stays_gathered(layouts) * (layouts.micro_batches > 1) * 4.0
    return weights * of_weight, weights * of_gradient, weights * of_adam, weights * host


def stays_gathered(layouts: Layouts) -> NDArray[np.bool_]:
    """Tell where FSDP keeps a pipeline stage's weights gathered from its first micro-batch to its last."""
    mask: NDArray[np.bool_] = (habit(layouts, "fsdp") > 0) & (layouts.zero == 3) & (layouts.pp > 1)
    return mask


def spread_of(workload: Workload, layouts: Layouts, counts: Reals, weights: Reals) -> Reals | float:
    """Ratio of the weights that ZeRO shards over dp · cp ranks to those of one rank of a stage; 1 without experts."""
    experts = float(counts @ np.array([kind.expert_parameters for kind in workload.kinds], float))
    # Experts of one rank are 1/ep of its stage's, whatever tp; ZeRO shards all of them over the tp · dp · cp ranks.
    return 1.0 + experts * (1 / layouts.tp - 1 / layouts.ep) / weights if experts else 1.0


def memories_of(workload: Workload, layouts: Layouts, stages: StageCosts, weights: Reals) -> Memories:
    """Memory of the fullest rank of layouts that share one list of stages.

    Args:
        weights: of each distinct stage (rows) and layout (columns), on one rank.
    """
    layer_bytes = None
    if workload.size is not None:  # the same in every stage
        first, kinds = distinct(layouts, NOT_OF_LAYERS)
        layer_bytes = layer_activation_bytes(workload, layouts[first])[kinds]
    stage_memories = [
        stage_memory(workload, layouts, counts, in_flight(layouts, int(stage)), stage_weights, layer_bytes)
        for counts, stage, stage_weights in zip(stages.counts, stages.first, weights, strict=True)
    ]
    return _fullest(stage_memories)


def _fullest(memories: list[Memories]) -> Memories:
    """Take the one with the most bytes, place by place; of equal ones the first."""
    if len(memories) == 1:
        return memories[0]
    columns = {field.name: np.array(getattr(memories[0], field.name), float) for field in fields(Memories)}
    max_bytes = memories[0].total_bytes
    for candidate in memories[1:]:
        total = candidate.total_bytes
        mask = total > max_bytes
        np.maximum(total, max_bytes, out=max_bytes)
        for name, column in columns.items():  # place by place: all categories come from the same stage
            np.copyto(column, getattr(candidate, name), where=mask)
    return Memories(**columns)


NOT_OF_LAYERS: Final = (
    "dp", "pp", "ep", "zero", "zero_shards", "micro_batches", "chunks", "schedule", "offload", "overlap",
    "gather_overlap", "tensor_overlap", "embedding_slots", "gradient_bytes", "context_exchange", "fused_loss",
)  # fmt: skip
"""Columns of layouts on which what a layer keeps for its backward does not depend."""


def stage_memory(
    workload: Workload,
    layouts: Layouts,
    counts: Reals,
    num_in_flight: Reals,
    weights: Reals,
    layer_bytes: Reals | None = None,
) -> Memories:
    """Memory of one rank of a stage.

    Args:
        counts: layers of each kind in the stage.
        num_in_flight: micro-batches' worth of them that are kept at most.
        weights: of the stage, on one rank.
        layer_bytes: what a decoder's layer keeps for its backward (`layer_activation_bytes`), where it is known.
    """
    spread = spread_of(workload, layouts, counts, weights)
    weight_bytes, gradients, adam, host = states_of(weights, layouts, spread)
    size = workload.size
    is_deepspeed = layouts.engine == ENGINES.index("megatron-deepspeed")
    flat = habit(layouts, "flat_buffers") > 0
    reserve = (
        CONTEXT_BYTES
        + np.where(flat, np.minimum(TEMPORARY_BYTES, 2.0 * weights), 0.0)
        + np.where(is_deepspeed, 2.0 * BUCKET_ELEMENTS * (layouts.gradient_bytes - 2), 0.0)
    )
    # Parameters whose moments this rank updates.
    updated = weights / np.where(layouts.zero >= 1, layouts.zero_shards / spread, 1)
    in_place = flat | (layouts.offload != OFFLOAD.index("none")) | (software(layouts, "fused_optimizer") > 0)
    update = np.where(in_place, 0.0, UPDATE_BYTES * updated)
    widens = (habit(layouts, "widens_gradients") > 0) & (layouts.gradient_bytes < 4) & (layouts.element_bytes < 4)
    update = update + np.where(widens, 4.0 * updated, 0.0)
    none = np.zeros(len(layouts))
    if size is None:
        activations, live = _image_activations(workload, layouts, counts)
        # Bytes of one micro-batch × those in flight.
        return Memories(
            weight_bytes, gradients, adam, activations * num_in_flight, none, np.maximum(live, update), reserve, host
        )
    # Activations are counted in 16 bit.
    tokens = layouts.micro_batch * size.sequence_length / layouts.cp * (layouts.element_bytes / 2)
    split = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    masks = layouts.dropout * size.biased
    layer_bytes = layer_activation_bytes(workload, layouts) if layer_bytes is None else layer_bytes
    activations = counts[1] * num_in_flight * layer_bytes * (layouts.element_bytes / 2)
    # Its dropout mask, 1 byte per element, where the stage has the embedding.
    embedding = counts[0] * tokens * size.hidden / split * num_in_flight * masks if counts[0] else none
    # One micro-batch at a time: the loss is followed by its backward.
    loss = counts[2] * tokens * loss_bytes(size, layouts, split) if counts[2] else none
    full = layouts.checkpointing == CHECKPOINTING.index("full")
    # Without dropout one layer's two masks less.
    live = tokens * size.hidden / split * np.where(full, LIVE_BYTES - 2 * (1 - masks), KEPT_LIVE_BYTES)
    live = live + tokens * gathered_key_bytes(size, layouts)
    is_fsdp = (habit(layouts, "fsdp") > 0) & (layouts.zero >= 2)
    # On one rank: experts over ep, all else over tp.
    layer = (size.layer_parameters - size.expert_parameters) / layouts.tp + size.expert_parameters / layouts.ep
    live = live + np.where(is_fsdp, layer * _unit_bytes(layouts), zero3_live_bytes(size, layouts, layer))
    ends = counts[0] * size.embedding_parameters
    # Untied, or the tied copy of the last stage.
    ends = ends + counts[2] * size.vocabulary * size.hidden * (not size.tied or counts[0] == 0)
    root = np.where(is_fsdp, ends / layouts.tp, 0.0)
    words = layouts.element_bytes / 2
    gathered = FSDP_ROOT_BYTES[0] * words * root * ((layouts.zero == 3) & ~stays_gathered(layouts))
    update = np.maximum(update, gathered + (FSDP_ROOT_BYTES[1] * words + FSDP_ROOT_BYTES[2]) * root)
    # torch's DDP copies gradients into buckets that stay (csrc/distributed/c10d/reducer.cpp, `initialize_buckets`).
    is_ddp = (habit(layouts, "fsdp") > 0) & (layouts.zero == 0) & (layouts.dp * layouts.cp > 1)
    buffers = gathered + np.where(is_ddp, layouts.gradient_bytes * weights, 0.0)
    buffers = buffers + dummy_gradient_bytes(size, layouts, counts)
    states = weight_bytes, gradients, adam
    moments = [
        (activations, embedding + loss, buffers),  # at the loss
        # In the backward of a layer.
        (activations, embedding, buffers + FSDP_ROOT_BYTES[1] * words * root + live),
        (none, none, update + buffers - gathered),  # at the end; `gathered` is in `update` already
    ]
    state_bytes = weight_bytes + gradients + adam
    # What differs is chosen, states and reserve are the same at each moment.
    at_loss, in_layer, at_end = (state_bytes + kept + edges + alive + reserve for kept, edges, alive in moments)
    later, last = in_layer > at_loss, at_end > np.maximum(at_loss, in_layer)
    kept_bytes, edge_bytes, live_bytes = (
        np.where(last, end, np.where(later, layer, loss)) for loss, layer, end in zip(*moments, strict=True)
    )
    return Memories(*states, kept_bytes, edge_bytes, live_bytes, reserve, host)


def loss_bytes(size: DecoderSize, layouts: Layouts, split: Reals) -> Reals:
    """Bytes per token at the loss: logits and what is made of them, inputs of the last norm and of the logits' product.

    Args:
        split: ranks over which the input of the last norm is split.
    """
    kinds = losses(layouts)
    of_logit = np.array([LOGIT_BYTES[loss_kind] for loss_kind in LOSSES], float)[kinds]
    of_logit += SPLIT_LOGIT_BYTES * ((kinds == LOSSES.index("torch")) & (layouts.tp > 1))
    of_logit -= IN_PLACE_LOGIT_BYTES * (kinds == LOSSES.index("megatron")) * habit(layouts, "in_place_loss")
    # Both inputs in 16 bit.
    return of_logit * size.vocabulary / layouts.tp + 2 * size.hidden * (1 / split + 1 / _gathered_split(layouts))


def zero3_live_bytes(size: DecoderSize, layouts: Layouts, layer: Reals) -> Reals:
    """Bytes of gathered weights and whole gradients in the backward of a layer with ZeRO-3 that is not FSDP's.

    Where a layer is one message: its weights, those of the next, and its gradient. DeepSpeed gathers matrix by matrix.
    Between the recomputation and the backward of a matrix all that follow it in the layer are used twice, so that it
    stays gathered if these are half of `ZERO3_REUSE_ELEMENTS` at most. Its gradient is reduced as soon as it is there.

    Args:
        layer: elements of one layer on one rank.
    """
    largest = size.hidden * max(size.queries + 2 * size.kv_heads * size.head_size, (1 + size.gated) * size.mlp_width)
    matrix = np.minimum(largest / layouts.tp, layer)
    gathered = np.minimum(layer, matrix + ZERO3_REUSE_ELEMENTS / 2) + ZERO3_AHEAD_ELEMENTS
    elements = np.where(habit(layouts, "gathers_per_layer") > 1, gathered + matrix, 3.0 * layer)
    return layouts.element_bytes * elements * (layouts.zero == 3)


def _unit_bytes(layouts: Layouts) -> Reals:
    """Bytes per parameter of a layer in its backward with FSDP; weights that stay gathered are among the states."""
    gathered, ahead, gradient, reduced = FSDP_UNIT_BYTES
    unit_bytes = gradient + np.where((layouts.zero == 3) & ~stays_gathered(layouts), gathered + ahead, 0.0)
    return unit_bytes * layouts.element_bytes / 2 + reduced


def _image_activations(workload: Workload, layouts: Layouts, counts: Reals) -> tuple[Reals, Reals]:
    """Activations that the blocks of an image model keep of one micro-batch, and the largest block recomputed.

    Kept are the inputs of all operators, in 16 bit; with full checkpointing the block's input; with selective
    checkpointing that and the results of products, not more than all of it.

    Source: `dlojz.models.checkpointing.run_checkpointed`.
    """
    saved_bytes, live = np.zeros(len(layouts)), np.zeros(len(layouts))
    full = layouts.checkpointing == CHECKPOINTING.index("full")
    selective = np.isin(layouts.checkpointing, [CHECKPOINTING.index(word) for word in ("selective", "every_second")])
    for kind, count in zip(workload.kinds, counts, strict=True):
        samples = layouts.micro_batch * (layouts.element_bytes / 2)
        all_bytes, product_bytes = (samples * num_bytes for num_bytes in kept_bytes(workload, kind.name))
        boundary = samples * 2 * kind.elements  # the block's input, 16 bit
        block_bytes = np.where(
            full, boundary, np.where(selective, np.minimum(boundary + product_bytes, all_bytes), all_bytes)
        )
        block_bytes = block_bytes if kind.recomputed else all_bytes  # a kind that is never recomputed keeps everything
        saved_bytes = saved_bytes + count * block_bytes
        # What is made again for one block at a time.
        recomputed_bytes = np.where(full, all_bytes, np.where(selective, all_bytes - block_bytes, 0.0))
        live = np.maximum(live, recomputed_bytes if kind.recomputed and count > 0 else 0.0)
    return saved_bytes, live


@lru_cache(maxsize=1024)
def kept_bytes(workload: Workload, kind: str) -> tuple[float, float]:
    """Bytes that one sample keeps in a block (what its operators read), and those of its products' results alone."""
    block_kind = next(candidate for candidate in workload.kinds if candidate.name == kind)
    operators = block_kind.operators(Cut(1))
    products = [product for operator in operators for product in operator.forward]
    # Left factors: what a product reads and keeps.
    input_bytes = sum(2.0 * product.batch * product.m * product.k for product in products)
    result_bytes = sum(2.0 * product.batch * product.m * product.n for product in products)
    # Half of a pass's bytes are read.
    return input_bytes + sum(operator.forward_bytes for operator in operators) / 2, result_bytes
