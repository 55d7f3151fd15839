"""Contents of the course: the registry of the labs, links between notebooks, glossary, measured durations.

The labs and their order come from `data/labs.toml`, the words of the glossary from `data/glossary.toml`. Time and
memory of the solutions are written by `benchmarks/lab_durations.py`, in two files, as time needs a machine with nothing
else to do. A figure is measured or missing, never typed in.

Links are Markdown with relative addresses, so that they work in JupyterLab, on a forge and, turned into addresses of
pages, in the book.
"""

import json
import re
import tomllib
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from dlojz.base.contract import parse_json
from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import Language, Sentences, one_of
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.source import french_spaces

TEXTS = Sentences(Path(__file__).with_name("data") / "contents.md")


@dataclass(frozen=True, kw_only=True)
class LabEntry:
    """One lab of the set.

    Args:
        number: Two digits, e.g. `01`.
        folder: Of its exercises, under `dlojz/labs`.
        file: Stem of its source and of its notebooks, in every language.
        title: As its pages give it.
        minutes: What a student needs, as the lab's introduction says: an estimate.
        after: Numbers of the labs whose results it builds on.
        processes: The most ranks that one of its cells or checks runs on; a notebook has more processes than these,
            see `dlojz.labs.kit.contents.Room`.
        teaches: What it is about, in one line.
        chapter: Of the course that the lab goes with.
        campaigns: Campaigns of measurements that show the same at full size on a cluster, see `dlojz bench`.
    """

    number: str
    folder: str
    file: str
    title: Said
    minutes: int
    after: tuple[str, ...]
    processes: int
    teaches: Said
    chapter: Said
    campaigns: tuple[str, ...] = ()

    @property
    def notebook(self) -> str:
        """File name of its notebooks, in every language."""
        return f"{self.file}.ipynb"

    def heading(self, language: Language) -> str:
        """Number and title, e.g. `04 ZeRO: sharding the states`."""
        # Said is (en, fr), so False takes the English text and True the French one.
        return f"{self.number} {self.title[language == 'fr']}"


def _read_labs(path: Path) -> tuple[LabEntry, ...]:
    content = tomllib.loads(path.read_text(encoding="utf-8"))
    return tuple(
        LabEntry(
            **{
                **row,
                "title": Said(**row["title"]),
                "teaches": Said(**row["teaches"]),
                # The chapter is named by its key; its title stands once in the file.
                "chapter": Said(**content["chapter"][row["chapter"]]),
                "after": tuple(row["after"]),
                "campaigns": tuple(row.get("campaigns", ())),
            }
        )
        for row in content["lab"]
    )


LABS = _read_labs(Path(__file__).with_name("data") / "labs.toml")
BY_NUMBER = {entry.number: entry for entry in LABS}


def entry_of(number: str) -> LabEntry:
    """The lab of a number.

    Raises:
        LabError: if there is none; the sentence lists those that exist.
    """
    if number not in BY_NUMBER:
        raise LabError(one_of("lab", number, BY_NUMBER))
    return BY_NUMBER[number]


def neighbours(number: str) -> tuple[LabEntry | None, LabEntry | None]:
    """The labs before and after one; None at the ends."""
    index = LABS.index(entry_of(number))
    return (LABS[index - 1] if index else None), (LABS[index + 1] if index + 1 < len(LABS) else None)


def duration(minutes: int) -> str:
    """Minutes as one says them: `45 min`, `1 h`, `1 h 30`."""
    hours, remaining_minutes = divmod(minutes, 60)
    if not hours:
        return f"{remaining_minutes}\u00a0min"
    return f"{hours}\u00a0h" + (f"\u00a0{remaining_minutes:02d}" if remaining_minutes else "")


def total_minutes(numbers: Iterable[str] | None = None) -> int:
    """What some labs take, or the whole set.

    Raises:
        LabError: if there is no lab of a number.
    """
    return sum(entry.minutes for entry in (LABS if numbers is None else map(entry_of, numbers)))


@dataclass(frozen=True)
class Programme:
    """A choice of labs for some days.

    Args:
        days: How long, as a heading says it.
        without: Those that its labs build on and that it leaves out, for who knows what they teach.
    """

    days: Said
    numbers: tuple[str, ...]
    without: tuple[str, ...] = ()

    @property
    def minutes(self) -> int:
        """What its labs take."""
        return total_minutes(self.numbers)


def _up_to(number: str, but: tuple[str, ...] = ()) -> tuple[str, ...]:
    # Two digits each, so that texts compare as numbers.
    return tuple(entry.number for entry in LABS if entry.number <= number and entry.number not in but)


PROGRAMMES = (
    Programme(Said("half a day", "une demi-journée"), ("00", "03")),
    Programme(Said("two days", "deux jours"), _up_to("06", but=("01",)), without=("01",)),
    Programme(Said("four days", "quatre jours"), _up_to("13")),
)
"""From short to long; a day has about six hours of lab. Who does not know attention begins with lab 01."""


CONTENTS, GLOSSARY = "contents.ipynb", "glossary.ipynb"
TOP, END = "links-top", "links-end"


def entry_of_file(stem: str) -> LabEntry | None:
    """The lab whose source has this stem; None for one that is not of the set."""
    return next((entry for entry in LABS if entry.file == stem), None)


def linked(notebook: Any, stem: str, language: Language, *, student: bool) -> Any:
    """The notebook with its two lines of links; as it is where its lab is not of the set.

    Args:
        notebook: As composed from its source.
        student: A solution lies in another folder than the page of contents, and links to it from there.
    """
    import nbformat.v4

    entry = entry_of_file(stem)
    if entry is None:
        return notebook
    pages = "" if student else f"../../notebooks/{language}/"
    line = link_line(entry, language, pages=pages)
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(line, id=TOP))
    notebook.cells.append(nbformat.v4.new_markdown_cell(f"---\n{line}", id=END))
    return notebook


def link_line(entry: LabEntry, language: Language, *, pages: str = "") -> str:
    """Previous lab, contents, glossary, next lab, as Markdown.

    Args:
        pages: Folder of the contents and of the glossary, relative to the notebook; empty, or ending in a slash.
    """
    before, after = neighbours(entry.number)
    contents, glossary = ("Sommaire", "Glossaire") if language == "fr" else ("Contents", "Glossary")
    parts = [
        f"← [{before.heading(language)}]({before.notebook})" if before else "",
        f"[{contents}]({pages}{CONTENTS})",
        f"[{glossary}]({pages}{GLOSSARY})",
        f"[{after.heading(language)}]({after.notebook}) →" if after else "",
    ]
    line = " · ".join(part for part in parts if part)
    return french_spaces(line) if language == "fr" else line


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
            term=Said(row["en"], row["fr"]),
            meaning=Said(row["en_is"], row["fr_is"]),
            lab=entry_of(row["lab"]).number,
            # What the prose of the lab says, where it differs from the bare term.
            seen=Said(**row["seen"]) if "seen" in row else Said(bare(row["en"]), bare(row["fr"])),
            also=tuple(row.get("also", ())),
        )
        for row in content["term"]
    )


def in_order(language: Language) -> list[Term]:
    """All terms by their name in one language, accents and case aside, numbers last."""
    french = language == "fr"

    def place(term: Term) -> tuple[bool, str]:
        plain = plainly(term.term[french].strip("*"))
        # False sorts before True: digits come after letters.
        return plain[:1].isdigit(), plain

    return sorted(terms(), key=place)


def look_up(words: str) -> list[Term]:
    """The terms that a word names, in either language: those called so, else those in whose name a word begins so,
    else, from `WITHIN` letters on, those whose name holds it.

    Raises:
        LabError: if there is none; the sentence tells those that are called nearly so, where there are.
    """
    query = plainly(words.strip())
    if not query:
        raise TEXTS.refusal("glossary", "no word")
    begins = re.compile(rf"\b{re.escape(query)}")
    matchers: list[Callable[[str], bool]] = [lambda name: name == query, lambda name: begins.search(name) is not None]
    if len(query) >= WITHIN:
        matchers.append(lambda name: query in name)
    # All terms are tried in one way before the next way, so that a name in full wins over a part of one.
    for matcher in matchers:
        if matches := [term for term in terms() if any(matcher(plainly(name)) for name in term.names)]:
            return matches
    # Reversed: of two names that read alike, the earlier one of the term is shown.
    display_names = {plainly(name): name for term in terms() for name in reversed(term.names)}
    suggestions = ", ".join(display_names[name] for name in get_close_matches(query, display_names, n=3))
    if suggestions:
        raise TEXTS.refusal("glossary", "words near it", words=words, suggestions=suggestions)
    raise TEXTS.refusal("glossary", "unknown word", words=words)


def bare(name: str) -> str:
    """A name without what ends it in parentheses."""
    return _IN_PARENTHESES.sub("", name)


def plainly(text: str) -> str:
    """Text without accents and case, for comparing."""
    # NFKD parts an accent from its letter, for the line below to drop it; it leaves œ alone.
    letters = unicodedata.normalize("NFKD", text.replace("’", "'").replace("œ", "oe")).casefold()
    return "".join(sign for sign in letters if not unicodedata.combining(sign))


def glossary_markdown(language: Language) -> list[str]:
    """The glossary as Markdown, one text per initial letter."""
    french = language == "fr"
    by_letter: dict[str, list[str]] = {}
    for term in in_order(language):
        initial = plainly(term.term[french].strip("*"))[0].upper()
        name, translation, entry = term.term[french], term.term[not french], entry_of(term.lab)
        called = f"**{name}**" if name == translation else f"**{name}** (*{translation}*)"
        line = f"- {called} — {term.meaning[french]} [{'TP' if french else 'lab'} {entry.number}]({entry.notebook})"
        by_letter.setdefault("0–9" if initial.isdigit() else initial, []).append(line)
    texts = [f"### {letter}\n\n" + "\n".join(lines) for letter, lines in by_letter.items()]
    # The introduction is the first cell, the letters follow in alphabetical order, digits last.
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


MEASURED = Path(__file__).with_name("data") / "durations.json"
ROOMS = Path(__file__).with_name("data") / "rooms.json"


@dataclass(frozen=True, kw_only=True)
class Duration:
    """The time of one execution of a solution, from an empty folder of runs.

    Args:
        elapsed_s: Seconds from its first cell to its last.
        processor_s: Seconds of all processors in all processes.
        cores: Of the machine.
        load: Mean number of processes that wanted a core, over five minutes: above `cores`, others slowed it down.
        libraries: Which of the optional libraries were there, as they are called; without them lab 12 does less.
        date: When, ISO 8601.
    """

    elapsed_s: float
    processor_s: float
    cores: int
    load: float
    libraries: Sequence[str]
    date: str


@dataclass(frozen=True, kw_only=True)
class Room:
    """The room that one execution of a solution takes, from an empty folder of runs.

    Args:
        memory_bytes: The most that the kernel and all processes that come from it held at once: private pages, their
            share of those that a fork has in common with its parent, and the pages of files once per interpreter,
            whoever else on the machine maps them too.
        processes: The most of them at once, the kernel and what watches over the ranks included.
        runs_bytes: Disk that the folder of runs takes at the end.
        libraries: Which of the optional libraries were there, as they are called.
        date: When, ISO 8601.
    """

    memory_bytes: int
    processes: int
    runs_bytes: int
    libraries: Sequence[str]
    date: str


def optional_libraries() -> list[str]:
    """The optional libraries that are installed here, as they are called."""
    from dlojz.libraries.library_catalogue import LIBRARIES

    return [library.title for library in LIBRARIES.values() if library.optional and library.installed]


def read_durations(path: Path = MEASURED) -> dict[str, Duration]:
    """Lab → the time of its execution; empty where nothing has been measured."""
    return {number: Duration(**row) for number, row in _read(path).items()}


def read_rooms(path: Path = ROOMS) -> dict[str, Room]:
    """Lab → the room of its execution; empty where nothing has been measured."""
    return {number: Room(**row) for number, row in _read(path).items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_bytes())
    # Not measured yet, or damaged: the page shows a dash.
    except (OSError, LabError):
        return {}
    return content if isinstance(content, dict) else {}


def write_measured(measurements: Mapping[str, Any], path: Path) -> None:
    """Keep what was measured of each lab: a `Duration` in `MEASURED`, a `Room` in `ROOMS`."""
    write_atomic(
        path,
        json.dumps({number: asdict(measurement) for number, measurement in sorted(measurements.items())}, indent=1)
        + "\n",
    )
