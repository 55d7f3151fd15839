"""Seconds of a layer's passes: computation and messages, and the stages that layers are assigned to.

Stages that hold the same layers are computed once; the first of them stands for all, because it keeps the most
micro-batches. A layer's seconds are computed once per distinct cut (micro-batch, tensor and context parallelism, …) and
then looked up: stages, replicas and ZeRO do not change them.

Ranks are placed tensor-parallel innermost, then context, then data, and pipeline stages outermost, as Megatron and
DeepSpeed place them; so a group's members per node follow from the degrees, and a group that crosses nodes shares the
node's network interfaces with all groups that cross at the same time. Symbols: L members of a group in one node, G
nodes of a group, n = L·G.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dlojz.cost_model.calibration import Calibration
from dlojz.cost_model.layouts import (
    CHECKPOINTING,
    Integers,
    Layouts,
    Reals,
    alternates,
    element_bytes,
    habit,
    losses,
    stops_early,
)
from dlojz.cost_model.workload import Cut, Kind, Workload, launching_s, operator_times, operators_s, summed_s
from dlojz.hardware import Cluster, Collective, Link, Precision, bus_factor
from dlojz.hardware.evidence import DISPATCHERS
from dlojz.pipeline.partition import exact


@dataclass(frozen=True, eq=False)
class StageCosts:
    """Stages of a pipeline, those that hold the same layers merged.

    Attributes:
        counts: layers of each kind (columns) in each distinct stage (rows).
        first: number of the first such stage.
        times: how many such stages there are.
        order: which distinct stage each stage of the pipeline is.
    """

    counts: Reals
    first: Integers
    times: Integers
    order: Integers


@lru_cache(maxsize=4096)
def stages_of(workload: Workload, pp: int, embedding_slots: bool = False) -> StageCosts:
    """Cut a model into stages as libraries do.

    A decoder's layers are split evenly; if they do not divide, the first stages hold one more, as many as it takes
    (78 layers on 12 stages: 7 on eleven and 1 on the last, as DeepSpeed cuts them). With `embedding_slots`
    embedding and logits count as a layer each. Blocks of an image model are cut so that the heaviest stage is as light
    as can be, by operations.

    Source: DeepSpeed, `runtime/utils.py`, `partition_balanced`; the Jean Zay rows from line 841 on.
    """
    # Numbers of layers at which a stage begins, embedding and logits counted as layers.
    bounds = _decoder_bounds(workload, pp, embedding_slots) if workload.size else _balanced_bounds(workload, pp)
    # Kind of each layer, in order.
    blocks = np.repeat(np.arange(len(workload.kinds)), [kind.count for kind in workload.kinds])
    # Layers of each kind (columns) in each stage (rows).
    rows = [tuple(np.bincount(blocks[start:stop], minlength=len(workload.kinds))) for start, stop in pairwise(bounds)]
    distinct = list(dict.fromkeys(rows))
    order = np.array([distinct.index(row) for row in rows])
    first_stage = np.array([rows.index(row) for row in distinct])
    return StageCosts(np.array(distinct, float), first_stage, np.bincount(order, minlength=len(distinct)), order)


def _decoder_bounds(workload: Workload, pp: int, embedding_slots: bool) -> list[int]:
    layers = workload.kinds[1].count
    blocks = layers + 2
    if pp == 1:
        return [0, blocks]
    if embedding_slots:
        blocks_per_stage = -(-blocks // pp)  # embedding and logits take a slot each
        return [min(blocks_per_stage * stage, blocks) for stage in range(pp)] + [blocks]
    layers_per_stage = -(-layers // pp)
    # The first stage also has the embedding, the last the logits.
    return [0, *(1 + min(layers_per_stage * stage, layers) for stage in range(1, pp)), blocks]


def _balanced_bounds(workload: Workload, pp: int) -> list[int]:
    cut = Cut(1)
    weights: list[float] = []
    for kind in workload.kinds:
        flops = sum(product.flops for operator in kind.operators(cut) for product in operator.forward)
        weights += [flops] * kind.count
    return list(exact(weights, pp).bounds)


WIRE: Final = 0.8
"""Of a network card's rate as sold, what one ring over it carries; the shipped InfiniBand links take the same."""


def members(cluster: Cluster, ranks: ArrayLike, stride: ArrayLike) -> tuple[Reals, Reals]:
    """Members per node (L) and nodes (G) of a group of `ranks` that are `stride` apart in the order of placement.

    Source: the order is Megatron's (Narayanan et al. 2021, §3): tensor within a node first.
    """
    per_node = np.maximum(1, cluster.gpus_per_node // np.asarray(stride))  # members of such a group that one node holds
    inside = np.minimum(np.asarray(ranks), per_node)
    return inside.astype(float), np.ceil(np.asarray(ranks) / inside)  # the last node may hold fewer


RING_STEP_S: Final = (1.9e-6, 4.0e-6)
"""Latency of a step of a ring within a node and between two, for messages large enough for the protocol LL128.

Source: NVIDIA/nccl, `src/graph/tuning.cc`, `hwLat` (NVLink and network, ring, LL128)."""


PROCESSOR_LINK_BYTES_PER_S: Final = 16e9
"""From a network card through the processors to a GPU that is not beside it.

Source: NVIDIA/nccl, `src/graph/topo.h`, `AMD_BW` (a DGX A100 has AMD's processors)."""


def ring_s(ranks: ArrayLike, inside: ArrayLike, nodes: ArrayLike) -> Reals:
    """Latency of a gather or reduce-scatter around one ring over all ranks, which grows with their number.

    NCCL runs both on rings only: (n − G) steps within nodes and G − 1 between them.

    Source: NVIDIA/nccl, `src/graph/tuning.cc`, `ncclTopoTuneModel`: (nsteps − nInterSteps)·intraLat +
    nInterSteps·interLat, nsteps = nRanks − 1.
    """
    across = np.asarray(nodes, float) - 1  # G − 1
    inner_s, far = RING_STEP_S
    return np.maximum(np.asarray(ranks, float) - 1 - across, 0) * inner_s + across * far


def collective_s(
    collective: Collective,
    cluster: Cluster,
    calibration: Calibration,
    message_bytes: ArrayLike,
    ranks: ArrayLike,
    stride: ArrayLike = 1,
    interfaces: ArrayLike = np.inf,
    relayed: ArrayLike = 1,
) -> Reals:
    """Seconds of a collective over `ranks` GPUs that are `stride` apart, while all groups like it do the same.

    Within a node, the link's own time; across nodes, the slower of the node's link and of its network interfaces, of
    which every group that crosses (gpus_per_node / L of them) takes its share.

    Args:
        collective: `all_reduce`, `all_gather`, `reduce_scatter`.
        message_bytes: the whole message, as gathered.
        ranks, stride: of the group.
        interfaces: most network interfaces of a node that one group can use.
        relayed: 0 where NCCL cannot hand a message to the GPU beside a card (PXN, before NCCL 2.12). A ring then enters
            and leaves a node by one card and two GPUs; where GPUs share a card, only one of a group with a stride is
            beside it, and the other reaches it through the processors.

    Source: NVIDIA, "Doubling all2all Performance with NCCL 2.12" (PXN); two GPUs share a PCIe switch in a DGX A100;
    §3.1 of nccl-tests' PERFORMANCE.md for bus bandwidth; sharing of interfaces: counted.
    """
    ranks, message = np.asarray(ranks, float), np.asarray(message_bytes, float)
    inside, nodes = members(cluster, ranks, stride)
    # At least 2: a link of one rank has no figures; `local` is 0 there.
    link = cluster.intra.time_s(collective, np.maximum(inside, 2), message) / calibration.intra_efficiency
    local = np.where(inside > 1, link, 0.0)
    groups = cluster.gpus_per_node / inside  # of a node, all crossing at once
    node = cluster.inter.bytes_per_s(collective, np.maximum(nodes, 2))
    # bytes/s of one group.
    share = np.minimum(node / groups, np.asarray(interfaces, float) * WIRE * cluster.nic_bytes_per_s)
    shared = cluster.nics_per_node < cluster.gpus_per_node
    detour = (np.asarray(relayed) == 0) & (inside > 1) & (np.asarray(stride) > 1) & shared
    share = share * np.where(detour, min(1.0, PROCESSOR_LINK_BYTES_PER_S / cluster.nic_bytes_per_s), 1.0)
    start = cluster.inter.alpha_s(collective, np.maximum(nodes, 2))
    if collective in ("all_gather", "reduce_scatter"):
        start = np.maximum(start, ring_s(ranks, inside, nodes))
    between = Link(start, share * calibration.inter_efficiency)
    across = between.seconds(bus_factor(collective, ranks) * message)
    # A ring is as slow as its slower part.
    return np.where(ranks <= 1, 0.0, np.where(nodes > 1, np.maximum(across, local), local))


def all_to_all_s(
    cluster: Cluster,
    calibration: Calibration,
    message_bytes: ArrayLike,
    ranks: ArrayLike,
    stride: ArrayLike = 1,
    copies: int = 1,
) -> Reals:
    """Seconds of an all-to-all over `ranks` GPUs that are `stride` apart, while all groups like it do the same.

    Each rank keeps 1/n of its message; within a node (L − 1)/n of it goes over the node's links, and the (n − L)/n for
    other nodes over the node's network interfaces, which all its GPUs share. The slower of the two sets the time.

    Args:
        message_bytes: the whole message that one rank hands over.
        ranks, stride: of the group.
        copies: k rows of the message that are one token's, of which each of G nodes is sent one at most: it is among
            the k with the chance 1 − (1 − 1/G)^k. The node's links then hand it on.

    Source: counted; α and bandwidth of the link for an all-to-all, or across nodes for an all-gather, of `cluster`;
    rows sent once to a node: DeepSeek-V3 (arXiv 2412.19437), §3.2.2.
    """
    ranks, message = np.asarray(ranks, float), np.asarray(message_bytes, float)
    inside, nodes = members(cluster, ranks, stride)
    # Bytes of a rank for members of its own node, itself included.
    local_bytes = message * np.where(copies > 1, 1.0, inside / np.maximum(ranks, 1))
    link = cluster.intra.time_s("all_to_all", np.maximum(inside, 2), local_bytes) / calibration.intra_efficiency
    local = np.where(inside > 1, link, 0.0)
    far = message * (ranks - inside) / np.maximum(ranks, 1)  # for members of other nodes
    far = far * (1 - (1 - 1 / nodes) ** copies) * nodes / copies
    node = cluster.inter.bytes_per_s("all_gather", np.maximum(nodes, 2)) * calibration.inter_efficiency
    # All GPUs of a node send through its interfaces.
    across = Link(cluster.inter.alpha_s("all_gather", np.maximum(nodes, 2)), node).seconds(cluster.gpus_per_node * far)
    return np.where(ranks <= 1, 0.0, np.where(nodes > 1, np.maximum(across, local), local))


def neighbour_s(
    cluster: Cluster,
    calibration: Calibration,
    message_bytes: ArrayLike,
    pp: ArrayLike,
    rank_group: ArrayLike,
    sliced: ArrayLike,
    tp: ArrayLike,
) -> Reals:
    """Seconds that a boundary tensor takes to the next pipeline stage, while all ranks of the node send theirs.

    With `sliced`, each tensor-parallel rank sends its part, and the receivers gather the parts over the node's link.

    Args:
        message_bytes: of the whole tensor, of one micro-batch.
        pp: stages.
        rank_group: dp · cp · tp, how far the next stage is in the order of placement.
        sliced: 0 or 1.
        tp: tensor-parallel ranks.

    Source: Narayanan et al. 2021, §4.1 (scatter/gather).
    """
    message, tp = np.asarray(message_bytes, float), np.asarray(tp)
    parts = np.where(np.asarray(sliced) > 0, tp, 1)
    part_bytes = message / parts
    inside = np.asarray(rank_group) * 2 <= cluster.gpus_per_node  # both stages' groups fit into one node
    # bytes/s of one GPU while all of its node send.
    share = cluster.inter.bytes_per_s("all_gather", 2) / cluster.gpus_per_node * calibration.inter_efficiency
    across = Link(cluster.inter.alpha_s("p2p", 2), share).seconds(part_bytes)
    within = cluster.intra.time_s("p2p", 2, part_bytes) / calibration.intra_efficiency
    gathered = np.where(parts > 1, collective_s("all_gather", cluster, calibration, message, np.maximum(parts, 2)), 0.0)
    return np.where(np.asarray(pp) > 1, np.where(inside, within, across) + gathered, 0.0)


ASYNCHRONOUS = 0.3
"""Share of tensor-parallel messages that hides where they are cut up. Approximate: torchtitan gained 5 to 9 % of a step
of which about a quarter is such messages with their copies (Liang et al. 2024, 70 B)."""
ALTERNATE_SHARE: Final = 0.5
"""Of a layer's forward, what is computed again where every second product is."""


@dataclass(frozen=True, eq=False)
class Passes:
    """Seconds of one micro-batch in one layer, per layer kind (rows) and layout (columns).

    Attributes:
        forward, backward: computation.
        again: computation of what was not kept.
        tensor_forward, tensor_backward: messages of tensor and context parallelism that are waited for; the latter
            with those of the recomputation.
    """

    forward: Reals
    backward: Reals
    again: Reals
    tensor_forward: Reals
    tensor_backward: Reals


def cuts_of(layouts: Layouts) -> tuple[list[Cut], Integers]:
    """Find the distinct cuts of many layouts, and the index of each layout's cut."""
    names = (
        "micro_batch", "tp", "cp", "sequence_parallel", "fused_attention", "gradient_bytes", "fused_accumulation",
        "blocking", "eager", "ep", "attention_kernel", "context_exchange", "dispatcher",
    )  # fmt: skip
    columns = [getattr(layouts, name) for name in names]
    columns += [losses(layouts)]
    habits = ("casts", "gathers_fp8", "copies_messages", "rings", "expands_keys")
    columns += [habit(layouts, name).astype(np.int64) for name in habits]
    key = np.zeros(len(layouts), np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column  # one number per combination: a mixed radix
    _, representatives, cut_indices = np.unique(key, return_index=True, return_inverse=True)
    cuts = [
        Cut(
            mb,
            tp,
            cp,
            bool(sp),
            bool(fused),
            size,
            bool(adds),
            bool(blocks),
            bool(eager),
            ep,
            kernel,
            bool(exchange),
            loss,
            casts,
            layouts.precision == "fp8",
            send,
            *map(bool, flags),
        )
        for mb, tp, cp, sp, fused, size, adds, blocks, eager, ep, kernel, exchange, send, loss, casts, *flags in zip(
            *(column[representatives].tolist() for column in columns), strict=True
        )
    ]
    return cuts, cut_indices.reshape(-1)


class KindTimes(NamedTuple):
    """Seconds of one layer.

    Attributes:
        forward, backward: at least as long as the host takes to launch its kernels.
        core, core_backward: of what selective checkpointing computes again.
        tail: of the last product and what follows it.
        idle, idle_backward: in which the GPU waits for the host, and messages run.
    """

    forward: float
    backward: float
    core: float
    core_backward: float
    tail: float
    idle: float
    idle_backward: float


def kind_times(
    kind: Kind, cut: Cut, cluster: Cluster, calibration: Calibration, precision: Precision, decoder: bool = True
) -> KindTimes:
    """Seconds of one layer's computation.

    Selective checkpointing computes attention's core of a decoder again, and of a block of an image model all that is
    no product. The tail's results no backward reads: torch's checkpoint stops before it, since 2.1.

    Source: Korthikanti et al. 2022, §5; `dlojz.models.checkpointing.run_checkpointed` keeps products, convolutions,
    attention; PyTorch, `torch/utils/checkpoint.py`, `set_checkpoint_early_stop`.
    """
    operators = kind.operators(cut)
    times = operator_times(operators, cluster.gpu, calibration, precision, cut.cast_bytes)
    # Blocking: the host's waits are in each kernel.
    forward, backward = summed_s(times, cluster.gpu.kernel_s + (calibration.serial_s if cut.blocking else 0.0))
    launching = 0.0 if cut.blocking else launching_s(operators, calibration)
    # Backward launches twice as many kernels.
    idle, idle_backward = max(launching - forward, 0.0), max(2 * launching - backward, 0.0)

    def part_s(numbers: Sequence[int]) -> tuple[float, float]:
        chosen, chosen_times = [operators[number] for number in numbers], [times[number] for number in numbers]
        return operators_s(chosen, cluster.gpu, calibration, precision, blocking=cut.blocking, times=chosen_times)

    recomputed = [
        number
        for number, operator in enumerate(operators)
        if (operator.core if decoder else not operator.forward and not operator.fused)
    ]
    last_product = max((index for index, operator in enumerate(operators) if operator.forward), default=len(operators))
    tail = part_s(range(last_product, len(operators)))[0]  # the last product and what follows
    computing = forward + idle, backward + idle_backward
    return KindTimes(*computing, *part_s(recomputed), tail, idle, idle_backward)


def message_times(
    kind: Kind,
    cut: Cut,
    cluster: Cluster,
    calibration: Calibration,
    precision: Precision = "fp16",
    seconds_of_sum: dict[tuple[float, ...], float] | None = None,
) -> tuple[float, float]:
    """Seconds of the messages of tensor parallelism of one layer, forward and backward, none of them hidden.

    `sums` all-reduces of the boundary tensor, with sequence parallelism as a reduce-scatter and an all-gather each;
    torchtitan gathers in fp8 where the products are, and reads and writes each message once more (`LibraryHabits`).

    Args:
        seconds_of_sum: seconds of such a sum, by all that they depend on; new ones are added.

    Source: Shoeybi et al. 2019 (arXiv 1909.08053), §3; Korthikanti et al. 2022, §4.2.2; torchao,
    `float8_tensor_parallel.py`.
    """
    if cut.tp == 1:
        return 0.0, 0.0
    seconds_of_sum = {} if seconds_of_sum is None else seconds_of_sum
    size = element_bytes(precision)
    message = size * kind.elements * cut.micro_batch / cut.cp  # bytes of a boundary tensor on one rank
    key = message, cut.tp, cut.sequence_parallel, cut.gathers_fp8, cut.copies_messages
    if key not in seconds_of_sum:
        parts: tuple[Collective, ...] = ("reduce_scatter", "all_gather") if cut.sequence_parallel else ("all_reduce",)
        memory = cluster.gpu.memory_bytes_per_s * calibration.memory_efficiency
        reduction_s = 0.0
        for part in parts:
            narrow = part == "all_gather" and cut.gathers_fp8 and precision == "fp8"
            sent_bytes = message / size if narrow else message  # fp8: 1 byte per element
            reduction_s += float(collective_s(part, cluster, calibration, sent_bytes, cut.tp))
            if cut.copies_messages and cut.sequence_parallel:
                reduction_s += 2 * sent_bytes / memory  # read and written once more
        seconds_of_sum[key] = reduction_s
    return kind.sums[0] * seconds_of_sum[key], kind.sums[1] * seconds_of_sum[key]


ONCE_PER_NODE_S: Final = (0.14e-3, 0.42e-3)
"""Of each all-to-all that sends a token once to a node, beside its kernel: within a node, and between nodes; who sends
what is found and gathered first, and waited for.

Source: deepseek-ai/DeepEP, Hybrid-EP_Implementation.md, 4,096 tokens of 7,168 in 16 bit, top 8, 16 multiprocessors:
between the rates called Torch API and kernel only, the mean of dispatch and combine. Eight B200: 308 MB at 536 and 735,
531 and 674 GB/s; 16 H100: 117 MB at 54.5 and 71.7, 53.4 and 63.0 GB/s. Such a rate counts a token once for each rank
of a node, or each node, that it reaches, its own included: 71.7 GB/s are more than the network carries.
"""


def exchange_times(
    kind: Kind,
    cut: Cut,
    cluster: Cluster,
    calibration: Calibration,
    precision: Precision,
    computing_s: tuple[float, float],
) -> tuple[float, float]:
    """Seconds of expert parallelism's messages of one layer that are waited for, forward and backward.

    Two all-to-alls of all rows of a rank's tokens each way. Where they run beside another micro-batch's computation,
    which is as long as this one's, they are exposed as other messages are.

    Args:
        computing_s: seconds of the layer's computation, forward and backward.

    Source: Lepikhin et al. 2020 (arXiv 2006.16668), for dispatch and combine; `ONCE_PER_NODE_S`.
    """
    if cut.ep == 1 or not kind.exchange_elements:
        return 0.0, 0.0
    rows_bytes = element_bytes(precision) * kind.exchange_elements * cut.micro_batch / cut.cp / cut.tp
    dispatcher = DISPATCHERS[cut.dispatcher]
    copies, start_s = 1, 0.0
    if dispatcher == "once_per_node":
        copies, start_s = kind.top_k, ONCE_PER_NODE_S[int(members(cluster, cut.ep, 1)[1] > 1)]
    # Neighbours: tensor-parallel ranks hand over their own tokens.
    exchanged_s = 2 * (start_s + float(all_to_all_s(cluster, calibration, rows_bytes, cut.ep, 1, copies)))
    if dispatcher != "overlapped":
        return exchanged_s, exchanged_s
    channels_s = float(channel_share(cluster, cut.ep)) * exchanged_s
    forward, backward = (
        float(exposed_s(exchanged_s, beside_s, calibration.overlap, 0.0, channels_s)) for beside_s in computing_s
    )
    return forward, backward


def exposed_s(
    message_s: Any, computation_s: Any, overlap: ArrayLike, edge: ArrayLike = 0.0, channels_s: ArrayLike | None = None
) -> Reals:
    """Seconds that communication adds to the computation beside it: E + max(0, M − C) + (1 − overlap)·min(K, C).

    E is the share of the messages with nothing beside it, M the others, and K what M would take with all channels: they
    take multiprocessors and the memory's bandwidth from the products, so that a share 1 − overlap of K is never hidden.

    Args:
        overlap: nothing is hidden where it is 0.
        channels_s: seconds of the messages times `channel_share`; by default all channels run.

    Source: Zhao et al. 2023, PyTorch FSDP (arXiv 2304.11277), §3.3; NCCL's channels occupy a multiprocessor each
    (20 to 32 of 108 or 132).
    """
    overlap = np.asarray(overlap)
    bare = np.where(overlap > 0, edge, 0.0)  # with overlap 0 the sum below is the whole message anyway
    beside_s = (1 - bare) * message_s
    taken_s = beside_s if channels_s is None else np.where(overlap > 0, (1 - bare) * channels_s, beside_s)
    return (
        bare * message_s + np.maximum(beside_s - computation_s, 0) + (1 - overlap) * np.minimum(taken_s, computation_s)
    )


def channel_share(cluster: Cluster, ranks: ArrayLike, stride: ArrayLike = 1) -> Reals:
    """Share of a node's NCCL channels that run for a group: what its part of the network carries over the node's links.

    NCCL runs as many channels as the slowest part of a ring can feed, each at a fixed rate, so that what they take of
    the multiprocessors goes with the bytes and not with the seconds on a slow wire. Within a node all run.

    Source: NVIDIA/nccl, `src/graph/search.cc`, `ncclTopoCompute`: channels of one speed each are added until the path
    carries no more, whatever an engine then makes of them.
    """
    inside, nodes = members(cluster, ranks, stride)
    network = cluster.inter.bytes_per_s("all_gather", np.maximum(nodes, 2)) * inside / cluster.gpus_per_node
    links = cluster.intra.bytes_per_s("all_gather", max(cluster.gpus_per_node, 2))
    return np.where(nodes > 1, np.minimum(network / links, 1.0), 1.0)


def ring_times(
    kind: Kind, cut: Cut, cluster: Cluster, calibration: Calibration, precision: Precision, core_s: tuple[float, float]
) -> tuple[float, float]:
    """Seconds of context parallelism's messages of one layer that are waited for, forward and backward.

    Keys and values pass all ranks forward; backward they do so again, with their gradients. In a ring each of cp steps
    of attention hides the message of the next. torch's ring gathers all keys and values, repeated for all heads,
    beside the first step, and hands their gradients on cp times, in fp32, of which the last has nothing beside it.
    Llama 3 gathers before it computes. With heads exchanged, queries, keys, values and what attention gives pass an
    all-to-all each, which are waited for, and so do their gradients.

    Args:
        core_s: seconds of attention, forward and backward.

    Source: Liu et al. 2023 (arXiv 2310.01889), §3; PyTorch, `_context_parallel/_attention.py`, `_AllGatherRotater` and
    `dkv_rotater`; Llama 3 (arXiv 2407.21783), §3.3.2; Jacobs et al. 2023, DeepSpeed-Ulysses (arXiv 2309.14509), §3.1.
    """
    if cut.cp == 1 or not kind.ring_elements:
        return 0.0, 0.0
    size, repeats = element_bytes(precision), kind.repeats if cut.expands_keys else 1
    if cut.exchanges_heads:
        keys = size * kind.ring_elements / 2 * cut.micro_batch / cut.tp / cut.cp  # of one rank's tokens; or values
        exchanged = 2 * all_to_all_s(cluster, calibration, [keys, kind.repeats * keys], cut.cp, cut.tp)
        return float(exchanged.sum()), float(exchanged.sum())
    # Bytes of keys and values of the whole sequence, on one tensor-parallel rank.
    keys = size * kind.ring_elements * repeats * cut.micro_batch / cut.tp
    gathered = float(collective_s("all_gather", cluster, calibration, keys, cut.cp, cut.tp))
    if not cut.rings:
        return gathered, 2 * gathered  # backward: keys and values again, and their gradients
    channels = float(channel_share(cluster, cut.cp, cut.tp))

    def exposed(message_s: float, computation_s: float, edge: float = 0.0) -> float:
        return float(exposed_s(message_s, computation_s, calibration.overlap, edge, channels * message_s))

    forward, backward = core_s
    if not cut.expands_keys:
        return exposed(gathered, forward), exposed(2 * gathered, backward)
    step_share = 1 / cut.cp
    # Gathering takes cp − 1 of cp parts in 16 bit; returning all cp of them, in fp32.
    returned = gathered * 4 / size / (1 - step_share)
    return (
        exposed(gathered, step_share * forward),
        exposed(gathered, step_share * backward) + exposed(returned, (1 - step_share) * backward, step_share),
    )


def passes_of(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Passes:
    """Seconds of every layer kind for every layout.

    Selective checkpointing computes attention's core again (of image models all but products; see `kind_times`), full
    checkpointing all of a layer, each with its messages. Messages run while the GPU waits for the host.

    Source: Korthikanti et al. 2022, §5; SC21 (Narayanan et al. 2021), §3.5.
    """
    cuts, cut_indices = cuts_of(layouts)
    precision, decoder = layouts.precision, workload.size is not None
    kinds = workload.kinds
    table = np.zeros((13, len(kinds), len(cuts)))  # (times, kinds, cuts)
    seconds_of_sum: dict[tuple[float, ...], float] = {}
    for column, cut in enumerate(cuts):
        for row, kind in enumerate(kinds):
            layer_times = kind_times(kind, cut, cluster, calibration, precision, decoder)
            around = ring_times(
                kind, cut, cluster, calibration, precision, (layer_times.core, layer_times.core_backward)
            )
            summed = message_times(kind, cut, cluster, calibration, precision, seconds_of_sum)
            exchanged = exchange_times(kind, cut, cluster, calibration, precision, layer_times[:2])
            table[:, row, column] = *layer_times, *summed, *around, *exchanged
    # Each (kinds, layouts): looked up by the layout's cut.
    computing, messages = np.split(table[:, :, cut_indices], [7])
    forward, backward, core, _, tail, idle, idle_back = computing
    message, message_back, ring, ring_back, exchange, exchange_back = messages
    exposed = 1.0 - np.maximum(
        habit(layouts, "hidden_tensor") * layouts.tensor_overlap, ASYNCHRONOUS * layouts.asynchronous
    )
    inner = np.array([kind.recomputed for kind in kinds])[:, None]  # (kinds, 1)
    full = inner * (layouts.checkpointing == CHECKPOINTING.index("full")) / layouts.checkpointed_every
    alternate = alternates(layouts)
    selective = inner * (alternate | (layouts.checkpointing == CHECKPOINTING.index("selective")))
    # Messages run free while the GPU waits for the host.
    tensor_s = np.maximum(message * exposed + ring + exchange - idle, 0.0)
    # Full checkpointing sends the forward's messages again.
    tensor_back_s = np.maximum(message_back * exposed + ring_back + exchange_back - idle_back, 0.0)
    tensor_back_s += full * tensor_s
    tensor_back_s += selective * ~(alternate & decoder) * ring  # attention's core includes its ring
    recompute = full * (forward - stops_early(layouts) * tail)
    recompute += selective * np.where(alternate & decoder, ALTERNATE_SHARE * forward, core)
    return Passes(forward, backward, recompute, tensor_s, tensor_back_s)
