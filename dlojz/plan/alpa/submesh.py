"""The shapes of submesh that a pipeline stage may have, and how they tile a cluster.

Layer 4. Invariant: a submesh is a power of two of GPUs of one node, or whole nodes; whatever such shapes have together
as many GPUs as the cluster tile it. No torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2 and appendix A, which proves that they always tile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dlojz.schema import LabError
from dlojz.text import say


class Submesh(NamedTuple):
    """Nodes × GPUs of each."""

    nodes: int
    gpus_per_node: int

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    def __str__(self) -> str:
        return f"{self.nodes} × {self.gpus_per_node}"


def submeshes(nodes: int, gpus_per_node: int) -> tuple[Submesh, ...]:
    """(1, 1), (1, 2), (1, 4) … (1, M), (2, M) … (N, M) for N nodes of M GPUs.

    Raises:
        LabError: no node, or a number of GPUs per node that is no power of two.
    """
    if nodes < 1 or gpus_per_node < 1:
        raise LabError(
            say(
                en=f"a cluster has at least one node with one GPU, but {nodes} × {gpus_per_node} was received: use for "
                "example 1 × 4.",
                fr=f"un cluster a au moins un nœud avec un GPU, mais {nodes} × {gpus_per_node} a été reçu : prenez par "
                "exemple 1 × 4.",
            )
        )
    if gpus_per_node & (gpus_per_node - 1):
        raise LabError(
            say(
                en=f"submeshes tile nodes whose number of GPUs is a power of two, but {gpus_per_node} was received: "
                f"use {1 << (gpus_per_node.bit_length() - 1)} of them.",
                fr="les sous-maillages pavent des nœuds dont le nombre de GPU est une puissance de deux, mais "
                f"{gpus_per_node} a été reçu : utilisez-en {1 << (gpus_per_node.bit_length() - 1)}.",
            )
        )
    within = [Submesh(1, 1 << power) for power in range(gpus_per_node.bit_length())]
    return (*within, *(Submesh(count, gpus_per_node) for count in range(2, nodes + 1)))


def tiled(shapes: Sequence[Submesh], gpus_per_node: int) -> tuple[tuple[int, ...], ...]:
    """The GPUs that each submesh gets, numbered node by node: the largest are placed first, so nothing is torn apart.

    Args:
        shapes: submeshes of one cluster, in any order.
        gpus_per_node: M.
    """
    order = sorted(range(len(shapes)), key=lambda index: -shapes[index].num_devices)
    given: list[tuple[int, ...]] = [()] * len(shapes)
    start = 0
    for index in order:  # whole nodes, then halves of nodes, then quarters …: each starts at a multiple of its size
        given[index] = tuple(range(start, start + shapes[index].num_devices))
        start += shapes[index].num_devices
    return tuple(given)
