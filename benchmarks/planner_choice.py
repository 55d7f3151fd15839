"""The planner's choice on this machine: predicted from `dlojz calibrate`'s measurements, held against real steps.

    python benchmarks/planner_choice.py --rounds 8 --figure planner_choice.png --out planner_choice.json

For each model and number of processes, every layout is built on the same forked ranks, and each round runs one step of
each (forward, backward, update), in alternating order, so that the machine's noise falls on all alike; a step is over
when its slowest rank is, and the median of the rounds counts. The micro-benchmark is run before and after them, and
the prediction is the mean of what both say. The choice is the layout of the least predicted step; what it loses is its
measured step over the best measured one.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import tyro

from dlojz import models
from dlojz.config import RunConfig
from dlojz.launch.calibrating import measure_machine
from dlojz.predict.time.local_step import local_step_s
from dlojz.predict.time.measured import Measured
from dlojz.predict.time.measured_site import site
from dlojz.ranks.forks import spmd
from dlojz.schema import LabError
from dlojz.train import engines, loop

GOAL_ERROR, GOAL_LOSS = 0.15, 0.05
WARM = 2
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


def candidates(model: str, ranks: int, batch: int) -> list[RunConfig]:
    """The layouts that this machine can run, of one global batch."""
    each = batch // ranks
    image = models.spec(model).family == "image"
    asked: list[dict[str, Any]]
    if ranks == 1:
        asked = [{"micro_batch": size, "micro_batches": batch // size} for size in (batch, batch // 2, batch // 4)]
        asked.append({"micro_batch": batch, "checkpointing": "full"})
    else:
        asked = [{"dp": ranks, "micro_batch": size, "micro_batches": each // size} for size in (each, each // 2)]
        asked += [{"dp": ranks, "micro_batch": each, "zero": zero} for zero in (2, 3)]
        asked.append({"dp": ranks, "micro_batch": each, "checkpointing": "full"})
        asked.append({"tp": ranks, "micro_batch": batch, "engine": "by_hand" if image else "torch"})
        asked += [
            {"pp": ranks, "micro_batch": batch // number, "micro_batches": number, "partition": "flops"}
            for number in (ranks, 2 * ranks)
        ]
        if ranks == 4:
            asked.append({"dp": 2, "pp": 2, "micro_batch": batch // 4, "micro_batches": 2, "partition": "flops"})
    found = []
    for one in asked:
        try:
            found.append(RunConfig.of(model=model, device="cpu", **one))
        except LabError:  # tp that does not divide the heads
            continue
    return found


def steps(configs: list[RunConfig], rounds: int) -> Callable[[int, int], list[float]]:
    """What each rank runs; gives the median seconds of a step of each layout."""

    def run(rank: int, ranks: int) -> list[float]:
        cpu = torch.device("cpu")
        made = []
        for config in configs:
            engine = engines.build(config, loop.build_model(config), cpu)
            made.append((engine, loop.open_batches(config, engine.axes.dp_rank), config.layout.micro_batches))
        times: list[list[float]] = [[] for _ in made]
        for number in range(rounds + WARM):
            order = list(range(len(made)))
            for place in order if number % 2 else order[::-1]:
                engine, batches, micro_batches = made[place]
                if ranks > 1:
                    dist.barrier()
                start_s = time.perf_counter()
                loop.accumulate(engine, batches, micro_batches, None)
                engine.update()
                took = torch.tensor(time.perf_counter() - start_s, dtype=torch.float64)
                if ranks > 1:
                    dist.all_reduce(took, op=dist.ReduceOp.MAX)
                if number >= WARM:
                    times[place].append(float(took))
        del rank
        return [statistics.median(one) for one in times]

    return run


def predicted_s(machines: list[Measured], config: RunConfig) -> float:
    """Mean of what the measurements before and after say."""
    image = models.spec(config.model).family == "image"
    ranks = config.layout.world_size
    return statistics.mean(local_step_s(site(one, ranks, image=image), config) for one in machines)


def title_of(config: RunConfig) -> str:
    """The layout, short."""
    layout = config.layout
    kept = f", {layout.checkpointing} checkpointing" if layout.checkpointing != "none" else ""
    return f"{layout.title}, {layout.micro_batches} × {layout.micro_batch}{kept}"


def draw(rows: list[Row], path: Path) -> None:
    """Predicted over measured."""
    from dlojz.viz.canvas import finish, new_figure, plain
    from dlojz.viz.palette import BLUE, GREEN, VERMILION

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
    ranks: tuple[int, ...] = (1, 2, 4),
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
        asked = {name: candidates(name, number, batch) for name in names}
        before = measure_machine(sorted({1, number}), device="cpu")
        measured: dict[str, list[float]] = {}
        for name, configs in asked.items():
            answers = spmd(steps(configs, rounds), number, wall_s=300.0, limit_s=120.0)
            if answers[0].error is not None:
                raise SystemExit(f"{name} on {number}: {answers[0].error}")
            measured[name] = answers[0].value
        after = measure_machine(sorted({1, number}), device="cpu")
        for name, configs in asked.items():
            for config, measured_s in zip(configs, measured[name], strict=True):
                rows.append(Row(name, number, title_of(config), predicted_s([before, after], config), measured_s))
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
