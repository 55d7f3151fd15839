"""The fake scheduler, and what a real one said."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakeslurm import measured as real_words
from tests.fakeslurm.fixture import scheduler


@pytest.fixture(scope="session")
def measured() -> Any:
    """What a real scheduler said."""
    return real_words


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A scheduler that says what the test tells it: `fake.plays(…)`; runs are in a folder of the test."""
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    for name in ("DLOJZ_MACHINES", "DLOJZ_MACHINE", "DLOJZ_ACCOUNT", "IDRPROJ"):
        monkeypatch.delenv(name, raising=False)
    with scheduler(tmp_path, monkeypatch) as found:
        yield found
