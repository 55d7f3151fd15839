"""Seconds of the messages of a layout: who shares a node's links with whom.

Layer 3. Invariant: ranks are placed tensor-parallel innermost, then context, then data, and pipeline stages outermost,
as Megatron and DeepSpeed place them; so a group's members per node follow from the degrees, and what crosses nodes
shares the node's network interfaces with all groups that cross at the same time.

Every function takes numbers or numpy arrays. Symbols: L members of a group in one node, G nodes of a group, n = L·G.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import ArrayLike

from dlojz.hardware import Cluster, Collective
from dlojz.predict.time.calibration import Calibration
from dlojz.predict.time.layouts import Reals

VOLUME: Final[dict[str, float]] = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""What each rank sends in a ring, over (n − 1)/n of the whole message.

Source: Patarasuk and Yuan 2009 (J. Parallel Distrib. Comput. 69), §4; the bus bandwidth of nccl-tests.
"""


WIRE: Final = 0.8
"""Of a network card's rate as sold, what one ring over it carries; the shipped InfiniBand links take the same."""


def members(cluster: Cluster, ranks: ArrayLike, stride: ArrayLike) -> tuple[Reals, Reals]:
    """L and G of a group of `ranks` that are `stride` apart in the order of placement.

    Source: the order is Megatron's (Narayanan et al. 2021, §3): tensor within a node first.
    """
    here = np.maximum(1, cluster.gpus_per_node // np.asarray(stride))
    inside = np.minimum(np.asarray(ranks), here)
    return inside.astype(float), np.ceil(np.asarray(ranks) / inside)


def collective_s(
    collective: Collective,
    cluster: Cluster,
    calibration: Calibration,
    message_bytes: ArrayLike,
    ranks: ArrayLike,
    stride: ArrayLike = 1,
    interfaces: ArrayLike = np.inf,
) -> Reals:
    """Seconds of a collective over `ranks` GPUs that are `stride` apart, while all groups like it do the same.

    Within a node, the link's own time; across nodes, the slower of the node's link and of its network interfaces, of
    which every group that crosses (gpus_per_node / L of them) takes its share.

    Args:
        collective: `all_reduce`, `all_gather`, `reduce_scatter`.
        message_bytes: the whole message, as gathered.
        ranks, stride: of the group.
        interfaces: most network interfaces of a node that one group can use.

    Source: §3.1 of nccl-tests' PERFORMANCE.md for bus bandwidth; sharing of interfaces: counted.
    """
    ranks, message = np.asarray(ranks, float), np.asarray(message_bytes, float)
    inside, nodes = members(cluster, ranks, stride)
    volume = VOLUME[collective] * (ranks - 1) / np.maximum(ranks, 1) * message
    link = cluster.intra.time_s(collective, np.maximum(inside, 2), message) / calibration.intra_efficiency
    local = np.where(inside > 1, link, 0.0)
    groups = cluster.gpus_per_node / inside
    node = cluster.inter.bytes_per_s(collective, np.maximum(nodes, 2))
    share = np.minimum(node / groups, np.asarray(interfaces, float) * WIRE * cluster.nic_bytes_per_s)
    alpha = cluster.inter.alpha_s(collective, np.maximum(nodes, 2))
    across = alpha + volume / (share * calibration.inter_efficiency)
    return np.where(ranks <= 1, 0.0, np.where(nodes > 1, np.maximum(across, local), local))


def all_to_all_s(
    cluster: Cluster, calibration: Calibration, message_bytes: ArrayLike, ranks: ArrayLike, stride: ArrayLike = 1
) -> Reals:
    """Seconds of an all-to-all over `ranks` GPUs that are `stride` apart, while all groups like it do the same.

    Each rank keeps 1/n of its message; within a node (L − 1)/n of it goes over the node's links, and the (n − L)/n for
    other nodes over the node's network interfaces, which all its GPUs share. The slower of the two sets the time.

    Args:
        message_bytes: the whole message that one rank hands over.
        ranks, stride: of the group.

    Source: counted; α and bandwidth of the link for an all-to-all, or across nodes for an all-gather, of `cluster`.
    """
    ranks, message = np.asarray(ranks, float), np.asarray(message_bytes, float)
    inside, nodes = members(cluster, ranks, stride)
    near = message * inside / np.maximum(ranks, 1)
    link = cluster.intra.time_s("all_to_all", np.maximum(inside, 2), near) / calibration.intra_efficiency
    local = np.where(inside > 1, link, 0.0)
    far = message * (ranks - inside) / np.maximum(ranks, 1)
    node = cluster.inter.bytes_per_s("all_gather", np.maximum(nodes, 2)) * calibration.inter_efficiency
    alpha = cluster.inter.alpha_s("all_gather", np.maximum(nodes, 2))
    across = alpha + cluster.gpus_per_node * far / node
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
    sent = message / parts
    inside = np.asarray(rank_group) * 2 <= cluster.gpus_per_node
    share = cluster.inter.bytes_per_s("all_gather", 2) / cluster.gpus_per_node * calibration.inter_efficiency
    across = cluster.inter.alpha_s("p2p", 2) + sent / share
    within = cluster.intra.time_s("p2p", 2, sent) / calibration.intra_efficiency
    gathered = np.where(parts > 1, collective_s("all_gather", cluster, calibration, message, np.maximum(parts, 2)), 0.0)
    return np.where(np.asarray(pp) > 1, np.where(inside, within, across) + gathered, 0.0)
