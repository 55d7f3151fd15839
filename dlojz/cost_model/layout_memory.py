"""Bytes on the fullest rank of a layout, by category, in closed form.

The formulas of `dlojz.prediction.rules_of_thumb` for many layouts at once (the tests compare both). "Allocated" is what
tensors hold; "nvidia-smi" adds the reserve: CUDA's context, NCCL's buffers, and fragments of the allocator.

Symbols: s, b, h, a, t, p, m as in `dlojz.prediction.rules_of_thumb`; w width of the MLP; k width of keys.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Final

import numpy as np

from dlojz.cost_model.layouts import CHECKPOINTING, ENGINES, OFFLOAD, SCHEDULES, Layouts, Reals, habit
from dlojz.cost_model.passes import StageCosts
from dlojz.cost_model.workload import Cut, Workload, routed_rows

CONTEXT_BYTES: Final = 2.2e9
"""CUDA's context, NCCL and cuBLAS, of one rank: 0.5 + 1.6 + 0.1 GB, as `dlojz.hardware.gpus` has them."""
TEMPORARY_BYTES: Final = 4.3e9
"""The optimizer's temporaries and what the allocator keeps for them, at most; a small model's are as large as its
weights. Fitted on half of the Jean Zay readings, whose ranks all hold more than 2 billion weights."""
BUCKET_ELEMENTS: Final = 500_000_000
"""That DeepSpeed reduces at a time; with fp32 gradients its bucket and the copy are 2 bytes per element larger.

Source: DeepSpeed, `buffered_allreduce_fallback` of the engine, default 5e8 elements.
"""
LIVE_BYTES: Final = 50
"""Per token and unit of width, with full recomputation: one layer's tensors with their gradients, boundary tensors, and
what the allocator keeps besides in pieces that do not fit. Fitted on the same half; those readings depend neither on
the number of heads nor on the tensor-parallel degree."""
KEPT_LIVE_BYTES: Final = 20
"""The same where the layer's tensors are kept anyway: gradients of two of them. Counted."""
LOGIT_BYTES: Final = 10
"""Per logit: 16-bit logits and their gradient, fp32 of the cross-entropy, softmax kept (2 + 4 + 4)."""
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
        edges: what embedding and logits keep.
        live: one layer computed again, and buffers of messages and of gathered weights.
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
    left = np.maximum(p - stage, 1)
    plain = np.where(v > 1, ((v - 1) * p + 2 * left - 1) / v, left)
    return np.where(layouts.schedule == SCHEDULES.index("gpipe"), m, np.minimum(plain, m)).astype(float)


def layer_activation_bytes(workload: Workload, layouts: Layouts) -> Reals:
    """Bytes that one layer of a decoder keeps for its backward.

    sbh(10 + 24/t + 5as/(ht)) for the classic layer, all over t with sequence parallelism; without the last term where
    attention's core is computed again or fused; 2sbh with full checkpointing.

    Source: Korthikanti et al. 2022, table 2; for gated MLPs, grouped queries and experts the same count of saved
    inputs.
    """
    size = workload.size
    assert size is not None
    t, tokens = layouts.tp, layouts.micro_batch * size.sequence_length / layouts.cp
    h, keys = size.hidden, size.kv_heads * size.head_size
    whole = (10 if size.biased else 8) * h / np.where(layouts.sequence_parallel > 0, t, 1)
    hidden: float = (6 if size.gated else 4) * size.mlp_width
    if size.experts:  # of each row its input, the hidden layer, and the output that is weighed
        hidden = routed_rows(size) * (hidden + 4 * h) + (1 - 1 / size.every) * hidden
    split = (4 * h + 4 * keys + hidden) / t
    core = (layouts.fused_attention > 0) | (layouts.checkpointing == CHECKPOINTING.index("selective"))
    scores = np.where(core, 0.0, 5.0 * size.heads * size.sequence_length / t)
    full = 2 * h / np.where(layouts.sequence_parallel > 0, t, 1)
    kept = whole + split + scores
    share = np.where(layouts.checkpointing == CHECKPOINTING.index("selective"), habit(layouts, "selective_share"), 0.0)
    kept = full * (share > 0) + (1 - share) * kept
    return tokens * np.where(layouts.checkpointing == CHECKPOINTING.index("full"), full, kept)


def states_of(weights: Reals, layouts: Layouts, spread: Reals | float = 1.0) -> tuple[Reals, Reals, Reals, Reals]:
    """Bytes of weights, gradients and optimizer on the device, and of what is in the host's memory.

    16-bit weights (or fp32 ones, which need no master copy), gradients of `gradient_bytes`, 12 of Adam; sharded from
    stage 3, 2 and 1 on. DeepSpeed's pipeline engine keeps an fp32 gradient of its shard; where it accumulates in fp32
    it keeps the 16-bit gradients too.

    Args:
        weights: on one rank, before ZeRO shards them.
        spread: factor of `spread_of`: experts split over ep ranks are sharded over so many ranks fewer.

    Source: Rajbhandari et al. 2020, §5; DeepSpeed, `stage_1_and_2.py` and `bf16_optimizer.py`; offload as in
    `dlojz.prediction.rules_of_thumb.bytes_per_parameter`.
    """
    d = layouts.zero_shards / spread
    zero, moved = layouts.zero, layouts.offload
    is_deepspeed = layouts.engine == ENGINES.index("megatron-deepspeed")
    element = layouts.element_bytes
    of_weight = element / np.where(zero == 3, d, 1)
    size = layouts.gradient_bytes + np.where(is_deepspeed & (layouts.gradient_bytes == 4), 2, 0)
    of_gradient = size / np.where(zero >= 2, d, 1)
    states = ADAM_STATES if element == 2 else FP32_ADAM_STATES
    of_adam = states / np.where(zero >= 1, d, 1) + np.where(is_deepspeed & (zero >= 1), 4 / d, 0.0)
    offloaded = moved != OFFLOAD.index("none")
    host = np.where(offloaded, 16 / np.where(zero >= 1, d, 1), 0.0)
    host = host + np.where(moved == OFFLOAD.index("parameters"), of_weight, 0.0)
    of_adam = np.where(offloaded, 0.0, of_adam)
    of_gradient = np.where(offloaded & (zero >= 2), 0.0, of_gradient)
    of_weight = np.where(moved == OFFLOAD.index("parameters"), 0.0, of_weight)
    return weights * of_weight, weights * of_gradient, weights * of_adam, weights * host


def spread_of(workload: Workload, layouts: Layouts, counts: Reals, weights: Reals) -> Reals | float:
    """Ratio of the weights that ZeRO shards over dp · cp ranks to those of one rank of a stage; 1 without experts."""
    experts = float(counts @ np.array([kind.expert_parameters for kind in workload.kinds], float))
    return 1.0 + experts * (1 - 1 / layouts.ep) / weights if experts else 1.0


def memories_of(workload: Workload, layouts: Layouts, stages: StageCosts, weights: Reals) -> Memories:
    """Memory of the fullest rank of layouts that share one list of stages.

    Args:
        weights: of each distinct stage (rows) and layout (columns), on one rank.
    """
    made = [
        stage_memory(workload, layouts, counts, in_flight(layouts, int(first)), own)
        for counts, first, own in zip(stages.counts, stages.first, weights, strict=True)
    ]
    fullest = made[0]
    for other in made[1:]:
        more = other.total_bytes > fullest.total_bytes
        fullest = Memories(
            *(np.where(more, getattr(other, field.name), getattr(fullest, field.name)) for field in fields(Memories))
        )
    return fullest


def stage_memory(workload: Workload, layouts: Layouts, counts: Reals, held: Reals, weights: Reals) -> Memories:
    """Memory of one rank of a stage.

    Args:
        counts: layers of each kind in the stage.
        held: micro-batches' worth of them that are kept at most.
        weights: of the stage, on one rank.
    """
    own, gradients, adam, host = states_of(weights, layouts, spread_of(workload, layouts, counts, weights))
    size = workload.size
    is_deepspeed = layouts.engine == ENGINES.index("megatron-deepspeed")
    temporary = np.minimum(TEMPORARY_BYTES, 2.0 * weights)
    reserve = (
        CONTEXT_BYTES + temporary + np.where(is_deepspeed, 2.0 * BUCKET_ELEMENTS * (layouts.gradient_bytes - 2), 0.0)
    )
    if size is None:
        kept, live = _image_activations(workload, layouts, counts)
        return Memories(own, gradients, adam, kept * held, np.zeros(len(layouts)), live, reserve, host)
    # Activations are counted in 16 bit.
    tokens = layouts.micro_batch * size.sequence_length / layouts.cp * (layouts.element_bytes / 2)
    split = np.where(layouts.sequence_parallel > 0, layouts.tp, 1)
    kept = counts[1] * held * layer_activation_bytes(workload, layouts) * (layouts.element_bytes / 2)
    edges = counts[0] * tokens * size.hidden / split * held + counts[2] * tokens * (
        LOGIT_BYTES * size.vocabulary / layouts.tp + 4 * size.hidden / split
    )
    full = layouts.checkpointing == CHECKPOINTING.index("full")
    live = tokens * size.hidden / split * np.where(full, LIVE_BYTES, KEPT_LIVE_BYTES)
    # ZeRO-3 gathers the weights of this layer and the next, and holds this one's whole gradient.
    live = live + np.where(layouts.zero == 3, 3 * layouts.element_bytes * size.layer_parameters / layouts.tp, 0.0)
    return Memories(own, gradients, adam, kept, edges, live, reserve, host)


def _image_activations(workload: Workload, layouts: Layouts, counts: Reals) -> tuple[Reals, Reals]:
    """Activations that the blocks of an image model keep of one micro-batch, and the largest block recomputed.

    Kept are the inputs of all operators, in 16 bit; with full checkpointing the block's input; with selective
    checkpointing that and the results of products, not more than all of it.

    Source: `dlojz.models.blocks.run_checkpointed`.
    """
    kept, live = np.zeros(len(layouts)), np.zeros(len(layouts))
    full = layouts.checkpointing == CHECKPOINTING.index("full")
    selective = layouts.checkpointing == CHECKPOINTING.index("selective")
    for kind, count in zip(workload.kinds, counts, strict=True):
        samples = layouts.micro_batch * (layouts.element_bytes / 2)
        whole, given = (samples * one for one in kept_bytes(workload, kind.name))
        boundary = samples * 2 * kind.elements
        own = np.where(full, boundary, np.where(selective, np.minimum(boundary + given, whole), whole))
        own = own if kind.recomputed else whole
        kept = kept + count * own
        again = np.where(full, whole, np.where(selective, whole - own, 0.0))
        live = np.maximum(live, again if kind.recomputed and count > 0 else 0.0)
    return kept, live


@lru_cache(maxsize=1024)
def kept_bytes(workload: Workload, kind: str) -> tuple[float, float]:
    """Bytes that one sample keeps in a block (what its operators read), and those of its products' results alone.
    """
    found = next(one for one in workload.kinds if one.name == kind)
    operators = found.operators(Cut(1))
    products = [each for one in operators for each in one.forward]
    read = sum(2.0 * each.batch * each.m * each.k for each in products)
    given = sum(2.0 * each.batch * each.m * each.n for each in products)
    return read + sum(one.forward_bytes for one in operators) / 2, given
