"""Ranks of a SLURM allocation, on an srun that starts the tasks of a step here."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dlojz.base.errors import LabError
from dlojz.base.machine import patience
from dlojz.ranks import Ranks
from dlojz.ranks.cluster import inside_allocation
from dlojz.ranks.rank_setup import RanksRefused

JOB = "123"
SRUN = """#!{python}
import os, signal, socket, subprocess, sys
if {broken}:
    sys.exit("srun: error: Unable to create step")
size = int(os.environ["SLURM_NTASKS"])
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": socket.gethostname()}}
command = sys.argv[2:]  # the first is --overlap
tasks = [
    subprocess.Popen(command, env={{**os.environ, **step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}})
    for rank in reversed(range(size))  # whoever comes first is not rank 0
]
signal.signal(signal.SIGTERM, lambda *_: [task.terminate() for task in tasks])
for task in tasks:
    task.wait()
"""


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An allocation of two tasks; the folder that holds its srun."""
    write_srun(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    return tmp_path


def write_srun(folder: Path, *, broken: bool = False) -> None:
    srun = folder / "srun"
    srun.write_text(SRUN.format(python=sys.executable, broken=broken))
    srun.chmod(0o700)


@pytest.fixture
def ranks(allocation: Path) -> Iterator[Ranks]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Ranks(2) as ranks:
        yield ranks
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    deadline_s = time.monotonic() + 120
    while (left := ours()) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert left == []


def ours() -> list[list[str]]:
    """Commands of processes of ipyparallel that run in the allocation; a notebook's beside these tests do not."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        command, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if environment.get("SLURM_JOB_ID") == JOB and any(word.startswith("ipyparallel.engine") for word in command):
            found.append(command)
    return found


def test_an_allocation_is_recognised(allocation: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert inside_allocation()
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert not inside_allocation(), "a task of a step is a rank already"
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS")
    monkeypatch.setenv("SLURM_NTASKS", "1")
    assert not inside_allocation()


def test_the_tasks_of_a_step_are_the_ranks(ranks: Ranks) -> None:
    """One step for all: it takes long to start."""
    answers = ranks.execute(
        "import os\nx = torch.ones(1) * rank\ndist.all_reduce(x)\nprint(os.environ['SLURM_PROCID'])"
    )
    assert [answer.parts[0]["text"] for answer in answers] == ["0\n", "1\n"]
    assert [value.tolist() for value in ranks["x"]] == [[1.0], [1.0]]

    answers = ranks.execute("if rank:\n    dist.barrier()")
    assert answers[1].trouble is not None
    assert answers[1].trouble.kind == "missing"

    answers = ranks.execute("if rank:\n    while True: pass", limit_s=3 * patience())
    assert [answer.trouble and answer.trouble.kind for answer in answers] == [None, "limit"]
    assert ranks["rank"] == [0, 1]

    answers = ranks.execute("import os\nif rank:\n    os._exit(3)")
    assert answers[1].trouble is not None
    assert answers[1].trouble.kind == "exit"
    assert [answer.kept for answer in answers] == [False, False], "a step cannot replace one of its tasks"
    answers = ranks.execute("dist.barrier()\nprint('x' in globals())")
    assert [answer.parts[0]["text"] for answer in answers] == ["False\n"] * 2


def test_another_number_than_that_of_the_tasks_is_refused(allocation: Path) -> None:
    with pytest.raises(RanksRefused, match="this SLURM allocation has 2 tasks: write %%ranks 2, or ask for 4 tasks."):
        Ranks(4)


def test_an_srun_that_fails_is_told_and_not_waited_for(allocation: Path) -> None:
    write_srun(allocation, broken=True)
    with pytest.raises(LabError, match="the ranks did not start .*srun: error: Unable to create step"):
        Ranks(2)
