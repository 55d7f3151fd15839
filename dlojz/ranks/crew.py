"""The ranks at work: seated, joined in one group, asked, and stopped when they take too long.

Layer 5. Invariant: a cell ends within its limit and a few seconds, whatever it does, and leaves ranks on which the next
one can run; a rank that still lives keeps its variables.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

from dlojz.ranks import cell, seat
from dlojz.ranks.limits import Refused
from dlojz.ranks.line import Cluster, Event
from dlojz.ranks.outcome import Answer, Trouble, must_rejoin
from dlojz.text import language, say

GRACE_S = (1.0, 2.0)
"""Patience after the first interrupt (a rank that is late hears nothing yet) and after the second; then it is ended."""
_LOOK_EVERY_S = 0.2
_SHORTEST_PAUSE_S = 0.0002
_LONGEST_PAUSE_S = 0.005
_QUESTION_S = 60.0
_KILLS = 5


class Crew:
    """A number of ranks in a cluster.

    Args:
        cluster: where they live; started.
        size: number of ranks.
    """

    def __init__(self, cluster: Cluster, size: int) -> None:
        self.size = size
        self._cluster = cluster
        self._seated: dict[int, str] = {}
        self._torn = False
        self._cells = 0

    def make_ready(self) -> None:
        """See that every rank is there and that all are members of one whole group.

        Raises:
            Refused: if that cannot be had.
        """
        while (event := self._next_event(0)) is not None:  # old ones: who has died meanwhile has been replaced
            if event.kind == "failed":
                raise Refused(all_lost())
        names = self._cluster.names()
        fresh = [rank for rank, name in names.items() if self._seated.get(rank) != name]
        if not fresh and not self._torn:
            return
        self._torn = True
        places = {rank: (rank, self.size, *self._cluster.place(rank)) for rank in fresh}
        self._ask({rank: (names[rank], seat.sit, *places[rank]) for rank in fresh})
        meeting = self._cluster.meeting_point()
        self._ask({rank: (name, seat.join, *meeting) for rank, name in names.items()})
        self._seated, self._torn = names, False

    def ask(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What every rank answers to a question, by rank.

        Raises:
            Refused: if one does not answer.
        """
        self.make_ready()
        answers = self._ask({rank: (name, function, *arguments) for rank, name in self._seated.items()})
        return [answers[rank] for rank in range(self.size)]

    def run(self, code: str, limit_s: float, belongings: Mapping[str, Any]) -> list[Answer]:
        """Run a cell and return what each rank says, by rank, also where it did not end well.

        Args:
            code: of the cell.
            limit_s: seconds after which ranks that still run are interrupted.
            belongings: what goes along (see `carry`).

        Raises:
            Refused: if no rank can be reached any more.
        """
        self.make_ready()
        self._cells += 1
        self._torn = True  # until all have answered
        arguments = (code, self._cells, limit_s, language(), dict(belongings))
        with _interrupts_become_events(self._cluster.events):
            tickets = {self._cluster.ask(name, cell.run, *arguments): rank for rank, name in self._seated.items()}
            answers = self._collect(tickets, limit_s)
        self._torn = must_rejoin(answers)
        if not self._cluster.replaces_single_ranks and not all(answer.kept for answer in answers):
            answers = [replace(answer, kept=False) for answer in answers]
        return answers

    def _collect(self, tickets: Mapping[int, int], limit_s: float) -> list[Answer]:
        answers: dict[int, Answer] = {}
        rank_of = {name: rank for rank, name in self._seated.items()}
        # Why ranks are being stopped, once they are: a trouble that lacks only what each has to say.
        why: Trouble | None = None
        signals: list[int] = []
        deadline_s = time.monotonic() + limit_s
        while len(answers) < self.size:
            event = self._next_event(deadline_s - time.monotonic())
            if event is not None and event.kind == "failed":
                raise Refused(all_lost())
            if event is not None and event.kind == "answer" and event.ticket in tickets:
                rank = tickets[event.ticket]
                answers[rank] = _answer(rank, event.value, why)
            elif event is not None and event.kind == "died" and event.name in rank_of:
                rank = rank_of[event.name]
                answers[rank] = _ended(rank, event.value, why if signal.SIGKILL in signals else None)
            by_student = event is not None and event.kind == "interrupt"
            if by_student or time.monotonic() > deadline_s:
                kind = "stopped" if by_student else "limit"
                why = why or Trouble("KeyboardInterrupt", kind=kind, limit_s=0 if by_student else limit_s)
                if signals.count(signal.SIGKILL) > _KILLS:  # who should tell of it is gone, or deaf
                    raise Refused(all_lost())
                insists = by_student and bool(signals)
                signals.append(signal.SIGKILL if insists or len(signals) == len(GRACE_S) else signal.SIGINT)
                deadline_s = time.monotonic() + GRACE_S[min(len(signals), len(GRACE_S)) - 1]
                for rank in self._seated.keys() - answers.keys():
                    self._cluster.signal(rank, self._seated[rank], signals[-1])
        return [answers[rank] for rank in range(self.size)]

    def _next_event(self, timeout_s: float) -> Event | None:
        """What has happened meanwhile; None where nothing has after so long, or after a look's time.

        Asked again and again rather than waited for: `SimpleQueue.get(timeout=…)` of CPython 3.11 waits for ever where
        its time runs out between two of its steps (what is left, then negative, means no limit). No other queue can be
        filled from a signal's handler.
        """
        deadline_s = time.monotonic() + min(timeout_s, _LOOK_EVERY_S)
        pause_s = _SHORTEST_PAUSE_S
        while True:
            with suppress(queue.Empty):
                return self._cluster.events.get_nowait()
            if time.monotonic() >= deadline_s:
                return None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _ask(self, questions: Mapping[int, tuple[Any, ...]]) -> dict[int, Any]:
        tickets = {self._cluster.ask(*question): rank for rank, question in questions.items()}
        names = {question[0] for question in questions.values()}
        answers: dict[int, Any] = {}
        deadline_s = time.monotonic() + _QUESTION_S
        while len(answers) < len(questions):
            event = self._next_event(deadline_s - time.monotonic())
            if event is not None and event.kind == "answer" and event.ticket in tickets:
                answers[tickets[event.ticket]] = event.value
                if isinstance(event.value, dict) and "failure" in event.value:
                    raise Refused(_no_answer(tickets[event.ticket], event.value["failure"]))
            elif event is not None and (event.kind == "failed" or (event.kind == "died" and event.name in names)):
                self._torn = True
                raise Refused(all_lost() if event.kind == "failed" else _no_answer(-1, ""))
            elif time.monotonic() > deadline_s:
                self._torn = True
                raise Refused(_no_answer(min(questions.keys() - answers.keys()), ""))
        return answers


def _ended(rank: int, exit_code: int | None, why: Trouble | None) -> Answer:
    """The answer that stands for a process that ended; `why` if it was ended because it did not stop."""
    trouble = Trouble("", kind="exit", exit_code=exit_code)
    if why is not None:
        trouble = replace(trouble, name=why.name, limit_s=why.limit_s)
    return Answer(rank, trouble=trouble, kept=False)


def _answer(rank: int, value: Mapping[str, Any], why: Trouble | None) -> Answer:
    """A rank's answer, as the notebook understands it."""
    if "failure" in value:
        return Answer(rank, trouble=Trouble("", str(value["failure"])), torn=True)
    trouble = None
    if value["error"] is not None:
        error = value["error"]
        trouble = Trouble(
            error["name"], error["message"], error["kind"], tuple((n, t, f) for n, t, f in error["lines"])
        )
        if why is not None and trouble.name == why.name:
            trouble = Trouble(why.name, "", why.kind, trouble.lines, limit_s=why.limit_s)
    return Answer(
        rank, tuple(value["parts"]), value["cut"], trouble, value["last"], value["torn"], dict(value["counts"])
    )


def all_lost() -> str:
    """The sentence for ranks whose keeper is gone."""
    return say(
        en="the ranks have ended, all of them, with their variables: start them again, e.g. with %%ranks 4.",
        fr="les rangs se sont tous arrêtés, et leurs variables sont perdues : redémarrez-les, par exemple avec "
        "%%ranks 4.",
    )


def _no_answer(rank: int, why: str) -> str:
    who = say(en=f"rank {rank}" if rank >= 0 else "a rank", fr=f"le rang {rank}" if rank >= 0 else "un rang")
    cause = f" ({why})" if why else ""
    return say(
        en=f"{who} does not answer{cause}: run the cell again, or %ranks restart.",
        fr=f"{who} ne répond pas{cause} : relancez la cellule, ou %ranks restart.",
    )


@contextmanager
def _interrupts_become_events(events: queue.SimpleQueue[Event]) -> Iterator[None]:
    """While ranks run, an interrupt of the notebook is one for them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    former = signal.signal(signal.SIGINT, lambda *_: events.put(Event("interrupt")))
    try:
        yield
    finally:
        with suppress(TypeError):  # None where it was not set from Python
            signal.signal(signal.SIGINT, former)
