"""What every test starts from, and which tests go together when several processes run them (`make test`: pytest-xdist).

The tests of one file run in one process, one after the other, and so do those of a room that shares what is dear to
start. What takes longest begins first: what waits for a scheduler, the notebooks lab by lab, then the trainings.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from dlojz.base.language import use_language

TESTS = Path(__file__).resolve().parent
TOGETHER = ("cluster", "planner")
"""Rooms whose tests share one cluster, or plans that take seconds."""
APART = {"test_trainings.py": 900, "test_notebooks.py": 1200}
"""Modules that need no such company, or wait long: their limit in seconds, for each test."""
FIRST = ("cluster", "browser", "notebooks", "libraries", "train", "by_hand", "planner", "labs", "prediction", "cli")
"""Rooms in which processes start and trainings run, begun before the others; those that mostly wait first of all."""
PREPARATION_S = 900
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


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Threads that wait for each other, where other processes hold the cores, take three times as long."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def prepared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `prepare(folder)` of the module has done its work: trainings that its tests look at."""
    folder = tmp_path_factory.mktemp(request.path.stem)
    request.module.prepare(folder)
    return folder


def group_of(item: pytest.Item) -> str:
    """What runs in one process with this test: a lab's notebooks, a room, or its file."""
    room = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    if room == "notebooks" and hasattr(item, "callspec") and "name" in item.callspec.params:
        return str(item.callspec.params["name"])
    return room if room in TOGETHER and item.path.name not in APART else str(item.path)


def rank_of(item: pytest.Item) -> tuple[int, int]:
    """The place of a test in the order in which groups begin: its room, then the longest lab."""
    room = item.path.relative_to(TESTS).parts[0] if item.path.is_relative_to(TESTS) else ""
    notebook = TESTS.parent / "solutions" / "en" / group_of(item)
    size = notebook.stat().st_size if notebook.suffix == ".ipynb" and notebook.is_file() else 0
    return FIRST.index(room) if room in FIRST else len(FIRST), -size


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Name each test's group and begin with the longest; without pytest-xdist, give the long ones their time."""
    distributed = hasattr(config, "workerinput")
    if distributed:
        items.sort(key=rank_of)
    for item in items:
        if distributed:
            item.add_marker(pytest.mark.xdist_group(group_of(item)))
        if "prepared" in getattr(item, "fixturenames", ()) or item.path.name in APART:
            item.add_marker(pytest.mark.timeout(APART.get(item.path.name, PREPARATION_S)), append=False)
