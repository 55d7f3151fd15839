"""Every storage and every collective of a few traced steps, seen at the dispatcher.

Layer 3. Invariant: what is seen is what the framework does (DDP's reducer, DeepSpeed and FSDP2 included): each tensor
storage is followed from allocation to release, each c10d operator with its tensors. Off outside the traced steps, so
that it costs the measured steps nothing.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count


@dataclass
class StorageEvent:
    """A storage that grew (or shrank, where negative) by some bytes."""

    time_s: float
    storage: int
    delta_bytes: int
    step: int
    phase: str


@dataclass
class CollectiveCall:
    """One c10d operator as a rank called it; the bytes are those of the whole message."""

    step: int
    collective: str
    group: str
    group_size: int
    message_bytes: int


@dataclass
class Trace:
    """What was seen, in the order in which it happened."""

    storages: list[StorageEvent] = field(default_factory=list)
    calls: list[CollectiveCall] = field(default_factory=list)
    flops_of_step: dict[int, int] = field(default_factory=dict)


def bytes_of(tensors: Iterable[Any]) -> int:
    """Bytes of the elements of all tensors given."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, Tensor))


# c10d operator → (collective, which argument holds the whole message). An all-gather's message is its output, a
# reduce-scatter's its input: the tensor that no rank holds alone.
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "allgather_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "gather_": ("gather", 0),
    "scatter_": ("scatter", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
    "barrier": ("barrier", 0),
}

# The functional form of the same, which DTensors call: the result is a new tensor. True: that is the whole message.
_FUNCTIONAL = {
    "all_reduce": ("all_reduce", False),
    "all_reduce_": ("all_reduce", False),
    "all_reduce_coalesced": ("all_reduce", False),
    "all_reduce_coalesced_": ("all_reduce", False),
    "all_gather_into_tensor": ("all_gather", True),
    "all_gather_into_tensor_out": ("all_gather", True),
    "all_gather_into_tensor_coalesced": ("all_gather", True),
    "reduce_scatter_tensor": ("reduce_scatter", False),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", False),
    "all_to_all_single": ("all_to_all", False),
    "broadcast": ("broadcast", False),
    "broadcast_": ("broadcast", False),
}

_BETWEEN_STAGES = ("send", "recv")
_OF_ACTIVATIONS = ("pp", "tp", "ep")
"""What crosses from stage to stage, or between the ranks that share a layer or its experts, are activations, no buffers
of the communication."""


def _flash_for_cpu(query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    return sdpa_flop_count(query.shape, key.shape, value.shape)


def _flash_for_cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *args: Any, out_val: Any = None, **kwargs: Any
) -> int:
    return sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape)


def _convolution_backward(gradient: Tensor, inputs: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    wanted = args[-1]  # which of the gradients of input, weight and bias
    return 2 * gradient.numel() * weight[0].numel() * (int(wanted[0]) + int(wanted[1]))


# torch's own formulas, but for the CPU's attention kernel, which has none, and the backward of a convolution, whose
# formula forgets that a grouped convolution (CoAtNet's depthwise one) mixes no channels.
FLOP_FORMULAS: dict[Any, Any] = {
    **flop_registry,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _flash_for_cpu,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _flash_for_cpu_backward,
}


class StorageTrace(TorchDispatchMode):
    """A dispatch mode that follows storages and collectives while it is entered.

    Args:
        group_names: name of each process group by its c10d name; a group that is not listed is called `dp`.
        device_type: follow the storages of such devices only; by default of all.
    """

    def __init__(self, group_names: dict[str, str], device_type: str | None = None) -> None:
        super().__init__()
        self.loading = False
        """While samples are read, which takes memory of the host and not of the training: nothing is followed."""
        self._device_type = device_type
        self.trace = Trace()
        self.step, self.phase = -1, "setup"
        self.live_bytes: dict[int, int] = {}
        self.communicated: set[int] = set()
        """Storages that a collective along the data axis has read or written."""
        self._references: dict[int, Any] = {}
        self._ids = iter(range(1, 2**62))
        self._id_of: dict[int, int] = {}
        self._group_names = group_names
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> StorageTrace:
        trace = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 frees and fills its gathered weights by resizing their storage, which is no operator.
            result = trace._resize(storage, size)
            trace._see_storage(storage)
            return result

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor or kind is AsyncCollectiveTensor for kind in types):
            return NotImplemented  # it calls us again with this rank's shards, or with what has arrived
        result = func(*args, **(kwargs or {}))
        if self.loading:
            return result
        formula = FLOP_FORMULAS.get(func.overloadpacket)
        if formula is not None:
            flops = formula(*args, **(kwargs or {}), out_val=result)
            self.trace.flops_of_step[self.step] = self.trace.flops_of_step.get(self.step, 0) + int(flops)
        elif func.namespace == "c10d":
            self._see_collective(func._schema.name.split("::")[1], args)
        elif func.namespace == "_c10d_functional":
            self._see_functional(func._schema.name.split("::")[1], args, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return result

    def name_groups(self, names: Mapping[str, str]) -> None:
        """Tell the mesh axes of process groups by their own names."""
        self._group_names |= names

    def see(self, tensor: Tensor) -> int | None:
        """Follow a tensor's storage from now on; returns its number in this trace."""
        if tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        if self._device_type not in (None, tensor.device.type):
            return None
        return self._see_storage(tensor.untyped_storage())

    def release(self, *tensors: Tensor) -> None:
        """Follow these no more: the training needs them no longer, though some variable may still hold them."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if (number := self._id_of.get(key)) is not None:
                self._forget(key, number)

    def _see_storage(self, storage: torch.UntypedStorage) -> int:
        key = storage._cdata
        number = self._id_of.get(key)
        if number is None:
            number = next(self._ids)
            self._id_of[key] = number
            self.live_bytes[number] = 0
            self._references[number] = weakref.ref(storage, lambda _: self._forget(key, number))
        delta_bytes = storage.nbytes() - self.live_bytes[number]
        if delta_bytes:
            self._record(number, delta_bytes)
        return number

    def _forget(self, key: int, number: int) -> None:
        self._id_of.pop(key, None)
        self._references.pop(number, None)
        if self.live_bytes.get(number):
            self._record(number, -self.live_bytes[number])
        self.live_bytes.pop(number, None)

    def _record(self, number: int, delta_bytes: int) -> None:
        self.live_bytes[number] += delta_bytes
        self.trace.storages.append(StorageEvent(time.perf_counter(), number, delta_bytes, self.step, self.phase))

    def _see_collective(self, operator: str, args: Any) -> None:
        if operator not in _COLLECTIVES:
            return
        collective, position = _COLLECTIVES[operator]
        leaves = tree_leaves(args)
        numbers = {number for leaf in leaves if isinstance(leaf, Tensor) and (number := self.see(leaf)) is not None}
        group = next((leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)), None)
        process_group = torch.distributed.ProcessGroup.unbox(group) if group is not None else None
        name = process_group.group_name if process_group is not None else ""
        size = process_group.size() if process_group is not None else 1
        message_bytes = 0 if collective == "barrier" else bytes_of(tree_leaves(args[position]))
        axis = self._group_names.get(name, "pp" if collective in _BETWEEN_STAGES else "dp")
        if axis not in _OF_ACTIVATIONS:
            self.communicated |= numbers
        self.trace.calls.append(CollectiveCall(self.step, collective, axis, size, message_bytes))

    def _see_functional(self, operator: str, args: Any, result: Any) -> None:
        if operator not in _FUNCTIONAL:
            return  # a wait
        collective, of_result = _FUNCTIONAL[operator]
        group: Any = args[-1]  # its name, or itself
        if isinstance(group, torch.ScriptObject):
            group = torch.distributed.ProcessGroup.unbox(group)
        process_group = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
        message_bytes = bytes_of(tree_leaves(result if of_result else args[0]))
        axis = self._group_names.get(process_group.group_name, "dp")
        self.trace.calls.append(CollectiveCall(self.step, collective, axis, process_group.size(), message_bytes))
