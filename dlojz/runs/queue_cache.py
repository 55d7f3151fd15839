"""The last answer of the scheduler, shared by all processes of a user: one small file, and when to ask again.

Layer 5. Invariant: however many notebooks look, the scheduler is asked at most once per interval, and less and less
often while it does not answer; a file that is not ours, or is damaged, is as good as none.

sbatch(1), section PERFORMANCE: "Do not run sbatch or other Slurm client commands … from loops".
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dlojz.record import write_atomic
from dlojz.runs.logs import open_regular
from dlojz.runs.squeue import Listed
from dlojz.schema import LabError, parse_json

INTERVAL_VARIABLE = "DLOJZ_QUEUE_INTERVAL_S"
"""Environment variable: seconds between two questions instead of 10; for tests on a cluster of one's own."""
INTERVAL_S, LONGEST_S = 10.0, 300.0
ACCOUNTING_AGAIN_S, NO_ACCOUNTING_S = 60.0, 86_400.0
MOST_ENDINGS = 500
MAX_BYTES = 4 * 2**20
_UNANSWERED = ""


@dataclass(frozen=True)
class Cached:
    """What is known of the queue. Times are seconds since 1970.

    Args:
        asked_s: when the scheduler last answered; 0 if it never did.
        tried_s: when it was last asked.
        failures: questions without an answer since then.
        problem: why the last one had none, in the scheduler's words.
        jobs: the last answer.
        endings: how jobs ended that the scheduler has told of once, the oldest first; it forgets them soon.
        no_accounting_s: when sacct last said that there is none; 0 where it has not.
        accounted_s: by job, when sacct was last asked for it.
    """

    asked_s: float = 0.0
    tried_s: float = 0.0
    failures: int = 0
    problem: str = ""
    jobs: tuple[Listed, ...] = ()
    endings: tuple[Listed, ...] = ()
    no_accounting_s: float = 0.0
    accounted_s: dict[str, float] = field(default_factory=dict)

    def due(self, now_s: float) -> bool:
        """Whether the scheduler may be asked again."""
        waited_s = now_s - self.tried_s
        return waited_s >= self.wait_s or waited_s < 0  # the clock was set back

    @property
    def wait_s(self) -> float:
        """Seconds to leave between two questions: 10, then 10, 20, 40 … 300 while there is no answer."""
        return min(LONGEST_S, interval_s() * 2.0 ** min(10, max(0, self.failures - 1)))

    def answered(self, now_s: float, jobs: list[Listed]) -> Cached:
        """After an answer: what has ended is kept, what is queued again has not ended."""
        numbers = {job.number for job in jobs}
        kept = [job for job in self.endings if job.number not in numbers]
        kept += [job for job in jobs if job.standing == "ended"]
        return replace(
            self,
            asked_s=now_s,
            tried_s=now_s,
            failures=0,
            problem="",
            jobs=tuple(jobs),
            endings=tuple(kept[-MOST_ENDINGS:]),
        )

    def unanswered(self, now_s: float, problem: str) -> Cached:
        """After a question without an answer: all that was known stays."""
        return replace(self, tried_s=now_s, failures=self.failures + 1, problem=problem)

    def may_account(self, number: str, now_s: float) -> bool:
        """Whether sacct may be asked about a job."""
        if self.no_accounting_s and 0 <= now_s - self.no_accounting_s < NO_ACCOUNTING_S:
            return False
        lately = (self.accounted_s.get(key, -math.inf) for key in (number, _UNANSWERED))
        return not any(0 <= now_s - asked_s < ACCOUNTING_AGAIN_S for asked_s in lately)

    def accounted(self, now_s: float, number: str, found: list[Listed]) -> Cached:
        """After sacct has answered about a job."""
        known = {job.number for job in found}
        asked = dict(list({**self.accounted_s, number: now_s}.items())[-MOST_ENDINGS:])
        ended = [job for job in found if job.standing == "ended"]
        endings = (*(job for job in self.endings if job.number not in known), *ended)
        return replace(self, endings=endings[-MOST_ENDINGS:], accounted_s=asked)

    def unaccounted(self, now_s: float, *, for_good: bool) -> Cached:
        """After a question to sacct without an answer: because there is no accounting, or for the moment."""
        if for_good:
            return replace(self, no_accounting_s=now_s)
        return replace(self, accounted_s={**self.accounted_s, _UNANSWERED: now_s})

    def to_json(self) -> str:
        """The JSON document that is kept."""
        data = {**vars(self), "schema_version": 1}
        data |= {name: [job.to_dict() for job in data[name]] for name in ("jobs", "endings")}
        return json.dumps(data, allow_nan=False)

    @classmethod
    def from_json(cls, text: bytes) -> Cached:
        """Read back what was kept.

        Raises:
            LabError: if it is anything else.
        """
        data = parse_json(text)
        if not isinstance(data, dict) or data.pop("schema_version", None) != 1 or set(data) != set(vars(cls())):
            raise LabError("this is no cache of a queue.")
        numbers = (data["asked_s"], data["tried_s"], data["no_accounting_s"], *dict(data["accounted_s"]).values())
        if not all(type(number) in (int, float) for number in numbers) or type(data["failures"]) is not int:
            raise LabError("this cache of a queue holds other things than times.")
        data |= {name: tuple(Listed.from_dict(job) for job in data[name]) for name in ("jobs", "endings")}
        return cls(**{**data, "problem": str(data["problem"])})


def interval_s() -> float:
    """Seconds between two questions: 10, or what `$DLOJZ_QUEUE_INTERVAL_S` says."""
    try:
        told = float(os.environ.get(INTERVAL_VARIABLE, ""))
    except ValueError:
        return INTERVAL_S
    return told if 0 <= told <= LONGEST_S else INTERVAL_S


def cache_path() -> Path | None:
    """The file for this user and this cluster; None where there is no folder of our own for it."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (base if base.is_absolute() else Path("~/.cache").expanduser()) / "dlojz"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.is_symlink() or folder.stat().st_uid != os.getuid() or not os.access(folder, os.W_OK):
            return None
    except (OSError, RuntimeError):
        return None
    # Another cluster, or another set of programs, has another queue.
    of = (shutil.which("squeue") or "", *(os.environ.get(name, "") for name in ("SLURM_CONF", "SLURM_CLUSTERS")))
    return folder / f"queue-{hashlib.sha256(chr(0).join(of).encode()).hexdigest()[:12]}.json"


def read_cache(path: Path) -> Cached:
    """What the file tells; nothing where it is missing, damaged, or not a file of ours."""
    file = open_regular(path)
    if file is None:
        return Cached()
    with file:
        status = os.fstat(file.fileno())
        ours = status.st_uid == os.getuid() and not status.st_mode & 0o022
        if not ours or status.st_size > MAX_BYTES:
            return Cached()
        try:
            return Cached.from_json(file.read(MAX_BYTES))
        except (LabError, OSError, TypeError, ValueError, AttributeError, KeyError):
            return Cached()


def write_cache(path: Path, cached: Cached) -> None:
    """Write the file, whole or not at all; where it cannot be written, everybody asks for himself."""
    with contextlib.suppress(OSError):
        write_atomic(path, cached.to_json())
        path.chmod(0o600)


@contextlib.contextmanager
def alone(path: Path, patience_s: float) -> Iterator[bool]:
    """Hold the right to ask; False where another process is asking, and still is after `patience_s` seconds."""
    lock: Any = FileLock(path.with_suffix(".lock"), timeout=patience_s)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    except (OSError, NotImplementedError):  # a file system without locks
        yield True
        return
    try:
        yield True
    finally:
        lock.release()
