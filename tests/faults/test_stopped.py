"""Runs that somebody or the clock stops keep what they have measured, and nobody is left."""

import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

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


COMMAND = "import sys; from dlojz.cli.main import main; sys.exit(main())"


def heeds_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("background", [False, True])
def test_a_signal_to_the_command_cancels_its_run(
    number: signal.Signals, background: bool, only_run: Callable[[], Any], eventually: Callable[..., Any]
) -> None:
    """As `timeout` and a terminal that is closed send; a shell's background jobs have SIGINT ignored."""
    words = [sys.executable, "-c", COMMAND, "run", "--model", "vit_tiny", "--dp", "2", "--steps", "5000"]
    words = ["sh", "-c", f'trap "" {"INT" if background else "USR1"}; exec "$0" "$@"', *words]
    command = subprocess.Popen(
        words,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=heeds_signals,  # noqa: PLW1509 - the tests may run under nohup, whose children ignore SIGHUP
    )
    ward = only_run().under_way()
    command.send_signal(number)
    _, said = command.communicate(timeout=120)
    assert command.returncode == 130 and "all that was measured is kept" in said
    assert ward.run.record.status == "cancelled"
    eventually(lambda: not ward.processes())


def test_a_command_whose_hang_up_is_ignored_goes_on(only_run: Callable[[], Any]) -> None:
    """As under `nohup`."""
    words = [sys.executable, "-c", COMMAND, "run", "--model", "vit_tiny", "--dp", "2", "--steps", "5000"]
    command = subprocess.Popen(["sh", "-c", 'trap "" HUP; exec "$0" "$@"', *words], stderr=subprocess.DEVNULL)
    ward = only_run().under_way()
    command.send_signal(signal.SIGHUP)
    assert ward.run.state == "running" and command.poll() is None
    ward.run.cancel()
    assert command.wait(120) == 1
