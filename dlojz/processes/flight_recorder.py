"""Read from within a rank what it called last and where it stands, also while it hangs.

Of a run that hung, the collectives that each rank called last tell who did not come. They are read from torch's flight
recorder, in its JSON and never its dump file, which is a pickle; reading them raises nothing, since it is done while a
rank fails.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (`dump_json`, keys of an entry) and init.cpp
(`_dump_fr_trace_json` for gloo, `_dump_nccl_trace_json` for NCCL). The recorder is on where `TORCH_FR_BUFFER_SIZE` is
set, which every launcher does.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Protocol

KEPT = 32
"""Last calls kept of each group: a rank may be so many behind the others, and its missing call is still found."""
_BINDINGS = "torch._C._distributed_c10d"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

STALL_S = 30.0
STALL_STEPS = 20
"""A rank stands still where no step has ended for so many seconds, and for the time of so many of its steps."""
_LOOK_EVERY_S = 5.0
_PACKAGE = Path(__file__).resolve().parents[1]
# Code of libraries: a line there does not say where a training stands.
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))

Calls = dict[str, list[list[Any]]]


def last_calls() -> Calls:
    """Read the last collectives of this rank, by the name of their group, each as `[number, operation, type, shape]`.

    The number counts the collectives of the group from 1: ranks that agree have the same ones. Sends and receives are
    left out. Empty where there was none, or torch has no recorder.
    """
    entries: list[Any] = []
    for name in _DUMPS:
        dump = getattr(sys.modules.get(_BINDINGS), name, None)
        try:
            trace = json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}
            entries += trace.get("entries") or ()
        except Exception:  # an unknown format tells nothing, and must not hide why the rank failed
            continue
    return calls_in({"entries": entries})


def calls_in(trace: Any) -> Calls:
    """Read the last collectives of each group from a recorder's JSON, as far as its format is the known one."""
    calls_by_group: dict[str, dict[int, list[Any]]] = {}
    try:
        for entry in trace.get("entries") or ():
            if not entry["is_p2p"]:
                group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
                calls_by_group.setdefault(group, {})[number] = [number, *_described(entry)]
    except Exception:  # an unknown format tells nothing, and must not hide why a rank failed
        pass
    return {group: [calls[number] for number in sorted(calls)[-KEPT:]] for group, calls in calls_by_group.items()}


def _described(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Describe an entry by operation, type and shape: `all_reduce`, `Float`, `[10]`."""
    # `gloo:all_reduce` or `nccl:all_reduce`.
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    types = ",".join(map(str, entry["input_dtypes"]))
    shapes = ",".join("[" + ",".join(map(str, size)) + "]" for size in entry["input_sizes"])
    return operation[:80], types[:80], shapes[:80]


class StepLog(Protocol):
    """Log of a rank's events, which also tells when steps have ended."""

    @property
    def step_ends_s(self) -> Sequence[float]:
        """Times of its start and of the last ends of steps, on the monotonic clock."""

    def write(self, event: str, **fields: Any) -> None:
        """Append one event."""


def line_of_main_thread() -> str:
    """Return where the main thread stands: `train.py:23 in main`, or, where no script is, `dlojz/…` of this package.

    Empty where in neither.
    """
    engine_line = ""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        line = f"{frame.f_lineno} in {frame.f_code.co_name}"
        if path.is_relative_to(_PACKAGE):
            engine_line = engine_line or f"{path.relative_to(_PACKAGE.parent)}:{line}"
        elif not str(path).startswith((*_LIBRARIES, "<")):
            return f"{path.name}:{line}"
        frame = frame.f_back
    return engine_line


class StallWatch(threading.Thread):
    """Thread of a rank that notes where the rank stands when no step ends, and again when that changes.

    The event is `stalled`: `groups` as in `collectives`, empty where none was called, and `line` of the user's code.

    Args:
        log: of the rank's events.
    """

    def __init__(self, log: StepLog) -> None:
        super().__init__(name="dlojz-stall-watch", daemon=True)
        self._log = log
        self._closed = threading.Event()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def run(self) -> None:
        """Look every few seconds until the rank ends."""
        noted: tuple[Calls, str] | None = None
        while not self._closed.wait(_LOOK_EVERY_S):
            ends_s = list(self._log.step_ends_s)
            # The first of them also loads and compiles.
            durations_s = [end - begin for begin, end in pairwise(ends_s)][1:]
            limit_s = max(STALL_S, STALL_STEPS * median(durations_s or [0.0]))
            if time.monotonic() - ends_s[-1] < limit_s:
                continue
            standing = last_calls(), line_of_main_thread()
            if standing == noted:
                continue
            noted = standing
            try:
                self._log.write("stalled", groups=standing[0], line=standing[1])
            except (OSError, ValueError):  # a full disk, a log that was closed: the training goes on
                return
