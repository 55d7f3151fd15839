"""What the modules of this room look at: the trainings that their `prepare` has made."""

from pathlib import Path

import pytest

from tests.train.counted import Runs


@pytest.fixture(scope="module")
def runs(prepared: Path) -> Runs:
    """The module's runs, which `prepared` has trained."""
    return Runs(prepared)
