"""The notebooks as they are handed out: up to date, without leaks, and running.

Solutions are executed again and their outputs compared by nbval; student notebooks are executed as they are. The
notebooks of a lab share a folder of runs: what one has trained, the next one finds.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from dlojz.base.display_hook import QUIET
from dlojz.base.language import LANGUAGES, use_language
from dlojz.labs.kit.build import build, execute, own_folders
from dlojz.labs.kit.exercise import not_done
from dlojz.labs.kit.source import BEGIN, END
from dlojz.ranks.magic import THREADS

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.name for path in (ROOT / "solutions" / "en").glob("*.ipynb"))
CELL_LIMIT_S = 900
COMMENT = re.compile(r"[ \t]*#(?!#).*$", re.MULTILINE)
"""A comment, but no mark `### BEGIN SOLUTION`."""


def read(folder: str, language: str, name: str) -> Any:
    return nbformat.read(ROOT / folder / language / name, as_version=4)


def code(notebook: Any) -> list[str]:
    """Return the code of each cell, without its comments, which are in the notebook's language."""
    return [COMMENT.sub("", cell.source) for cell in notebook.cells if cell.cell_type == "code"]


def test_there_are_notebooks_for_every_source() -> None:
    sources = sorted(path.stem for path in (ROOT / "solutions").glob("*.py"))
    assert [name.removesuffix(".ipynb") for name in NAMES] == sources
    assert len(sources) >= 2


def test_the_notebooks_are_those_of_their_sources() -> None:
    assert build(check=True, root=ROOT) == 0


@pytest.mark.parametrize("folder", ["notebooks", "solutions"])
@pytest.mark.parametrize("name", NAMES)
def test_the_code_is_the_same_in_both_languages(folder: str, name: str) -> None:
    english, french = (read(folder, language, name) for language in LANGUAGES)
    texts = re.compile(r'"(?:[^"\\\n]|\\.)*"')  # what cells show is in the reader's language
    assert [texts.sub("", cell) for cell in code(english)] == [texts.sub("", cell) for cell in code(french)]
    assert [cell.id for cell in english.cells] == [cell.id for cell in french.cells]
    prose = [[cell.source for cell in notebook.cells if cell.cell_type == "markdown"] for notebook in (english, french)]
    assert all(one != other for one, other in zip(*prose, strict=True))


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
def test_a_student_notebook_has_neither_outputs_nor_counts(name: str, language: str) -> None:
    for cell in read("notebooks", language, name).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("name", NAMES)
def test_no_line_of_a_solution_is_in_a_student_notebook(name: str) -> None:
    text = (ROOT / "solutions" / name).with_suffix(".py").read_text(encoding="utf-8")
    regions = re.findall(rf"{BEGIN}\n(.*?){END}", text, flags=re.DOTALL)
    lines = {line.strip() for region in regions for line in region.split("\n") if len(line.strip()) >= 12}
    given = re.sub(rf"{BEGIN}\n.*?{END}", "", text, flags=re.DOTALL)  # a line may be given elsewhere on purpose
    lines = {line for line in lines if line not in given}
    assert len(regions) >= 4
    assert lines
    # Its own notebooks: what one lab asks for, such as an all-reduce, a later one may use.
    for path in (ROOT / "notebooks").glob(f"*/{name}"):
        handed_out = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
        assert [line for line in lines if line in handed_out] == []


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
def test_most_outputs_of_a_solution_are_compared(name: str, language: str) -> None:
    cells = [cell for cell in read("solutions", language, name).cells if cell.cell_type == "code"]
    ignored = [cell for cell in cells if "nbval-ignore-output" in cell.metadata.get("tags", ())]
    assert len(ignored) <= len(cells) / 3


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
def test_stored_outputs_name_no_folder_of_a_machine(name: str, language: str) -> None:
    shown = [str(output) for cell in read("solutions", language, name).cells for output in cell.get("outputs", ())]
    assert [text for text in shown if re.search(r"/(?:tmp|home|root|work|Users)/", text)] == []


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", NAMES)
def test_every_stored_verdict_on_a_solution_is_that_it_is_right(name: str, language: str) -> None:
    """One built on a machine that was too busy could say that a solution loops for ever."""
    judged = [cell for cell in read("solutions", language, name).cells if "\nlab.check(" in f"\n{cell.source}"]
    assert judged
    assert [cell.source for cell in judged if "✗" in str(cell.get("outputs", ()))] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_stored_figure_is_described_in_the_language_of_its_notebook(name: str) -> None:
    """By more than the name of its kind, such as <Figure size 640x480 with 1 Axes>, which is no description."""
    described: dict[str, list[str]] = {}
    for language in LANGUAGES:
        shown = [one for cell in read("solutions", language, name).cells for one in cell.get("outputs", ())]
        pictures = [one for one in shown if any(kind.startswith("image/") for kind in one.get("data", {}))]
        assert [one for one in pictures if set(one.data) != {"image/png", "text/plain"}] == []
        described[language] = [one.data["text/plain"] for one in pictures]
        assert [one for one in described[language] if len(one) < 20 or one.startswith("<")] == []
        carried = [one.metadata["image/png"]["alt"] for one in pictures if "image/png" in one.metadata]
        assert carried in ([], [" ".join(one.split()) for one in described[language]])
    english, french = described.values()
    assert len(english) == len(french)
    assert [one for one, other in zip(english, french, strict=True) if one == other] == []


# The code is the same in both languages (tested above). All solutions take 16 minutes of a processor in one of them: each
# day some run, of engines, ranks that stay alive, and checkpoints; the student notebook of lab 13, in the language of its
# solution, finds the runs of that one. At night all of them. Lab 00 is run by a student in tests/browser.
DAILY_SOLUTIONS, DAILY_STUDENTS = ("00", "04", "07", "13"), ("13",)
SOLUTIONS = [
    pytest.param(name, language, marks=[] if is_daily and name[:2] in DAILY_SOLUTIONS else pytest.mark.nightly)
    for is_daily in (True, False)
    for number, name in enumerate(NAMES)
    for language in [LANGUAGES[(number + is_daily) % 2]]
]
STUDENTS = [
    pytest.param(name, LANGUAGES[(number + 1) % 2], marks=[] if name[:2] in DAILY_STUDENTS else pytest.mark.nightly)
    for number, name in enumerate(NAMES)
]


@pytest.fixture
def lab_runs(name: str, language: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the notebooks of one lab keep their runs, those of each language apart."""
    return tmp_path_factory.getbasetemp() / name / language / "runs"


@pytest.mark.parametrize(("name", "language"), SOLUTIONS)
def test_a_solution_shows_again_what_is_stored(name: str, language: str, lab_runs: Path) -> None:
    solution = str(ROOT / "solutions" / language / name)
    nbval = ["--nbval", "--nbval-current-env", f"--nbval-cell-timeout={CELL_LIMIT_S}", "-p", "no:cacheprovider"]
    options = ["-o", "addopts=", "-o", f"timeout={CELL_LIMIT_S}", f"--rootdir={ROOT}"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JPY_SESSION", "PYTEST_"))}
    environment.pop("DLOJZ_LANG", None)  # the notebook tells its language
    done = subprocess.run(
        [sys.executable, "-m", "pytest", solution, "-q", "--tb=short", *nbval, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**environment, **own_folders(lab_runs), QUIET: "off"},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:] + ended_badly(lab_runs)


ON_PROCESSES = (
    *("perf_counter", "message_s(", "seconds(", "measure(", "StorageTrace", "CommDebugMode", "dist.all_reduce ="),
    *("deepspeed", "DistributedDataParallel", "%%ranks 64"),
)
"""In a cell of ranks that are threads: time, what torch's dispatcher sees, what is replaced in a module of all ranks,
and libraries that need processes."""


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMES if name[:2] in ("03", "06", "07", "09", "10")])
def test_cells_on_ranks_show_the_same_where_these_are_threads(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(THREADS, "1")
    notebook, executed = (read("solutions", "en", name) for _ in range(2))
    executed = execute(executed, tmp_path / name, runs_root=tmp_path / "runs", allow_errors=True)
    compared = 0
    for stored, again in zip(notebook.cells, executed.cells, strict=True):
        if not stored.source.startswith("%%ranks") or any(word in stored.source for word in ON_PROCESSES):
            continue
        if "nbval-ignore-output" in stored.metadata.get("tags", ()):  # what it shows is another each time
            assert [output.ename for output in again.outputs if output.output_type == "error"] == [], stored.source
        else:
            assert shown_texts(again) == shown_texts(stored), stored.source
        compared += 1
    assert compared


def shown_texts(cell: Any) -> list[str]:
    """What a cell shows; on a slow machine it has shown how far it is, too, which is empty at its end."""
    texts = [output.get("text", output.get("data", {}).get("text/plain", "")) for output in cell.get("outputs", [])]
    return [text for text in texts if text]


def ended_badly(runs: Path) -> str:
    """Say which runs of a lab ended badly, why, and what their ranks wrote last: a notebook shows what followed."""
    lines = [""]
    for path in sorted(runs.glob("*/record.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["status"] != "completed":
            lines.append(f"{path.parent.name}: {record['status']}: {record['reason']}")
            lines += [log.read_text(errors="replace")[-3000:] for log in sorted(path.parent.glob("logs/*.log"))]
    return "\n".join(lines)


@pytest.mark.parametrize(("name", "language"), STUDENTS)
def test_a_student_notebook_runs_and_says_only_what_is_to_do(
    name: str, language: str, lab_runs: Path, tmp_path: Path
) -> None:
    path = tmp_path / name  # in a folder that does not tell the language
    notebook = read("notebooks", language, name)
    nbformat.write(notebook, path)
    for progress in lab_runs.glob("progress-*.json"):  # of the solution: nothing is predicted yet
        progress.unlink()
    done = execute(notebook, path, runs_root=lab_runs, allow_errors=True)
    use_language(language)
    exercises = 0
    for cell in (cell for cell in done.cells if cell.cell_type == "code"):
        outputs = cell.get("outputs", [])
        assert [output.evalue for output in outputs if output.output_type == "error"] == []
        texts = [output.get("data", {}).get("text/plain", "") for output in outputs]
        stub = re.search(r'labs\.NotDone\("([a-z0-9-]+)"\)', cell.source)
        if stub:
            exercises += 1
            assert texts == [f"… {not_done(stub[1])}"]
        elif "lab.predict(" in cell.source or "lab.reveal(" in cell.source:
            assert texts and all(text.startswith("… ") for text in texts)
        else:
            assert not any(text.startswith("✗") for text in texts)
    assert exercises >= 4
