"""Supervise a run on this machine: start its ranks, wait for them, end them, write its record.

The ranks meet through a file of the run folder, have no more threads than cores, and no variable of an enclosing SLURM
step that would give them another identity. A script sees the variables of `python train.py`, or on several processes
those of `torchrun`. On CPUs the launcher imports once what every rank needs, and forks, while it
has one thread and no process group: a rank then starts in milliseconds. Most launchers are themselves forked, by
`dlojz.processes.standby`. Where there may be a GPU every rank is a new Python process, since a CUDA driver does not
survive a fork.

However the launcher ends, short of SIGKILL, a record is written and no process of the run is left; after a SIGKILL no
rank is left either, and the record is rebuilt from the events.

Run as `python -m dlojz.running.supervisor RUN_FOLDER`, in a new session.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NoReturn

import psutil

from dlojz.base.language import say
from dlojz.base.machine import (
    PARENT_VARIABLE,
    adopt_orphans,
    cores_available,
    die_with_parent,
    exhausted,
    meet_on_loopback,
    oom_kills,
    system_limit,
)
from dlojz.config.run_config import RunConfig, Script
from dlojz.processes import start_rank as rank_process
from dlojz.processes.forks import fork
from dlojz.processes.script_environment import ProcessIdentity, as_torchrun, free_port
from dlojz.results.record import UNTRAINED, append_event, start_of
from dlojz.running.ending import Ending, classify
from dlojz.running.folder import DEFAULT_WORKER, Owner, last_line, read_owner, visible
from dlojz.running.state import (
    CANCEL,
    EVENTS,
    LAUNCHER_EVENTS,
    attempts_of,
    evidence_of,
    lasted_s,
    read_all_events,
    read_config,
    record_end,
)

STOP_GRACE_S = 6
INTERRUPT_GRACE_S = 15
"""Seconds that a script has to save what it has after Ctrl-C, before SIGTERM; torchrun gives 30 before SIGKILL."""
# Peers of a failed rank get SIGTERM at once and SIGKILL after the grace; only what ended before that is a cause.
_SAME_MOMENT_S = 5
_POLL_S = 0.05
_FOLDER_POLL_S = 1.0
_FOREIGN = ("SLURM_", "PMI_", "PMIX_", "OMPI_", "TORCHELASTIC_")
_IDENTITY = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
_STORE = "store"  # through which the ranks meet, see `dlojz.train.loop.init_process_group`
_GPU_DEVICES = ("nvidia*", "kfd", "dxg")
# The first optimizer of a process loads torch._dynamo, which takes as long as torch itself.
_COMMON = ("torch", "torch._dynamo", "idr_torch")
# Every ZeRO stage asks whether its optimizer is Muon, whose module brings torch's compiler.
_OF_DEEPSPEED = ("deepspeed", "deepspeed.runtime.zero.stage_1_and_2", "deepspeed.runtime.zero.stage3")
_OF_ZERO = ("deepspeed.runtime.zero.muon.muon_optimizer",)


@dataclass(frozen=True)
class LaunchOutcome:
    """Exit codes of the ranks that failed first (negative: signal), and whether the launcher was asked to stop.

    Args:
        codes_when_stopped: exit codes that are not 0 of ranks that were asked to end: none of them has failed.
    """

    exit_codes: Mapping[int, int] = field(default_factory=dict)
    stopped: bool = False
    codes_when_stopped: Mapping[int, int] = field(default_factory=dict, compare=False)


def prepare(
    environment: MutableMapping[str, str], processes: int, device: Literal["auto", "cpu", "cuda"], cores: int
) -> None:
    """Set the environment of the ranks, in place; before torch is imported, which reads some of it once."""
    for name in list(environment):
        if name.startswith(_FOREIGN) or name in _IDENTITY:
            del environment[name]
    # One core stands for one device, so that the throughput of several ranks compares with one rank on one core; more
    # threads are given where they are asked for and there are cores.
    share = max(1, cores // processes)
    threads_setting = environment.get("OMP_NUM_THREADS", "")
    environment["OMP_NUM_THREADS"] = str(
        min(share, int(threads_setting)) if threads_setting.isdecimal() and int(threads_setting) else 1
    )
    # Entries of torch's flight recorder, which `hang_diagnosis.last_calls` reads; without it the recorder may be off.
    environment["TORCH_FR_BUFFER_SIZE"] = "20000"
    environment["PYTHONUNBUFFERED"] = "1"
    # A crash in compiled code then prints the Python stack.
    environment["PYTHONFAULTHANDLER"] = "1"
    environment[PARENT_VARIABLE] = str(os.getpid())
    if device == "cpu":
        environment["DS_ACCELERATOR"] = "cpu"
    meet_on_loopback(environment)


def on_cpu(device: Literal["auto", "cpu", "cuda"], devices: Path = Path("/dev")) -> bool:
    """Return whether the ranks surely compute on CPUs, without torch, which might start a driver.

    Args:
        devices: folder of the system's device files.
    """
    if device == "auto":
        return not any(device_file for pattern in _GPU_DEVICES for device_file in devices.glob(pattern))
    return device == "cpu"


def run_ranks(folder: Path, config: RunConfig, worker_module: str, stop: Callable[[], bool]) -> LaunchOutcome:
    """Start the ranks and wait until all have ended, or one has failed (then the others are stopped).

    Args:
        worker_module: module that every rank runs.

    Raises:
        OSError: if a process cannot be started; those before it are left to the caller.
    """
    if config.script:
        return _run_script(folder, config, config.script, worker_module, stop)
    processes, cpu = config.layout.world_size, on_cpu(config.device)
    prepare(os.environ, processes, "cpu" if cpu else config.device, cores_available())
    python = _own_python(config)
    forked = cpu and sys.platform.startswith("linux") and python is None
    if forked and worker_module == DEFAULT_WORKER:
        load(config, stop)
    # The file of a former attempt would let the ranks meet processes that are gone.
    (folder / _STORE).unlink(missing_ok=True)
    gc.freeze()  # the ranks collect their own garbage only, and do not copy unchanged pages
    pids: dict[int, int] = {}
    try:
        for rank in range(processes):
            if stop():
                break
            become = partial(_become, folder, worker_module, rank, processes, forked, python or sys.executable)
            pids[rank] = fork(become, reset=_SIGNALS)
        return watch(pids, stop, partial(_note_halt, folder, pids))
    finally:
        with contextlib.suppress(OSError):
            (folder / _STORE).unlink(missing_ok=True)


def common_modules(config: RunConfig) -> list[str]:
    """Return the modules that every rank of a run imports and that are none of this package."""
    names = [*_COMMON]
    if config.layout.engine == "deepspeed":
        names += [*_OF_DEEPSPEED, *(_OF_ZERO if config.layout.zero else ())]
    return names


def load(config: RunConfig, stop: Callable[[], bool] = lambda: False) -> None:
    """Import what would take each rank seconds; none of it starts a thread or looks for a GPU."""
    names = [*common_modules(config), "dlojz.train.loop"]
    if config.library != "none":
        from dlojz.libraries.library_catalogue import LIBRARIES

        names += ["dlojz.libraries.watched_training", LIBRARIES[config.library].module]
    for name in names:
        if stop():
            return
        # The ranks report in their logs what cannot be imported.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def _own_python(config: RunConfig) -> str | None:
    """Return the interpreter of a library that has its own environment; None for this one."""
    if config.library == "none":
        return None  # without reading the catalogue of libraries
    from dlojz.libraries.library_catalogue import own_python

    python = own_python(config)
    return str(python) if python is not None else None


def _run_script(
    folder: Path, config: RunConfig, script: Script, worker_module: str, stop: Callable[[], bool]
) -> LaunchOutcome:
    """Start the processes of a script, or the launcher that was named, and wait until all have ended.

    Each of them has a process group of its own, as under torchrun.
    """
    processes = config.layout.world_size
    ProcessIdentity.taken_from(os.environ)
    plain = {**os.environ}  # of whoever asked for the run
    meet_on_loopback(plain, always=False)  # a launcher's interface is the user's choice, where it is here
    origin_s, port = time.perf_counter(), free_port()
    if config.device == "cpu":
        plain["DS_ACCELERATOR"] = "cpu"
    pids: dict[int, int] = {}
    for rank in range(processes):
        if stop():
            break
        if script.command:
            identity = ProcessIdentity(str(folder), None, 1, origin_s, script.command[0])
            # The command itself writes no events: its start is noted for it.
            append_event(folder / EVENTS / "rank-0.jsonl", "start", **start_of(0, 1), pid=os.getpid())
            become = partial(_become_launcher, folder, script, identity.put_with_hook(plain))
        else:
            # A single process counts from here; several compare their clocks instead.
            identity = ProcessIdentity(str(folder), rank, processes, None if processes > 1 else origin_s)
            launched = as_torchrun(rank, processes, port, folder.name, plain) if script.launched else {}
            environment = {**plain, **launched}
            become = partial(_become_script, folder, worker_module, rank, identity.put_into(environment))
        pids[rank] = fork(become, reset=_SIGNALS)
    outcome = watch(pids, stop, partial(_note_halt, folder, pids), asks_first=True)
    for rank, code in {**outcome.exit_codes, **outcome.codes_when_stopped}.items():
        append_event(folder / EVENTS / LAUNCHER_EVENTS, "exit", rank=rank, code=code)
    ended_well = script.command and not outcome.exit_codes and not outcome.stopped
    if ended_well and not any((folder / EVENTS).glob("child-*.jsonl")):
        append_event(folder / EVENTS / "rank-0.jsonl", UNTRAINED, reason=f"rank 0: {_nothing_trained(script)}")
    return outcome


def _nothing_trained(script: Script) -> str:
    """Say that no process of a launcher's has trained."""
    words = shlex.join(script.command)
    return say(
        en=f"`{words}` ended, and no process that it started was seen to make a step of an optimizer, so that nothing "
        "was measured.",
        fr=f"`{words}` s’est terminé, et aucun processus qu’il a lancé n’a été vu faire un pas d’optimiseur : rien n’a "
        "donc été mesuré.",
    )


def _become_script(folder: Path, worker_module: str, rank: int, environment: Mapping[str, str]) -> NoReturn:
    """Become a process of the script, in the child."""
    try:
        # A session and process group per rank: `watch` sends SIGINT to the whole group.
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        # -P: a student's random.py in the current folder must not shadow the standard library's.
        words = [sys.executable, "-P", "-m", rank_process.__name__, str(folder), worker_module, str(rank)]
        os.execve(sys.executable, words, {**environment, PARENT_VARIABLE: str(os.getppid())})
    finally:  # only where execve failed: the child must not run on in the parent's code
        os._exit(1)


def _become_launcher(folder: Path, script: Script, environment: Mapping[str, str]) -> NoReturn:
    """Become the launcher that the user has named, in the child; what it prints is the log of rank 0."""
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        die_with_parent()
        rank_process.print_into(folder, 0)
        if script.folder:
            os.chdir(script.folder)
        os.execvpe(script.command[0], script.command, environment)
    finally:
        os._exit(1)


def _become(folder: Path, worker_module: str, rank: int, processes: int, forked: bool, python: str) -> NoReturn:
    """Become the rank, in the child."""
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


def _note_halt(folder: Path, pids: Mapping[int, int], rank: int, event: str) -> None:
    """Write for whoever watches that a rank was stopped, or goes on."""
    append_event(folder / EVENTS / LAUNCHER_EVENTS, event, rank=rank, pid=pids[rank])


def watch(
    pids: Mapping[int, int],
    stop: Callable[[], bool],
    on_halt: Callable[[int, str], object] = lambda *_: None,
    *,
    asks_first: bool = False,
) -> LaunchOutcome:
    """Wait for the ranks; once one has failed, or on request, end all: SIGTERM, SIGKILL after `STOP_GRACE_S` seconds.

    Args:
        pids: process number of each rank, children of this process.
        on_halt: called with a rank and `stopped` or `continued`, by SIGSTOP and SIGCONT.
        asks_first: on request, SIGINT comes first, to the whole process group of each rank as from a terminal, and
            SIGTERM after `INTERRUPT_GRACE_S` seconds: a script may save what it has.
    """
    running_pids, codes = dict(pids), dict[int, int]()
    stopped, asked_s, term_s, killed = False, 0.0, 0.0, False  # the moments of SIGINT and SIGTERM; 0.0 before
    grace_s = INTERRUPT_GRACE_S if asks_first else 0
    while running_pids:
        for rank, pid in list(running_pids.items()):
            changed, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
            if changed and (os.WIFSTOPPED(status) or os.WIFCONTINUED(status)):
                on_halt(rank, "stopped" if os.WIFSTOPPED(status) else "continued")
            elif changed:
                del running_pids[rank]
                code = os.waitstatus_to_exitcode(status)
                if code and (not term_s or time.monotonic() - term_s < _SAME_MOMENT_S):
                    codes[rank] = code
        if not term_s:
            stopped = stop()
            if stopped and asks_first and not codes and not asked_s:
                asked_s = time.monotonic()
                for pid in running_pids.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGINT)
            # A rank has failed, or its time after SIGINT is over (0 s where no SIGINT is sent).
            elif (codes and not asked_s) or (stopped and time.monotonic() - asked_s >= grace_s):
                term_s = time.monotonic()
                _send(running_pids, signal.SIGTERM)
        elif not killed and time.monotonic() - term_s >= STOP_GRACE_S:
            killed = True
            _send(running_pids, signal.SIGKILL)
        if running_pids:
            time.sleep(_POLL_S)
    # A rank that the launcher stopped did not fail.
    return LaunchOutcome(stopped=True, codes_when_stopped=codes) if stopped or not pids else LaunchOutcome(codes)


def _send(pids: Mapping[int, int], number: signal.Signals) -> None:
    """Send a signal to ranks that have not been waited for, so that their numbers are still theirs."""
    for pid in pids.values():
        os.kill(pid, number)


Cause = Literal["cancelled", "timeout", "removed"]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_log = logging.getLogger("dlojz.launcher")


class Stop:
    """Stop request of a run: a signal, a cancel request, the time limit, or a run folder that was removed or moved.

    It is polled and never raised, since an exception within an import may be swallowed.
    """

    def __init__(self, folder: Path) -> None:
        self.cause: Cause | None = None
        self._folder = folder
        self._request = folder / CANCEL
        self._deadline_s = math.inf
        self._opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # which stays the run's, wherever it is moved
        self._look_s = time.monotonic() + _FOLDER_POLL_S
        self._missed = False

    def present_folder(self) -> Path:
        """Return where the folder of the run is now, if that is known; else where it was."""
        try:
            present_path = Path(f"/proc/self/fd/{self._opened}").readlink()
            # Of a removed folder /proc says `… (deleted)`: nothing is found there.
            return present_path if os.path.samestat(present_path.stat(), os.fstat(self._opened)) else self._folder
        except OSError:
            return self._folder

    def _is_gone(self) -> bool:
        """Return whether the folder was not there at two looks; one may miss it on a network file system."""
        if time.monotonic() < self._look_s:
            return False
        self._look_s = time.monotonic() + _FOLDER_POLL_S
        missed, self._missed = self._missed, False
        try:
            self._missed = not os.path.samestat(self._folder.stat(), os.fstat(self._opened))
        except FileNotFoundError:
            self._missed = True
        except OSError:  # a file system that does not answer
            return False
        return missed and self._missed

    def limit(self, time_limit_s: float | None) -> None:
        """Set the time limit, counted from now; None for none."""
        self._deadline_s = math.inf if time_limit_s is None else time.monotonic() + time_limit_s

    def note(self, number: int, frame: FrameType | None) -> None:
        """Note a signal, as its handler."""
        self.cause = self.cause or "cancelled"

    def __call__(self) -> bool:
        """Return whether the run is to end."""
        # Unlike Path.exists it is False where a file system does not answer.
        if self.cause is None and os.path.exists(self._request):  # noqa: PTH110
            self.cause = "cancelled"
        if self.cause is None and time.monotonic() >= self._deadline_s:
            self.cause = "timeout"
        if self.cause is None and self._is_gone():
            self.cause = "removed"
        return self.cause is not None


def _on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


def supervise(folder: Path) -> Ending:
    """Run the ranks to their end and write the record."""
    started_s = time.monotonic()
    stop = Stop(folder)
    _on_signals(stop.note)
    adopt_orphans()
    owner = _take_over(folder)
    stop.limit(owner.time_limit_s)
    config = read_config(folder)
    (folder / EVENTS / LAUNCHER_EVENTS).touch()
    # Compared with the counter afterwards: has the kernel killed for lack of memory meanwhile?
    kills_before = oom_kills()
    earlier_s = lasted_s(attempts_of(read_all_events(folder))) or 0.0  # of a run that goes on from a checkpoint
    launcher_facts = _drive(folder, config, owner, stop)
    folder = stop.present_folder()
    events = read_all_events(folder)
    ending = classify(
        evidence_of(
            events,
            folder,
            config,
            **_memory_evidence(kills_before),
            cpu_limit_s=system_limit("RLIMIT_CPU", hard=True),
            time_limit_s=owner.time_limit_s,
            torch_debug=debug if (debug := os.environ.get("TORCH_DISTRIBUTED_DEBUG", "")) == "DETAIL" else "",
            **launcher_facts,
        )
    )
    elapsed_s = earlier_s + time.monotonic() - started_s
    _log.info("%s %s", ending.status, ending.reason)
    try:
        record_end(folder, config, events, ending, elapsed_s)
    except OSError as error:
        _log.error("the record cannot be written: %s", error)
    return ending


def _drive(folder: Path, config: RunConfig, owner: Owner, stop: Stop) -> dict[str, Any]:
    """Run the ranks until they end or are stopped; return the launcher's evidence of their end."""
    outcome, problem = LaunchOutcome(), ""
    try:
        outcome = run_ranks(folder, config, owner.worker_module, stop)
    except Exception as error:
        _log.exception("the launcher failed")
        problem = last_line(visible(f"{type(error).__name__}: {error}"))
    finally:
        # A signal from here on must not cut the cleaning up short.
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


def kill_descendants(pid: int | None = None) -> None:
    """Kill every process that descends from one that adopts orphans (`adopt_orphans`), by default this one."""
    me = psutil.Process(pid)
    for _ in range(50):  # a process may start another while it is being killed
        children = [child for child in me.children(recursive=True) if _runs(child)]
        if not children:
            return
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=1)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _memory_evidence(kills_before: int | None) -> dict[str, Any]:
    """Return whether the kernel has killed a process for memory since (None: not known), and whose memory ran out."""
    kills = oom_kills()
    killed_for_memory = None if kills is None or kills_before is None else kills > kills_before
    return {"kernel_oom": killed_for_memory, "memory_of": exhausted().english}


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    supervise(Path(sys.argv[1]))
