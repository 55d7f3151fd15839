"""Calls that ranks do not make alike, caused for real on forked ranks: each is named, on every rank, and none hangs."""

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlojz.base.language import use_language
from dlojz.processes.forks import RankAnswer, spmd
from dlojz.processes.guard import COLLECTIVES, MESSAGES, Guard, GuardedWork
from dlojz.processes.status_board import StatusBoard


@pytest.fixture(autouse=True)
def all_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of a busy machine may come later than what a student waits for; once all have come, nobody waits."""
    monkeypatch.setattr("dlojz.processes.guard._GATHER_S", 20.0)
    monkeypatch.setattr("dlojz.processes.guard._EXPLAIN_S", 20.0)


def faults(function: Callable[[int, int], Any], size: int = 4, **limits: float) -> list[tuple[str, str] | None]:
    return [one.error and (one.error.kind, one.error.message) for one in spmd(function, size, **limits)]


def wait_for(board: StatusBoard, rank: int, true: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the board tells this of a rank."""
    while not true(board.read(rank)):
        time.sleep(0.01)


def only(found: list[tuple[str, str] | None]) -> tuple[str, str]:
    """The one fault that every rank has told."""
    assert len(set(found)) == 1
    assert found[0] is not None
    return found[0]


def test_a_rank_that_never_comes_is_missed_at_once() -> None:
    def job(rank: int, size: int) -> None:
        dist.broadcast(torch.ones(2), 0)
        if rank != 3:
            dist.all_reduce(torch.ones(4))
            return
        board = _guard_of(dist.all_reduce)._board
        for other in range(3):  # all of them wait, however busy the machine is
            wait_for(board, other, lambda state: state.get("state") == "waiting" and "all_reduce" in str(state))

    *others, last = faults(job)
    assert last is None
    assert only(others) == (
        "missing",
        "Missing rank: rank 3 ended without calling all_reduce #2 [4] float32, in which ranks 0–2 wait (its last one "
        "was broadcast #1 [2] float32). A collective needs every rank of its group.",
    )


def test_another_order_is_told_on_every_rank() -> None:
    def job(rank: int, size: int) -> None:
        x = torch.ones(4)
        calls = [lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)]
        for call in reversed(calls) if rank == 2 else calls:
            call()

    assert only(faults(job)) == (
        "order",
        "Different order: ranks 0, 1 and 3 call all_reduce #1 [4] float32, but rank 2 calls broadcast #1 [4] float32. "
        "Every rank must call the same collectives in the same order.",
    )


@pytest.mark.parametrize("late", [0, 1, 2, 3])
def test_another_shape_is_told_on_every_rank_whoever_comes_last(late: int) -> None:
    """gloo alone lets the first rank return normally."""

    def job(rank: int, size: int) -> None:
        time.sleep(0.1 * (rank == late))
        dist.all_reduce(torch.ones(5 if rank == 1 else 4))

    assert only(faults(job)) == (
        "shape",
        "Different shape: ranks 0, 2 and 3 call all_reduce #1 [4] float32, but rank 1 calls all_reduce #1 [5] float32. "
        "All must hold the same number of elements of the same type.",
    )


def test_another_type_root_or_operation_is_told() -> None:
    def dtype(rank: int, size: int) -> None:
        dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank else torch.float32))

    def root(rank: int, size: int) -> None:
        dist.broadcast(torch.ones(4), src=rank)

    def operation(rank: int, size: int) -> None:
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)

    assert only(faults(dtype, 2))[0] == "shape"
    assert "rank 0 calls broadcast #1 [4] float32 (src=0), but rank 1" in only(faults(root, 2))[1]
    assert "(op=MAX), but rank 0 calls all_reduce #1 [4] float32 (op=SUM)" in only(faults(operation, 3))[1]


def test_ranks_that_wait_for_one_another_are_named_with_what_to_do() -> None:
    def job(rank: int, size: int) -> None:
        dist.recv(torch.ones(2), 1 - rank)
        dist.send(torch.ones(2), 1 - rank)

    assert only(faults(job, 2)) == (
        "deadlock",
        "Deadlock between ranks 0 and 1: rank 0 waits to receive from rank 1, rank 1 waits to receive from rank 0. All "
        "of them receive first: use isend and irecv, then wait for both.",
    )


def test_a_message_and_a_collective_can_wait_for_each_other() -> None:
    def job(rank: int, size: int) -> None:
        if rank == 0:
            dist.recv(torch.ones(2), 1)
        dist.all_reduce(torch.ones(2))

    kind, sentence = only(faults(job, 3))
    assert kind == "deadlock"
    assert "rank 0 waits to receive from rank 1, rank 1 waits in all_reduce #1 [2] float32 for rank 0" in sentence


def test_a_message_nobody_sends_or_receives_is_missed() -> None:
    def receive(rank: int, size: int) -> None:
        if rank == 0:
            dist.recv(torch.ones(2), 1)

    def send(rank: int, size: int) -> None:
        if rank == 0:
            dist.send(torch.ones(2), 1)

    assert faults(receive, 2)[0] == (
        "missing",
        "Missing message: rank 0 waits to receive from rank 1, but rank 1 has ended without sending it.",
    )
    assert faults(send, 2)[0] == (
        "missing",
        "Missing receiver: rank 0 sends to rank 1, but rank 1 has ended without receiving.",
    )


def test_a_message_of_another_length_is_refused_at_both_ends() -> None:
    def job(rank: int, size: int) -> None:
        call = dist.send if rank else dist.recv
        call(torch.ones(4 + rank), 1 - rank)

    assert only(faults(job, 2))[1].startswith(
        "Different shape: rank 0 calls recv #1 [4] float32, but rank 1 calls send #1 [5] float32."
    )


def test_a_rank_that_computes_is_waited_for_as_long_as_the_limit_says() -> None:
    def patient(rank: int, size: int) -> None:
        if rank == 1:
            wait_for(_guard_of(dist.barrier)._board, 0, lambda state: state.get("state") == "waiting")
        dist.barrier()

    def impatient(rank: int, size: int) -> None:
        if rank == 1:
            wait_for(_guard_of(dist.barrier)._board, 0, lambda state: bool(state.get("fault")))
        dist.barrier()

    assert faults(patient, 2) == [None, None]
    assert only(faults(impatient, 2, limit_s=0.5)) == (
        "timeout",
        "Time limit: after 0.5 s rank 0 waits in barrier #1 for rank 1; rank 1 is still computing (it has called "
        "none).",
    )


def test_spmd_lets_gloo_wait_longer_than_the_limit_of_its_guard() -> None:
    """Else a rank that may wait 100 s would end after gloo's own 60, in gloo's words."""

    def job(rank: int, size: int) -> float:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
        return float(backend.options._timeout.total_seconds())

    assert [answer.value for answer in spmd(job, 2, limit_s=100.0)] == [200.0, 200.0]


def test_the_cause_is_told_beside_its_consequence() -> None:
    def job(rank: int, size: int) -> None:
        if rank == 1:
            raise ValueError("no such layer")
        dist.barrier()

    answers = spmd(job, 3)
    assert answers[1].error is not None
    assert (answers[1].error.name, answers[1].error.message) == ("ValueError", "no such layer")
    for waiting in (answers[0], answers[2]):
        assert waiting.error is not None
        assert waiting.error.kind == "peer"
        assert "it was stopped by ValueError" in waiting.error.message


def test_what_all_ranks_call_alike_gives_what_torch_gives() -> None:
    def job(rank: int, size: int) -> Any:
        x = torch.full((3,), float(rank))
        works = [dist.all_reduce(x.clone(), async_op=True) for _ in range(20)]
        for work in works:
            work.wait(timedelta(seconds=10))
        gathered = [torch.empty(3) for _ in range(size)]
        dist.all_gather(gathered, x)
        whole = torch.empty(3 * size)
        dist.all_gather_into_tensor(whole, x)
        shard = torch.empty(3)
        dist.reduce_scatter_tensor(shard, torch.arange(3.0 * size))
        swapped = torch.empty(size)
        dist.all_to_all_single(swapped, torch.full((size,), float(rank)))
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, {"rank": rank})
        right = torch.empty(3)
        operations = [
            dist.P2POp(dist.isend, x, (rank + 1) % size),
            dist.P2POp(dist.irecv, right, (rank - 1) % size),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        pair = dist.new_group([0, 1])
        if rank < 2:
            dist.all_reduce(x, group=pair)
        return objects, {"x": x, "whole": whole, "shard": shard, "swapped": swapped, "right": right}

    answers = spmd(job, 3)
    assert [one.error for one in answers] == [None] * 3
    for rank, one in enumerate(answers):
        assert one.value == [{"rank": 0}, {"rank": 1}, {"rank": 2}]
        assert one.tensors["whole"].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert one.tensors["shard"].tolist() == [3 * value for value in range(3 * rank, 3 * rank + 3)]
        assert one.tensors["swapped"].tolist() == [0, 1, 2]
        assert one.tensors["right"].tolist() == [(rank - 1) % 3] * 3
    assert [one.tensors["x"].tolist()[0] for one in answers] == [1, 1, 2]
    assert [call["op"] for call in answers[0].calls[:21]] == ["all_reduce"] * 20 + ["all_gather"]


def test_a_receive_from_anyone_disturbs_no_later_message() -> None:
    def job(rank: int, size: int) -> Any:
        if rank:
            dist.send(torch.full((3,), float(rank)), 0)
            dist.send(torch.full((5,), float(rank)), 0)
            return None
        first, second = torch.empty(3), torch.empty(5)
        source = dist.recv(first)
        dist.recv(second, source)
        return [source, first.tolist(), second.tolist()]

    assert [one.error for one in spmd(job, 2)] == [None, None]
    assert spmd(job, 2)[0].value == [1, [1.0] * 3, [1.0] * 5]


def test_uneven_inputs_under_ddp_are_no_fault() -> None:
    """DDP.join hands the works it asks for to C++, which takes torch's own only."""

    def job(rank: int, size: int) -> Any:
        from torch.nn.parallel import DistributedDataParallel

        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(2, 1))
        with model.join():
            for _ in range(2 + rank):
                model(torch.ones(1, 2)).sum().backward()
        return [parameter.grad is not None for parameter in model.parameters()]

    import torch._dynamo  # DDP imports it, which takes seconds on every rank

    answers = spmd(job, 2)
    assert [one.error for one in answers] == [None, None]


def test_a_thread_of_the_cell_may_still_send() -> None:
    def job(rank: int, size: int) -> Any:
        import threading

        pair = dist.new_group([0, 1])
        if rank == 0:

            def later() -> None:
                time.sleep(1.0)
                dist.send(torch.ones(2), 1)

            thread = threading.Thread(target=later)
            thread.start()
            dist.barrier(group=pair)
            thread.join()
        else:
            dist.recv(torch.empty(2), 0)
            dist.barrier(group=pair)

    assert [one.error for one in spmd(job, 2)] == [None, None]


def test_who_comes_long_after_another_has_ended_misses_a_rank_not_a_process() -> None:
    def job(rank: int, size: int) -> None:
        if rank != 2:
            time.sleep(2.6)  # longer than a rank that has ended stays
            dist.barrier()

    kind, sentence = only(faults(job, 3)[:2])
    assert kind == "missing"
    assert "rank 2" in sentence


def test_a_message_whose_work_is_gone_before_it_is_waited_for_is_noted() -> None:
    noted: list[str] = []
    guard: Any = SimpleNamespace(loses_message=noted.append)
    for op, finished in (("send", False), ("send", True), ("recv", False), ("all_reduce", False)):
        work = GuardedWork(guard, None, {"op": op, "channel": f"g|{op}"}, True)
        work._finished = finished
        del work
    assert noted == ["g|send"]


def test_removing_the_guard_gives_torch_its_own_functions_back(tmp_path: Any) -> None:
    before = {name: getattr(dist, name) for name in (*COLLECTIVES, *MESSAGES)}
    StatusBoard.create(tmp_path / "board", 1)
    guard = Guard(StatusBoard(tmp_path / "board", 0, 1))
    guard.install()
    try:
        assert all(getattr(dist, name).__wrapped__ is function for name, function in before.items())
    finally:
        guard.remove()
    assert {name: getattr(dist, name) for name in before} == before


def test_a_torn_group_is_known_and_counts_start_again() -> None:
    def torn(rank: int, size: int) -> Any:
        guard = _guard_of(dist.all_reduce)
        with suppress(RuntimeError):
            dist.all_reduce(torch.ones(2 + rank))
        was_torn = guard.torn
        guard.reset()
        return [was_torn, guard.torn, guard.counts()]

    assert [one.value for one in spmd(torn, 2)] == [[True, False, {}]] * 2


def _guard_of(function: Any) -> Guard:
    """The guard that a wrapped function belongs to."""
    cells = [cell.cell_contents for cell in function.__closure__]
    wrapping = next(cell.__self__ for cell in cells if hasattr(cell, "__self__"))
    guard: Guard = wrapping._guard
    return guard


@pytest.mark.parametrize("language", ["fr"])
def test_faults_are_told_in_the_reader_s_language(language: str) -> None:
    def job(rank: int, size: int) -> None:
        if rank:
            dist.all_reduce(torch.ones(4))

    use_language(language)
    answers: list[RankAnswer] = spmd(job, 3)
    assert answers[1].error is not None
    assert answers[1].error.message == (
        "Rang manquant : le rang 0 a terminé sans appeler all_reduce #1 [4] float32, où les rangs 1 et 2 attendent (le "
        "rang 0 n’en a appelé aucune). Une communication collective a besoin de tous les rangs de son groupe."
    )
