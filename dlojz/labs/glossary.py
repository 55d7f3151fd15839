"""The words of the labs in both languages: one sentence each, and the lab that explains them.

Layer 6 (labs). Invariant: one source, `data/glossary.toml`; every term, or what its entry says to look for instead,
occurs as a whole word in the prose of the lab it names, in both languages (tested).
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from dlojz.labs.contents import entry_of
from dlojz.labs.links import CONTENTS
from dlojz.labs.source import french_spaces
from dlojz.labs.verdict import Said
from dlojz.schema import LabError
from dlojz.text import Language, say

SOURCE = Path(__file__).with_name("data") / "glossary.toml"
WITHIN = 4
"""Letters from which a word is also looked for inside others: a shorter one would be found anywhere."""
_IN_PARENTHESES = re.compile(r" \([^)]*\)$")


@dataclass(frozen=True)
class Term:
    """One word of the field.

    Args:
        term: In both languages; what ends it in parentheses tells two senses apart, or is its abbreviation.
        meaning: One sentence.
        lab: Two digits: the lab that explains it, which need not be the first where it is met.
        seen: What to look for in the prose of that lab: the term without its parentheses, unless the lab says it
            otherwise.
        also: Other names by which it is looked up, of either language.
    """

    term: Said
    meaning: Said
    lab: str
    seen: Said
    also: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All that it is called: in both languages, with and without its parentheses, and its other names."""
        return (*(bare(name) for name in self.term), *self.also, *self.term)

    def data(self) -> dict[str, str]:
        """The term as plain JSON data."""
        return {
            "en": self.term.en,
            "fr": self.term.fr,
            "lab": self.lab,
            "meaning_en": self.meaning.en,
            "meaning_fr": self.meaning.fr,
        }


@cache
def terms() -> tuple[Term, ...]:
    """All terms, in the order of the labs."""
    content = tomllib.loads(SOURCE.read_text(encoding="utf-8"))
    return tuple(
        Term(
            term=Said(one["en"], one["fr"]),
            meaning=Said(one["en_is"], one["fr_is"]),
            lab=entry_of(one["lab"]).number,
            seen=Said(**one["seen"]) if "seen" in one else Said(bare(one["en"]), bare(one["fr"])),
            also=tuple(one.get("also", ())),
        )
        for one in content["term"]
    )


def in_order(language: Language) -> list[Term]:
    """All terms by their name in one language, accents and case aside, numbers last."""
    french = language == "fr"

    def place(one: Term) -> tuple[bool, str]:
        plain = plainly(one.term[french])
        return plain[:1].isdigit(), plain

    return sorted(terms(), key=place)


def look_up(words: str) -> list[Term]:
    """The terms that a word names, in either language: those called so, else those in whose name a word begins so,
    else, from `WITHIN` letters on, those whose name holds it.

    Raises:
        LabError: if there is none; the sentence tells those that are called nearly so, where there are.
    """
    wanted = plainly(words.strip())
    if not wanted:
        raise LabError(
            say(
                en="no word was given: write one as in `dlojz labs glossary bubble`.",
                fr="aucun mot n’a été donné : écrivez-en un, comme dans `dlojz labs glossary bulle`.",
            )
        )
    begins = re.compile(rf"\b{re.escape(wanted)}")
    ways: list[Callable[[str], bool]] = [lambda name: name == wanted, lambda name: begins.search(name) is not None]
    if len(wanted) >= WITHIN:
        ways.append(lambda name: wanted in name)
    for way in ways:
        if found := [one for one in terms() if any(way(plainly(name)) for name in one.names)]:
            return found
    known = {plainly(name): name for one in terms() for name in reversed(one.names)}
    near = ", ".join(known[name] for name in get_close_matches(wanted, known, n=3))
    if near:
        raise LabError(
            say(
                en=f"the glossary has no word {words!r}; near it: {near}.",
                fr=f"le glossaire n’a pas de mot {words!r} ; voyez plutôt : {near}.",
            )
        )
    raise LabError(
        say(
            en=f"the glossary has no word {words!r}, nor one near it: `dlojz labs glossary` shows all of them.",
            fr=f"le glossaire n’a ni le mot {words!r} ni un mot proche : `dlojz labs glossary` les montre tous.",
        )
    )


def bare(name: str) -> str:
    """A name without what ends it in parentheses."""
    return _IN_PARENTHESES.sub("", name)


def plainly(text: str) -> str:
    """Text without accents and case, for comparing."""
    apart = unicodedata.normalize("NFKD", text.replace("’", "'").replace("œ", "oe")).casefold()
    return "".join(sign for sign in apart if not unicodedata.combining(sign))


def glossary_markdown(language: Language) -> list[str]:
    """The glossary as Markdown, one text per initial letter."""
    french = language == "fr"
    by_letter: dict[str, list[str]] = {}
    for one in in_order(language):
        initial = plainly(one.term[french])[0].upper()
        name, other, entry = one.term[french], one.term[not french], entry_of(one.lab)
        called = f"**{name}**" if name == other else f"**{name}** (*{other}*)"
        line = f"- {called} — {one.meaning[french]} [{'TP' if french else 'lab'} {entry.number}]({entry.notebook})"
        by_letter.setdefault("0–9" if initial.isdigit() else initial, []).append(line)
    texts = [f"### {letter}\n\n" + "\n".join(lines) for letter, lines in by_letter.items()]
    texts.insert(0, _introduction(language, len(terms())))
    return [french_spaces(text) for text in texts] if french else texts


def _introduction(language: Language, count: int) -> str:
    if language == "fr":
        return (
            f"# Glossaire\n\nLes {count} mots du cours, en français et *en anglais*, chacun avec le TP qui "
            "l’explique ; on peut l’avoir rencontré avant. Certains mots anglais n’ont pas de traduction en usage : "
            f"ils sont donnés tels que les chercheurs les emploient. [Sommaire]({CONTENTS})"
        )
    return (
        f"# Glossary\n\nThe {count} words of the course, in English and *in French*, each with the lab that explains "
        f"it, though one may meet it before. [Contents]({CONTENTS})"
    )
