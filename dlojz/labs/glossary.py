"""The words of the labs in both languages: one sentence each, and the lab where one first needs them.

Layer 6 (labs). Invariant: one source, `data/glossary.toml`; every term occurs in the prose of the lab it names, in both
languages (tested), so that the glossary speaks as the labs do.
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


@dataclass(frozen=True)
class Term:
    """One word of the field.

    Args:
        term: In both languages, as the labs write it.
        meaning: One sentence.
        lab: Two digits: where a student first needs it.
        seen: What to look for in the prose of that lab.
    """

    term: Said
    meaning: Said
    lab: str
    seen: Said

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
            seen=Said(**one["seen"]) if "seen" in one else Said(one["en"], one["fr"]),
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
    """The terms that a word names, in either language: the one called so, else those in whose name a word
    begins so, else those whose name holds it.

    Raises:
        LabError: if there is none; the sentence tells the nearest ones.
    """
    wanted = plainly(words.strip())
    if not wanted:
        raise LabError(
            say(
                en="no word was given: write one as in `dlojz labs glossary bubble`.",
                fr="aucun mot n’a été donné : écrivez-en un, comme dans `dlojz labs glossary bulle`.",
            )
        )
    names = {one: tuple(plainly(name) for name in one.term) for one in terms()}
    begins = re.compile(rf"\b{re.escape(wanted)}")
    ways: tuple[Callable[[str], bool], ...] = (
        lambda name: name == wanted,
        lambda name: begins.search(name) is not None,
        lambda name: wanted in name,
    )
    for way in ways:
        if found := [one for one, both in names.items() if any(map(way, both))]:
            return found
    known = sorted({name for both in names.values() for name in both})
    near = ", ".join(get_close_matches(wanted, known, n=3)) or ", ".join(known[:5])
    raise LabError(
        say(
            en=f"the glossary has no word {words!r}; near it: {near}.",
            fr=f"le glossaire n’a pas de mot {words!r} ; les plus proches : {near}.",
        )
    )


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
            f"# Glossaire\n\nLes {count} mots du cours, en français et *en anglais*, chacun avec le TP où l’on en a "
            "besoin pour la première fois. Certains mots anglais n’ont pas de traduction en usage : ils sont donnés "
            f"tels que les chercheurs les emploient. [Sommaire]({CONTENTS})"
        )
    return (
        f"# Glossary\n\nThe {count} words of the course, in English and *in French*, each with the lab where one first "
        f"needs it. [Contents]({CONTENTS})"
    )
