"""A machine that does not help: ports taken, disks full, folders that cannot be written, a SLURM step around us."""

import resource
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError

Launch = Callable[..., Any]


def occupied(port: int) -> socket.socket:
    taken = socket.socket()
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(("127.0.0.1", port))
        taken.listen()
    except OSError:
        pass  # somebody else occupies it, which serves as well
    return taken


def test_ports_that_are_taken_do_not_matter(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    with occupied(29500), occupied(0) as other:
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        ward = launch("gloo").under_way()
        ward.run.cancel()
        record = ward.run.wait(120).record
    assert record.status == "cancelled" and len(record.losses) >= 3


def test_a_root_that_cannot_be_written(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LabError, match=r"cannot be written in .*: Not a directory\. Set root= or \$DLOJZ_RUNS"):
        launch("steady", root=tmp_path / "file" / "runs")


def test_a_disk_that_fills_up(tmp_path: Path) -> None:
    # 20 kB per file stand for the full disk: they bind root too, and need no mount.
    program = (
        "import dlojz; run = dlojz.run(model='coatnet_tiny', worker_module='workers.filler', progress=False); "
        "print(run.state, len(run.losses), run.record.reason)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        text=True,
        capture_output=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    state, losses, reason = answer.stdout.strip().split(" ", 2)
    assert state == "failed" and "File too large" in reason
    (events,) = (tmp_path / "runs").glob("*/events/rank-0.jsonl")
    assert int(losses) == events.read_text().count('"step_s": 0.01}\n') > 100


def test_a_slurm_step_around_the_notebook_lends_no_identity(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setenv("SLURM_PROCID", "7")
    monkeypatch.setenv("RANK", "7")
    environment = launch("steady", device="cpu").run.wait(120).record.environment
    assert environment["SLURM_PROCID"] == ""
    assert environment["DS_ACCELERATOR"] == "cpu" and environment["TORCH_FR_BUFFER_SIZE"] == "20000"


def test_a_student_file_does_not_shadow_a_library(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('this is not the random you are looking for')")
    monkeypatch.chdir(tmp_path)
    assert launch("steady", dp=1).run.wait(120).record.status == "completed"
