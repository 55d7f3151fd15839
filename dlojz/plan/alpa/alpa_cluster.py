"""What the two levels need to know of a cluster, and the logical meshes of its submeshes.

Layer 4. Invariant: bandwidths are bus bandwidths, so that a ring's factors apply to them; the axis that tensors are cut
along never leaves a node. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.1, for logical meshes; §8 for the machine of the paper.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from dlojz.hardware import Cluster
from dlojz.plan.alpa.mesh import DeviceMesh
from dlojz.plan.alpa.submesh import Submesh
from dlojz.schema import LabError
from dlojz.text import say

GIB = 2**30
SPARE = 2.5 * GIB
EFFICIENCY = 0.45


class Link(NamedTuple):
    """α and bandwidth of a ring over one kind of link.

    Args:
        alpha_s: latency of a collective.
        bytes_per_s: of the busiest link of the ring, in one direction.
    """

    alpha_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class AlpaCluster:
    """What the two levels need to know of a cluster.

    Args:
        nodes: N.
        gpus_per_node: M, a power of two.
        flops_per_s: that one GPU really reaches on the model's products.
        memory_bytes: of one GPU, without what the context and the libraries take.
        intra: between two GPUs of a node.
        inter: between two nodes, all network cards of a node together.
    """

    nodes: int
    gpus_per_node: int
    flops_per_s: float
    memory_bytes: float
    intra: Link
    inter: Link

    def __post_init__(self) -> None:
        rates = (self.flops_per_s, self.memory_bytes, self.intra.bytes_per_s, self.inter.bytes_per_s)
        if min(rates) <= 0 or min(self.intra.alpha_s, self.inter.alpha_s) < 0:
            raise LabError(
                say(
                    en=f"speed, memory and bandwidths of a cluster are more than 0, but {rates} were received: give "
                    "FLOP/s, bytes and bytes/s.",
                    fr=f"la vitesse, la mémoire et les débits d’un cluster sont plus grands que 0, mais {rates} ont "
                    "été reçus : donnez des FLOP/s, des octets et des octets/s.",
                )
            )

    @classmethod
    def of(
        cls, cluster: Cluster, nodes: int, efficiency: float = EFFICIENCY, spare_bytes: float = SPARE
    ) -> AlpaCluster:
        """So many nodes of a cluster of `dlojz.hardware`.

        Args:
            cluster: its GPU's fastest 16-bit peak, its memory and its links are taken.
            nodes: at least 1, at most as many as it has.
            efficiency: part of the peak that products reach.
            spare_bytes: of a GPU, for its context, libraries and fragmentation.

        Raises:
            LabError: more nodes than the cluster has, or none.
        """
        if not 1 <= nodes <= cluster.num_nodes:
            raise LabError(
                say(
                    en=f"{cluster.title} has 1 to {cluster.num_nodes} nodes, but {nodes} were asked for: use fewer.",
                    fr=f"{cluster.title} a de 1 à {cluster.num_nodes} nœuds, mais {nodes} ont été demandés : restez "
                    "dans ces bornes.",
                )
            )
        peak = max(rate for name, rate in cluster.gpu.peak_flops.items() if name in ("bf16", "fp16"))
        intra, inter, gpus = cluster.intra, cluster.inter, max(cluster.gpus_per_node, 2)
        return cls(
            nodes,
            cluster.gpus_per_node,
            efficiency * peak,
            cluster.gpu.device.memory_bytes - spare_bytes,
            Link(float(intra.alpha_s("all_reduce", gpus)), float(intra.bytes_per_s("all_reduce", gpus))),
            Link(
                float(inter.alpha_s("all_reduce", max(nodes, 2))), float(inter.bytes_per_s("all_reduce", max(nodes, 2)))
            ),
        )

    def logical_meshes(self, submesh: Submesh) -> tuple[DeviceMesh, ...]:
        """The ways to see a submesh as data-parallel × free, the free axis always inside a node.

        Along axis 0, all n₁ rings of a node share its network cards.
        """
        found = []
        for free in (1 << power for power in range(submesh.gpus_per_node.bit_length())):
            across = self.inter if submesh.nodes > 1 else self.intra
            rings = free if submesh.nodes > 1 else 1
            found.append(
                DeviceMesh(
                    (submesh.num_devices // free, free),
                    (across.alpha_s, self.intra.alpha_s),
                    (rings / across.bytes_per_s, 1 / self.intra.bytes_per_s),
                    tie_break=0.0,
                )
            )
        return tuple(found)


PAPER_NODES = AlpaCluster(
    # p3.16xlarge, on which the paper was measured: 8 V100 of 16 GB, NVLink2, 25 Gb/s between nodes (§8). The peak is
    # 125 TFLOP/s; the link in the node is vTrain's all-reduce table for 8 V100; the 2.5 GiB left out are an estimate.
    nodes=1,
    gpus_per_node=8,
    flops_per_s=EFFICIENCY * 125e12,
    memory_bytes=13.5 * GIB,
    intra=Link(76e-6, 136e9),
    inter=Link(100e-6, 25e9 / 8),
)
