"""The mesh of ranks behind an engine: a process group for each axis of the layout.

The tensor axis is innermost, then the data axis, and the pipeline axis outermost, so that rank = (pp_rank × dp +
dp_rank) × tp + tp_rank: ranks that communicate most are neighbours, on one node where it can be. Expert parallelism has
no ranks of its own, it cuts the data axis in two: dp_rank = edp_rank × ep + ep_rank.

Source: Narayanan et al. 2021 (arXiv 2104.04473), §4.1 and §5.2, for what is placed where and why; Rajbhandari et al.
2022, "DeepSpeed-MoE" (arXiv 2201.05596), for expert-parallel groups within the data-parallel ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dlojz.config.layout import Layout

AXES = ("pp", "dp", "tp")


class Axes:
    """A rank's place on the mesh; one process, or data parallelism alone, needs no mesh.

    Args:
        layout: its degrees.
        device: where the ranks train.

    Attributes:
        mesh: the `DeviceMesh` with axes pp, dp and tp; None where the data axis is all there is.
        ep_rank: which block of the experts this rank holds.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.pp_rank, rest = divmod(rank, layout.dp * layout.tp)
        self.dp_rank, self.tp_rank = divmod(rest, layout.tp)
        self.mesh: DeviceMesh | None = None
        if layout.pp > 1 or layout.tp > 1:
            degrees = (layout.pp, layout.dp, layout.tp)
            self.mesh = init_device_mesh(device.type, degrees, mesh_dim_names=AXES)
        self.ep_rank = self.dp_rank % layout.ep
        self._expert_groups: dict[str, dist.ProcessGroup] = {}
        if layout.ep > 1:
            ranks = torch.arange(layout.dp).view(-1, layout.ep)  # a row per copy of the experts
            for axis, members in (("ep", ranks), ("edp", ranks.T)):
                self._expert_groups[axis] = dist.new_subgroups_by_enumeration(members.tolist())[0]

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one along `axis` (pp, dp or tp) alone; None stands for all ranks.

        With expert parallelism there are two more: `ep`, neighbours that share the experts out, and `edp`, ranks that
        hold the same experts.
        """
        if axis in self._expert_groups:
            return self._expert_groups[axis]
        return None if self.mesh is None else self.mesh.get_group(axis)

    def world_rank(self, pp_rank: int, dp_rank: int = 0, tp_rank: int = 0) -> int:
        """The rank at this place."""
        return (pp_rank * self.layout.dp + dp_rank) * self.layout.tp + tp_rank

    @property
    def group_names(self) -> dict[str, str]:
        """Axis of each process group of this rank, by the group's own name: for the probe of communication."""
        named = {str(group.group_name): axis for axis, group in self._expert_groups.items()}
        if self.mesh is None:
            return named
        return named | {str(self.mesh.get_group(axis).group_name): axis for axis in AXES}
