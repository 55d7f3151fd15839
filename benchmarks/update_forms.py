"""The forms of an update, each model's in one run: seconds as paired ratios, peak measured beside predicted.

    python benchmarks/update_forms.py --rounds 30 --out update_forms

In each round every form makes one step, the first one in turn; ratios are to `for_loop` in the same round, with their
median. Models of many small tensors (coatnet_tiny, vit_ti_16) and of few large ones (alexnet). Prints the table and
writes OUT.json. Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), which compares iteration times.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch
import tyro

from dlojz.base.files import write_atomic
from dlojz.base.language import refusal
from dlojz.by_hand.optimizers.in_backward import gradient_bytes_at_most
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import AT_ONCE, IN_PASSES
from dlojz.prediction import predict
from dlojz.prediction.shapes import ModelShapes, model_shapes
from dlojz.results.footprint import Footprint
from dlojz.train.engines import base
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


def write_measures(path: Path, measures: Sequence[FormMeasure]) -> None:
    """Write measurements as JSON."""
    write_atomic(path, json.dumps([asdict(measure) for measure in measures], indent=1) + "\n")


MODELS = {
    "coatnet_tiny": {"image_size": 32, "micro_batch": 4},
    "vit_ti_16": {"image_size": 64, "micro_batch": 2},
    "alexnet": {"image_size": 64, "micro_batch": 1},
}


def row(one: FormMeasure) -> str:
    """One line of the table."""
    update = "      –        –" if one.update_s is None else f"{1e3 * one.update_s:7.2f}  {one.update_ratio:7.3f}"
    step = f"{1e3 * one.step_s:8.2f}  {one.step_ratio:6.3f} [{one.step_ratio_low:.3f}, {one.step_ratio_high:.3f}]"
    predicted = one.predicted_peak_bytes
    beside = "" if predicted is None else f"{predicted / 1e6:9.2f}  {predicted / one.measured_peak_bytes - 1:+7.2%}"
    gradients = f"{one.predicted_gradient_bytes / 1e6:8.2f}"
    return f"{one.form:<12} {update}  {step}  {one.measured_peak_bytes / 1e6:9.2f} {beside}  {gradients}"


def main(rounds: int = 30, optimizer: str = "adamw", threads: int = 1, device: str = "auto", out: str = "") -> None:
    """Measure, print and keep.

    Args:
        rounds: steps of each form.
        optimizer: sgd, momentum or adamw.
        threads: of torch on the CPU.
        device: auto, cpu or cuda.
        out: path without ending; nothing is written where it is empty.
    """
    torch.set_num_threads(threads)
    measures = []
    for model, fields in MODELS.items():
        config = RunConfig.of(model=model, optimizer=optimizer, device=device, learning_rate=1e-5, **fields)
        found = measure_forms(config, FORMS, rounds)
        gc.collect()
        measures += found
        print(f"\n{model}: {found[0].parameters / 1e6:.2f} M parameters in {found[0].tensors} tensors, {optimizer}, "
              f"{rounds} rounds, {found[0].device}")  # fmt: skip
        print("form          update ms   ratio   step ms   ratio [quartiles]      peak MB  predicted   error  grad. MB")
        for one in found:
            print(row(one))
    if out:
        write_measures(Path(f"{out}.json"), measures)


if __name__ == "__main__":
    tyro.cli(main)
