"""What every test starts from, and what takes minutes: begun before the first test, waited for at the end.

`executed` waits for a notebook, `prepared` for what the test's module prepares (`prepare(folder)`): see `pool.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, settings

from dlojz.base.language import use_language

POOL = Path(__file__).with_name("pool.py")
NOTEBOOKS = POOL.parent / "notebooks"
KIND_OF_TEST = {
    "test_a_solution_shows_again_what_is_stored": "solution",
    "test_a_student_notebook_runs_and_says_only_what_is_to_do": "student",
}
WAIT_S = 2400
"""How long a test may wait for the pool, whatever its module says of the others."""
_POOL = pytest.StashKey["Pool"]()
settings.register_profile("dlojz", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dlojz")  # how long an example takes says how busy the machine is


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    """The package speaks English until a test says otherwise, and again after it."""
    use_language("en")
    yield
    use_language("en")


@pytest.fixture(scope="session", autouse=True)
def patience() -> None:
    """Ranks that nobody limits may be slow: what only ends a test that fails is no measure of the machine."""
    from dlojz.processes.forks import spmd

    assert spmd.__kwdefaults__ is not None
    spmd.__kwdefaults__.update(wall_s=240.0, limit_s=60.0)


class Pool:
    """The process that does what takes minutes (see `pool.py`), and the folder it tells its results in.

    Args:
        lists: its tasks, in the order in which they are begun.
    """

    def __init__(self, lists: list[list[dict[str, str]]]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="dlojz-pool-", ignore_cleanup_errors=True)
        self.folder = Path(self._temporary.name)
        (self.folder / "tasks.json").write_text(json.dumps(lists), encoding="utf-8")
        with open(self.folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(POOL), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def result(self, task: str) -> dict[str, Any]:
        """What came of one task, once it is done."""
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
        """End it, with what it still does."""
        if self._process.poll() is None:
            processes = psutil.Process(self._process.pid).children(recursive=True)
            self._process.kill()
            for process in processes:
                if process.is_running():
                    process.kill()
        self._process.wait()
        self._temporary.cleanup()


def task_of(item: pytest.Item) -> dict[str, str] | None:
    """What a test waits for, if it does: a notebook, or what its module prepares."""
    if "prepared" in getattr(item, "fixturenames", ()):
        return preparation_of(item.path)
    kind = KIND_OF_TEST.get(getattr(item, "originalname", ""))
    if kind is None or item.path.parent != NOTEBOOKS:
        return None
    parameters: dict[str, str] = item.callspec.params  # type: ignore[attr-defined]
    name, language = parameters["name"], parameters["language"]
    return {"task": f"{kind}-{language}-{name}", "kind": kind, "name": name, "language": language}


def preparation_of(module: Path) -> dict[str, str]:
    """The task of a test module's `prepare(folder)`."""
    name = str(module.relative_to(POOL.parents[1]))
    return {"task": f"prepare-{module.stem}", "kind": "prepare", "name": name, "language": ""}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who waits comes last, and may wait long."""
    items.sort(key=lambda item: task_of(item) is not None)
    for item in items:
        if task_of(item) is not None:
            item.add_marker(pytest.mark.timeout(WAIT_S), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Begin with what the selected tests will wait for: first the notebooks, the longest before the others."""
    lists: dict[str, list[dict[str, str]]] = {}
    for item in session.items:
        if (task := task_of(item)) is not None and task not in lists.setdefault(task["name"], []):
            lists[task["name"]].append(task)
    if lists and not session.config.option.collectonly:

        def size(name: str) -> int:
            solution = POOL.parents[1] / "solutions" / "en" / name
            return solution.stat().st_size if solution.is_file() else 0

        session.stash[_POOL] = Pool([lists[name] for name in sorted(lists, key=size, reverse=True)])


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave nothing running, however the session has ended."""
    if (pool := session.stash.get(_POOL, None)) is not None:
        pool.close()


@pytest.fixture
def executed(request: pytest.FixtureRequest) -> Callable[[], dict[str, Any]]:
    """Waits for the notebook of this test, and gives what came of it."""
    task = task_of(request.node)
    assert task is not None
    return lambda: request.session.stash[_POOL].result(task["task"])


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest) -> Path:
    """The folder in which the module's `prepare` has done its work, beside the tests before."""
    pool = request.session.stash[_POOL]
    return Path(pool.result(preparation_of(request.path)["task"])["folder"])
