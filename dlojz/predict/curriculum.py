"""What each length of a curriculum costs, before anything runs: tokens, FLOPs, bytes of activations.

Layer 3. Invariant: a step with short samples costs what a step of a run of that length costs; its peak in memory is
that of the whole length, from the first whole step on.
"""

from __future__ import annotations

from dataclasses import dataclass

from dlojz.config import RunConfig
from dlojz.curriculum import Stretch, first_whole_step, stretches, total_tokens, whole_length
from dlojz.curriculum_misfit import PLAIN
from dlojz.schema import LabError, one_of


@dataclass(frozen=True)
class LengthCost:
    """One step of one length, on one rank.

    Args:
        stretch: the length and its steps.
        step_tokens: tokens of the global batch.
        step_flops: floating-point operations of one rank.
        activations_bytes: most bytes of activations that one rank holds at once.
    """

    stretch: Stretch
    step_tokens: int
    step_flops: float
    activations_bytes: int


@dataclass(frozen=True)
class CurriculumCost:
    """What a run with a curriculum costs one rank, length by length.

    Args:
        config: the run.
        lengths: in turn.
        peak_bytes: of one rank, in the steps that take most: the whole ones.
        peak_step: the first of them, from 0.
    """

    config: RunConfig
    lengths: tuple[LengthCost, ...]
    peak_bytes: int
    peak_step: int

    @property
    def total_tokens(self) -> int:
        """Tokens that the run reads, over all replicas."""
        return total_tokens(self.config)

    @property
    def total_flops(self) -> float:
        """Floating-point operations of one rank in the whole run."""
        return sum(one.step_flops * one.stretch.num_steps for one in self.lengths)

    def relative_cost(self, length: int) -> float:
        """FLOPs of a step of this length over those of a whole one, from 0 to 1.

        Below `length / sequence_length`, as attention costs the square of the length.

        Raises:
            LabError: if no step has this length.
        """
        by_length = {one.stretch.length: one.step_flops for one in self.lengths}
        if length not in by_length:
            raise LabError(one_of("length", length, [str(known) for known in by_length]))
        return by_length[length] / by_length[whole_length(self.config)]


def at_length(config: RunConfig, length: int) -> RunConfig:
    """The run whose every step costs what a step of this length costs: without curriculum, of short samples.

    Raises:
        LabError: if the run reads images, or nothing is that short.
    """
    whole_length(config)
    return RunConfig.from_dict({**config.to_dict(), **PLAIN, "curriculum": "none", "sequence_length": length})


def curriculum_cost(config: RunConfig, rank: int = 0) -> CurriculumCost:
    """Predict what each length of a run's curriculum costs one rank; without one, there is one length.

    Args:
        config: a run on text.
        rank: from 0 to the world size.

    Raises:
        LabError: if the run reads images or the rank does not exist.
    """
    from dlojz.predict.compute import step_flops
    from dlojz.predict.forecast import forecast

    found = stretches(config)
    costs = []
    for stretch in found:
        plain = at_length(config, stretch.length)
        costs.append(
            LengthCost(
                stretch,
                step_tokens=config.layout.global_batch * stretch.length,
                step_flops=step_flops(plain, rank),
                activations_bytes=forecast(plain, rank).memory.activations_bytes or 0,
            )
        )
    return CurriculumCost(
        config,
        tuple(costs),
        peak_bytes=forecast(config, rank).memory.peak_bytes or 0,
        peak_step=first_whole_step(config),
    )
