"""Ranks that are threads of one process: whose turn it is, and the collectives and messages of `torch.distributed`.

One rank runs at a time, which has the baton; it hands the baton on where it waits for others, and at its end. So the
threads need no locks, a run is the same each time, and that nobody can go on is known at once, without a time limit.
The states of the random generators, which torch, Python and NumPy keep once per process and each rank must have for
itself, change hands with the baton.

A call is carried out when all that take part have come: the last one does the work for all, and the others wait for the
baton meanwhile. What a call gives is what gloo gives between processes; what the ranks call differently is named in the
same sentences as between processes.
"""

# mypy: disable-error-code="override"
# torch declares each method twice, for lists and for single tensors; it calls the first.

from __future__ import annotations

import ctypes
import operator
import queue
import random
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d

from dlojz.base.language import say
from dlojz.processes.guard import CollectiveFault, tensor_facts
from dlojz.processes.hang_diagnosis import (
    RankFault,
    call_words,
    explain_stuck,
    listed,
    mismatch,
    stuck_ranks,
    with_article,
)

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


BACKEND = "threads"
Call = dict[str, Any]
_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: operator.and_,
    ReduceOp.BOR: operator.or_,
    ReduceOp.BXOR: operator.xor,
}


class _RankWorld(distributed_c10d._World):
    """What torch knows of process groups, for one rank: torch keeps it in variables of the module, once per process."""

    pg_map: Any = None
    pg_names: Any = None
    pg_group_ranks: Any = None
    pg_backend_config: Any = None
    group_count: Any = 0
    tags_to_pg: Any = None
    pg_to_tag: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config = {}, {}, {}, {}
        self.tags_to_pg, self.pg_to_tag = {}, {}


class _WorldOfTheRank:
    """In the place of torch's `_world`: that of the rank which has the baton."""

    def __init__(self, exchange: ThreadExchange) -> None:
        vars(self)["exchange"] = exchange

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exchange.worlds[self.exchange.baton.rank], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.exchange.worlds[self.exchange.baton.rank], name, value)


class _Collective(Pending):
    """One call of a group: what each member calls, and its tensors, by rank in the group."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, Call] = {}
        self.tensors: dict[int, Any] = {}


class _Message(Pending):
    """One end of a message: its tensor, and who posted it."""

    def __init__(self, rank: int, call: Call, tensor: Tensor) -> None:
        super().__init__()
        self.rank, self.call, self.tensor = rank, call, tensor
        self.source = -1


class ThreadExchange:
    """All groups of the ranks of this process, and what each rank calls; a process has one, for as long as it lives.

    Args:
        on_switch: called with the rank that has just got the baton.
    """

    def __init__(self, size: int, on_switch: Callable[[int], None]) -> None:
        self.size = size
        self.worlds = [_RankWorld() for _ in range(size)]
        self.states: list[dict[str, Any]] = [{} for _ in range(size)]
        """By rank, in the words of `hang_diagnosis`: `state`, `waiting`, `counts`, `sends`, `receives`, `error`."""
        self.baton = Baton(size, on_switch, self._explain)
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        self._shown: list[dict[str, int]] = [{} for _ in range(size)]
        self.forget()
        distributed_c10d._world = _WorldOfTheRank(self)  # type: ignore[assignment]
        # C++ finds groups by name: one table per thread.
        torch._C._distributed_c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        dist.Backend.register_backend(
            BACKEND, lambda options, _: ThreadGroup(self, options), extended_api=True, devices=["cpu"]
        )

    def forget(self) -> None:
        """Forget what the ranks have called: after a fault their calls no longer correspond."""
        self._collectives: dict[tuple[str, int], _Collective] = {}
        self._posted: defaultdict[tuple[str, str, int, int], deque[_Message]] = defaultdict(deque)
        for state in self.states:
            state.update(counts={}, sends={}, receives={})

    @property
    def torn(self) -> bool:
        """Whether the calls of the last cell no longer correspond: a rank was stopped, or not all came to a call."""
        return bool(self._collectives) or any(state.get("error") for state in self.states)

    def begin(self, rank: int) -> None:
        """Begin a cell on the rank that has the baton; it joins the group of all ranks unless it is in it."""
        self.states[rank] |= {"state": "running", "waiting": None, "error": None, "last": ""}
        self._shown[rank] = dict(self.states[rank]["counts"])
        if not dist.is_initialized():
            self.worlds[rank].group_count = 0
            dist.init_process_group(BACKEND, rank=rank, world_size=self.size, store=self._store)

    def end(self, rank: int, error: str | None) -> None:
        """End a cell on a rank, by an exception of that name if one was raised."""
        self.states[rank] |= {"state": "ended", "waiting": None, "error": error}

    def collective(
        self, group: ThreadGroup, call: Call, tensors: Any, carry_out: Callable[[list[Any]], None]
    ) -> ThreadWork:
        """Take part in a collective; the last rank of the group that comes carries it out, on all ranks' tensors."""
        rank, counts = self.baton.rank, self.states[self.baton.rank]["counts"]
        number = counts[group.group_name] = counts.get(group.group_name, 0) + 1
        call |= {
            "group": group.group_name, "members": group.ranks, "number": number,
            "shown": number - self._shown[rank].get(group.group_name, 0),
        }  # fmt: skip
        self.states[rank]["last"] = call_words(call)
        pending = self._collectives.setdefault((group.group_name, number), _Collective())
        pending.calls[rank], pending.tensors[group.rank()] = call, tensors
        if len(pending.calls) == group.size():
            del self._collectives[group.group_name, number]
            fault = mismatch(pending.calls)
            error: Exception | None = None
            if fault is not None:
                error = CollectiveFault(fault)
            else:
                try:
                    with torch.no_grad():
                        carry_out([pending.tensors[member] for member in range(group.size())])
                except Exception as raised:  # sizes that do not fit, e.g. of an uneven all-to-all: on every rank
                    error = raised
            self.baton.settle(pending, error)
        return ThreadWork(self, pending, call)

    def message(self, group: ThreadGroup, op: str, peer: int | None, tensor: Tensor, tag: int) -> ThreadWork:
        """Post one end of a message; whoever comes second copies the tensor.

        Args:
            op: `send` or `recv`.
            peer: its global rank; None: from whoever sends.
        """
        rank, state = self.baton.rank, self.states[self.baton.rank]
        call = {"op": op, "how": "", **tensor_facts(tensor)}
        if peer is not None:
            source, target = (rank, peer) if op == "send" else (peer, rank)
            channel = f"{group.group_name}|{source}>{target}|{tag}"
            posted = state["sends" if op == "send" else "receives"]
            number = posted[channel] = posted.get(channel, 0) + 1
            call |= {"channel": channel, "peer": peer, "number": number, "shown": number}
        state["last"] = call_words({"shown": 1, **call})
        end = _Message(rank, call, tensor)
        other_end = self._other_end(group, op, rank, peer, tag)
        if other_end is None:
            self._posted[group.group_name, op, rank, tag].append(end)
        else:
            send, receive = (end, other_end) if op == "send" else (other_end, end)
            fault, error = mismatch({send.rank: send.call, receive.rank: receive.call}), None
            if fault is not None:
                error = CollectiveFault(fault)
            else:
                with torch.no_grad():
                    receive.tensor.detach().copy_(send.tensor)
                receive.source = send.rank
            for pending in (send, receive):
                self.baton.settle(pending, error)
        return ThreadWork(self, end, call)

    def _other_end(self, group: ThreadGroup, op: str, rank: int, peer: int | None, tag: int) -> _Message | None:
        """Take the first message that waits for this end, in the order in which they were posted."""
        other_op = "recv" if op == "send" else "send"
        for sender in group.ranks if peer is None else (peer,):
            waiting = self._posted[group.group_name, other_op, sender, tag]
            for message in waiting:
                if message.call.get("peer", rank) == rank:
                    waiting.remove(message)
                    return message
        return None

    def wait(self, pending: Pending, call: Call) -> None:
        """Wait until a call is done."""
        if not pending.done:
            state = self.states[self.baton.rank]
            state |= {"state": "waiting", "waiting": call}
            try:
                self.baton.wait(pending)
            finally:
                state |= {"state": "running", "waiting": None}

    def _explain(self, waiting: dict[int, Pending]) -> BaseException:
        """Say why no rank can go on; what they call differently comes before who is missing."""
        for pending in waiting.values():
            if isinstance(pending, _Collective) and (fault := mismatch(pending.calls)) is not None:
                return CollectiveFault(fault)
        # Of who receives from anyone it is not known whom it waits for: who waits for it is not stuck by that alone.
        open_ranks = {rank for rank in waiting if _from_anyone(self.states[rank]["waiting"])}
        states = [
            {**state, "state": "running"} if rank in open_ranks else state for rank, state in enumerate(self.states)
        ]
        if stuck := stuck_ranks(states):
            return CollectiveFault(explain_stuck(states, min(stuck)))
        en, fr = listed(open_ranks, french=False), with_article(listed(open_ranks, french=True))
        several = len(open_ranks) > 1
        message = say(
            en=f"Missing message: {en} {'wait' if several else 'waits'} to receive from any rank, but none can send "
            "any more.",
            fr=f"Message manquant : {fr} {'attendent' if several else 'attend'} un message de n’importe quel rang, "
            "mais plus aucun ne peut en envoyer.",
        )
        return CollectiveFault(RankFault("missing", message))


def _from_anyone(call: Call) -> bool:
    return call["op"] == "recv" and "peer" not in call


class ThreadWork(dist.Work):
    """Work of torch: a call that goes on, or is done."""

    def __init__(self, exchange: ThreadExchange, pending: Pending, call: Call) -> None:
        super().__init__()
        self._exchange, self._pending, self._call = exchange, pending, call

    def wait(self, timeout: Any = None) -> bool:
        """Wait until it is done; `timeout` is not needed: who waits in vain is told at once."""
        self._exchange.wait(self._pending, self._call)
        return True

    def is_completed(self) -> bool:
        """Whether it is done; others go on first, so that a loop which asks this comes to an end."""
        self._exchange.baton.pause()
        return self._pending.done

    def is_success(self) -> bool:
        """Whether it is done without an error."""
        return self._pending.done

    def get_future(self) -> Any:
        """Future of torch that is done."""
        self.wait()
        future: Any = torch.futures.Future()
        future.set_result(self.result())
        return future

    def result(self) -> list[Tensor]:
        """Tensors of this rank, with the result."""
        tensors = getattr(self._pending, "tensors", {})
        members: Sequence[int] = self._call.get("members", ())
        rank = self._exchange.baton.rank
        first = tensors.get(list(members).index(rank)) if rank in members else None
        return first if isinstance(first, list) else [first] if isinstance(first, Tensor) else []

    def _source_rank(self) -> int:
        return int(getattr(self._pending, "source", -1))


class ThreadGroup(dist.ProcessGroup):
    """Process group of one rank that is a thread.

    Args:
        options: torch's: `group_rank`, `group_size`, `group_id` and `global_ranks_in_group`.
    """

    def __init__(self, exchange: ThreadExchange, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # type: ignore[call-arg]
        self._exchange, self._group_name = exchange, str(options.group_id)
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        self.ranks = ranks
        self.sent_messages = self.sent_bytes = 0
        """Messages that this rank has sent, and their bytes; collectives of torch are not counted."""

    @property
    def group_name(self) -> str:
        """By which torch finds it again."""
        return self._group_name

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Name of the backend."""
        return BACKEND

    def _call(self, op: str, alike: Any, how: str = "") -> Call:
        return {"op": op, "how": how, **tensor_facts(alike)}

    def _all(self, call: Call, tensors: Any, carry_out: Callable[[list[Any]], None]) -> ThreadWork:
        return self._exchange.collective(self, call, tensors, carry_out)

    def barrier(self, opts: Any = None) -> ThreadWork:
        """Wait for all; no data."""
        return self._all(self._call("barrier", None), None, lambda _: None)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ThreadWork:
        """Sum each tensor over the ranks, on all of them."""
        op = _operation(opts)
        return self._all(
            self._call("all_reduce", tensors[0], f"op={_name(op)}"), tensors, lambda all_: _reduce(all_, op)
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ThreadWork:
        """Sum several tensors over the ranks, in one call."""
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ThreadWork:
        """Copy the root's tensor to all."""
        root = int(opts.rootRank)

        def carry_out(all_: list[list[Tensor]]) -> None:
            for rank, copies in enumerate(all_):
                if rank != root:
                    _copy(copies, all_[root])

        return self._all(self._call("broadcast", tensors[0], f"src={self.ranks[root]}"), tensors, carry_out)

    def reduce(self, tensors: list[Tensor], opts: Any) -> ThreadWork:
        """Sum over the ranks, on the root."""
        root, op = int(opts.rootRank), _operation(opts)

        def carry_out(all_: list[list[Tensor]]) -> None:
            for index, target in enumerate(all_[root]):
                target.detach().copy_(_reduced([copies[index] for copies in all_], op))

        how = f"dst={self.ranks[root]}, op={_name(op)}"
        return self._all(self._call("reduce", tensors[0], how), tensors, carry_out)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ThreadWork:
        """Copy every rank's tensor to all."""

        def carry_out(all_: list[Any]) -> None:
            sources = [message for _, message in all_]
            for received, _ in all_:
                _copy(received, sources)

        return self._all(self._call("all_gather", inputs[0]), (outputs[0], inputs[0]), carry_out)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> ThreadWork:
        """Copy every rank's tensor to all, one after the other in one tensor."""

        def carry_out(all_: list[Any]) -> None:
            gathered = torch.cat([message.reshape(-1) for _, message in all_])
            for received, _ in all_:
                received.detach().view(-1).copy_(gathered)

        return self._all(self._call("all_gather_into_tensor", source), (output, source), carry_out)

    def all_gather_single_coalesced(self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None) -> ThreadWork:
        """All-gather several tensors."""
        return [self.all_gather_single(*pair) for pair in zip(outputs, sources, strict=True)][-1]

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ThreadWork:
        """Copy every rank's tensor to the root."""
        root = int(opts.rootRank)

        def carry_out(all_: list[Any]) -> None:
            _copy(all_[root][0][0], [message for _, message in all_])

        call = self._call("gather", inputs[0], f"dst={self.ranks[root]}")
        return self._all(call, (outputs, inputs[0]), carry_out)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ThreadWork:
        """Copy to each rank its tensor of the root's."""
        root = int(opts.rootRank)

        def carry_out(all_: list[Any]) -> None:
            _copy([received for received, _ in all_], all_[root][1][0])

        call = self._call("scatter", outputs[0], f"src={self.ranks[root]}")
        return self._all(call, (outputs[0], inputs), carry_out)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ThreadWork:
        """Sum over the ranks; each keeps its part."""
        op = _operation(opts)

        def carry_out(all_: list[Any]) -> None:
            sums = [_reduced([parts[rank] for _, parts in all_], op) for rank in range(len(all_))]
            _copy([received for received, _ in all_], sums)

        call = self._call("reduce_scatter", outputs[0], f"op={_name(op)}")
        return self._all(call, (outputs[0], inputs[0]), carry_out)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None) -> ThreadWork:
        """Sum one tensor over the ranks; each keeps its slice."""
        op = _operation(opts)

        def carry_out(all_: list[Any]) -> None:
            slices = _reduced([message for _, message in all_], op).reshape(-1).chunk(len(all_))
            for (received, _), part in zip(all_, slices, strict=True):
                received.detach().view(-1).copy_(part)

        call = self._call("reduce_scatter_tensor", output, f"op={_name(op)}")
        return self._all(call, (output, source), carry_out)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> ThreadWork:
        """Reduce-scatter several tensors."""
        return [self.reduce_scatter_single(*pair, opts) for pair in zip(outputs, sources, strict=True)][-1]

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ThreadWork:
        """Send a tensor to each rank, and receive one of each."""

        def carry_out(all_: list[Any]) -> None:
            for rank, (received, _) in enumerate(all_):
                _copy(received, [message[rank] for _, message in all_])

        return self._all(self._call("all_to_all", None), (outputs, inputs), carry_out)

    def all_to_all_single(
        self, output: Tensor, source: Tensor, output_splits: list[int], input_splits: list[int], opts: Any = None
    ) -> ThreadWork:
        """Send a slice to each rank, and receive one of each, of the rows that the splits say."""

        def carry_out(all_: list[Any]) -> None:
            parts = [message.split(_rows(message, splits, len(all_))) for _, message, _, splits in all_]
            for rank, (received, _, splits, _) in enumerate(all_):
                targets = received.detach().split(_rows(received, splits, len(all_)))
                _copy(targets, [message[rank] for message in parts])

        tensors = (output, source, output_splits, input_splits)
        return self._all(self._call("all_to_all_single", None), tensors, carry_out)

    def send(self, tensors: list[Tensor], target: int, tag: int) -> ThreadWork:
        """Send to a rank of the group."""
        self.sent_messages += 1
        self.sent_bytes += tensors[0].nbytes
        return self._exchange.message(self, "send", self.ranks[target], tensors[0], tag)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> ThreadWork:
        """Receive from a rank of the group."""
        return self._exchange.message(self, "recv", self.ranks[source], tensors[0], tag)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ThreadWork:
        """Receive from whoever sends."""
        return self._exchange.message(self, "recv", None, tensors[0], tag)


def _operation(opts: Any) -> Any:
    return ReduceOp.SUM if opts is None else opts.reduceOp


def _name(op: Any) -> str:
    return next((str(known).rpartition(".")[2] for known in _REDUCTIONS if op == known), str(op))


def _reduced(tensors: list[Tensor], op: Any) -> Tensor:
    """Reduce tensors in the order of the ranks."""
    result = reduce(next(function for known, function in _REDUCTIONS.items() if op == known), tensors)
    return result / len(tensors) if op == ReduceOp.AVG else result.clone() if len(tensors) == 1 else result


def _reduce(all_: list[list[Tensor]], op: Any) -> None:
    for copies in zip(*all_, strict=True):
        result = _reduced(list(copies), op)
        for tensor in copies:
            tensor.detach().copy_(result)


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.detach().copy_(source)  # detached: autograd does not see what a collective writes, as with gloo


def _rows(tensor: Tensor, splits: list[int], parts: int) -> list[int]:
    return list(splits) or [tensor.shape[0] // parts] * parts
