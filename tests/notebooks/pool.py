"""Runs the notebooks of the labs, a few labs at a time, beside whatever else is tested.

python pool.py FOLDER    (FOLDER/tasks.json: the notebooks of each lab; FOLDER/TASK.json: what came of one)

A process of its own: the tests beside it fork, and change their environment. The notebooks of a lab run one after the
other and share one folder of runs, so that what one has trained the next one finds. A notebook mostly waits, for
processes that start or for a cell's outputs to settle: a few labs are executed at a time, the longest first.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat

from dlojz.labs.execute import execute
from dlojz.record import write_atomic
from dlojz.runs.progress import QUIET
from dlojz.train.lifeline import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
CELL_TIMEOUT_S = 300
AT_A_TIME = 2

Task = dict[str, str]
"""`task` (its name), `kind` (`solution` or `student`), `name` (of the notebook) and `language`."""


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
        env={**environment, "DLOJZ_RUNS": str(runs_root), QUIET: "off"},
    )
    return {"returncode": done.returncode, "output": done.stdout[-6000:] + done.stderr[-2000:]}


def run_student(name: str, language: str, runs_root: Path, folder: Path) -> dict[str, Any]:
    """A student notebook executed in a folder that does not tell its language: the notebook itself must."""
    folder.mkdir()
    path = folder / name
    notebook = nbformat.read(ROOT / "notebooks" / language / name, as_version=4)
    nbformat.write(notebook, path)
    return {"notebook": nbformat.writes(execute(notebook, path, runs_root=runs_root, allow_errors=True))}


KINDS = {"solution": replay_solution, "student": run_student}


def run_lab(tasks: list[Task], folder: Path) -> None:
    """One lab's notebooks, one after the other: two at once would find each other's runs half done."""
    own = folder / tasks[0]["name"].removesuffix(".ipynb")
    own.mkdir()
    for number, task in enumerate(tasks):
        try:
            result = KINDS[task["kind"]](task["name"], task["language"], own / "runs", own / str(number))
        except Exception as error:  # told by the test that it belongs to
            result = {"error": f"{type(error).__name__}: {error}"}
        write_atomic(folder / f"{task['task']}.json", json.dumps(result))


def main(folder: Path) -> None:
    die_with_parent()
    labs: list[list[Task]] = json.loads((folder / "tasks.json").read_text(encoding="utf-8"))
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        for done in [pool.submit(run_lab, tasks, folder) for tasks in labs]:
            done.result()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
