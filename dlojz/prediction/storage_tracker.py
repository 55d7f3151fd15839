"""Track every tensor storage from its allocation to its release, at the dispatcher.

A storage is counted once, however many tensors view it, with its current bytes, until it is released. Forecast
(`trace`) and measurement (`dlojz.train.dispatch_trace`) both count by this class.

**Sums of gradients.** Where several operators have read a tensor, autograd adds their gradients: into the first one's
memory, if nothing else holds it; but never under a dispatch mode, where each sum is a tensor more. What is counted here
is the training without a mode: such a sum takes over the memory of what it was added to.

Source: torch 2.13, `csrc/autograd/input_buffer.cpp`, `accumulate` and `can_accumulate_inplace`.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Node = tuple[str, int] | tuple[()]
_TELLS_HOLDERS = hasattr(torch.Tensor, "_use_count")
_HOLDERS_OF_STORAGE, _HOLDERS_OF_TENSOR = 2, 4
"""Holders of a gradient that only autograd keeps, as it is seen from a dispatch mode, whose own are among them."""


def _present_node() -> Node:
    """Kind and number of the node whose backward runs in this thread; empty outside of backward."""
    if torch._C._current_graph_task_id() == -1 or (node := torch._C._current_autograd_node()) is None:
        return ()
    return type(node).__name__, node._sequence_nr()  # not its name(): a script's own function may keep something there


class StorageTracker(TorchDispatchMode):
    """Dispatch mode that numbers storages and reports their growth; a subclass passes storages to `follow`."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes: dict[int, int] = {}
        """Number of each live storage → its bytes."""
        self._number_of: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._times: dict[int, int] = {}
        self._node_of: dict[int, Node] = {}
        """Number of each live storage → the node of autograd's graph that made it; empty outside of backward."""
        self._numbers = count()

    def begun(self, number: int) -> None:
        """Handle a new storage; its first bytes are reported by `grown`."""

    def grown(self, number: int, delta_bytes: int) -> None:
        """Handle the growth of a storage by so many bytes (or shrinking, where negative)."""
        raise NotImplementedError

    def follow(self, storage: torch.UntypedStorage, times: int = 1) -> int:
        """Track a storage, real or fake, or update its size; return its number, from 0.

        `times`: bytes to count for each of its bytes, as first given.
        """
        key = storage._cdata
        number = self._number_of.get(key)
        if number is None:
            number = next(self._numbers)
            self._number_of[key] = number
            self.live_bytes[number] = 0
            # The key is an address, which another storage may get: it is forgotten as soon as this one dies.
            self._references[number] = weakref.ref(storage, lambda _: self._forget(key, number))
            self._node_of[number] = _present_node()
            if times != 1:
                self._times[number] = times
            self.begun(number)
        delta_bytes = storage.nbytes() * self._times.get(number, 1) - self.live_bytes[number]
        if delta_bytes:
            self.live_bytes[number] += delta_bytes
            self.grown(number, delta_bytes)
        return number

    def sums_in_place(self, func: Any, args: Any) -> bool:
        """Tell, before an operator runs, whether it is a sum of gradients that autograd alone would make in place."""
        if func is not torch.ops.aten.add.Tensor or torch.is_grad_enabled() or not _TELLS_HOLDERS:
            return False
        node, (older, newer) = _present_node(), args[:2]
        if not node or not isinstance(newer, torch.Tensor) or {older.layout, newer.layout} != {torch.strided}:
            return False
        if older.shape != newer.shape or older.dtype != newer.dtype:
            return False
        if node[0] == "AccumulateGrad":  # its hooks' own sums: gradients are added up before it, or with `add_`
            return False
        storage = older.untyped_storage()
        number = self._number_of.get(storage._cdata)
        # What a node adds up for its own result, it has made itself.
        return (
            number is not None
            and self._node_of.get(number, node) != node
            and torch._C._storage_Use_Count(storage._cdata) <= _HOLDERS_OF_STORAGE
            and older._use_count() <= _HOLDERS_OF_TENSOR
            and torch._debug_has_internal_overlap(older) == 0
        )

    def take_over(self, old_storage: torch.UntypedStorage, storage: torch.UntypedStorage) -> None:
        """Count a new storage as the former one, which is about to be released."""
        number = self._number_of.pop(old_storage._cdata)
        key = storage._cdata
        self._number_of[key] = number
        # Drops the old storage's reference with its callback, which would report a release.
        self._references[number] = weakref.ref(storage, lambda _: self._forget(key, number))
        self._node_of[number] = _present_node()

    def abandon(self, storage: torch.UntypedStorage) -> None:
        """Stop tracking a storage, as if it had been released."""
        key = storage._cdata
        if (number := self._number_of.get(key)) is not None:
            self._forget(key, number)

    def _forget(self, key: int, number: int) -> None:
        self._number_of.pop(key, None)
        self._references.pop(number, None)
        self._times.pop(number, None)
        self._node_of.pop(number, None)
        if num_bytes := self.live_bytes.pop(number, 0):
            self.grown(number, -num_bytes)
