"""The collectives that a rank called last, as torch's flight recorder knows them: of a run that hung, they tell who did
not come.

Layer 3; torch is not loaded where it was not. Invariant: what is read is the recorder's JSON, never its dump file,
which is a pickle; nothing here raises, since it is called while a rank fails.

Source: torch/csrc/distributed/c10d/FlightRecorderDetail.hpp (`dump_json`, keys of an entry) and init.cpp
(`_dump_fr_trace_json` for gloo, `_dump_nccl_trace_json` for NCCL). The recorder is on where `TORCH_FR_BUFFER_SIZE` is
set, which every launcher does.
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

from dlojz.record import EventLog

KEPT = 32
"""Calls told of each group: as many as a rank may be behind the others and still be told what it missed."""
_BINDINGS = "torch._C._distributed_c10d"
_DUMPS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")

Calls = dict[str, list[list[Any]]]


def last_calls() -> Calls:
    """The last collectives of this rank, by the name of their group, each as `[number, operation, type, shape]`.

    The number counts the collectives of the group from 1: ranks that agree have the same ones. Sends and receives are
    left out. Empty where there was none, or torch has no recorder.
    """
    found: dict[str, dict[int, list[Any]]] = {}
    for name in _DUMPS:
        dump = getattr(sys.modules.get(_BINDINGS), name, None)
        try:
            told = json.loads(dump(includeCollectives=True, onlyActive=False)) if dump else {}
            for entry in told.get("entries") or ():
                if not entry["is_p2p"]:
                    group, number = str(entry["process_group"][0]), int(entry["collective_seq_id"])
                    found.setdefault(group, {})[number] = [number, *_described(entry)]
        except Exception:  # an unknown format tells nothing, and must not hide why the rank failed
            continue
    return {group: [calls[number] for number in sorted(calls)[-KEPT:]] for group, calls in found.items()}


def _described(entry: dict[str, Any]) -> tuple[str, str, str]:
    """Operation, type and shape: `all_reduce`, `Float`, `[10]`."""
    operation = str(entry["profiling_name"]).rpartition(":")[2]
    types = ",".join(map(str, entry["input_dtypes"]))
    shapes = ",".join("[" + ",".join(map(str, size)) + "]" for size in entry["input_sizes"])
    return operation[:80], types[:80], shapes[:80]


def tell(events: EventLog) -> None:
    """Write the last collectives into this rank's events, where there are any."""
    with contextlib.suppress(OSError, ValueError):  # a full disk must not hide why the rank failed
        calls = last_calls()
        if calls:
            events.write("collectives", groups=calls)
