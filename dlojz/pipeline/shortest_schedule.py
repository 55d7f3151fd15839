"""Shortest schedule for given costs and memory, proven.

Two ways to an answer, in this order: a table of small cases, made with a solver and holding the orders
(`benchmarks/pipeline_optimum.py`); a simple schedule that already meets the lower bound. The model: one interval per
action, no two at once on a rank, each after what it needs plus the delay of the message, and activations within the
limit. Micro-batches are alike, so each stage takes them in turn. For the span, each rank begins as soon as it can.

Source: Qi et al. 2024 (arXiv 2401.10241, App. G), for the same question as a linear program.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, shortest
from dlojz.pipeline.analysis import lower_bound_of, span_bound_of
from dlojz.pipeline.orders.synchronous import zigzag
from dlojz.pipeline.orders.zero_bubble import PRIORITIES, list_schedule, zb_v, zero_bubble
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, COST_OF, FORWARD, Action, Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS, peak_activations, simulate

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

TABLE = Path(__file__).with_name("data") / "optimum_table.json"
_MARGIN = 1e-9
Objective = Literal["makespan", "span"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)


@dataclass(frozen=True)
class Optimum:
    """Shortest schedule, proven or the best found.

    Attributes:
        value: its makespan or span, in the unit of the costs.
        proven: whether no schedule is shorter.
        bound: proven lower bound; `value` where proven.
        schedule: one of that length.
        source: "table", "bound" (a simple schedule meets the lower bound) or "solver".
    """

    value: float
    proven: bool
    bound: float
    schedule: Schedule
    source: str


@dataclass(frozen=True)
class Problem:
    """Problem: sizes, costs, whether backwards are split, memory limit (None: any), makespan or span."""

    ranks: int
    micro_batches: int
    costs: Costs
    placement: tuple[int, ...]
    split: bool
    memory_limit: float | None
    objective: Objective

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of actions."""
        return (FORWARD, BACKWARD_INPUT, BACKWARD_WEIGHT) if self.split else (FORWARD, BACKWARD)

    @property
    def bound(self) -> float:
        """The lower bound that does not look at memory."""
        bound = lower_bound_of if self.objective == "makespan" else span_bound_of
        return bound(self.ranks, self.micro_batches, self.costs, placement=self.placement, split=self.split)

    def value_of(self, schedule: Schedule) -> float:
        """Simulate a schedule's makespan or span."""
        timeline = simulate(schedule, self.costs)
        return timeline.makespan if self.objective == "makespan" else timeline.span

    def key(self, limit: float | None) -> str | None:
        """Name it in the table with another limit; None where the table has no such case."""
        costs = self.costs
        # The table holds cases of M_B = M_W = 1 and sends that do not block.
        unusual = (costs.kept_for_input, costs.kept_for_weight, costs.sends) != (1.0, 1.0, "buffered")
        if self.placement != tuple(range(self.ranks)) or unusual:
            return None
        # Messages pass between neighbours only.
        delays = {costs.delay(a, b) for a in range(self.ranks) for b in (a - 1, a + 1) if 0 <= b < self.ranks}
        if len(delays) > 1:
            return None
        times = []
        for kind in self.kinds:
            values = costs.per_stage(COST_OF[kind], self.ranks)
            # One number where all stages are alike.
            times.append(kind + ",".join(f"{v:g}" for v in (values if len(set(values)) > 1 else values[:1])))
        limited = "" if limit is None else f" limit {limit:g}"
        delay = f" c{delays.pop():g}" if any(delays) else ""
        return f"{self.ranks}x{self.micro_batches} {self.objective} {' '.join(times)}{delay}{limited}"


def optimum(
    ranks: int,
    micro_batches: int,
    *,
    costs: Costs = UNIT_COSTS,
    split: bool = False,
    memory_limit: float | None = None,
    objective: Objective = "makespan",
) -> Optimum:
    """Find the shortest schedule that exists.

    Args:
        costs: times and memory per micro-batch; sends do not block.
        split: whether the backward is split into its part for the input and its part for the weights.
        memory_limit: activations that a rank may keep, in stage-micro-batches; None: any number.
        objective: "makespan" (the optimizer waits for all ranks) or "span" (each rank steps on its own).

    Raises:
        LabError: if the table has no such case and no simple schedule meets the lower bound; if the memory limit is
            below one micro-batch; for an unknown objective.
    """
    if objective not in OBJECTIVES:
        raise LabError(one_of("objective", objective, OBJECTIVES))
    problem = Problem(ranks, micro_batches, costs, tuple(range(ranks)), split, memory_limit, objective)
    table_optimum = _from_table(problem)
    if table_optimum is not None:
        return table_optimum
    start = first_guess(problem)
    value, bound = problem.value_of(start), problem.bound
    if value <= bound + _MARGIN:
        return Optimum(value, True, value, start, "bound")
    size = f"{ranks} × {micro_batches}"
    raise phrase.refused("optimum not in the table", size=size)


def first_guess(problem: Problem) -> Schedule:
    """Choose the shortest of a few simple schedules within the memory limit.

    Raises:
        LabError: if the limit is below one micro-batch on some rank, so that there is no schedule.
    """
    fitting: list[tuple[float, int, Schedule]] = []
    bound = problem.bound
    for schedule in _guesses(problem):
        peaks = peak_activations(schedule, problem.costs)
        if problem.memory_limit is None or max(peaks) <= problem.memory_limit + _MARGIN:
            # The number breaks ties: schedules do not compare.
            fitting.append((problem.value_of(schedule), len(fitting), schedule))
            if fitting[-1][0] <= bound + _MARGIN:
                break
    if not fitting:
        limit = shortest(problem.memory_limit or 0)
        raise phrase.refused("no schedule within the limit", limit=limit)
    return replace(min(fitting)[2], name="optimum", barrier=problem.objective == "makespan")


def _guesses(problem: Problem) -> Iterator[Schedule]:
    ranks, limit = problem.ranks, math.inf if problem.memory_limit is None else problem.memory_limit
    size = (ranks, problem.micro_batches)
    kept_units = max(problem.costs.per_stage("kept_for_input", len(problem.placement)))
    yield _one_by_one(problem)
    # The heuristic has one stage per rank, and splits.
    if problem.placement == tuple(range(ranks)) and problem.split and limit >= kept_units:
        # With all the memory there is, then with that of ZB-1p.
        yield zero_bubble(*size, min(limit, kept_units * size[1]), problem.costs)
        yield zero_bubble(*size, min(limit, kept_units * ranks), problem.costs)
    if problem.split and ranks > 1 and problem.placement == zigzag(ranks, 2):
        yield zb_v(*size)
    for ahead in (1, 2):
        # p − r for `ahead` 1, as in 1F1B; 2(p − r) − 1 for 2, as in eager 1F1B.
        caps = [min(limit, kept_units * (ahead * (ranks - rank) - ahead + 1)) for rank in range(ranks)]
        for cap in (caps, [limit] * ranks):
            for priority in PRIORITIES.values():
                try:
                    yield list_schedule(
                        *size,
                        placement=problem.placement,
                        priority=priority,
                        cap=cap,
                        split=problem.split,
                        costs=problem.costs,
                    )
                except LabError:  # a cap with which chunks wait for each other: the other guesses stand
                    continue


def _one_by_one(problem: Problem) -> Schedule:
    """One micro-batch at a time: the least memory that there is."""
    orders: list[list[Action]] = [[] for _ in range(problem.ranks)]
    for micro_batch in range(problem.micro_batches):
        for stage, rank in enumerate(problem.placement):
            orders[rank].append(Action(FORWARD, stage, micro_batch))
        for stage, rank in reversed(list(enumerate(problem.placement))):
            # Back through the stages: B, or I and right after it W.
            orders[rank] += [Action(kind, stage, micro_batch) for kind in problem.kinds[1:]]
    return Schedule.of("optimum", orders, problem.placement, problem.micro_batches)


@cache
def _table() -> dict[str, Any]:
    entries: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8")) if TABLE.exists() else {}
    return entries


def _from_table(problem: Problem) -> Optimum | None:
    limit = problem.memory_limit
    if limit is not None:
        # Each micro-batch keeps 1: a limit of m is none, and of another only the whole part counts.
        limit = None if limit >= problem.micro_batches else float(math.floor(limit + _MARGIN))
    key = problem.key(limit)
    entry = None if key is None else _table().get(key)
    if entry is None and key is not None:
        entry = _from_a_tighter_limit(problem, limit)
    if entry is None:
        return None
    schedule = read_orders(entry["orders"], problem)
    # Simulated again: the table is trusted for the order and its proof alone.
    value = problem.value_of(schedule)
    return Optimum(value, True, value, schedule, "table")


def _from_a_tighter_limit(problem: Problem, limit: float | None) -> Any:
    """An optimum without any limit is one with every limit that it keeps to."""
    best = _table().get(problem.key(None) or "")
    if best is None or limit is None:
        return None
    for tighter in range(int(limit), 0, -1):
        entry = _table().get(problem.key(tighter) or "")
        if entry is not None and entry["value"] == best["value"]:
            return entry
    return None


def read_orders(orders: Sequence[str], problem: Problem) -> Schedule:
    """Build a schedule from the kinds of each rank's actions, one stage per rank: "FFBFBB"."""
    written = []
    for stage, kinds in enumerate(orders):
        last_micro_batch = dict.fromkeys(problem.kinds, -1)
        order = []
        for kind in kinds:
            last_micro_batch[kind] += 1
            order.append(Action(kind, stage, last_micro_batch[kind]))
        written.append(order)
    return Schedule.of(
        "optimum", written, problem.placement, problem.micro_batches, barrier=problem.objective != "span"
    )
