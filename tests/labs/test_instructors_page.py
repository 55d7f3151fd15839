"""The instructor's pages: the table is made of what was measured, sums are sums, and every command exists."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.cli.main import DONE, main
from dlojz.labs.kit import build
from dlojz.labs.kit.build import PAGE, STUDENTS, instructors_labs_table, listed, with_table
from dlojz.labs.kit.contents import (
    LABS,
    PROGRAMMES,
    Programme,
    Room,
    duration,
    entry_of,
    optional_libraries,
    read_durations,
    read_rooms,
    total_minutes,
    write_measured,
)
from dlojz.libraries.library_catalogue import LIBRARIES

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / PAGE, ROOT / "docs" / "site.md"]
HOURS_A_DAY = 6
DAYS = {"half a day": 0.7, "two days": 2, "four days": 4}


def row(number: str) -> list[str]:
    """The cells of a lab's row, without the bars."""
    (line,) = re.findall(rf"^\| ({number} .*) \|$", instructors_labs_table(), re.MULTILINE)
    return [cell.strip() for cell in line.split("|")]


def test_the_page_holds_the_table_and_nothing_else_is_touched() -> None:
    text = (ROOT / PAGE).read_text(encoding="utf-8")
    assert instructors_labs_table() in text
    assert with_table(text) == text
    assert with_table("# no place\n") == "# no place\n"
    for entry in LABS:
        assert re.search(rf"^\| {re.escape(entry.heading('en'))} \| {duration(entry.minutes)} \|", text, re.MULTILINE)


def test_read_rooms_and_durations_have_every_lab() -> None:
    numbers = {entry.number for entry in LABS}
    assert set(read_durations()) == set(read_rooms()) == numbers
    optional = {one.title for one in LIBRARIES.values() if one.command != "make lab"}
    for number in numbers:
        room = read_rooms()[number]
        assert room.processes > (entry_of(number).processes if entry_of(number).processes > 1 else 0)
        assert room.memory_bytes > 2**28 and room.runs_bytes > 0
        assert set(room.libraries) <= optional and set(read_durations()[number].libraries) <= optional
    assert set(optional_libraries()) <= optional


def test_measurements_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_measured(read_rooms(), tmp_path / "rooms.json")
    assert read_rooms(tmp_path / "rooms.json") == read_rooms()
    write_measured(read_durations(), tmp_path / "durations.json")
    assert read_durations(tmp_path / "durations.json") == read_durations()
    assert read_rooms(tmp_path / "nowhere.json") == {}


def test_instructors_labs_table_shows_what_was_measured_and_sizes_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Room(memory_bytes=2**30, processes=3, runs_bytes=2**20, libraries=["Accelerate"], date="2030-01-01")
    rooms = {entry.number: plain for entry in LABS}
    rooms["05"] = replace(plain, memory_bytes=3 * 2**30)
    rooms["07"] = replace(plain, processes=20, runs_bytes=2**22)
    monkeypatch.setattr(build, "read_rooms", lambda: rooms)
    assert row("05")[6:9] == ["3.0 GiB", "3", "1.0 MiB"]
    assert row("07")[6:9] == ["1.0 GiB", "20", "4.0 MiB"]
    text = " ".join(instructors_labs_table().split())
    assert "at most 3.0 GiB (lab 05) and 20 processes (lab 07)" in text
    assert f"take up to {3 * STUDENTS:.1f} GiB and {20 * STUDENTS} processes" in text
    assert f"| {len(LABS) + 3:.1f} MiB | |" in instructors_labs_table()
    assert "with the optional Accelerate installed" in text


def test_instructors_labs_table_tells_that_a_machine_had_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The load is laid over the cores of the largest machine: 2 or 4 of them here."""
    plain = replace(read_durations()["00"], cores=2, load=8.0)
    for last, told in ((4, False), (3, True)):
        durations = {entry.number: plain for entry in LABS} | {"12": replace(plain, cores=last)}
        monkeypatch.setattr(build, "read_durations", lambda made=durations: made)
        text = instructors_labs_table()
        assert f"elapsed seconds on {last} cores" in text and ("a load of up to 8" in text) == told


def test_instructors_labs_table_has_a_dash_for_what_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "read_rooms", dict)
    monkeypatch.setattr(build, "read_durations", dict)
    assert row("05")[5:9] == ["—"] * 4
    assert "have not been measured" in instructors_labs_table() and "To size a hub" not in instructors_labs_table()


@pytest.mark.parametrize("programme", PROGRAMMES, ids=lambda one: one.days.en)
def test_a_choice_of_labs_holds_what_they_build_on_and_fits_its_days(programme: Programme) -> None:
    for number in programme.numbers:
        assert set(entry_of(number).after) <= {*programme.numbers, *programme.without}
    assert not set(programme.numbers) & set(programme.without)
    assert programme.minutes == sum(entry_of(number).minutes for number in programme.numbers)
    assert programme.minutes <= 60 * HOURS_A_DAY * DAYS[programme.days.en]
    assert f"({duration(programme.minutes)} of lab)" in instructors_labs_table()


def test_total_minutes_are_those_of_the_last_of_the_programmes() -> None:
    assert PROGRAMMES[-1].minutes == total_minutes()
    with pytest.raises(LabError, match="unknown lab '99'"):
        total_minutes(["99"])


def test_numbers_are_listed_as_one_says_them() -> None:
    assert listed(("00", "02", "03"), "en") == "00, 02 and 03"
    assert listed(("09", "10", "11", "12"), "fr") == "09 à 12"
    assert listed(("00", "02", "03", "04"), "en") == "00 and 02 to 04"
    assert listed(("01",), "fr") == "01"


def code(path: Path) -> list[str]:
    """What a page shows as code: indented lines, and what stands between backquotes, on one line each."""
    text = path.read_text(encoding="utf-8")
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)]
    return [*re.findall(r"^ {4,}(.*)$", text, re.MULTILINE), *spans]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_main_has_every_command_of_the_page(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each `dlojz …` is accepted by the command line as far as its flags go."""
    lines = [line.partition("#")[0] for line in code(path)]
    commands = [found for line in lines if (found := re.match(r"(?:\S*/)?dlojz (\w+)(.*)", line))]
    assert commands
    for subcommand in sorted({found[1] for found in commands}):
        # The everyday help names --help-all, which has the other options.
        codes = {main([subcommand, word]) for word in ("--help", "--help-all")}
        assert codes == {DONE}, f"{path.name} names `dlojz {subcommand}`, which is unknown"
        told = capsys.readouterr().out
        rests = [found[2] for found in commands if found[1] == subcommand]
        for flag in {flag for rest in rests for flag in re.findall(r"--[a-z-]+", rest)}:
            assert flag in told, f"{path.name} gives {flag} to `dlojz {subcommand}`, which has no such flag"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_make_target_and_every_file_of_the_page_exists(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {found for line in code(path) for found in re.findall(r"^make ([a-z-]+)$", line)}
    assert named and named <= targets
    for line in code(path):
        for file in re.findall(r"(?:benchmarks|slurm)/[a-z0-9_/.-]+\.(?:py|toml)|constraints\.txt", line):
            assert (ROOT / file).is_file(), f"{path.name} names {file}, which is not there"
