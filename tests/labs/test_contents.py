"""The set of labs: what the catalogue says is what the labs say, and links lead from one to the next."""

import itertools
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import LANGUAGES
from dlojz.campaign.campaign import campaigns_folder
from dlojz.labs.kit.build import contents_notebook
from dlojz.labs.kit.contents import (
    BY_NUMBER,
    CONTENTS,
    END,
    GLOSSARY,
    LABS,
    TOP,
    LabEntry,
    duration,
    entry_of,
    link_line,
    neighbours,
    total_minutes,
)
from dlojz.labs.kit.lab import NUMBERS, content_of

ROOT = Path(__file__).resolve().parents[2]
# An author may be writing a lab whose source is not there yet.
WRITTEN = [entry for entry in LABS if (ROOT / "solutions" / f"{entry.file}.py").is_file()]
FOLDERS = [ROOT / folder / language for folder in ("notebooks", "solutions") for language in LANGUAGES]
BUILT = [entry for entry in WRITTEN if all((folder / entry.notebook).is_file() for folder in FOLDERS)]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+\.ipynb)\)")
SAID = {
    60: ("an hour|one hour", "une heure"),
    75: ("an hour and a quarter", "une heure et quart"),
    90: ("an hour and a half", "une heure et demie"),
    120: ("two hours", "deux heures"),
}


def prose(entry: LabEntry, language: str) -> str:
    text = (ROOT / "solutions" / f"{entry.file}.py").read_text(encoding="utf-8")
    cells = re.findall(rf'^# %% \[markdown\] lang="{language}"\n(.*?)(?=^# %%|\Z)', text, re.MULTILINE | re.DOTALL)
    return " ".join(re.sub(r"^# ?", "", cell, flags=re.MULTILINE) for cell in cells)


def test_labs_have_every_source_and_every_module() -> None:
    assert [entry.number for entry in LABS] == [f"{number:02d}" for number in range(14)]
    assert {path.stem for path in (ROOT / "solutions").glob("*.py")} <= {entry.file for entry in LABS}
    assert set(NUMBERS) <= set(BY_NUMBER)


@pytest.mark.parametrize("number", NUMBERS)
def test_a_lab_has_its_folder_of_exercises(number: str) -> None:
    assert content_of(number).EXERCISES


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.number)
def test_minutes_of_a_lab_entry_are_those_of_its_introduction(entry: LabEntry) -> None:
    english, french = SAID[entry.minutes]
    first_english, first_french = (" ".join(prose(entry, language).split())[:4000] for language in LANGUAGES)
    assert re.search(rf"Allow (?:{english})\.", first_english)
    assert re.search(rf"Comptez {french}\.", first_french)


def test_a_lab_comes_after_those_it_builds_on() -> None:
    for place, entry in enumerate(LABS):
        assert set(entry.after) <= {one.number for one in LABS[:place]}


def test_the_campaigns_of_a_lab_exist() -> None:
    there = {path.stem for path in campaigns_folder().glob("*.toml")}
    assert {name for entry in LABS for name in entry.campaigns} <= there


def test_durations_are_said_as_one_says_them() -> None:
    assert [duration(minutes).replace("\u00a0", " ") for minutes in (45, 60, 75, 605)] == [
        "45 min",
        "1 h",
        "1 h 15",
        "10 h 05",
    ]
    assert total_minutes() == sum(entry.minutes for entry in LABS)


def test_entry_of_refuses_an_unknown_lab() -> None:
    with pytest.raises(LabError, match="unknown lab '14'"):
        entry_of("14")


def test_neighbours_form_one_chain() -> None:
    assert neighbours("00")[0] is None
    assert neighbours("13")[1] is None
    for one, other in itertools.pairwise(LABS):
        assert neighbours(one.number)[1] == other
        assert neighbours(other.number)[0] == one


def notebook(folder: str, language: str, name: str) -> Any:
    return nbformat.read(ROOT / folder / language / name, as_version=4)


@pytest.mark.parametrize("folder", ["notebooks", "solutions"])
@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("entry", BUILT, ids=lambda entry: entry.number)
def test_a_notebook_begins_and_ends_with_its_links(entry: LabEntry, language: str, folder: str) -> None:
    cells = notebook(folder, language, entry.notebook).cells
    assert (cells[0].id, cells[-1].id) == (TOP, END)
    targets = LINK.findall(cells[0].source)
    assert targets == LINK.findall(cells[-1].source)
    before, after = neighbours(entry.number)
    wanted = [before and before.notebook, CONTENTS, GLOSSARY, after and after.notebook]
    assert [Path(target).name for target in targets] == [name for name in wanted if name]
    awaited = {one.notebook for one in LABS if one not in BUILT}
    for target in targets:
        assert target in awaited or (ROOT / folder / language / target).is_file()


def test_the_line_speaks_the_language_of_the_notebook() -> None:
    english, french = (link_line(entry_of("05"), language) for language in LANGUAGES)
    assert "Contents" in english and "Sommaire" in french
    assert "04 ZeRO\u00a0: répartir les états" in french


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_page_of_contents_leads_to_every_lab_and_shows_progress(language: str) -> None:
    page = contents_notebook(language)
    nbformat.validate(page)
    table = page.cells[0].source
    assert LINK.findall(table)[: len(LABS)] == [entry.notebook for entry in LABS]
    assert [cell.source for cell in page.cells if cell.cell_type == "code"] == [
        "from dlojz import labs\n\nlabs.overview()"
    ]
    assert GLOSSARY in page.cells[-1].source


@pytest.mark.parametrize("entry", WRITTEN, ids=lambda entry: entry.number)
def test_heading_of_a_lab_entry_is_its_name_on_the_page_of_labs(entry: LabEntry) -> None:
    text = (ROOT / "docs" / "labs.md").read_text(encoding="utf-8")
    assert f"[{entry.heading('en')}](../notebooks/en/{entry.notebook})" in text
    assert f"[{entry.title.fr}](../notebooks/fr/{entry.notebook})" in text
