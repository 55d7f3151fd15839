"""The forms of one update, measured beside each other: the whole step, the update alone, the peak as predicted.

Layer 3. Invariant: all forms train the same model on the same batch, on one process, in turns: in each round every form
makes one step, and each round begins with another form, so that what slows the machine down slows all of them. What is
compared are the ratios within a round.

Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), which compares iteration times.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from dlojz.config import RunConfig
from dlojz.footprint import Footprint
from dlojz.optim.in_backward import gradient_bytes_at_most
from dlojz.optimizer_update import AT_ONCE, IN_PASSES
from dlojz.predict import predict
from dlojz.predict.shapes import ModelShapes, model_shapes
from dlojz.record import write_atomic
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train import engines
from dlojz.train.loop import accumulate, build_model, choose_device, open_batches
from dlojz.train.probes.probes import TRACED_STEPS, Probes

FORMS = (*AT_ONCE, *IN_PASSES)


@dataclass(frozen=True)
class FormMeasure:
    """One form of the update of one model.

    Args:
        model: name in the catalogue.
        form: as `RunConfig.update`.
        parameters: Ψ.
        tensors: into how many the parameters are divided.
        update_s: median seconds of the update alone; None where it is within the passes.
        step_s: median seconds of the whole step.
        update_ratio: median over the rounds of the update's seconds over those of the first form; None as above.
        step_ratio: the same of the whole step; then its quartiles.
        step_ratio_low: a quarter of the rounds were below.
        step_ratio_high: a quarter were above.
        predicted_peak_bytes: on the CPU; None on a GPU, whose forecast asks for its name.
        measured_peak_bytes: by the probe, in the third step.
        predicted_gradient_bytes: gradients that are there at once, at most.
        rounds: how many steps of each form were timed.
        device: what computed.
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
    """One form in training: its engine, stepped on one batch."""

    def __init__(self, config: RunConfig, batch: Any) -> None:
        self.config = config
        self.device = choose_device(config, 0)
        probes = Probes(config, 0, self.device)
        probes.start()
        try:
            self.engine = engines.build(config, build_model(config), self.device)
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
        """One step, timed."""
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
        raise LabError(
            say(
                en="forms are compared on one process in at least one round, but "
                f"{config.layout.degrees} and rounds={rounds} were received.",
                fr="on compare les formes sur un processus en au moins un tour, mais "
                f"{config.layout.degrees} et rounds={rounds} ont été reçus.",
            )
        )
    least = max(config.steps, TRACED_STEPS)
    configs = [RunConfig(**{**config.to_dict(), "update": form, "steps": least}) for form in forms]
    batch = next(open_batches(config, 0))
    trained = [_Trained(each, batch) for each in configs]
    for number in range(rounds):
        first = number % len(trained)
        for one in (*trained[first:], *trained[:first]):
            one.step()
    shapes = model_shapes(config)
    return [_measure(one, trained[0], shapes) for one in trained]


def _measure(one: _Trained, first: _Trained, shapes: ModelShapes) -> FormMeasure:
    config, on_cpu = one.config, one.device.type == "cpu"
    ratios = [own_s / its_s for own_s, its_s in zip(one.steps_s, first.steps_s, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else 3 * ratios
    after = config.update not in IN_PASSES
    updates = [own_s / its_s for own_s, its_s in zip(one.updates_s, first.updates_s, strict=True)]
    modules: dict[str, list[int]] = {}
    for parameter in shapes.parameters:
        modules.setdefault(parameter.module, []).append(parameter.numel)
    together = modules.values() if config.update == "in_backward" else [[shapes.num_parameters]]
    return FormMeasure(
        model=config.model,
        form=config.update,
        parameters=shapes.num_parameters,
        tensors=len(shapes.parameters),
        update_s=statistics.median(one.updates_s) if after else None,
        step_s=statistics.median(one.steps_s),
        update_ratio=statistics.median(updates) if after and first.config.update not in IN_PASSES else None,
        step_ratio=middle,
        step_ratio_low=low,
        step_ratio_high=high,
        predicted_peak_bytes=predict(config).memory.peak_bytes if on_cpu else None,
        measured_peak_bytes=one.peak_bytes,
        predicted_gradient_bytes=gradient_bytes_at_most(together),
        rounds=len(ratios),
        device="CPU" if on_cpu else torch.cuda.get_device_name(one.device),
    )


def write_measures(path: str | Path, measures: Sequence[FormMeasure]) -> None:
    """Keep measurements as JSON."""
    write_atomic(Path(path), json.dumps([asdict(one) for one in measures], indent=1) + "\n")


def read_measures(path: str | Path) -> list[FormMeasure]:
    """Measurements that were kept.

    Raises:
        LabError: if the file is none of them.
    """
    try:
        return [FormMeasure(**one) for one in json.loads(Path(path).read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise LabError(
            say(
                en=f"{Path(path).name} holds no measurements of update forms ({type(error).__name__}): make it with "
                "benchmarks/update_forms.py.",
                fr=f"{Path(path).name} ne contient pas de mesures de formes de mise à jour ({type(error).__name__}) : "
                "produisez-le avec benchmarks/update_forms.py.",
            )
        ) from None
