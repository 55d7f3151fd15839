"""Compare the final losses of optimizers, seed by seed: from the same weights, over the same samples.

The final loss is the mean of the last tenth of the steps, since one batch says little.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dlojz.base.language import refusal
from dlojz.config.optimizers import COMPRESSED, OPTIMIZERS
from dlojz.results.record import RunRecord

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


def curves_of(records: Sequence[RunRecord]) -> list[Curves]:
    """Collect the losses of recorded runs, one optimizer after the other, in the order of the seeds.

    Args:
        records: of one task; of each optimizer and seed the first one counts.

    Raises:
        LabError: if two seeds of an optimizer have not as many steps.
    """
    runs_by_optimizer: dict[str, dict[int, RunRecord]] = {}
    for record in records:
        runs_by_optimizer.setdefault(record.config.optimizer, {}).setdefault(record.config.seed, record)
    curves = []
    for optimizer, by_seed in runs_by_optimizer.items():
        # In the order of the seeds: `gap` pairs curves by position.
        seed_runs = [by_seed[seed] for seed in sorted(by_seed)]
        # The variance freezes as the warm-up ends.
        frozen_at = seed_runs[0].config.warmup_steps if optimizer in COMPRESSED else None
        curves.append(Curves(optimizer, tuple(record.losses for record in seed_runs), frozen_at))
    return curves
