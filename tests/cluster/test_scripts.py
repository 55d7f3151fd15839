"""Scripts of one's own on a real SLURM: sent as a job, and under an srun of one's own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import dlojz
from dlojz.base.files import CHECKOUT
from dlojz.labs.script.growing_script import write_script
from dlojz.labs.script.script_judge import judge_script

from .conftest import HERE, ended, until

SCRIPT = HERE.parent / "libraries" / "own_script.py"


def test_a_script_is_sent_as_a_job(here: Path) -> None:
    run = dlojz.run(
        SCRIPT, args=["--steps", "5", "--lr", "1e-3"], processes=4, on="slurm", machine="stubs", device="cpu",
        wait=False, time_limit_s=600,
    )  # fmt: skip
    record = ended(run)
    assert (record.status, record.reason) == ("completed", ""), run.logs()
    assert len(record.losses) == 5 and [one.rank for one in record.footprints] == [0, 1, 2, 3]
    assert "rank 0 of 4, lr 0.001" in run.logs(0)
    job = (run.folder / "job.sh").read_text()
    assert "#SBATCH --nodes=2" in job and "own_script.py ×4" in job


def test_a_script_that_trains_nothing_ends_its_job(here: Path, tmp_path: Path) -> None:
    script = tmp_path / "none.py"
    script.write_text("import torch\nprint('begun', flush=True)\n")
    run = dlojz.run(script, on="slurm", machine="stubs", device="cpu", wait=False, time_limit_s=600)
    record = ended(run)
    assert record.status == "failed" and "none.py ended before any optimizer made a step" in record.reason
    assert run.logs(0).startswith("begun\n")


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([["tp-fsdp"]], id="tp-fsdp"),
        pytest.param([["ddp"], ["fsdp"], ["1f1b", "--accumulation", "4"]], id="others", marks=pytest.mark.nightly),
    ],
)
def test_the_script_of_the_labs_trains_alike_in_every_layout(
    layouts: list[list[str]], here: Path, tmp_path: Path
) -> None:
    path, words = write_script("12", tmp_path / "mine", "en", solved=True), ["--epochs", "1", "--batch", "256"]
    common = {"on": "slurm", "machine": "stubs", "device": "cpu", "wait": False, "time_limit_s": 600}
    runs = [
        dlojz.run(path, args=["--parallel", *layout, *words], processes=4, **common)  # type: ignore[arg-type]
        for layout in layouts
    ]
    alone = dlojz.run(path, args=words, processes=1, device="cpu", on="local", root=here, progress=False).record
    assert alone is not None and len(alone.losses) == 7
    for run in runs:
        record = ended(run)
        assert record.status == "completed" and len(record.footprints) == 4, run.logs()
        assert record.losses == pytest.approx(alone.losses, rel=1e-3), run.title


@pytest.mark.nightly
def test_a_script_is_judged_by_jobs(here: Path, tmp_path: Path) -> None:
    path = write_script("08", tmp_path / "mine", "en", solved=True)
    verdict = judge_script("08", path, on="slurm", machine="stubs")
    assert verdict.state == "right", verdict
    assert not list(here.glob(".dlojz-script-*"))


def test_under_an_srun_of_one_s_own(slurm: Any, here: Path) -> None:
    environment = {**slurm.environment, "DLOJZ_RUNS": str(here), "PYTHONPATH": str(CHECKOUT)}
    words = [sys.executable, "-m", "dlojz.watch", str(SCRIPT), "--steps", "5"]
    done = subprocess.run(
        ["srun", "--nodes", "2", "--ntasks", "2", "--mem", "100", *words],
        env=environment, capture_output=True, text=True, check=False, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (run,) = dlojz.runs(here)
    assert run.folder.name in done.stderr and "rank 1 of 2" in done.stdout
    record = until(lambda: run.record)
    assert record.status == "completed"
    assert len(record.losses) == 5 and [one.rank for one in record.footprints] == [0, 1]
