"""The decoder on real text with and without a sequence-length curriculum: loss against tokens and time, and Adam's √v.

    python benchmarks/curriculum.py --seeds 3 --tokens 120000 --out curriculum.json

Each seed is trained once per pacing and learning rate, in turn, until the same number of tokens was read; the loss is
that of whole samples of text that is not trained on. Spikes are steps whose training loss is 1.2 times the smallest
before it; √v is Adam's running root mean square of the gradients, whose L1 norm and largest number Li et al. 2021
(arXiv 2108.06084) lay beside the spikes. The second learning rate is aggressive, so that instability can show.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate as running
from pathlib import Path
from typing import Literal, Self

import torch
import tyro
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.utils.data import Subset

from dlojz.base.contract import Contract
from dlojz.base.display_hook import bar
from dlojz.base.files import write_atomic
from dlojz.base.language import refusal
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import PLAIN, length_at, stretches, whole_length
from dlojz.data.datasets import CutToLength, MicroBatchSampler, ProseWindows, micro_batches
from dlojz.models.blocks import mean_loss
from dlojz.prediction.compute import step_flops
from dlojz.train.engines.base import Engine
from dlojz.train.loop import accumulate, build_model

SPIKE = 1.2
"""A step is a spike where its loss is so many times the smallest before it.

Source: Li et al. 2021 (arXiv 2108.06084), whose loss ratio this is."""


class HeldOutLoss(Contract):
    """Loss on text that is not trained on, at the whole length whatever the length of the step."""

    step: int = Field(ge=0, description="steps done before")
    tokens: int = Field(ge=0, description="tokens read before")
    seconds: float = Field(ge=0, description="seconds of the steps done before")
    loss: float


class Trajectory(Contract):
    """Trajectory of one training on text, step by step; all series have one entry per step."""

    schema_version: Literal[1] = 1
    config: RunConfig
    lengths: tuple[int, ...] = Field(description="tokens per sample")
    tokens: tuple[int, ...] = Field(description="tokens of the global batch")
    step_s: tuple[float, ...] = Field(description="seconds of the step")
    losses: tuple[float, ...] = Field(description="training loss, on samples of the step's own length")
    variance_norm: tuple[float, ...] = Field((), description="L1 norm of Adam's √v after the step; empty: not recorded")
    variance_max: tuple[float, ...] = Field((), description="largest number of Adam's √v after the step")
    diverged: bool = Field(False, description="whether it ended with a loss that is no number")
    held_out: tuple[HeldOutLoss, ...] = Field((), description="losses on text that is not trained on")

    @model_validator(mode="after")
    def _of_one_length(self) -> Self:
        steps = len(self.losses)
        series = {name: len(getattr(self, name)) for name in ("lengths", "tokens", "step_s")}
        series |= {name: len(getattr(self, name)) or steps for name in ("variance_norm", "variance_max")}
        for name, entries in series.items():
            if entries != steps:
                raise refusal(
                    en=f"a trajectory of {steps} losses has {entries} {name}: give one of each per step.",
                    fr=f"une trajectoire de {steps} pertes a {entries} {name} : donnez-en une par pas.",
                )
        return self

    @property
    def tokens_read(self) -> tuple[int, ...]:
        """Tokens read by the end of each step."""
        return tuple(running(self.tokens))

    @property
    def loss_ratios(self) -> tuple[float, ...]:
        """Divide each loss by the smallest before it; 1 for the first. Above 1 the training went back.

        Source: Li et al. 2021 (arXiv 2108.06084).
        """
        if not self.losses:
            return ()
        # Shifted by one step: each loss over the smallest up to the step before.
        smallest = running(self.losses, min)
        return (1.0, *(loss / minimum for loss, minimum in zip(self.losses[1:], smallest, strict=False)))

    def spikes(self, ratio: float = SPIKE) -> tuple[int, ...]:
        """List the steps whose loss ratio is above so much."""
        return tuple(step for step, step_ratio in enumerate(self.loss_ratios) if step_ratio > ratio)

    def seconds_by_length(self) -> dict[int, float]:
        """Compute the median seconds of a step of each length."""
        by_length: dict[int, list[float]] = {}
        for length, step_s in zip(self.lengths, self.step_s, strict=True):
            by_length.setdefault(length, []).append(step_s)
        return {length: statistics.median(times) for length, times in sorted(by_length.items())}


HELD_OUT_SHARE = 10
"""One sample in so many, at the end of the text, is held out."""
EVALUATIONS = 20
"""Evaluations of the held-out loss, at the same numbers of tokens for all trials."""
EVALUATED = 64
"""Held-out samples that are evaluated, evenly spread."""

Tell = Callable[[int, int, float], None]
"""Receives each step's number, the tokens read so far and its loss."""


def train_trial(
    config: RunConfig, *, tokens: int | None = None, evaluations: int = EVALUATIONS, tell: Tell | None = None
) -> Trajectory:
    """Train on the lab's prose and record every step's loss, seconds and √v.

    Args:
        config: a text model on one process with optimizer adamw.
        tokens: train until so many were read, to compare trials with and without curriculum; by default the run's
            steps.
        evaluations: of the held-out loss, at least 1.

    Raises:
        LabError: if the run is not one process with adamw on the lab's prose.
    """
    _check(config)
    full_length = whole_length(config)
    prose = ProseWindows(full_length)
    # Windows from this number on are held out.
    trained = len(prose) - len(prose) // HELD_OUT_SHARE
    engine = Engine(config, build_model(config), torch.device("cpu"))
    batches = _batches(config, prose, trained)
    held_out_samples = [prose[index] for index in _spread(trained, len(prose), EVALUATED)]
    goal = tokens or 0
    tokens_per_evaluation = max(1, (goal or config.steps * config.layout.global_batch * full_length) // evaluations)
    columns: dict[str, list[float]] = {name: [] for name in ("losses", "step_s", "variance_norm", "variance_max")}
    counts: list[int] = []
    # Before any update: where all trials begin.
    held_out = [HeldOutLoss(step=0, tokens=0, seconds=0.0, loss=_evaluate(engine.module, held_out_samples))]
    step, tokens_read, diverged = 0, 0, False
    show = bar(goal or config.steps)
    while (tokens_read < goal) if goal else (step < config.steps):
        start_s = time.perf_counter()
        loss = float(accumulate(engine, batches, config.layout.micro_batches, None))
        engine.update()
        step_s = time.perf_counter() - start_s
        if not math.isfinite(loss):
            diverged = True  # this step is in no list
            show(goal or config.steps)
            break
        counts.append(batches.take_tokens())
        norm, largest = variance_of(engine.optimizer)
        for name, value in zip(columns, (loss, step_s, norm, largest), strict=True):
            columns[name].append(value)
        step, tokens_read = step + 1, tokens_read + counts[-1]
        # This step has passed a multiple of it.
        if tokens_read // tokens_per_evaluation > (tokens_read - counts[-1]) // tokens_per_evaluation:
            held_out_loss = _evaluate(engine.module, held_out_samples)
            if math.isfinite(held_out_loss):
                held_out.append(
                    HeldOutLoss(step=step, tokens=tokens_read, seconds=sum(columns["step_s"]), loss=held_out_loss)
                )
        show(tokens_read if goal else step)
        if tell is not None:
            tell(step, tokens_read, loss)
    return Trajectory(
        config=config,
        lengths=tuple(length_at(config, number) for number in range(step)),
        tokens=tuple(counts),
        held_out=tuple(held_out),
        diverged=diverged,
        **{name: tuple(values) for name, values in columns.items()},
    )


def variance_of(optimizer: torch.optim.Optimizer) -> tuple[float, float]:
    """Compute the sum and the largest of all √v, v being Adam's running mean of the squared gradients; else 0.

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
    raise refusal(
        en="a trial is one process with optimizer='adamw', data='text', precision='fp32', but "
        f"{config.title}, optimizer={config.optimizer!r}, data={config.data!r}, precision={config.precision!r} "
        "was received: change these.",
        fr="un essai est un processus avec optimizer='adamw', data='text', precision='fp32', mais "
        f"{config.title}, optimizer={config.optimizer!r}, data={config.data!r}, precision={config.precision!r} "
        "a été reçu : changez-les.",
    )


def _batches(config: RunConfig, prose: ProseWindows, trained: int) -> CutToLength:
    layout = config.layout
    sampler = MicroBatchSampler(
        trained, micro_batch=layout.micro_batch, global_batch=layout.global_batch, seed=config.seed
    )
    batches = micro_batches(Subset(prose, range(trained)), sampler)
    return CutToLength(batches, lambda step: length_at(config, step), micro_batches=layout.micro_batches)


def _spread(start: int, after: int, count: int) -> list[int]:
    """At most so many numbers from `start` to `after`, evenly spread."""
    count = min(count, after - start)
    return [start + number * (after - start) // count for number in range(count)]


@torch.no_grad()
def _evaluate(model: nn.Module, samples: list[tuple[Tensor, Tensor]]) -> float:
    inputs, targets = (torch.stack(column) for column in zip(*samples, strict=True))
    return float(mean_loss(model(inputs), targets))


ARMS: dict[str, dict[str, object]] = {
    "none": {},
    "linear": {"curriculum": "linear"},
    "root": {"curriculum": "root"},
}
Trials = dict[float, dict[str, list[Trajectory]]]


def config_of(arm: str, rate: float, seed: int, *, batch: int, sequence_length: int, pacing_steps: int) -> RunConfig:
    """One training; its number of steps only bounds that of the pacing."""
    fields = dict(ARMS[arm])
    if fields:
        fields |= {"curriculum_start": 8, "curriculum_steps": pacing_steps}
    return RunConfig.of(
        model="gpt_tiny",
        sequence_length=sequence_length,
        micro_batch=batch,
        steps=pacing_steps,
        learning_rate=rate,
        seed=seed,
        device="cpu",
        **fields,
    )


def correlation(ones: Sequence[Trajectory], name: str) -> float | None:
    """Pearson's r of the loss ratio and a series of √v over all steps; None where one of them does not vary."""
    ratios = [ratio for one in ones for ratio in one.loss_ratios]
    values = [value for one in ones for value in getattr(one, name)]
    try:
        return statistics.correlation(ratios, values)
    except statistics.StatisticsError:
        return None


def summary(ones: Sequence[Trajectory]) -> dict[str, object]:
    """Medians over the seeds, and what is counted over all."""
    found: dict[str, object] = {
        "held_out_loss": statistics.median(one.held_out[-1].loss for one in ones),
        "steps": len(ones[0].losses),
        "tokens": ones[0].tokens_read[-1],
        "seconds": statistics.median(sum(one.step_s) for one in ones),
        "spikes": [len(one.spikes()) for one in ones],
        "largest_loss_ratio": max(max(one.loss_ratios) for one in ones),
        "variance_max": max(max(one.variance_max) for one in ones),
        "variance_norm": max(max(one.variance_norm) for one in ones),
        "diverged": sum(one.diverged for one in ones),
    }
    for name in ("variance_norm", "variance_max"):
        found[f"correlation_{name}"] = correlation(ones, name)
    return found


def table(trials: Trials) -> dict[str, dict[str, object]]:
    """Print one line per learning rate and pacing; returns what it says."""
    print(
        f"{'rate':>7s} {'pacing':8s} {'loss':>6s} {'steps':>6s} {'ktokens':>8s} {'s':>7s} {f'spikes > {SPIKE}':>14s} "
        f"{'ratio':>6s} {'max √v':>8s} {'Σ √v':>7s}  r(ratio, max)  r(ratio, Σ)"
    )
    results: dict[str, dict[str, object]] = {}
    for rate, arms in trials.items():
        for arm, ones in arms.items():
            one = summary(ones)
            results[f"{rate:g} {arm}"] = one
            shown = [
                "    —" if one[f"correlation_{name}"] is None else f"{one[f'correlation_{name}']:5.2f}"
                for name in ("variance_max", "variance_norm")
            ]
            thousands = ones[0].tokens_read[-1] / 1e3
            print(
                f"{rate:7g} {arm:8s} {one['held_out_loss']:6.3f} {one['steps']:6d} {thousands:8.1f} "
                f"{one['seconds']:7.1f} {one['spikes']!s:>14s} {one['largest_loss_ratio']:6.2f} "
                f"{one['variance_max']:8.4f} {one['variance_norm']:7.1f}  {shown[0]:>13s}  {shown[1]:>11s}"
            )
    return results


def lengths(ones: Sequence[Trajectory]) -> dict[int, dict[str, float]]:
    """Print and return, by length, a step's predicted FLOPs and measured seconds, both over those of a whole one."""
    config = ones[0].config
    plain = {**config.to_dict(), **PLAIN, "curriculum": "none"}
    flops = {
        stretch.length: step_flops(RunConfig.from_dict({**plain, "sequence_length": stretch.length}))
        for stretch in stretches(config)
    }
    measured = [one.seconds_by_length() for one in ones]
    whole = max(measured[0])
    print("length  predicted FLOPs  measured seconds (median of the seeds), over a whole step")
    found = {}
    for length, length_flops in flops.items():
        ratio = statistics.median(times[length] / times[whole] for times in measured)
        found[length] = {"predicted": length_flops / flops[whole], "measured": ratio}
        print(f"{length:6d}  {found[length]['predicted']:15.3f}  {ratio:16.3f}")
    return found


def _tell(what: str, step: int, read: int, loss: float) -> None:
    if step % 10 == 0:
        print(f"\r{what}: {read:,} tokens, loss {loss:.3f} ", end="", file=sys.stderr)


def train_all(
    arms: Sequence[str],
    rates: Sequence[float],
    seeds: int,
    tokens: int,
    *,
    keep: Callable[[Trials], None],
    **sizes: int,
) -> Trials:
    """All trainings, the pacings of one seed one after the other, so that the machine's noise falls on all."""
    trials: Trials = {rate: {arm: [] for arm in arms} for rate in rates}
    for seed in range(seeds):
        for rate in rates:
            for arm in arms if seed % 2 == 0 else reversed(arms):
                config = config_of(arm, rate, seed, **sizes)
                told = partial(_tell, f"seed {seed}, rate {rate:g}, {arm}")
                trials[rate][arm].append(train_trial(config, tokens=tokens, tell=told))
                print(file=sys.stderr)
                keep(trials)
    return trials


def keep(out: Path | None, trials: Trials, **told: object) -> None:
    """Write what was trained so far, where a file was asked for."""
    if out is None:
        return
    kept = {
        rate: {arm: [one.to_dict() for one in ones] for arm, ones in by_arm.items()} for rate, by_arm in trials.items()
    }
    write_atomic(out, json.dumps({**told, "trials": kept}))


@dataclass(frozen=True)
class Asked:
    """What is trained, and where it goes."""

    seeds: int = 3
    """trainings of each"""
    tokens: int = 120_000
    """that each training reads"""
    arms: tuple[str, ...] = ("none", "linear")
    """pacings, out of none, linear, root"""
    rates: tuple[float, ...] = (0.003, 0.02, 0.05)
    """learning rates"""
    batch: int = 8
    """samples per step"""
    sequence_length: int = 128
    """tokens of a whole sample"""
    steps: int = 100
    """steps of the pacing"""
    out: Path | None = None
    """JSON file for the trajectories and the table"""


def main(asked: Asked) -> int:
    """Print losses, spikes and √v by learning rate and pacing, and the cost of each length."""
    torch.set_num_threads(1)
    sizes = {"batch": asked.batch, "sequence_length": asked.sequence_length, "pacing_steps": asked.steps}
    trials = train_all(asked.arms, asked.rates, asked.seeds, asked.tokens, keep=partial(keep, asked.out), **sizes)
    results = table(trials)
    last = list(trials.values())[-1]
    grown = [one for ones in last.values() for one in ones if one.config.curriculum != "none"]
    costs = lengths([one for one in grown if one.config.curriculum == grown[0].config.curriculum]) if grown else {}
    keep(asked.out, trials, results=results, lengths=costs)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Asked)))
