"""Seconds of a step and of a training: many layouts at once, or one simulated action by action.

The parts add up to the step; each is seconds on the stage that takes longest, and what that stage waits for is the
bubble. Every function takes arrays, one place per layout: a layout gets the same numbers alone and among a hundred
thousand. The simulation takes the same seconds per layer, message and update, and plays only the pipeline action by
action, where the fast path has a closed form; on equal stages both give the same step.

Symbols: p stages, m micro-batches, v chunks, F and B a stage's forward and backward of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.language import Sentences
from dlojz.cost_model.calibration import Calibration, on_gpu
from dlojz.cost_model.layout_memory import CONTEXT_BYTES, Memories, memories_of
from dlojz.cost_model.layouts import OFFLOAD, SCHEDULES, Integers, Layouts, Reals, distinct, habit
from dlojz.cost_model.passes import (
    Passes,
    StageCosts,
    channel_share,
    collective_s,
    exposed_s,
    neighbour_s,
    passes_of,
    stages_of,
)
from dlojz.cost_model.workload import Workload
from dlojz.hardware import Cluster, Collective
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import Timeline
from dlojz.pipeline.simulator import simulate as play

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

NOT_OF_PASSES: Final = (
    "dp", "pp", "zero", "zero_shards", "micro_batches", "chunks", "schedule", "offload", "embedding_slots", "overlap",
    "gather_overlap",
)  # fmt: skip
"""Columns of layouts on which the seconds of one micro-batch in one layer do not depend."""
NOT_OF_MESSAGES: Final = (
    "micro_batch", "chunks", "schedule", "checkpointing", "sequence_parallel", "embedding_slots",
    "fused_attention", "attention_kernel", "context_exchange", "tensor_overlap", "fused_loss", "dropout",
)  # fmt: skip
"""Columns on which the messages of data parallelism and the update do not depend."""
NOT_OF_BOUNDARIES: Final = (
    "zero", "zero_shards", "micro_batches", "schedule", "checkpointing", "sequence_parallel", "offload", "overlap",
    "gather_overlap", "fused_attention", "attention_kernel", "context_exchange", "tensor_overlap", "fused_loss",
    "dropout", "gradient_bytes", "embedding_slots", "ep",
)  # fmt: skip
"""Columns on which the messages between stages do not depend."""
UPDATE_KERNELS: Final = 24
"""Launches of a layer's update: two for each of its twelve tensors."""
MEETINGS: Final = 3
"""Scalars that all ranks reduce in a step: norm, overflow, loss."""
ADAM_BYTES = 34
"""Per parameter: master copy and two moments read and written in fp32 (24), gradient read (4 at most), weight written
(2), gradient read once more for the norm (4)."""
TRUE_ADAM_BYTES = 16
"""The same where all of them are in 16 bit and there is no master copy: 4 + 8, 2, 2."""


@dataclass(frozen=True, eq=False)
class Parts:
    """Seconds of a step by part; their sum is the step.

    Attributes:
        forward, backward, recompute: computation of the slowest stage, all micro-batches.
        tensor: messages of tensor and context parallelism that are waited for.
        pipeline: messages between stages (with a tied embedding, its gradient too), and waiting for neighbours.
        bubble: waiting for the pipeline to fill and empty, and for slower stages.
        data: gradients and weights of data parallelism and ZeRO that are waited for.
        optimizer: the update.
        constant: once per step.
    """

    forward: Reals
    backward: Reals
    recompute: Reals
    tensor: Reals
    pipeline: Reals
    bubble: Reals
    data: Reals
    optimizer: Reals
    constant: Reals

    @property
    def step_s(self) -> Reals:
        """Seconds of the step."""
        total: Reals = sum(getattr(self, field.name) for field in fields(self))
        return total


def ramp(layouts: Layouts, forward: Reals, backward: Reals) -> Reals:
    """Share of the other stages' F + B that a stage waits for: 1, with chunks 1/v, with a split backward less.

    1F1B and GPipe: (p − 1)(F + B) in all; interleaved: (p − 1)(F + B)/v; ZB-H1: (p − 1)(F + B_input − B_weight), where
    the parts of the backward are taken as equal, so that (p − 1)·F is left.

    Source: Narayanan et al. 2021, §2.2; Qi et al. 2024 (arXiv 2401.10241), §2.2 and table 1.
    """
    passes_s = forward + backward
    # Where there is no work the share is 1, as in `out`.
    zero_bubble = np.divide(forward, passes_s, out=np.ones_like(passes_s), where=passes_s > 0)
    is_zero_bubble = layouts.schedule == SCHEDULES.index("zb-h1")
    return np.where(is_zero_bubble, zero_bubble, 1.0) / layouts.chunks


def boundary_s(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Reals:
    """Seconds that a stage spends per micro-batch and direction on its boundary: the message, and synchronising.

    With v chunks there are v boundaries. Where messages are not waited for, the share 1 − overlap of them that takes
    multiprocessors and bandwidth from the products is left, and no synchronisation.
    """
    elements = max(kind.elements for kind in workload.kinds)
    # Bytes of one micro-batch on one context-parallel rank.
    message = layouts.element_bytes * elements * layouts.micro_batch / layouts.cp
    group = layouts.dp * layouts.cp * layouts.tp
    message_s = neighbour_s(cluster, calibration, message, layouts.pp, group, habit(layouts, "sliced"), layouts.tp)
    blocking = habit(layouts, "blocking")
    waits = np.where(layouts.pp > 1, calibration.micro_batch_s, 0.0)  # synchronising, where messages block
    channels = channel_share(cluster, layouts.pp, group) if calibration.overlap else 1.0
    waited_s: Reals = np.where(blocking > 0, message_s + waits, (1 - calibration.overlap) * channels * message_s)
    return layouts.chunks * waited_s


def tied_s(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Reals | float:
    """Seconds once per step in which first and last stage add the gradients of their copies of a tied embedding.

    An all-reduce of V·h/t gradients over the two ranks, after all backward passes: nothing hides it.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.3; Megatron-core, `distributed/finalize_model_grads.py`.
    """
    size = workload.size
    if size is None or not size.tied:
        return 0.0
    # Bytes of the embedding's gradient on one tensor-parallel rank.
    message = layouts.gradient_bytes * size.vocabulary * size.hidden / layouts.tp
    # From the first stage's rank to the last one's.
    stride = np.maximum(layouts.pp - 1, 1) * layouts.dp * layouts.cp * layouts.tp
    return np.where(layouts.pp > 1, collective_s("all_reduce", cluster, calibration, message, 2, stride), 0.0)


class DataMessages(NamedTuple):
    """Seconds of data parallelism's messages, by when they run.

    All but `edge` have two rows: seconds, and seconds times the share of NCCL's channels that run (`channel_share`).

    Attributes:
        once: per step, before or after it (weights).
        forward, backward: per micro-batch, beside each.
        last: beside the last backward, or after it (gradients).
        edge: shares of forward's, backward's and last that nothing can hide: the first gather, and the last reduction.
    """

    once: Reals
    forward: Reals
    backward: Reals
    last: Reals
    edge: tuple[Reals | float, Reals | float, Reals | float]

    def of(self, kinds: Integers) -> DataMessages:
        """Those of layouts by their kinds."""
        first, second, last = (np.broadcast_to(edge, self.once[0].shape)[kinds] for edge in self.edge)
        once, forward, backward, final_s = (part[:, kinds] for part in self[:4])
        return DataMessages(once, forward, backward, final_s, (first, second, last))


def gathered_s(
    weights: Reals,
    cluster: Cluster,
    layouts: Layouts,
    calibration: Calibration,
    units: Reals | float = 1.0,
    edge: Reals | float = 0.0,
    ep: Integers | None = None,
    trained: Reals | float = 1.0,
) -> DataMessages:
    """Seconds of data parallelism's messages.

    With Ψ weights of the stage: an all-reduce of the gradients (ZeRO-0), their reduce-scatter and an all-gather of the
    weights (1 and 2; with 2, DeepSpeed does the former after every micro-batch), with 3 two all-gathers of the weights
    and one reduce-scatter for every micro-batch, unless a pipeline keeps the weights gathered (torchtitan, Llama 3).
    ZeRO-3 gathers and reduces unit by unit (a layer, or each of its matrices), each with the latency of a message, one
    unit ahead of the products: forward's gathers run beside the forward, and the others beside the backward. FSDP in a
    pipeline reduces after the last backward, with nothing beside it.

    Hybrid sharding: with states sharded over s of the d ranks, gathers and reduce-scatters are within s neighbours, and
    each reduce-scatter is followed by an all-reduce of a rank's Ψ/s gradients over the d/s replicas.

    Args:
        weights: of the stage, on one rank.
        units: layers of the stage.
        edge: share of the weights that are gathered before the first product, and reduced after the last one.
        ep: of experts, the expert-parallel ranks, which these weights are split over already, tp or not.
        trained: share of the weights that have gradients: FSDP gathers all, ZeRO-1 and 2 of DeepSpeed what is updated.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §7; ZeRO-2 under accumulation: DeepSpeed, `stage_1_and_2.py`;
    units, prefetching and hybrid sharding: Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277), §3.2, §3.3 and §4.2; in a
    pipeline: PyTorch, `distributed/pipelining/stage.py`, `perform_reduce_grad`.
    """
    # Experts are whole on every tensor-parallel rank: their copies are ep apart.
    spread, stride = (1, layouts.tp) if ep is None else (layouts.tp / ep, ep)
    data = np.maximum(layouts.dp * layouts.cp * spread, 1)
    # s: of one replica of the states.
    ranks = np.where(layouts.zero > 0, np.maximum(layouts.zero_shards * spread, 1), data)
    replicas = data / ranks
    gradients, halves = weights * trained * layouts.gradient_bytes, layouts.element_bytes * weights
    narrow = (habit(layouts, "gathers_fp8") > 0) & (layouts.precision == "fp8")
    gathered = np.where(narrow, weights, halves)  # fp8: 1 byte per weight
    hybrid = bool((replicas > 1).any())
    channels = channel_share(cluster, ranks, stride)
    replica_channels = channel_share(cluster, replicas, stride * ranks) if hybrid else channels

    def of(collective: Collective, message: Reals, interfaces: Reals | float = np.inf, pieces: Any = 1.0) -> Reals:
        piece_bytes = message / pieces
        group = (ranks, stride, interfaces, layouts.relayed)
        sent_s = pieces * collective_s(collective, cluster, calibration, piece_bytes, *group)  # latency of each
        if collective != "reduce_scatter" or not hybrid:
            return np.stack([sent_s, channels * sent_s])
        # Ψ/s gradients of a rank, summed over those that hold the same shard, one of each replica.
        group = (replicas, stride * ranks, interfaces, layouts.relayed)
        summed_s = pieces * collective_s("all_reduce", cluster, calibration, piece_bytes / ranks, *group)
        return np.stack([sent_s + summed_s, channels * sent_s + replica_channels * summed_s])

    interfaces, pieces = habit(layouts, "gather_interfaces"), units * habit(layouts, "gathers_per_layer")
    reduce_all = of("all_reduce", gradients)
    # FSDP sends unit by unit in stages 2 and 3, which differ in when they gather.
    fsdp = habit(layouts, "fsdp") > 0
    by_unit = np.where(fsdp, pieces, 1.0)
    scatter = of("reduce_scatter", gradients, pieces=by_unit)
    gather = of("all_gather", gathered * np.where(fsdp, 1.0, trained), pieces=by_unit)
    # FSDP reduces what it accumulates, DeepSpeed what its weights have.
    reduced = np.where(fsdp, gradients, halves * trained)
    gather_units = of("all_gather", gathered, interfaces, pieces)
    reduce_units = of("reduce_scatter", reduced, interfaces, pieces)
    zero = layouts.zero
    # Where the engine keeps gradients, and gathered weights, whole over the micro-batches, it communicates once.
    per_micro_batch = (habit(layouts, "reduces_each") > 0) & (layouts.micro_batches > 1)
    regathers = regathers_each(layouts)
    forward = np.where(regathers, gather_units, 0.0)
    # ZeRO-3 gathers for backward too, then reduces; ZeRO-2 reduces where the engine does so each time.
    backward = np.where(regathers, gather_units + reduce_units, np.where((zero == 2) & per_micro_batch, scatter, 0.0))
    once = np.where((zero > 0) & ~regathers, gather, 0.0)
    # What is left for after the last micro-batch.
    final_s = np.where(zero == 0, reduce_all, np.where(backward > 0, 0.0, scatter))
    # Backward's first gather is asked for while the loss is computed. Share of backward's messages:
    reductions = np.where(regathers, reduce_units[0] / np.maximum(backward[0], 1e-30), 1.0)
    return DataMessages(
        once, forward, backward, final_s, (edge, edge * reductions, np.where(fsdp & (layouts.pp > 1), 1.0, edge))
    )


def regathers_each(layouts: Layouts) -> NDArray[np.bool_]:
    """Tell which layouts gather weights, and reduce gradients, for every micro-batch: ZeRO-3, unless a pipeline keeps
    them."""
    regathers: NDArray[np.bool_] = (layouts.zero == 3) & ((layouts.pp == 1) | (habit(layouts, "reduces_each") > 0))
    return regathers


def copied_s(
    weights: Reals, cluster: Cluster, layouts: Layouts, calibration: Calibration, trained: Reals | float = 1.0
) -> Reals:
    """Seconds in which FSDP copies gathered weights and gradients on the GPU, once for every pass that moves them.

    FSDP2 reads and writes what it has gathered, twice where it gathers for the backward too, and reads gradients in 16
    bit and writes what is reduced. FSDP1 puts the gradients of a unit together (read and written in 16 bit), casts them
    where they are reduced in fp32, and divides them in place.

    Source: PyTorch, `distributed/fsdp/_fully_shard/_fsdp_collectives.py`, `foreach_all_gather_copy_out` and
    `foreach_reduce_scatter_copy_in`; `distributed/fsdp/_runtime_utils.py`, `_post_backward_hook` and `_reduce_grad`
    (gradient_predivide_factor), `_flat_param.py`, views by `torch.split`; bytes counted.
    """
    regathers = regathers_each(layouts)
    narrow = (habit(layouts, "gathers_fp8") > 0) & (layouts.precision == "fp8")
    gathers = np.where(regathers, 2, 1) * 2 * np.where(narrow, 1, layouts.element_bytes)
    reduced = layouts.gradient_bytes
    copies = habit(layouts, "copies_weights") * (gathers + trained * (layouts.element_bytes + reduced))
    casts = np.where(reduced > layouts.element_bytes, layouts.element_bytes + reduced, 0)
    flattened = 2 * layouts.element_bytes + casts + 2 * reduced
    copies = copies + habit(layouts, "flattens_gradients") * trained * flattened
    memory = cluster.gpu.memory_bytes_per_s * calibration.memory_efficiency
    return np.where(layouts.zero > 1, copies * weights / memory, 0.0)


def update_s(weights: Reals, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Reals:
    """Seconds of the optimizer on the rank's share of the states; offloaded, over the host's link and memory.

    Source: bytes of Adam counted (`ADAM_BYTES`); ZeRO-Offload (arXiv 2101.06840), §4.1: gradients go down and weights
    come up, 2 bytes each.
    """
    share = np.where(layouts.zero > 0, layouts.zero_shards, 1)
    rank_weights = weights / share
    memory = cluster.gpu.memory_bytes_per_s * calibration.memory_efficiency
    # 4 bytes per parameter over the link (gradient down, weight up); a node's ranks share the host's memory.
    adam_bytes = np.where(layouts.true_weights > 0, TRUE_ADAM_BYTES, ADAM_BYTES)
    host = rank_weights * (4 / HOST_LINK_BYTES_PER_S + ADAM_BYTES * cluster.gpus_per_node / HOST_MEMORY_BYTES_PER_S)
    is_offloaded = layouts.offload != OFFLOAD.index("none")
    return np.where(is_offloaded, host, rank_weights * adam_bytes / memory) + 4 * weights / memory


def launched_s(layers: float, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Reals:
    """Seconds once per step that the host launches the update, and that all ranks wait for each other.

    Each of a layer's tensors is a few kernels (gradient copied, scaled, weight copied back; Adam takes many tensors at
    once), and norm, overflow and loss are a scalar all-reduce over all ranks each.

    Source: Megatron-LM, `optimizer/optimizer.py`, `_copy_model_grads_to_main_grads` and `clip_grads.py`; counted.
    """
    meeting = collective_s("all_reduce", cluster, calibration, 4.0, layouts.gpus)
    launched = UPDATE_KERNELS * layers * calibration.launch_s + MEETINGS * meeting
    return np.where(layouts.blocking > 0, 0.0, launched)  # where the host waits for each kernel, these are in each


def fetched_s(weights: Reals, layouts: Layouts) -> Reals:
    """Seconds in which a rank's share of weights that lie in the host's memory comes down its link, for the forward of
    one micro-batch, and as long for its backward: 2 bytes per parameter and pass, which run beside the computation like
    ZeRO-3's gathers.

    Unconfirmed: no row tells the link's share from that of the gathers that follow it.

    Source: ZeRO-Infinity (arXiv 2104.07857), §6.1: each rank fetches its share over its own link; §6.2: beside
    computation and gathers, of which we take the latter only.
    """
    down = layouts.element_bytes * weights / layouts.zero_shards / HOST_LINK_BYTES_PER_S
    return np.where(layouts.offload == OFFLOAD.index("parameters"), down, 0.0)


HOST_LINK_BYTES_PER_S = 20e9
"""PCIe 4.0 × 16 as reached by large pinned copies; of one GPU. Unconfirmed on Jean Zay."""
HOST_MEMORY_BYTES_PER_S = 150e9
"""Of a node's host memory as an Adam on all cores reaches it. Unconfirmed on Jean Zay."""


def parts_of(
    workload: Workload,
    cluster: Cluster,
    layouts: Layouts,
    calibration: Calibration,
    passes: Passes,
    stages: StageCosts,
    weights: Reals,
    trained: Reals,
) -> Parts:
    """The parts of a step for layouts that share one list of stages.

    A pipeline takes m(F + B) on its slowest stage, and beside that what the other stages need for one micro-batch:
    m·max(F + B) + (Σ(F + B) − max(F + B))·ramp, which is (m + p − 1)(F + B) for equal stages.

    Source: Narayanan et al. 2021, §2.2; for unequal stages Fan et al. 2021 (DAPPLE), §4.1, without their pivot.

    Args:
        passes: of these layouts.
        stages: theirs.
        weights: on the heaviest stage's rank.
        trained: share of the weights that have gradients.
    """
    counts = stages.counts
    first, kinds = distinct(layouts, NOT_OF_BOUNDARIES)
    boundary = boundary_s(workload, cluster, layouts[first], calibration)[kinds]
    forward, backward, recompute, tensor = (
        counts @ layer_s
        for layer_s in (passes.forward, passes.backward, passes.again, passes.tensor_forward + passes.tensor_backward)
    )
    parameters = np.array([kind.parameters for kind in workload.kinds], float)
    experts = float((counts @ np.array([kind.expert_parameters for kind in workload.kinds], float)).max()) / layouts.ep
    units = float(counts.sum(axis=1).max())  # layers of the longest stage
    # The root's unit (embedding) and the first layer are gathered before any product.
    edge_parameters = parameters[0] * (stages.order.size == 1) + parameters[min(1, parameters.size - 1)]
    edge = np.minimum(edge_parameters / layouts.tp / np.maximum(weights, 1.0), 1.0)
    # Experts by themselves: over fewer ranks, and split over ep already.
    first, kinds = distinct(replace(layouts, micro_batches=np.minimum(layouts.micro_batches, 2)), NOT_OF_MESSAGES)
    few = layouts[first]
    messages = gathered_s(
        (weights - experts)[first], cluster, few, calibration, units, edge[first], trained=trained[first]
    )
    if experts.any():
        expert_messages = gathered_s(experts[first], cluster, few, calibration, units, 0.0, few.ep)
        messages = messages._replace(
            once=messages.once + expert_messages.once,
            forward=messages.forward + expert_messages.forward,
            backward=messages.backward + expert_messages.backward,
            last=messages.last + expert_messages.last,
        )
    messages = messages.of(kinds)
    tied = np.broadcast_to(tied_s(workload, cluster, few, calibration), first.shape)[kinds]
    launched = launched_s(units, cluster, few, calibration)[kinds]
    # ZeRO shards experts over fewer ranks, as if a rank held those of all ep ranks.
    updated = weights + np.where(layouts.zero > 0, experts * (layouts.ep / layouts.tp - 1), 0.0)
    update = update_s((updated * trained)[first], cluster, few, calibration)[kinds]
    copied = copied_s(weights[first], cluster, few, calibration, trained[first])[kinds]
    fetched = fetched_s(weights[first], few)[kinds]
    hides = (layouts.overlap > 0) | (layouts.zero == 3)  # ZeRO-3's messages are beside computation in any case
    overlap = np.where(hides, calibration.overlap, 0.0)
    work = forward + backward + recompute + tensor + 2 * boundary  # (distinct stages, layouts), of one micro-batch
    slowest = np.argmax(work, axis=0)[None, :]  # of each layout
    pick = lambda table: np.take_along_axis(table, slowest, 0)[0]  # noqa: E731
    m = layouts.micro_batches
    heavy = pick(work)
    total = (stages.times[:, None] * work).sum(axis=0)  # all stages, equal ones as often as they occur
    # Forward's part of the stage's work; what is left of `heavy` is backward's.
    ahead = pick(forward + counts @ passes.tensor_forward) + boundary
    # The host's link takes no channels.
    micro_batch_s = exposed_s(messages.forward[0] + fetched, ahead, overlap, messages.edge[0], messages.forward[1])
    micro_batch_s = micro_batch_s + exposed_s(
        messages.backward[0] + fetched, heavy - ahead, overlap, messages.edge[1], messages.backward[1]
    )
    after = exposed_s(messages.last[0], pick(backward), overlap, messages.edge[2], messages.last[1])
    gathering = overlap * layouts.gather_overlap
    before = exposed_s(messages.once[0], pick(forward), gathering, edge, messages.once[1])
    bubble = (total - heavy) * ramp(layouts, pick(forward), pick(backward + recompute))
    return Parts(
        forward=m * pick(forward),
        backward=m * pick(backward),
        recompute=m * pick(recompute),
        tensor=m * pick(tensor),
        pipeline=2 * m * boundary + tied,
        bubble=bubble,
        data=before + m * micro_batch_s + after + np.where(regathers_each(layouts), m, 1) * copied,
        optimizer=update,
        constant=calibration.step_s + launched,
    )


@dataclass(frozen=True, eq=False)
class Estimates:
    """Estimated seconds and bytes of layouts, one place per layout.

    Attributes:
        parts: seconds of a step by part.
        memory: bytes on the fullest rank by category.
        fits: whether the fullest rank's bytes are within the GPU's memory.
    """

    parts: Parts
    memory: Memories
    fits: NDArray[np.bool_]

    @property
    def step_s(self) -> Reals:
        """Seconds of one step."""
        return self.parts.step_s

    @property
    def memory_bytes(self) -> Reals:
        """Bytes of the fullest rank, as `nvidia-smi` shows them."""
        return self.memory.total_bytes


def by_stages(layouts: Layouts) -> tuple[Layouts, Integers, list[tuple[int, bool, slice]]]:
    """Group layouts by their list of stages.

    Returns:
        The layouts in that order, the place of each before, and for every list of stages its pp, whether embedding and
        logits count as layers, and where its layouts stand.
    """
    key = layouts.pp * 2 + layouts.embedding_slots  # both in one number
    # Of 16 bits numpy counts instead of comparing.
    order = np.argsort(key.astype(np.uint16) if key.size and key.max() < 2**16 else key, kind="stable")
    values, starts = np.unique(key[order], return_index=True)
    ends = [*starts[1:].tolist(), len(key)][: len(values)]  # none at all, of no layouts
    spans = zip(values.tolist(), starts.tolist(), ends, strict=True)
    return layouts[order], order, [(value // 2, bool(value % 2), slice(start, end)) for value, start, end in spans]


def weights_of(workload: Workload, layouts: Layouts, stages: StageCosts, *, trained: bool = False) -> Reals:
    """Weights that one rank of each distinct stage (rows) holds, or those that are trained; a tied matrix is on both
    its stages.

    Experts are split over the ep ranks, all else over the tensor-parallel ones.

    Source: Narayanan et al. 2021, §2.3: the embedding's copy on the last stage.
    """
    element = layouts.element_bytes
    gathered = [kind.gathered(element) for kind in workload.kinds]
    parameters = np.array(
        [
            kind.trained if trained and kind.trained is not None else elements
            for kind, elements in zip(workload.kinds, gathered, strict=True)
        ],
        float,
    )
    if workload.size is not None and workload.size.tied and stages.order.size > 1:
        parameters[-1] = workload.size.vocabulary * workload.size.hidden  # its copy on the last stage
    experts = np.array([kind.expert_parameters for kind in workload.kinds], float)
    if not experts.any():
        return (stages.counts @ parameters)[:, None] / layouts.tp
    shared = (stages.counts @ experts)[:, None]
    return ((stages.counts @ parameters)[:, None] - shared) / layouts.tp + shared / layouts.ep


def estimate(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Estimates:
    """Seconds and bytes of every layout.

    Args:
        workload: what is trained.
        cluster: on what.
        layouts: how.
        calibration: of the cluster's GPUs.
    """
    memory = memories(workload, layouts)
    if not cluster.gpu.context_bytes:  # no GPU: nothing takes its part before the model
        memory = replace(memory, reserve=memory.reserve - CONTEXT_BYTES)
    fits = memory.total_bytes <= cluster.gpu.memory_bytes
    return Estimates(step_parts(workload, cluster, layouts, calibration), memory, fits)


def step_parts(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Parts:
    """Seconds of the parts of a step of every layout."""
    calibration = on_gpu(calibration, cluster.gpu)
    ordered, order, groups = by_stages(layouts)
    # A layer's seconds are the same whatever shards states and fills the pipeline.
    first, kinds = distinct(ordered, NOT_OF_PASSES)
    passes = passes_of(workload, cluster, ordered[first], calibration)
    parts = {field.name: np.zeros(len(layouts)) for field in fields(Parts)}
    for pp, slots, span in groups:
        group_layouts, stages = ordered[span], stages_of(workload, pp, slots)
        group_passes = Passes(*(getattr(passes, field.name)[:, kinds[span]] for field in fields(Passes)))
        weights = weights_of(workload, group_layouts, stages).max(axis=0)  # the heaviest stage's rank
        trained = weights_of(workload, group_layouts, stages, trained=True).max(axis=0) / np.maximum(weights, 1.0)
        group_parts = parts_of(workload, cluster, group_layouts, calibration, group_passes, stages, weights, trained)
        for name, part in parts.items():
            part[order[span]] = getattr(group_parts, name)  # back to the order that was asked
    return Parts(**parts)


def memories(workload: Workload, layouts: Layouts) -> Memories:
    """Bytes of the fullest rank of every layout."""
    ordered, order, groups = by_stages(layouts)
    columns = {field.name: np.zeros(len(layouts)) for field in fields(Memories)}
    for pp, slots, span in groups:
        group_layouts, stages = ordered[span], stages_of(workload, pp, slots)
        group_memory = memories_of(workload, group_layouts, stages, weights_of(workload, group_layouts, stages))
        for name, column in columns.items():
            column[order[span]] = getattr(group_memory, name)
    return Memories(**columns)


@dataclass(frozen=True, eq=False)
class StepSimulation:
    """Simulated step.

    Attributes:
        step_s: seconds of the step.
        timeline: of every action on every stage's rank.
    """

    step_s: float
    timeline: Timeline


def simulate(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> StepSimulation:
    """Simulate one layout with the pipeline simulator.

    Args:
        workload: what is trained.
        cluster: on what.
        layouts: one layout.
        calibration: of the cluster's GPUs.

    Raises:
        LabError: if there is not exactly one layout, its layers cannot be split evenly over all chunks, or its schedule
            refuses its numbers.
    """
    if len(layouts) != 1:
        raise phrase.refused("several layouts", layouts=len(layouts))
    calibration = on_gpu(calibration, cluster.gpu)
    p, v, m = (int(column[0]) for column in (layouts.pp, layouts.chunks, layouts.micro_batches))
    layers = workload.size.layers if workload.size is not None else 0
    # A layer more where the logits count as one, two where the embedding does too: the last chunks hold fewer.
    if v > 1 and (layers + 2 * int(layouts.embedding_slots[0])) % (p * v) and (layers + 1) % (p * v):
        raise phrase.refused("uneven layers", layers=layers, p=p, v=v, chunks=p * v)
    name = SCHEDULES[int(layouts.schedule[0])]
    one_chunk = "1f1b" if name == "interleaved" else name
    schedule = build("interleaved", p, m, chunks=v) if v > 1 else build(one_chunk, p, m)
    stages = stages_of(workload, p * v, bool(layouts.embedding_slots[0]))  # in the order in which a sample passes them
    passes = passes_of(workload, cluster, layouts, calibration)
    # boundary_s counts v of them, the simulator each.
    boundary = float(boundary_s(workload, cluster, layouts, calibration)[0]) / v
    forward, backward = (
        [float(stage_s) + boundary for stage_s in (stages.counts @ layer_s)[stages.order, 0]]
        for layer_s in (passes.forward + passes.tensor_forward, passes.backward + passes.again + passes.tensor_backward)
    )
    half = tuple(stage_s / 2 for stage_s in backward)  # for schedules that split the backward
    costs = Costs(forward=tuple(forward), backward=tuple(backward), backward_input=half, backward_weight=half)
    timeline = play(schedule, costs)
    parts = step_parts(workload, cluster, layouts, calibration)
    # Outside of the pipeline's schedule.
    after = parts.data + parts.optimizer + parts.constant + tied_s(workload, cluster, layouts, calibration)
    return StepSimulation(timeline.makespan + float(after[0]), timeline)


SECONDS_PER_DAY: Final = 86_400
IDLE_OVER_DYNAMIC: Final = 256_646 / 433_196
"""Energy of idle nodes and network over that of the busy GPUs: 0.59.

Source: Luccioni, Viguier and Ligozat 2023 (JMLR 24), table 3: 256,646 kWh beside 433,196 kWh.
"""


@dataclass(frozen=True)
class Bill:
    """Time, energy and carbon of a training.

    Attributes:
        seconds: from the first to the last step, without failures and restarts.
        gpu_hours: GPUs times hours.
        energy_kwh: of the GPUs at their power.
        idle_kwh: of what stands idle beside them, by BLOOM's account.
        carbon_kg: of the GPUs' energy, as CO₂ equivalent.
        total_carbon_kg: with what stands idle, and the site's cooling (PUE).
    """

    seconds: float
    gpu_hours: float
    energy_kwh: float
    idle_kwh: float
    carbon_kg: float
    total_carbon_kg: float

    @property
    def days(self) -> float:
        """Days of 24 hours."""
        return self.seconds / SECONDS_PER_DAY


def training_s(flops_per_token: float, tokens: float, gpus: int, flops_per_s: float) -> float:
    """Seconds to train on so many tokens at a rate per GPU: T·F/(n·X), 8TP/(nX) with F = 8P.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §5.1, equation 4, and its footnote for recomputation.

    Raises:
        LabError: if a number is not above 0.
    """
    for name, value in (("tokens", tokens), ("gpus", gpus), ("flops_per_s", flops_per_s)):
        if not value > 0:
            raise phrase.refused("not above 0", name=name, value=value)
    return flops_per_token * tokens / (gpus * flops_per_s)


def bill(cluster: Cluster, gpus: int, seconds: float) -> Bill:
    """Compute energy and carbon of so many GPUs for so long.

    E = n·t·TDP, the thermal design power, as BLOOM was accounted: 1,082,990 GPU-hours of 400 W, 433,196 kWh, 24.7 t.

    Source: Luccioni, Viguier and Ligozat 2023 (JMLR 24), §4.2.

    Args:
        cluster: where; its GPU's power, its PUE and its electricity's carbon.
        gpus: how many.
        seconds: for how long.
    """
    hours = gpus * seconds / 3600
    energy = hours * cluster.gpu.tdp_w / 1000  # W · h → kWh
    idle = energy * IDLE_OVER_DYNAMIC
    grams = cluster.carbon_g_per_kwh / 1000  # kg per kWh
    return Bill(seconds, hours, energy, idle, energy * grams, (energy + idle) * cluster.pue * grams)
