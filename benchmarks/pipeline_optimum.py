"""Make the table of proven optima, `dlojz/pipeline/data/optimum_table.json`, so that labs need no solver.

    python benchmarks/pipeline_optimum.py            # all of it, into the package
    python benchmarks/pipeline_optimum.py --ranks 3  # only up to 3 ranks, printed, nothing written

Unit costs, up to 4 ranks and 8 micro-batches, whole and split backward, makespan and span, every memory limit; and a
few unbalanced cases that the course shows. What a simple schedule reaches because it meets the lower bound is not
stored: it is found again in no time. Beside each optimum stands what the best simple schedule needs.

The optimum is a constraint program for the CP-SAT solver of OR-Tools; the package reads the table and works without.
Times are scaled to exact whole numbers, or refused. The solver's schedule is simulated again, and that is the value.
Source: Laborie et al. 2018 and CP-SAT (Perron & Furnon) for the model; intervals with NoOverlap per rank and a
reservoir for memory, as in the CP-SAT documentation ("Scheduling").
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import tyro
from ortools.sat.python import cp_model

from dlojz.base.language import refusal, shortest
from dlojz.pipeline.schedule import BACKWARD_INPUT, BACKWARD_WEIGHT, COST_OF, FORWARD, Action, Costs, Schedule
from dlojz.pipeline.shortest_schedule import OBJECTIVES, TABLE, Optimum, Problem, first_guess
from dlojz.pipeline.simulator import UNIT_COSTS, deltas, simulate

_FINEST = 10_000
"""Times are fractions with at most this denominator; memory is counted in such parts of a micro-batch."""
_MARGIN = 1e-6

Key = tuple[str, int, int]
"""(kind, stage, micro-batch)"""


def search(problem: Problem, start: Schedule, time_limit_s: float = 60.0, workers: int | None = None) -> Optimum:
    """Search for the shortest schedule, and prove that it is.

    Args:
        problem: sizes, costs and limits.
        start: a schedule within the memory limit, returned if nothing better is found in time.
        time_limit_s: seconds that the solver has.
        workers: threads of the solver; by default as many as processors, at most 8.

    Raises:
        LabError: for times that are no multiples of a common small fraction.
    """
    model = _Model(problem, start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    solver.parameters.num_workers = workers or min(8, os.cpu_count() or 1)
    solver.parameters.random_seed = 0
    status = solver.solve(model.program)
    best, value = start, problem.value_of(start)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        candidate = model.schedule(solver, start)
        # As simulated, not the solver's scaled number.
        if problem.value_of(candidate) < value:
            best, value = candidate, problem.value_of(candidate)
    # Without a solution the solver may still have proven that there is nothing shorter than its bound.
    bound = max(problem.bound, solver.best_objective_bound / model.scale)
    proven = value <= bound + _MARGIN
    return Optimum(value, proven, value if proven else bound, best, "solver")


class _Model:
    """Variables and constraints of one problem."""

    def __init__(self, problem: Problem, start: Schedule) -> None:
        self.problem, self.program = problem, cp_model.CpModel()
        stages = len(problem.placement)
        times = {kind: problem.costs.per_stage(COST_OF[kind], stages) for kind in problem.kinds}
        delays = {
            (a, b): problem.costs.delay(a, b)
            # Both directions of every boundary.
            for stage_rank, next_rank in zip(problem.placement, problem.placement[1:], strict=False)
            for a, b in ((stage_rank, next_rank), (next_rank, stage_rank))
        }
        self.scale = _scale([value for values in times.values() for value in values] + list(delays.values()))
        self.times = {kind: [round(value * self.scale) for value in values] for kind, values in times.items()}
        self.delays = {link: round(value * self.scale) for link, value in delays.items()}
        timeline = simulate(start, problem.costs)
        # The start is a solution: nothing longer needs to be looked at.
        self.horizon = round(timeline.makespan * self.scale)
        if problem.objective == "span":  # a shorter span may need a longer makespan, but never more than all in a row
            hops = zip(problem.placement, problem.placement[1:], strict=False)
            on_the_way = sum(self.delays[a, b] + self.delays[b, a] for a, b in hops)
            self.horizon = problem.micro_batches * (sum(map(sum, self.times.values())) + on_the_way)
        self.starts: dict[Key, Any] = {}
        self.ends: dict[Key, Any] = {}
        self._intervals()
        self._precedences()
        self._memory()
        self._objective()
        for action, start_time in zip(start.actions, timeline.starts.tolist(), strict=True):
            self.program.add_hint(self.starts[action[:3]], round(start_time * self.scale))

    def _intervals(self) -> None:
        problem = self.problem
        of_rank: list[list[Any]] = [[] for _ in range(problem.ranks)]
        for kind in problem.kinds:
            for stage, rank in enumerate(problem.placement):
                duration = self.times[kind][stage]
                for micro_batch in range(problem.micro_batches):
                    key = (kind, stage, micro_batch)
                    start = self.program.new_int_var(0, self.horizon - duration, f"{stage}{kind}{micro_batch}")
                    of_rank[rank].append(self.program.new_fixed_size_interval_var(start, duration, str(start)))
                    self.starts[key], self.ends[key] = start, start + duration
        for intervals in of_rank:
            self.program.add_no_overlap(intervals)

    def _precedences(self) -> None:
        for (kind, stage, micro_batch), start in self.starts.items():
            if micro_batch:  # micro-batches are alike: each stage takes them in turn
                self.program.add(start >= self.ends[kind, stage, micro_batch - 1])
            needs, delay = self._needs(kind, stage)
            if needs is not None:
                self.program.add(start >= self.ends[*needs, micro_batch] + delay)
            if kind == FORWARD and micro_batch == 0 and self.problem.objective == "span":
                # Ranks begin as soon as they can: the first micro-batch goes straight through.
                self.program.add(start == (self.ends[*needs, 0] + delay if needs else 0))

    def _needs(self, kind: str, stage: int) -> tuple[tuple[str, int] | None, int]:
        """(kind, stage) that an action waits for, and the delay of the message."""
        placement = self.problem.placement
        if kind == BACKWARD_WEIGHT:
            return (BACKWARD_INPUT, stage), 0
        if kind == FORWARD:
            neighbour = stage - 1
        else:
            neighbour = stage + 1
            if neighbour == len(placement):
                return (FORWARD, stage), 0
        if neighbour < 0:
            return None, 0
        return (kind, neighbour), self.delays[placement[neighbour], placement[stage]]

    def _memory(self) -> None:
        problem = self.problem
        if problem.memory_limit is None:
            return
        # Rounded down: the limit is never passed.
        limit = math.floor(problem.memory_limit * _FINEST + _MARGIN)
        for rank in range(problem.ranks):
            times, changes = [], []
            for key, start in self.starts.items():
                action = Action(*key)
                if problem.placement[action.stage] != rank:
                    continue
                for _, at_end, units in deltas(action, rank, problem.costs):
                    # Taken at the start, given back at the end, as the simulator counts.
                    times.append(self.ends[key] if at_end else start)
                    changes.append(round(units * _FINEST))
            self.program.add_reservoir_constraint(times, changes, 0, limit)

    def _objective(self) -> None:
        problem = self.problem
        # The bound as the least length: the solver need not prove it again.
        length = self.program.new_int_var(math.ceil(problem.bound * self.scale - _MARGIN), self.horizon, "length")
        last_micro_batch = problem.micro_batches - 1
        for stage, rank in enumerate(problem.placement):
            begin: Any = 0
            # From the rank's own first forward.
            if problem.objective == "span":
                begin = self.starts[FORWARD, problem.placement.index(rank), 0]
            # A forward ends before its backward: it is never the last.
            for kind in problem.kinds[1:]:
                self.program.add(length >= self.ends[kind, stage, last_micro_batch] - begin)
        self.program.minimize(length)

    def schedule(self, solver: Any, like: Schedule) -> Schedule:
        """The solver's solution as orders."""
        orders: list[list[tuple[int, int, Action]]] = [[] for _ in range(self.problem.ranks)]
        kind_order = {kind: number for number, kind in enumerate(self.problem.kinds)}
        for key, start in self.starts.items():
            action = Action(*key)
            start_time = solver.value(start)
            # At one time (durations of 0) a forward stands before its backward.
            orders[self.problem.placement[action.stage]].append((start_time, kind_order[action.kind], action))
        return like.with_orders([action for _, _, action in sorted(order)] for order in orders)


def _scale(times: list[float]) -> int:
    """What makes all times whole numbers."""
    fractions = [Fraction(time).limit_denominator(_FINEST) for time in times]
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    exact = all(abs(float(fraction) - time) <= 1e-9 for fraction, time in zip(fractions, times, strict=True))
    if scale > _FINEST or not exact:
        raise refusal(
            en=f"the solver needs times that are multiples of a common fraction, 1/{_FINEST} or larger, but "
            f"received {shortest(times[0])} among others: round them, for instance to 0.01.",
            fr=f"le solveur demande des durées multiples d’une même fraction, 1/{_FINEST} ou plus grande, mais a "
            f"reçu {shortest(times[0])} entre autres : arrondissez-les, par exemple à 0,01.",
        )
    return scale


MICRO_BATCHES = 8
UNBALANCED = ((1, 2, 1, 1), (1, 3, 1, 2), (2, 1, 1, 1), (3, 1, 2, 1))
"""Relative times of four stages."""


def problems(ranks: int) -> Iterator[Problem]:
    """All that the table answers."""
    for size in range(1, ranks + 1):
        for micro_batches in range(1, MICRO_BATCHES + 1):
            for split in (False, True):
                for objective in OBJECTIVES:
                    for limit in (*range(1, micro_batches), None):
                        yield Problem(size, micro_batches, UNIT_COSTS, tuple(range(size)), split, limit, objective)
    if ranks < 4:
        return
    for stages in UNBALANCED:
        for latency in (0.0, 1.0):
            times = tuple(2.0 * time for time in stages)
            costs = Costs(forward=times, backward_input=times, backward_weight=times, latency=latency)
            for split in (False, True):
                for limit in (3, 4, 6, None):
                    yield Problem(4, 8, costs, (0, 1, 2, 3), split, limit, "makespan")


def main(ranks: int = 4, seconds: float = 120.0, workers: int = 2, output: Path | None = None) -> int:
    """Prove the optima and write them; exit code 1 where one could not be proven in time.

    Args:
        ranks: the largest number of ranks; below 4 nothing is written unless `output` is given.
        seconds: time limit of each.
        workers: threads of the solver.
        output: where to write; by default the table of the package.
    """
    table: dict[str, object] = {}
    simple = unproven = 0
    print(f"{'problem':44s} {'bound':>6s} {'simple':>6s} {'optimum':>7s} {'seconds':>7s}")
    for problem in problems(ranks):
        start = first_guess(problem)
        guess = problem.value_of(start)
        if guess <= problem.bound + 1e-9:
            simple += 1
            continue
        limit = problem.memory_limit
        key, begin_s = problem.key(limit), time.perf_counter()
        found = search(problem, start, seconds, workers)
        taken_s = time.perf_counter() - begin_s
        mark = "" if found.proven else f"  not proven (at least {found.bound:g})"
        print(f"{key:44s} {problem.bound:6g} {guess:6g} {found.value:7g} {taken_s:7.1f}{mark}", flush=True)
        if not found.proven or key is None:
            unproven += 1
            continue
        orders = ["".join(action.kind for action in order) for order in found.schedule.orders]
        table[key] = {"value": found.value, "orders": orders}
    print(f"{len(table)} optima found by the solver, {simple} met by a simple schedule, {unproven} not proven")
    if output is not None or ranks >= 4:
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(entry)}" for key, entry in table.items())
        (output or TABLE).write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    return 1 if unproven else 0


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
