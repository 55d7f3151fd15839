"""The planner's choice on this machine: predicted from `dlojz calibrate`'s measurements, held against real steps.

    python benchmarks/planner_choice.py --rounds 8 --figure planner_choice.png --out planner_choice.json

For each model and number of processes, the planner's best layout of every kind (degrees, ZeRO stage, engine,
recomputation) is built on the same forked ranks, and each round runs one step of each (forward, backward, update), in
alternating order, so that the machine's noise falls on all alike; a step is over when its slowest rank is, and the
median of the rounds counts. The micro-benchmark is run before and after them, and the
prediction is the mean of what both say. The choice is the layout of the least predicted step; what it loses is its
measured step over the best measured one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

import tyro

from dlojz.config.run_config import RunConfig
from dlojz.cost_model.measured_machine import Measured, local_step_s
from dlojz.planner.this_machine import LocalChoice, plan_here
from dlojz.running.measure import measure_machine, measure_steps

GOAL_ERROR, GOAL_LOSS = 0.15, 0.05
MODELS = ("coatnet_tiny", "gpt_tiny", "llama_tiny")


class Row(NamedTuple):
    """A layout, predicted and measured."""

    model: str
    ranks: int
    title: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        """Relative to the measurement."""
        return self.predicted_s / self.measured_s - 1


def candidates(model: str, ranks: int, batch: int, machine: Measured) -> tuple[LocalChoice, ...]:
    """The planner's best layout of every kind."""
    return plan_here(model, ranks, batch, measured=machine).kinds()


def predicted_s(machines: list[Measured], config: RunConfig) -> float:
    """Mean of what the measurements before and after say."""
    return statistics.mean(local_step_s(one, config) for one in machines)


def draw(rows: list[Row], path: Path) -> None:
    """Predicted over measured."""
    from dlojz.display.canvas import finish, new_figure, plain
    from dlojz.display.style import BLUE, GREEN, VERMILION

    figure = new_figure(7.0, 5.6, alt="Predicted against measured steps on this machine.")
    axes = figure.subplots()
    for color, marker, model in zip((BLUE, VERMILION, GREEN), "os^", MODELS, strict=False):
        for ranks, filled in ((1, "none"), (2, color), (4, "#dddddd")):
            own = [row for row in rows if row.model == model and row.ranks == ranks]
            axes.scatter([1e3 * row.measured_s for row in own], [1e3 * row.predicted_s for row in own], marker=marker,
                         facecolors=filled, edgecolors=color, label=f"{model}, {ranks}" if own else None)  # fmt: skip
    values = [1e3 * value for row in rows for value in (row.predicted_s, row.measured_s)]
    ends = [0.8 * min(values), 1.25 * max(values)]
    axes.plot(ends, ends, color="#444444", linewidth=0.8)
    axes.fill_between(ends, [0.85 * end for end in ends], [1.15 * end for end in ends], color="#eeeeee", zorder=0)
    axes.set_xscale("log")
    axes.set_yscale("log")
    ticks = [tick for tick in (20, 50, 100, 200, 500, 1000, 2000) if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("measured step, ms (grey band: ± 15 %)")
    axes.set_ylabel("predicted step, ms")
    plain(axes)
    axes.legend(frameon=False, fontsize=8)
    finish(figure, path)


def main(
    rounds: int = 8,
    batch: int = 16,
    ranks: tuple[int, ...] = (2, 4),
    names: tuple[str, ...] = MODELS,
    figure: Path | None = None,
    out: Path | None = None,
) -> int:
    """Print predicted and measured steps, and what the choice loses; exit code 1 where a goal is missed.

    Args:
        rounds: steps of each layout.
        batch: samples of one step.
        ranks: numbers of processes.
        names: of the models.
        figure: picture to write.
        out: JSON file for the rows.
    """
    rows: list[Row] = []
    loads = [os.getloadavg()[0]]
    for number in ranks:
        before = measure_machine(sorted({1, 2, number}), device="cpu")
        asked = {name: candidates(name, number, batch, before) for name in names}
        measured = {name: measure_steps([one.config for one in some], rounds) for name, some in asked.items()}
        after = measure_machine(sorted({1, 2, number}), device="cpu")
        for name, some in asked.items():
            for one, measured_s in zip(some, measured[name], strict=True):
                rows.append(Row(name, number, one.title, predicted_s([before, after], one.config), measured_s))
        loads.append(os.getloadavg()[0])
    losses: dict[str, float] = {}
    print(f"global batch {batch}, {rounds} rounds, load {', '.join(f'{load:.1f}' for load in loads)}")
    for name in names:
        for number in ranks:
            some = [row for row in rows if (row.model, row.ranks) == (name, number)]
            chosen = min(some, key=lambda row: row.predicted_s)
            best = min(some, key=lambda row: row.measured_s)
            losses[f"{name}, {number}"] = chosen.measured_s / best.measured_s - 1
            print(f"\n{name}, {number} process(es)     predicted  measured  error")
            for row in sorted(some, key=lambda row: row.measured_s):
                mark = "*" if row is chosen else " "
                print(f" {mark} {row.title:58s} {1e3 * row.predicted_s:7.1f} {1e3 * row.measured_s:7.1f} ms "
                      f"{100 * row.error:+5.0f} %")  # fmt: skip
            print(f"   the choice (*) takes {100 * losses[f'{name}, {number}']:.1f} % longer than the best")
    error = statistics.median(abs(row.error) for row in rows)
    worst = max(losses.values())
    print(f"\nmedian error {100 * error:.1f} % (goal {100 * GOAL_ERROR:.0f}), the choices lose {100 * worst:.1f} % at "
          f"most (goal {100 * GOAL_LOSS:.0f})")  # fmt: skip
    if figure is not None:
        draw(rows, figure)
    if out is not None:
        out.write_text(json.dumps({"rows": [row._asdict() for row in rows], "losses": losses}, indent=1), "utf-8")
    return 0 if error <= GOAL_ERROR and worst <= GOAL_LOSS else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
