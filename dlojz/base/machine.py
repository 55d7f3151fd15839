"""Machine and process: load, memory limits, freed memory, death with the parent, the signal to stop, stale locks.

A limit in seconds is multiplied by the machine's load, so that a slow answer on a busy node is not called an endless
loop. No rank outlives its launcher. SIGUSR2 is what a scheduler sends before the time limit, so that a run can go on
later; its handler sets a flag and does nothing else. A limit that cannot be read is no limit.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shlex
import signal
import sys
import time
from collections.abc import Iterable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple, NoReturn

import psutil

from dlojz.base.language import refusal, say

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
        # Means of 1, 5 and 15 minutes, then `running/all` at this moment.
        minute, _, _, run_queue = _LOAD.read_text(encoding="ascii").split()[:4]
        work = max(float(minute), float(run_queue.partition("/")[0]))
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
    # An affinity (taskset, a job's control group) may leave fewer than the machine has.
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


_ROOT = Path("/")
"""Where /proc and /sys are; tests put a folder there."""
_JOB = re.compile(r"/job_(\d+)(?:/|$)")
_CONTAINERS = ("docker", "kubepods", "libpod", "containerd", "crio", "lxc", "machine.slice")
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file", "memory.events", "memory.peak"),
    1: (
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
        "memory.oom_control",
        "memory.max_usage_in_bytes",
    ),
}
"""Of the versions of cgroups: limit, what is taken, what of it the kernel gives back, processes killed, the peak."""
_NEAR = 0.9
"""Share of its limit that a group has taken at its peak where it ran out."""


class MemoryLimit(NamedTuple):
    """Memory limit in bytes, and whose it is.

    Args:
        owner: kind of what is limited; `ulimit` is this process alone.
        name: of the job, slice, service or cgroup; empty where it has none.
    """

    num_bytes: int
    owner: str = "machine"
    name: str = ""

    @property
    def code(self) -> str:
        """Owner and name in one word, for a record."""
        return f"{self.owner}:{self.name}" if self.name else self.owner

    @property
    def english(self) -> str:
        """Name what is limited, in English, as the sentences of a record are."""
        return _LIMITED.get(self.owner, _LIMITED["machine"])[0].format(self.name)


_LIMITED = {
    "machine": ("the machine", "la machine"),
    "job": ("the SLURM job {}", "le job SLURM {}"),
    "container": ("the container", "le conteneur"),
    "slice": ("the systemd slice {}", "la tranche systemd {}"),
    "service": ("the systemd service {}", "le service systemd {}"),
    "cgroup": ("the control group {}", "le groupe de contrôle {}"),
    "ulimit": ("`ulimit -v`", "`ulimit -v`"),
}


def words_of_limit(code: str) -> str:
    """Name what a memory limit is of, by `MemoryLimit.code`; the machine where that is none."""
    owner, _, name = code.partition(":")
    english, french = _LIMITED.get(owner, _LIMITED["machine"])
    return say(en=english.format(name), fr=french.format(name))


class _Group(NamedTuple):
    """Control group that limits memory: its folder, its path from the root of the hierarchy, version 1 or 2."""

    folder: Path
    path: str
    version: int

    def number(self, file: int, key: str = "") -> int | None:
        """Read a number of one of its files, after a key where several stand in it; None where there is none."""
        with suppress(OSError, ValueError, StopIteration):
            text = (self.folder / ("memory.stat" if file == 2 else _FILES[self.version][file])).read_text()
            # `max`, for no limit, is no number.
            return int(next(row.split()[1] for row in text.splitlines() if row.split()[:1] == [key]) if key else text)
        return None

    @property
    def limit(self) -> MemoryLimit | None:
        """Its limit and what it is the group of; None without a limit."""
        num_bytes = self.number(0)
        if num_bytes is None:
            return None
        parts = self.path.strip("/").split("/")
        job = _JOB.search(self.path)
        if job:
            return MemoryLimit(num_bytes, "job", job[1])
        if parts == [""] or any(part.startswith(_CONTAINERS) for part in parts):
            return MemoryLimit(num_bytes, "container")
        ending = parts[-1].rpartition(".")[2]
        owner = {"slice": "slice", "service": "service"}.get(ending, "cgroup")
        return MemoryLimit(num_bytes, owner, parts[-1] if owner != "cgroup" else self.path)

    @property
    def free_bytes(self) -> int | None:
        """What is left of its limit; None without one."""
        limit_bytes, taken_bytes = self.number(0), self.number(1)
        if limit_bytes is None or taken_bytes is None:
            return limit_bytes
        # What is taken, less the page cache that the kernel would give back.
        return max(0, limit_bytes - max(0, taken_bytes - (self.number(2, _FILES[self.version][2]) or 0)))


def _hierarchies() -> Iterator[tuple[Path, str, int]]:
    """Where groups that limit memory are mounted: the folder, the path of the group shown there, the version.

    Source: proc(5), /proc/self/mountinfo.
    """
    mounts = []
    with suppress(OSError):
        for row in (_ROOT / "proc/self/mountinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            # Words 4 and 5: the group that is mounted, and where; behind ` - `: type, source, options.
            before, _, after = row.partition(" - ")
            words, kind = before.split(), after.split()
            if len(words) < 5 or len(kind) < 3:
                continue
            if kind[0] == "cgroup2" or (kind[0] == "cgroup" and "memory" in kind[2].split(",")):
                mounts.append((_ROOT / words[4].lstrip("/"), words[3], 2 if kind[0] == "cgroup2" else 1))
    default_mount = _ROOT / "sys/fs/cgroup"
    yield from mounts or [
        (default_mount, "/", 2),
        (default_mount / "unified", "/", 2),
        (default_mount / "memory", "/", 1),
    ]


def _groups() -> list[_Group]:
    """List the groups that limit the memory of this process: its own first, then those around it.

    Source: cgroups(7), /proc/self/cgroup; Linux's cgroup-v2.rst and cgroup-v1/memory.rst. A limit of any of them holds
    for all below.
    """
    paths: dict[int, str] = {}
    with suppress(OSError):
        for row in (_ROOT / "proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
            number, _, remainder = row.partition(":")
            controllers, _, path = remainder.partition(":")
            # `0::/PATH` is version 2, `4:memory:/PATH` version 1.
            if (number == "0" and not controllers) or "memory" in controllers.split(","):
                paths[1 if controllers else 2] = path
    groups = []
    for folder, mount_root, version in _hierarchies():
        # In a container the mount may show the container's own group, of which the process's path is told from outside.
        path = os.path.normpath(paths.get(version, "/"))
        below = (
            path.removeprefix(mount_root.rstrip("/")) if f"{path}/".startswith(f"{mount_root.rstrip('/')}/") else "/"
        )
        parts = [part for part in below.split("/") if part and part != ".."]
        # From the process's own group outwards.
        for depth in range(len(parts), -1, -1):
            inside = "/".join(parts[:depth])
            groups.append(_Group(folder / inside, f"{mount_root.rstrip('/')}/{inside}".rstrip("/") or "/", version))
    return groups


def machine_limit() -> MemoryLimit:
    """Read the memory limit of all processes together, and whose it is.

    The least of the machine's memory and of the limits of the control groups around this process: of a container, a
    SLURM job, a slice or service of systemd. Of equal ones the outermost is named.
    """
    limits = [MemoryLimit(psutil.virtual_memory().total)]
    # The outermost first: of equal limits `min` takes that.
    limits += [limit for group in reversed(_groups()) if (limit := group.limit) is not None]
    return min(limits, key=lambda limit: limit.num_bytes)


def memory_free_bytes() -> int:
    """Return the bytes that this process and its children may still take: the machine's, or of a group around it."""
    group_free_bytes = [free for group in _groups() if (free := group.free_bytes) is not None]
    return min([psutil.virtual_memory().available, *group_free_bytes])


def oom_kills() -> int | None:
    """Count the processes that the kernel has killed for memory, of the machine or of this process's control group.

    None where neither is told.

    Source: Linux's mm/oom_kill.c; /proc/vmstat, memory.events (version 2), memory.oom_control (version 1).
    """
    counts = [kills for group in _groups() if (kills := group.number(3, "oom_kill")) is not None]
    with suppress(OSError, ValueError, StopIteration):
        rows = (_ROOT / "proc/vmstat").read_text(encoding="ascii").splitlines()
        counts.append(int(next(row.split()[1] for row in rows if row.startswith("oom_kill "))))
    return sum(counts) if counts else None


def exhausted() -> MemoryLimit:
    """Return whose memory ran out, where the kernel has killed: of the group with the least limit, or of the machine.

    A group that never came near its limit has not run out.
    """
    common_limit = machine_limit()
    for group in reversed(_groups()):
        if group.limit == common_limit:
            peak_bytes = group.number(4)
            if peak_bytes is None or peak_bytes >= _NEAR * common_limit.num_bytes:
                return common_limit
    return MemoryLimit(psutil.virtual_memory().total)


def rank_limit(ranks: int) -> MemoryLimit:
    """Compute the memory limit of each rank: its share of the machine, job or container, or less by `ulimit -v`.

    `ulimit -v` limits the addresses that a process maps, of which this one has mapped some already.

    Args:
        ranks: on this machine, at least 1.
    """
    common_limit = machine_limit()
    share = common_limit._replace(num_bytes=common_limit.num_bytes // ranks)
    allowed = system_limit("RLIMIT_AS")
    if allowed is None:
        return share
    process_limit = MemoryLimit(max(0, allowed - psutil.Process().memory_info().vms), "ulimit")
    return min(share, process_limit, key=lambda limit: limit.num_bytes)


def share_words(code: str, ranks: int) -> str:
    """Name the limit of one rank, by the code of the limit that the ranks share."""
    words = words_of_limit(code)
    if ranks == 1 or code == "ulimit":
        return words
    return say(en=f"a rank's share of {words} ({ranks} ranks)", fr=f"{words}, part d’un rang ({ranks} rangs)")


def system_limit(name: str, *, hard: bool = False) -> int | None:
    """Read a limit of this process by its name in `resource`; None without a limit, or where the system has none."""
    try:
        import resource
    except ModuleNotFoundError:
        return None
    # (soft, hard), of which False takes the first.
    limit = resource.getrlimit(getattr(resource, name))[hard]
    return None if limit == resource.RLIM_INFINITY else limit


_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME")
"""Variables that name the network interface of gloo, of NCCL and of tensorpipe."""


def meet_on_loopback(environment: MutableMapping[str, str], *, always: bool = True) -> None:
    """Let processes of one machine meet on its loopback interface, whatever the environment names; in place.

    The machine's own name need not resolve, and what a user exports for jobs on several nodes (`ib0`) need not be here.

    Args:
        always: also where the interface that is named exists.
    """
    interfaces = psutil.net_if_addrs()
    if "lo" not in interfaces:
        return
    for name in _INTERFACES:
        interface = environment.get(name)
        # Without a name gloo resolves the machine's own, which may fail; NCCL and tensorpipe choose by themselves.
        if (always and (name == "GLOO_SOCKET_IFNAME" or interface)) or (
            interface and not _is_here(interface, interfaces)
        ):
            environment[name] = "lo"


def _is_here(interface_list: str, interfaces: Iterable[str]) -> bool:
    """Return whether a list of interfaces names one of this machine; NCCL takes prefixes, `=` and `^`."""
    words = interface_list.lstrip("^=").split(",")
    return interface_list.startswith("^") or any(
        interface.startswith(word) for word in words for interface in interfaces
    )


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
    # 32 MiB is the largest that glibc takes: larger blocks are mapped and unmapped one by one.
    return bool(mallopt(_M_MMAP_THRESHOLD, 32 << 20)) and bool(mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


@contextmanager
def c_output_discarded() -> Iterator[None]:
    """Discard what C code prints to standard output meanwhile.

    HiGHS prints a line of its debugging that no option turns off, which would stand in a JSON answer.
    """
    libc = ctypes.CDLL(None)
    sys.stdout.flush()
    # What C has buffered so far belongs to the output.
    libc.fflush(None)
    saved_stdout = os.dup(1)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    try:
        yield
    finally:
        libc.fflush(None)
        os.dup2(saved_stdout, 1)
        os.close(saved_stdout)


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


OLD_LOCK_S = 300.0


def stale_locks() -> list[Path]:
    """List the locks that are older than `OLD_LOCK_S` seconds and that no process holds, of this user's extensions.

    A build that was killed leaves its lock, a file named `lock`, behind; each later program that needs the extension
    (DeepSpeed's CPU Adam, for instance) then waits for ever, without a word.

    Source: torch 2.13, `torch/utils/file_baton.py`, and `_get_build_directory` of `torch/utils/cpp_extension.py`.
    """
    chosen_folder = os.environ.get("TORCH_EXTENSIONS_DIR", "")
    locks = extensions_folder().glob("*/lock" if chosen_folder else "*/*/lock")
    old = []
    for lock in locks:
        with suppress(OSError):  # its build has just ended
            if time.time() - lock.stat().st_mtime > OLD_LOCK_S:
                # Without links, as `open_files` names it.
                old.append(lock.resolve())
    open_paths = _open_files() if old else set()
    return sorted(lock for lock in old if str(lock) not in open_paths)


def extensions_folder() -> Path:
    """Return where torch keeps extensions; if nothing else is asked for, there is a folder for each Python beneath."""
    if chosen_folder := os.environ.get("TORCH_EXTENSIONS_DIR", ""):
        return Path(chosen_folder)
    if sys.platform == "darwin":
        return Path("~/Library/Caches/torch_extensions").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch_extensions"


def _open_files() -> set[str]:
    """List the files that processes have open, as far as this user may see: a build keeps its lock open."""
    paths = set[str]()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            paths.update(file.path for file in process.open_files())
    return paths


def remedy_of_locks(locks: Sequence[Path]) -> str:
    """Write what stale locks do, and the command that removes them."""
    remove = shlex.join(["rm", *map(str, locks)])
    return say(
        en="a build that was killed left a lock, on which every script waits for ever that needs this extension of "
        f"torch (DeepSpeed compiles some). Unless another machine is building it now: {remove}",
        fr="une compilation tuée a laissé un verrou, que tout script qui a besoin de cette extension de torch attend "
        f"sans fin (DeepSpeed en compile). Sauf si une autre machine la compile en ce moment : {remove}",
    )
