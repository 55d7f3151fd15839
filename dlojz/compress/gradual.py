"""Gradual pruning: the sparsity rises along a cubic, fast while there is much to remove, slowly at the end.

Layer 2. Invariant: masks only grow: what has gone stays gone, so the sparsity that is measured after a renewal is the
schedule's, to the weight.

Source: Zhu and Gupta 2017, "To prune, or not to prune" (arXiv 1710.01878), equation 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from dlojz.compress import masks
from dlojz.schema import LabError
from dlojz.text import say


def cubic_sparsity(
    step: int, *, final: float, initial: float = 0.0, begin: int = 0, every: int = 1, renewals: int
) -> float:
    """The sparsity wanted at a step: s_f + (s_i − s_f) (1 − (t − t₀) / (n Δt))³, constant before and after.

    Args:
        step: t, updates made so far.
        final: s_f.
        initial: s_i.
        begin: t₀, the step at which it begins.
        every: Δt, steps from one renewal of the masks to the next.
        renewals: n, how many there are.

    Source: Zhu and Gupta 2017, equation 1.

    Example:
        >>> [round(cubic_sparsity(t, final=0.8, every=10, renewals=4), 4) for t in (0, 10, 20, 30, 40, 50)]
        [0.0, 0.4625, 0.7, 0.7875, 0.8, 0.8]
    """
    share = min(max((step - begin) / (renewals * every), 0.0), 1.0)
    return final + (initial - final) * (1 - share) ** 3


@dataclass(frozen=True)
class CubicSchedule:
    """When masks are renewed, and to which sparsity.

    Args:
        final: sparsity at the end, from 0 to below 1.
        initial: sparsity at the beginning.
        begin: step at which it begins.
        every: steps from one renewal to the next, at least 1.
        renewals: how many after the first, at least 1.

    Raises:
        LabError: if one of them is out of its range.
    """

    final: float
    initial: float = 0.0
    begin: int = 0
    every: int = 10
    renewals: int = 10

    def __post_init__(self) -> None:
        masks.check_sparsity(self.final)
        masks.check_sparsity(self.initial)
        for name, least in (("begin", 0), ("every", 1), ("renewals", 1)):
            value = getattr(self, name)
            if value < least:
                raise LabError(
                    say(
                        en=f"{name} must be at least {least}, but {value} was received.",
                        fr=f"{name} doit être au moins égal à {least}, mais {value} a été reçu.",
                    )
                )
        if self.initial > self.final:
            raise LabError(
                say(
                    en=f"a gradual pruning removes more and more, but its sparsity was to go from {self.initial} down "
                    f"to {self.final}; give an initial one that is not above the final one.",
                    fr=f"un élagage graduel retire de plus en plus, mais sa part de zéros devrait descendre de "
                    f"{self.initial} à {self.final} ; donnez une valeur initiale qui ne dépasse pas la finale.",
                )
            )

    def sparsity(self, step: int) -> float:
        """The sparsity wanted at a step."""
        return cubic_sparsity(step, final=self.final, initial=self.initial, begin=self.begin, every=self.every,
                              renewals=self.renewals)  # fmt: skip

    def renews(self, step: int) -> bool:
        """Whether the masks are renewed after this step."""
        return self.begin <= step <= self.end and (step - self.begin) % self.every == 0

    @property
    def end(self) -> int:
        """Step of the last renewal."""
        return self.begin + self.renewals * self.every

    @staticmethod
    def over(steps: int, final: float, every: int = 10, pruned_share: float = 0.35) -> CubicSchedule:
        """A schedule for a training of so many steps: pruned first, while the learning rate is high, then left alone.

        Args:
            steps: of the training.
            final: sparsity at the end.
            every: steps between renewals; fewer where the training is too short for one.
            pruned_share: of the steps, until the last renewal.
        """
        room = max(int(pruned_share * steps), 1)
        every = max(1, min(every, room))
        return CubicSchedule(final=final, every=every, renewals=max(room // every, 1))


@dataclass
class GradualPruning:
    """What `fit` calls after every step: renews the masks of a model that is held when the schedule says so.

    Args:
        model: held by `masks.hold`.
        schedule: when, and to which sparsity.
        per_layer: see `masks.magnitude_masks`.
        measured: (step, share of zeros) after each renewal.
    """

    model: nn.Module
    schedule: CubicSchedule
    per_layer: bool = False
    measured: list[tuple[int, float]] = field(default_factory=list)

    def __call__(self, step: int) -> None:
        """Follow one update."""
        if not self.schedule.renews(step):
            return
        # Of the masked weights: what is zero is the smallest there is, and stays.
        sparsity, own = self.schedule.sparsity(step), masks.weights(self.model)
        masks.renew(self.model, masks.magnitude_masks(own, sparsity, per_layer=self.per_layer))
        removed, total = masks.removed_and_all(self.model)
        self.measured.append((step, removed / total))
