"""Run folders made by hand, so that reading them needs no process."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.running.store import claim
from tests.fakeslurm import fixture

MakeFolder = Callable[..., Path]


@pytest.fixture
def config() -> RunConfig:
    return RunConfig.of(model="coatnet_tiny", dp=2, steps=4)


@pytest.fixture
def gone_pid() -> int:
    """The number of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def make_folder(tmp_path: Path, gone_pid: int) -> MakeFolder:
    """A run folder whose launcher has vanished, with the events given by rank."""

    def make(config: RunConfig, events: dict[int, list[dict[str, Any]]] | None = None, *, alive: bool = False) -> Path:
        folder, _ = claim(config, tmp_path / "runs", force_new=True)
        if not alive:
            owner = json.loads((folder / "launch.json").read_text())
            (folder / "launch.json").write_text(json.dumps({**owner, "pid": gone_pid}))
        for rank, told in (events or {}).items():
            lines = "".join(json.dumps(event) + "\n" for event in told)
            (folder / "events" / f"rank-{rank}.jsonl").write_text(lines)
        return folder

    return make


@pytest.fixture
def told() -> Callable[..., list[dict[str, Any]]]:
    """The events of a rank that finished some steps."""

    def tell(steps: int, *more: dict[str, Any]) -> list[dict[str, Any]]:
        start = {
            "event": "start",
            "rank": 0,
            "pid": 1,
            "world_size": 2,
            "environment": {"torch": "2.13"},
            "time_utc": "2030-01-01T00:00:00+00:00",
        }
        return [start, *({"event": "step", "step": i, "loss": 2.0 - i / 8, "step_s": 0.1} for i in range(steps)), *more]

    return tell


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler that says what the test tells it: `fake.plays(…)`."""
    with fixture.scheduler(tmp_path, monkeypatch) as found:
        yield found


@pytest.fixture
def says() -> Any:
    """The module of the fake scheduler: lines and steps to play, and a real one's words."""
    return fixture
