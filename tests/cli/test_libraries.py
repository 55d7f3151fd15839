"""`dlojz libraries`: the catalogue, a program, runs side by side; and what it refuses."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.language import use_language
from dlojz.cli.main import DONE, FAILED, REFUSED, main
from dlojz.libraries import library_catalogue
from dlojz.libraries.library_catalogue import LIBRARIES, code_lines, command_alone


def test_the_catalogue_tells_each_library_and_what_installs_it(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(library_catalogue, "found", lambda module: module in ("torch", "deepspeed"))
    monkeypatch.setattr(library_catalogue.Library, "python", property(lambda self: None))
    assert main(["libraries"]) == DONE
    told = capfd.readouterr().out
    assert all(one.title in told for one in LIBRARIES.values())
    assert "Accelerate is not installed: pip install 'dlojz[libraries]'." in told
    assert told.count("'dlojz[libraries]'") == 4, "in the rows of two libraries and in their sentences"
    assert "make colossalai" in told


def test_main_libraries_gives_the_catalogue_as_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["libraries", "--json"]) == DONE
    told = {one["library"]: one for one in json.loads(capfd.readouterr().out)}
    assert list(told) == list(LIBRARIES) and told["torch"]["installed"]
    assert told["deepspeed"]["lines"] == len(code_lines(LIBRARIES["deepspeed"].program.read_text()))


def test_a_program_is_shown_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["libraries", "--show", "deepspeed"]) == DONE
    told = capfd.readouterr()
    assert told.out.strip() == LIBRARIES["deepspeed"].program.read_text().strip()
    assert told.err.splitlines()[-1] == command_alone("deepspeed")


@pytest.mark.parametrize(("columns", "beside"), [("80", False), ("160", True)])
def test_main_libraries_breaks_no_word_of_the_catalogue(
    columns: str, beside: bool, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a narrow terminal, what is hidden stands below the table."""
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["libraries"]) == DONE
    told = capfd.readouterr().out
    assert ("DeepSpeed hides: " in told) is not beside
    words = set(told.split())
    assert {word for one in LIBRARIES.values() for word in one.runs().split()} <= words


def test_main_libraries_tells_the_reason_where_nothing_could_be_run(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An environment of its own that holds the library, and whose Python does not start."""
    python = tmp_path / "bin" / "python"
    packages = tmp_path / "lib" / "python3.11" / "site-packages" / "colossalai-9.8.7.dist-info"
    for folder in (python.parent, packages):
        folder.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    (packages / "METADATA").write_text("Metadata-Version: 2.1\nName: colossalai\nVersion: 9.8.7\n")
    monkeypatch.setenv("DLOJZ_COLOSSALAI", str(python))
    words = ["--only", "colossalai", "--steps", "2", "--rounds", "1", "--root", str(tmp_path / "runs"), "--figure"]
    assert main(["libraries", "--run", *words, str(tmp_path / "a.png")]) == FAILED
    told = capfd.readouterr()
    assert told.out.startswith("Colossal-AI: not run. ") and told.out.count("\n") == 1
    assert "Traceback" not in told.err and not (tmp_path / "a.png").exists()


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, Path]:
    """Two libraries, really run; the third has a layout that its program has not."""
    folder = tmp_path_factory.mktemp("libraries")
    figure, answer = folder / "libraries.png", folder / "answer.json"
    words = ["--only", "torch,deepspeed,colossalai", "--model", "coatnet_tiny", "--micro-batch", "4", "--steps", "4"]
    words += ["--rounds", "1", "--zero", "2", "--root", str(folder / "runs"), "--figure", str(figure), "--json"]
    command = [sys.executable, "-m", "dlojz", "libraries", "--run", *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    answer.write_text(done.stdout)
    return json.loads(done.stdout), figure, folder / "runs"


def test_libraries_side_by_side_make_runs_as_any_other(told: tuple[Any, Path, Path]) -> None:
    rows, figure, root = told
    torch, deepspeed, absent = rows
    assert [row["ran"] for row in rows] == [True, True, False]
    assert absent["note"], "not installed, or its program has no such layout"
    assert deepspeed["largest_difference"] < 1e-5 and torch["largest_difference"] == 0
    assert torch["bytes_equal"] and deepspeed["bytes_equal"]
    assert {one["collective"] for one in torch["traffic_bytes"]} == {"all_gather", "reduce_scatter"}
    assert deepspeed["step_ratio"] > 0 and deepspeed["version"] == LIBRARIES["deepspeed"].version
    assert figure.stat().st_size > 10_000
    assert len([one for one in root.iterdir() if (one / "record.json").is_file()]) == 2


@pytest.mark.parametrize(("words", "english", "french"), [
    (["--show", "deepsped"], "did you mean 'deepspeed'", "deepspeed"),
    (["--run", "--only", "torch,acclerate"], "did you mean 'accelerate'", "accelerate"),
    (["--steps", "3"], "--steps does nothing without --run: add --run", "ajoutez --run"),
    (["--show", "torch", "--json"], "leave --run and --json out", "retirez --run et --json"),
    (["--run", "--figure", "a.doc"], "needs a name that ends in .png", "attend un nom qui finit par .png"),
    (["--run", "--rounds", "0"], "rounds", "rounds"),
    (["--run", "--model", "gpt_tinny"], "gpt_tiny", "gpt_tiny"),
    (["--run", "--only", "torch", "--zero", "1"], "the program of library='torch' has zero=0, 2, 3 only", "n’a que"),
    (["--run", "--model", "moe_tiny"], "use a dense model such as gpt_tiny.", "un modèle dense comme gpt_tiny."),
    (["--run", "--only", "megatron", "--model", "vit_tiny"], "family such as gpt_tiny.", "gpt comme gpt_tiny."),
    (["--run", "--only", ","], "--only ',' names no library", "ne nomme aucune bibliothèque"),
    (["--run", "--dp", "x"], "--dp", "--dp"),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_sentence(
    words: list[str], english: str, french: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for language, sentence in (("en", english), ("fr", french)):
        use_language(language)
        assert main(["libraries", *words]) == REFUSED
        told = capfd.readouterr().err
        assert sentence in told and told.count("\n") == 1, told


def test_main_libraries_bar_counts_the_runs_that_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two libraries in two rounds; the bar stands at what was begun before."""
    updates: list[int] = []

    @contextmanager
    def bar(total: int) -> Iterator[Callable[..., None]]:
        assert total == 4
        yield lambda done, description: updates.append(done)

    def runs(names: Any, *, rounds: int, on_run: Callable[[str, int], None], **_: Any) -> list[Any]:
        for number in range(rounds):
            for name in ("torch", "deepspeed"):
                on_run(name, number)
        return []

    monkeypatch.setattr("dlojz.cli.libraries.progress_bar", bar)
    monkeypatch.setattr("dlojz.running.measure.configurations", lambda names, **_: (["torch", "deepspeed"], []))
    monkeypatch.setattr("dlojz.running.measure.run_libraries", runs)
    assert main(["libraries", "--run", "--only", "torch,deepspeed", "--rounds", "2", "--json"]) == DONE
    assert updates == [0, 1, 2, 3]
