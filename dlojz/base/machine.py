"""Machine and process: load, memory limits, freed memory, death with the parent, and the signal that asks to stop.

A limit in seconds is multiplied by the machine's load, so that a slow answer on a busy node is not called an endless
loop. No rank outlives its launcher. SIGUSR2 is what a scheduler sends before the time limit, so that a run can go on
later; its handler sets a flag and does nothing else. A limit that cannot be read is no limit.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NoReturn

import psutil

from dlojz.base.language import refusal

MOST: Final = 8.0
_LOAD = Path("/proc/loadavg")


def patience() -> float:
    """Measure the work per core, from 1 (each process has a core) to `MOST`: a factor for limits in seconds.

    The larger of what waits to run now and of the last minute's mean, which lags; both are of the whole machine, also
    seen from a container. Where neither is known, 1.

    Source: proc(5), /proc/loadavg.
    """
    work = 0.0
    with suppress(OSError, ValueError, IndexError):
        minute, _, _, now = _LOAD.read_text(encoding="ascii").split()[:4]
        work = max(float(minute), float(now.partition("/")[0]))
    return min(max(work / (os.cpu_count() or 1), 1.0), MOST)


def refuse_windows() -> NoReturn:
    """Refuse a system on which no process can be forked and no signal stops a rank."""
    raise refusal(
        en="dlojz does not run on Windows itself: install WSL (in PowerShell: wsl --install), and dlojz in its Linux.",
        fr="dlojz ne s’exécute pas sous Windows même : installez WSL (dans PowerShell : wsl --install), puis dlojz "
        "dans son Linux.",
    )


def cores_available() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Read the model of the processor; its architecture where the system does not say.

    Source: proc(5), /proc/cpuinfo.
    """
    with suppress(OSError):
        for row in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if row.startswith("model name"):
                return row.partition(":")[2].strip()
    return platform.machine() or "CPU"


CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of a container or a SLURM job, version 2 and version 1."""


def machine_limit_bytes() -> int:
    """Read the memory limit of all processes together: the machine's, or a container's, in bytes."""
    limits = [psutil.virtual_memory().total]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):  # not there, or `max`
            continue
    return min(limits)


def rank_limit_bytes(ranks: int) -> int:
    """Compute the memory limit of each rank in bytes: its share of the machine, or less by `ulimit -v`.

    `ulimit -v` limits the addresses that a process maps, of which this one has mapped some already.

    Args:
        ranks: on this machine, at least 1.
    """
    share = machine_limit_bytes() // ranks
    allowed = system_limit("RLIMIT_AS")
    if allowed is None:
        return share
    return min(share, max(0, allowed - psutil.Process().memory_info().vms))


def system_limit(name: str, *, hard: bool = False) -> int | None:
    """Read a limit of this process by its name in `resource`; None without a limit, or where the system has none."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    limit = resource.getrlimit(getattr(resource, name))[hard]
    return None if limit == resource.RLIM_INFINITY else limit


PARENT_VARIABLE = "DLOJZ_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory was refused, on the host or on a device."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))
    )


def _prctl(option: int, value: int) -> bool:
    """Call Linux's prctl; False where the system has none."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0
    except (AttributeError, OSError):
        return False


def die_with_parent() -> bool:
    """Ask the system to kill this process as soon as its parent ends; False where it cannot.

    The parent is the process of `$DLOJZ_LAUNCHER_PID` where the launcher set it. If it is gone already, this process
    ends at once with exit code 1.
    """
    tied = _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_VARIABLE, "")
    # The parent may have died before the call above: then the signal will never come.
    if tied and expected.isdecimal() and os.getppid() != int(expected):
        os._exit(1)
    return tied


def keep_freed_memory() -> bool:
    """Make malloc keep what is freed, as the caching allocator of a GPU does; False where it cannot.

    Else glibc gives large blocks back to the system, at times that depend on all that was freed before, and the next
    tensor pays for the zeroing of its pages: the same copies then take up to four times as long.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


@contextmanager
def c_output_discarded() -> Iterator[None]:
    """Discard what C code prints to standard output meanwhile.

    HiGHS prints a line of its debugging that no option turns off, which would stand in a JSON answer.
    """
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    libc.fflush(None)
    kept = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def adopt_orphans() -> bool:
    """Make the helpers of a rank that died (data loaders, …) children of this process; False where it cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


class StopRequest:
    """Flag that SIGUSR2 sets; the loop reads it at each step's end."""

    def __init__(self) -> None:
        self.wanted = False

    def listen(self) -> None:
        """Install the handler; forked processes inherit it, which does them no harm."""
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


def ignore_stop_signal(worker: int) -> None:
    """Ignore SIGUSR2 in a data loader's worker: it goes to every process of a job's step, and would end it."""
    del worker
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
