"""Trials of one process: forms of the update, and a curriculum against full lengths.

**Forms** train the same model on the same batch in turns: in each round every form makes one step, and a round begins
with another form, so that a slow moment of the machine slows all of them. Ratios within a round are compared. Source:
Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), which compares iteration times.

**Curriculum**: the decoder on real text, every step observed. With and without curriculum the same samples come in the
same order, and the loss on held-out text is that of whole samples; observing takes no part in the seconds of a step.
Source: Li et al. 2021 (arXiv 2108.06084), who compare spikes of the loss with the norm and the largest number of Adam's
√v.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Subset

from dlojz.base.display_hook import bar
from dlojz.base.files import write_atomic
from dlojz.base.language import refusal
from dlojz.by_hand.optimizers.in_backward import gradient_bytes_at_most
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import AT_ONCE, IN_PASSES, length_at, whole_length
from dlojz.data.datasets import ProseWindows
from dlojz.data.sampling import CutToLength, MicroBatchSampler, micro_batches
from dlojz.models.blocks import mean_loss
from dlojz.prediction import predict
from dlojz.prediction.shapes import ModelShapes, model_shapes
from dlojz.results.footprint import Footprint
from dlojz.results.record import HeldOutLoss, Trajectory
from dlojz.train.engines import base
from dlojz.train.engines.base import Engine
from dlojz.train.loop import accumulate, build_model, choose_device, open_batches
from dlojz.train.probes import TRACED_STEPS, Probes

FORMS = (*AT_ONCE, *IN_PASSES)


@dataclass(frozen=True)
class FormMeasure:
    """Measurement of one form of the update of one model.

    Attributes:
        model: name in the catalogue.
        form: as `RunConfig.update`.
        parameters: Ψ.
        tensors: number of parameter tensors.
        update_s: median seconds of the update alone; None where it is within the passes.
        step_s: median seconds of the whole step.
        update_ratio: median over the rounds of the update's seconds over those of the first form; None as above.
        step_ratio: the same of the whole step; then its quartiles.
        step_ratio_low: a quarter of the rounds were below.
        step_ratio_high: a quarter were above.
        predicted_peak_bytes: on the CPU; None on a GPU, whose forecast asks for its name.
        measured_peak_bytes: by the probe, in the third step.
        predicted_gradient_bytes: gradients that are there at once, at most.
        rounds: timed steps of each form.
        device: CPU or the GPU's name.
    """

    model: str
    form: str
    parameters: int
    tensors: int
    update_s: float | None
    step_s: float
    update_ratio: float | None
    step_ratio: float
    step_ratio_low: float
    step_ratio_high: float
    predicted_peak_bytes: int | None
    measured_peak_bytes: int
    predicted_gradient_bytes: int
    rounds: int
    device: str


class _Trained:
    """Training with one form: its engine, stepped on one batch."""

    def __init__(self, config: RunConfig, batch: Any) -> None:
        self.config = config
        self.device = choose_device(config, 0)
        probes = Probes(config, 0, self.device)
        probes.start()
        try:
            self.engine = base.build(config, build_model(config), self.device)
            probes.attach(self.engine)
            for step in range(TRACED_STEPS):
                probes.start_step(step)
                # Copies, as a loader makes them: what is traced goes with its step.
                copies = (tuple(tensor.clone() for tensor in batch) for _ in repeat(None))
                accumulate(self.engine, copies, config.layout.micro_batches, probes)
                self.engine.update()
                probes.end_step()
        finally:
            probes.close()
        footprint = probes.footprint(0)
        assert isinstance(footprint, Footprint)
        self.peak_bytes = footprint.memory.peak_bytes or 0
        probes.clock.detach(self.engine)
        self.batches = repeat(tuple(tensor.to(self.device) for tensor in batch))
        self.steps_s: list[float] = []
        self.updates_s: list[float] = []

    def step(self) -> None:
        """Make one step, timed."""
        start_s = self._now()
        accumulate(self.engine, self.batches, self.config.layout.micro_batches, None)
        between_s = self._now()
        self.engine.update()
        end_s = self._now()
        self.steps_s.append(end_s - start_s)
        self.updates_s.append(end_s - between_s)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def measure_forms(config: RunConfig, forms: Sequence[str] = FORMS, rounds: int = 30) -> list[FormMeasure]:
    """Train one model under several forms of the update, in turns.

    Args:
        config: a run on one process; its `update` is set to each of the forms.
        forms: ratios are to the first of them.
        rounds: steps of each form, at least 1; three more are traced before.

    Raises:
        LabError: if the run has several processes, or a form does not go with it.
    """
    if config.layout.world_size > 1 or rounds < 1:
        raise refusal(
            en="forms are compared on one process in at least one round, but "
            f"{config.layout.degrees} and rounds={rounds} were received.",
            fr="on compare les formes sur un processus en au moins un tour, mais "
            f"{config.layout.degrees} et rounds={rounds} ont été reçus.",
        )
    steps = max(config.steps, TRACED_STEPS)
    configs = [RunConfig(**{**config.to_dict(), "update": form, "steps": steps}) for form in forms]
    batch = next(open_batches(config, 0))
    trained = [_Trained(form_config, batch) for form_config in configs]
    for number in range(rounds):
        offset = number % len(trained)
        for training in (*trained[offset:], *trained[:offset]):
            training.step()
    shapes = model_shapes(config)
    return [_measure(training, trained[0], shapes) for training in trained]


def _measure(training: _Trained, baseline: _Trained, shapes: ModelShapes) -> FormMeasure:
    config, on_cpu = training.config, training.device.type == "cpu"
    ratios = [own_s / its_s for own_s, its_s in zip(training.steps_s, baseline.steps_s, strict=True)]
    # One round has no quartiles: its ratio stands for all three.
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    after = config.update not in IN_PASSES
    updates = [own_s / its_s for own_s, its_s in zip(training.updates_s, baseline.updates_s, strict=True)]
    modules: dict[str, list[int]] = {}
    for parameter in shapes.parameters:
        modules.setdefault(parameter.module, []).append(parameter.numel)
    # Gradients that are there at once: a module's where backward updates, else all.
    together = modules.values() if config.update == "in_backward" else [[shapes.num_parameters]]
    return FormMeasure(
        model=config.model,
        form=config.update,
        parameters=shapes.num_parameters,
        tensors=len(shapes.parameters),
        update_s=statistics.median(training.updates_s) if after else None,
        step_s=statistics.median(training.steps_s),
        update_ratio=statistics.median(updates) if after and baseline.config.update not in IN_PASSES else None,
        step_ratio=middle,
        step_ratio_low=low,
        step_ratio_high=high,
        predicted_peak_bytes=predict(config).memory.peak_bytes if on_cpu else None,
        measured_peak_bytes=training.peak_bytes,
        predicted_gradient_bytes=gradient_bytes_at_most(together),
        rounds=len(ratios),
        device="CPU" if on_cpu else torch.cuda.get_device_name(training.device),
    )


def write_measures(path: str | Path, measures: Sequence[FormMeasure]) -> None:
    """Write measurements as JSON."""
    write_atomic(Path(path), json.dumps([asdict(measure) for measure in measures], indent=1) + "\n")


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
