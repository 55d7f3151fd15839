"""Runs that somebody or the clock stops keep what they have measured, and nobody is left."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from typing import Any

import dlojz

Python = Callable[[str], "subprocess.Popen[str]"]
REQUEST = "model='coatnet_tiny', dp=2, steps=5, worker_module='workers.endless'"


def test_cancel_of_ranks_that_listen(launch: Callable[..., Any], eventually: Callable[..., Any]) -> None:
    ward = launch("endless").under_way()
    assert "is asked to stop" in ward.run.cancel()
    record = ward.run.wait(120).record
    assert record.status == "cancelled"
    assert record.reason == f"the run was cancelled after step {len(record.losses)}; what had been measured is kept."
    assert "has ended already" in ward.run.cancel()
    eventually(lambda: not ward.processes())


def test_cancel_of_ranks_that_do_not(launch: Callable[..., Any], eventually: Callable[..., Any]) -> None:
    ward = launch("deaf", dp=1).under_way()
    ward.run.cancel()
    record = ward.run.wait(120).record
    assert record.status == "cancelled" and len(record.losses) == ward.steps(0)
    eventually(lambda: not ward.processes())


def test_cancel_before_the_ranks_have_started(launch: Callable[..., Any]) -> None:
    run = launch("endless").run
    run.cancel()
    assert run.wait(120).record.status == "cancelled"


def test_time_limit(launch: Callable[..., Any], eventually: Callable[..., Any]) -> None:
    ward = launch("endless", time_limit_s=3)
    record = ward.run.wait(120).record
    assert record.status == "timeout"
    assert record.reason.startswith("the time limit of 3.00 s was reached ")
    eventually(lambda: not ward.processes())


def test_ctrl_c_where_somebody_waits(
    python: Python, only_run: Callable[[], Any], eventually: Callable[..., Any]
) -> None:
    waiting = python(f"dlojz.run({REQUEST})")
    ward = only_run().under_way()
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate()
    assert waiting.returncode == -signal.SIGINT  # what a shell shows as 130
    assert f"{ward.run.run_id}: cancelled after" in said and "all that was measured is kept" in said
    record = ward.run.record
    assert record.status == "cancelled" and len(record.losses) >= 3
    eventually(lambda: not ward.processes())


def test_a_kernel_restart_leaves_the_run_alone(python: Python, only_run: Callable[[], Any]) -> None:
    kernel = python(f"print(dlojz.run({REQUEST}, wait=False).run_id); import time; time.sleep(600)")
    name = kernel.stdout.readline().strip()  # type: ignore[union-attr]
    kernel.kill()
    kernel.wait()
    ward = only_run().under_way()
    assert (ward.run.run_id, ward.run.state) == (name, "running")
    found = python(f"run = dlojz.run({REQUEST}, wait=False); print(run.run_id, run.state); run.cancel(); run.wait(120)")
    assert found.communicate()[0] == f"{name} running\n"
    assert ward.run.record.status == "cancelled"


def test_a_signal_while_the_launcher_is_still_importing(
    only_run: Callable[[], Any], eventually: Callable[..., Any]
) -> None:
    dlojz.run(model="coatnet_tiny", dp=2, wait=False)
    ward = only_run()
    # The launcher opens its events before it imports torch, once it catches signals.
    eventually((ward.run.folder / "events" / "launcher.jsonl").exists)
    ward.processes()[0].send_signal(signal.SIGTERM)
    assert ward.run.wait(120).record.status == "cancelled"
    assert ward.pids() == {}
