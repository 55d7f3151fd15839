"""What the solutions take to execute, in time and in room, as measured by `benchmarks/lab_durations.py`.

Layer 6 (labs). Invariant: a figure is measured or missing, never typed in. Time and room lie in files of their own:
time needs a machine with nothing else to do, room does not, so that one is measured anew without the other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dlojz.libraries import LIBRARIES, REFERENCE
from dlojz.record import write_atomic
from dlojz.schema import LabError, parse_json

MEASURED = Path(__file__).with_name("data") / "durations.json"
ROOMS = Path(__file__).with_name("data") / "rooms.json"


@dataclass(frozen=True, kw_only=True)
class Duration:
    """The time of one execution of a solution, from an empty folder of runs.

    Args:
        elapsed_s: Seconds from its first cell to its last.
        processor_s: Seconds of all processors in all processes.
        cores: Of the machine.
        load: Mean number of processes that wanted a core, over five minutes: above `cores`, others slowed it down.
        libraries: Which of the optional libraries were there, as they are called; without them lab 12 does less.
        date: When, ISO 8601.
    """

    elapsed_s: float
    processor_s: float
    cores: int
    load: float
    libraries: Sequence[str]
    date: str


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room that one execution of a solution takes, from an empty folder of runs.

    Args:
        memory_bytes: The most that the kernel and all processes that come from it held at once: private pages, their
            share of those that a fork has in common with its parent, and the pages of files once per interpreter,
            whoever else on the machine maps them too.
        processes: The most of them at once, the kernel and what watches over the ranks included.
        runs_bytes: Disk that the folder of runs takes at the end.
        libraries: Which of the optional libraries were there, as they are called.
        date: When, ISO 8601.
    """

    memory_bytes: int
    processes: int
    runs_bytes: int
    libraries: Sequence[str]
    date: str


def optional_libraries() -> list[str]:
    """The optional libraries that are installed here, as they are called."""
    always = LIBRARIES[REFERENCE].command
    return [one.title for one in LIBRARIES.values() if one.command != always and one.installed]


def read_durations(path: Path = MEASURED) -> dict[str, Duration]:
    """Lab → the time of its execution; empty where nothing has been measured."""
    return {number: Duration(**told) for number, told in _read(path).items()}


def write_durations(durations: Mapping[str, Duration], path: Path = MEASURED) -> None:
    """Keep the times that were measured."""
    _write({number: asdict(one) for number, one in durations.items()}, path)


def read_rooms(path: Path = ROOMS) -> dict[str, Room]:
    """Lab → the room of its execution; empty where nothing has been measured."""
    return {number: Room(**told) for number, told in _read(path).items()}


def write_rooms(rooms: Mapping[str, Room], path: Path = ROOMS) -> None:
    """Keep the rooms that were measured."""
    _write({number: asdict(one) for number, one in rooms.items()}, path)


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    except (OSError, LabError):
        return {}
    return content if isinstance(content, dict) else {}


def _write(content: dict[str, dict[str, Any]], path: Path) -> None:
    write_atomic(path, json.dumps({number: content[number] for number in sorted(content)}, indent=1) + "\n")
