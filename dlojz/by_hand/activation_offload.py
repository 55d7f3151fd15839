"""Activation offloading: tensors that forward saves for backward wait in host memory.

Each storage that forward saves leaves the device once and comes back once per micro-batch, whatever the number of its
views; weights and buffers never move. Autograd hands over every tensor it saves (`pack`) and asks for it again
(`unpack`). On a GPU the copy overlaps with the computation, into pinned memory; on the CPU it is a copy too, so that
the bytes of a GPU can be counted.

Source: Rajbhandari et al. 2021, "ZeRO-Infinity" (arXiv 2104.07857), section 5.1.2; torch `autograd.graph.save_on_cpu`,
which differs in that it copies a storage once for each tensor saved.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from dlojz.config.fields import LayoutFields, block_choices

MINIMUM_BYTES = 1024
"""Smaller storages stay on the device: moving them saves nothing (the limit of torchtune's `OffloadActivations`)."""


class ActivationOffload:
    """Move what a module saves for backward to host memory, while it is entered.

    Enter it around the forward pass alone: a loss saves what backward asks for at once. With checkpointing it moves the
    input of each block.

    Args:
        module: its parameters and buffers stay on the device; it gets hooks, which `close` removes.
        minimum_bytes: storages smaller than this stay on the device, at least 0.
        within: parts of the module, none in another, that alone have theirs moved; by default all of it.
    """

    def __init__(
        self, module: nn.Module, minimum_bytes: int = MINIMUM_BYTES, within: Sequence[nn.Module] | None = None
    ) -> None:
        self.offloaded_bytes = 0
        """Bytes that are in host memory now."""
        self.most_bytes = 0
        """Bytes that were in host memory at most."""
        self.moved_bytes = 0
        """Bytes that have crossed in both directions since `begin_step`."""
        self._minimum_bytes = minimum_bytes
        self._within = None if within is None else {id(part) for part in within}
        self._is_within = within is None
        # Storage's key → (weak storage, version, dtype, weak host copy): a further view of it finds the same copy.
        self._known: dict[int, tuple[Any, int, torch.dtype, weakref.ref[_Moved]]] = {}
        # Weak: a copy lives as long as autograd keeps a `_Saved` that refers to it.
        self._moved: weakref.WeakSet[_Moved] = weakref.WeakSet()
        # One entry per module under way: the keys of its own weights and buffers, which must not move.
        self._states: list[list[int]] = []
        self._context: ExitStack | None = None
        self._stream: Any = None
        # Gathered weights (FSDP2, ZeRO-3) get their storages when the module is entered. Our hooks, added last, run
        # after the engine's own have gathered.
        self._hooks: list[Any] = []
        for part in module.modules():
            self._hooks.append(part.register_forward_pre_hook(self._enter_module))
            # `always_call`: after an exception too, or its entry would stay in `_states`.
            self._hooks.append(part.register_forward_hook(self._leave_module, always_call=True))

    def __enter__(self) -> ActivationOffload:
        self._context = ExitStack()
        self._context.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack))
        return self

    def __exit__(self, *error: object) -> None:
        assert self._context is not None
        self._context.close()
        self._context = None
        self._states.clear()

    def begin_step(self) -> None:
        """Count `moved_bytes` anew."""
        self.moved_bytes = 0

    def host_copies(self) -> list[Tensor]:
        """List the copies that are in host memory now."""
        return [host_copy.host for host_copy in list(self._moved)]

    def close(self) -> None:
        """Remove the hooks from the module."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter_module(self, part: nn.Module, inputs: Any) -> None:
        if self._context is not None:
            # One flag is enough: no part of `within` lies inside another.
            self._is_within |= id(part) in (self._within or ())
            states = [*part.parameters(recurse=False), *part.buffers(recurse=False)]
            self._states.append([_key(tensor) for tensor in states if _is_plain(tensor)])

    def _leave_module(self, part: nn.Module, inputs: Any, output: Any) -> None:
        if self._context is not None and self._states:
            self._states.pop()
            self._is_within &= id(part) not in (self._within or ())

    def _pack(self, tensor: Tensor) -> Tensor | _Saved:
        if not self._is_within or not _is_plain(tensor):
            return tensor
        # An empty storage has nothing to copy, even where `minimum_bytes` is 0.
        if tensor.untyped_storage().nbytes() < max(1, self._minimum_bytes):
            return tensor
        key = _key(tensor)
        # A weight or buffer of a module under way, or a view of one: it stays on the device.
        if any(key in states for states in self._states):
            return tensor
        return _Saved(self._move(tensor, key), tensor)

    def _move(self, tensor: Tensor, key: int) -> _Moved:
        """Find the storage's copy in host memory, or make it."""
        record = self._known.get(key)
        if record is not None:
            storage, version, dtype, reference = record
            host_copy = reference()
            # An operator may have written in place since then.
            if storage() is not None and host_copy is not None and (version, dtype) == (tensor._version, tensor.dtype):
                return host_copy
        storage = tensor.untyped_storage()
        # The whole storage, flat, (bytes / itemsize,): all views of it can be cut out of one copy.
        with torch.no_grad():
            flat = tensor.detach().as_strided((storage.nbytes() // tensor.element_size(),), (1,), 0)
            host_copy = self._copy_out(flat)
        self.offloaded_bytes += host_copy.num_bytes
        self.most_bytes = max(self.most_bytes, self.offloaded_bytes)
        self._count(host_copy.num_bytes)
        self._moved.add(host_copy)
        # Runs when autograd frees the last view of the copy; at the interpreter's exit there is nothing to count.
        weakref.finalize(host_copy, self._forget, host_copy.num_bytes).atexit = False
        # Once the storage is freed, another one may get its address.
        alive = weakref.ref(storage, lambda _: self._known.pop(key, None))
        self._known[key] = (alive, tensor._version, tensor.dtype, weakref.ref(host_copy))
        return host_copy

    def _copy_out(self, flat: Tensor) -> _Moved:
        """Who: the device, to its host. What: a whole storage. How much: its bytes."""
        if flat.device.type != "cuda":
            return _Moved(torch.empty_like(flat).copy_(flat), flat.device, None, self._count)
        if self._stream is None:
            self._stream = torch.cuda.Stream(flat.device)
        # The copy starts only once the kernels that write the storage have run.
        self._stream.wait_stream(torch.cuda.current_stream(flat.device))
        # Pinned: a copy from pageable memory would make the host wait.
        host = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            host.copy_(flat, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        flat.record_stream(self._stream)  # its memory is not given to others before the copy is made
        return _Moved(host, flat.device, copied, self._count)

    def _unpack(self, saved: Tensor | _Saved) -> Tensor:
        return saved if isinstance(saved, Tensor) else saved.fetch()

    def _count(self, num_bytes: int) -> None:
        self.moved_bytes += num_bytes

    def _forget(self, num_bytes: int) -> None:
        self.offloaded_bytes -= num_bytes


def planned_offload(module: nn.Module) -> ActivationOffload:
    """Offload within the blocks whose activation plan says so (see `BlockList.plan_activations`), and nowhere else."""
    return ActivationOffload(
        module, within=[part for part in module.modules() if getattr(part, "activations", "") == "offload"]
    )


def offload_of(layout: LayoutFields, module: nn.Module) -> ActivationOffload | None:
    """Make the offloading of activations that a layout asks for; None where it asks for none."""
    if layout.offload == "activations":
        return ActivationOffload(module)
    return planned_offload(module) if "offload" in block_choices(layout.activation_plan) else None


class _Moved:
    """One storage in host memory, and on the device again from its first use in backward to its last."""

    def __init__(self, host: Tensor, device: torch.device, copied: Any, count: Callable[[int], None]) -> None:
        self.host = host
        self.num_bytes = host.nbytes
        self.waiting = 0
        self._device, self._copied, self._count = device, copied, count
        self._back: Tensor | None = None
        self._lock = threading.Lock()

    def fetch(self, *, is_first: bool) -> Tensor:
        """Return the storage as a flat tensor on the device; `is_first` is the first request of this tensor."""
        # Autograd may unpack on several threads: one of them copies, the others take its tensor.
        with self._lock:
            back = self._back
            if back is None:
                # The stream waits for the way out, which may still be under way; the host does not.
                if self._copied is not None:
                    torch.cuda.current_stream(self._device).wait_event(self._copied)
                back = torch.empty_like(self.host, device=self._device)
                # Who: the host, to the device. What: the storage. How much: its bytes.
                back.copy_(self.host, non_blocking=True)
                self._count(self.num_bytes)
            # A second request of one tensor (a retained graph) is not counted down again.
            self.waiting -= is_first
            # After the last first request the device copy lives only as long as the views that were handed out.
            self._back = back if self.waiting else None
            return back


class _Saved:
    """Tensor that autograd has saved, as a view of its storage."""

    def __init__(self, host_copy: _Moved, tensor: Tensor) -> None:
        self._moved, self._first = host_copy, True
        self._view = (tuple(tensor.shape), tensor.stride(), tensor.storage_offset())
        host_copy.waiting += 1

    def fetch(self) -> Tensor:
        """Return the tensor, on the device again."""
        flat = self._moved.fetch(is_first=self._first)
        self._first = False
        return flat.as_strided(*self._view)


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor has a storage that can be copied as it lies."""
    from torch._subclasses.fake_tensor import FakeTensor

    # meta: no numbers to copy. conj, neg: the bytes are not the values until the bit is resolved.
    plain = type(tensor) in (Tensor, nn.Parameter, FakeTensor) and tensor.layout == torch.strided
    return plain and not (tensor.device.type == "meta" or tensor.is_conj() or tensor.is_neg())
