"""Ranks for one call: what they give back, what becomes of those that do not, and what is left of them: nothing."""

import contextlib
import os
import subprocess
import sys
import time
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from dlojz.base.errors import LabError
from dlojz.base.machine import patience
from dlojz.processes.forks import MAX_FORKS, hash_of_process, spmd
from dlojz.processes.status_board import REGION_BYTES, StatusBoard, is_gone


def test_values_and_tensors_come_back_by_rank() -> None:
    def job(rank: int, size: int) -> Any:
        return {"rank": rank, "size": size}, {
            "mine": torch.full((2, 3), rank, dtype=torch.int64).T,
            "none": torch.empty(0),
        }

    answers = spmd(job, 3)
    assert [one.value for one in answers] == [{"rank": rank, "size": 3} for rank in range(3)]
    assert [one.tensors["mine"].tolist() for one in answers] == [[[rank, rank]] * 3 for rank in range(3)]
    assert spmd(lambda rank, size: torch.tensor(rank), 1)[0].tensors["value"].item() == 0
    assert spmd(lambda rank, size: None, 1)[0].value is None


def test_the_ranks_have_what_the_process_that_forks_them_has() -> None:
    there = {"answer": 42}
    assert [one.value for one in spmd(lambda rank, size: there, 2)] == [there, there]


def test_the_ranks_meet_on_the_loopback_whatever_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a `.bashrc` for jobs on several nodes; the process that forks keeps what it names."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert [one.value for one in spmd(lambda rank, size: os.environ["GLOO_SOCKET_IFNAME"], 2)] == ["lo", "lo"]
    assert os.environ["GLOO_SOCKET_IFNAME"] == "nosuch0"


@pytest.mark.parametrize("size", [0, -1, True, 2.0, "four", MAX_FORKS + 1])
def test_a_number_of_ranks_that_is_none_is_refused(size: Any) -> None:
    with pytest.raises(LabError, match="a number of ranks is a whole number from 1 to 64"):
        spmd(lambda rank, size: None, size)


def test_a_rank_that_is_killed_exits_or_loops_ends_with_a_word() -> None:
    def job(rank: int, size: int) -> None:
        if rank == 0:
            os._exit(7)
        if rank == 1:
            os.kill(os.getpid(), 9)
        if rank == 2:
            sys.exit("enough")
        while True:
            time.sleep(1)

    errors = [one.error for one in spmd(job, 4, wall_s=20 * patience())]
    assert [(error.kind, error.message) for error in errors[:2] if error] == [("lost", "7"), ("lost", "-9")]
    assert errors[2] and (errors[2].name, errors[2].message) == ("SystemExit", "enough")
    assert errors[3] and errors[3].kind == "time"


def test_the_line_of_an_error_is_that_of_the_function() -> None:
    def job(rank: int, size: int) -> None:
        dist.all_reduce("no tensor")  # type: ignore[arg-type]

    error = spmd(job, 1)[0].error
    assert error is not None
    assert error.name == "TypeError" and "no tensor" in error.text and error.line > 0


def test_a_value_that_is_no_json_is_told_as_such() -> None:
    error = spmd(lambda rank, size: {1, 2}, 1)[0].error
    assert error is not None
    assert (error.name, error.kind) == ("TypeError", "") and "set" in error.message


def test_an_interrupted_write_leaves_a_board_that_can_be_read(tmp_path: Any) -> None:
    StatusBoard.create(tmp_path / "board", 1)
    board = StatusBoard(tmp_path / "board", 0, 1)
    board.write({"n": 1})
    board._version += 1  # as an interrupt between the two halves of a write leaves it
    board.write({"n": 2})
    assert board.read(0)["n"] == 2


def test_no_rank_outlives_the_process_that_forked_it() -> None:
    script = (
        "import time\n"
        "from dlojz.processes.forks import spmd\n"
        "def job(rank, size):\n"
        "    import os\n"
        "    os.write(1, b'%d\\n' % os.getpid())\n"
        "    time.sleep(1000)\n"
        "spmd(job, 2)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(process.stdout.readline()) for _ in range(2)]
    process.kill()
    process.wait()
    left = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            left.append(psutil.Process(pid))
    _, alive = psutil.wait_procs(left, timeout=120)
    assert [one for one in alive if one.status() != psutil.STATUS_ZOMBIE] == []


def test_a_state_that_is_being_written_is_read_whole_or_as_the_one_before(tmp_path: Any) -> None:
    StatusBoard.create(tmp_path / "board", 1)
    StatusBoard(tmp_path / "board", 0, 1).write({"n": 0})
    pid = os.fork()
    if pid == 0:
        mine = StatusBoard(tmp_path / "board", 0, 1)
        for n in range(1, 40_001):
            mine.write({"n": n, "more": "x" * (n % 50)})
        os._exit(0)
    theirs, last = StatusBoard(tmp_path / "board", 0, 1), 0
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        state = theirs.read(0)
        if not state:  # the writer lost its core in the middle: what it did last is not known
            continue
        assert state["n"] >= last and state.get("more", "") == "x" * (state["n"] % 50)
        last = state["n"]
    assert theirs.read(0)["n"] == 40_000


def test_a_board_shows_whole_states_only(tmp_path: Any) -> None:
    StatusBoard.create(tmp_path / "board", 2)
    one, two = StatusBoard(tmp_path / "board", 0, 2), StatusBoard(tmp_path / "board", 1, 2)
    assert one.read_all() == [{}, {}]
    one.write({"n": 1})
    two.write({"n": "x" * 1000})
    assert [state["n"] for state in one.read_all()] == [1, "x" * 1000]
    before = one.read(0)["version"]
    one.write({"n": 2})
    assert two.read(0)["n"] == 2 and two.read(0)["version"] > before
    with pytest.raises(ValueError, match="does not fit"):
        one.write({"n": "x" * REGION_BYTES})
    again = StatusBoard(tmp_path / "board", 0, 2)
    again.write({"n": 3})
    assert two.read(0)["version"] > before
    assert oct((tmp_path / "board").stat().st_mode)[-3:] == "600"


def test_a_process_that_has_ended_is_known_to_be_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    deadline = time.monotonic() + 120
    while not is_gone(process.pid) and time.monotonic() < deadline:  # a zombie counts as gone
        time.sleep(0.01)
    assert is_gone(process.pid)
    process.wait()
    assert is_gone(process.pid) and not is_gone(os.getpid()) and not is_gone(None)


def test_hash_of_process_parts_texts_and_leaves_numbers() -> None:
    one, other = hash_of_process(0), hash_of_process(1)
    assert one("a") == hash_of_process(0)("a") != other("a")
    assert one((3, ("b", 1))) != other((3, ("b", 1)))
    assert one((3, 4)) == other((3, 4)) == hash((3, 4))
