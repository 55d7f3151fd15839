"""Baton of the ranks of one process: each is a thread, and one of them runs at a time, until it has to wait.

A rank hands the baton on where it waits for others, and at its end. So the threads need no locks, a run is the same
each time, and that nobody can go on is known at once, without a time limit. The states of the random generators, which
torch, Python and NumPy keep once per process and each rank must have for itself, change hands with the baton.
"""

from __future__ import annotations

import ctypes
import queue
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch

_LOOK_EVERY_S = 0.2


class Pending:
    """What ranks wait for: it is done when all have come that it needs.

    Attributes:
        error: raised by each rank that waits for it, in place of its result.
        waiting_ranks: to be woken.
    """

    def __init__(self) -> None:
        self.done = False
        self.error: BaseException | None = None
        self.waiting_ranks: list[int] = []


class Baton:
    """Scheduler of `size` ranks, each a thread that lives as long as the process.

    Args:
        on_switch: called with the rank that has just got the baton.
        explain: called where no rank can go on, with the ranks that wait: the exception that each of them raises.
    """

    def __init__(
        self, size: int, on_switch: Callable[[int], None], explain: Callable[[dict[int, Pending]], BaseException]
    ) -> None:
        self.size = size
        self.rank = 0  # that has the baton
        self._on_switch, self._explain = on_switch, explain
        self._calls: list[queue.SimpleQueue[None]] = [queue.SimpleQueue() for _ in range(size)]
        self._jobs: list[Callable[[], None]] = []
        self._runnable: deque[int] = deque()
        self._awaited: dict[int, Pending] = {}
        self._unfinished = 0
        self._interrupted = False
        self._finished = threading.Event()
        # Python seeds its generator anew in each process, torch and NumPy keep theirs over a fork.
        torch_state, _, numpy_state = _generator_states()
        self._generators = [(torch_state, random.Random().getstate(), numpy_state) for _ in range(size)]
        self._threads = [
            threading.Thread(target=self._live, args=(rank,), daemon=True, name=f"rank {rank}") for rank in range(size)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, jobs: Iterable[Callable[[], None]], look: Callable[[], None] = lambda: None) -> None:
        """Run one job on each rank, to the end of all; an interrupt of this thread stops those that still run.

        Args:
            look: called several times a second meanwhile.
        """
        self._jobs = list(jobs)
        self._runnable, self._awaited = deque(range(self.size)), {}
        self._unfinished, self._interrupted = self.size, False
        self._finished.clear()
        self._hand_on()
        while True:
            try:
                while not self._finished.wait(_LOOK_EVERY_S):
                    look()
                return
            except KeyboardInterrupt:
                self._interrupted = True  # the others raise it when they get the baton
                _raise_in(self._threads[self.rank], KeyboardInterrupt)

    def wait(self, pending: Pending) -> None:
        """Hand the baton on until something is done.

        Raises:
            BaseException: that of `pending`, or why nobody can go on.
            KeyboardInterrupt: if the cell was interrupted meanwhile.
        """
        rank = self.rank
        while not pending.done and pending.error is None:
            self._awaited[rank] = pending
            pending.waiting_ranks.append(rank)
            self._pass(rank)
            self._awaited.pop(rank, None)
            if self._interrupted:
                raise KeyboardInterrupt
        if pending.error is not None:
            raise pending.error

    def pause(self) -> None:
        """Let every other rank that can go on have the baton once."""
        self._runnable.append(self.rank)
        self._pass(self.rank)
        if self._interrupted:
            raise KeyboardInterrupt

    def settle(self, pending: Pending, error: BaseException | None = None) -> None:
        """Declare something done, or failed: who waits for it may go on."""
        pending.done, pending.error = error is None, error
        self._runnable.extend(pending.waiting_ranks)
        pending.waiting_ranks = []

    def _live(self, rank: int) -> None:
        torch.set_num_threads(1)
        while True:
            self._take(rank)
            try:
                if not self._interrupted:
                    self._jobs[rank]()
            except BaseException as error:  # a job answers for itself; an interrupt may come between two of its lines
                print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.__stderr__)
            self._generators[rank] = _generator_states()
            self._unfinished -= 1
            if self._unfinished:
                self._hand_on()
            else:
                self._finished.set()

    def _pass(self, rank: int) -> None:
        self._generators[rank] = _generator_states()
        self._hand_on()
        self._take(rank)

    def _take(self, rank: int) -> None:
        """Wait for the baton. An interrupt that was meant for the rank that had it before is not this one's."""
        called = False
        while not called:
            with suppress(KeyboardInterrupt):
                self._calls[rank].get()
            called = self.rank == rank
        _set_generator_states(self._generators[rank])
        self._on_switch(rank)

    def _hand_on(self) -> None:
        """Give the baton to the next rank that can go on; where there is none, all that wait are told why."""
        if not self._runnable:
            if not self._interrupted:
                error = self._explain(dict(self._awaited))
                for pending in self._awaited.values():
                    pending.error = error
            self._runnable.extend(sorted(self._awaited))
        self.rank = self._runnable.popleft()
        self._calls[self.rank].put(None)


def _raise_in(thread: threading.Thread, kind: type[BaseException]) -> None:
    """Raise an exception in another thread, at its next line of Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(kind))


def _generator_states() -> tuple[Any, ...]:
    """States of the generators of random numbers that a process has once: torch's, Python's and NumPy's."""
    numpy_random = sys.modules.get("numpy.random")
    return (
        torch.get_rng_state(),
        random.getstate(),
        None if numpy_random is None else numpy_random.get_state(legacy=False),
    )


def _set_generator_states(states: tuple[Any, ...]) -> None:
    torch_state, python_state, numpy_state = states
    torch.set_rng_state(torch_state)
    random.setstate(python_state)
    if numpy_state is not None:
        sys.modules["numpy.random"].set_state(numpy_state)
