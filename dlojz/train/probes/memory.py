"""Bytes by category, from the storages that a trace has seen.

Layer 3. Invariant: every live byte belongs to exactly one category: what an engine's inventory claims is a state, what
forward leaves alive for backward is an activation, all else is workspace. The categories add up to the total.
"""

from __future__ import annotations

import resource
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from dlojz.footprint import CATEGORIES, Category, Memory
from dlojz.record import MemorySample
from dlojz.train.probes.trace import StorageEvent, StorageTrace

MAX_SAMPLES = 400
Inventory = Mapping[Category, Iterable[Tensor]]


class MemoryProbe:
    """Sorts the storages of a trace into categories.

    Args:
        trace: the trace, which stays entered while the probe is told of the marks below.
    """

    def __init__(self, trace: StorageTrace) -> None:
        self._trace = trace
        self._category_of: dict[int, Category] = {}
        self._at_forward: set[int] = set()
        self._on_host: set[int] = set()

    # A communication thread may release a storage at any moment: what is alive is looked at in a copy.

    def claim(self, inventory: Inventory) -> None:
        """Sort what an engine holds at this moment; a storage stays what it was first claimed to be.

        What was only taken for an activation or a temporary may still turn out to be a state: DDP makes its buckets in
        a forward pass, and the gradients are views of them where `gradient_as_bucket_view` says so.
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
        """What was moved to host memory: counted apart, also where the host is the device."""
        self._on_host |= {number for tensor in tensors if (number := self._trace.see(tensor)) is not None}

    def before_forward(self, inventory: Inventory) -> None:
        """Note what is alive before a micro-batch is read; none of it is that micro-batch's activation."""
        self.claim(inventory)
        self._at_forward = set(self._trace.live_bytes.copy())

    def after_forward(self, inventory: Inventory) -> None:
        """What forward has left alive, and is neither state nor a communication buffer, is kept for backward."""
        self.claim(inventory)
        known = self._at_forward | self._trace.communicated
        for number, num_bytes in self._trace.live_bytes.copy().items():
            if num_bytes and number not in known:
                self._category_of.setdefault(number, "activations")

    def after_step(self, inventory: Inventory) -> None:
        """What has outlived its step was no activation but a buffer that the engine made on the way."""
        self.claim(inventory)
        for number, num_bytes in self._trace.live_bytes.copy().items():
            if num_bytes and self._category_of.get(number) == "activations":
                self._category_of[number] = "workspace"

    def measure(self, step: int, device: torch.device) -> tuple[Memory, tuple[MemorySample, ...]]:
        """Largest bytes by category within a step, the peak of their sum, and how they moved."""
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
            category = self._category_of.get(event.storage, "workspace")
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


def resident_bytes() -> int:
    """Largest resident set this process has had."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024
