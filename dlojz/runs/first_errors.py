"""The first error that a rank printed, and not what followed from it. Pure, but for reading the file.

Layer 5. Invariant: the loss of a peer is never taken for an error where there is another one; a log of any size is read
in bounded time, its beginning and its end.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from dlojz.runs.ending import PEER_GONE
from dlojz.runs.logs import open_regular, visible

HEAD_BYTES, TAIL_BYTES = 1024 * 1024, 256 * 1024
_MOST_CHARACTERS = 300
_PREFIX = re.compile(r"^\[(?:default|rank)\d+\]:\s?|^\d+: ")
_TRACEBACK = "Traceback (most recent call last)"
_EXCEPTION = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Warning|Interrupt|Exit|Stopped|Wrong|NotDone)?(?::|$)")
_FAULT = re.compile(
    r"^(?:Fatal Python error: |.*\bwhat\(\):|.*\b(?:Segmentation fault|Bus error|Illegal instruction)\b"
    r"|.*: error while loading shared libraries|\[E\S* |.*\bNCCL WARN\b|.*\b(?:srun|slurmstepd): error: "
    r"|.*\b(?:FATAL|fatal error)\b|[\w./-]+: (?:line \d+: )?.*(?:command not found|No such file or directory|Killed))"
)
_CALL = re.compile(
    r"(?:dist(?:ributed)?\.|, in )(all_\w+|reduce\w*|broadcast\w*|barrier|scatter\w*|gather\w*"
    r"|i?send|i?recv|monitored_barrier|batch_isend_irecv)\b"
)


@dataclass(frozen=True)
class RankError:
    """The first error in one log.

    Args:
        rank: whose log; None for the launcher's or the job's.
        text: its line, at most 300 characters, control characters made visible.
        line: its number, from 1, counted from the beginning of what was read.
        lost_peer: it only says that another rank has gone.
        call: the collective that the rank was in, by its traceback; empty where it tells none.
    """

    rank: int | None
    text: str
    line: int
    lost_peer: bool = False
    call: str = ""


def first_error(text: str, rank: int | None = None) -> RankError | None:
    """The first error of a log that is a cause; else the first that tells of a lost peer; None if there is none."""
    found: list[RankError] = []
    in_traceback, call = False, ""
    for number, raw in enumerate(text.splitlines(), start=1):
        line = _PREFIX.sub("", raw)
        if line.startswith(_TRACEBACK):
            in_traceback, call = True, ""
        elif in_traceback:
            called = _CALL.search(line)
            call = called[1] if called else call
            if line.strip() and not line[0].isspace() and not line.startswith(("|", "+")):
                if _EXCEPTION.match(line):
                    found.append(_error(rank, line, number, call))
                in_traceback = False
        elif _FAULT.match(line):
            found.append(_error(rank, line, number, ""))
        if found and not found[-1].lost_peer:
            return found[-1]
    return found[0] if found else None


def _error(rank: int | None, line: str, number: int, call: str) -> RankError:
    text = visible(line.strip())
    short = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
    return RankError(rank, short, number, bool(PEER_GONE.search(line)), call)


def read_log(path: Path) -> str:
    """A log from its beginning, the middle of a very long one left out; empty where there is none, or only a link."""
    file = open_regular(path)
    if file is None:
        return ""
    with file:
        size = os.fstat(file.fileno()).st_size
        data = file.read(HEAD_BYTES)
        if size > HEAD_BYTES:
            file.seek(max(HEAD_BYTES, size - TAIL_BYTES))
            data += b"\n" + file.read(TAIL_BYTES)
    return data.decode("utf-8", errors="replace").replace("\r\n", "\n")
