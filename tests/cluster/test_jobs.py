"""Jobs of stub workers on a real SLURM: how they end, and that nothing is lost when things go wrong."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlojz.base.errors import LabError
from dlojz.results.record import read_events
from dlojz.running.folder import Job, read_job
from dlojz.running.launch import run, submit_many
from dlojz.running.run import Run
from dlojz.running.slurm import slurm_queue
from dlojz.running.slurm.slurm_job import recover
from dlojz.running.slurm.slurm_rank import ports_of
from dlojz.running.state import read_all_events

from .conftest import HERE, ask, config, ended, steps, until

Send = Callable[..., Run]


@pytest.fixture(scope="module")
def limited(slurm: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A job that will reach its limit of one minute; it runs beside the other tests.

    Its `scontrol` answers late, as on a busy machine: by then SIGTERM, which comes with the requeue, has reached it.
    """
    late = tmp_path_factory.mktemp("late")
    (late / "scontrol").write_text(f'#!/bin/sh\n{shutil.which("scontrol")} "$@"\ncode=$?\nsleep 3\nexit $code\n')
    (late / "scontrol").chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{late}:{os.environ['PATH']}")
        patch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
        patch.setenv("DLOJZ_MACHINES", str(HERE / "machines"))
        patch.setenv("PYTHONPATH", str(HERE / "stubs"))
        root = tmp_path_factory.mktemp("limited")
        request: dict[str, Any] = {"on": "slurm", "machine": "stubs", "worker_module": "stub_saving", "root": root}
        return run(config(dp=2, steps=100_000), time_limit_s=60, wait=False, **request)


def test_a_run_completes_and_its_ranks_met_on_a_port_of_the_job(limited: Run, slurm: Any, stub: Send) -> None:
    one = stub("steady", dp=4)
    record = ended(one)
    assert (record.status, record.reason) == ("completed", "")
    assert record.losses == tuple(4.0 - step / 1024 for step in range(4))
    job = read_job(one.folder)
    assert job is not None
    assert job.name == one.run_id
    starts = [told[0]["environment"] for told in read_all_events(one.folder).values()]
    assert {start["MASTER_PORT"] for start in starts} == {str(ports_of(int(job.job_id))[0])}
    assert sorted((start["SLURMD_NODENAME"], start["LOCAL_RANK"]) for start in starts) == [
        ("n0", "0"),
        ("n0", "1"),
        ("n1", "0"),
        ("n1", "1"),
    ]
    assert not list(one.folder.glob(".meeting*"))
    told = until(lambda: (said := ask(slurm, "scontrol", "show", "job", job.job_id)) * ("JobState=COMPLETED" in said))
    assert f"Comment={one.run_id}" in told


def test_the_same_run_is_found_again_and_sent_once_by_two_processes_at_once(slurm: Any, stub: Send, here: Path) -> None:
    program = (
        "from dlojz.running.launch import run\n"
        "print(run(on='slurm', machine='stubs', worker_module='stub_gated', wait=False,"
        " model='vit_tiny', dp=2, device='cpu').run_id)"
    )
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    names = [process.communicate(timeout=280)[0].strip() for process in both]
    assert names[0] == names[1] != ""
    assert len(ask(slurm, "squeue", "-h", f"--name={names[0]}").splitlines()) == 1
    one = stub("gated", steps=20)
    assert one.run_id == names[0]
    (one.folder / "go").touch()
    assert ended(one).status == "completed"


def test_cancelled_with_scancel(stub: Send) -> None:
    one = stub("endless")
    until(lambda: steps(one) and steps(one, 1))
    job = read_job(one.folder)
    assert job is not None
    slurm_queue.cancel(job)
    record = ended(one)
    assert record.status == "cancelled"
    assert record.losses


def test_cancelled_while_the_scheduler_is_not_asked(stub: Send) -> None:
    one = stub("endless", seed=1)
    until(lambda: steps(one) and steps(one, 1))
    (one.folder / "cancel").touch()
    assert ended(one).status == "cancelled"


def test_a_killed_rank_is_named_and_the_run_can_be_sent_again_by_hand(slurm: Any, stub: Send) -> None:
    one = stub("gated", seed=2)
    until(lambda: steps(one) and steps(one, 1))
    os.kill(read_all_events(one.folder)[1][0]["pid"], signal.SIGKILL)
    record = ended(one)
    assert record.status == "failed"
    assert record.reason.startswith("rank 1 was killed by signal 9 (SIGKILL) after ")
    (one.folder / "go").touch()
    (one.folder / "record.json").rename(one.folder / "record-1.json")
    done = subprocess.run(
        ["sbatch", "--parsable", "job.sh"], cwd=one.folder, capture_output=True, text=True, check=True
    )
    record = ended(Run(one.folder))
    assert record.status == "completed"
    job = read_job(one.folder)
    assert job is not None
    assert job.job_id == done.stdout.strip()


def test_what_the_scheduler_refuses_is_told_and_is_not_left_waiting(stub: Send, here: Path) -> None:
    with pytest.raises(LabError, match="refused the job: .*reservation") as refusal:
        stub("steady", seed=3, reservation="nobody_has_this")
    assert "leave reservation= out" in str(refusal.value)
    (folder,) = here.glob("2*")
    assert Run(folder).state == "failed"
    assert json.loads((folder / "job.json").read_text())["job_id"] == ""


def test_a_job_whose_number_was_not_written_is_found_by_its_name(stub: Send) -> None:
    one = stub("gated", seed=4)
    job = read_job(one.folder)
    assert job is not None
    Job(**{**job.to_dict(), "job_id": ""}).write(one.folder)
    assert recover(one.folder) == job == read_job(one.folder)
    (one.folder / "go").touch()
    assert ended(one).status == "completed"


def test_a_sweep_is_one_array(slurm: Any, stub: Send, here: Path) -> None:
    configs = [config(dp=2, seed=seed) for seed in range(3)]
    request: dict[str, Any] = {"on": "slurm", "machine": "stubs", "worker_module": "stub_steady"}
    done = submit_many(configs, at_once=2, **request)
    jobs = [read_job(one.folder) for one in done]
    assert [one.config for one in done] == configs
    assert len({job.job_id for job in jobs if job}) == 1
    assert sorted(job.array_task for job in jobs if job and job.array_task is not None) == [0, 1, 2]
    assert [ended(one).status for one in done] == ["completed"] * 3
    assert (here / ".sweeps" / str(jobs[0] and jobs[0].name) / "job.sh").is_file()
    assert submit_many(configs, **request) == done


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 512 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_file_system_loses_nothing(stub: Send, small_disk: Path) -> None:
    one = stub("filling", root=small_disk)
    until((small_disk / one.run_id / "ballast").exists)
    until(lambda: "cannot be written" in (one.folder / "logs" / "slurm.log").read_text() or _job_gone(one))
    assert not (one.folder / "record.json").exists()
    (one.folder / "ballast").unlink()
    record = until(lambda: one.record)
    assert record.status == "failed"
    assert record.losses[:3] == (4.0, 4.0 - 1 / 1024, 4.0 - 2 / 1024)


def _job_gone(one: Run) -> bool:
    job = read_job(one.folder)
    asked = subprocess.run(
        ["squeue", "-h", "-j", job.job_id if job else ""], capture_output=True, text=True, check=False
    )
    return not asked.stdout.strip()


def test_stopped_by_its_limit_a_job_saves_goes_back_to_the_queue_and_goes_on(limited: Run) -> None:
    record = ended(limited)
    assert (record.status, record.reason) == ("completed", "")
    # The stubs do not agree on a step as the trainer does: one may be a step further when the signal comes.
    saved = [int((limited.folder / f"saved-{rank}").read_text()) for rank in range(2)]
    assert min(saved) > 0
    assert record.losses == tuple(4.0 - step / 1024 for step in range(max(saved) + 3))
    started = [
        event for event in read_events(limited.folder / "events" / "launcher.jsonl") if event["event"] == "started"
    ]
    assert [event["start"].partition("-")[2] for event in started] == ["0", "1"]


def test_the_controller_dies_while_a_job_runs(slurm: Any, stub: Send) -> None:
    one = stub("gated", seed=5)
    until(lambda: steps(one) and steps(one, 1))
    _written_down(slurm, one)
    assert slurm.stop("slurmctld", kill=True) == ["slurmctld"]
    try:
        assert one.state == "running"
        (one.folder / "go").touch()
        record = ended(one)
        assert record.status == "completed"
        with pytest.raises(LabError, match="scheduler is down or cannot be reached"):
            stub("steady", seed=6)
    finally:
        slurm.start(controller_only=True)
    assert one.state == "completed"
    job = read_job(one.folder)
    assert job is not None
    ask(slurm, "scancel", job.job_id)  # the controller may want to run it again
    # Its daemons ask again only once a minute whether the controller is there.
    for daemon in _daemons(slurm, job.job_id):
        with contextlib.suppress(psutil.NoSuchProcess):
            daemon.kill()
    until(lambda: not _daemons(slurm, job.job_id))


def _written_down(slurm: Any, one: Run) -> None:
    """Wait until the controller has written a job to its disk, which it does some seconds after a change.

    Killed before, it would have lost count, and give the job's number to the next one: that one's first step is then
    ended in the place of a step which a node still reports.
    """
    job = read_job(one.folder)
    assert job is not None
    asked_s = time.time()
    assert ask(slurm, "scontrol", "update", f"JobId={job.job_id}", "AdminComment=kept") == ""
    until(lambda: (slurm.folder / "state" / "job_state").stat().st_mtime > asked_s)


def _daemons(slurm: Any, job_id: str) -> list[psutil.Process]:
    """What this cluster still runs on a node for a job; each is named after its step."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if " ".join(process.info["cmdline"] or ()).startswith(f"slurmstepd: [{job_id}."):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.environ().get("SLURM_CONF") == slurm.environment["SLURM_CONF"]:
                    found.append(process)
    return found
