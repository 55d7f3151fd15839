"""Labs speak English in their tests, unless a test chooses otherwise; what it chose ends with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dlojz.base.language import use_language
from tests.display.legible import legible_figures  # noqa: F401 - a fixture of all tests of this room


@pytest.fixture(autouse=True)
def english() -> Iterator[None]:
    use_language("en")
    yield
    use_language("en")
