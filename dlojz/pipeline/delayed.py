"""What stale weights do to training: a small network whose stages each see their own delay, with PipeMare's remedies.

Layer 2. Invariant: the network, its micro-batches and its first weights depend on the seed alone, so that two runs
differ by their delays and remedies only; without any delay this is plain SGD.

Stage i is h ← tanh(h W_i), the last one without tanh; it learns, by the mean squared error, what another network of the
same shape (the teacher) makes of random inputs. Update t of stage i uses a gradient whose forward read the weights
after t − τ_fwd,i updates, and whose backward read those after t − τ_bkwd,i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlojz.pipeline.versions import Audit
from dlojz.schema import LabError
from dlojz.text import say

Matrix = NDArray[np.float64]
DECAY = 0.135
"""D ≈ e⁻², how much of an old change PipeMare's correction still remembers after τ_fwd − τ_bkwd updates."""

_DIVERGED = 1e3


@dataclass(frozen=True)
class Delays:
    """Per stage, in updates of that stage: how old the weights are that its forward and its backward read."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @classmethod
    def none(cls, stages: int) -> Delays:
        """As one process has it: every gradient is fresh."""
        return cls((0,) * stages, (0,) * stages)

    @classmethod
    def of(cls, audit: Audit) -> Delays:
        """As counted in a schedule, once its pipeline is full.

        Raises:
            LabError: if they are no whole numbers, because micro-batches of one update are not equally stale.
        """
        counted = audit.settled_staleness, audit.settled_backward_staleness
        if any(delay != int(delay) for row in counted for delay in row):
            raise LabError(
                say(
                    en=f"the micro-batches of one update are not equally stale here (on average {counted[0]} updates): "
                    "take a schedule that updates after each micro-batch (batch=1).",
                    fr="les micro-batches d’une mise à jour n’ont pas tous le même retard ici (en moyenne "
                    f"{counted[0]} mises à jour) : prenez un ordonnancement qui met à jour après chaque micro-batch "
                    "(batch=1).",
                )
            )
        return cls(tuple(int(delay) for delay in counted[0]), tuple(int(delay) for delay in counted[1]))


@dataclass(frozen=True, eq=False)
class DelayedRun:
    """A training.

    Attributes:
        losses: of each update's micro-batch, with the weights its forward read.
        weights: per stage, after the last update.
        diverged: whether the loss passed 1000, where the run stops.
    """

    losses: NDArray[np.float64]
    weights: tuple[Matrix, ...]
    diverged: bool


@dataclass(frozen=True)
class SmallProblem:
    """Teacher and student of `stages` square weights, and micro-batches of random inputs, all from one seed."""

    stages: int
    width: int = 8
    samples: int = 16
    seed: int = 0

    @cached_property
    def teacher(self) -> list[Matrix]:
        """The weights to be learnt, one [width, width] per stage."""
        return self._weights(0)

    def start(self) -> list[Matrix]:
        """The student's first weights, one [width, width] per stage."""
        return self._weights(1)

    def micro_batch(self, update: int) -> tuple[Matrix, Matrix]:
        """Inputs and targets [samples, width] of an update."""
        x = np.random.default_rng((self.seed, 2, update)).standard_normal((self.samples, self.width))
        return x, forward(self.teacher, x)[-1]

    def _weights(self, which: int) -> list[Matrix]:
        numbers = np.random.default_rng((self.seed, which))
        return [numbers.standard_normal((self.width, self.width)) / self.width**0.5 for _ in range(self.stages)]


def forward(weights: Sequence[Matrix], x: Matrix) -> list[Matrix]:
    """What each stage reads, and the output at the end."""
    read = [x]
    for stage, weight in enumerate(weights):
        out = read[-1] @ weight
        read.append(out if stage == len(weights) - 1 else np.tanh(out))
    return read


def backward(weights: Sequence[Matrix], read: Sequence[Matrix], target: Matrix) -> list[Matrix]:
    """Gradient of the mean squared error for each stage's weights.

    It is the gradient at `weights` only if the forward read the same; if not, it mixes the activations of one version
    with the weights of another, as a pipeline without stashing does.
    """
    gradients = []
    error = 2 * (read[-1] - target) / target.size
    for stage in reversed(range(len(weights))):
        gradients.append(read[stage].T @ error)
        error = (error @ weights[stage].T) * (1 - read[stage] ** 2)  # tanh' = 1 − tanh²; unused below stage 0
    return gradients[::-1]


def train(
    problem: SmallProblem,
    delays: Delays,
    *,
    learning_rate: float,
    updates: int = 300,
    reschedule_over: int | None = None,
    correct: bool = False,
) -> DelayedRun:
    """SGD on a small problem with stale weights; every stage makes `updates` updates.

    Args:
        problem: what is learnt.
        delays: per stage; `Delays.of(version_audit(schedule))`.
        learning_rate: α.
        updates: how many.
        reschedule_over: PipeMare's T1: α_i(k) = α / τ_i^(1 − k/K) for the first K updates: the staler a stage, the
            smaller its first steps. None: not applied.
        correct: PipeMare's T2: the backward reads w − (τ_fwd − τ_bkwd) δ, an estimate of what the forward read, where
            δ is the moving average of the weights' changes, with γ = D^(1 / (τ_fwd − τ_bkwd)).

    Source: Yang et al. 2021, PipeMare (arXiv 1910.05124), §3.1 (T1) and §3.2 (T2).

    Raises:
        LabError: if there are not as many delays as stages, a delay is negative, or the backward reads older weights.
    """
    _check(problem, delays)
    history = [problem.start()]  # [update][stage]
    drift = [np.zeros_like(weight) for weight in history[0]]
    losses: list[float] = []
    for update in range(updates):
        x, target = problem.micro_batch(update)
        read = forward(_old(history, delays.forward), x)
        losses.append(float(np.mean((read[-1] - target) ** 2)))
        if not losses[-1] < _DIVERGED:
            return DelayedRun(np.array(losses), tuple(history[-1]), diverged=True)
        seen = _old(history, delays.backward)
        gaps = [ahead - behind for ahead, behind in zip(delays.forward, delays.backward, strict=True)]
        if correct:
            seen = [weight - gap * change for weight, gap, change in zip(seen, gaps, drift, strict=True)]
        gradients = backward(seen, read, target)
        steps = [learning_rate * _share(delay, update, reschedule_over) for delay in delays.forward]
        history.append([w - step * g for w, step, g in zip(history[-1], steps, gradients, strict=True)])
        for stage, gap in enumerate(gaps):
            keep = DECAY ** (1 / gap) if gap else 0.0
            drift[stage] = keep * drift[stage] + (1 - keep) * (history[-1][stage] - history[-2][stage])
    return DelayedRun(np.array(losses), tuple(history[-1]), diverged=False)


def _old(history: Sequence[Sequence[Matrix]], delays: Sequence[int]) -> list[Matrix]:
    """Each stage's weights as they were so many updates ago (the first ones, before there were that many)."""
    return [history[max(len(history) - 1 - delay, 0)][stage] for stage, delay in enumerate(delays)]


def _share(delay: int, update: int, over: int | None) -> float:
    """T1: 1 / τ^p with p falling from 1 to 0 over the first updates."""
    if over is None or delay <= 1:
        return 1.0
    return float(delay ** -(1 - min(update / over, 1.0)))


def _check(problem: SmallProblem, delays: Delays) -> None:
    pairs = list(zip(delays.forward, delays.backward, strict=False))
    right = len(delays.forward) == len(delays.backward) == problem.stages
    if not right or any(not 0 <= behind <= ahead for ahead, behind in pairs):
        raise LabError(
            say(
                en=f"each of the {problem.stages} stages has two delays, 0 ≤ backward ≤ forward, but {delays.forward} "
                f"(forward) and {delays.backward} (backward) were received.",
                fr=f"chacun des {problem.stages} étages a deux retards, 0 ≤ passe arrière ≤ passe avant, mais "
                f"{delays.forward} (passe avant) et {delays.backward} (passe arrière) ont été reçus.",
            )
        )
