"""Record storages and collectives at the dispatcher, and sum them up as memory and communication.

Each tensor storage is tracked from allocation to release, each c10d operator with its tensors, whoever calls it (DDP's
reducer, DeepSpeed and FSDP2 included); outside the traced steps nothing is recorded. Every live byte belongs to exactly
one category: what an engine's inventory claims is a state, what forward leaves alive for backward is an activation, all
else is workspace. Bytes of collectives are those of the tensors handed to c10d.

Of a script each call has an origin, which the Python frames between the dispatcher and the script tell: what wraps the
model (DDP's reducer calls c10d from C++, within backward), what clips gradients, or the script and its libraries.
"""

from __future__ import annotations

import mmap
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack, _pop_torch_dispatch_stack, _push_on_torch_dispatch_stack
from torch._C._distributed_c10d import GradBucket, _resolve_process_group
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from dlojz.prediction.trace import StorageTracker, flops_of
from dlojz.results.footprint import CATEGORIES, ORIGINS, Category, Memory, Origin, Traffic
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
    origin: Origin = "wrapper"
    functional: bool = False
    """Whether it is a functional collective, which is called without a process group's own methods."""


@dataclass
class RecordedTrace:
    """Record of a trace, in order."""

    storages: list[StorageEvent] = field(default_factory=list)
    calls: list[CollectiveCall] = field(default_factory=list)
    flops_of_step: dict[int, int] = field(default_factory=dict)
    flops_of_type: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)
    """The same by step and type of the numbers."""
    recomputed_of_type: dict[tuple[int, torch.dtype], int] = field(default_factory=dict)
    """Of these, operations of a forward pass that a backward pass computes again."""

    def count_flops(self, step: int, kind: torch.dtype, flops: int) -> None:
        """Add operations to a step."""
        self.flops_of_step[step] = self.flops_of_step.get(step, 0) + flops
        self.flops_of_type[step, kind] = self.flops_of_type.get((step, kind), 0) + flops

    def split(self, step: int, num_storages: int, num_calls: int, flops: Mapping[torch.dtype, int]) -> None:
        """Give what a step has recorded beyond so many entries to the next step."""
        for event in self.storages[num_storages:]:
            event.step += event.step == step
        for call in self.calls[num_calls:]:
            call.step += call.step == step
        for (of_step, kind), count in list(self.flops_of_type.items()):
            # `flops` are those up to the mark; what came after is the next step's.
            if of_step == step and (later := count - flops.get(kind, 0)):
                self.count_flops(step, kind, -later)
                self.count_flops(step + 1, kind, later)


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

_PASSED_ON = (
    *("torch.distributed.distributed_c10d", "torch.distributed.c10d_logger"),
    *("torch.distributed._functional_collectives", "deepspeed.comm", "torch._dynamo.eval_frame", "torch._compile"),
    *("dlojz.train", "dlojz.libraries", "dlojz.prediction"),
)
"""Modules through which a call of a collective passes on its way from whoever makes it to the dispatcher."""
_WRAPPING = (
    *("torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed.pipelining"),
    *("torch.distributed.optim", "torch.distributed.algorithms", "torch.distributed.tensor.parallel", "deepspeed"),
)
"""Modules that wrap a model, or drive its training."""
_OF_SCRIPTS = ("torch.distributed.nn", "torch.distributed.checkpoint", "torch.distributed.fsdp._state_dict_utils")
"""Modules of torch whose collectives a script asks for itself: its own communication, and its checkpoints."""
_NEUTRAL = (sys.stdlib_module_names - {"__main__"}) | {"typing_extensions"}
"""Packages whose frames tell nothing: of context managers, of decorators for what is deprecated."""
_CLIPS = re.compile(r"clip\w*_(grad|norm)|(grad|norm)\w*_clip", re.IGNORECASE)
"""Names of functions that clip gradients, torch's and others'."""
_WITHIN_TRAINING = ("torch.nn.modules.module", "torch.optim", "torch.autograd.graph")
"""Modules within which DTensors communicate as their plan says: a call of the model, an update, backward."""


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def origin_of_call(frame: FrameType | None, *, functional: bool, phase: str) -> Origin | None:
    """Find out who calls a collective, from the innermost frame outwards; None for what DDP sends once, not per step.

    Args:
        functional: whether it is a functional collective, which DDP's reducer never calls.

    Source: torch 2.13, `nn/parallel/distributed.py` (`_pre_forward` rebuilds the buckets, once, and tells all ranks
    their order), `csrc/distributed/c10d/reducer.cpp` (called by autograd's engine, without a frame).
    """
    by_python = of_dtensor = has_frames = False
    origin: Origin | None = None
    while frame is not None:
        module, name = str(frame.f_globals.get("__name__", "")), frame.f_code.co_name
        if _is_in(module, _PASSED_ON):
            # A collective called from Python passes here; DDP's reducer calls from C++.
            by_python |= module.startswith(("torch.distributed.", "deepspeed."))
        else:
            if _CLIPS.search(f"{module}.{name}") and not module.startswith("deepspeed."):
                return "clipping"
            decided = _is_in(module, _WRAPPING) and origin is None
            if module.startswith("torch.distributed.tensor") and not decided:
                of_dtensor = True
            elif of_dtensor:
                decided = _is_in(module, (*_WITHIN_TRAINING, *_WRAPPING))
            elif not module.startswith(("torch.", "deepspeed.")):
                # A communication hook of the script's sends DDP's gradients.
                decided = any(type(value) is GradBucket for value in frame.f_locals.values())
                origin = origin or (None if module.partition(".")[0] in _NEUTRAL else "script")
            elif origin is None and _is_in(module, _OF_SCRIPTS):
                origin, decided = "script", False
            elif origin is None and not has_frames and module == "torch.autograd.graph" and not functional:
                decided = True
            if decided:
                once = module == "torch.nn.parallel.distributed" and name in ("_pre_forward", "forward")
                return None if once and not by_python and not of_dtensor else "wrapper"
            has_frames = True
        frame = frame.f_back
    # On a GPU autograd calls DDP's reducer in a thread of its own, without a frame.
    trains = phase == "backward" or (phase == "forward" and torch.is_grad_enabled())
    unframed = not (has_frames or by_python or functional)
    return "wrapper" if unframed or (of_dtensor and trains) else "script"


_BETWEEN_STAGES = ("send", "recv")
_OF_ACTIVATIONS = ("pp", "tp", "ep", "cp")
"""Messages from stage to stage, or between the ranks that share a layer, its experts or a sequence, are activations,
not communication buffers."""


_WITH_SCRATCH = {
    *(torch.ops.aten.convolution, torch.ops.aten.convolution_backward),
    *(torch.ops.aten.mkldnn_rnn_layer, torch.ops.aten.mkldnn_rnn_layer_backward),
}
"""Operators that oneDNN computes on a CPU in layouts of its own: copies of inputs and outputs last as long as they."""


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
        self.flops_target: Counter[torch.dtype] | None = None
        """Where operations are counted; by default in the present step."""
        self.takes_scratch = False
        """Whether an operator has run whose kernel on a CPU takes memory that no tensor shows."""
        self.elsewhere: set[int] = set()
        """Steps in which another thread has sent something, or may compute: what it takes is not seen."""
        self.keeps_faults = False
        """Whether a fault of the recording ends the recording alone, and not the training that it looks at."""
        self.fault: Exception | None = None
        self.tells_origins = False
        """Whether calls of what wraps a model are told from those of a script; otherwise all are a wrapper's."""
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

    def leave(self) -> None:
        """Stop recording in this thread; modes that others have entered since stay where they are."""
        above = []
        while _len_torch_dispatch_stack() and (mode := _pop_torch_dispatch_stack(None)) is not self:
            above.append(mode)
        _push_on_torch_dispatch_stack(self)  # which its end takes off again
        self.__exit__(None, None, None)
        # In their old order, without this one.
        for mode in reversed(above):
            _push_on_torch_dispatch_stack(mode)

    def count_flops(self, flops: Mapping[torch.dtype, int]) -> None:
        """Add operations to the present step."""
        for kind, count in flops.items():
            self.trace.count_flops(self.step, kind, count)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind is DTensor or kind is AsyncCollectiveTensor for kind in types):
            return NotImplemented  # it calls us again with this rank's shards, or with what has arrived
        if self.loading or self.fault is not None:
            return func(*args, **(kwargs or {}))
        in_place = False
        try:
            in_place = self.sums_in_place(func, args)
        except Exception as error:
            self._keep_fault(error)
        result = func(*args, **(kwargs or {}))
        try:
            if in_place:
                self.take_over(args[0].untyped_storage(), result.untyped_storage())
            self._record_operator(func, args, kwargs or {}, result)
        except Exception as error:
            self._keep_fault(error)
        return result

    def _keep_fault(self, error: Exception) -> None:
        """End the recording by its own fault, and not the training, where it looks at somebody's script."""
        if not self.keeps_faults:
            raise error
        self.fault = error

    def _record_operator(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record what an operator has computed, sent and allocated."""
        flops = flops_of(func, args, kwargs, result)
        if flops is not None:
            self.takes_scratch = self.takes_scratch or func.overloadpacket in _WITH_SCRATCH
            kind = next(leaf.dtype for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
            # Within a backward pass autograd records nothing but what checkpointing computes again.
            if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
                recomputed = self.trace.recomputed_of_type
                recomputed[self.step, kind] = recomputed.get((self.step, kind), 0) + flops
            if self.flops_target is None:
                self.trace.count_flops(self.step, kind, flops)
            else:
                self.flops_target[kind] += flops
        elif func.namespace == "c10d":
            self._see_collective(func._schema.name.split("::")[1], args)
        elif func.namespace == "_c10d_functional":
            self._see_functional(func._schema.name.split("::")[1], args, result)
        # Most operators return one tensor: `tree_leaves` would take a fifth of the time of a traced step.
        for tensor in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if isinstance(tensor, Tensor):
                self.see(tensor)

    def name_groups(self, names: Mapping[str, str]) -> None:
        """Add the mesh axes of process groups, by the groups' own names."""
        self._group_names |= names

    def see(self, tensor: Tensor) -> int | None:
        """Track a tensor's storage; returns its number in this trace."""
        # A subclass, such as a DTensor, wraps the tensor that has the memory.
        if tensor.device.type == "meta" or type(tensor) not in (Tensor, torch.nn.Parameter):
            return None
        if self._device_type not in (None, tensor.device.type):
            return None
        return self.follow(tensor.untyped_storage())

    def number(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor's storage that is tracked; None of any other."""
        try:
            return self._number_of.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a tensor without a storage
            return None

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
        # The process group comes before the kind of reduction, which is a script object too.
        group = next((leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject)), None)
        process_group = torch.distributed.ProcessGroup.unbox(group) if group is not None else None
        origin = self._origin()
        message_bytes = 0 if collective == "barrier" else bytes_of(tree_leaves(args[position]))
        axis = self._record(collective, process_group, message_bytes, origin)
        if axis and axis not in _OF_ACTIVATIONS:
            self.communicated |= numbers

    def see_elsewhere(self, method: str, group: Any, args: Any) -> None:
        """Record a collective that another thread calls, which no dispatch mode sees: a callback of a hook of DDP's."""
        if method in _COLLECTIVES or f"{method}_" in _COLLECTIVES:
            collective, position = _COLLECTIVES.get(f"{method}_") or _COLLECTIVES[method]
            message_bytes = 0 if collective == "barrier" else bytes_of(tree_leaves(args[position]))
            self._record(collective, group, message_bytes, self._origin())
            self.elsewhere.add(self.step)

    def _record(self, collective: str, group: Any, message_bytes: int, origin: Origin | None) -> str:
        """Record a call, and return the axis of its group."""
        name, size = ("", 1) if group is None else (group.group_name, group.size())
        # A group without a name: messages from rank to rank are a pipeline's, others the data axis'.
        unnamed = "pp" if collective in _BETWEEN_STAGES else "dp"
        axis = self._group_names.get(name, unnamed if origin in (None, "wrapper") else "")
        if origin is not None:
            self.trace.calls.append(CollectiveCall(self.step, collective, axis, size, message_bytes, origin))
        return axis

    def _origin(self, *, functional: bool = False) -> Origin | None:
        """Find out who makes the present call."""
        if not self.tells_origins:
            return "wrapper"
        return origin_of_call(sys._getframe(2), functional=functional, phase=self.phase)

    def _see_functional(self, operator: str, args: Any, result: Any) -> None:
        if operator not in _FUNCTIONAL:
            return  # a wait
        collective, of_result = _FUNCTIONAL[operator]
        group: Any = args[-1]  # its name, or itself
        if isinstance(group, torch.ScriptObject):
            group = torch.distributed.ProcessGroup.unbox(group)
        process_group = _resolve_process_group(group) if isinstance(group, str) else group  # type: ignore[arg-type]
        message_bytes = bytes_of(tree_leaves(result if of_result else args[0]))
        axis = self._group_names.get(process_group.group_name, "" if self.tells_origins else "dp")
        origin = self._origin(functional=True)
        if origin is not None:
            call = CollectiveCall(self.step, collective, axis, process_group.size(), message_bytes, origin, True)
            self.trace.calls.append(call)


MAX_SAMPLES = 400
_PAGE_BYTES = mmap.PAGESIZE
Inventory = Mapping[Category, Iterable[Tensor]]


class MemoryProbe:
    """Classifies the storages of a trace, which stays entered while the marks below are set."""

    def __init__(self, trace: StorageTrace) -> None:
        self._trace = trace
        self._category_of: dict[int, Category] = {}
        self._at_forward: set[int] = set()
        self._on_host: set[int] = set()
        self.keeps_variables = False
        """Whether what outlives its step is held by variables of a script, unless it was communicated."""
        self._moved: dict[int, int] = {}
        """Storages that became a variable's, and nothing else's, with the number of events until then."""

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
                elif self._category_of.get(number, "activations") in ("activations", "workspace", "script"):
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
        # What was there before forward is no activation, nor is a buffer of messages.
        excluded = self._at_forward | self._trace.communicated
        for number, num_bytes in self._trace.live_bytes.copy().items():
            if num_bytes and number not in excluded:
                self._category_of.setdefault(number, "activations")

    def after_step(self, inventory: Inventory) -> None:
        """Reclassify activations that have outlived their step.

        They are buffers of the engine; of a script they were activations, and are held by its variables from now on.
        """
        self.claim(inventory)
        for number, num_bytes in self._trace.live_bytes.copy().items():
            if num_bytes and self._category_of.get(number) == "activations":
                if self.keeps_variables and number not in self._trace.communicated:
                    self._moved.setdefault(number, len(self._trace.trace.storages))
                else:
                    self._category_of[number] = "workspace"

    def claim_variables(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Claim what variables hold and nothing else does; returns the bytes by name, the largest first."""
        bytes_by_name: Counter[str] = Counter()
        counted: set[int] = set()
        for name, tensor in named_tensors:
            number = self._trace.number(tensor)
            if number is None or number in counted:
                continue
            counted.add(number)
            if self._category_of.setdefault(number, "script") in ("script", "activations"):
                bytes_by_name[name] += self._trace.live_bytes.get(number, 0)
        return {name: num_bytes for name, num_bytes in bytes_by_name.most_common() if num_bytes}

    def category(self, number: int) -> Category:
        """Category of a storage, once the step is over."""
        return self._category_of.get(number, "workspace")

    def measure(self, step: int, device: torch.device) -> tuple[Memory, tuple[MemorySample, ...]]:
        """Measure the largest bytes by category within a step, the peak of their sum, and its timeline."""
        category_bytes: dict[Category, int] = defaultdict(int)
        largest: dict[Category, int] = defaultdict(int)
        peak_bytes, peak_moment, at_peak = 0, "", dict(category_bytes)
        host_bytes = most_host_bytes = 0
        moments: list[tuple[StorageEvent, dict[Category, int]]] = []
        bytes_of_storage: Counter[int] = Counter()
        moves = sorted(self._moved.items(), key=lambda move: -move[1])
        variables: set[int] = set()
        # All events from the beginning: those of earlier steps make what is held when this step begins.
        for position, event in enumerate(self._trace.trace.storages):
            while moves and moves[-1][1] <= position:
                # From here on a variable alone holds it.
                number, _ = moves.pop()
                variables.add(number)
                category_bytes[self.category(number)] -= bytes_of_storage[number]
                category_bytes["script"] += bytes_of_storage[number]
            bytes_of_storage[event.storage] += event.delta_bytes
            if event.storage in self._on_host:
                host_bytes += event.delta_bytes
                if event.step == step:
                    most_host_bytes = max(most_host_bytes, host_bytes)
                continue
            category = "script" if event.storage in variables else self.category(event.storage)
            if event.step == step and not moments:
                # At its first event: what earlier steps have left counts as well.
                largest.update(category_bytes)
                most_host_bytes = max(most_host_bytes, host_bytes)
            category_bytes[category] += event.delta_bytes
            if event.step != step:
                continue
            largest[category] = max(largest[category], category_bytes[category])
            total_bytes = sum(category_bytes.values())
            if total_bytes > peak_bytes:
                peak_bytes, peak_moment, at_peak = total_bytes, event.phase, dict(category_bytes)
            moments.append((event, dict(category_bytes)))
        sizes: dict[str, int | None] = {f"{category}_bytes": largest[category] for category in CATEGORIES}
        is_whole = step not in self._trace.elsewhere
        if not is_whole:
            sizes["workspace_bytes"] = None  # another thread's temporaries were not seen
        memory = Memory(
            **sizes,
            peak_bytes=peak_bytes if is_whole else None,
            peak_moment=peak_moment if is_whole else None,
            at_peak_bytes={category: at_peak.get(category, 0) for category in CATEGORIES} if is_whole else None,
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
        max(moments[start : start + stretch], key=lambda moment: sum(moment[1].values()))
        for start in range(0, len(moments), stretch)
    ]
    return tuple(
        MemorySample(
            time_s=event.time_s - start_s,
            phase=event.phase,
            bytes_by_category={str(k): v for k, v in category_bytes.items()},
        )
        for event, category_bytes in chosen
    )


def present_bytes(device: torch.device) -> int | None:
    """Return the bytes that are held at this moment: resident on the host, or allocated on a GPU; None if not known."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_BYTES  # the second field: resident pages
    except (OSError, ValueError, IndexError):
        return None


def resident_bytes() -> int | None:
    """Return the largest resident set of this process, in bytes; None where the system does not say."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024  # macOS gives bytes, Linux KiB


def traffic_of(calls: Iterable[CollectiveCall], step: int, *, dp_every_steps: int = 1) -> tuple[Traffic, ...]:
    """Sum one step's calls by origin, collective and group; a group of one rank communicates nothing.

    `dp_every_steps`: one step in so many sends what this one does along the data axis.
    """
    count: dict[tuple[Origin, str, str, int], int] = defaultdict(int)
    message_bytes: dict[tuple[Origin, str, str, int], int] = defaultdict(int)
    for call in calls:
        if call.step == step and call.group_size > 1:
            key = (call.origin, call.collective, call.group, call.group_size)
            count[key] += 1
            message_bytes[key] += call.message_bytes
    return tuple(
        Traffic(
            collective=collective,
            group=group,
            group_size=size,
            count=count[origin, collective, group, size],
            message_bytes=message_bytes[origin, collective, group, size],
            every_steps=dp_every_steps if group == "dp" else 1,
            origin=origin,
        )
        for origin, collective, group, size in sorted(
            count, key=lambda call_key: (ORIGINS.index(call_key[0]), call_key[1:])
        )
    )
