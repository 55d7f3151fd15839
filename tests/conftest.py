"""What every test starts from."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlojz.text import use_language


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    """The package speaks English until a test says otherwise, and again after it."""
    use_language("en")
    yield
    use_language("en")
