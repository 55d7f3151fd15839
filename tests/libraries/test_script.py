"""A script of one's own, unchanged: started as torchrun starts it, measured from outside, ended like any run."""

import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.base.files import CHECKOUT
from dlojz.base.language import use_language
from dlojz.cli.main import main
from dlojz.libraries.watched_script import TEXTS
from dlojz.results.record import RunRecord
from dlojz.running.run import Run
from tests.libraries.forked_scripts import run_on_forks

SCRIPT = Path(__file__).with_name("own_script.py")
WEIGHTS = 16 * 64 + 64 + 64 * 4 + 4
"""Parameters of the script's model."""


def measured(run: Run) -> RunRecord:
    assert run.record is not None
    assert run.record.status == "completed", run.logs()
    return run.record


def run_text(folder: Path, text: str, start: Callable[..., Run] = dlojz.run, **options: Any) -> Run:
    """Run a script that is written for one test."""
    path = folder / "written.py"
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return start(path, device="cpu", root=folder / "runs", progress=False, **options)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of this module's runs."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def ddp(root: Path) -> Run:
    """The script on two processes."""
    return dlojz.run(SCRIPT, processes=2, args=["--lr", "1e-2"], device="cpu", root=root, progress=False)


def test_the_record_is_one_of_an_ordinary_run(ddp: Run) -> None:
    record = measured(ddp)
    assert ddp.title == "own_script.py ×2"
    assert [footprint.rank for footprint in record.footprints] == [0, 1]
    assert record.environment["wrapped_in"] == "DistributedDataParallel"
    first = record.footprints[0]
    assert first.parameters == WEIGHTS
    assert first.memory.weights_bytes == first.memory.gradients_bytes == 4 * WEIGHTS
    assert first.memory.optimizer_bytes is not None and first.memory.optimizer_bytes >= 8 * WEIGHTS
    assert (first.memory.peak_bytes or 0) > 16 * WEIGHTS
    assert first.traffic("all_reduce") == 4 * WEIGHTS
    assert first.step_flops == 2 * 3 * 8 * (16 * 64 + 64 * 4) - 2 * 8 * 16 * 64  # the inputs need no gradient
    assert first.samples_per_s == pytest.approx(16 / (first.phases.step_s or 0))
    assert {"forward", "backward", "optimizer", "data"} <= {span.phase for span in record.spans}
    assert first.phases.communication_exposed_s is not None
    assert {span.step for span in record.spans} <= {3, 4, 5, 6}


def test_the_losses_are_the_mean_of_those_that_the_ranks_printed(ddp: Run) -> None:
    printed = [[float(loss) for loss in re.findall(r"step \d+: (\S+)", ddp.logs(rank))] for rank in range(2)]
    assert measured(ddp).losses == pytest.approx([sum(both) / 2 for both in zip(*printed, strict=True)], abs=1e-6)


def test_it_is_shown_as_other_runs_are(ddp: Run, root: Path) -> None:
    assert [run.run_id for run in dlojz.runs(root) if run == ddp] == [ddp.run_id]
    row = ddp.compare().rows[0]
    assert (row.title, row.global_batch, row.exact) == ("own_script.py", 16, True)
    assert row.prediction_note == ""
    assert "own_script.py ×2 |" in repr(ddp.compare()) and "own_script.py" in str(ddp.table())


ONE_MODEL = """
    import torch
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def train(steps):
        for _ in range(steps):
            model(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_a_scaler_that_leaves_an_update_out_still_ends_the_step(tmp_path: Path) -> None:
    run = run_text(
        tmp_path,
        """
        import torch
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(6):
            loss = model(torch.ones(2, 4)).square().mean()
            print("loss", loss.item(), flush=True)
            scaler.scale(loss * (float("inf") if number == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    """,
        start=run_on_forks,
    )
    record = run.record
    assert record is not None and record.status == "diverged"
    assert len(record.step_s) == 6
    assert record.losses[0] == pytest.approx(float(run.logs(0).split()[1]))


@pytest.mark.parametrize(
    "value", ["nan", *(pytest.param(value, marks=pytest.mark.nightly) for value in ("inf", "-inf"))]
)
def test_record_names_a_loss_that_is_no_finite_number(value: str, tmp_path: Path) -> None:
    """Infinite at the third step, step 2, of five: the script went on, and the watch says so."""
    run = run_text(
        tmp_path,
        f"""
    import torch
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for number in range(5):
        loss = model(torch.ones(2, 4)).square().mean() + (float("{value}") if number == 2 else 0)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    """,
        start=run_on_forks,
    )
    record = run.record
    assert record is not None and record.status == "diverged" and f"became {value} at step 2" in record.reason


def test_record_and_logs_have_the_traceback_of_a_script_untouched(tmp_path: Path) -> None:
    run = run_text(
        tmp_path,
        ONE_MODEL
        + """
    import atexit
    atexit.register(print, "left in good order")
    train(3)
    model(torch.randn(2, 5)).sum().backward()
    """,
    )
    assert run.record is not None and run.record.status == "failed"
    assert run.record.reason.startswith("rank 0: RuntimeError: mat1 and mat2 shapes")
    log, frame = run.logs(0), r'File "\S+written.py", line \d+, in \S+\n.*'
    alone = subprocess.run([sys.executable, tmp_path / "written.py"], capture_output=True, text=True, check=False)
    assert log.startswith("Traceback (most recent call last):\n")
    assert re.findall(frame, log) == re.findall(frame, alone.stderr)
    assert alone.stderr.splitlines()[-1] in log.splitlines()
    assert "runpy" not in log and str(CHECKOUT / "dlojz") not in log
    assert log.endswith("left in good order\n")
    assert len(run.record.losses) == 3


@pytest.mark.nightly
@pytest.mark.parametrize(("left", "status"), [("0", "completed"), ("'no data'", "failed")])
def test_record_status_follows_the_exit_codes_of_a_script(tmp_path: Path, left: str, status: str) -> None:
    run = run_text(
        tmp_path,
        ONE_MODEL
        + f"""
    train(4)
    raise SystemExit({left})
    """,
    )
    assert run.record is not None and run.record.status == status
    if status == "failed":
        assert "written.py left with exit code" in run.record.reason
    assert ("no data" in run.logs(0)) == ("no data" in left)


def test_record_names_a_rank_that_is_killed(tmp_path: Path) -> None:
    run = run_text(
        tmp_path,
        ONE_MODEL
        + """
    import os, signal, time
    train(4)
    if os.environ.get("RANK") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """,
        processes=2,
        start=run_on_forks,
    )
    assert run.record is not None and run.record.status == "failed"
    assert "rank 1 was killed by signal 9 (SIGKILL) after step 4" in run.record.reason


def test_cancel_ends_a_script_that_hangs(tmp_path: Path) -> None:
    run = run_text(
        tmp_path,
        ONE_MODEL
        + """
    import time
    train(12)
    time.sleep(600)
    """,
        wait=False,
    )
    limit_s = time.monotonic() + 60
    while len(run.losses) < 12 and time.monotonic() < limit_s:
        time.sleep(0.2)
    run.cancel()
    run.wait(60)
    assert run.record is not None and run.record.status == "cancelled"
    assert run.record.footprints


@pytest.mark.parametrize(
    ("lines", "seen"),
    [
        pytest.param(
            "torch.no_grad().__enter__(); model(torch.randn(2, 4))",
            "modules were called 1 times, always without grad",
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import subprocess, os; subprocess.run(['true']); torch.multiprocessing.Process(target=os.getpid).start()",
            "no model was trained in it, and none of the 2 processes that it started was seen to train",
            marks=pytest.mark.nightly,
        ),
        ("model(torch.randn(2, 4)).sum().backward()", "backward was called 1 times and optimizers made: 1, but none"),
    ],
)
def test_main_says_in_one_sentence_that_a_script_ends_before_a_step(
    tmp_path: Path, lines: str, seen: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence, and exit code 2."""
    script = tmp_path / "written.py"
    script.write_text(textwrap.dedent(ONE_MODEL) + "print('begun')\n" + lines + "\n", encoding="utf-8")
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    assert main(["run", str(script), "--device", "cpu"]) == 2
    printed = capfd.readouterr().err.splitlines()
    assert printed[0] == "begun" and len(printed) == 3
    assert printed[1].startswith("dlojz: written.py ended before any optimizer made a step") and seen in printed[1]
    (run,) = dlojz.runs(tmp_path / "runs")
    assert run.record is not None and run.record.status == "failed"
    assert run.record.reason.startswith("rank 0: written.py ended before") and str(run.folder) in printed[2]


def test_main_shows_all_that_a_script_prints(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than is read at once, a bar that is written over, and a last line without an end."""
    script = tmp_path / "written.py"
    script.write_text(
        textwrap.dedent(ONE_MODEL)
        + textwrap.dedent(r"""
        train(4)
        print("x" * 99)
        for number in range(3000):
            print("number", number, "é" * 40)
        print("\r10 %\r100 %\rlast", end="")
    """),
        encoding="utf-8",
    )
    monkeypatch.setenv("DLOJZ_RUNS", str(tmp_path / "runs"))
    assert main(["run", str(script), "--device", "cpu"]) == 0
    printed = capfd.readouterr().err
    lines = printed.split("\n")
    assert lines[0] == "x" * 99
    assert lines[1:3001] == [f"number {number} {'é' * 40}" for number in range(3000)]
    assert lines[3001:] == ["100 %\rlast", ""]


def test_dlojz_run_lets_the_script_read_what_is_piped_in(tmp_path: Path) -> None:
    script = tmp_path / "written.py"
    script.write_text(textwrap.dedent(ONE_MODEL) + "train(int(input()))\n", encoding="utf-8")
    command = [sys.executable, "-m", "dlojz", "run", str(script), "--device", "cpu", "--root", str(tmp_path / "runs")]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    done = subprocess.run(command, input="4\n", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (run,) = dlojz.runs(tmp_path / "runs")
    assert run.record is not None and len(run.record.step_s) == 4


def test_dlojz_run_ends_a_script_that_trains_nothing(tmp_path: Path) -> None:
    run = run_text(
        tmp_path,
        ONE_MODEL
        + """
    import time
    print("begun")
    time.sleep(600)
    """,
        first_step_s=1.0,
        start=run_on_forks,
    )
    assert run.record is not None and run.record.status == "failed"
    line = 1 + textwrap.dedent((tmp_path / "written.py").read_text()).splitlines().index("time.sleep(600)")
    assert f"made no optimizer step within 1 s and was ended in its line {line}" in run.record.reason
    assert run.logs(0).startswith("begun\ndlojz: written.py made no optimizer step") and "line" in run.logs(0)


def test_the_sentences_are_in_both_languages() -> None:
    use_language("fr")
    in_time = TEXTS.say("no step", "in time at a line", name="a.py", first_step_s=600, line=7, saw="rien")
    assert "aucun pas d’optimiseur en 600 s et a été arrêté à sa ligne 7 (" in in_time
    assert "avant le premier pas d’un optimiseur" in TEXTS.say("no step", "at all", name="train.py", saw="rien")


def test_dlojz_run_hands_words_to_the_script_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Beside a lock of a build that was killed, which is named before the run waits for it."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "built"))
    lock = tmp_path / "built" / "cpu_adam" / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (0, 0))
    words = ["--a b", "$(touch hacked)", ";", "--", "-h"]
    run = run_text(
        tmp_path,
        ONE_MODEL
        + """
    import sys
    print(sys.argv[1:], __name__, flush=True)
    train(1)
    """,
        args=words,
    )
    assert run.logs(0).splitlines()[0] == f"{words} __main__"
    assert not list(tmp_path.rglob("hacked"))
    assert f"rm {lock}" in capsys.readouterr().err


def test_dlojz_run_refuses_what_says_nothing_to_a_script(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="is no file"):
        dlojz.run(tmp_path / "none.py")
    with pytest.raises(LabError, match="dp says nothing to a script"):
        dlojz.run(SCRIPT, dp=2)
    with pytest.raises(LabError, match="on='replay' was received with a script"):
        dlojz.run(SCRIPT, on="replay")
    with pytest.raises(LabError, match="processes"):
        dlojz.run(SCRIPT, processes=0)


def test_watch_under_torchrun_makes_one_record(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = {**os.environ, "DLOJZ_RUNS": str(tmp_path), "PYTHONPATH": str(CHECKOUT)}
    words = ["-m", "dlojz.watch", str(SCRIPT), "--steps", "5"]
    done = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, check=True, timeout=120)
    (run,) = dlojz.runs(tmp_path)
    assert run.folder.name in done.stderr
    record = measured(run)
    assert len(record.losses) == 5 and [one.rank for one in record.footprints] == [0, 1]
