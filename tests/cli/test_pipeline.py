"""`dlojz pipeline`: draws, compares, exports, reads back, and refuses in one sentence."""

import json
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import main
from dlojz.pipeline.schedule_catalogue import SCHEDULES

PNG = b"\x89PNG\r\n\x1a\n"
VALID = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def _json(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["pipeline", *words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_main_pipeline_draws_a_schedule_with_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "--schedule", "1f1b", "--stages", "4", "--micro-batches", "8"]) == 0
    printed = capsys.readouterr().out
    assert "rank 3 .  .  .  F0 B0--- F1 B1---" in printed
    assert "bubble fraction   27.3 % (idle / all time)" in printed and "overhead   37.5 %" in printed
    assert "peak activations  4, 3, 2, 1 " in printed and "optimum           33 time units" in printed


@pytest.mark.parametrize(
    "words, makespan, span, fraction, peaks",
    [
        ("--schedule 1f1b", 33, 33, 9 / 33, [4, 3, 2, 1]),
        ("--schedule gpipe", 33, 33, 9 / 33, [8, 8, 8, 8]),
        ("--schedule zb-h2", 27, 24, 3 / 27, [7, 7, 7, 7]),
        ("--schedule interleaved --chunks 2", 57, 57, 9 / 57, [11, 9, 7, 5]),
        ("--schedule gpipe --latency 0.25", 34.5, 34.5, 10.5 / 34.5, [8, 8, 8, 8]),
        ("--schedule gpipe --times 1,1", 22, 22, 6 / 22, [8, 8, 8, 8]),
        ("--schedule gpipe --times 2,2,2 --stage-times 1,2,1,1", 114, 114, 1 - 60 / 114, [8, 8, 8, 8]),
    ],
)
def test_main_pipeline_gives_its_document_as_json(
    words: str, makespan: float, span: float, fraction: float, peaks: list[float], capfd: pytest.CaptureFixture[str]
) -> None:
    told = _json(capfd, *words.split(), "--stages", "4", "--micro-batches", "8")
    assert (told["stages"], told["micro_batches"]) == (4, 8) and told["schedule"] == words.split()[1]
    assert (told["makespan"], told["span"], told["peak_activations"]) == (makespan, span, peaks)
    assert told["bubble_fraction"] == pytest.approx(fraction)
    assert told["bubble_overhead"] == pytest.approx(makespan / told["ideal"] - 1)
    assert told["lower_bound"] <= makespan and sum(told["idle"].values()) == pytest.approx(sum(told["idle_per_rank"]))


def test_files_are_written_and_read_back(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    files = {option: tmp_path / "new" / f"zbv.{option}" for option in ("png", "csv")}
    files["trace"] = tmp_path / "zbv.json"
    words = [word for option, path in files.items() for word in (f"--{option}", str(path))]
    told = _json(capfd, "--schedule", "zb-v", *words)
    assert files["png"].read_bytes().startswith(PNG)
    assert len(json.loads(files["trace"].read_text())["traceEvents"]) > 4 * 48
    read = _json(capfd, "--from-csv", str(files["csv"]))
    assert (read["makespan"], read["peak_activations"]) == (told["makespan"], told["peak_activations"])
    assert (read["schedule"], read["model_stages"]) == ("zbv", 8)


def test_main_pipeline_writes_what_torch_cannot_execute_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "--schedule", "chimera", "--csv", str(tmp_path / "chimera.csv")]) == 0
    assert "each stage on one rank" in capsys.readouterr().err
    assert main(["pipeline", "--from-csv", str(tmp_path / "chimera.csv")]) == 0


def test_all_schedules_side_by_side(capfd: pytest.CaptureFixture[str]) -> None:
    told = _json(capfd, "--compare", "--stages", "4", "--micro-batches", "8")
    assert {row["schedule"] for row in told} == set(SCHEDULES)
    assert [row["bubble_fraction"] for row in told] == sorted(row["bubble_fraction"] for row in told)
    assert main(["pipeline", "--compare", "--stages", "3", "--micro-batches", "7"]) == 0
    printed = capfd.readouterr().out
    assert "not for this size: " in printed and "chimera" in printed.splitlines()[-1]
    assert main(["pipeline", "--compare", "gpipe", "1f1b", "--memory-limit", "4"]) == 0
    rows = [line.split() for line in capfd.readouterr().out.splitlines()]
    assert [row[0] for row in rows[2:4]] == ["gpipe", "1f1b"] and "!" in rows[2] and "!" not in rows[3]


@pytest.mark.parametrize(
    "names, titles",
    [
        (["gpipe", "zb-h1"], ["A. gpipe: 4 ranks, 8 micro-batches", "B. zb-h1: 4 ranks, 8 micro-batches"]),
        (["gpipe", "1f1b", "zb-h1"], ["gpipe", "1f1b", "zb-h1"]),
    ],
)
def test_main_pipeline_draws_a_comparison(names: list[str], titles: list[str], tmp_path: Path) -> None:
    path = tmp_path / "compared.svg"
    assert main(["pipeline", "--compare", *names, "--png", str(path)]) == 0
    drawn = path.read_text()  # the words of each text stand beside its outlines
    assert [title for title in titles if f"<!-- {title} -->" not in drawn] == []


def test_main_pipeline_lists_all_schedules(capfd: pytest.CaptureFixture[str]) -> None:
    assert [entry["name"] for entry in _json(capfd, "--list")] == list(SCHEDULES)
    assert main(["pipeline", "--list"]) == 0
    assert "looped-bfs" in capfd.readouterr().out


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--schedule zb-h", ["unknown schedule 'zb-h'", "zb-h1"]),
        ("--schedule chimera --stages 3", ["even number of ranks", "3"]),
        ("--schedule dualpipe --micro-batches 7", ["dualpipe", "7"]),
        ("--stages 0", ["--stages must be at least 1"]),
        ("--micro-batches many", ["--micro-batches takes a number", "'many'"]),
        ("--micro-batches 1000000", ["more than is simulated here"]),
        ("--schedule 1f1b --chunks 3", ["leave chunks out"]),
        ("--times 1", ["F,I,W or F,B"]),
        ("--times 1,x,1", ["--times takes a number", "'x'"]),
        ("--times 1,-1,1", ["--times must be at least 0"]),
        ("--times 1,nan,1", ["--times must be at least 0"]),
        ("--stage-times 1,2", ["--stage-times holds 2 numbers", "4 stages"]),
        ("--latency inf", ["--latency"]),
        ("--sends slowly", ["unknown sends", "rendezvous"]),
        ("--sends rendezvous", ["deadlock of blocking sends", "paired"]),
        ("--schedule 1f1b --memory-limit 3", ["0F3", "limit is 3"]),
        ("--color kinds --png x.png", ["did you mean 'kind'"]),
        ("--color chunk", ["--color does nothing without --png: add --png"]),
        ("--png x.doc", ["--png needs a name that ends in .png, .svg or .pdf", "'x.doc'"]),
        ("--from-csv none.csv", ["'none.csv'", "cannot be read"]),
        ("--from-csv none.csv --stages 4", ["--stages does nothing beside --from-csv"]),
        ("--compare --schedule 1f1b", ["--schedule does nothing beside --compare"]),
        ("--compare gpip", ["did you mean 'gpipe'"]),
        ("--compare chimera --stages 3", ["even number of ranks"]),
        ("--list --stages 4", ["--stages does nothing beside --list"]),
        ("1f1b", ["--schedule 1f1b"]),
        ("--shedule 1f1b", ["--schedule"]),
    ],
)
def test_main_pipeline_refuses_in_one_sentence(
    line: str, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", *line.split()]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("dlojz: ") and told.err.count("\n") == 1
    assert all(words in told.err for words in expected), told.err


@pytest.mark.parametrize(
    "text, expected",
    [
        ("0F0,zero", ["row 1, column 2", "'zero'"]),
        (VALID.replace("1F0,1B0,1F1", "1F1,1F0,1B0").replace("0F1,0B0", "0B0,0F1"), ["deadlock"]),
        (VALID.replace("0B1", "0B0"), ["0B0 stands 2 times"]),
        ("", ["holds no action"]),
    ],
)
def test_main_pipeline_refuses_a_bad_csv(
    text: str, expected: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "order.csv").write_text(text)
    assert main(["pipeline", "--from-csv", str(tmp_path / "order.csv")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and all(words in told for words in expected)


def test_main_pipeline_speaks_french(capsys: pytest.CaptureFixture[str]) -> None:
    use_language("fr")
    assert main(["pipeline"]) == 0
    printed = capsys.readouterr().out
    assert "rang 3 .  .  .  F0" in printed and "surcoût de bulle" in printed and "37,5 %" in printed
    assert main(["pipeline", "--compare", "gpipe", "1f1b"]) == 0
    assert "ordonnancement" in capsys.readouterr().out
