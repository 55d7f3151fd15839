"""The decoder on real text in this process, every step watched: what a curriculum changes, and what it does not.

Layer 3. Invariant: with and without curriculum the same samples come in the same order, and the loss on text that is
not trained on is that of whole samples; watching takes no part in the seconds of a step.

Source: Li et al. 2021 (arXiv 2108.06084), who lay the spikes of the loss beside the norm and the largest number of
Adam's √v.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from dlojz.config import RunConfig
from dlojz.curriculum import length_at, whole_length
from dlojz.data.lengths import CutToLength
from dlojz.data.sampling import MicroBatchSampler, micro_batches
from dlojz.data.text import Prose
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train.engines.base import Engine, mean_loss
from dlojz.train.loop import build_model
from dlojz.trajectory import HeldOut, Trajectory

HELD_OUT_SHARE = 10
"""One sample in so many, at the end of the text, is not trained on."""
EVALUATIONS = 20
"""Times that the loss on text that is not trained on is asked, at the same numbers of tokens for all trials."""
EVALUATED = 64
"""Samples of it that are asked, from its begin to its end."""

Tell = Callable[[int, int, float], None]
"""Called after each step with its number, the tokens read so far and its loss."""


def train_trial(
    config: RunConfig, *, tokens: int | None = None, evaluations: int = EVALUATIONS, tell: Tell | None = None
) -> Trajectory:
    """Train on the lab's prose and keep every step's loss, seconds and √v.

    Args:
        config: a text model on one process with optimizer adamw.
        tokens: train until so many were read, so that trials with and without curriculum can be compared; by default
            the run's own steps.
        evaluations: how often the loss on other text is asked, at least 1.
        tell: called after each step.

    Raises:
        LabError: if the run is not one process with adamw on the lab's prose.
    """
    _check(config)
    whole = whole_length(config)
    prose = Prose(whole)
    trained = len(prose) - len(prose) // HELD_OUT_SHARE
    engine = Engine(config, build_model(config), torch.device("cpu"))
    batches = _batches(config, prose, trained)
    asked = [prose[index] for index in _spread(trained, len(prose), EVALUATED)]
    goal = tokens or 0
    every = max(1, (goal or config.steps * config.layout.global_batch * whole) // evaluations)
    told: dict[str, list[float]] = {name: [] for name in ("losses", "step_s", "variance_norm", "variance_max")}
    counts: list[int] = []
    held_out = [HeldOut(step=0, tokens=0, seconds=0.0, loss=_evaluate(engine.module, asked))]
    step, read, diverged = 0, 0, False
    while (read < goal) if goal else (step < config.steps):
        start_s = time.perf_counter()
        loss = _step(engine, batches)
        step_s = time.perf_counter() - start_s
        if not math.isfinite(loss):
            diverged = True
            break
        counts.append(batches.take_tokens())
        norm, largest = variance_of(engine.optimizer)
        for name, value in zip(told, (loss, step_s, norm, largest), strict=True):
            told[name].append(value)
        step, read = step + 1, read + counts[-1]
        if read // every > (read - counts[-1]) // every:
            held = _evaluate(engine.module, asked)
            if math.isfinite(held):
                held_out.append(HeldOut(step=step, tokens=read, seconds=sum(told["step_s"]), loss=held))
        if tell is not None:
            tell(step, read, loss)
    return Trajectory(
        config=config,
        lengths=tuple(length_at(config, number) for number in range(step)),
        tokens=tuple(counts),
        held_out=tuple(held_out),
        diverged=diverged,
        **{name: tuple(values) for name, values in told.items()},
    )


def variance_of(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """L1 norm and largest number of √v, v being Adam's running mean of the squared gradients.

    Returns:
        The sum of all √v, and the largest; both 0 before the first step.

    Source: Li et al. 2021 (arXiv 2108.06084), whose "variance norm" and "variance max" these are.
    """
    roots = [state["exp_avg_sq"].sqrt() for state in optimizer.state.values() if "exp_avg_sq" in state]
    if not roots:
        return 0.0, 0.0
    return float(sum(float(root.sum()) for root in roots)), max(float(root.max()) for root in roots)


def _check(config: RunConfig) -> None:
    layout = config.layout
    if layout.world_size == 1 and config.optimizer == "adamw" and config.data == "text" and config.precision == "fp32":
        return
    raise LabError(
        say(
            en="a trial is one process with optimizer='adamw', data='text', precision='fp32', but "
            f"{config.title}, optimizer={config.optimizer!r}, data={config.data!r}, precision={config.precision!r} "
            "was received: change these.",
            fr="un essai est un processus avec optimizer='adamw', data='text', precision='fp32', mais "
            f"{config.title}, optimizer={config.optimizer!r}, data={config.data!r}, precision={config.precision!r} "
            "a été reçu : changez-les.",
        )
    )


def _batches(config: RunConfig, prose: Prose, trained: int) -> CutToLength:
    layout = config.layout
    sampler = MicroBatchSampler(
        trained, micro_batch=layout.micro_batch, global_batch=layout.global_batch, seed=config.seed
    )
    whole = micro_batches(Subset(prose, range(trained)), sampler)
    return CutToLength(whole, lambda step: length_at(config, step), micro_batches=layout.micro_batches)


def _step(engine: Engine, batches: Iterator[tuple[Tensor, Tensor]]) -> float:
    losses = []
    for number in range(engine.config.layout.micro_batches):
        last = number == engine.config.layout.micro_batches - 1
        loss = engine.forward(*next(batches), last=last)
        engine.backward(loss, last=last)
        losses.append(float(loss.detach()))
    engine.update()
    return sum(losses) / len(losses)


def _spread(first: int, after: int, wanted: int) -> list[int]:
    """At most so many numbers from `first` to `after`, evenly spread."""
    wanted = min(wanted, after - first)
    return [first + number * (after - first) // wanted for number in range(wanted)]


@torch.no_grad()
def _evaluate(model: nn.Module, asked: list[tuple[Tensor, Tensor]]) -> float:
    inputs, targets = (torch.stack(column) for column in zip(*asked, strict=True))
    return float(mean_loss(model(inputs), targets))
