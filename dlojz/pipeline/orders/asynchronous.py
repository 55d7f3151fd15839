"""Asynchronous schedules: stages update their weights while micro-batches are in flight, so that no flush is needed.

A `U` is an update of the weights; its micro-batch is the last one whose gradient it uses. `stale_weights` counts from
these orders which weights each forward and backward use. A schedule here is a finite run of m micro-batches: filling
and draining are not part of the method, whose steady state has no bubble.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, get_args

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal
from dlojz.pipeline.orders.synchronous import counted
from dlojz.pipeline.schedule import BACKWARD, FORWARD, UPDATE, Action, Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS

Stashing = Literal["stashing", "vertical", "none"]
_NAMES: dict[Stashing, str] = {
    "stashing": "pipedream",
    "vertical": "pipedream-vertical",
    "none": "pipedream-no-stashing",
}


def pipedream(ranks: int, micro_batches: int, *, stashing: Stashing = "stashing") -> Schedule:
    """Order PipeDream: 1F1B without a flush, each stage updates after each of its backwards.

    Rank r runs min(p − r, m) forwards, then one backward, its update and one forward in turn: forward k on rank r has
    seen k − (p − 1 − r) updates. `stashing` tells which weights a backward uses and changes the name, not the order:
    those its forward used ("stashing"), those of the first stage when the micro-batch entered ("vertical"), or the
    newest ("none", which makes the gradient one of no weights at all).

    Source: Narayanan et al. 2019, PipeDream (SOSP), §3.2 (1F1B, NOAM in flight) and §3.3 (stashing, vertical sync).

    Raises:
        LabError: for fewer than one rank or micro-batch, or an unknown `stashing`.
    """
    if stashing not in get_args(Stashing):
        raise LabError(one_of("stashing", stashing, get_args(Stashing)))
    counted("pipedream", ranks=ranks, micro_batches=micro_batches)
    orders = [_one_f_one_b(rank, ranks - rank, micro_batches, batch=1) for rank in range(ranks)]
    return _schedule(_NAMES[stashing], orders, micro_batches)


def pipedream_2bw(ranks: int, micro_batches: int, *, batch: int | None = None) -> Schedule:
    """Order PipeDream-2BW: 1F1B without a flush, one update per batch of micro-batches, two versions of the weights.

    Micro-batch k (from 0) uses version max(⌊k / batch⌋ − 1, 0) for its forward and its backward, so that
    W(t+1) = W(t) − ν ∇f(W(t−1)): one update old on every stage.

    Args:
        ranks: p.
        micro_batches: m, in all; the last batch is smaller where they are not a multiple.
        batch: micro-batches per version, at least p so that version ⌊k / batch⌋ − 1 exists on every stage when
            micro-batch k comes; p by default.

    Source: Narayanan et al. 2021, Memory-Efficient Pipeline-Parallel DNN Training (arXiv 2006.09503), §3.1.

    Raises:
        LabError: for fewer than one rank or micro-batch, or a batch smaller than p.
    """
    batch = ranks if batch is None else batch
    counted("pipedream-2bw", ranks=ranks, micro_batches=micro_batches, batch=batch)
    if batch < ranks:
        raise refusal(
            en=f"PipeDream-2BW needs a batch of at least as many micro-batches as stages ({ranks}), or a third "
            f"version of the weights, but batch is {batch}: use {ranks} or more.",
            fr=f"PipeDream-2BW demande un batch d’au moins autant de micro-batches que d’étages ({ranks}), sinon "
            f"il faut une troisième version des poids, mais batch vaut {batch} : prenez {ranks} ou plus.",
        )
    orders = [_one_f_one_b(rank, ranks - rank, micro_batches, batch) for rank in range(ranks)]
    return _schedule("pipedream-2bw", orders, micro_batches)


def pipemare(ranks: int, micro_batches: int, *, batch: int | None = None) -> Schedule:
    """Order PipeMare: one version of the weights; a forward reads them early, its backward reads what they are by then.

    PipeMare counts in slots, in which a stage runs one forward and one backward side by side: stage i (from 1) runs the
    forward of a micro-batch 2(P − i) + 1 slots before its backward, and in a slot the forward does not see what the
    backward changes. On one rank this is: 2(p − r) forwards, then one backward, its update and one forward in turn. It
    injects about twice as many micro-batches as PipeDream's 1F1B; its staleness is (2(P − i) + 1) / N updates on
    average, PipeDream's P − i.

    Args:
        ranks: p (P above).
        micro_batches: m, in all; the last batch is smaller where they are not a multiple.
        batch: micro-batches per update (N above), 1 by default.

    Source: Yang et al. 2021, PipeMare (arXiv 1910.05124), §2 and Table 1; the order on one rank is derived from it.

    Raises:
        LabError: for fewer than one rank, micro-batch or micro-batch per update.
    """
    batch = 1 if batch is None else batch
    counted("pipemare", ranks=ranks, micro_batches=micro_batches, batch=batch)
    orders = [_one_f_one_b(rank, 2 * (ranks - rank), micro_batches, batch) for rank in range(ranks)]
    return _schedule("pipemare", orders, micro_batches)


def ampnet(
    ranks: int,
    micro_batches: int,
    *,
    in_flight: int | None = None,
    update_every: int = 1,
    costs: Costs | None = None,
) -> Schedule:
    """Order AMPNet: each rank takes what has arrived, and updates when it has gathered enough gradients.

    Of what has arrived, a backward is taken before a forward, so the order follows from the costs, event by event.
    Gradients that are left over at the end update nothing.

    Args:
        ranks: p.
        micro_batches: m, in all.
        in_flight: micro-batches between their first forward and their last backward (`max_active_keys`); p by default.
        update_every: gradients that a stage gathers before it updates (`min_update_frequency`).
        costs: unit costs by default.

    Source: Gaunt et al. 2017, AMPNet (arXiv 1705.09786), for the method and its two knobs; that a backward goes first
    is a choice made here (the paper's run time serves messages, from nodes of any graph).

    Raises:
        LabError: for fewer than one rank, micro-batch, micro-batch in flight or gradient per update.
    """
    in_flight = ranks if in_flight is None else in_flight
    counted("ampnet", ranks=ranks, micro_batches=micro_batches, in_flight=in_flight, update_every=update_every)
    orders = _as_they_arrive(ranks, micro_batches, in_flight, update_every, costs or UNIT_COSTS)
    return _schedule("ampnet", orders, micro_batches)


def _schedule(name: str, orders: list[list[Action]], micro_batches: int) -> Schedule:
    return Schedule.of(name, orders, list(range(len(orders))), micro_batches, barrier=False, asynchronous=True)


def _one_f_one_b(stage: int, ahead: int, micro_batches: int, batch: int) -> list[Action]:
    """`ahead` forwards, then a backward and a forward in turn; an update after each `batch` backwards."""
    order = [Action(FORWARD, stage, micro_batch) for micro_batch in range(min(ahead, micro_batches))]
    for micro_batch in range(micro_batches):
        # The last batch may be smaller: its update comes with the last backward.
        order += _backward(
            stage, micro_batch, update=(micro_batch + 1) % batch == 0 or micro_batch + 1 == micro_batches
        )
        # One forward for each backward, so that `ahead` stay in flight.
        if micro_batch + ahead < micro_batches:
            order.append(Action(FORWARD, stage, micro_batch + ahead))
    return order


def _backward(stage: int, micro_batch: int, *, update: bool) -> Iterator[Action]:
    yield Action(BACKWARD, stage, micro_batch)
    if update:
        yield Action(UPDATE, stage, micro_batch)


def _as_they_arrive(
    ranks: int, micro_batches: int, in_flight: int, update_every: int, costs: Costs
) -> list[list[Action]]:
    """Run the stages as workers with a queue each.

    The next step of all is that of the rank that can start first (the lowest of those that can at once). On a stage,
    micro-batches arrive in the order in which they entered, so that the next forward and the next backward are numbers.
    """
    forward, update = costs.per_stage("forward", ranks), costs.per_stage("update", ranks)
    backward = [costs.of_stage("backward", stage) for stage in range(ranks)]
    forwarded: list[list[float]] = [[] for _ in range(ranks)]  # when each micro-batch's forward ended, per stage
    returned: list[list[float]] = [[] for _ in range(ranks)]  # the same of its backward
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    free = [0.0] * ranks

    def arrivals(stage: int) -> Iterator[tuple[float, int]]:
        """When the next backward (0) and the next forward (1) of a stage may start."""
        following = len(returned[stage])
        if stage == ranks - 1:
            if following < len(forwarded[stage]):
                # The last stage's backward waits for its own forward alone.
                yield forwarded[stage][following], 0
        elif following < len(returned[stage + 1]):
            yield returned[stage + 1][following] + costs.delay(stage + 1, stage), 0
        entering = len(forwarded[stage])
        if stage:
            if entering < len(forwarded[stage - 1]):
                yield forwarded[stage - 1][entering] + costs.delay(stage - 1, stage), 1
        # A micro-batch enters while fewer than `in_flight` lie between first forward and last backward.
        elif entering < micro_batches and entering - len(returned[0]) < in_flight:
            yield 0.0, 1

    while any(len(backward_ends) < micro_batches for backward_ends in returned):
        # A backward that has arrived by the time the rank starts goes first: times first, then the kind.
        start, kind, stage = min(
            (max(free[stage], arrival), kind, stage) for stage in range(ranks) for arrival, kind in arrivals(stage)
        )
        if kind:
            orders[stage].append(Action(FORWARD, stage, len(forwarded[stage])))
            free[stage] = start + forward[stage]
            forwarded[stage].append(free[stage])
        else:
            micro_batch = len(returned[stage])
            updates = (micro_batch + 1) % update_every == 0
            orders[stage] += _backward(stage, micro_batch, update=updates)
            # The gradient leaves at once; the update keeps this rank busy, not the one before.
            returned[stage].append(start + backward[stage])
            free[stage] = start + backward[stage] + updates * update[stage]
    return orders
