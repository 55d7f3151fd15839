"""Optimizers that send one bit per number beside those that send everything: the loss each ends with, over five seeds.

    python benchmarks/compressed_convergence.py --out convergence.json
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
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tyro
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, say
from dlojz.config.optimizers import COMPRESSED, OPTIMIZERS
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.run_figures import optimizer_label
from dlojz.runnable import check_runnable

LAST_SHARE = 10
"""The final loss is the mean of the last of so many parts of the steps."""
TOLERANCE = 0.02
"""Largest relative gap of a compressed optimizer's final loss above the uncompressed one's: the lab's choice."""


@dataclass(frozen=True)
class Curves:
    """Losses of one optimizer, over some seeds.

    Args:
        optimizer: its name in `RunConfig`, or any other.
        losses: for each seed the loss of every step, equally many; NaN from where it diverged.
        frozen_at: the first step with a frozen variance; None where there is none.

    Raises:
        LabError: without losses, or if two seeds have not as many.
    """

    optimizer: str
    losses: tuple[tuple[float, ...], ...]
    frozen_at: int | None = None

    def __post_init__(self) -> None:
        counts = [len(seed_losses) for seed_losses in self.losses]
        if not counts or min(counts) < 1 or len({*counts}) != 1:
            raise refusal(
                en=f"the curves of {self.optimizer!r} need at least one seed, and as many steps of each, but "
                f"{counts} steps were received.",
                fr=f"les courbes de {self.optimizer!r} demandent au moins une graine, et autant de pas pour "
                f"chacune, mais {counts} pas ont été reçues.",
            )

    @property
    def steps(self) -> int:
        """Steps of each training."""
        return len(self.losses[0])

    @property
    def window(self) -> int:
        """Steps over which a loss is averaged: the last tenth of the training, at least one."""
        return max(1, self.steps // LAST_SHARE)

    def smoothed(self) -> list[list[float]]:
        """Average the losses of each seed over the `window` steps up to each step, or fewer at the start."""
        return [
            [statistics.fmean(seed_losses[max(0, end - self.window) : end]) for end in range(1, self.steps + 1)]
            for seed_losses in self.losses
        ]

    def final(self) -> list[float]:
        """Average the losses of each seed over the last tenth of the steps; infinite where it diverged."""
        means = (statistics.fmean(seed_losses[-self.window :]) for seed_losses in self.losses)
        # A NaN would compare False with everything; infinity is worse than any loss.
        return [mean if math.isfinite(mean) else math.inf for mean in means]

    def median(self) -> float:
        """Median over the seeds of `final`."""
        return statistics.median(self.final())


@dataclass(frozen=True)
class LossGap:
    """Relative gap between the final losses of two optimizers: 0.01 is one percent more.

    Args:
        medians: between the medians over the seeds.
        seeds: of each seed by itself.
    """

    medians: float
    seeds: tuple[float, ...]

    @property
    def paired(self) -> float:
        """Median of the seeds' gaps: of two trainings that differ in nothing else."""
        return statistics.median(self.seeds)

    def within(self, tolerance: float = TOLERANCE) -> bool:
        """Whether the median is at most so much above the other's; below it is no fault."""
        return self.medians <= tolerance


def gap(curves: Curves, reference: Curves) -> LossGap:
    """Compute the gap between the final losses of some curves and of a reference.

    Raises:
        LabError: if they are not of as many seeds.
    """
    # One final loss per seed, in the same order on both sides.
    ours, theirs = curves.final(), reference.final()
    if len(ours) != len(theirs):
        raise refusal(
            en=f"{curves.optimizer!r} and {reference.optimizer!r} are compared seed by seed, but {len(ours)} and "
            f"{len(theirs)} seeds were received.",
            fr=f"{curves.optimizer!r} et {reference.optimizer!r} se comparent graine par graine, mais {len(ours)} "
            f"et {len(theirs)} graines ont été reçues.",
        )
    # ∞ where only these curves diverged in a seed, NaN where both did.
    seeds = tuple(loss / reference_loss - 1 for loss, reference_loss in zip(ours, theirs, strict=True))
    return LossGap(curves.median() / reference.median() - 1, seeds)


def reference_of(curves: Curves, all_curves: Sequence[Curves]) -> Curves | None:
    """Find the curves of the uncompressed optimizer; None where there are none."""
    uncompressed = OPTIMIZERS[curves.optimizer].baseline if curves.optimizer in COMPRESSED else None
    return next((candidate for candidate in all_curves if candidate.optimizer == uncompressed), None)


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
    out: Path | None = None,
) -> int:
    """Print what each optimizer ends with, and how far it is from the one that sends everything; 1 if beyond 2 %.

    Args:
        seeds: trainings of each optimizer.
        steps: of each training; digits takes 168 at most.
        tasks: digits, text.
        families: adam, lamb.
        rate: learning rate of all; 0 for each family's own.
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
