"""Processes killed from outside: the cause is named, what was measured is kept, and nobody is left."""

import signal
from collections.abc import Callable
from typing import Any


def loss_at(step: int) -> float:
    return 4.0 - step / 1024


def kept(losses: tuple[float, ...]) -> bool:
    """Whether these are the losses that the test workers report, none lost, none changed."""
    return len(losses) >= 3 and losses == tuple(loss_at(step) for step in range(len(losses)))


def test_a_killed_rank_is_named_with_its_step(launch: Callable[..., Any], eventually: Callable[..., Any]) -> None:
    ward = launch("gloo").under_way()
    ward.kill(ward.pids()[1])
    run = ward.run.wait(120)
    assert run.record.status == "failed"
    steps = ward.steps(1)
    assert run.record.reason.startswith(f"rank 1 was killed by signal 9 (SIGKILL) after step {steps}: ")
    assert kept(run.losses) and len(run.losses) >= steps
    eventually(lambda: not ward.processes())


def test_a_killed_launcher_takes_its_ranks_along(launch: Callable[..., Any], eventually: Callable[..., Any]) -> None:
    ward = launch("deaf").under_way()
    assert len(ward.processes()) == 3
    ward.kill(ward.launcher())
    eventually(lambda: not ward.processes())
    run = ward.run
    assert run.state == "failed"
    assert "the launcher vanished after step" in run.record.reason
    assert kept(run.losses) and len(run.losses) == max(ward.steps(0), ward.steps(1))


def test_a_terminated_launcher_ends_as_cancelled_with_all_its_helpers(
    launch: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    ward = launch("endless").under_way()
    assert len(ward.processes()) == 5
    ward.processes()[0].send_signal(signal.SIGTERM)
    run = ward.run.wait(120)
    assert run.record.status == "cancelled"
    assert kept(run.losses)
    eventually(lambda: not ward.processes())
