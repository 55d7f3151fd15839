"""How much longer an answer is waited for on a machine that others load.

Layer 0. Invariant: never less than what was asked for, so that a quiet machine waits exactly that long.

A right answer that is slow only because a whole class computes on the same node must not be called an endless loop.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

MOST: Final = 8.0
_LOAD = Path("/proc/loadavg")


def patience() -> float:
    """Work per core of this machine, from 1 (each process has a core) to `MOST`: factor of a limit in seconds.

    The larger of what waits to run now and of the last minute's mean, which lags; both are of the whole machine, also
    seen from a container. Where neither is known, 1.

    Source: proc(5), /proc/loadavg.
    """
    work = 0.0
    with suppress(OSError, ValueError, IndexError):
        minute, _, _, now = _LOAD.read_text(encoding="ascii").split()[:4]
        work = max(float(minute), float(now.partition("/")[0]))
    return min(max(work / (os.cpu_count() or 1), 1.0), MOST)


__all__ = ["MOST", "patience"]
