"""Watch over what a rank says to the others: a collective that cannot succeed is named at once, and nothing hangs.

A call that all ranks make alike gives what torch gives; a call that they do not make alike raises `CollectiveFault` on
every rank that takes part, before it reaches the network or while it waits.

The Python functions of `torch.distributed` are wrapped (`__wrapped__` is torch's own; see `wrapping`). Each call first
goes on the board, where the others see it; gloo itself would wait for its timeout without a word, or let one rank
return normally where shapes differ. What torch calls from C++ (DDP's reducer, FSDP) does not pass here: there the
timeout of the process group holds. On NCCL, which does not wait on the host, only what differs at the entry is found.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from dlojz.processes.hang_diagnosis import (
    Kind,
    RankFault,
    awaited,
    call_words,
    explain_lost,
    explain_stopped,
    explain_stuck,
    explain_timeout,
    mismatch,
    stuck_ranks,
)
from dlojz.processes.status_board import WAITER, StatusBoard, is_gone

KEPT_CALLS = 16
KEPT_MESSAGES = 4
KEPT_LOG = 10_000
_LOOK_EVERY_S = 0.05
_STUCK_AFTER_S = 0.15
_GATHER_S = 0.3


class CollectiveFault(RuntimeError):  # noqa: N818 - a fault between ranks, which no single one of them has made
    """Ranks that did not call the same thing: the sentence names them.

    Args:
        fault: what was found.
    """

    def __init__(self, fault: RankFault) -> None:
        self.fault = fault
        self.kind: Kind = fault.kind
        super().__init__(str(fault))


class Guard:
    """The guard of one rank.

    Args:
        board: this rank's view of the board.
        limit_s: seconds a rank may wait for others that still compute.
    """

    def __init__(self, board: StatusBoard, limit_s: float = 10.0) -> None:
        self.limit_s = limit_s
        self.torn = False
        """Whether a call has failed, so that the process group must be made anew."""
        self.last = ""
        """The last call of this cell in words, e.g. `all_reduce #3 [4] float32`."""
        self.log: list[dict[str, Any]] = []
        """The calls of this cell, in order: `op`, `numel`, `dtype`."""
        self.rank = board.rank
        self._board, self._cell = board, 0
        self._started: dict[str, int] = {}
        self._state: dict[str, Any] = {}
        self._threads: set[threading.Thread] = set()
        self._give_back: Callable[[], None] | None = None
        self.reset()

    # ---- life

    def install(self) -> None:
        """Wrap torch's functions in this process."""
        from dlojz.processes.collective_wrapping import wrap_torch

        self._give_back = wrap_torch(self)

    def remove(self) -> None:
        """Give torch its functions back."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def begin(self, cell: int | None = None) -> None:
        """A cell begins; `cell` is its number, the same on every rank."""
        self._cell = self._cell + 1 if cell is None else cell
        self.last, self.log = "", []
        self._threads = set(threading.enumerate())
        self._started = dict(self._state["counts"])
        self._write(state="running", cell=self._cell, waiting=None, fault=None, error=None, last="", busy=False)

    def end(self, error: str | None = None) -> None:
        """The cell has ended on this rank, by an exception of that name where there is one."""
        self._write(state="ended", waiting=None, error=error)

    def reset(self) -> None:
        """Forget all calls: the process group is a new one."""
        self.torn = False
        self._started = {}
        self._state = {"pid": os.getpid(), "state": "running", "cell": self._cell, "waiting": None, "fault": None}
        self._write(counts={}, calls={}, sends={}, receives={}, messages={}, last="", error=None, loose=False)

    def counts(self) -> dict[str, int]:
        """How often each group's collectives were called: equal on all ranks once a cell has ended well."""
        return dict(self._state["counts"])

    def _write(self, **changes: Any) -> None:
        self._state |= changes
        try:
            self._board.write(self._state)
        except ValueError:  # very many channels: what was said in each is forgotten, how often is kept
            self._board.write({**self._state, "calls": {}, "messages": {}})

    # ---- entering a call

    def enter_collective(self, group: str, members: list[int], call: dict[str, Any]) -> dict[str, Any]:
        """Put a collective on the board and look whether the others call the same; returns the call, numbered."""
        number = self._state["counts"].get(group, 0) + 1
        call |= {"group": group, "members": members, "number": number, "shown": number - self._started.get(group, 0)}
        self._state["counts"][group] = number
        _keep(self._state["calls"].setdefault(group, []), call, KEPT_CALLS)
        self._enter(call, members, lambda state: _numbered(state.get("calls", {}).get(group, ()), number))
        return call

    def enter_message(self, channel: str, peer: int, call: dict[str, Any]) -> dict[str, Any]:
        """Put a message on the board and look whether its other end is like it; returns the call, numbered."""
        sends = call["op"] == "send"
        posted = self._state["sends" if sends else "receives"]
        number = posted[channel] = posted.get(channel, 0) + 1
        call |= {"channel": channel, "peer": peer, "number": number, "shown": number}
        _keep(self._state["messages"].setdefault(f"{channel}|{call['op']}", []), call, KEPT_MESSAGES)
        other_end = f"{channel}|{'recv' if sends else 'send'}"
        self._enter(call, [peer], lambda state: _numbered(state.get("messages", {}).get(other_end, ()), number))
        return call

    def receives_from_anyone(self) -> None:
        """From now on nobody can tell which message of this rank meets which: messages are no longer compared."""
        self._write(loose=True)

    def _enter(
        self,
        call: dict[str, Any],
        members: Iterable[int],
        same_call: Callable[[dict[str, Any]], dict[str, Any] | None],
    ) -> None:
        self.last = call_words(call)
        self.log.append({"op": call["op"], "numel": call["numel"], "dtype": call["dtype"]})
        del self.log[:-KEPT_LOG]
        self._write(last=self.last)
        others = [member for member in members if member != self.rank]
        calls = {self.rank: call}
        for member in others:
            state = self._board.read(member)
            self._raise_fault_of(state)
            theirs = None if "channel" in call and (self._state["loose"] or state.get("loose")) else same_call(state)
            if theirs is not None:
                calls[member] = theirs
        if mismatch(calls) is None:
            return
        # Something differs. Who is right is known once all have called: wait a moment for those on their way.
        deadline_s = time.monotonic() + _GATHER_S
        while len(calls) <= len(others) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S / 10)
            for member in others:
                theirs = same_call(self._board.read(member))
                if theirs is not None:
                    calls[member] = theirs
        fault = mismatch(calls)
        if fault is not None:
            self.fail(fault)

    # ---- failing

    def _raise_fault_of(self, state: dict[str, Any]) -> None:
        if state.get("fault") and state.get("cell") == self._cell:
            self.fail(RankFault(*state["fault"]))

    def fail(self, fault: RankFault) -> None:
        """Tell the others, then raise.

        Raises:
            CollectiveFault: always.
        """
        self.torn = True
        self._write(fault=list(fault), waiting=None, state="running")
        raise CollectiveFault(fault)

    def explain_failure(self, error: BaseException) -> None:
        """Raise why a call failed: what the board tells of the others, else the library's own error.

        Raises:
            CollectiveFault: if another rank has found a fault, was stopped, or is gone.
            BaseException: the error given, otherwise.
        """
        self.torn = True
        deadline_s = time.monotonic() + _STUCK_AFTER_S
        while True:  # a connection may close a moment before its rank has written why, or has quite ended
            states = self._states()
            for state in states:
                self._raise_fault_of(state)
            lost = {rank for rank, state in enumerate(states) if _lost(state)}
            if lost:
                self.fail(explain_lost(lost))
            stopped = [rank for rank, state in enumerate(states) if state.get("error")]
            if stopped:
                self.fail(explain_stopped(stopped[0], states[stopped[0]]["error"]))
            if time.monotonic() > deadline_s:
                raise error
            time.sleep(_LOOK_EVERY_S / 5)

    # ---- waiting

    def wait(self, call: dict[str, Any], done: threading.Event, limit_s: float | None) -> None:
        """Wait until a call is done, looking at the others meanwhile.

        Raises:
            CollectiveFault: if it never will be, or not within the limit.
        """
        if done.wait(_LOOK_EVERY_S):
            return
        if threading.current_thread() is not threading.main_thread():
            # The rank itself goes on computing: whether it is stuck is not for this thread to say.
            while not done.wait(_LOOK_EVERY_S):
                for state in self._states():
                    self._raise_fault_of(state)
            return
        self._write(state="waiting", waiting=call)
        try:
            self._wait_watching(done, self.limit_s if limit_s is None else limit_s)
        finally:
            if self._state["state"] == "waiting":
                self._write(state="running", waiting=None)

    def _wait_watching(self, done: threading.Event, limit_s: float) -> None:
        started_s, before = time.monotonic(), list[int]()
        while not done.wait(_LOOK_EVERY_S):
            states = self._states()
            for state in states:
                self._raise_fault_of(state)
            waited_s = time.monotonic() - started_s
            # A thread that the cell has started may yet send what the others wait for.
            busy = any(one not in self._threads and one.name != WAITER for one in threading.enumerate())
            if busy != self._state.get("busy", False):
                self._write(busy=busy)
            if waited_s > _STUCK_AFTER_S and not busy and self.rank in stuck_ranks(states):
                # Seen twice without any rank having moved in between: then nobody ever will.
                versions = [state.get("version", 0) for state in states]
                if versions == before:
                    self.fail(explain_stuck(states, self.rank))
                before = versions
            lost = {rank for rank in awaited(states, self.rank) if _lost(states[rank])}
            if lost:
                self.fail(explain_lost(lost))
            if waited_s > limit_s:
                self.fail(explain_timeout(states, self.rank, limit_s))

    def _states(self) -> list[dict[str, Any]]:
        """All states as they count for the present cell: a rank still in an earlier one may yet arrive."""
        return [
            state if state.get("cell") == self._cell and not _may_speak(state) else {**state, "state": "running"}
            for state in self._board.read_all()
        ]


def _may_speak(state: dict[str, Any]) -> bool:
    """Whether a rank that waits may still send something: from a thread, or to whom it is not known to send."""
    return state.get("state") == "waiting" and bool(state.get("busy") or state.get("loose"))


def _lost(state: dict[str, Any]) -> bool:
    """Whether a rank's process is gone without having come to its end."""
    return state.get("state") != "ended" and is_gone(state.get("pid"))


def _keep(calls: list[dict[str, Any]], call: dict[str, Any], kept: int) -> None:
    calls.append(call)
    del calls[:-kept]


def _numbered(calls: Iterable[dict[str, Any]], number: int) -> dict[str, Any] | None:
    return next((call for call in calls if call["number"] == number), None)
