"""Who drives a run, and whether that process is still there: `launch.json`.

Layer 5. Invariant: from its birth a run folder names a process; a run whose process is gone is not running, and a
process number used again by another program is not taken for it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Literal, Self

import psutil
from pydantic import Field

from dlojz.record import write_atomic
from dlojz.runs.logs import MAX_FILE_BYTES, read_regular
from dlojz.schema import Contract, LabError

FILE_NAME = "launch.json"
DEFAULT_WORKER = "dlojz.train.worker"
MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
# Start times are computed from the machine's boot time, which moves when the clock is set.
_CLOCK_TOLERANCE_S = 2.0


class Owner(Contract):
    """The process that a run depends on: first the one that submits it, then its launcher."""

    schema_version: Literal[1] = 1
    pid: int = Field(ge=1)
    process_start_s: float = Field(ge=0, description="start of the process, seconds since 1970")
    host: str
    worker_module: str = Field(DEFAULT_WORKER, pattern=MODULE_PATTERN, description="what every rank runs")
    time_limit_s: float | None = Field(None, gt=0)
    submitted_utc: str = ""

    def handed_to(self, pid: int) -> Self:
        """The same request, driven by another process of this machine.

        Raises:
            psutil.NoSuchProcess: if there is no such process.
        """
        return type(self)(
            **{
                **self.to_dict(),
                "pid": pid,
                "process_start_s": psutil.Process(pid).create_time(),
                "host": socket.gethostname(),
            }
        )

    def write(self, folder: Path) -> None:
        """Write `launch.json`, whole or not at all."""
        write_atomic(folder / FILE_NAME, self.to_json())

    def is_alive(self, folder: Path) -> bool:
        """Whether the process that drives the run of this folder is still there; elsewhere it is believed to be."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if abs(process.create_time() - self.process_start_s) < _CLOCK_TOLERANCE_S:
                return True
            return any(argument.endswith(folder.name) for argument in process.cmdline())
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True


def this_process(worker_module: str, time_limit_s: float | None, submitted_utc: str) -> Owner:
    """The present process as owner of a run that it is about to submit."""
    return Owner(
        pid=os.getpid(),
        process_start_s=psutil.Process().create_time(),
        host=socket.gethostname(),
        worker_module=worker_module,
        time_limit_s=time_limit_s,
        submitted_utc=submitted_utc,
    )


def read_owner(folder: Path) -> Owner | None:
    """The owner that the run folder names; None where it names none that can be read."""
    try:
        return Owner.from_json(read_regular(folder / FILE_NAME, MAX_FILE_BYTES))
    except (OSError, LabError):
        return None
