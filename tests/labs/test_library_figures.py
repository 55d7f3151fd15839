"""Figures and tables of lab 12: what is shown is what was given; what is missing, or still to do, is said."""

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.language import MEBIBYTE, format_bytes, use_language
from dlojz.base.table import Table
from dlojz.config.run_config import RunConfig
from dlojz.labs import NotDone, lab12_libraries
from dlojz.labs.kit.exercise import Verdict
from dlojz.labs.kit.figures import Picture
from dlojz.labs.lab12_libraries import exercises_loops, figures
from dlojz.labs.lab12_libraries.exercises_configuration import COURSE, cases, complete, stage
from dlojz.labs.lab12_libraries.exercises_loops import accelerate_loop, deepspeed_loop, plain_loop
from dlojz.labs.lab12_libraries.figures import Listing, new_lines, program
from dlojz.libraries.library_catalogue import LIBRARIES, absence, lines_changed
from dlojz.prediction import predict
from dlojz.results.footprint import Traffic
from dlojz.results.record import RunRecord

ROOT = Path(__file__).resolve().parents[2]


def undone(*_: Any, **__: Any) -> Any:
    raise NotDone("read-traffic")


class Ran:
    """A run as the handle shows it, measured as predicted."""

    def __init__(self, library: str, losses: tuple[float, ...] = (3.0, 2.0), status: Any = "completed", **fields: Any):
        self.config = RunConfig.of(**{"model": "gpt_tiny", "dp": 2, "micro_batch": 4, "library": library, **fields})
        self.record = RunRecord(
            run_id="x",
            config=self.config,
            status=status,
            reason="" if status == "completed" else "it ran out of luck",
            losses=losses,
            step_s=(0.5,) * len(losses),
            footprints=(predict(self.config),),
        )
        self.losses, self.state = losses, status


def drawn(picture: Any) -> Any:
    assert isinstance(picture, Picture)
    assert picture.figure.alt
    return picture.figure


def test_figures_of_libraries_say_what_is_to_do() -> None:
    plain = Ran("torch")
    for made in (
        figures.told(undone, plain),  # type: ignore[arg-type]
        figures.loops(plain_loop, undone, accelerate_loop, 4, 2),
        figures.course_command(undone),
    ):
        assert isinstance(made, Verdict)
        assert made.state == "todo"


@pytest.mark.parametrize("name", list(LIBRARIES))
def test_a_program_is_shown_whole_with_its_new_lines_marked(name: str) -> None:
    text = LIBRARIES[name].program.read_text(encoding="utf-8")
    listing = program(name)
    assert "\n".join(listing.lines) + "\n" == text
    assert len(listing.new) == lines_changed(name).added
    shown = str(listing).split("\n")[1:]
    assert [line[2:] for line in shown] == [line.rstrip() for line in text.splitlines()]
    assert {number for number, line in enumerate(shown) if line.startswith("+")} == listing.new
    block = re.search(r"<pre[^>]*>(.*)</pre>", listing._repr_html_(), re.DOTALL)
    assert block is not None
    plain = html.unescape(re.sub(r"<[^>]*>", "", block[1]))
    assert [line[2:] for line in plain.split("\n")] == text.splitlines()


def test_listing_shows_a_program_that_holds_markup_letter_by_letter() -> None:
    listing = Listing("x<y>.py", ('s = "<script>"  # <b>', '"""a', "<i>", '"""'), frozenset({0}))
    shown = listing._repr_html_()
    assert "<script>" not in shown and "<b># " not in shown and "<i>" not in shown
    assert "&lt;script&gt;" in shown and "&lt;i&gt;" in shown and "x&lt;y&gt;" in shown


def test_new_lines_are_lines_of_code_alone() -> None:
    reference = '"""One."""\nx = 1\ny = 2\n'
    text = '"""Two."""\n# why\nx = 1\n\nz = 3  # more\ny = 2\nx = 1\n'
    assert new_lines(text, reference) == {4, 6}
    assert new_lines(reference, reference) == frozenset()


def test_the_catalogue_says_what_installs_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlojz.libraries.library_catalogue.found", lambda name: name != "accelerate")
    rows = {row[0]: row for row in figures.catalogue().rows}
    assert list(rows) == [one.title for one in LIBRARIES.values()]
    assert rows["Accelerate"][1] == "pip install 'dlojz[libraries]'"
    assert rows["DeepSpeed"][1] not in ("make lab", "")


@pytest.mark.parametrize(("language", "words"), [("en", "It was not run here."), ("fr", "Il n’a pas été exécuté ici.")])
def test_train_each_is_not_stopped_by_a_library_that_is_missing(
    language: Any, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use_language(language)
    monkeypatch.setattr("dlojz.libraries.library_catalogue.found", lambda name: name != "accelerate")
    assert figures.train(RunConfig.of(model="gpt_tiny", dp=2), "accelerate") is None
    told = capsys.readouterr().out
    assert words in told and "pip install 'dlojz[libraries]'" in told
    assert figures.train_each(RunConfig.of(model="gpt_tiny", dp=2), "accelerate", {}, {"dp": 1}, {}) == [None] * 3
    assert capsys.readouterr().out.count("pip install 'dlojz[libraries]'") == 1


def test_each_layout_of_a_library_that_is_there_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(config: RunConfig, **changes: Any) -> Any:
        asked.append(changes)
        return Ran("torch")

    monkeypatch.setattr("dlojz.run", run)
    made = figures.train_each(RunConfig.of(model="gpt_tiny", dp=2), "torch", {}, {"zero": 3})
    assert len(made) == 2 and asked == [{"library": "torch"}, {"library": "torch", "zero": 3}]


def test_losses_tell_a_run_that_failed_and_leave_it_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = Ran("accelerate", (3.0,), status="failed")
    monkeypatch.setattr("dlojz.run", lambda config, **changes: failed)
    monkeypatch.setattr(figures, "absence", lambda name: None)
    made: Any = figures.train(failed.config, "accelerate")
    assert made is failed
    assert "Accelerate (DDP): failed. it ran out of luck" in capsys.readouterr().out
    use_language("fr")
    figures.train(failed.config, "accelerate")
    assert "Accelerate (DDP) : échec." in capsys.readouterr().out
    use_language("en")
    (above, _) = drawn(figures.losses(Ran("torch"), failed, None)).axes  # type: ignore[arg-type]
    assert len(above.lines) == 1


def test_losses_are_laid_over_each_other() -> None:
    runs = Ran("torch"), None, Ran("deepspeed", (3.0, 2.00001), zero=2)
    above, below = drawn(figures.losses(*runs)).axes  # type: ignore[arg-type]
    assert [list(line.get_ydata()) for line in above.lines] == [[3.0, 2.0], [3.0, 2.00001]]
    assert list(below.lines[0].get_ydata()) == pytest.approx([0, 1e-5], rel=1e-3)
    assert figures.gap(runs[2], runs[0]) == pytest.approx(1e-5, rel=1e-3)  # type: ignore[arg-type]


def test_memory_and_messages_stand_beside_their_predictions() -> None:
    pipeline = Ran("megatron", dp=1, pp=2, micro_batches=2)
    runs: Any = Ran("torch"), None, Ran("torch", zero=3), pipeline
    memory, sent = drawn(figures.side_by_side(*runs)).axes
    for axes in (memory, sent):
        pale = [patch.get_width() for patch in axes.patches if patch.get_alpha() != 1.0]
        full = [patch.get_width() for patch in axes.patches if patch.get_alpha() == 1.0]
        assert pale == full != []
    peaks = [run.record.footprint().memory.peak_bytes / MEBIBYTE for run in runs if run is not None]
    assert _lengths(memory) == pytest.approx(peaks), "the bars are as long as the peaks of the table are high"
    table = [row[5].split(" | ")[1] for row in figures.table(*runs).rows[:3]]
    assert [format_bytes(round(length * MEBIBYTE)) for length in _lengths(sent)] == table, "and the same bytes are sent"
    assert {text.get_text() for text in sent.get_legend().get_texts()} >= {"all-reduce", "send"}
    assert "recv" not in {text.get_text() for text in sent.get_legend().get_texts()}


def _lengths(axes: Any) -> list[float]:
    """The measured bar of each run, all its pieces together."""
    pieces = [patch for patch in axes.patches if patch.get_alpha() == 1.0]
    places = sorted({round(patch.get_y(), 3) for patch in pieces})
    return [sum(patch.get_width() for patch in pieces if round(patch.get_y(), 3) == place) for place in places]


def test_a_legend_names_only_what_can_be_seen() -> None:
    """The losses of a pipeline go to all stages: 4 bytes each, which no bar could show."""
    run: Any = Ran("megatron", dp=1, pp=2, micro_batches=2)
    losses = Traffic(collective="broadcast", group="pp", group_size=2, count=1, message_bytes=8)
    footprint = run.record.footprint()
    more = footprint.model_copy(update={"communication": (*footprint.communication, losses)})
    run.record = run.record.model_copy(update={"footprints": (more,)})
    _, sent = drawn(figures.side_by_side(run)).axes
    assert [text.get_text() for text in sent.get_legend().get_texts()] == ["send"]


def test_two_choices_are_told_by_their_measured_bytes() -> None:
    plain, other = Ran("torch", (3.0, 2.0)), Ran("deepspeed", (3.0, 2.000001), zero=2)
    sheet = figures.two_choices(plain, other)  # type: ignore[arg-type]
    assert [row[1] for row in sheet.rows] == ["—", "yes"]
    for row, run in zip(sheet.rows, (plain, other), strict=True):
        memory = predict(run.config).memory
        assert row[2] == format_bytes(memory.optimizer_bytes)
        assert row[3] == format_bytes(memory.states_bytes)
    assert [row[4] for row in sheet.rows] == ["3.34 MiB", "5.01 MiB"], "as the student has predicted"
    far = figures.two_choices(plain, Ran("deepspeed", (3.0, 2.5), zero=2))  # type: ignore[arg-type]
    assert far.rows[1][1] == "no"


def test_predict_agrees_with_what_the_lab_says_of_zero_2() -> None:
    """Fewer states; larger buffers and a higher peak with the tiny model, a lower peak with a large one."""
    peaks = {}
    for model, samples in (("gpt_tiny", 4), ("gpt2_xl", 1)):
        fields: Any = {"model": model, "dp": 2, "micro_batch": samples}
        plain, zero = (
            predict(RunConfig.of(**fields, **more)).memory for more in ({}, {"engine": "deepspeed", "zero": 2})
        )
        assert zero.states_bytes < plain.states_bytes
        if model == "gpt_tiny":
            assert (zero.at_peak_bytes or {})["workspace"] > (plain.at_peak_bytes or {})["workspace"]
        peaks[model] = (plain.peak_bytes or 0, zero.peak_bytes or 0)
    assert peaks["gpt_tiny"][1] > peaks["gpt_tiny"][0] and peaks["gpt2_xl"][1] < peaks["gpt2_xl"][0]


@pytest.mark.parametrize("language", ["en", "fr"])
def test_exercises_are_called_alike_in_the_notebook_and_in_the_progress(language: Any) -> None:
    text = (ROOT / "solutions" / "12_libraries.py").read_text(encoding="utf-8")
    word = {"en": "Exercise", "fr": "Exercice"}[language]
    use_language(language)
    headings = re.findall(rf"^# ### {word} \d+ — (.+)$", text, flags=re.MULTILINE)
    assert headings == [str(exercise.title) for exercise in lab12_libraries.EXERCISES]


def test_the_table_has_a_row_for_each_run_and_for_each_library_without_one() -> None:
    sheet = figures.table(Ran("torch"), None, Ran("deepspeed", (3.0, 2.5), zero=2))  # type: ignore[arg-type]
    assert isinstance(sheet, Table)
    assert [row[0] for row in sheet.rows] == [
        "PyTorch (DDP)",
        "DeepSpeed (ZeRO-2)",
        "Accelerate",
        "Megatron-core",
        "Colossal-AI",
    ]
    plain, deepspeed, *silent = sheet.rows
    assert plain[2] == "0" and deepspeed[2] == "5e-01"
    for row in (plain, deepspeed):
        assert all(cell.split(" | ")[0] == cell.split(" | ")[1] for cell in row[3:6])
    assert all(row[-1] == "—" for row in silent)


def test_messages_are_told_in_weights() -> None:
    sheet = figures.told(stage, Ran("torch"), None, Ran("torch", zero=3), Ran("deepspeed", zero=2))  # type: ignore[arg-type]
    assert isinstance(sheet, Table)
    assert [row[1:] for row in sheet.rows] == [
        ("1 Ψ", "0 Ψ", "0 Ψ", "everything is whole everywhere"),
        ("0 Ψ", "2 Ψ", "1 Ψ", "the weights are sharded too"),
        ("1 Ψ", "1 Ψ", "0 Ψ", "the optimizer is sharded"),
    ]
    for made in (figures.told(stage, None, None), figures.told(stage)):
        assert isinstance(made, Verdict) and made.state == "note", "no table without rows"
    other = figures.told(lambda messages, size: 7, Ran("torch"))  # type: ignore[arg-type]
    assert isinstance(other, Table)
    assert other.rows[0][-1] == "7"


def test_the_cases_of_the_exercise_differ_in_what_they_send() -> None:
    """No two answers share a signature, so that the messages alone tell the stages apart."""
    for _, messages, weight_bytes, right in cases():
        gathered = messages.get("all_gather", 0) / weight_bytes
        assert (gathered == 0, 0.9 < gathered < 1.1, gathered > 1.9) == (right == 0, right == 2, right == 3)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("a stand-in was used")


def test_loops_are_counted_on_the_libraries_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    if absence("accelerate") is not None:
        pytest.skip("Accelerate is not installed here: pip install 'dlojz[libraries]'")
    monkeypatch.setattr(exercises_loops, "AcceleratorStandIn", never)
    sheet = figures.loops(plain_loop, deepspeed_loop, accelerate_loop, 10, 4)
    assert isinstance(sheet, Table)
    assert sheet.rows == (("plain", "2", "2"), ("DeepSpeed", "2", "2"), ("Accelerate", "3", "0"))
    assert figures.updates_made(7, 2) == 4, "the last one is of what is left"


def test_where_accelerate_is_missing_a_stand_in_is_called_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dlojz.libraries.library_catalogue.found", lambda name: name != "accelerate")
    monkeypatch.setattr(exercises_loops, "_apart", lambda title, count: 2 if title == "DeepSpeed" else never())
    assert figures.updates_made(10, 4) == 3
    assert "A stand-in counts here" in capsys.readouterr().out
    sheet = figures.loops(plain_loop, deepspeed_loop, accelerate_loop, 10, 4)
    assert isinstance(sheet, Table)
    assert sheet.rows[-1] == ("Accelerate (stand-in)", "3", "0")


def test_a_loop_that_breaks_is_told_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(engine: Any, batches: Any) -> None:
        raise ValueError("no such batch")

    for language, words in (("en", "did not come to its end: ValueError: no such batch."), ("fr", "n’est pas allée")):
        use_language(language)
        made = figures.loops(plain_loop, broken, accelerate_loop, 4, 2)
        assert isinstance(made, Verdict) and made.state == "wrong" and words in str(made)
    use_language("en")
    monkeypatch.setattr(exercises_loops, "WALL_S", 0.01)
    made = figures.loops(plain_loop, deepspeed_loop, accelerate_loop, 4, 2)
    assert isinstance(made, Verdict) and "was stopped after" in str(made)


class Shell:
    """Stands in for the process: keeps the command and the file, answers as told."""

    def __init__(self, *, code: int = 0, out: str = "", err: str = "", late: bool = False) -> None:
        self.code, self.out, self.err, self.late = code, out, err, late
        self.command: list[str] = []
        self.document: Any = None

    def __call__(self, command: list[str], *, cwd: str, timeout: float, **rest: Any) -> Any:
        assert not rest.get("shell")
        self.command = command
        self.document = json.loads(Path(cwd, figures.FILE).read_text())
        if self.late:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, self.code, self.out, self.err)


def _ran(monkeypatch: pytest.MonkeyPatch, shell: Shell, answer: Any = complete) -> Any:
    monkeypatch.setattr(subprocess, "run", shell)
    return figures.course_command(answer, global_batch=24, fits=4, steps=5)


def test_the_courses_command_is_run_with_the_students_file(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(out="noise\nloss 5.5\nloss 5.25\n", err="warnings")
    ran = _ran(monkeypatch, shell)
    assert shell.document == json.loads(json.dumps(complete(COURSE, 24, 2, 4)))
    words = " ".join(shell.command)
    assert "--nproc-per-node 2" in words and words.endswith("--deepspeed --deepspeed_config ds_config_zero2.json")
    assert "-b 4 -s 5 --accumulation 3" in words
    assert ran.printed == "loss 5.5\nloss 5.25"
    assert "torchrun --nproc-per-node 2 with_deepspeed.py -b 4" in str(ran)
    assert "train_micro_batch_size_per_gpu" in ran._repr_html_()


def test_what_the_command_refuses_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(code=1, err="Traceback\nAssertionError: Either <train_batch_size>\nAssertionError: again\n")
    ran = _ran(monkeypatch, shell, lambda *case: COURSE)
    assert ran.printed == "AssertionError: Either <train_batch_size>"
    assert "<train_batch_size>" not in ran._repr_html_()
    account = (
        "W1126 torch/distributed/elastic/api.py:1028] closing\n    raise ChildFailedError(\nx.ChildFailedError: \n"
    )
    said = "[rank1]: Traceback\n[rank1]:   File\n[rank1]: a.ValidationError: 1 error\n[rank0]: other\n[rank1]: stage\n"
    assert _ran(monkeypatch, Shell(code=1, err=f"{said}[rank0]: Traceback\n{account}")).printed == (
        "a.ValidationError: 1 error\nstage"
    )
    assert _ran(monkeypatch, Shell(code=1, err=f"change one of them.\n{account}")).printed == "change one of them."
    assert "was stopped after" in _ran(monkeypatch, Shell(late=True)).printed
