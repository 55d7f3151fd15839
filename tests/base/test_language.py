from pathlib import Path

import pytest

import dlojz
from dlojz.base import language
from dlojz.base.errors import LabError

PACKAGE = Path(dlojz.__file__).parent


@pytest.fixture(autouse=True)
def _forget_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "_chosen", None)


def test_the_language_is_chosen_else_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLOJZ_LANG", raising=False)
    assert language.say(en="rank", fr="rang") == "rank"
    monkeypatch.setenv("DLOJZ_LANG", "fr_FR.UTF-8")
    assert language.say(en="rank", fr="rang") == "rang"
    language.use_language("en")
    assert language.language() == "en"


def test_another_language_is_refused() -> None:
    with pytest.raises(LabError, match="unknown language 'de'"):
        language.use_language("de")
