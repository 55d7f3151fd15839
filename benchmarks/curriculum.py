"""The decoder on real text with and without a sequence-length curriculum: loss against tokens and time, and Adam's √v.

    python benchmarks/curriculum.py --seeds 3 --tokens 120000 --out curriculum.json --figure curriculum.png

Each seed is trained once per pacing and learning rate, in turn, until the same number of tokens was read; the loss is
that of whole samples of text that is not trained on. Spikes are steps whose training loss is 1.2 times the smallest
before it; √v is Adam's running root mean square of the gradients, whose L1 norm and largest number Li et al. 2021
(arXiv 2108.06084) lay beside the spikes. The second learning rate is aggressive, so that instability can show.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import tyro

from dlojz.base.files import write_atomic
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.display.figures.training_figures import curriculum_figure
from dlojz.prediction.compute import curriculum_cost
from dlojz.results.record import SPIKE, Trajectory
from dlojz.train.trials import train_trial

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
    costs = curriculum_cost(ones[0].config)
    measured = [one.seconds_by_length() for one in ones]
    whole = max(measured[0])
    print("length  predicted FLOPs  measured seconds (median of the seeds), over a whole step")
    found = {}
    for one in costs.lengths:
        length = one.stretch.length
        ratio = statistics.median(times[length] / times[whole] for times in measured)
        found[length] = {"predicted": costs.relative_cost(length), "measured": ratio}
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
    figure: Path | None = None
    """picture of the last learning rate"""
    redraw: Path | None = None
    """a JSON file of before, to print and draw without training"""
    language: str = "en"
    """of the figure, en or fr"""


def main(asked: Asked) -> int:
    """Print losses, spikes and √v by learning rate and pacing, and the cost of each length."""
    torch.set_num_threads(1)
    use_language(asked.language)
    if asked.redraw is not None:
        told = json.loads(asked.redraw.read_text(encoding="utf-8"))["trials"]
        trials = {
            float(rate): {arm: [Trajectory.from_dict(one) for one in ones] for arm, ones in by_arm.items() if ones}
            for rate, by_arm in told.items()
        }
    else:
        sizes = {"batch": asked.batch, "sequence_length": asked.sequence_length, "pacing_steps": asked.steps}
        trials = train_all(asked.arms, asked.rates, asked.seeds, asked.tokens, keep=partial(keep, asked.out), **sizes)
    results = table(trials)
    last = list(trials.values())[-1]
    grown = [one for ones in last.values() for one in ones if one.config.curriculum != "none"]
    costs = lengths([one for one in grown if one.config.curriculum == grown[0].config.curriculum]) if grown else {}
    keep(asked.out, trials, results=results, lengths=costs)
    if asked.figure is not None:
        predicted = {length: both["predicted"] for length, both in costs.items()}
        curriculum_figure(last, predicted=predicted, path=asked.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Asked)))
