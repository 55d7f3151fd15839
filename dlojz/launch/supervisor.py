"""The launcher of one run: starts the ranks, stops them when asked or too late, and writes the record.

Layer 5. Invariant: however it ends, short of SIGKILL, a record is written and no process of the run is left; after
a SIGKILL no rank is left either, and the events tell the rest.

Run as `python -m dlojz.launch.supervisor RUN_FOLDER`, in a session of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from dlojz.config import RunConfig
from dlojz.launch.workers import STOP_GRACE_S, Outcome, load, run_ranks
from dlojz.record import EventLog, write_record
from dlojz.runs.assemble import assemble
from dlojz.runs.ending import Ending, classify
from dlojz.runs.logs import last_line, visible
from dlojz.runs.owner import Owner, read_owner
from dlojz.runs.state import CANCEL, EVENTS, LAUNCHER_EVENTS, RECORD, evidence_of, read_all_events, read_config
from dlojz.train.lifeline import adopt_orphans

Cause = Literal["cancelled", "timeout"]
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_POLL_S = 0.1
_log = logging.getLogger("dlojz.launcher")


class _Stop(BaseException):
    """A signal that came before torch's launcher took the signals over."""


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise _Stop(signal.Signals(number).name)


def _on_signals(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    for number in _SIGNALS:
        signal.signal(number, handler)


class Watch(threading.Thread):
    """Stops the launcher, by the signal that a person would send, on a cancel request or at the time limit."""

    def __init__(self, folder: Path, time_limit_s: float | None) -> None:
        super().__init__(daemon=True)
        self.cause: Cause | None = None
        self._request = folder / CANCEL
        self._deadline = None if time_limit_s is None else time.monotonic() + time_limit_s
        self._over = threading.Event()

    def run(self) -> None:
        """Look for a reason to stop until there is one, or the run is over."""
        while not self._over.wait(_POLL_S):
            if self._request.exists():
                self.cause = "cancelled"
            elif self._deadline is not None and time.monotonic() >= self._deadline:
                self.cause = "timeout"
            if self.cause:
                break
        # A library may swallow the exception that the first signal raises: repeat it.
        while not self._over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)
            self._over.wait(STOP_GRACE_S + 5)

    def stop(self) -> None:
        """The run is over: no signal is sent any more."""
        self._over.set()


def supervise(folder: Path) -> Ending:
    """Drive a run to its end and write its record."""
    started_s = time.monotonic()
    early: list[int] = []
    # Raised inside an import, an exception may be swallowed: until the imports are done, signals are only noted.
    _on_signals(lambda number, _: early.append(number))
    adopt_orphans()
    owner = _take_over(folder)
    config = read_config(folder)
    events = EventLog(folder / EVENTS / LAUNCHER_EVENTS)
    kills_before = _kernel_oom_kills()
    known = _drive(folder, config, owner, early)
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


def _drive(folder: Path, config: RunConfig, owner: Owner, early: list[int]) -> dict[str, Any]:
    """Run the ranks until they end or are stopped; returns what the launcher knows of their end."""
    watch = Watch(folder, owner.time_limit_s)
    outcome, problem = Outcome(), ""
    try:
        load()
        _on_signals(_raise_stop)
        if early:
            raise _Stop
        watch.start()
        outcome = run_ranks(folder, config.layout.world_size, config.device, owner.worker_module)
    except _Stop:
        outcome = Outcome(stopped=True)
    except Exception as error:
        _log.exception("the launcher failed")
        problem = last_line(visible(f"{type(error).__name__}: {error}"))
    finally:
        _on_signals(signal.SIG_IGN)
        watch.stop()
        kill_descendants()
    stopped_by: Cause | None = watch.cause or ("cancelled" if outcome.stopped else None)
    return {"stopped_by": stopped_by, "exit_codes": outcome.exit_codes, "launcher": problem}


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
