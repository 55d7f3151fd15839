"""`dlojz collectives`: lists, shows, times on real processes, and refuses in one sentence."""

import json
from pathlib import Path

import pytest

from dlojz.base.language import Language, use_language
from dlojz.by_hand import collectives
from dlojz.by_hand.collectives import AlphaBetaFit
from dlojz.cli import collectives as calibrating
from dlojz.cli.main import main

PNG = b"\x89PNG\r\n\x1a\n"


def test_main_collectives_counts_in_its_table_what_the_programs_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collectives", "--ranks", "8"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if line.startswith("ring_all_reduce"))
    assert line.split()[-5:] == ["14", "1.75", "×", "0.88", "×"]
    assert all(name in printed for name in collectives.names()) and "nodes of 4" in printed


def test_main_collectives_lists_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["collectives", "--ranks", "6", "--per-node", "2", "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)
    assert [entry["name"] for entry in listed] == collectives.names()
    two_level = next(entry for entry in listed if entry["name"] == "hierarchical_all_reduce")
    assert (two_level["rounds"], two_level["moved"]) == (6, pytest.approx(10 / 6))


def test_main_collectives_tells_one_algorithm_in_words_and_draws_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "ring.png"
    assert main(["collectives", "--name", "ring_all_reduce", "--ranks", "3", "--figure", str(picture)]) == 0
    told = capsys.readouterr()
    assert "step 4\n" in told.out and "  rank 0 sends chunk 2 to rank 1, which adds it\n" in told.out
    assert str(picture) in told.err and picture.read_bytes().startswith(PNG)
    assert main(["collectives", "--name", "tree_reduce", "--ranks", "1"]) == 0
    assert "one rank alone sends nothing" in capsys.readouterr().out


def test_main_collectives_tells_one_algorithm_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["collectives", "--name", "tree_broadcast", "--ranks", "2", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {
        "name": "tree_broadcast",
        "collective": "broadcast",
        "ranks": 2,
        "rounds": 1,
        "moved": 1.0,
        "added": 0.0,
        "steps": [[{"source": 0, "to": 1, "chunks": [0], "places": [0], "add": False}]],
        "values": [[[0], [None]], [[0], [0]]],
    }


@pytest.fixture
def few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four small messages: what is tested here is not the precision of the fit."""
    few = (1024, 4096, 16384, 65536)
    monkeypatch.setattr(calibrating, "SIZES_BYTES", few)
    original = calibrating.measure
    monkeypatch.setattr(calibrating, "measure", lambda name, **given: original(name, few, repeats=3, **given))


@pytest.mark.usefixtures("few_sizes")
def test_main_collectives_calibrates_on_real_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kept, picture = tmp_path / "new" / "calibration.json", tmp_path / "calibration.png"
    words = ["--calibrate", "--ranks", "2", "--output", str(kept), "--figure", str(picture), "--json"]
    assert main(["collectives", *words]) == 0
    answered = json.loads(capfd.readouterr().out)
    calibration = AlphaBetaFit.from_json(kept.read_text())
    assert calibration.size == 2 and [point.message_bytes for point in calibration.points] == [1024, 4096, 16384, 65536]
    assert answered["alpha_s"] == calibration.alpha_s and len(answered["fitted_s"]) == 4
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.usefixtures("few_sizes")
def test_main_collectives_calibrates_our_own_program_as_a_table(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["collectives", "--calibrate", "--ranks", "2", "--name", "tree_all_reduce"]) == 0
    printed = capfd.readouterr().out
    assert "tree_all_reduce, 2 ranks: α = " in printed and "residual" in printed and "64.0 KiB" in printed


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--name ring_allreduce", ["did you mean 'ring_all_reduce'?"]),
        ("--calibrate --name al_reduce", ["did you mean 'all_reduce'?"]),
        ("--ranks 0", ["at least 1", "0"]),
        ("--ranks two", ["--ranks takes a number", "'two'"]),
        ("--calibrate --ranks 4096", ["--calibrate times 2 to", "4096"]),
        ("--calibrate --ranks 1", ["--calibrate times 2 to", "1 was received"]),
        ("--name hierarchical_all_reduce --ranks 6 --per-node 4", ["nodes of 4", "1, 2, 3, 6"]),
        ("--name ring_all_reduce --per-node 2", ["--per-node is for"]),
        ("--name ring_all_reduce --ranks 1000000", ["too many to be simulated", "at most 128"]),
        ("--name ring_all_reduce --ranks 17 --figure x.png", ["could not be read", "at most 16"]),
        ("--figure x.png", ["does nothing without --name or --calibrate: add --name"]),
        ("--name tree_reduce --figure x", ["--figure needs a name that ends in .png, .svg or .pdf", "'x'"]),
        ("--output x.json", ["does nothing without --calibrate: add --calibrate"]),
        ("ring", ["the word 'ring'"]),
    ],
)
def test_main_collectives_refuses_in_one_sentence(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["collectives", *line.split()]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("dlojz: ") and told.err.count("\n") == 1
    assert all(words in told.err for words in expected)


def test_main_collectives_calibrates_four_ranks_per_core_at_most(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlojz.cli.collectives.cores_available", lambda: 3)
    assert main(["collectives", "--calibrate", "--ranks", "13"]) == 2
    assert "--calibrate times 2 to 12 ranks on the 3 core(s)" in capsys.readouterr().err


@pytest.mark.usefixtures("few_sizes")
def test_main_collectives_names_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("not a folder")
    words = ["--calibrate", "--ranks", "2", "--output", str(tmp_path / "file" / "calibration.json")]
    assert main(["collectives", *words]) == 2
    assert "the calibration cannot be written to" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("language", "words"), [("en", "Time = rounds·α + moved·n·β"), ("fr", "Durée = étapes·α + déplacé·n·β")]
)
def test_the_help_teaches_in_both_languages(language: Language, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    use_language(language)
    assert main(["collectives", "--help"]) == 0
    assert words in " ".join(capsys.readouterr().out.split())
