"""Engines that the probes read, around the objects of a training that the lab did not write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined]  # torch 2.5 has it here
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlojz.config.run_config import RunConfig
from dlojz.results.footprint import Overlap
from dlojz.train.engines.base import Engine, Inventory, locals_of, optimizer_states
from dlojz.train.engines.deepspeed import DeepSpeedEngine
from dlojz.train.engines.replicated import DDPEngine

_WRAPPERS = ("module.", "network.", "_orig_mod.")
_WITHIN_REPLICA = ("tp", "sp", "cp", "ep", "pp")
"""Axes of a device mesh along which the ranks read the same samples."""


def plain_name(name: str) -> str:
    """Remove the wrappers' names from a parameter's name."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


class SeenTorch(Engine):
    """Engine around a model that torch trains, built by a program.

    Args:
        module: the outermost module, which the program calls.
    """

    others: tuple[nn.Module, ...] = ()
    """Outermost modules that are trained beside it."""
    overlap: Overlap | None = None
    """Of the last step's messages, as `MessageTimes` has seen them."""

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model = self.module = module
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that have made a step, in the order of their first step."""

    @property
    def group_names(self) -> dict[str, str]:
        """Axis of each process group that a device mesh with named axes has made."""
        return mesh_groups(self.module)

    @property
    def replicas(self) -> int | None:
        """Number of ranks that read different samples; None where that cannot be seen."""
        module = self.module
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return 1
        if isinstance(module, FullyShardedDataParallel):
            between = getattr(module, "_inter_node_pg", None)
            return dist.get_world_size(module.process_group) * (between.size() if between is not None else 1)
        mesh = next((one.device_mesh for one in module.parameters() if isinstance(one, DTensor)), None)
        if mesh is None:
            return None
        names = mesh.mesh_dim_names or ("dp",) * mesh.ndim
        axes = [mesh.size(number) for number, name in enumerate(names) if name not in _WITHIN_REPLICA]
        if isinstance(module, FSDPModule):
            return math.prod(axes) if axes else None
        return 1 if not axes and mesh.size() == dist.get_world_size() else None

    def communications(self) -> Overlap | None:
        """Return what was seen of the last step's messages; None where it was not all."""
        return self.overlap

    def inventory(self) -> Inventory:
        modules = (self.module, *self.others)
        parameters = [parameter for module in modules for parameter in module.parameters()]
        return locals_of(
            {
                "weights": [*parameters],
                "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
                "optimizer": [state for optimizer in self.optimizers for state in optimizer_states(optimizer)],
                "buffers": [buffer for module in modules for buffer in module.buffers()],
            }
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            whole = parameter.detach()
            # Who: all ranks. What: one parameter, all-gathered whole where it is sharded; at the end of the run only.
            yield plain_name(name), (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()

    def close(self) -> None:
        """Close nothing: the objects are the program's."""


class SeenDDP(SeenTorch):
    """Engine around torch's DDP, which times its messages."""

    def __init__(self, config: RunConfig, module: DistributedDataParallel, device: torch.device) -> None:
        super().__init__(config, module, device)
        module._set_ddp_runtime_logging_sample_rate(1)  # a few clock readings per step: it times every step

    communications = DDPEngine.communications

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return dist.get_world_size(cast(Any, self.module).process_group)


class SeenDeepSpeed(DeepSpeedEngine):
    """Engine around a model that DeepSpeed trains."""

    def __init__(self, config: RunConfig, module: Any, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model, self.module, self.optimizer = module, module.module, module.optimizer
        self.optimizers: list[torch.optim.Optimizer] = []

    overlap: Overlap | None = None
    group_names = SeenTorch.group_names
    communications = SeenTorch.communications

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return cast(int, self.model.dp_world_size)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().weights():
            yield plain_name(name), weight


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` was given, or the module itself."""
    inner = getattr(module, "_orig_mod", module)
    return inner if isinstance(inner, nn.Module) else module


def mesh_groups(module: nn.Module) -> dict[str, str]:
    """Return the axis of each process group that a device mesh with named axes has made, by the group's own name.

    A mesh of one axis over all ranks has made no group: it is the world's, and named where a parameter is laid on it.
    """
    if not dist.is_initialized():
        return {}
    whole = {
        str(mesh.get_group().group_name): mesh.mesh_dim_names[0]
        for mesh in (one.device_mesh for one in module.parameters() if isinstance(one, DTensor))
        if mesh.ndim == 1 and mesh.mesh_dim_names and mesh.mesh_dim_names[0] in _WITHIN_REPLICA
    }
    axes = {str(group.group_name): str(group.group_desc) for group in distributed_c10d._world.pg_map}
    named = {name: axis.removeprefix("mesh_") for name, axis in axes.items() if axis.startswith("mesh_")}
    return whole | {name: axis for name, axis in named.items() if axis and not axis.startswith(("dim_", "default"))}


def seen(config: RunConfig, module: nn.Module, device: torch.device) -> SeenTorch | SeenDeepSpeed:
    """Build the engine that the probes read, from the outermost module that is called."""
    module = uncompiled(module)
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if kind.startswith("colossalai.") and isinstance(module.module, DistributedDataParallel):
        module = module.module  # one more wrapper around torch's
    if isinstance(module, DistributedDataParallel):
        return SeenDDP(config, module, device)
    if kind.startswith("deepspeed."):
        return SeenDeepSpeed(config, module, device)
    if kind == "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel":
        megatron: SeenTorch = import_module("dlojz.libraries.megatron_inspection").SeenMegatron(config, module, device)
        return megatron
    return SeenTorch(config, module, device)
