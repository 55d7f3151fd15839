"""Make the table of proven optima, `dlojz/pipeline/optimum_table.json`, so that labs need no solver.

    python benchmarks/pipeline_optimum.py            # all of it, into the package
    python benchmarks/pipeline_optimum.py --ranks 3  # only up to 3 ranks, printed, nothing written

Unit costs, up to 4 ranks and 8 micro-batches, whole and split backward, makespan and span, every memory limit; and a
few unbalanced cases that the course shows. What a simple schedule reaches because it meets the lower bound is not
stored: it is found again in no time. Beside each optimum stands what the best simple schedule needs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import tyro

from benchmarks.optimum_solver import search
from dlojz.pipeline.optimum.shortest_schedule import OBJECTIVES, TABLE, Problem, first_guess
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.simulator import UNIT_COSTS

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
