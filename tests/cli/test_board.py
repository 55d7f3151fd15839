"""`dlojz board`: a table, a page, a JSON document; with pseudonyms no name anywhere."""

import json
from pathlib import Path

import pytest

from dlojz.cli.main import DONE, FAILED, REFUSED, main

HOSTILE = "eve; rm -rf <script>alert(1)</script>".replace("/", "∕")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("ada", HOSTILE):
        (tmp_path / "class" / name / "runs").mkdir(parents=True)
    done = {"schema_version": 1, "done": {"first-run": "2030-01-01T10:00:00+00:00"}}
    (tmp_path / "class" / "ada" / "runs" / "progress-00.json").write_text(json.dumps(done))
    return tmp_path / "class"


def test_main_board_prints_a_table_and_writes_a_page(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["board", str(folder), "--html", str(tmp_path / "board.html")]) == DONE
    told = capfd.readouterr()
    assert "ada" in told.out and "00 first-run" in told.out
    assert str(tmp_path / "board.html") in told.err
    page = (tmp_path / "board.html").read_text()
    assert "<script" not in page and "eve; rm -rf &lt;script&gt;" in page


def test_main_board_with_pseudonyms_leaves_no_name(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page, key = tmp_path / "board.html", tmp_path / "board.key"
    assert main(["board", str(folder), "--pseudonyms", "--key", str(key), "--html", str(page), "--json"]) == DONE
    told = capfd.readouterr()
    lines = json.loads(told.out)
    assert sorted(line["done_by_lab"].get("00", 0) for line in lines) == [0, 1]
    assert all(line["name"].startswith("P-") for line in lines)
    for name in ("ada", "eve"):
        assert name not in told.out and name not in page.read_text().replace("shadow", "")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "takes FOLDER (folder with one folder per student), but nothing was received"),
        (["a", "b"], "but 'a b' was received"),
        (["none"], "cannot be read"),
        (["x", "--key", "k"], "--pseudonyms"),
    ],
)
def test_refused_in_a_sentence(words: list[str], sentence: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["board", *words]) == REFUSED
    assert sentence in capfd.readouterr().err


def test_main_board_fails_with_a_page_that_cannot_be_written(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["board", str(folder), "--html", str(tmp_path / "none" / "board.html")]) == FAILED
    assert "refused" in capfd.readouterr().err
