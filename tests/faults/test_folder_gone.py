"""Run folders that go away, fill up, or hold what is no file, while the run is under way."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.cli.main import main
from dlojz.running.folder import read_owner
from dlojz.running.run import Run, cancel_lost

Launch = Callable[..., Any]
Eventually = Callable[..., Any]
STOPS_S = 10


def gone_within(processes: list[Any], seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while time.monotonic() < deadline_s and any(process.is_running() for process in processes):
        time.sleep(0.1)
    return not any(process.is_running() for process in processes)


def test_a_run_whose_folder_is_removed_stops(launch: Launch) -> None:
    ward = launch("endless").under_way()
    processes = ward.processes()
    shutil.rmtree(ward.run.folder)
    assert gone_within(processes, STOPS_S)


def test_a_run_whose_folder_is_moved_stops_and_keeps_what_it_measured(launch: Launch, eventually: Eventually) -> None:
    ward = launch("endless").under_way()
    processes = ward.processes()
    elsewhere = ward.run.folder.rename(ward.run.folder.parent / "moved")
    assert gone_within(processes, STOPS_S)
    eventually((elsewhere / "record.json").exists)
    record = Run(elsewhere).record
    assert record is not None and record.status == "cancelled" and len(record.losses) >= 3
    assert "the folder of the run was moved or removed after step" in record.reason


def test_cancel_finds_a_run_without_a_folder(
    launch: Launch, eventually: Eventually, capsys: pytest.CaptureFixture[str]
) -> None:
    ward = launch("endless").under_way()
    name, processes, launcher = ward.run.run_id, ward.processes(), ward.launcher()
    os.kill(launcher, signal.SIGSTOP)  # so that it does not find out by itself
    shutil.rmtree(ward.run.folder)
    assert main(["cancel", name]) == 0
    assert f"the folder of the run {name} was moved or removed" in capsys.readouterr().out
    eventually(lambda: not any(process.is_running() for process in processes))
    assert cancel_lost(name) is None
    assert main(["cancel", name]) == 2


def test_a_stopped_rank_is_told(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    ward = launch("endless").under_way()
    rank_1 = ward.pids()[1]
    os.kill(rank_1, signal.SIGSTOP)
    deadline_s, said = time.monotonic() + STOPS_S, ""
    while time.monotonic() < deadline_s and "stopped by a signal" not in said:
        assert main(["watch", ward.run.run_id, "--once"]) == 0
        said = capsys.readouterr().out
    assert "stopped by a signal: rank 1" in said and f"kill -CONT {rank_1}" in " ".join(said.split())
    assert "estimated end" not in said
    os.kill(rank_1, signal.SIGCONT)
    while "stopped by a signal" in said:
        assert main(["watch", ward.run.run_id, "--once"]) == 0
        said = capsys.readouterr().out
    ward.run.cancel()
    assert ward.run.wait(120).record.status == "cancelled"


def test_a_stopped_launcher_is_told_and_ended_by_cancel(launch: Launch, capsys: pytest.CaptureFixture[str]) -> None:
    ward = launch("endless").under_way()
    owner = read_owner(ward.run.folder)
    os.kill(ward.launcher(), signal.SIGSTOP)
    said, deadline_s = "", time.monotonic() + 60  # the kernel stops a process when it is next scheduled
    while time.monotonic() < deadline_s and "the launcher is stopped by a signal" not in said:
        assert main(["watch", ward.run.run_id, "--once"]) == 0
        said = capsys.readouterr().out
    assert "the launcher is stopped by a signal" in said and owner is not None
    assert "had been stopped by a signal" in ward.run.cancel()
    assert ward.run.wait(120).record.status == "cancelled"


PLACES = ("events/rank-1.jsonl", "logs/rank-1.log", "job.json", "launch.json", "record.json")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_nobody_who_looks_waits_for_what_is_no_file(kind: str, launch: Launch) -> None:
    run = launch("steady").run.wait(120)
    for place in PLACES:
        path = run.folder / place
        path.unlink(missing_ok=True)
        if kind == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        for verb in (["watch", run.run_id, "--once"], ["runs"], ["logs", run.run_id], ["cancel", run.run_id]):
            signal.alarm(30)  # ends the test by SIGALRM
            assert main(verb) in (0, 1, 2), (place, verb)
            signal.alarm(0)


BUSY = """
import os, resource
import dlojz
resource.setrlimit(resource.RLIMIT_CPU, (8, 8))
run = dlojz.run(model='coatnet_tiny', worker_module='workers.busy', progress=False)
print(run.state, run.record.reason)
"""


def test_the_limit_of_processor_time_is_named(python: Callable[..., Any]) -> None:
    out, said = python(BUSY).communicate(timeout=120)
    assert "8.00 s of processor time that it may use (ulimit -t)" in out, said
    assert "memory" not in out


FULL_DISK = """
import os, sys
import dlojz
run = dlojz.run(model='coatnet_tiny', worker_module='workers.filler', progress=False, root=sys.argv[1])
print(run.state, run.record.reason)
print(dlojz.runs(sys.argv[1])[0].diagnosis())
"""


@pytest.mark.parametrize("kib", [64, 300])
def test_a_full_disk_is_named(kib: int, tmp_path: Path) -> None:
    """A file system in memory that a new namespace of mounts has to itself."""
    small = tmp_path / "small"
    small.mkdir()
    inside = f'mount -t tmpfs -o size={kib}k none "$1" && exec "$2" -c "$3" "$1"'
    words = ["unshare", "-rm", "sh", "-c", inside, "sh", str(small), sys.executable, FULL_DISK]
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no namespace of mounts can be made here")
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("failed ") and "No space left on device" in done.stdout.splitlines()[0]
    assert "vanished" not in done.stdout
