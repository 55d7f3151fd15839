"""Every storage from its allocation to its release, as operators return them.

Layer 3. Invariant: what a mode at the dispatcher sees is all that autograd and the operators allocate; a storage is
counted once, however many tensors look at it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dlojz.predict.states import FP32_BYTES


@dataclass(frozen=True, slots=True)
class Allocation:
    """A storage that grew by some bytes (or shrank, where negative), in which pass and for which module."""

    storage: int
    delta_bytes: int
    phase: Literal["data", "forward", "backward"]
    module: str
    """Path of the module that computes; empty outside of all."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A moment: a unit of the model begins or has ended a pass, or the gradient of a parameter is there."""

    what: Literal["forward", "forwarded", "backward", "ready"]
    name: str
    """Of the module, or of the parameter."""
    storage: int = -1
    """Of the gradient, where one is ready."""


@dataclass(frozen=True)
class Trace:
    """What one micro-batch's forward and backward passes allocate.

    Args:
        events: allocations and marks, in the order in which they happen.
        kept: storages that forward leaves alive for backward, its inputs and its loss included.
        on_host: those of them that lie in host memory, where the device keeps nothing.
        bytes_of: largest bytes of each storage.
        module_of: module that allocated each storage.
        output_of: storage that each module's forward returns.
    """

    events: tuple[Allocation | Mark, ...]
    kept: frozenset[int]
    on_host: frozenset[int]
    bytes_of: dict[int, int]
    module_of: dict[int, str]
    output_of: dict[str, int]

    @property
    def saved_bytes(self) -> int:
        """Bytes that are kept for backward, each storage once, the inputs included."""
        return sum(self.bytes_of[storage] for storage in self.kept)

    @property
    def peak_bytes(self) -> int:
        """Largest sum of all that both passes have allocated, gradients included, weights not."""
        held = peak = 0
        for event in self.events:
            if isinstance(event, Allocation):
                held += event.delta_bytes
                peak = max(peak, held)
        return peak

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes kept for backward by the module that made them, in the order of the forward pass."""
        total: dict[str, int] = {}
        for storage in sorted(self.kept):
            name = self.module_of[storage]
            total[name] = total.get(name, 0) + self.bytes_of[storage]
        return total


class Follower(TorchDispatchMode):
    """Follows every storage that an operator returns, until it is released or resized; tensors may be fake."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Allocation | Mark] = []
        self.live_bytes: dict[int, int] = {}
        self.bytes_of: dict[int, int] = {}
        self.module_of: dict[int, str] = {}
        self.output_of: dict[str, int] = {}
        self.phase: Literal["data", "forward", "backward"] = "data"
        self.modules: list[str] = []
        self.in_backward_of = ""
        self.on_gpu = False
        self.ignored: set[int] = set()
        self._number_of: dict[int, int] = {}
        self._references: dict[int, Any] = {}
        self._times: dict[int, int] = {}
        self._numbers = count()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A GPU keeps the mean and the deviation of a normalisation in fp32, whatever its input.
        statistics = self.on_gpu and func is torch.ops.aten.native_layer_norm.default
        for number, tensor in enumerate(tree_leaves(result)):
            if isinstance(tensor, Tensor):
                self.see(tensor, FP32_BYTES // tensor.element_size() if statistics and number else 1)
        return result

    @property
    def module(self) -> str:
        """Path of the module that computes now."""
        return self.modules[-1] if self.modules else (self.in_backward_of if self.phase == "backward" else "")

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Never count these: they are states, which are predicted by themselves."""
        self.ignored |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def see(self, tensor: Tensor, times: int = 1) -> int:
        """Follow a tensor's storage from now on, as so many times as large; its number, -1 if it is ignored."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.ignored:
            return -1
        number = self._number_of.get(key)
        if number is None:
            number = next(self._numbers)
            self._number_of[key] = number
            self.live_bytes[number] = self.bytes_of[number] = 0
            self.module_of[number] = self.module
            self._references[number] = weakref.ref(storage, lambda _: self._release(key, number))
            self._times[number] = times
        delta_bytes = storage.nbytes() * self._times[number] - self.live_bytes[number]
        if delta_bytes:
            self._record(number, delta_bytes)
        return number

    def _release(self, key: int, number: int) -> None:
        self._number_of.pop(key, None)
        self._references.pop(number, None)
        if self.live_bytes[number]:
            self._record(number, -self.live_bytes[number])
        del self.live_bytes[number]

    def _record(self, number: int, delta_bytes: int) -> None:
        self.live_bytes[number] += delta_bytes
        self.bytes_of[number] = max(self.bytes_of[number], self.live_bytes[number])
        self.events.append(Allocation(number, delta_bytes, self.phase, self.module))
