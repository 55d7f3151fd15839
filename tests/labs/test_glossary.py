"""The glossary speaks as the labs do: every term occurs, in both languages, in the lab it names."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from dlojz.cli import DONE, main
from dlojz.labs.contents import LABS, entry_of
from dlojz.labs.glossary import Term, glossary_markdown, in_order, look_up, plainly, terms
from dlojz.labs.source import Prose, read_source
from dlojz.schema import LabError
from dlojz.text import LANGUAGES, Language, use_language

ROOT = Path(__file__).resolve().parents[2]


@cache
def prose(lab: str, language: Language) -> str:
    """The prose of a lab as plain words."""
    path = ROOT / "solutions" / f"{entry_of(lab).file}.py"
    cells = [cell.text[language] for cell in read_source(path).cells if isinstance(cell, Prose)]
    return plainly(re.sub(r"[*_`]", "", " ".join(" ".join(cells).split())))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("lab", [entry.number for entry in LABS])
def test_every_term_occurs_in_its_lab(lab: str, language: Language) -> None:
    text = prose(lab, language)
    here = [one for one in terms() if one.lab == lab]
    assert here
    wanted = [re.sub(r"[*_`]", "", plainly(one.seen[language == "fr"])) for one in here]
    assert [word for word in wanted if not re.search(rf"(?<!\w){re.escape(word)}", text)] == []


def test_no_term_stands_twice() -> None:
    for index in (0, 1):
        names = [plainly(one.term[index]) for one in terms()]
        assert sorted(set(names)) == sorted(names)
    assert 80 <= len(terms()) <= 150


@pytest.mark.parametrize("one", terms(), ids=lambda one: one.term.en)
def test_a_meaning_is_one_sentence_in_the_typography_of_its_language(one: Term) -> None:
    for meaning in one.meaning:
        assert meaning[0].isupper() or meaning[0] in "*1"
        assert meaning.endswith(".") and not meaning.endswith("..")
        assert not re.search(r"(?<!al)\. [A-ZÀÉ]", meaning)
    assert "'" not in one.meaning.fr and "'" not in one.meaning.en
    assert not re.search(r"\w[;:!?»]( |$)|«\S", one.meaning.fr)
    assert not re.search(r" [;:!?]", one.meaning.en)
    assert one.meaning.en != one.meaning.fr


def test_the_order_is_that_of_each_language() -> None:
    names = [one.term.fr for one in in_order("fr")]
    assert names.index("diffusion") < names.index("échantillonneur") < names.index("gradient") < names.index("1F1B")
    assert plainly("Élagage œuvre’s") == "elagage oeuvre's"


def test_a_word_is_found_in_either_language_and_by_its_beginning() -> None:
    assert [one.term.en for one in look_up("bulle")] == ["bubble"]
    assert [one.term.fr for one in look_up(" BUBBLE ")] == ["bulle"]
    assert {one.term.en for one in look_up("all")} == {"all-reduce", "all-gather", "all-to-all"}
    assert [one.term.en for one in look_up("étage")] == ["stage (of a pipeline)"]


@pytest.mark.parametrize("words", ["bubbel", "<script>", "x" * 500])
def test_an_unknown_word_is_one_sentence(words: str) -> None:
    with pytest.raises(LabError, match="the glossary has no word") as caught:
        look_up(words)
    assert "\n" not in str(caught.value)


def test_no_word_at_all_is_told() -> None:
    with pytest.raises(LabError, match="no word was given"):
        look_up("  ")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_has_every_term_once_with_a_link(language: Language) -> None:
    text = "\n".join(glossary_markdown(language))
    for one in terms():
        name = one.term[language == "fr"].replace(" ;", "\u202f;")
        assert text.count(f"- **{name}**") == 1
    assert len(re.findall(r"\[(?:lab|TP) \d\d\]\(\d\d_\w+\.ipynb\)", text)) == len(terms())


def test_the_command_says_one_word_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labs", "glossary", "bubble"]) == DONE
    assert capsys.readouterr().out.startswith("bubble (bulle) — The time in which ranks of a pipeline wait")
    use_language("fr")
    assert main(["labs", "glossary", "bulle"]) == DONE
    told = capsys.readouterr().out
    assert told.startswith("bulle (bubble) — Le temps") and "[TP 05]" in told
    assert main(["labs", "glossary"]) == DONE
    assert capsys.readouterr().out.count(" — ") >= len(terms())
