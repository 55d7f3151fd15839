"""Process groups for each axis of the layout, on a mesh of ranks.

The tensor axis is innermost, then the context axis, the data axis, and the pipeline axis outermost:
rank = ((pp_rank × dp + dp_rank) × cp + cp_rank) × tp + tp_rank, so that ranks that communicate most are neighbours.
Expert parallelism splits the data axis in two: dp_rank = edp_rank × ep + ep_rank. Gradients are averaged along the data
and the context axis together.

Source: Narayanan et al. 2021 (arXiv 2104.04473), §4.1 and §5.2, for the order of the axes; Rajbhandari et al. 2022,
"DeepSpeed-MoE" (arXiv 2201.05596), for expert-parallel groups within the data-parallel ranks; Llama Team 2024 (arXiv
2407.21783), §3.3.2, for the place of the context axis, and for the gradients' group.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dlojz.config.layout import Layout

AXES = ("pp", "dp", "tp")


class Axes:
    """Place of a rank on the mesh; one process, or data parallelism alone, needs no mesh.

    Attributes:
        mesh: the `DeviceMesh` with axes pp, dp and tp; None where the data axis is the only one.
        ep_rank: block of experts that this rank holds.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        rank = dist.get_rank() if dist.is_initialized() else 0
        outer_rank, self.tp_rank = divmod(rank, layout.tp)
        outer_rank, self.cp_rank = divmod(outer_rank, layout.cp)
        self.pp_rank, self.dp_rank = divmod(outer_rank, layout.dp)
        self.mesh: DeviceMesh | None = None
        if layout.pp > 1 or layout.tp > 1:
            degrees = (layout.pp, layout.dp, layout.tp)
            self.mesh = init_device_mesh(device.type, degrees, mesh_dim_names=AXES)
        # Neighbours on the data axis shard the experts; every ep-th rank holds the same ones.
        self.ep_rank = self.dp_rank % layout.ep
        self._own_groups: dict[str, dist.ProcessGroup] = {}
        if layout.cp > 1:  # with neither a tensor nor a pipeline axis
            rings = torch.arange(layout.replicas).view(-1, layout.cp)  # a row per replica
            self._own_groups["cp"] = dist.new_subgroups_by_enumeration(rings.tolist())[0]
        if layout.ep > 1:
            ranks = torch.arange(layout.dp).view(-1, layout.ep)  # a row per copy of the experts
            for axis, members in (("ep", ranks), ("edp", ranks.T)):
                self._own_groups[axis] = dist.new_subgroups_by_enumeration(members.tolist())[0]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """Return the ranks that differ from this one along `axis` (pp, dp or tp) alone; None stands for all ranks.

        With context parallelism also `cp`, neighbours that share the sequences; `dp` is then all that average
        gradients.
        With expert parallelism also `ep`, neighbours that shard the experts, and `edp`, ranks that hold the same ones.
        """
        if axis in self._own_groups:
            return self._own_groups[axis]
        return None if self.mesh is None else self.mesh.get_group(axis)

    def world_rank(self, pp_rank: int, dp_rank: int = 0, tp_rank: int = 0) -> int:
        """Return the rank at a place."""
        return (pp_rank * self.layout.dp + dp_rank) * self.layout.tp + tp_rank

    @property
    def group_names(self) -> dict[str, str]:
        """Mesh axis of each process group of this rank, by the group's own name."""
        axis_of_group = {str(group.group_name): axis for axis, group in self._own_groups.items()}
        if self.mesh is None:
            return axis_of_group
        return axis_of_group | {str(self.mesh.get_group(axis).group_name): axis for axis in AXES}
