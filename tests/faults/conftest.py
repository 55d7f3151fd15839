"""Real runs of small workers (tests/faults/workers), and what it takes to hurt them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlojz.running import launch as launching
from dlojz.running.folder import read_owner
from dlojz.running.launch import run
from dlojz.running.run import Run, runs
from dlojz.running.state import read_all_events

HERE = Path(__file__).parent
PATIENCE_S = 120
collect_ignore_glob = ["workers/*"]  # run as ranks, never imported by pytest


def until(holds: Callable[[], Any]) -> Any:
    """Wait for something to become true; the limit is only there to end a test that fails."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        if time.monotonic() > deadline:
            pytest.fail(f"still not so after {PATIENCE_S} s")
        time.sleep(0.05)
    return found


class Ward:
    """One running run, and access to its processes."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def pids(self) -> dict[int, int]:
        """Process numbers of the ranks that have started."""
        events = read_all_events(self.run.folder)
        return {rank: told[0]["pid"] for rank, told in events.items() if told}

    def steps(self, rank: int) -> int:
        return sum(event["event"] == "step" for event in read_all_events(self.run.folder).get(rank, []))

    def under_way(self, steps: int = 3) -> Ward:
        """Wait until every rank has finished some steps."""
        world_size = self.run.config.layout.world_size
        until(lambda: all(self.steps(rank) >= steps for rank in range(world_size)))
        return self

    def launcher(self) -> int:
        """The process that drives the run, once it has been forked by the one that stands by for all runs."""

        def forked() -> int:
            owner = read_owner(self.run.folder)
            assert owner is not None
            return 0 if launching._standby is not None and owner.pid == launching._standby.pid else owner.pid

        return until(forked)

    def processes(self) -> list[psutil.Process]:
        """Every process of the run that is alive: launcher, ranks, helpers."""
        numbers = [self.launcher(), *self.pids().values()]
        numbers += [
            event["pid"]
            for told in read_all_events(self.run.folder).values()
            for event in told
            if event["event"] == "helper"
        ]
        return [process for number in numbers if (process := _alive(number)) is not None]

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)


def _alive(pid: int) -> psutil.Process | None:
    """The process, unless it is gone or a zombie; it may go while one looks."""
    try:
        process = psutil.Process(pid)
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


@pytest.fixture(autouse=True)
def _workers_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DLOJZ_LANG", "en")


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path: Path) -> Iterator[None]:
    """After each test no launcher of its runs is left (and launchers take their ranks with them)."""
    yield
    for one in runs(tmp_path / "runs"):
        if one.record is None and (launcher := Ward(one).launcher()) != os.getpid():
            os.kill(launcher, signal.SIGKILL)


@pytest.fixture
def launch() -> Callable[..., Ward]:
    """Start a run of a test worker on two processes, without waiting for it."""

    def start(worker: str, **fields: Any) -> Ward:
        request = {"model": "coatnet_tiny", "dp": 2, "steps": 5, "wait": False, **fields}
        return Ward(run(worker_module=f"workers.{worker}", **request))

    return start


@pytest.fixture
def python() -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start another Python that has `dlojz` imported, as a notebook kernel or a terminal would be."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str) -> subprocess.Popen[str]:
        # A shell's background job has SIGINT ignored, and Python would leave it so.
        preamble = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); import dlojz\n"
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", preamble + program],
                text=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def only_run() -> Callable[[], Ward]:
    """The one run that there is, once it is there."""
    return lambda: Ward(until(runs)[0])


@pytest.fixture
def eventually() -> Callable[[Callable[[], Any]], Any]:
    """Wait for something to become true."""
    return until
