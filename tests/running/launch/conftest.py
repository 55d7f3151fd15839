"""The fake scheduler, and what a real one said."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _of_fakeslurm(name: str) -> ModuleType:
    """A file of tests/fakeslurm: the tests are no package, so it is loaded by its path."""
    path = Path(__file__).parents[2] / "fakeslurm" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"fakeslurm_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def measured() -> Any:
    """What a real scheduler said."""
    return _of_fakeslurm("measured")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler that says what the test tells it: `fake.plays(…)`; runs are in a folder of the test."""
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    for name in ("DLOJZ_MACHINES", "DLOJZ_MACHINE", "DLOJZ_ACCOUNT", "IDRPROJ"):
        monkeypatch.delenv(name, raising=False)
    with _of_fakeslurm("fixture").scheduler(tmp_path, monkeypatch) as found:
        yield found
