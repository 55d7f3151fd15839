"""A fork whose child never comes back."""

import os
import signal

import pytest

from dlojz.processes.forks import fork


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_the_child_lives_one_function_and_ends() -> None:
    assert ended(fork(lambda: os._exit(7))) == 7


def test_a_child_that_raises_or_returns_does_not_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    def child() -> None:
        raise ValueError("of the child")

    assert ended(fork(child)) == 1
    assert "ValueError: of the child" in capfd.readouterr().err
    assert ended(fork(lambda: None)) == 1


def test_the_child_begins_without_the_parents_handlers() -> None:
    """A signal that is on its way when the child begins ends it, as the system's own handler does."""
    former = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        kept = fork(lambda: (os.kill(os.getpid(), signal.SIGTERM), os._exit(0)))
        assert ended(kept) == 0
        reset = fork(lambda: (os.kill(os.getpid(), signal.SIGTERM), os._exit(0)), reset=(signal.SIGTERM,))
        assert ended(reset) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, former)


def test_the_parents_signals_are_as_before() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    ended(fork(lambda: os._exit(0)))
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
