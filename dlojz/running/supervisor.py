"""Supervise a run: start its ranks, wait for them, end them, write its record.

The ranks of a run on this machine: started, watched, and stopped together.

No port (the ranks meet through a file of the run folder), no restart, no more threads than cores, and no variable of an
enclosing SLURM step that would give the ranks another identity.

On CPUs the launcher imports once what every rank needs, and forks: a rank then starts in milliseconds. It forks while
it has one thread and no process group. Where there may be a GPU every rank is a Python of its own, since a CUDA driver
does not survive a fork.

The launcher of one run: starts the ranks, stops them when asked or too late, and writes the record.

However it ends, short of SIGKILL, a record is written and no process of the run is left; after a SIGKILL no rank is
left either, and the events tell the rest.

Run as `python -m dlojz.running.supervisor RUN_FOLDER`, in a session of its own.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import psutil

from dlojz.base.machine import PARENT_VARIABLE, adopt_orphans
from dlojz.config.run_config import RunConfig
from dlojz.processes import start_rank as rank_process
from dlojz.processes.forks import fork
from dlojz.results.record import EventLog, write_record
from dlojz.running.ending import Ending, classify
from dlojz.running.folder import DEFAULT_WORKER, Owner, last_line, read_owner, visible
from dlojz.running.state import (
    CANCEL,
    EVENTS,
    LAUNCHER_EVENTS,
    RECORD,
    assemble,
    evidence_of,
    read_all_events,
    read_config,
)

STOP_GRACE_S = 6
# Peers of a failed rank get SIGTERM at once and SIGKILL after the grace; only what ended before that is a cause.
_SAME_MOMENT_S = 5
_POLL_S = 0.05
_FOREIGN = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
_IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_STORE = "store"  # through which the ranks meet, see `dlojz.train.loop.init_process_group`
_GPU_DEVICES = ("nvidia*", "kfd", "dxg")
# The first optimizer of a process loads torch._dynamo, which takes as long as torch itself.
_COMMON = ("torch", "torch._dynamo", "idr_torch", "dlojz.train.loop")
_OF_DATA = {"digits": ("sklearn.datasets",)}
# Every ZeRO stage asks whether its optimizer is Muon, whose module brings torch's compiler.
_OF_DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3")
_OF_ZERO = ("deepspeed.runtime.zero.muon.muon_optimizer",)


@dataclass(frozen=True)
class LaunchOutcome:
    """Exit codes of the ranks that failed first (negative: signal), and whether the launcher was told to stop."""

    exit_codes: Mapping[int, int] = field(default_factory=dict)
    stopped: bool = False


def prepare(
    environment: MutableMapping[str, str], processes: int, device: Literal["auto", "cpu", "cuda"], cores: int
) -> None:
    """Set what the ranks inherit, in place; before torch is imported, which reads some of it once."""
    for name in list(environment):
        if name.startswith(_FOREIGN) or name in _IDENTITY:
            del environment[name]
    # One core stands for one device: one rank on one core is then what the throughput of several is compared with. Who
    # asks for more threads gets them, as far as there are cores.
    share = max(1, cores // processes)
    given = environment.get("OMP_NUM_THREADS", "")
    environment["OMP_NUM_THREADS"] = str(min(share, int(given)) if given.isdecimal() and int(given) else 1)
    environment["TORCH_FR_BUFFER_SIZE"] = "20000"
    environment["PYTHONUNBUFFERED"] = "1"
    environment["PYTHONFAULTHANDLER"] = "1"
    environment[PARENT_VARIABLE] = str(os.getpid())
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    if "lo" in psutil.net_if_addrs():
        # The machine's own name need not resolve for processes of one machine to meet.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


def cores_available() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def on_cpu(device: Literal["auto", "cpu", "cuda"], devices: Path = Path("/dev")) -> bool:
    """Whether the ranks surely compute on CPUs; told without torch, which might wake a driver.

    Args:
        device: as the configuration asks.
        devices: folder of the system's device files.
    """
    if device == "auto":
        return not any(found for pattern in _GPU_DEVICES for found in devices.glob(pattern))
    return device == "cpu"


def run_ranks(folder: Path, config: RunConfig, worker_module: str, stop: Callable[[], bool]) -> LaunchOutcome:
    """Start the ranks and wait until all have ended, or one has failed (then the others are stopped).

    Args:
        folder: the run's.
        config: what is run.
        worker_module: what every rank runs.
        stop: asked again and again whether somebody wants the run to end.

    Raises:
        OSError: if a process cannot be started; those before it are left to the caller.
    """
    processes, cpu = config.layout.world_size, on_cpu(config.device)
    prepare(os.environ, processes, "cpu" if cpu else config.device, cores_available())
    python = _own_python(config)
    forked = cpu and sys.platform.startswith("linux") and python is None
    if forked and worker_module == DEFAULT_WORKER:
        load(config, stop)
    (folder / _STORE).unlink(missing_ok=True)
    gc.freeze()  # the ranks collect their own garbage only, and do not copy the pages of what they never change
    pids: dict[int, int] = {}
    try:
        for rank in range(processes):
            if stop():
                break
            pids[rank] = _start(folder, worker_module, rank, processes, forked, python or sys.executable)
        return watch(pids, stop)
    finally:
        with contextlib.suppress(OSError):
            (folder / _STORE).unlink(missing_ok=True)


def load(config: RunConfig, stop: Callable[[], bool] = lambda: False) -> None:
    """Import what would take each rank seconds; none of it starts a thread or asks for a GPU.

    Args:
        config: what is run.
        stop: whether somebody wants it to end; asked before every import.
    """
    names = [*_COMMON, *_OF_DATA.get(config.data_name, ())]
    if config.layout.engine == "deepspeed":
        names += [*_OF_DEEPSPEED, *(_OF_ZERO if config.layout.zero else ())]
    if config.library != "none":
        from dlojz.libraries.library_catalogue import LIBRARIES

        names += ["dlojz.libraries.watched_training", LIBRARIES[config.library].module]
    for name in names:
        if stop():
            return
        # What cannot be imported is for the ranks to tell, in their logs.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _own_python(config: RunConfig) -> str | None:
    """The interpreter of a library that has an environment of its own; None where this one is meant."""
    if config.library == "none":
        return None  # the catalogue of libraries is not read for nothing
    from dlojz.libraries.library_catalogue import own_python

    python = own_python(config)
    return str(python) if python is not None else None


def _start(folder: Path, worker_module: str, rank: int, processes: int, forked: bool, python: str) -> int:
    """Start one rank; returns its process number."""
    return fork(
        lambda: _become(folder, worker_module, rank, processes, forked, python),
        reset=(signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGINT),
    )


def _become(folder: Path, worker_module: str, rank: int, processes: int, forked: bool, python: str) -> NoReturn:
    """In the child: nothing of the launcher's but what it has imported."""
    try:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(processes),
            LOCAL_WORLD_SIZE=str(processes),
            TORCHELASTIC_RUN_ID=folder.name,  # by which idr_torch knows that these variables are the ranks'
        )
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if forked:
            rank_process.fork_main(str(folder), worker_module)
        # -P: a student's random.py in the current folder must not shadow the standard library's.
        os.execv(python, [python, "-P", "-m", rank_process.__name__, str(folder), worker_module])
    finally:
        os._exit(1)


def watch(pids: Mapping[int, int], stop: Callable[[], bool]) -> LaunchOutcome:
    """Wait for the ranks; once one has failed, or somebody wants it, end all: SIGTERM, SIGKILL after `STOP_GRACE_S`.

    Args:
        pids: process number of each rank, children of this process.
        stop: whether somebody wants the run to end.
    """
    left, codes = dict(pids), dict[int, int]()
    stopped, term_s, killed = False, 0.0, False
    while left:
        for rank, pid in list(left.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del left[rank]
                code = os.waitstatus_to_exitcode(status)
                if code and (not term_s or time.monotonic() - term_s < _SAME_MOMENT_S):
                    codes[rank] = code
        if not term_s:
            stopped = stop()
            if codes or stopped:
                term_s = time.monotonic()
                _send(left, signal.SIGTERM)
        elif not killed and time.monotonic() - term_s >= STOP_GRACE_S:
            killed = True
            _send(left, signal.SIGKILL)
        if left:
            time.sleep(_POLL_S)
    # Whom the launcher stopped did not fail.
    return LaunchOutcome(stopped=True) if stopped or not pids else LaunchOutcome(codes)


def _send(pids: Mapping[int, int], number: signal.Signals) -> None:
    """To ranks that have not been waited for, whose numbers are therefore still theirs."""
    for pid in pids.values():
        os.kill(pid, number)


Cause = Literal["cancelled", "timeout"]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_log = logging.getLogger("dlojz.launcher")


class Stop:
    """Whether somebody wants the run to end: a signal that a person sends, a cancel request, or the time limit.

    Nothing is raised, since an exception within an import may be swallowed: the reason is noted, and asked for.

    Args:
        folder: the run's.
    """

    def __init__(self, folder: Path) -> None:
        self.cause: Cause | None = None
        self._request = folder / CANCEL
        self._deadline_s = math.inf

    def limit(self, time_limit_s: float | None) -> None:
        """Let the time end after so many seconds from now on; None for never."""
        self._deadline_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal has come."""
        self.cause = self.cause or "cancelled"

    def __call__(self) -> bool:
        """Look for a reason, until there is one."""
        # Unlike Path.exists it is False where a file system does not answer.
        if self.cause is None and os.path.exists(self._request):  # noqa: PTH110
            self.cause = "cancelled"
        if self.cause is None and time.monotonic() >= self._deadline_s:
            self.cause = "timeout"
        return self.cause is not None


def _on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


def supervise(folder: Path) -> Ending:
    """Drive a run to its end and write its record."""
    started_s = time.monotonic()
    stop = Stop(folder)
    _on_signals(stop.note)
    adopt_orphans()
    owner = _take_over(folder)
    stop.limit(owner.time_limit_s)
    config = read_config(folder)
    events = EventLog(folder / EVENTS / LAUNCHER_EVENTS)
    kills_before = _kernel_oom_kills()
    known = _drive(folder, config, owner, stop)
    told = read_all_events(folder)
    ending = classify(
        evidence_of(
            told,
            folder,
            config.layout.world_size,
            kernel_oom=_kernel_oom_kills() > kills_before,
            time_limit_s=owner.time_limit_s,
            **known,
        )
    )
    elapsed_s = time.monotonic() - started_s
    _log.info("%s %s", ending.status, ending.reason)
    # Kept beside the record: should that be damaged one day, the cause is still known.
    with contextlib.suppress(OSError):
        events.write("end", status=ending.status, reason=ending.reason)
        events.close()
    try:
        write_record(folder / RECORD, assemble(folder.name, config, told, ending, elapsed_s))
    except OSError as error:
        _log.error("the record cannot be written: %s", error)
    return ending


def _drive(folder: Path, config: RunConfig, owner: Owner, stop: Stop) -> dict[str, Any]:
    """Run the ranks until they end or are stopped; returns what the launcher knows of their end."""
    outcome, problem = LaunchOutcome(), ""
    try:
        outcome = run_ranks(folder, config, owner.worker_module, stop)
    except Exception as error:
        _log.exception("the launcher failed")
        problem = last_line(visible(f"{type(error).__name__}: {error}"))
    finally:
        _on_signals(signal.SIG_IGN)
        kill_descendants()
    return {
        "stopped_by": stop.cause if outcome.stopped else None,
        "exit_codes": outcome.exit_codes,
        "launcher": problem,
    }


def _take_over(folder: Path) -> Owner:
    owner = read_owner(folder)
    if owner is None:
        raise SystemExit(f"{folder} is no run folder: it has no readable launch.json.")
    owner = owner.handed_to(os.getpid())
    with contextlib.suppress(OSError):
        owner.write(folder)
    return owner


def kill_descendants() -> None:
    """Kill every process that descends from this one, helpers of dead ranks included."""
    me = psutil.Process()
    for _ in range(50):  # a process may start another while it is being killed
        left = [child for child in me.children(recursive=True) if _runs(child)]
        if not left:
            return
        for child in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(left, timeout=1)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _kernel_oom_kills() -> int:
    """Processes that this machine's kernel has killed for memory since it started; 0 where it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    supervise(Path(sys.argv[1]))
