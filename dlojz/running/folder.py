"""Files of a run's folder: its owner (`launch.json`), its job (`job.json`), its logs.

The owner is the process that the run depends on: once it is gone the run is not running, and another program with the
same process number is not taken for it. The job is named before it exists, so that after a crash it is found by name.
Text of a log never moves a cursor, hides a character or fills a notebook.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import unicodedata
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal, Self

import psutil
from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic

MAX_LOG_BYTES = 64 * 1024
MAX_FILE_BYTES = 1024 * 1024
"""More than any of the small files of a run's folder has."""
_MAX_LINE_CHARS = 300
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
"""Sequences that set colours and weights of letters (ECMA-48, SGR)."""


def visible(text: str) -> str:
    """Escape every control or direction-changing character of a text, but for line ends and tabs; leave colours out.

    Example:
        >>> visible("\\x1b[31m50%\\r100%\\x1b[0m\\x07")
        '50%\\\\r100%\\\\x07'
    """
    text = _COLOURS.sub("", text.replace("\r\n", "\n"))
    # Cc: control; Cf: format, among them changes of direction; Cs, Co: surrogates, private use; Zl, Zp: separators.
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def open_regular(path: Path) -> BinaryIO | None:
    """Open a regular file for reading; None where there is none, or only a link, a folder or a pipe."""
    try:
        return _opened(path)
    except OSError:
        return None


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a whole regular file; a pipe or an endless file would be waited for without end.

    Raises:
        OSError: if there is none, it is a link, a folder or a pipe, or has more than `most_bytes` bytes.
    """
    with _opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def _opened(path: Path) -> BinaryIO:
    # O_NOFOLLOW refuses a link; with O_NONBLOCK, opening a pipe does not wait for somebody who writes into it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_tail(path: Path, limit_bytes: int = MAX_LOG_BYTES) -> str:
    """Read the end of a regular file, escaped and at most `limit_bytes` long; empty where there is none, or a link."""
    file = open_regular(path)
    if file is None:
        return ""
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit_bytes))
        text = visible(file.read(limit_bytes).decode("utf-8", errors="replace"))
    # Escapes are longer than what they stand for.
    return text[-limit_bytes:]


def last_line(text: str) -> str:
    """Return the last line that is not blank, shortened to 300 characters."""
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}…"


def launched_utc(run_id: str) -> datetime | None:
    """Parse the time at which a run was first asked for from its name; None where it has none."""
    try:
        # A name begins with 15 characters such as 20260131-235959.
        return datetime.strptime(run_id[:15], "%Y%m%d-%H%M%S").replace(tzinfo=UTC)
    except ValueError:
        return None


OWNER_FILE = "launch.json"
DEFAULT_WORKER = "dlojz.running.worker"
MODULE_PATTERN = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*$"
# Start times are computed from the machine's boot time, which moves when the clock is set.
_CLOCK_TOLERANCE_S = 2.0


class Owner(Contract):
    """Process that a run depends on: first the one that submits it, then its launcher."""

    schema_version: Literal[1] = 1
    pid: int = Field(ge=1)
    process_start_s: float = Field(ge=0, description="start of the process, seconds since 1970")
    host: str
    worker_module: str = Field(DEFAULT_WORKER, pattern=MODULE_PATTERN, description="what every rank runs")
    time_limit_s: float | None = Field(None, gt=0)
    submitted_utc: str = ""

    def handed_to(self, pid: int) -> Self:
        """Return the same request, driven by another process of this machine.

        Raises:
            psutil.NoSuchProcess: if there is no such process.
        """
        start_s = psutil.Process(pid).create_time()
        return self.model_copy(update={"pid": pid, "process_start_s": start_s, "host": socket.gethostname()})

    def write(self, folder: Path) -> None:
        """Write `launch.json`, whole or not at all."""
        write_atomic(folder / OWNER_FILE, self.to_json())

    def is_alive(self, folder: Path) -> bool:
        """Return whether the process of this folder's run still exists; on another machine it is assumed to."""
        if self.host != socket.gethostname():
            return True
        try:
            process = psutil.Process(self.pid)
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            if abs(process.create_time() - self.process_start_s) < _CLOCK_TOLERANCE_S:
                return True
            # The clock was set meanwhile: the start has moved, but the command line still ends with the run's folder.
            return any(argument.endswith(folder.name) for argument in process.cmdline())
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            return True

    def is_stopped(self, folder: Path) -> bool:
        """Return whether the process is on this machine and a signal such as SIGSTOP has stopped it."""
        if self.host != socket.gethostname() or not self.is_alive(folder):
            return False
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:
            return False


def this_process(worker_module: str, time_limit_s: float | None, submitted_utc: str) -> Owner:
    """Return the present process as owner of a run that it is about to submit."""
    return Owner(
        pid=os.getpid(),
        process_start_s=psutil.Process().create_time(),
        host=socket.gethostname(),
        worker_module=worker_module,
        time_limit_s=time_limit_s,
        submitted_utc=submitted_utc,
    )


def read_owner(folder: Path) -> Owner | None:
    """Read `launch.json`; None where it cannot be read."""
    try:
        return Owner.from_json(read_regular(folder / OWNER_FILE, MAX_FILE_BYTES))
    except (OSError, LabError):
        return None


JOB_FILE = "job.json"


class Job(Contract):
    """Job of a run.

    Its name and its comment are the run's id: unique, and without a character that a shell would interpret.
    """

    schema_version: Literal[1] = 1
    machine: str = Field(description="name of the machine file")
    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$", description="of the job; the run's id, or its sweep's")
    job_id: str = Field("", pattern=r"^\d{0,18}$", description="the scheduler's number; empty while it is not known")
    array_task: int | None = Field(None, ge=0, description="index in the job array of a sweep")
    submitted_utc: str = Field("", description="when the scheduler was asked; empty before")

    @property
    def number(self) -> str:
        """Number as the scheduler writes it: `12`, or `12_3` for a task of an array."""
        return f"{self.job_id}_{self.array_task}" if self.job_id and self.array_task is not None else self.job_id

    def write(self, folder: Path) -> None:
        """Write `job.json`, whole or not at all."""
        write_atomic(folder / JOB_FILE, self.to_json())


def read_job(folder: Path) -> Job | None:
    """Read `job.json`; None where it cannot be read."""
    try:
        return Job.from_json(read_regular(folder / JOB_FILE, MAX_FILE_BYTES))
    except (OSError, LabError):
        return None
