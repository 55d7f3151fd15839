"""Notebooks are executed beside all other tests: begun before the first of them, collected by their own at the end."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

POOL = Path(__file__).with_name("pool.py")
KIND_OF_TEST = {
    "test_a_solution_shows_again_what_is_stored": "solution",
    "test_a_student_notebook_runs_and_says_only_what_is_to_do": "student",
}
_POOL = pytest.StashKey["Pool"]()


class Pool:
    """The process that executes the notebooks (see `pool.py`), and the folder it tells its results in.

    Args:
        labs: the notebooks of each lab, in the order in which they run.
    """

    def __init__(self, labs: list[list[dict[str, str]]]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="dlojz-notebooks-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        (self.folder / "tasks.json").write_text(json.dumps(labs), encoding="utf-8")
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(POOL), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self, task: str) -> dict[str, Any]:
        """What came of one notebook, once it has run."""
        path = self.folder / f"{task}.json"
        while not path.exists():
            if self._process.poll() is not None and not path.exists():
                pytest.fail(f"the pool has ended without {task}:\n{(self.folder / 'log').read_text(errors='replace')}")
            time.sleep(0.2)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if "error" in found:
            pytest.fail(found["error"])
        return found

    def close(self) -> None:
        """End it, with the notebooks that it still executes."""
        if self._process.poll() is None:
            processes = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for process in processes:
                if process.is_running():
                    process.kill()
        self._process.wait()
        self._temporary.cleanup()


def task_of(item: pytest.Item) -> dict[str, str] | None:
    """The notebook that a test waits for, if it does."""
    kind = KIND_OF_TEST.get(getattr(item, "originalname", ""))
    if kind is None or item.path.parent != POOL.parent:
        return None
    parameters: dict[str, str] = item.callspec.params  # type: ignore[attr-defined]
    name, language = parameters["name"], parameters["language"]
    return {"task": f"{kind}-{language}-{name}", "kind": kind, "name": name, "language": language}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who waits for a notebook comes last."""
    items.sort(key=lambda item: task_of(item) is not None)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Begin with the notebooks of the selected tests."""
    labs: dict[str, list[dict[str, str]]] = {}
    for item in session.items:
        if (task := task_of(item)) is not None:
            labs.setdefault(task["name"], []).append(task)
    if labs and not session.config.option.collectonly:
        size = {name: (POOL.parents[2] / "solutions" / "en" / name).stat().st_size for name in labs}
        session.stash[_POOL] = Pool([labs[name] for name in sorted(labs, key=lambda name: -size[name])])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave no notebook running, however the session has ended."""
    if (pool := session.stash.get(_POOL, None)) is not None:
        pool.close()


@pytest.fixture
def executed(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Waits for the notebook of this test, and gives what came of it."""
    task = task_of(request.node)
    assert task is not None
    return lambda: request.session.stash[_POOL].result(task["task"])
