"""How fast schedules are compiled and simulated, on one core, beside torch's own generator of pictures of schedules.

    python benchmarks/pipeline_simulator.py --pairs 30

Each pair is one run of ours and one of torch's (`_schedule_visualizer`: `add_schedule_op_spacing`, which places the
actions of a schedule in time, as compiling and simulating does here), one after the other on the same schedule, so that
the machine's noise falls on both alike. torch's places them with fixed durations, and prints a line for each step,
which is thrown away here.
"""

from __future__ import annotations

import contextlib
import io
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import tyro
from torch.distributed.pipelining._schedule_visualizer import add_schedule_op_spacing, get_schedule_ops

from dlojz.pipeline.orders.synchronous import interleaved, one_f_one_b
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.simulator import simulate

GOAL = 1e6
"""Actions per second that a compiled schedule is simulated with, at least."""
SIZES = ((2, 8), (4, 8), (4, 32), (8, 32), (8, 64))
LARGE = ((8, 64), (8, 512), (16, 1024), (32, 1024))
LATENCY = Costs(latency=0.25)


def seconds(work: Callable[[], Any]) -> float:
    """Processor time of one call: what one core needs, whatever else the machine does."""
    start_s = time.thread_time()
    work()
    return time.thread_time() - start_s


def compiled(schedule: Schedule) -> Schedule:
    """The same schedule, its dependencies found anew."""
    fresh = replace(schedule)
    fresh.graph  # noqa: B018
    return fresh


def throughput(pairs: int) -> bool:
    """Print actions per second for several sizes; whether all medians reach the goal."""
    print(f"{'1F1B, ranks × micro-batches':32s} {'actions':>8s} {'compile':>9s} {'simulate':>9s} {'latency':>9s} both")
    reached = True
    for ranks, micro_batches in LARGE:
        schedule = compiled(one_f_one_b(ranks, micro_batches))
        count = len(schedule.actions)
        rounds = max(5, min(pairs, 600_000 // count))
        taken_s = [
            (
                seconds(lambda: compiled(schedule)),  # noqa: B023
                seconds(lambda: simulate(schedule)),  # noqa: B023
                seconds(lambda: simulate(schedule, LATENCY)),  # noqa: B023
            )
            for _ in range(rounds)
        ]
        compile_s, simulate_s, latency_s = (statistics.median(column) for column in zip(*taken_s, strict=True))
        both_s = statistics.median(row[0] + row[1] for row in taken_s)
        rates = [count / one_s / 1e6 for one_s in (compile_s, simulate_s, latency_s, both_s)]
        reached = reached and min(rates[1:3]) * 1e6 >= GOAL
        shown = " ".join(f"{rate:7.2f} M" for rate in rates)
        print(f"{f'{ranks} × {micro_batches}':32s} {count:8d} {shown}")
    print(f"million actions per second, medians; goal for simulating: {GOAL / 1e6:g} M\n")
    return reached


def beside_torch(pairs: int) -> None:
    """Print paired ratios of torch's time to ours."""
    print(f"{'interleaved, 2 chunks':32s} {'actions':>8s} {'ours':>9s} {'torch':>10s} torch / ours (quartiles)")
    for ranks, micro_batches in SIZES:
        schedule = interleaved(ranks, micro_batches, 2)
        with contextlib.redirect_stdout(io.StringIO()):
            padded = get_schedule_ops("Interleaved1F1B", ranks, micro_batches, 2)
        actions = [[action for action in rank if action is not None] for rank in padded]
        measured = [pair(schedule, actions, ours_first=bool(index % 2)) for index in range(pairs)]
        low, median, high = statistics.quantiles([theirs / ours for ours, theirs in measured], n=4)
        ours_ms, theirs_ms = (1e3 * statistics.median(column) for column in zip(*measured, strict=True))
        size = f"{ranks} × {micro_batches}"
        print(
            f"{size:32s} {len(schedule.actions):8d} {ours_ms:6.2f} ms {theirs_ms:7.2f} ms "
            f"{median:12.1f} ({low:.1f} to {high:.1f})"
        )


def pair(schedule: Schedule, actions: list[list[Any]], ours_first: bool) -> tuple[float, float]:
    """Seconds of ours (compiling and simulating) and of torch's on the same schedule."""
    if ours_first:
        ours_s = seconds(lambda: simulate(compiled(schedule)))
    with contextlib.redirect_stdout(io.StringIO()):
        theirs_s = seconds(lambda: add_schedule_op_spacing([list(rank) for rank in actions]))
    return (ours_s if ours_first else seconds(lambda: simulate(compiled(schedule)))), theirs_s


def main(pairs: int = 20) -> int:
    """Print both tables; exit code 1 where simulating misses the goal.

    Args:
        pairs: runs of each size.
    """
    reached = throughput(pairs)
    beside_torch(pairs)
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
