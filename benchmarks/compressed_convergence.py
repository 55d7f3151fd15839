"""Optimizers that send one bit per number beside those that send everything: the loss each ends with, over five seeds.

    python benchmarks/compressed_convergence.py --figure convergence.png --out convergence.json
    python benchmarks/compressed_convergence.py --tasks text --seeds 3 --steps 200

Each training is the lab's own, on two real ranks (gloo): the same weights and samples for all optimizers of a seed; a
quarter of the steps is the first stage, the learning rate is constant. What is judged is the mean of the last tenth of
the steps, its median over the seeds against that of the optimizer that sends everything: within 2 %.

`digits` is three epochs of vit_tiny, 32 digits a step, down to a loss of about 0.4: near 0 no relative gap means
anything. `text` is gpt_tiny, byte by byte, which sees no sample twice. The learning rates are those at which a first
stage of a quarter is long enough. At three times these (digits, `--rate`), gradients still change much after it: what
is lost then is lost by the frozen variance, whatever is sent.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.by_hand.optimizers.convergence import TOLERANCE, Curves, gap, reference_of
from dlojz.config.optimizers import COMPRESSED
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.training_figures import convergence_figure, optimizer_label
from dlojz.runnable import check_runnable

WALL_S: Final = 3600.0
LIMIT_S: Final = 300.0


def train_losses(configs: Sequence[RunConfig], *, wall_s: float = WALL_S) -> list[tuple[float, ...]]:
    """Losses of every training, step by step, all on the same ranks: started once, and not once for each.

    Args:
        configs: trainings on one number of ranks, on this machine's CPU, without pipelines.
        wall_s: seconds after which the ranks are stopped.

    Returns:
        For each training the mean loss of the global batch in every step; where it diverged, NaN from there on.

    Raises:
        LabError: without a training, for different numbers of ranks, or if a rank fails.
    """
    from dlojz.processes.forks import spmd

    sizes = {one.layout.world_size for one in configs}
    if len(sizes) != 1 or any(one.layout.pp > 1 or one.device == "cuda" for one in configs):
        raise LabError(
            say(
                en="trainings are laid beside each other on one number of ranks, on the CPU and with pp=1, but "
                f"{len(configs)} on {sorted(sizes)} ranks were received.",
                fr="des entraînements se comparent sur un même nombre de rangs, sur le CPU et avec pp=1, mais "
                f"{len(configs)} sur {sorted(sizes)} rangs ont été reçus.",
            )
        )
    for config in configs:
        check_runnable(config)
    answers = spmd(_in_series(configs), sizes.pop(), wall_s=wall_s, limit_s=LIMIT_S)
    failed = next((one for one in answers if one.error is not None), None)
    if failed is not None and failed.error is not None:
        why = failed.error.message or failed.error.name or failed.error.kind
        raise LabError(
            say(
                en=f"rank {failed.rank} could not train: {why}.",
                fr=f"le rang {failed.rank} n’a pas pu entraîner : {why}.",
            )
        )
    return [tuple(math.nan if loss is None else loss for loss in one) for one in answers[0].value]


def _in_series(configs: Sequence[RunConfig]) -> Callable[[int, int], Any]:
    """What each rank runs."""

    def run(rank: int, ranks: int) -> list[list[float | None]]:
        import torch
        import torch.distributed as dist

        from dlojz.train import loop
        from dlojz.train.engines import base

        torch.set_num_threads(1)
        found: list[list[float | None]] = []
        for config in configs:
            engine = base.build(config, loop.build_model(config), torch.device("cpu"))
            batches = loop.open_batches(config, engine.axes.dp_rank)
            losses: list[float | None] = []
            for _ in range(config.steps):
                loss = loop.accumulate(engine, batches, config.layout.micro_batches, None).detach().clone()
                if ranks > 1:
                    # Who: all ranks. What: the loss of their batch, summed. How much: 4 bytes per step.
                    dist.all_reduce(loss)
                mean = float(loss) / ranks
                if not math.isfinite(mean):
                    break
                losses.append(mean)
                engine.update()
            found.append(losses + [None] * (config.steps - len(losses)))
            engine.close()
        return found

    return run


TASKS: dict[str, dict[str, Any]] = {
    "digits": {"model": "vit_tiny", "image_size": 32, "micro_batch": 16},
    "text": {"model": "gpt_tiny", "sequence_length": 32, "micro_batch": 4},
}
FAMILIES: dict[str, tuple[str, ...]] = {
    "adam": ("adamw", "one_bit_adam", "zero_one_adam"),
    "lamb": ("lamb", "one_bit_lamb"),
}
RATES: dict[tuple[str, str], float] = {
    ("digits", "adam"): 1e-4,
    ("digits", "lamb"): 1e-3,
    ("text", "adam"): 1e-3,
    ("text", "lamb"): 1e-2,
}
MOST_STEPS = {"digits": 168}
"""Of a task whose loss would else come near 0."""


def config_of(task: str, family: str, optimizer: str, seed: int, steps: int, rate: float) -> RunConfig:
    """One training."""
    return RunConfig.of(
        **TASKS[task],
        **{"optimizer": optimizer, "learning_rate": rate or RATES[task, family], "seed": seed},
        **{"steps": min(steps, MOST_STEPS.get(task, steps)), "engine": "by_hand", "dp": 2, "device": "cpu"},
    )


def curves_of_family(task: str, family: str, seeds: int, steps: int, rate: float, bar: Progress) -> list[Curves]:
    """Train all of one family, seed by seed."""
    found = []
    for optimizer in FAMILIES[family]:
        configs = [config_of(task, family, optimizer, seed, steps, rate) for seed in range(seeds)]
        job = bar.add_task(f"{task}, {optimizer_label(optimizer)}", total=seeds)
        losses = []
        for config in configs:
            losses += train_losses([config])
            bar.advance(job)
        frozen_at = configs[0].warmup_steps if optimizer in COMPRESSED else None
        found.append(Curves(optimizer, tuple(losses), frozen_at))
    return found


def table_of(rows: dict[str, list[Curves]]) -> Table:
    """Final losses and gaps."""
    table = Table("task", "optimizer", "final loss", "gap", "seed by seed")
    for title, curves in rows.items():
        for one in curves:
            reference = reference_of(one, curves)
            words = ["", ""]
            if reference is not None:
                found = gap(one, reference)
                each = " ".join(f"{100 * value:+.1f}" for value in found.seeds)
                words = [f"{100 * found.medians:+.2f} %", f"{each} (median {100 * found.paired:+.2f})"]
            table.add_row(title, optimizer_label(one.optimizer), f"{one.median():.4f}", *words)
    return table


def main(
    seeds: int = 5,
    steps: int = 300,
    tasks: tuple[str, ...] = tuple(TASKS),
    families: tuple[str, ...] = tuple(FAMILIES),
    rate: float = 0.0,
    figure: Path | None = None,
    out: Path | None = None,
) -> int:
    """Print what each optimizer ends with, and how far it is from the one that sends everything; 1 if beyond 2 %.

    Args:
        seeds: trainings of each optimizer.
        steps: of each training; digits takes 168 at most.
        tasks: digits, text.
        families: adam, lamb.
        rate: learning rate of all; 0 for each family's own.
        figure: picture to write.
        out: JSON file for the losses.
    """
    rows: dict[str, list[Curves]] = {}
    with Progress(console=Console(stderr=True)) as bar:
        for task in tasks:
            for family in families:
                chosen = rate or RATES[task, family]
                title = f"{task}, {TASKS[task]['model']}, learning rate {chosen:g}"
                rows[title] = curves_of_family(task, family, seeds, steps, rate, bar)
    Console().print(table_of(rows))
    print(f"load {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    if figure is not None:
        convergence_figure(rows, figure)
    if out is not None:
        kept = {
            title: [{"optimizer": one.optimizer, "frozen_at": one.frozen_at, "losses": one.losses} for one in curves]
            for title, curves in rows.items()
        }
        out.write_text(json.dumps(kept, indent=1), "utf-8")
    found = [gap(one, other) for curves in rows.values() for one in curves if (other := reference_of(one, curves))]
    return 0 if all(one.within(TOLERANCE) for one in found) else 1


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
