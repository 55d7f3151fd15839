"""What each lab's solution takes to execute, beside the time a student is given: the instructor's table.

    python benchmarks/lab_durations.py            all labs, English, one after the other, from an empty folder of runs
    python benchmarks/lab_durations.py 03 08      these only; the others keep their figures
    python benchmarks/lab_durations.py --room     memory, processes and disk only; the seconds stay as they were

Writes dlojz/labs/data/durations.json and rooms.json; `dlojz labs build` then lays the figures into
docs/instructors.md. Elapsed seconds grow with whatever else the machine does, so let it do nothing else; processor
seconds hardly depend on that, and memory, processes and disk do not. Linux only, as it reads /proc.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import psutil

import dlojz
from dlojz.base.errors import LabError
from dlojz.labs.kit.build import execute
from dlojz.labs.kit.contents import (
    LABS,
    MEASURED,
    ROOMS,
    Duration,
    LabEntry,
    Room,
    entry_of,
    optional_libraries,
    read_durations,
    read_rooms,
    write_measured,
)
from dlojz.labs.kit.source import compose, read_source

ROOT = Path(dlojz.__file__).parent.parent
LOOK_EVERY_S = 0.25


class Watch:
    """Looks at a notebook's processes while it is executed.

    Args:
        runs_root: Its folder of runs. Launchers and ranks leave the kernel's session and outlive their parents, but
            all inherit the variable that names this folder, and no other process has it.
    """

    def __init__(self, runs_root: Path) -> None:
        self.memory_bytes = 0
        self.processes = 0
        self._mark = str(runs_root)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ended.wait(LOOK_EVERY_S):
            found = self._found()
            self.processes = max(self.processes, len(found))
            self.memory_bytes = max(self.memory_bytes, held_bytes(found))

    def _found(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if process.environ().get("DLOJZ_RUNS") == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def held_bytes(processes: list[psutil.Process]) -> int:
    """Memory that processes hold together, see `Room.memory_bytes`."""
    own, files = 0, defaultdict[str, int](int)
    for process in processes:
        with suppress(psutil.Error, OSError, LookupError):  # one that ends holds nothing any more
            pages = kibibytes(Path(f"/proc/{process.pid}/smaps_rollup"))
            of_files = kibibytes(Path(f"/proc/{process.pid}/status"))["RssFile"]
            own += pages["Pss_Anon"] + pages["Pss_Shmem"]
            interpreter = process.cmdline()[0]
            files[interpreter] = max(files[interpreter], of_files)
    return (own + sum(files.values())) * 1024


def kibibytes(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file of /proc."""
    lines = (line.split() for line in path.read_text(encoding="utf-8").splitlines())
    return {words[0].rstrip(":"): int(words[1]) for words in lines if len(words) == 3 and words[2] == "kB"}


def disk_bytes(folder: Path) -> int:
    """Disk that the files of a folder take."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*"))


def processor_s() -> float:
    """Seconds of processor time of all processes that have ended so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(entry: LabEntry) -> tuple[Duration, Room]:
    """Execute the solution of a lab in English, from an empty folder of runs."""
    notebook = compose(read_source(ROOT / "solutions" / f"{entry.file}.py"), "en", student=False)
    before_s, begun_s = processor_s(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dlojz-durations-") as folder:
        runs_root = Path(folder) / "runs"  # its calibration is kept beside it, and goes with it
        runs_root.mkdir()
        with Watch(runs_root) as watch:
            execute(notebook, ROOT / "solutions" / "en" / entry.notebook, runs_root=runs_root)
        elapsed_s, runs_bytes = time.monotonic() - begun_s, disk_bytes(runs_root)
    date, libraries = datetime.now(UTC).date().isoformat(), optional_libraries()
    return Duration(
        elapsed_s=round(elapsed_s, 1),
        processor_s=round(processor_s() - before_s, 1),
        cores=os.cpu_count() or 1,
        load=round(os.getloadavg()[1], 1),
        libraries=libraries,
        date=date,
    ), Room(
        memory_bytes=watch.memory_bytes,
        processes=watch.processes,
        runs_bytes=runs_bytes,
        libraries=libraries,
        date=date,
    )


def main() -> None:
    """Execute, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("labs", nargs="*", help="their numbers; by default all")
    parser.add_argument("--room", action="store_true", help="keep memory, processes and disk only")
    asked = parser.parse_args()
    for entry in [entry_of(number) for number in asked.labs] or LABS:
        try:
            duration, room = measured(entry)
        except (LabError, OSError) as error:
            print(f"{entry.number}  {error}", flush=True)
            continue
        print(entry.number, duration, room, flush=True)
        write_measured({**read_rooms(), entry.number: room}, ROOMS)
        if not asked.room:
            write_measured({**read_durations(), entry.number: duration}, MEASURED)


if __name__ == "__main__":
    main()
