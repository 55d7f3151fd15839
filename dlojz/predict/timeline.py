"""One training step of one rank as a ledger: what is held, by category and by block, and when it is most.

Layer 3. Invariant: pure bookkeeping. What is held came in by `hold` under a key and goes out by `drop` of that key, so
that the sum over the categories is the total at every moment.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

from dlojz.footprint import CATEGORIES, Category, Memory
from dlojz.record import MemorySample

MAX_SAMPLES = 400
_ON_HOST = -1


@dataclass(frozen=True, slots=True)
class Movement:
    """Bytes that came (or went, where negative) under a key, with what a memory viewer shows of them."""

    key: int
    delta_bytes: int
    label: str


class Ledger:
    """Holds and drops bytes, and remembers the fullest moment.

    `moment` is the phase of the step, `detail` the micro-batch and the module; both are kept with the peak.
    """

    def __init__(self) -> None:
        self.moment = ""
        self.detail = (0, "")
        self.peak_detail = (0, "")
        self.movements: list[Movement] = []
        self.host_bytes = self.most_host_bytes = 0
        self._held: dict[Any, tuple[Category, str, int, int]] = {}
        self._by_category: Counter[Category] = Counter()
        self._by_block: Counter[tuple[str, Category]] = Counter()
        self._largest: dict[Category, int] = defaultdict(int)
        self._keys = 0
        self._total_bytes = 0
        self.peak_bytes, self.peak_moment = 0, ""
        self._at_peak: Counter[Category] = Counter()
        self._peak_blocks: Counter[tuple[str, Category]] = Counter()
        self._history: list[tuple[str, Category, int]] = []

    def hold(self, key: Any, category: Category, num_bytes: int, block: str = "") -> None:
        """Take in bytes under a key; what the key held before is replaced."""
        self.drop(key)
        if num_bytes <= 0:
            return
        self._keys += 1
        self._held[key] = (category, block, num_bytes, self._keys)
        self._move(category, block, num_bytes)
        self.movements.append(Movement(self._keys, num_bytes, f"{category}: {block or key} ({self.moment})"))
        if self._total_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_moment = self._total_bytes, self.moment
            self.peak_detail = self.detail
            self._at_peak, self._peak_blocks = self._by_category.copy(), self._by_block.copy()

    def drop(self, key: Any) -> None:
        """Let go of what a key holds; nothing happens where it holds nothing."""
        found = self._held.pop(key, None)
        if found is None:
            return
        category, block, num_bytes, number = found
        if number == _ON_HOST:
            self.host_bytes -= num_bytes
            return
        self._move(category, block, -num_bytes)
        self.movements.append(Movement(number, -num_bytes, ""))

    def hold_on_host(self, key: Any, num_bytes: int) -> None:
        """Take in bytes of host memory, which are none of the device's."""
        self.drop(key)
        self._held[key] = ("activations", "", num_bytes, _ON_HOST)
        self.host_bytes += num_bytes
        self.most_host_bytes = max(self.most_host_bytes, self.host_bytes)

    def bytes_of(self, key: Any) -> int:
        """Bytes that a key holds."""
        return self._held[key][2] if key in self._held else 0

    def rename(self, key: Any, name: Any) -> None:
        """Keep what a key holds under another name; what that name held is let go of."""
        found = self._held.pop(key, None)
        if found is not None:
            self.drop(name)
            self._held[name] = found

    def holds(self, key: Any) -> bool:
        """Whether a key holds anything."""
        return key in self._held

    def _move(self, category: Category, block: str, delta_bytes: int) -> None:
        self._by_category[category] += delta_bytes
        self._by_block[block, category] += delta_bytes
        self._largest[category] = max(self._largest[category], self._by_category[category])
        self._total_bytes += delta_bytes
        self._history.append((self.moment, category, delta_bytes))

    def memory(self) -> Memory:
        """Largest bytes by category, and the peak of their sum."""
        return Memory(
            **{f"{category}_bytes": self._largest[category] for category in CATEGORIES},
            peak_bytes=self.peak_bytes,
            peak_moment=self.peak_moment,
            at_peak_bytes={category: self._at_peak[category] for category in CATEGORIES},
            host_bytes=self.most_host_bytes,
        )

    def peak_by_block(self) -> tuple[tuple[str, dict[Category, int]], ...]:
        """What each block held at the peak, by category; what belongs to none is under the empty name."""
        blocks: dict[str, dict[Category, int]] = {}
        for (block, category), num_bytes in self._peak_blocks.items():
            if num_bytes:
                blocks.setdefault(block, {})[category] = num_bytes
        return tuple(blocks.items())

    def samples(self) -> tuple[MemorySample, ...]:
        """At most `MAX_SAMPLES` moments; of each stretch the fullest, so that no peak is lost.

        The time is the number of the movement: a prediction knows the order, not the seconds.
        """
        held: Counter[Category] = Counter()
        moments: list[tuple[int, int, str, dict[str, int]]] = []
        for number, (moment, category, delta_bytes) in enumerate(self._history):
            held[category] += delta_bytes
            moments.append((sum(held.values()), number, moment, {str(name): held[name] for name in CATEGORIES}))
        stretch = -(-len(moments) // MAX_SAMPLES) or 1
        fullest = (max(moments[i : i + stretch], key=lambda moment: moment[0]) for i in range(0, len(moments), stretch))
        return tuple(
            MemorySample(time_s=float(number), phase=moment, bytes_by_category=held)
            for _, number, moment, held in fullest
        )
