"""Status board in shared memory: every rank writes what it is doing, and the others read it while they wait.

One file, mapped by all ranks of one machine; each writes its own region only. A reader sees a whole state or the one
before it, never a mixture; a write takes microseconds.
"""

from __future__ import annotations

import json
import mmap
import os
from pathlib import Path
from typing import Any

REGION_BYTES = 128 * 2**10
_WORD_BYTES = 8
_HEADER_BYTES = 2 * _WORD_BYTES  # version (odd while being written), bytes of JSON
_TRIES = 1000
WAITER = "dlojz-ranks-waiter"
"""Name of the threads in which a guarded call waits."""


class StatusBoard:
    """One rank's view of the board.

    Args:
        path: the file made by `create`.
        rank: whose region this process writes.
    """

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        descriptor = os.open(path, os.O_RDWR)
        try:
            self._map = mmap.mmap(descriptor, size * REGION_BYTES)
        finally:
            os.close(descriptor)
        # A number of a memoryview is stored at once; `struct` sets its bytes to 0 first, which another process may see.
        self._words = memoryview(self._map).cast("Q")
        # Continue where a process that held this rank before has left off.
        self._version = self._words[rank * REGION_BYTES // _WORD_BYTES] & ~1

    @staticmethod
    def create(path: Path, size: int) -> None:
        """Make the empty file, readable by its owner alone."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.ftruncate(descriptor, size * REGION_BYTES)
        finally:
            os.close(descriptor)

    def write(self, state: dict[str, Any]) -> None:
        """Write this rank's state, in place of the one before.

        Raises:
            ValueError: if it does not fit in the region.
        """
        text = json.dumps(state, separators=(",", ":")).encode()
        start = self.rank * REGION_BYTES
        if len(text) > REGION_BYTES - _HEADER_BYTES:
            raise ValueError(f"a state of {len(text)} bytes does not fit on the board ({REGION_BYTES} bytes a rank).")
        # Odd while writing, also after a write that an interrupt has cut short.
        writing = (self._version & ~1) + 1
        self._version = writing
        self._words[start // _WORD_BYTES] = writing
        self._words[start // _WORD_BYTES + 1] = len(text)
        self._map[start + _HEADER_BYTES : start + _HEADER_BYTES + len(text)] = text
        self._version = writing + 1
        self._words[start // _WORD_BYTES] = writing + 1

    def read(self, rank: int) -> dict[str, Any]:
        """Return a rank's last whole state, with its `version`; empty where it has written nothing yet."""
        start = rank * REGION_BYTES
        word = start // _WORD_BYTES
        # A write lasts microseconds: a thousand looks outlast it, unless its process was killed.
        for _ in range(_TRIES):
            version, length = self._words[word], self._words[word + 1]
            if not version or version % 2 or length > REGION_BYTES - _HEADER_BYTES:
                if not version:
                    return {}
                continue
            text = self._map[start + _HEADER_BYTES : start + _HEADER_BYTES + length]
            # The same version before and after: nothing was written in between.
            if self._words[word] == version:
                state: dict[str, Any] = json.loads(text)
                return {**state, "version": version}
        return {}  # killed in the middle of a write: what it did last is not known

    def read_all(self) -> list[dict[str, Any]]:
        """Return every rank's state, by rank."""
        return [self.read(rank) for rank in range(self.size)]


def is_gone(pid: int | None) -> bool:
    """Return whether the process that wrote this number on the board has ended; a zombie has."""
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or a system without /proc
        return False
