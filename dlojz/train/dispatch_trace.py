"""Record storages and collectives at the dispatcher, and sum them up as memory and communication.

Each tensor storage is tracked from allocation to release, each c10d operator with its tensors, whoever calls it (DDP's
reducer, DeepSpeed and FSDP2 included); outside the traced steps nothing is recorded. Every live byte belongs to exactly
one category: what an engine's inventory claims is a state, what forward leaves alive for backward is an activation, all
else is workspace. Bytes of collectives are those of the tensors handed to c10d.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dlojz.prediction.storage_tracker import StorageTracker
from dlojz.prediction.trace import flops_of
from dlojz.results.footprint import CATEGORIES, Category, Memory, Traffic
from dlojz.results.record import MemorySample


@dataclass
class StorageEvent:
    """Growth of a storage by some bytes (or shrinking, where negative)."""

    time_s: float
    storage: int
    delta_bytes: int
    step: int
    phase: str


@dataclass
class CollectiveCall:
    """Call of a c10d operator on a rank; the bytes are those of the whole message."""

    step: int
    collective: str
    group: str
    group_size: int
    message_bytes: int


@dataclass
class RecordedTrace:
    """Record of a trace, in order."""

    storages: list[StorageEvent] = field(default_factory=list)
    calls: list[CollectiveCall] = field(default_factory=list)
    flops_of_step: dict[int, int] = field(default_factory=dict)
    flops_of_type: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)
    """The same by step and type of the numbers."""


def bytes_of(tensors: Iterable[Any]) -> int:
    """Sum the bytes of the elements of all tensors."""
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
_OF_ACTIVATIONS = ("pp", "tp", "ep", "cp")
"""Messages from stage to stage, or between the ranks that share a layer, its experts or a sequence, are activations,
not communication buffers."""


class StorageTrace(StorageTracker):
    """Dispatch mode that records storages and collectives.

    Args:
        group_names: name of each process group by its c10d name; a group that is not listed is called `dp`.
        device_type: record the storages of such devices only; by default of all.
    """

    def __init__(self, group_names: dict[str, str], device_type: str | None = None) -> None:
        super().__init__()
        self.loading = False
        """While samples are read, which takes memory of the host and not of the training, nothing is recorded."""
        self._device_type = device_type
        self.trace = RecordedTrace()
        self.step, self.phase = -1, "setup"
        self.communicated: set[int] = set()
        """Storages that a collective along the data axis has read or written."""
        self._group_names = group_names
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> StorageTrace:
        trace = self

        def resize(storage: torch.UntypedStorage, size: int) -> Any:
            # FSDP2 frees and fills its gathered weights by resizing their storage, which is no operator.
            result = trace._resize(storage, size)
            trace.resized(storage)
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
        flops = flops_of(func, args, kwargs or {}, result)
        if flops is not None:
            self.trace.flops_of_step[self.step] = self.trace.flops_of_step.get(self.step, 0) + flops
            key = (self.step, next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor)))
            self.trace.flops_of_type[key] = self.trace.flops_of_type.get(key, 0) + flops
        elif func.namespace == "c10d":
            self._see_collective(func._schema.name.split("::")[1], args)
        elif func.namespace == "_c10d_functional":
            self._see_functional(func._schema.name.split("::")[1], args, result)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(tensor)
        return result

    def name_groups(self, names: Mapping[str, str]) -> None:
        """Add the mesh axes of process groups, by the groups' own names."""
        self._group_names |= names

    def see(self, tensor: Tensor) -> int | None:
        """Track a tensor's storage; returns its number in this trace."""
        if tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        if self._device_type not in (None, tensor.device.type):
            return None
        return self.follow(tensor.untyped_storage())

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note another size of a storage; one without memory is a fake tensor's."""
        if storage.device.type != "meta":
            self.follow(storage)

    def release(self, *tensors: Tensor) -> None:
        """Stop tracking tensors that the training needs no longer, though some variable may still hold them."""
        for tensor in tensors:
            self.abandon(tensor.untyped_storage())

    def grown(self, number: int, delta_bytes: int) -> None:
        """Record the event, with its time and its phase."""
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


MAX_SAMPLES = 400
Inventory = Mapping[Category, Iterable[Tensor]]


class MemoryProbe:
    """Classifies the storages of a trace, which stays entered while the marks below are set."""

    def __init__(self, trace: StorageTrace) -> None:
        self._trace = trace
        self._category_of: dict[int, Category] = {}
        self._at_forward: set[int] = set()
        self._on_host: set[int] = set()

    # A communication thread may release a storage at any moment: what is alive is looked at in a copy.

    def claim(self, inventory: Inventory) -> None:
        """Classify what an engine holds at this moment; a storage keeps its first category.

        An activation or a temporary may still turn out to be a state: DDP makes its buckets in a forward pass, and with
        `gradient_as_bucket_view` the gradients are views of them.
        """
        for category, tensors in inventory.items():
            for tensor in tensors:
                number = self._trace.see(tensor)
                if number is None:
                    continue
                if category == "workspace":
                    self._at_forward.add(number)
                elif self._category_of.get(number, "activations") in ("activations", "workspace"):
                    self._category_of[number] = category

    def claim_host(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors in host memory apart, also where the host is the device."""
        self._on_host |= {number for tensor in tensors if (number := self._trace.see(tensor)) is not None}

    def before_forward(self, inventory: Inventory) -> None:
        """Mark what is alive before a micro-batch is read: none of it is that micro-batch's activation."""
        self.claim(inventory)
        self._at_forward = set(self._trace.live_bytes.copy())

    def after_forward(self, inventory: Inventory) -> None:
        """Classify as activations what forward has left alive and is neither state nor communication buffer."""
        self.claim(inventory)
        known = self._at_forward | self._trace.communicated
        for number, num_bytes in self._trace.live_bytes.copy().items():
            if num_bytes and number not in known:
                self._category_of.setdefault(number, "activations")

    def after_step(self, inventory: Inventory) -> None:
        """Reclassify activations that have outlived their step: they are buffers of the engine."""
        self.claim(inventory)
        for number, num_bytes in self._trace.live_bytes.copy().items():
            if num_bytes and self._category_of.get(number) == "activations":
                self._category_of[number] = "workspace"

    def category(self, number: int) -> Category:
        """Category of a storage, once the step is over."""
        return self._category_of.get(number, "workspace")

    def measure(self, step: int, device: torch.device) -> tuple[Memory, tuple[MemorySample, ...]]:
        """Measure the largest bytes by category within a step, the peak of their sum, and its timeline."""
        held: dict[Category, int] = defaultdict(int)
        largest: dict[Category, int] = defaultdict(int)
        peak_bytes, peak_moment, at_peak = 0, "", dict(held)
        host_bytes = most_host_bytes = 0
        moments: list[tuple[StorageEvent, dict[Category, int]]] = []
        for event in self._trace.trace.storages:
            if event.storage in self._on_host:
                host_bytes += event.delta_bytes
                if event.step == step:
                    most_host_bytes = max(most_host_bytes, host_bytes)
                continue
            category = self.category(event.storage)
            if event.step == step and not moments:
                largest.update(held)
                most_host_bytes = max(most_host_bytes, host_bytes)
            held[category] += event.delta_bytes
            if event.step != step:
                continue
            largest[category] = max(largest[category], held[category])
            total_bytes = sum(held.values())
            if total_bytes > peak_bytes:
                peak_bytes, peak_moment, at_peak = total_bytes, event.phase, dict(held)
            moments.append((event, dict(held)))
        memory = Memory(
            **{f"{category}_bytes": largest[category] for category in CATEGORIES},
            peak_bytes=peak_bytes,
            peak_moment=peak_moment,
            at_peak_bytes={category: at_peak.get(category, 0) for category in CATEGORIES},
            reserved_bytes=torch.cuda.max_memory_reserved(device) if device.type == "cuda" else None,
            host_bytes=most_host_bytes,
            resident_bytes=resident_bytes(),
        )
        return memory, _samples(moments)


def _samples(moments: list[tuple[StorageEvent, dict[Category, int]]]) -> tuple[MemorySample, ...]:
    """At most `MAX_SAMPLES` moments; of each stretch, the one with the largest total, so that no peak is lost."""
    if not moments:
        return ()
    start_s = moments[0][0].time_s
    stretch = -(-len(moments) // MAX_SAMPLES)
    chosen = [
        max(moments[first : first + stretch], key=lambda moment: sum(moment[1].values()))
        for first in range(0, len(moments), stretch)
    ]
    return tuple(
        MemorySample(
            time_s=event.time_s - start_s, phase=event.phase, bytes_by_category={str(k): v for k, v in held.items()}
        )
        for event, held in chosen
    )


def resident_bytes() -> int | None:
    """Return the largest resident set of this process, in bytes; None where the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


def traffic_of(calls: Iterable[CollectiveCall], step: int, *, dp_every_steps: int = 1) -> tuple[Traffic, ...]:
    """Sum one step's calls by collective and group; a group of one rank communicates nothing.

    `dp_every_steps`: one step in so many sends what this one does along the data axis.
    """
    count: dict[tuple[str, str, int], int] = defaultdict(int)
    message_bytes: dict[tuple[str, str, int], int] = defaultdict(int)
    for call in calls:
        if call.step == step and call.group_size > 1:
            key = (call.collective, call.group, call.group_size)
            count[key] += 1
            message_bytes[key] += call.message_bytes
    return tuple(
        Traffic(
            collective=collective,
            group=group,
            group_size=size,
            count=count[collective, group, size],
            message_bytes=message_bytes[collective, group, size],
            every_steps=dp_every_steps if group == "dp" else 1,
        )
        for collective, group, size in sorted(count)
    )
