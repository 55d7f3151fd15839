"""What takes minutes, run beside whatever else is tested: the notebooks of the labs, then what a test module prepares.

python pool.py FOLDER    (FOLDER/tasks.json: tasks, in lists; FOLDER/TASK.json: what came of one)

A process of its own: the tests beside it fork, and change their environment. The tasks of a list run one after the
other: the notebooks of a lab share one folder of runs, so that what one has trained the next one finds. A few lists are
worked on at a time, since a notebook mostly waits, for processes that start or for a cell's outputs to settle.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat

from dlojz.base.display_hook import QUIET
from dlojz.base.machine import die_with_parent
from dlojz.labs.kit.build import execute, own_folders
from dlojz.results.record import write_atomic

ROOT = Path(__file__).resolve().parents[1]
CELL_TIMEOUT_S = 900
AT_A_TIME = 2

Task = dict[str, str]
"""`task` (its name), `kind` (`solution`, `student` or `prepare`), `name` (of a notebook or a module), `language`."""


def replay_solution(name: str, language: str, runs_root: Path, folder: Path) -> dict[str, Any]:
    """A solution executed again by nbval, its outputs compared with the stored ones."""
    del folder
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(ROOT / "solutions" / language / name),
        "-q",
        "--tb=short",
        "--nbval",
        "--nbval-current-env",
        f"--nbval-cell-timeout={CELL_TIMEOUT_S}",
        "-p",
        "no:cacheprovider",
        "-o",
        "addopts=",
        "--rootdir",
        str(ROOT),
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("JPY_SESSION_NAME", "DLOJZ_LANG")}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        # And a calibration of its own: the machine's owner keeps his.
        env={**environment, **own_folders(runs_root), QUIET: "off"},
    )
    return {"returncode": done.returncode, "output": done.stdout[-6000:] + done.stderr[-2000:]}


def run_student(name: str, language: str, runs_root: Path, folder: Path) -> dict[str, Any]:
    """A student notebook executed in a folder that does not tell its language: the notebook itself must."""
    folder.mkdir()
    path = folder / name
    notebook = nbformat.read(ROOT / "notebooks" / language / name, as_version=4)
    nbformat.write(notebook, path)
    return {"notebook": nbformat.writes(execute(notebook, path, runs_root=runs_root, allow_errors=True))}


def prepare(name: str, language: str, runs_root: Path, folder: Path) -> dict[str, Any]:
    """What a test module does before its tests, in a folder that they then read."""
    del language, runs_root
    folder.mkdir()
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare(folder)
    return {"folder": str(folder)}


KINDS = {"solution": replay_solution, "student": run_student, "prepare": prepare}


def work(tasks: list[Task], folder: Path) -> None:
    """One list of tasks, one after the other: two notebooks at once would find each other's runs half done."""
    own = folder / Path(tasks[0]["name"]).stem
    own.mkdir()
    for number, task in enumerate(tasks):
        try:
            result = KINDS[task["kind"]](task["name"], task["language"], own / "runs", own / str(number))
        except Exception as error:  # told by the test that it belongs to
            result = {"error": f"{type(error).__name__}: {error}"}
        write_atomic(folder / f"{task['task']}.json", json.dumps(result))


def main(folder: Path) -> None:
    die_with_parent()
    sys.path.insert(0, str(ROOT))  # a test module that prepares imports what it shares with others as `tests.…`
    lists: list[list[Task]] = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for done in [pool.submit(work, tasks, folder) for tasks in lists]:
            done.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
