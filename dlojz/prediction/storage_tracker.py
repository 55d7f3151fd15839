"""Track every tensor storage from its allocation to its release, at the dispatcher.

A storage is counted once, however many tensors look at it; its bytes are those it has now, and all of them go when it
is released. Forecast (`following`) and measurement (`dlojz.train.probes.dispatch_trace`) both count by this class, so
that they differ by what they are shown alone.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class StorageTracker(TorchDispatchMode):
    """Numbers storages and tells by how many bytes each has grown; subclasses say which and note what they need.

    A subclass passes to `follow` the storages of what each operator returns.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes: dict[int, int] = {}
        """Number of each storage that is there → its bytes."""
        self._number_of: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._times: dict[int, int] = {}
        self._numbers = count()

    def begun(self, number: int) -> None:
        """Hear that a storage is followed from now on; its first bytes are told by `grown`."""

    def grown(self, number: int, delta_bytes: int) -> None:
        """Hear that a storage grew by so many bytes (or shrank, where negative)."""
        raise NotImplementedError

    def follow(self, storage: torch.UntypedStorage, times: int = 1) -> int:
        """Follow a storage from now on, or look at it again; its number, from 0.

        Args:
            storage: real or fake.
            times: bytes to count for each of its own; what it was first followed with stays.
        """
        key = storage._cdata
        number = self._number_of.get(key)
        if number is None:
            number = next(self._numbers)
            self._number_of[key] = number
            self.live_bytes[number] = 0
            self._references[number] = weakref.ref(storage, lambda _: self._forget(key, number))
            if times != 1:
                self._times[number] = times
            self.begun(number)
        delta_bytes = storage.nbytes() * self._times.get(number, 1) - self.live_bytes[number]
        if delta_bytes:
            self.live_bytes[number] += delta_bytes
            self.grown(number, delta_bytes)
        return number

    def abandon(self, storage: torch.UntypedStorage) -> None:
        """Follow a storage no more, as if it had been released."""
        key = storage._cdata
        if (number := self._number_of.get(key)) is not None:
            self._forget(key, number)

    def _forget(self, key: int, number: int) -> None:
        self._number_of.pop(key, None)
        self._references.pop(number, None)
        self._times.pop(number, None)
        if num_bytes := self.live_bytes.pop(number, 0):
            self.grown(number, -num_bytes)
