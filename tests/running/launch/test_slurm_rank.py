"""Where the ranks meet, and the end of a job: in this process, without a scheduler."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.processes.forks import fork
from dlojz.results.record import read_record
from dlojz.running.folder import Job, read_job
from dlojz.running.slurm import slurm_rank
from dlojz.running.slurm.slurm_finish import exits_of, finish, main
from dlojz.running.slurm.slurm_rank import FIRST_PORT, address_of, free_port, meet, open_anew, ports_of, start_name
from dlojz.running.store import claim, folder_of_job

CONFIG = RunConfig.of(model="vit_tiny", dp=2, steps=4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return claim(CONFIG, tmp_path / "runs", force_new=True, time_limit_s=600)[0]


@pytest.fixture
def taken() -> Iterator[list[int]]:
    """Ports of a job, the first two of which another program listens on."""
    with ExitStack() as stack:
        for job in range(1, 200):
            ports = ports_of(job)
            try:
                for port in ports[:2]:
                    stack.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            yield ports
            return


def test_ports_lie_below_those_given_to_clients_and_neighbours_share_none() -> None:
    for job in (0, 1, 4549, 4550, 10**9):
        ports = ports_of(job)
        assert min(ports) >= FIRST_PORT
        assert max(ports) < 32768
        assert len(ports) == 5
        assert not set(ports) & set(ports_of(job + 1))


def test_a_port_in_use_is_passed_over(taken: list[int]) -> None:
    assert free_port(taken) == taken[2]
    with pytest.raises(OSError, match="in use"):
        free_port(taken[:2])


def test_the_ranks_meet_where_rank_0_says(folder: Path, taken: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    job = (taken[0] - FIRST_PORT) // 5
    found: list[Any] = []
    other = threading.Thread(target=lambda: found.append(meet(folder, f"{job}-0", 1, "n0", job)))
    other.start()
    assert meet(folder, f"{job}-0", 0, "localhost", job) == ("localhost", taken[2])
    other.join(60)
    assert found == [("localhost", taken[2])]
    monkeypatch.setattr(slurm_rank, "MEETING_S", 0.2)
    with pytest.raises(LabError, match="rank 1 waited"):
        meet(folder, f"{job}-1", 1, "n0", job)


def test_address_of_a_node_whose_name_leads_nowhere_is_that_of_its_computer() -> None:
    assert address_of("localhost") == "localhost"
    assert address_of("no-such-node.invalid") in (socket.gethostname(), "127.0.0.1")


def test_open_anew_gives_the_folder_to_a_job_that_was_sent_by_hand(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    Job(machine="local", name=folder.name, job_id="7").write(folder)
    finish(folder, 1)
    old = (folder / "record.json").read_text()
    assert start_name() == "42-1"
    open_anew(folder, start_name(), "n[0-1]")
    assert not (folder / "record.json").exists()
    assert [path.read_text() for path in (folder / "attempts").iterdir()] == [old]
    assert read_job(folder) == Job(machine="local", name=folder.name, job_id="42")


def tell(folder: Path, rank: int, *events: dict[str, Any], code: int | None = None, at_s: float = 0.0) -> None:
    lines = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events" / f"rank-{rank}.jsonl").write_text(lines)
    if code is not None:
        event = {"event": "exit", "rank": rank, "start": "7-0", "code": code, "time_s": 1000.0 + at_s}
        (folder / "events" / f"task-{rank}.jsonl").write_text(json.dumps(event) + "\n")


STEP = {"event": "step", "step": 0, "loss": 2.5, "step_s": 0.1}
DONE = {"event": "end", "status": "completed", "reason": ""}
TOLD = {"event": "end", "status": "cancelled", "reason": "rank 1 was told to stop (SIGTERM)."}
SAVED = {"event": "end", "status": "timeout", "reason": "saved"}


def test_main_of_slurm_rank_records_a_run_that_completed(folder: Path) -> None:
    for rank in (0, 1):
        tell(folder, rank, STEP, DONE, code=0)
    assert main([str(folder), "0"]) == 0
    record = read_record(folder / "record.json")
    assert (record.status, record.losses) == ("completed", (2.5,))


def test_finish_names_the_rank_that_went_first(folder: Path) -> None:
    tell(folder, 0, STEP, TOLD, code=1, at_s=0.2)
    tell(folder, 1, STEP, code=-signal.SIGKILL)
    assert exits_of(folder, "7-0") == {0: 1, 1: -9}
    assert exits_of(folder, "7-1") == {}
    ending = finish(folder, 137, start="7-0")
    assert (ending.status, ending.reason[:36]) == ("failed", "rank 1 was killed by signal 9 (SIGKI")


def test_exits_of_leaves_out_who_fails_five_seconds_after_the_first(folder: Path) -> None:
    tell(folder, 0, STEP, code=1)
    for later_s, failed in ((4.9, {0: 1, 1: 2}), (5.0, {0: 1})):
        tell(folder, 1, STEP, code=2, at_s=later_s)
        assert exits_of(folder, "7-0") == failed


def test_a_rank_that_saved_waits_until_all_have_ended(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            tell(folder, 1, SAVED, code=0)

    monkeypatch.setattr(slurm_rank.time, "sleep", sleep)
    tell(folder, 0, SAVED, code=0)
    slurm_rank._wait_for_peers(folder, "7-0")
    assert len(waits) == 3


def test_a_cancel_request_ends_the_rank(folder: Path) -> None:
    def rank() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # whatever the process of the tests does with it
        (folder / "cancel").touch()
        time.sleep(60)
        os._exit(7)

    pid = fork(rank)
    assert slurm_rank._wait(pid, folder / "cancel") == -signal.SIGTERM


def test_finish_knows_lack_of_memory_by_the_scheduler_s_words(folder: Path) -> None:
    tell(folder, 0, STEP, code=-signal.SIGKILL)
    tell(folder, 1, STEP)
    (folder / "logs" / "slurm.log").write_text(
        "slurmstepd: error: Step 3.0 exceeded memory limit (5 > 4), being killed\n"
    )
    assert finish(folder, 137, start="7-0").status == "oom"


def test_finish_names_a_killed_rank_where_even_the_keepers_were_killed(folder: Path) -> None:
    tell(folder, 0, STEP)
    tell(folder, 1, STEP)
    assert finish(folder, 137).reason.startswith("rank 0 was killed by signal 9")


@pytest.mark.parametrize(
    ("code", "stopped", "ran_s", "asked", "status"),
    [
        (75, False, 500, False, "timeout"),
        (143, True, 590, False, "timeout"),
        (143, True, 20, False, "cancelled"),
        (143, False, 20, True, "cancelled"),
    ],
)
def test_finish_tells_a_time_limit_from_a_cancel_where_one_stopped_from_outside(
    folder: Path, code: int, stopped: bool, ran_s: float, asked: bool, status: str
) -> None:
    for rank in (0, 1):
        tell(folder, rank, STEP, SAVED if code == 75 else TOLD, code=75 if code == 75 else 1)
    if asked:
        (folder / "cancel").touch()
    assert finish(folder, code, stopped=stopped, ran_s=ran_s, start="7-0").status == status


def test_finish_tells_the_log_of_slurm_where_nothing_started(folder: Path) -> None:
    (folder / "logs" / "slurm.log").write_text("/bin/python: No such file or directory\n")
    ending = finish(folder, 127)
    assert ending.status == "failed"
    assert ending.reason.endswith("srun ended with exit code 127: /bin/python: No such file or directory")


def test_main_of_slurm_rank_tells_of_a_record_that_cannot_be_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "record.json").mkdir()
    assert main([str(folder), "0"]) == 1
    assert "the record cannot be written" in capsys.readouterr().err


def test_a_script_by_hand_gets_a_folder_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    first = folder_of_job(["model=vit_tiny", "dp=2", "zero=2", "engine=deepspeed"], tmp_path)
    job = read_job(first)
    assert job is not None
    assert (job.name, job.job_id) == (first.name, "9")
    assert folder_of_job(["model=vit_tiny"], tmp_path) != first
    (tmp_path / "x").mkdir()
    monkeypatch.setenv("SLURM_JOB_ID", "10")
    second = folder_of_job(["model=vit_tiny"], tmp_path)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert folder_of_job(["model=vit_tiny"], tmp_path) == second
    for words in (["dp"], ["modle=x"], ["dp=0"]):
        monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
        with pytest.raises(LabError):
            folder_of_job(words, tmp_path)


@pytest.mark.parametrize("name", ["ddp", "zero", "pipeline"])
def test_folder_of_job_takes_what_the_plain_scripts_ask_for(name: str, tmp_path: Path) -> None:
    text = (Path(slurm_rank.__file__).parents[3] / "slurm" / f"{name}.slurm").read_text()
    words = text.partition("dlojz.running.store ")[2].partition(' "$@"')[0].split()
    assert folder_of_job(words, tmp_path).is_dir()
    assert "--ntasks-per-node=2" in text
