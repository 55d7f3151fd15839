"""Track every tensor storage from its allocation to its release, at the dispatcher.

A storage is counted once, however many tensors view it, with its current bytes, until it is released. Forecast
(`trace`) and measurement (`dlojz.train.dispatch_trace`) both count by this class.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class StorageTracker(TorchDispatchMode):
    """Dispatch mode that numbers storages and reports their growth; a subclass passes storages to `follow`."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes: dict[int, int] = {}
        """Number of each live storage → its bytes."""
        self._number_of: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._times: dict[int, int] = {}
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
        """Stop tracking a storage, as if it had been released."""
        key = storage._cdata
        if (number := self._number_of.get(key)) is not None:
            self._forget(key, number)

    def _forget(self, key: int, number: int) -> None:
        self._number_of.pop(key, None)
        self._references.pop(number, None)
        self._times.pop(number, None)
        if num_bytes := self.live_bytes.pop(number, 0):
            self.grown(number, -num_bytes)
