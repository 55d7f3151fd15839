from __future__ import annotations

import pytest

from dlojz import text
from dlojz.schema import LabError


@pytest.fixture(autouse=True)
def _forget_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "_chosen", None)


def test_the_language_is_chosen_else_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLOJZ_LANG", raising=False)
    assert text.say(en="rank", fr="rang") == "rank"
    monkeypatch.setenv("DLOJZ_LANG", "fr_FR.UTF-8")
    assert text.say(en="rank", fr="rang") == "rang"
    text.use_language("en")
    assert text.language() == "en"


def test_another_language_is_refused() -> None:
    with pytest.raises(LabError, match="unknown language 'de'"):
        text.use_language("de")
