"""Guard of a rank's collectives and messages: a call that cannot succeed is named at once, and nothing hangs.

A call that all ranks make alike gives what torch gives; a call that they do not make alike raises `CollectiveFault` on
every rank that takes part, before it reaches the network or while it waits.

The Python functions of `torch.distributed` are wrapped (`__wrapped__` is torch's own; arguments and results are torch's
too). Each call first goes on the board, where the others see it; gloo itself would wait for its timeout in silence, or
let one rank return normally where shapes differ. Calls that torch makes from C++ (DDP's reducer, FSDP) are not seen:
there the timeout of the process group holds. On NCCL, which does not wait on the host, only what differs at the entry
is found.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

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
_EXPLAIN_S = 2.0
# The argument whose elements must be as many on every rank; an all-to-all may split unevenly, a barrier has none.
_ALIKE = {
    "all_reduce": "tensor",
    "broadcast": "tensor",
    "reduce": "tensor",
    "all_gather": "tensor",
    "all_gather_into_tensor": "input_tensor",
    "reduce_scatter": "output",
    "reduce_scatter_tensor": "output",
    "gather": "tensor",
    "scatter": "tensor",
    "all_to_all": "",
    "all_to_all_single": "",
    "barrier": "",
}
COLLECTIVES = tuple(_ALIKE)
MESSAGES = ("send", "recv", "isend", "irecv")


class CollectiveFault(RuntimeError):  # noqa: N818 - a fault between ranks, which no single one of them has made
    """Error of ranks that did not call the same thing; the message names them."""

    def __init__(self, fault: RankFault) -> None:
        self.fault = fault
        self.kind: Kind = fault.kind
        super().__init__(fault.message)


class Guard:
    """Guard of one rank.

    Args:
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
        self._originals: dict[str, Callable[..., Any]] = {}
        self.reset()

    def install(self) -> None:
        """Wrap torch's functions in this process."""
        self._originals = {name: getattr(distributed_c10d, name) for name in (*COLLECTIVES, *MESSAGES)}
        wrapping = _Wrapping(self, self._originals)
        _set({name: wrapping.wrapped(name) for name in self._originals})

    def remove(self) -> None:
        """Restore torch's functions."""
        _set(self._originals)

    def begin(self, cell: int | None = None) -> None:
        """Begin a cell; `cell` is its number, the same on every rank."""
        self._cell = self._cell + 1 if cell is None else cell
        self.last, self.log = "", []
        self._threads = set(threading.enumerate())
        self._started = dict(self._state["counts"])
        fresh: dict[str, Any] = {"waiting": None, "fault": None, "error": None, "last": "", "busy": False, "lost": {}}
        self._write(state="running", cell=self._cell, **fresh)

    def end(self, error: str | None = None) -> None:
        """End the cell on this rank, by an exception of that name if one was raised."""
        self._write(state="ended", waiting=None, error=error)

    def reset(self) -> None:
        """Forget all calls: the process group is a new one."""
        self.torn = False
        self._started = {}
        self._state = {"pid": os.getpid(), "state": "running", "cell": self._cell, "waiting": None, "fault": None}
        self._write(counts={}, calls={}, sends={}, receives={}, messages={}, last="", error=None, loose=False)

    def counts(self) -> dict[str, int]:
        """Return how often each group's collectives were called: equal on all ranks once a cell has ended well."""
        return dict(self._state["counts"])

    def _write(self, **changes: Any) -> None:
        self._state |= changes
        try:
            self._board.write(self._state)
        except ValueError:  # very many channels: what was said in each is forgotten, how often is kept
            self._board.write({**self._state, "calls": {}, "messages": {}})

    def enter_collective(self, group: str, members: list[int], call: dict[str, Any]) -> dict[str, Any]:
        """Put a collective on the board and compare it with the others' calls; return the call, numbered."""
        number = self._state["counts"].get(group, 0) + 1
        # `number` counts from the first call of the group, `shown` from the beginning of the cell.
        call |= {"group": group, "members": members, "number": number, "shown": number - self._started.get(group, 0)}
        self._state["counts"][group] = number
        _keep(self._state["calls"].setdefault(group, []), call, KEPT_CALLS)
        self._enter(call, members, lambda state: _numbered(state.get("calls", {}).get(group, ()), number))
        return call

    def enter_message(self, channel: str, peer: int, call: dict[str, Any]) -> dict[str, Any]:
        """Put a message on the board and compare it with its other end; return the call, numbered."""
        sends = call["op"] == "send"
        posted = self._state["sends" if sends else "receives"]
        number = posted[channel] = posted.get(channel, 0) + 1
        call |= {"channel": channel, "peer": peer, "number": number, "shown": number}
        _keep(self._state["messages"].setdefault(f"{channel}|{call['op']}", []), call, KEPT_MESSAGES)
        # The peer posts the other end of the same channel.
        other_end = f"{channel}|{'recv' if sends else 'send'}"
        self._enter(call, [peer], lambda state: _numbered(state.get("messages", {}).get(other_end, ()), number))
        return call

    def loses_message(self, channel: str) -> None:
        """Note that the work of a message sent is gone without having been waited for; written with the next call."""
        self._state["lost"] = {**self._state.get("lost", {}), channel: True}

    def receives_from_anyone(self) -> None:
        """Compare this rank's messages no longer: which one meets which is not known."""
        self._write(loose=True)

    def _enter(
        self, call: dict[str, Any], members: Iterable[int], same_call: Callable[[dict[str, Any]], dict[str, Any] | None]
    ) -> None:
        self.last = call_words(call)
        self.log.append({"op": call["op"], "numel": call["numel"], "dtype": call["dtype"]})
        del self.log[:-KEPT_LOG]
        self._write(last=self.last)
        peers = [member for member in members if member != self.rank]
        calls = {self.rank: call}
        for member in peers:
            state = self._board.read(member)
            self._raise_fault_of(state)
            theirs = None if "channel" in call and (self._state["loose"] or state.get("loose")) else same_call(state)
            if theirs is not None:
                calls[member] = theirs
        if mismatch(calls) is None:
            return
        # Something differs. Who is right is known once all have called: wait a moment for those on their way.
        deadline_s = time.monotonic() + _GATHER_S
        while len(calls) <= len(peers) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_EVERY_S / 10)
            for member in peers:
                theirs = same_call(self._board.read(member))
                if theirs is not None:
                    calls[member] = theirs
        fault = mismatch(calls)
        if fault is not None:
            self.fail(fault)

    def _raise_fault_of(self, state: dict[str, Any]) -> None:
        if state.get("fault") and state.get("cell") == self._cell:
            self.fail(RankFault(*state["fault"]))

    def fail(self, fault: RankFault) -> None:
        """Report a fault to the others, then raise `CollectiveFault`."""
        self.torn = True
        self._write(fault=list(fault), waiting=None, state="running")
        raise CollectiveFault(fault)

    def explain_failure(self, error: BaseException) -> None:
        """Raise why a call failed: the fault of another rank on the board, else the library's own error.

        Raises:
            CollectiveFault: if another rank has found a fault, was stopped, or is gone.
            BaseException: the error given, otherwise.
        """
        self.torn = True
        deadline_s = time.monotonic() + _EXPLAIN_S
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

    def wait(self, call: dict[str, Any], completion: threading.Event, limit_s: float | None) -> None:
        """Wait until a call is done, and watch the others meanwhile.

        Raises:
            CollectiveFault: if it never will be, or not within the limit.
        """
        # Most calls are over within one look: for them nothing is written on the board.
        if completion.wait(_LOOK_EVERY_S):
            return
        if threading.current_thread() is not threading.main_thread():
            # The rank itself goes on computing: whether it is stuck is not for this thread to say.
            while not completion.wait(_LOOK_EVERY_S):
                for state in self._states():
                    self._raise_fault_of(state)
            return
        self._write(state="waiting", waiting=call)
        try:
            self._wait_watching(completion, self.limit_s if limit_s is None else limit_s)
        finally:
            if self._state["state"] == "waiting":
                self._write(state="running", waiting=None)

    def _wait_watching(self, completion: threading.Event, limit_s: float) -> None:
        started_s, before = time.monotonic(), list[int]()
        while not completion.wait(_LOOK_EVERY_S):
            states = self._states()
            for state in states:
                self._raise_fault_of(state)
            waited_s = time.monotonic() - started_s
            # A thread that the cell has started may yet send what the others wait for.
            busy = any(thread not in self._threads and thread.name != WAITER for thread in threading.enumerate())
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


def _keep(calls: list[dict[str, Any]], call: dict[str, Any], capacity: int) -> None:
    calls.append(call)
    del calls[:-capacity]


def _numbered(calls: Iterable[dict[str, Any]], number: int) -> dict[str, Any] | None:
    return next((call for call in calls if call["number"] == number), None)


def rebind(namespace: dict[str, Any]) -> None:
    """Replace torch's functions under names bound before (`from torch.distributed import all_reduce`)."""
    wrapped = {getattr(dist, name) for name in (*COLLECTIVES, *MESSAGES)}
    of_torch = {function.__wrapped__: function for function in wrapped if hasattr(function, "__wrapped__")}
    for name, value in list(namespace.items()):
        if callable(value) and getattr(value, "__module__", None) == distributed_c10d.__name__:
            namespace[name] = of_torch.get(value, value)


def _set(functions: dict[str, Callable[..., Any]]) -> None:
    for name, function in functions.items():
        # Both modules bind these names.
        for module in (dist, distributed_c10d):
            setattr(module, name, function)


class _Wrapping:
    def __init__(self, guard: Guard, originals: dict[str, Callable[..., Any]]) -> None:
        self._guard, self._originals, self._inside = guard, originals, threading.local()

    def wrapped(self, name: str) -> Callable[..., Any]:
        original = self._originals[name]
        signature = inspect.signature(original)
        enter = self._message if name in MESSAGES else self._collective

        @functools.wraps(original)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            arguments = signature.bind(*args, **kwargs)
            arguments.apply_defaults()
            group = arguments.arguments["group"] or dist.group.WORLD
            # A call within a call, or on a rank outside of the group, goes to torch unwatched.
            if getattr(self._inside, "call", False) or group is None or dist.get_rank(group) < 0:
                return original(*args, **kwargs)
            # torch hands the works that it asks for to its own C++, which takes no other.
            by_torch = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
            self._inside.raw = by_torch and bool(arguments.arguments.get("async_op"))
            self._inside.call = True  # what torch's function calls in turn is part of this call
            try:
                return enter(name, arguments.arguments, group)
            finally:
                self._inside.call = False

        return guarded

    def _collective(self, name: str, arguments: dict[str, Any], group: Any) -> Any:
        described = {"op": name, "how": _how(arguments, group), **tensor_facts(arguments.get(_ALIKE[name]))}
        call = self._guard.enter_collective(group.group_name, dist.get_process_group_ranks(group), described)
        asynchronous = arguments["async_op"]
        # Always asynchronous: this thread is to watch while the call goes on.
        work = self._called(name, {**arguments, "async_op": True})
        if work is None:
            return None
        guarded = GuardedWork(self._guard, work, call, _on_host(arguments))
        if asynchronous:
            return work if self._inside.raw else guarded
        guarded.wait()
        return None

    def _message(self, name: str, arguments: dict[str, Any], group: Any) -> Any:
        sends = name.endswith("send")
        side = "dst" if sends else "src"
        me, peer = self._guard.rank, arguments[side]
        # `src` and `dst` are global ranks, `group_src` and `group_dst` count within the group.
        if arguments[f"group_{side}"] is not None:
            peer = dist.get_global_rank(group, arguments[f"group_{side}"])
        if peer is None and not sends:
            # From anyone: whose message it is turns out later or, for irecv, never; nothing can be compared then.
            self._guard.receives_from_anyone()
            return self._called(name, arguments)
        if peer == me or peer not in dist.get_process_group_ranks(group):
            return self._called(name, arguments)  # a mistake that torch itself refuses
        source, target = (me, peer) if sends else (peer, me)
        # Messages of one group, direction and tag keep their order.
        channel = f"{group.group_name}|{source}>{target}|{arguments['tag']}"
        described = {"op": "send" if sends else "recv", "how": "", **tensor_facts(arguments["tensor"])}
        call = self._guard.enter_message(channel, peer, described)
        # Blocking ones too are started as isend and irecv, so that their wait is watched.
        work = GuardedWork(
            self._guard, self._called("isend" if sends else "irecv", arguments), call, _on_host(arguments)
        )
        if name in ("isend", "irecv"):
            return work
        work.wait()
        return None if sends else peer

    def _called(self, name: str, arguments: dict[str, Any]) -> Any:
        try:
            return self._originals[name](**arguments)
        except Exception:
            self._guard.torn = True  # the board says that this rank has called; torch has refused
            raise


class GuardedWork:
    """Wrapper of torch's `Work` whose `wait` watches the other ranks."""

    def __init__(self, guard: Guard, work: Any, call: dict[str, Any], on_host: bool) -> None:
        self._guard, self._work, self._call, self._on_host = guard, work, call, on_host
        self._finished = False

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the call is done; `timeout` (a timedelta) takes the place of the guard's limit.

        Raises:
            CollectiveFault: if it cannot come to its end.
        """
        if self._finished:
            return True
        # On a device `wait` orders streams and returns at once.
        if not self._on_host:
            self._finished = True
            return bool(self._work.wait())
        completion, errors = threading.Event(), list[BaseException]()

        def wait() -> None:
            try:
                self._work.wait()
            except BaseException as error:  # handed over to the rank's own thread
                errors.append(error)
            completion.set()

        # gloo's own wait cannot be interrupted: it waits in a thread, this one stays free to look and to stop.
        threading.Thread(target=wait, daemon=True, name=WAITER).start()
        self._guard.wait(self._call, completion, timeout.total_seconds() if timeout else None)
        if errors:
            self._guard.explain_failure(errors[0])
        self._finished = True
        return True

    def is_completed(self) -> bool:
        """Whether `wait` would return at once."""
        return self._finished or bool(self._work.is_completed())

    def __del__(self) -> None:
        # With its work gloo drops a message that has not left yet: whoever waits for it learns why.
        if not self._finished and self._call["op"] == "send":
            self._guard.loses_message(self._call["channel"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _how(arguments: dict[str, Any], group: Any) -> str:
    """Root and operation of a call, in words; empty where it has none."""
    words = []
    for side in ("src", "dst"):
        if side in arguments:
            root = arguments[side]
            if arguments.get(f"group_{side}") is not None:
                root = dist.get_global_rank(group, arguments[f"group_{side}"])
            words.append(f"{side}={0 if root is None else root}")
    if "op" in arguments:
        words.append(f"op={str(arguments['op']).rpartition('.')[2]}")
    return ", ".join(words)


def tensor_facts(tensor: Any) -> dict[str, Any]:
    """Describe what must be alike on all ranks: `numel`, `shape` and `dtype`; empty where there is no tensor."""
    if not isinstance(tensor, Tensor):
        return {"numel": 0, "shape": "", "dtype": ""}
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"numel": tensor.numel(), "shape": str(list(tensor.shape)), "dtype": dtype}


def _on_host(arguments: dict[str, Any]) -> bool:
    """Whether the call is over when the host has waited for it: not with NCCL, which waits on the device."""
    lists = [value for value in arguments.values() if isinstance(value, list)]
    tensors = [value for value in arguments.values() if isinstance(value, Tensor)]
    tensors += [value for values in lists for value in values if isinstance(value, Tensor)]
    # A barrier has no tensor: gloo's, unless CUDA is in use.
    return all(tensor.device.type == "cpu" for tensor in tensors) if tensors else not torch.cuda.is_initialized()
