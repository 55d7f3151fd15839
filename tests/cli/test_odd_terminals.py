"""The command in odd surroundings: widths that are none, closed streams, a system that gives nothing more."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from dlojz.base.language import use_language
from dlojz.base.table import Table
from dlojz.cli import main as command
from dlojz.cli.options import console, show

DLOJZ = [sys.executable, "-c", "import sys; from dlojz.cli.main import main; sys.exit(main())"]


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    there = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    return subprocess.run([*DLOJZ, *words], env={**there, **environment}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("columns", ["0", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("1", "39", "40"))])
@pytest.mark.parametrize("words", [("runs", "--help"), ("machines",)])
def test_a_narrow_terminal_is_taken_for_40_columns(columns: str, words: tuple[str, ...], tmp_path: Path) -> None:
    done = run(*words, COLUMNS=columns, DLOJZ_RUNS=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    widths = [cell_len(line) for line in done.stdout.splitlines()]
    assert len(widths) < 400 and max(widths) > 20


@pytest.mark.parametrize(
    ("told", "width"), [("", 100), ("x", 100), ("-5", 100), ("0", 100), ("1", 40), ("99", 99), ("9" * 40, 100)]
)
def test_console_width_follows_columns_where_that_is_a_width(
    told: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", told)
    assert console(stderr=False).width == width


def test_a_table_that_would_break_words_is_written_row_by_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    table = Table(
        ("run", "state", "last loss", "problems"),
        (("20300101-000000-abcd", "completed", "2.25", "Permission denied."), ("b", "failed", "", "none")),
        notes=("Newest first.",),
    )
    for language, colon in (("en", ": "), ("fr", " : ")):
        use_language(language)
        monkeypatch.setenv("COLUMNS", "45")
        show(table)
        assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
            "20300101-000000-abcd",
            f"  state{colon}completed",
            f"  last loss{colon}2.25",
            f"  problems{colon}Permission denied.",
            "",
            "b",
            f"  state{colon}failed",
            f"  problems{colon}none",
            "Newest first.",
        ]
    monkeypatch.setenv("COLUMNS", "80")
    show(table)
    assert len(capsys.readouterr().out.splitlines()) == 4


@pytest.mark.parametrize("closed", ["1>&-", "2>&-", "0<&-", "1>&- 2>&-", "0<&- 1>&- 2>&-"])
@pytest.mark.parametrize(
    "words", ["machines", *(pytest.param(words, marks=pytest.mark.nightly) for words in ("machines --json", "--help"))]
)
def test_closed_streams(closed: str, words: str) -> None:
    line = f'"$0" -c "$1" {words} {closed}'
    done = subprocess.run(["sh", "-c", line, *DLOJZ[::2]], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    said = "dlojz: the standard output is closed: what would be printed there is lost.\n"
    assert done.stderr == (said if closed == "1>&-" else "")


STARVED = [
    RuntimeError("can't start new thread"),
    MemoryError(),
    ImportError("libtorch_cpu.so: failed to map segment\nfrom shared object"),
    OSError(errno.EMFILE, "Too many open files"),
]


@pytest.mark.parametrize("error", STARVED)
@pytest.mark.parametrize("nested", [False, True])
def test_command_main_tells_a_starved_system_in_one_sentence(
    error: Exception, nested: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def starve(words: list[str]) -> int:
        if not nested:
            raise error
        try:
            raise error
        except Exception:
            raise ImportError("numpy could not be imported") from error

    monkeypatch.setattr(command, "_dispatch", starve)
    assert command.main(["runs"]) == 1
    told = capsys.readouterr().err
    assert told.startswith("dlojz: ") and len(told.splitlines()) == 1
    use_language("fr")
    assert command.main(["runs"]) == 1 and capsys.readouterr().err != told


def test_command_main_takes_no_error_of_the_program_for_a_starved_system(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(words: list[str]) -> int:
        raise RuntimeError("a mistake")

    monkeypatch.setattr(command, "_dispatch", fail)
    with pytest.raises(RuntimeError, match="a mistake"):
        command.main(["runs"])


@pytest.mark.parametrize("mebibytes", [150, 400])
def test_little_address_space_is_a_sentence_and_no_traceback(mebibytes: int) -> None:
    """The libraries' own C code may print too; Python's traceback is never seen."""
    line = f'ulimit -v {mebibytes * 1024}; "$0" -c "$1" predict'
    done = subprocess.run(["sh", "-c", line, *DLOJZ[::2]], capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "Traceback" not in done.stderr and done.stderr


def test_without_proc_a_run_is_refused_in_a_sentence(tmp_path: Path) -> None:
    line = 'mount -t tmpfs none /proc 2>/dev/null || exit 77; "$0" -c "$1" run --steps 2'
    asked = ["unshare", "-m", "sh", "-c", line, *DLOJZ[::2]]
    there = {**os.environ, "DLOJZ_RUNS": str(tmp_path)}
    try:
        done = subprocess.run(asked, env=there, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not here")
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("no mount namespace can be made here")
    assert done.returncode == 1 and "/proc is not mounted" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "words", ["trace NAME", "predict --model hf:NAME", "run NAME.py", "logs NAME", "compare NAME", "bench NAME"]
)
def test_a_name_beyond_what_a_file_can_have_is_refused(words: str, tmp_path: Path) -> None:
    done = run(*words.replace("NAME", "x" * 300).split(), DLOJZ_RUNS=str(tmp_path))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", ["plan", "calibrate --quick --ranks 1", "collectives --name ring_all_reduce", "grid"])
@pytest.mark.parametrize("name", ["garbage.bin", ".", "[bold]x[/bold]", "x"])
def test_command_main_refuses_an_unwritable_picture_before_the_work(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dlojz.planner.ask.plan", None)
    monkeypatch.setattr("dlojz.running.measure.measure_machine", None)
    option = "--png" if words == "grid" else "--figure"
    assert command.main([*words.split(), option, name]) == 2
    assert f"but {name!r} was received." in capsys.readouterr().err


@pytest.mark.parametrize("words", [["trace", ""], ["run", "--root", ""], ["plan", "--figure", ""], ["compare", ""]])
def test_command_main_refuses_an_empty_word(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(words) == 2
    assert "an empty word names nothing" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a\udcffb", "two\nlines", "\x1b[31m"])
def test_a_folder_of_runs_with_an_odd_name_is_refused(name: str, tmp_path: Path) -> None:
    done = run("run", "--steps", "2", DLOJZ_RUNS=str(tmp_path / name))
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "the folder of the runs, " in done.stderr
    assert list(tmp_path.iterdir()) == []
