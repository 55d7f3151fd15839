"""A real SLURM on this machine (slurm/cluster.py): one controller, two nodes, gone after the tests.

As root it may not be missing; another user cannot start one.
"""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.running.launch import run
from dlojz.running.run import Run
from dlojz.running.state import read_all_events

HERE = Path(__file__).resolve().parent
PATIENCE_S = 240
collect_ignore_glob = ["stubs/*"]  # run as ranks, never imported by pytest


def cluster_module() -> Any:
    """slurm/cluster.py, which is no package's."""
    specification = importlib.util.spec_from_file_location("slurm_cluster", HERE.parents[1] / "slurm" / "cluster.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["slurm_cluster"] = module
    specification.loader.exec_module(module)
    return module


def reachable(folder: Path) -> Path:
    """A folder, open as far as a cluster in it needs: munge refuses a socket that others cannot reach."""
    for parent in (folder, *folder.parents):
        if parent.owner() == "root" and str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    return folder


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The cluster, up."""
    module = cluster_module()
    obstacle = module.obstacle()
    if obstacle:
        if os.geteuid() == 0:
            pytest.fail(obstacle)
        pytest.skip(obstacle)
    cluster = module.Cluster(reachable(tmp_path_factory.mktemp("slurm")))
    watcher = cluster.ends_with_this_process()
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
        watcher.kill()
        watcher.wait()


@pytest.fixture
def here(slurm: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process speaks with the cluster, its runs are in a folder of the test, and its stub workers are found."""
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("DLOJZ_MACHINES", str(HERE / "machines"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DLOJZ_LANG", "en")
    return tmp_path / "runs"


@pytest.fixture
def stub(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Send a run of a stub worker on one node, without waiting for it."""
    monkeypatch.setenv("PYTHONPATH", str(HERE / "stubs"))

    def send(worker: str, **more: Any) -> Run:
        fields = {"model": "vit_tiny", "dp": 2, "steps": 4, "device": "cpu", **more}
        return run(on="slurm", machine="stubs", worker_module=f"stub_{worker}", wait=False, **fields)

    return send


def until(holds: Callable[[], Any]) -> Any:
    """Wait for something to become true; the limit is only there to end a test that fails."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := holds()):
        if time.monotonic() > deadline:
            pytest.fail(f"still not so after {PATIENCE_S} s")
        time.sleep(0.1)
    return found


def ended(one: Run) -> Any:
    """The record of a run, once its job has written it."""
    until((one.folder / "record.json").exists)
    return one.record


def steps(one: Run, rank: int = 0) -> int:
    """Steps that a rank has told of."""
    return sum(event["event"] == "step" for event in read_all_events(one.folder).get(rank, []))


def ask(slurm: Any, *words: str) -> str:
    """What a program of the scheduler prints."""
    done = subprocess.run(list(words), env=slurm.environment, capture_output=True, text=True, check=False, timeout=240)
    return done.stdout + done.stderr


def config(**fields: Any) -> RunConfig:
    """A small training."""
    return RunConfig.of(**{"model": "vit_tiny", "steps": 3, "device": "cpu", **fields})
