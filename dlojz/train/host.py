"""What one rank may take of the machine that it runs on.

Layer 3. Invariant: loads no torch; a limit that cannot be read is no limit.
"""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of a container or a SLURM job, version 2 and version 1."""


def machine_limit_bytes() -> int:
    """Memory that all processes here may take together: that of the machine, or less where a container allows less."""
    limits = [psutil.virtual_memory().total]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return min(limits)


def rank_limit_bytes(ranks: int) -> int:
    """What each of so many ranks of this machine may take: its share of the memory, or less where `ulimit -v` says so.

    `ulimit -v` limits the addresses that a process maps, of which this one has mapped some already.

    Args:
        ranks: on this machine, at least 1.
    """
    share = machine_limit_bytes() // ranks
    allowed, _ = resource.getrlimit(resource.RLIMIT_AS)
    if allowed == resource.RLIM_INFINITY:
        return share
    return min(share, max(0, allowed - psutil.Process().memory_info().vms))


__all__ = ["machine_limit_bytes", "rank_limit_bytes"]
