"""How long the panel takes from a moved slider to the new drawing, and the matplotlib figure of the same schedule.

    python benchmarks/pipeline_redraw.py --ranks 8 --micro-batches 32

The panel is the real one, moved by its own controls: building the schedule, checking, simulating, bounds, critical
path, memory, and the SVG that is sent to the page are all within the time; what the browser then takes is not.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import tyro

from dlojz.display.pipeline_drawing import schedule_figure
from dlojz.display.widgets.pipeline_panel import PipelinePanel
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import Timeline, simulate

GOAL_S = 0.1
SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved", "chimera")


def main(ranks: int = 8, micro_batches: int = 32, moves: int = 15, figures: int = 3) -> int:
    """Print medians and quartiles; exit code 1 where 1F1B's redraw misses the goal.

    Args:
        ranks: number of ranks.
        micro_batches: micro-batches of a step.
        moves: slider moves timed per schedule, after two that are not.
        figures: matplotlib figures timed per schedule.
    """
    print(f"{ranks} ranks, {micro_batches} micro-batches; ms: median (quartiles)")
    print(f"{'schedule':<14}{'actions':>8}  {'panel, latency moved':<26}{'SVG, KiB':>9}  {'figure to PNG':<24}")
    met = True
    for name in SCHEDULES:
        panel = PipelinePanel(schedule=name, ranks=ranks, micro_batches=micro_batches)
        slider = panel.controls["latency"]
        moved_s = [timed(partial(setattr, slider, "value", 0.05 * step)) for step in range(1, moves + 3)][2:]
        timeline = simulate(build(name, ranks, micro_batches))
        drawn_s = [timed(partial(drawn, timeline)) for _ in range(figures)]
        size = len(panel.shown.value) / 1024
        actions = len(timeline.schedule.actions)
        print(f"{name:<14}{actions:>8}  {spread(moved_s):<26}{size:>9.0f}  {spread(drawn_s):<24}")
        if name == SCHEDULES[0]:
            met = statistics.median(moved_s) <= GOAL_S
    print(f"goal: the panel's 1f1b in {1e3 * GOAL_S:g} ms or less: {'met' if met else 'missed'}")
    return 0 if met else 1


def drawn(timeline: Timeline) -> None:
    """The matplotlib figure, rendered as a notebook does."""
    schedule_figure(timeline)._repr_mimebundle_()


def timed(work: Callable[[], object]) -> float:
    """Seconds that it takes."""
    begun_s = time.perf_counter()
    work()
    return time.perf_counter() - begun_s


def spread(times_s: list[float]) -> str:
    """Median and quartiles in milliseconds."""
    low, _, high = statistics.quantiles(times_s, n=4)
    return f"{1e3 * statistics.median(times_s):.1f} ({1e3 * low:.1f} to {1e3 * high:.1f})"


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
