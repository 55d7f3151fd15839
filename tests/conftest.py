"""What every test starts from, and which tests go together when several processes run them (`make test`: pytest-xdist).

The tests of one file run in one process, one after the other, and so do those of a room that shares what takes
long to start. What takes longest begins first: what waits for a scheduler, the notebooks lab by lab, then trainings.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from dlojz.base.language import use_language

TESTS = Path(__file__).resolve().parent
TOGETHER = ("cluster", "planner")
"""Rooms whose tests share one cluster, or plans that take seconds."""
LIMIT_S = {
    **{"test_trainings.py": 900, "test_notebooks.py": 2400, "test_compromise_figures.py": 900},
    "test_growing_script.py": 900,
}
"""Modules with a limit for each test. The first has a cluster that no other module needs; the third plans CoAtNet-7,
which takes minutes where no trace is kept yet; the last trains until it has learnt, on a machine that may be busy."""
PREPARATION_S = 900
NIGHTLY = "DLOJZ_NIGHTLY"
"""Set (`make nightly`), the tests marked `nightly` run too: more of what each day's tests try a part of."""
FIRST = ("cluster", "planner", "browser", "notebooks", "libraries", "train", "by_hand", "labs", "prediction", "cli")
"""Rooms in which processes start and trainings run, begun before the others; what waits, or is one group, first."""
AT_NIGHT = "TRAINED_AT_NIGHT"
"""True in a module whose trainings (`prepare`) and the tests that look at them are nightly, but not its other tests."""
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


def group_of(test: str) -> str:
    """What runs in one process with a test (its name as pytest has it): a lab's notebooks, a room, or its file."""
    if lab := re.match(r"tests/notebooks/.*\[(?:\w+-)?(\w+\.ipynb)", test):
        return lab[1]
    file = test.split("::", maxsplit=1)[0]
    room = file.split("/")[1]
    return room if room in TOGETHER and Path(file).name not in LIMIT_S else file


def place_of(test: str) -> tuple[int, int]:
    """The place of a test's group in the order in which they begin: its room, then the longest lab."""
    room = test.split("/")[1]
    notebook = TESTS.parent / "solutions" / "en" / group_of(test)
    return FIRST.index(room) if room in FIRST else len(FIRST), -notebook.stat().st_size if notebook.is_file() else 0


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the long ones their time; where several processes test, begin with the longest; leave the nightly ones."""
    for item in items:
        if "prepared" in getattr(item, "fixturenames", ()) and getattr(getattr(item, "module", None), AT_NIGHT, False):
            item.add_marker(pytest.mark.nightly)
    if not os.environ.get(NIGHTLY):
        left = [item for item in items if item.get_closest_marker("nightly")]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker("nightly")]
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: place_of(item.nodeid))
    for item in items:
        if "prepared" in getattr(item, "fixturenames", ()) or item.path.name in LIMIT_S:
            item.add_marker(pytest.mark.timeout(LIMIT_S.get(item.path.name, PREPARATION_S)), append=False)


class NamedAtOnce:
    """A test that fails is named when it fails: a run of an hour that is cut short tells what it has found."""

    def __init__(self, terminal: Any) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            cause = str(crash.message if crash else report.longreprtext).strip().split("\n")[-12:]
            self.terminal.ensure_newline()
            self.terminal.write_line("\n    ".join([f"FAILED, so far: {report.nodeid} ({report.when})", *cause]))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Where the tests of all processes are told."""
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    if terminal and not hasattr(session.config, "workerinput"):
        session.config.pluginmanager.register(NamedAtOnce(terminal))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out tests group by group, in our order."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)
