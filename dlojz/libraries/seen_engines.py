"""Engines that the probes read, around the objects of a training that the lab did not write; times of its messages."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _len_torch_dispatch_stack
from torch._C._distributed_c10d import Work
from torch.distributed import distributed_c10d
from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined]  # torch 2.5 has it here
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlojz.config.run_config import RunConfig
from dlojz.libraries.scripts.first_step import Replacements, is_deepspeed_pipeline
from dlojz.results.footprint import Category, Overlap
from dlojz.train.dispatch_trace import CollectiveCall, bytes_of
from dlojz.train.engines.base import Engine, Inventory, locals_of, optimizer_states
from dlojz.train.engines.deepspeed import DeepSpeedEngine
from dlojz.train.engines.replicated import DDPEngine

_RELEASED = nn.Module()
_WRAPPERS = ("module.", "network.", "_orig_mod.")
_WITHIN_REPLICA = ("tp", "sp", "cp", "ep", "pp")
"""Axes of a device mesh along which the ranks read the same samples."""

COMPRESSING = (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook)
"""Hooks of torch that send gradients in 16 bit."""


def plain_name(name: str) -> str:
    """Remove the wrappers' names from a parameter's name."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


class SeenTorch(Engine):
    """Engine around a model that torch trains, built by a program."""

    overlap: Overlap | None = None
    """Of the last step's messages, as `MessageTimes` has seen them."""

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self._modules, self._optimizers = [weakref.ref(module)], list[weakref.ref[torch.optim.Optimizer]]()

    # Weakly held, all of it: a script that releases a model or an optimizer has its memory back.

    @property
    def module(self) -> nn.Module:
        """The outermost module; one without parameters once the script has released it."""
        module = self._modules[0]()
        return _RELEASED if module is None else module

    @module.setter
    def module(self, module: nn.Module) -> None:
        """Set the outermost module."""
        self._modules[:1] = [weakref.ref(module)]

    model = module

    @property
    def others(self) -> list[nn.Module]:
        """Outermost modules that are trained beside it."""
        return [module for module in (reference() for reference in self._modules[1:]) if module is not None]

    @others.setter
    def others(self, modules: Iterable[nn.Module]) -> None:
        """Set the modules beside it."""
        self._modules[1:] = [weakref.ref(module) for module in modules]

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Optimizers that have made a step, in the order of their first step."""
        return [optimizer for optimizer in (reference() for reference in self._optimizers) if optimizer is not None]

    @optimizers.setter
    def optimizers(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Set the optimizers."""
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]

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
        if is_deepspeed_pipeline(module):
            return int(cast(Any, module)._grid.get_data_parallel_world_size())
        if isinstance(module, FullyShardedDataParallel):
            # HSDP: the ranks of a shard group, times the groups that hold the same shards.
            between = getattr(module, "_inter_node_pg", None)
            return dist.get_world_size(module.process_group) * (between.size() if between is not None else 1)
        mesh = next(
            (parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor)), None
        )
        if mesh is None:
            return None
        names = mesh.mesh_dim_names or ("dp",) * mesh.ndim
        axes = [mesh.size(number) for number, name in enumerate(names) if name not in _WITHIN_REPLICA]
        # FSDP2 divides the samples along all axes of its mesh but the model-parallel ones.
        if isinstance(module, FSDPModule):
            return math.prod(axes) if axes else None
        # Without FSDP2 all ranks read the same samples, if the mesh has all of them.
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
                "gradients": [
                    parameter.grad for parameter in parameters if parameter.is_leaf and parameter.grad is not None
                ],
                "optimizer": [state for optimizer in self.optimizers for state in optimizer_states(optimizer)],
                "buffers": [buffer for module in modules for buffer in module.buffers()],
            }
        )

    def states_besides(
        self, models: Iterable[nn.Module], optimizers: Iterable[torch.optim.Optimizer]
    ) -> dict[Category, int]:
        """Sum the bytes that all other trained models and their optimizers hold from step to step, by category."""
        within = {id(tensor) for model in models for tensor in (*model.parameters(), *model.buffers())}
        stepping = {id(optimizer) for optimizer in optimizers}
        modules = (self.module, *self.others)
        parameters = {
            id(parameter): parameter
            for module in modules
            for parameter in module.parameters()
            if id(parameter) not in within
        }
        buffers = {id(buffer): buffer for module in modules for buffer in module.buffers() if id(buffer) not in within}
        gradients = [
            parameter.grad for parameter in parameters.values() if parameter.is_leaf and parameter.grad is not None
        ]
        other_optimizers = [optimizer for optimizer in self.optimizers if id(optimizer) not in stepping]
        inventory = locals_of(
            {
                "weights": [*parameters.values()],
                "gradients": gradients,
                "optimizer": [state for optimizer in other_optimizers for state in optimizer_states(optimizer)],
                "buffers": [*buffers.values()],
            }
        )
        return {category: size for category, tensors in inventory.items() if (size := bytes_of(tensors))}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            tensor = parameter.detach()
            # Who: all ranks. What: one parameter, all-gathered whole where it is sharded; at the end of the run only.
            yield plain_name(name), (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()

    def close(self) -> None:
        """Close nothing: the objects are the program's."""


def hook_of(ddp: DistributedDataParallel) -> Callable[..., Any] | None:
    """Find the communication hook that DDP was given; None where it sends the gradients itself."""
    return next((hook for hook, _ in ddp._comm_hooks if hook is not default_hooks.allreduce_hook), None)


class SeenDDP(SeenTorch):
    """Engine around torch's DDP, which times its messages."""

    def __init__(self, config: RunConfig, module: DistributedDataParallel, device: torch.device) -> None:
        super().__init__(config, module, device)
        module._set_ddp_runtime_logging_sample_rate(1)  # a few clock readings per step: it times every step

    def communications(self) -> Overlap | None:
        """Return the overlap that DDP has timed, and what was sent beside it.

        None on one rank, which sends nothing, or once the module is released.
        """
        is_alone = self.module is _RELEASED or self.replicas == 1
        reducer = None if is_alone else DDPEngine.communications(cast(Any, self))
        if reducer is None or self.overlap is None:
            return reducer
        return Overlap(reducer.intervals + self.overlap.intervals, reducer.waits + self.overlap.waits)

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        module = self.module
        return 1 if module is _RELEASED else dist.get_world_size(cast(Any, module).process_group)

    @property
    def computes_elsewhere(self) -> bool:
        """Whether a custom hook sends the gradients: its callbacks may run, and take memory, in other threads.

        They run in the caller's thread where the message has arrived before they are added. The hooks of torch that
        send in 16 bit allocate nothing in theirs.
        """
        module: Any = self.module
        return module is not _RELEASED and hook_of(module) not in (None, *COMPRESSING)


class SeenDeepSpeed(DeepSpeedEngine):
    """Engine around a model that DeepSpeed trains."""

    def __init__(self, config: RunConfig, module: Any, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model, self.module, self.optimizer = module, module.module, module.optimizer
        self.optimizers: list[torch.optim.Optimizer] = []

    overlap: Overlap | None = None
    group_names = SeenTorch.group_names
    communications = SeenTorch.communications

    def states_besides(self, *_: Any) -> dict[Category, int]:
        """Return nothing: the engine's model is the only one that is seen."""
        return {}

    @property
    def replicas(self) -> int:
        """Number of ranks that read different samples."""
        return cast(int, self.model.dp_world_size)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().weights():
            yield plain_name(name), weight


def is_deepspeed_engine(module: nn.Module) -> bool:
    """Whether a module is DeepSpeed's engine around a model, and no model of the library's own (`PipelineModule`)."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(module).__mro__)


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
    world_axes = {
        str(mesh.get_group().group_name): mesh.mesh_dim_names[0]
        for mesh in (parameter.device_mesh for parameter in module.parameters() if isinstance(parameter, DTensor))
        if mesh.ndim == 1 and mesh.mesh_dim_names and mesh.mesh_dim_names[0] in _WITHIN_REPLICA
    }
    axes = {str(group.group_name): str(group.group_desc) for group in distributed_c10d._world.pg_map}
    mesh_axes = {name: axis.removeprefix("mesh_") for name, axis in axes.items() if axis.startswith("mesh_")}
    return world_axes | {
        name: axis for name, axis in mesh_axes.items() if axis and not axis.startswith(("dim_", "default"))
    }


def seen(config: RunConfig, module: nn.Module, device: torch.device) -> SeenTorch | SeenDeepSpeed:
    """Build the engine that the probes read, from the outermost module that is called."""
    module = uncompiled(module)
    kind = f"{type(module).__module__}.{type(module).__name__}"
    if kind.startswith("colossalai.") and isinstance(module.module, DistributedDataParallel):
        module = module.module  # one more wrapper around torch's
    if isinstance(module, DistributedDataParallel):
        return SeenDDP(config, module, device)
    if is_deepspeed_engine(module):
        return SeenDeepSpeed(config, module, device)
    if kind == "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel":
        megatron: SeenTorch = import_module("dlojz.libraries.megatron_adapter").SeenMegatron(config, module, device)
        return megatron
    return SeenTorch(config, module, device)


_SENDING = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "barrier", "send", "recv"),
    *("allgather", "_allgather_base", "all_gather_single", "allgather_coalesced"),
    *("allgather_into_tensor_coalesced", "all_gather_single_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "all_to_all_single"),
)
"""Methods of a process group that send or receive, by their names in all versions of torch that the lab takes."""


@dataclass
class _Message:
    left_s: float
    arrived_s: float | None = None


class MessageTimes:
    """Clock of the messages that a program's own calls send in the present step, from departure to arrival; on the CPU.

    A call of `torch.distributed` hands a message to its process group and gets a handle. While a rank waits on a
    handle, its communication is exposed; what travels while it computes is hidden. Messages that torch sends without
    Python (DDP's reducer, which has its own clock; DTensors' functional collectives) are not seen: `compare` takes the
    number that the probes have counted in a traced step, and unless it is the number of those that were timed, nothing
    is reported. Seconds are of `time.perf_counter`.

    Source: torch 2.13, `distributed/distributed_c10d.py`: `work.wait()` at the end of each call unless `async_op`.
    """

    def __init__(self, unseen: Callable[[str, Any, Any], object] | None = None) -> None:
        self._unseen = unseen
        """Called with what a thread sends that no dispatch mode watches: method, process group, arguments."""
        self._sees_all = False
        self._messages: list[_Message] = []
        self._waits: list[tuple[float, float]] = []
        self._of_handle: weakref.WeakKeyDictionary[Any, _Message] = weakref.WeakKeyDictionary()

    def install(self, undo: Replacements) -> None:
        """Time all messages from now on, until the context ends."""
        # Where `torch.compile` meets a wrapper, it breaks its graph, and the wrapper is called.
        plain = torch.compiler.disable
        for name in _SENDING:
            if hasattr(dist.ProcessGroup, name):
                undo.put(dist.ProcessGroup, name, plain(self._sending(getattr(dist.ProcessGroup, name))))
        undo.put(Work, "wait", plain(self._waiting(Work.wait)))

    def _sending(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def sent(*args: Any, **kwargs: Any) -> Any:
            if args[0].size() == 1:  # nobody to send to
                return method(*args, **kwargs)
            if self._unseen is not None and not _len_torch_dispatch_stack():
                self._unseen(method.__name__, args[0], args[1:])
            message = _Message(time.perf_counter())
            handle = method(*args, **kwargs)
            if handle is None:  # a message that a group of the program's own puts off: counted, but not timed
                return None
            self._messages.append(message)
            self._of_handle[handle] = message
            if getattr(args[-1], "asyncOp", True):  # else the caller waits at once
                # A message between two ranks has no future: it has arrived when the wait for it is over.
                with contextlib.suppress(RuntimeError):
                    handle.get_future().add_done_callback(functools.partial(_arrive, message))
            return handle

        return sent

    def _waiting(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def waited(handle: Any, *args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return method(handle, *args, **kwargs)
            finally:
                self._waits.append((start_s, time.perf_counter()))
                if (message := self._of_handle.get(handle)) is not None:
                    _arrive(message)

        return waited

    def compare(self, calls: Iterable[CollectiveCall], step: int) -> None:
        """Note whether as many messages were timed in the present step as the probes have counted in it, and any.

        Functional collectives have no times: of a wrapper's the seconds are not known then, without those of a clipping
        or of a script they are what is sent besides.
        """
        counted = sum(
            call.step == step and call.group_size > 1 and not (call.functional and call.origin != "wrapper")
            for call in calls
        )
        self._sees_all = 0 < counted == len(self._messages)

    def overlap(self, *, beside_reducer: bool = False) -> Overlap | None:
        """Return the overlap of the step's messages with its computing; None where not all are seen.

        Args:
            beside_reducer: whether DDP's reducer, which has its own clock, sends the others.
        """
        now_s = time.perf_counter()
        # One that is still under way, or whose arrival nobody saw, is counted until now.
        intervals = tuple((message.left_s, message.arrived_s or now_s) for message in self._messages)
        return Overlap(intervals, tuple(self._waits)) if self._sees_all or beside_reducer else None

    def clear(self) -> None:
        """Begin another step."""
        self._messages, self._waits = [], []


def _arrive(message: _Message, *_: Any) -> None:
    """Note that a message has arrived, by whoever sees it first."""
    if message.arrived_s is None:
        message.arrived_s = time.perf_counter()
