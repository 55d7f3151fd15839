"""Asynchronous pipelines: their schedules, the versions of weights that actions use, and stable learning rates.

Stages update their weights while micro-batches are in flight, so that no flush is needed. A `U` is an update of the
weights; its micro-batch is the last one whose gradient it uses. A schedule here is a finite run of m micro-batches:
filling and draining are not part of the method, whose steady state has no bubble.

**Versions** are counted from the schedule: a stage's version v is its weights after v updates (`U`). A schedule without
updates has version 0 throughout and one update at its end. Which version a forward or a backward uses is a rule of the
method, `weights`:

- "stashing": the forward the newest of its stage, the backward the same that its forward used (Narayanan et al. 2019,
  PipeDream, §3.3).
- "vertical": both the version that the first stage had when the micro-batch entered it (ibid., vertical sync).
- "double-buffered": both the one before the version that their gradient will update (Narayanan et al. 2021, PipeDream-
  2BW, arXiv 2006.09503, §3.1: W(t+1) = W(t) − ν ∇f(W(t−1))).
- "newest": each the newest at its own start, so that forward and backward may differ (PipeMare; AMPNet; PipeDream
  without stashing).

**Stability** of w(t+1) = w(t) − α λ w(t−τ), SGD on λ/2 w² with a gradient that is τ updates old: `threshold`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Literal, NamedTuple, get_args

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of
from dlojz.pipeline.orders.synchronous import counted
from dlojz.pipeline.schedule import (
    BACKWARD,
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    COMPUTES,
    FORWARD,
    UPDATE,
    Action,
    Costs,
    Schedule,
)
from dlojz.pipeline.simulator import UNIT_COSTS

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

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
        raise phrase.refused("too few micro-batches", ranks=ranks, batch=batch)
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
    ranks: int, micro_batches: int, *, in_flight: int | None = None, update_every: int = 1, costs: Costs | None = None
) -> Schedule:
    """Order AMPNet: each rank takes what has arrived, and updates when it has gathered enough gradients.

    Of what has arrived, a backward is taken before a forward, so the order follows from the costs, event by event.
    Gradients that are left over at the end update nothing.

    Args:
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


Weights = Literal["stashing", "vertical", "double-buffered", "newest"]
WEIGHTS: tuple[Weights, ...] = get_args(Weights)

_BY_NAME: dict[str, Weights] = {
    "pipedream-vertical": "vertical",
    "pipedream-no-stashing": "newest",
    "pipedream-2bw": "double-buffered",
    "pipemare": "newest",
    "ampnet": "newest",
}


class StageCopy(NamedTuple):
    """Copy of a stage: bidirectional schedules have two of each."""

    pipe: int
    stage: int


@dataclass(frozen=True)
class Audit:
    """Versions and staleness counted in a schedule; stages and micro-batches from 0.

    Attributes:
        weights: the rule by which actions choose their version.
        versions: per action, numbered as `schedule.actions`: the version it uses; of an update, the one it makes; None
            for what uses no weights. An overlapped action has that of its first part.
        staleness: [stage][micro-batch], in updates of that stage: the version that the gradient is applied to, less
            the version that the forward used. None where no update uses it.
        backward_staleness: the same for the version that the backward used.
        versions_kept: per stage, the most versions that must be kept at a time: the newest, and those of later actions.
        updates: per stage, how many `U` there are.
        update_of: [stage][micro-batch]: number of the update that uses its gradient; None where none does.
    """

    weights: Weights
    versions: tuple[int | None, ...]
    staleness: tuple[tuple[int | None, ...], ...]
    backward_staleness: tuple[tuple[int | None, ...], ...]
    versions_kept: tuple[int, ...]
    updates: tuple[int, ...]
    update_of: tuple[tuple[int | None, ...], ...]

    @property
    def mixed(self) -> tuple[tuple[int, int], ...]:
        """(stage, micro-batch) whose backward used other weights than its forward."""
        return tuple(
            (stage, micro_batch)
            for stage, rows in enumerate(zip(self.staleness, self.backward_staleness, strict=True))
            for micro_batch, (forward, backward) in enumerate(zip(*rows, strict=True))
            if forward != backward
        )

    @property
    def settled_staleness(self) -> tuple[float, ...]:
        """Per stage, once the pipeline is full: the mean over the gradients of the last update of full size."""
        return self._settled(self.staleness)

    @property
    def settled_backward_staleness(self) -> tuple[float, ...]:
        """The same for the version that the backward used: τ_bkwd of PipeMare, 0 where it is always the newest."""
        return self._settled(self.backward_staleness)

    def _settled(self, table: tuple[tuple[int | None, ...], ...]) -> tuple[float, ...]:
        settled = []
        for taus, updates in zip(table, self.update_of, strict=True):
            # Staleness of each gradient, by the update that uses it.
            groups: dict[int, list[int]] = {}
            for tau, update in zip(taus, updates, strict=True):
                if tau is not None and update is not None:
                    groups.setdefault(update, []).append(tau)
            # Updates of the full number of gradients: the last batch may be smaller.
            full = max((len(group) for group in groups.values()), default=0)
            last_update = max((update for update, group in groups.items() if len(group) == full), default=None)
            settled.append(0.0 if last_update is None else fmean(groups[last_update]))
        return tuple(settled)


def weights_of(schedule: Schedule) -> Weights:
    """Return the rule of a schedule's method, from its name; "stashing" where the name says nothing."""
    return _BY_NAME.get(schedule.name, "stashing")


def version_audit(schedule: Schedule, weights: Weights | None = None) -> Audit:
    """Count the versions that a schedule's actions use, keep and mix.

    Args:
        schedule: any; a synchronous one has version 0 throughout.
        weights: the rule by which actions choose their version; that of the schedule's name by default.

    Raises:
        LabError: for an unknown rule, or if an action would need a version that its stage does not have yet.
    """
    rule = weights_of(schedule) if weights is None else weights
    if rule not in WEIGHTS:
        raise LabError(one_of("weights", rule, WEIGHTS))
    # Each copy of a stage counts its own updates.
    of_place = _by_place(schedule)
    newest = {
        # Updates of the stage before each of its actions.
        stage_copy: list(accumulate((action.kind == UPDATE for _, action in rows), initial=0))[:-1]
        for stage_copy, rows in of_place.items()
    }
    update_of = {stage_copy: _update_of(rows) for stage_copy, rows in of_place.items()}
    entry_versions = _entered(of_place, newest)
    used_versions: dict[StageCopy, list[int | None]] = {}
    for stage_copy, rows in of_place.items():
        chosen = _chosen(rows, newest[stage_copy], update_of[stage_copy], entry_versions, rule)
        for (_, action), version, newest_version in zip(rows, chosen, newest[stage_copy], strict=True):
            # "vertical" and "double-buffered" may name a version that is not made yet.
            if version is not None and action.kind != UPDATE and version > newest_version:
                raise phrase.refused("version not there", action=action, version=version, count=newest_version)
        used_versions[stage_copy] = chosen

    versions: list[int | None] = [None] * len(schedule.actions)
    for stage_copy, rows in of_place.items():
        for (number, _), version in zip(rows, used_versions[stage_copy], strict=True):
            if versions[number] is None:
                versions[number] = version
    versions_kept, updates = [0] * schedule.stages, [0] * schedule.stages
    for stage_copy, rows in of_place.items():
        versions_kept[stage_copy.stage] = max(
            versions_kept[stage_copy.stage], _most_kept(used_versions[stage_copy], rows)
        )
        updates[stage_copy.stage] = max(updates[stage_copy.stage], _count_updates(rows))
    tables = _tables(schedule, of_place, used_versions, update_of)
    return Audit(rule, tuple(versions), tables[0], tables[1], tuple(versions_kept), tuple(updates), tables[2])


_Rows = list[tuple[int, Action]]
"""Actions of one copy of a stage, in order: (number of the action, the action or its part)."""


def _by_place(schedule: Schedule) -> dict[StageCopy, _Rows]:
    of_place: dict[StageCopy, _Rows] = {}
    for number, action in enumerate(schedule.actions):
        for element in action.elements:
            if element.kind in (*COMPUTES, UPDATE):
                of_place.setdefault(StageCopy(element.pipe, element.stage), []).append((number, element))
    return of_place


def _count_updates(rows: _Rows) -> int:
    return sum(action.kind == UPDATE for _, action in rows)


def _update_of(rows: _Rows) -> dict[int, int | None]:
    """For each micro-batch, which update uses its gradient: the first after its last backward (for the weights).

    Without any update in the schedule, the one at its end does.
    """
    updates_before: dict[int, int] = {}
    passed = 0
    for _, action in rows:
        if action.kind == UPDATE:
            passed += 1
        elif action.kind in (BACKWARD, BACKWARD_WEIGHT):
            # Overwritten by later ones: the last backward of a micro-batch counts.
            updates_before[action.micro_batch] = passed
    # After the last update nothing uses a gradient; a schedule without any has one at its end.
    return {micro_batch: before if before < max(passed, 1) else None for micro_batch, before in updates_before.items()}


def _entered(of_place: dict[StageCopy, _Rows], newest: dict[StageCopy, list[int]]) -> dict[int, int]:
    """The version that the first stage had when each micro-batch entered it."""
    entry_versions: dict[int, int] = {}
    for stage_copy, rows in of_place.items():
        if stage_copy.stage == 0:
            for (_, action), version in zip(rows, newest[stage_copy], strict=True):
                if action.kind == FORWARD:
                    # Of several slices the first.
                    entry_versions.setdefault(action.micro_batch, version)
    return entry_versions


def _chosen(
    rows: _Rows, newest: list[int], update_of: dict[int, int | None], entry_versions: dict[int, int], rule: Weights
) -> list[int | None]:
    """The version that each action of a stage uses; of an update, the one it makes."""
    stashed: dict[tuple[int, int], int] = {}
    num_updates = _count_updates(rows)
    chosen: list[int | None] = []
    for (_, action), newest_version in zip(rows, newest, strict=True):
        unit = (action.micro_batch, action.token_slice)
        if action.kind == UPDATE:
            chosen.append(newest_version + 1)
        elif rule == "vertical":
            chosen.append(entry_versions.get(action.micro_batch, newest_version))
        elif rule == "double-buffered":
            update = update_of.get(action.micro_batch)
            # A gradient that no update uses counts to the one after the last.
            chosen.append(max((num_updates if update is None else update) - 1, 0))
        elif rule == "stashing":
            # The forward notes the newest version, its backward finds it noted.
            chosen.append(stashed.setdefault(unit, newest_version))
        else:
            chosen.append(newest_version)
    return chosen


def _most_kept(used_versions: list[int | None], rows: _Rows) -> int:
    """The most versions alive at once: each lives from the update that makes it to its last use or the next update."""
    # Version v lives from position `births[v]` to `until[v]` of the stage's order.
    births, until = [0], [0]
    for position, (_, action) in enumerate(rows):
        until[-1] = position  # the newest is always kept
        if action.kind == UPDATE:
            births.append(position + 1)
            until.append(position + 1)
    for position, ((_, action), version) in enumerate(zip(rows, used_versions, strict=True)):
        if version is not None and action.kind != UPDATE:
            until[version] = max(until[version], position)
    # One more at each birth, one less after each end: the running sum is how many are alive.
    change = [0] * (len(rows) + 2)
    for start, end in zip(births, until, strict=True):
        change[start] += 1
        change[end + 1] -= 1
    return max(accumulate(change[: len(rows)]), default=1)


def _tables(
    schedule: Schedule,
    of_place: dict[StageCopy, _Rows],
    used_versions: dict[StageCopy, list[int | None]],
    update_of: dict[StageCopy, dict[int, int | None]],
) -> list[tuple[tuple[int | None, ...], ...]]:
    """[stage][micro-batch]: staleness of the forward's version, of the backward's, and the update that uses both."""
    tables: list[list[list[int | None]]] = [
        [[None] * schedule.micro_batches for _ in range(schedule.stages)] for _ in range(3)
    ]
    for stage_copy, rows in of_place.items():
        for (_, action), version in zip(rows, used_versions[stage_copy], strict=True):
            update = update_of[stage_copy].get(action.micro_batch)
            if update is None or version is None or action.kind not in (FORWARD, BACKWARD, BACKWARD_INPUT):
                continue
            # Table 0 for forwards, 1 for backwards.
            row = tables[action.kind != FORWARD][stage_copy.stage]
            before = row[action.micro_batch]  # of another token slice of the same micro-batch
            row[action.micro_batch] = update - version if before is None else max(before, update - version)
            tables[2][stage_copy.stage][action.micro_batch] = update
    return [tuple(tuple(row) for row in table) for table in tables]


def threshold(delay: int) -> float:
    """Return the largest stable α λ for gradients that are `delay` updates old: 2 sin(π / (4τ + 2)).

    2, 1, 0.618, 0.445 for τ = 0, 1, 2, 3; about π / (2τ) for large τ: twice the delay, half the step.

    Source: Yang et al. 2021, PipeMare (arXiv 1910.05124), Lemma 1.

    Raises:
        LabError: for a negative delay.
    """
    if delay < 0:
        raise phrase.refused("no delay", delay=delay)
    return 2.0 * math.sin(math.pi / (4 * delay + 2))
