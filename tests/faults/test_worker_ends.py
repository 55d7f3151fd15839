"""The ways in which a worker itself may end."""

from collections.abc import Callable
from typing import Any

import pytest

from dlojz.running.folder import MAX_LOG_BYTES

Launch = Callable[..., Any]


def test_completed_found_again_and_made_again(launch: Launch) -> None:
    record = launch("steady").run.wait(120).record
    assert (record.status, record.reason) == ("completed", "")
    assert record.losses == tuple(4.0 - step / 1024 for step in range(5))
    assert [(footprint.rank, footprint.parameters) for footprint in record.footprints] == [(0, 2), (1, 2)]
    assert launch("steady").run.run_id == record.run_id
    again = launch("steady", again=True).run
    assert again.run_id != record.run_id
    assert again.wait(120).losses == record.losses


def test_nan_loss(launch: Launch) -> None:
    record = launch("diverging").run.wait(120).record
    assert record.status == "diverged"
    assert "NaN at step 2" in record.reason
    assert record.losses == (4.0, 4.0 - 1 / 1024)


def test_out_of_memory_in_one_rank(launch: Launch) -> None:
    record = launch("greedy").run.wait(120).record
    assert record.status == "oom"
    assert record.reason == "rank 1 ran out of memory after step 1: MemoryError"
    assert record.losses == (4.0,)


def test_import_error(launch: Launch) -> None:
    ward = launch("broken", dp=1)
    record = ward.run.wait(120).record
    assert record.status == "failed"
    assert record.reason.endswith("ModuleNotFoundError: No module named 'a_module_that_nobody_wrote'")
    assert "Traceback" in ward.run.logs(0)
    assert launch("broken", dp=1).run.run_id != ward.run.run_id, "a failed run is launched anew"


def test_a_worker_that_floods_its_output(launch: Launch) -> None:
    run = launch("noisy", dp=1).run.wait(120)
    assert run.record.status == "completed"
    assert (run.folder / "logs" / "rank-0.log").stat().st_size > 10_000_000
    log = run.logs(0)
    assert len(log.encode()) <= 4 * MAX_LOG_BYTES and "\x1b" not in log
    assert log.rstrip().endswith("the last words")


@pytest.mark.parametrize("worker", ["no_such_module"])
def test_a_worker_module_that_does_not_exist(worker: str, launch: Launch) -> None:
    record = launch(worker, dp=1).run.wait(120).record
    assert record.status == "failed" and worker in record.reason


def test_ranks_that_may_have_a_gpu_are_interpreters_of_their_own(launch: Launch) -> None:
    ward = launch("endless", device="cuda", on="local").under_way(1)
    names = [process.cmdline()[1:4] for process in ward.processes()]
    ward.run.cancel()
    assert names.count(["-P", "-m", "dlojz.processes.start_rank"]) == 2
    assert ward.run.wait(120).record.status == "cancelled"
