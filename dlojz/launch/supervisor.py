"""The launcher of one run: starts the ranks, stops them when asked or too late, and writes the record.

Layer 5. Invariant: however it ends, short of SIGKILL, a record is written and no process of the run is left; after
a SIGKILL no rank is left either, and the events tell the rest.

Run as `python -m dlojz.launch.supervisor RUN_FOLDER`, in a session of its own.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import psutil

from dlojz.config import RunConfig
from dlojz.launch.workers import Outcome, run_ranks
from dlojz.record import EventLog, write_record
from dlojz.runs.assemble import assemble
from dlojz.runs.ending import Ending, classify
from dlojz.runs.logs import last_line, visible
from dlojz.runs.owner import Owner, read_owner
from dlojz.runs.state import CANCEL, EVENTS, LAUNCHER_EVENTS, RECORD, evidence_of, read_all_events, read_config
from dlojz.train.lifeline import adopt_orphans

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
    outcome, problem = Outcome(), ""
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
