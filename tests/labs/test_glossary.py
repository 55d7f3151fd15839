"""The glossary speaks as the labs do: every term, or what its entry says for it, occurs in the lab it names."""

import re
from functools import cache
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES, Language, use_language
from dlojz.cli.main import DONE, main
from dlojz.labs.kit.contents import LABS, Term, bare, entry_of, glossary_markdown, in_order, look_up, plainly, terms
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.source import ProseCells, read_source

ROOT = Path(__file__).resolve().parents[2]


@cache
def prose(lab: str, language: Language) -> str:
    """The prose of a lab as plain words."""
    path = ROOT / "solutions" / f"{entry_of(lab).file}.py"
    cells = [cell.text[language] for cell in read_source(path).cells if isinstance(cell, ProseCells)]
    return plainly(re.sub(r"[*_`]", "", " ".join(" ".join(cells).split())))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("lab", [entry.number for entry in LABS])
def test_every_term_occurs_in_its_lab(lab: str, language: Language) -> None:
    text = prose(lab, language)
    here = [one for one in terms() if one.lab == lab]
    assert here
    wanted = [one.seen[language == "fr"] for one in here]
    assert [words for words in wanted if not whole(words).search(text)] == []


def whole(words: str) -> re.Pattern[str]:
    """Finds whole words, each as it is or in the plural."""
    each = re.sub(r"[*_`]", "", plainly(words)).split()
    return re.compile(r"(?<!\w)" + r"\s".join(rf"{re.escape(word)}(?:s|es|x)?" for word in each) + r"(?!\w)")


def test_plainly_whole_words_are_not_found_inside_others() -> None:
    assert whole("row").search("two rows") and not whole("row").search("it grows or is rowed")
    assert whole("état de l’optimiseur").search(plainly("les états de l’optimiseur"))


@pytest.mark.parametrize(
    "one", [one for one in terms() if one.seen != Said(*map(bare, one.term))], ids=lambda one: one.term.en
)
def test_other_words_are_looked_for_only_where_a_lab_has_not_the_term_itself(one: Term) -> None:
    found = [whole(bare(one.term[language == "fr"])).search(prose(one.lab, language)) for language in LANGUAGES]
    assert not all(found)


def test_no_term_stands_twice() -> None:
    for index in (0, 1):
        names = [plainly(one.term[index]) for one in terms()]
        assert sorted(set(names)) == sorted(names)
    assert 80 <= len(terms()) <= 180


def test_a_meaning_is_one_sentence_in_the_typography_of_its_language() -> None:
    for one in terms():
        _is_one_sentence(one)


def _is_one_sentence(one: Term) -> None:
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


def test_look_up_finds_a_word_in_either_language_and_by_its_beginning() -> None:
    assert [one.term.en for one in look_up("bulle")] == ["bubble"]
    assert [one.term.fr for one in look_up(" BUBBLE ")] == ["bulle"]
    assert {one.term.en for one in look_up("all")} == {"all-reduce", "all-gather", "all-to-all"}
    assert [one.term.en for one in look_up("étage")] == ["stage (of a pipeline)"]


def test_look_up_gives_both_senses_of_a_word() -> None:
    assert {one.term.en for one in look_up("débit")} == {"throughput", "bandwidth"}
    assert {one.term.en for one in look_up("stage")} == {"stage (of ZeRO)", "stage (of a pipeline)"}
    assert {one.term.fr for one in look_up("biais")} == {"biais (d’une couche)", "biais (d’une estimation)"}


@pytest.mark.parametrize(
    "words", ["dp", "tp", "pp", "ep", "MFU", "MLP", "INT8", "FP8", "FP16", "inférence", "sparsity"]
)
def test_look_up_finds_no_short_word_inside_others(words: str) -> None:
    assert [plainly(words) in map(plainly, one.term) for one in look_up(words)] == [True]


@pytest.mark.parametrize(
    ("words", "term"), [("router", "gate (or router)"), ("bande passante", "bandwidth"), ("lottery", "winning ticket")]
)
def test_look_up_finds_another_name_too(words: str, term: str) -> None:
    assert [one.term.en for one in look_up(words)] == [term]


@pytest.mark.parametrize("words", ["bubbel", "<script>", "x" * 500])
def test_look_up_refuses_an_unknown_word_in_one_sentence(words: str) -> None:
    with pytest.raises(LabError, match="the glossary has no word") as caught:
        look_up(words)
    assert "\n" not in str(caught.value)


def test_look_up_tells_near_words_as_they_are_written() -> None:
    with pytest.raises(LabError, match=r"near it: perte d’équilibrage\.$"):
        look_up("perte d'equilibre")
    with pytest.raises(LabError, match=r"near it: bubble\.$"):
        look_up("bubbel")


def test_look_up_does_not_seek_few_letters_inside_words() -> None:
    assert [one.term.en for one in look_up("ubbl")] == ["bubble"]
    with pytest.raises(LabError, match=r"near it: bulle\.$"):
        look_up("ull")


@pytest.mark.parametrize("words", ["xyz", "qqqq"])
def test_look_up_names_no_word_where_nothing_is_near(words: str) -> None:
    with pytest.raises(LabError) as caught:
        look_up(words)
    assert str(caught.value) == (
        f"the glossary has no word {words!r}, nor one near it: `dlojz labs glossary` shows all of them."
    )


def test_look_up_tells_that_no_word_was_given() -> None:
    with pytest.raises(LabError, match="no word was given"):
        look_up("  ")


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_has_every_term_once_with_a_link(language: Language) -> None:
    text = "\n".join(glossary_markdown(language))
    for one in terms():
        name = one.term[language == "fr"].replace(" ;", "\u202f;")
        assert text.count(f"- **{name}**") == 1
    assert len(re.findall(r"\[(?:lab|TP) \d\d\]\(\d\d_\w+\.ipynb\)", text)) == len(terms())


def test_main_labs_glossary_says_one_word_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["labs", "glossary", "bubble"]) == DONE
    assert capsys.readouterr().out.startswith("bubble (bulle) — The time in which ranks of a pipeline wait")
    use_language("fr")
    assert main(["labs", "glossary", "bulle"]) == DONE
    told = capsys.readouterr().out
    assert told.startswith("bulle (bubble) — Le temps") and "[TP 05]" in told
    assert main(["labs", "glossary"]) == DONE
    assert capsys.readouterr().out.count(" — ") >= len(terms())
