"""How long the solutions take to execute, as measured by `benchmarks/lab_durations.py`.

Layer 6 (labs). Invariant: a figure is measured or missing, never typed in.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dlojz.record import write_atomic
from dlojz.schema import LabError, parse_json

MEASURED = Path(__file__).with_name("data") / "durations.json"


@dataclass(frozen=True, kw_only=True)
class Duration:
    """One execution of a solution, from an empty folder of runs.

    Args:
        elapsed_s: Seconds from its first cell to its last.
        processor_s: Seconds of all processors in all processes.
        cores: Of the machine.
        load: Mean number of processes that wanted a core, over five minutes: above `cores`, others slowed it down.
        date: When, ISO 8601.
    """

    elapsed_s: float
    processor_s: float
    cores: int
    load: float
    date: str


def read_durations(path: Path = MEASURED) -> dict[str, Duration]:
    """Lab → its execution; empty where nothing has been measured."""
    try:
        content = parse_json(path.read_bytes())
    except (OSError, LabError):
        return {}
    return {number: Duration(**told) for number, told in content.items()} if isinstance(content, dict) else {}


def write_durations(durations: dict[str, Duration], path: Path = MEASURED) -> None:
    """Keep what was measured."""
    content = {number: asdict(durations[number]) for number in sorted(durations)}
    write_atomic(path, json.dumps(content, indent=1) + "\n")
