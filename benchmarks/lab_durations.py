"""How long each lab's solution takes to execute, beside the time a student is given: the instructor's table.

    python benchmarks/lab_durations.py            all labs, English, one after the other, from an empty folder of runs
    python benchmarks/lab_durations.py 03 08      these only; the others keep their figures

Writes dlojz/labs/data/durations.json; `dlojz labs build` then lays the figures into docs/instructors.md. Elapsed
seconds grow with whatever else the machine does, so let it do nothing else; processor seconds hardly depend on that.
Both are kept, with the load that was seen.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import dlojz
from dlojz.labs.contents import LABS, entry_of
from dlojz.labs.durations import Duration, read_durations, write_durations
from dlojz.labs.execute import execute
from dlojz.labs.source import compose, read_source

ROOT = Path(dlojz.__file__).parent.parent


def processor_s() -> float:
    """Seconds of processor time of all processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(numbers: list[str]) -> None:
    """Execute, print, keep."""
    known = read_durations()
    for entry in [entry_of(number) for number in numbers] or LABS:
        path = ROOT / "solutions" / f"{entry.file}.py"
        if not path.is_file():
            print(f"{entry.number}  has no source yet")
            continue
        notebook = compose(read_source(path), "en", student=False)
        before_s, begun_s = processor_s(), time.monotonic()
        with tempfile.TemporaryDirectory(prefix="dlojz-durations-") as folder:
            execute(notebook, ROOT / "solutions" / "en" / entry.notebook, runs_root=Path(folder))
        known[entry.number] = Duration(
            elapsed_s=round(time.monotonic() - begun_s, 1),
            processor_s=round(processor_s() - before_s, 1),
            cores=os.cpu_count() or 1,
            load=round(os.getloadavg()[1], 1),
            date=datetime.now(UTC).date().isoformat(),
        )
        print(entry.number, known[entry.number], flush=True)
        write_durations(known)


if __name__ == "__main__":
    main(sys.argv[1:])
