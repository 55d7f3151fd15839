"""Plan for this machine: every layout that its processes can run, timed from `dlojz calibrate`.

Each row is a `RunConfig` that `dlojz.run` takes; its seconds come from measurements of parts, never of the model, and
its bytes from the exact forecast, so that a run can contradict both.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dlojz import models
from dlojz.base.contract import check_whole
from dlojz.base.display_hook import Summary, figure_of
from dlojz.base.errors import LabError
from dlojz.base.language import decimal, refusal, say
from dlojz.config.run_config import RunConfig
from dlojz.cost_model import SCHEDULES, Parts
from dlojz.cost_model.measured_machine import Measured, local_parts, read_measured
from dlojz.planner.answer import seconds
from dlojz.planner.question import MOST_BATCH
from dlojz.planner.space import divisors, gigabytes, layout_words, part_words
from dlojz.runnable import check_runnable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_MICRO_BATCHES: Final = 8
STATE_BYTES: Final = 16
"""Per parameter in fp32 with AdamW: weight, gradient, two moments."""


@dataclass(frozen=True, eq=False, repr=False)
class LocalChoice(Summary):
    """Layout that this machine can run, with its predicted step.

    Attributes:
        parts: predicted seconds by part, which add up to the step.
    """

    config: RunConfig
    parts: Mapping[str, float]

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return sum(self.parts.values())

    @property
    def title(self) -> str:
        """The layout in one line."""
        return layout_words(self.config.layout, self.config.layout.title)

    @cached_property
    def peak_bytes(self) -> int:
        """Peak of the fullest rank, by the exact forecast."""
        from dlojz.prediction.forecast import forecast

        layout = self.config.layout
        # One rank of each stage: with pp outermost, stage s begins at rank s · (dp · tp).
        stages = range(0, layout.world_size, max(1, layout.world_size // layout.pp))
        return max(forecast(self.config, rank).memory.peak_bytes or 0 for rank in stages)

    def lines(self) -> list[tuple[str, str]]:
        """Summary, as pairs of name and value."""
        shares = ", ".join(
            f"{part_words(name)} {100 * value / self.step_s:.0f} %"
            for name, value in sorted(self.parts.items(), key=lambda pair: -pair[1])[:4]
            if value > 0
        )
        return [
            (say(en="layout", fr="configuration"), self.title),
            (say(en="step (predicted)", fr="itération (prédite)"), seconds(self.step_s)),
            (say(en="of which", fr="dont"), shares),
            (say(en="peak of the fullest rank", fr="pic du rang le plus rempli"), gigabytes(self.peak_bytes)),
        ]


@dataclass(frozen=True, eq=False, repr=False)
class Here(Summary):
    """Plan for this machine.

    Attributes:
        model: name in the catalogue, or of a model from elsewhere without its folder.
        batch: samples of one step.
        rows: what can be run, fastest first.
        refused: what cannot, by title, each with the sentence that says why.
    """

    model: str
    ranks: int
    batch: int
    machine: Measured
    rows: tuple[LocalChoice, ...]
    refused: Mapping[str, str]

    @property
    def best(self) -> LocalChoice:
        """The layout of the least predicted step."""
        return self.rows[0]

    def kinds(self) -> tuple[LocalChoice, ...]:
        """The fastest row of each kind of layout (degrees, ZeRO stage, engine, recomputation), fastest first."""
        fastest: dict[Any, LocalChoice] = {}
        for row in self.rows:
            layout = row.config.layout
            # Micro-batches and schedules of a kind compete with each other.
            kind = (layout.dp, layout.tp, layout.pp, layout.zero, layout.engine, layout.checkpointing)
            fastest.setdefault(kind, row)
        return tuple(fastest.values())

    def lines(self) -> list[tuple[str, str]]:
        """Summary, as pairs of name and value."""
        processes = "one process" if self.ranks == 1 else f"{self.ranks} processes"
        return [
            (
                say(en="question", fr="question"),
                say(
                    en=f"{self.model} on {processes} of this machine, batch {self.batch}",
                    fr=f"{self.model} sur {self.ranks} processus de cette machine, batch {self.batch}",
                ),
            ),
            (say(en="machine", fr="machine"), f"{self.machine.processor}, {self.machine.words(self.ranks)}"),
            (
                say(en="searched", fr="cherché"),
                say(
                    en=f"{len(self.rows)} layouts that run, {len(self.refused)} refused",
                    fr=f"{len(self.rows)} configurations exécutables, {len(self.refused)} refusées",
                ),
            ),
            *self.best.lines(),
        ]

    def table(self, max_rows: int = 12) -> list[tuple[str, str, str]]:
        """The best of each kind as texts: layout, predicted step, how much longer than the best."""
        return [
            (row.title, seconds(row.step_s), f"+{decimal(100 * (row.step_s / self.best.step_s - 1), 0)} %")
            for row in self.kinds()[:max_rows]
        ]

    def figure(
        self, measured_s: Mapping[str, float] | Sequence[float] | None = None, path: str | Path | None = None
    ) -> Figure:
        """Draw the predicted seconds by part of the best layout of each kind, with the measured ones where given.

        Args:
            measured_s: measured seconds of a step by title, or in the order of `kinds()`.
            path: picture to write, if any.

        Raises:
            LabError: if the picture cannot be written.
        """
        if measured_s is None or isinstance(measured_s, Mapping):
            seconds_by_title = dict(measured_s or {})
        else:
            # Fewer measured than planned is fine.
            seconds_by_title = {row.title: value for row, value in zip(self.kinds(), measured_s, strict=False)}
        return figure_of(self, seconds_by_title, path)

    def as_dict(self, max_rows: int = 12) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "model": self.model,
            "ranks": self.ranks,
            "batch": self.batch,
            "processor": self.machine.processor,
            "calibrated": self.machine.date,
            "calibration_age_s": self.machine.age_s,
            "calibration_noise": self.machine.noise(self.ranks),
            "layouts": len(self.rows),
            "refused": dict(self.refused),
            "rows": [
                {
                    "layout": row.config.layout.to_dict(),
                    "title": row.title,
                    "step_s": row.step_s,
                    "parts_s": dict(row.parts),
                }
                for row in self.kinds()[:max_rows]
            ],
        }


def plan_here(model: str, ranks: int = 2, batch: int = 16, *, measured: Measured | None = None) -> Here:
    """Plan for this machine: every layout that its processes can run, with its predicted step.

    Args:
        model: name in the catalogue, or from elsewhere (`timm:resnet18`, `my_file.py:build`).
        batch: samples of one step.
        measured: the machine's measurements; by default the user's file (`dlojz calibrate`).

    Raises:
        LabError: for an unknown model, a batch that no layout divides, a model too large for this machine's memory, or
            if the machine was not measured with so many ranks.

    Example:
        `plan_here("coatnet_tiny", ranks=2, batch=16)`
    """
    models.spec(model)
    ranks, batch = check_whole("ranks", ranks, 64), check_whole("batch", batch, MOST_BATCH)
    machine = read_measured() if measured is None else measured
    machine.setup(ranks)  # raises if this number of ranks was not measured
    _check_memory(model, machine)
    # Bytes of the states alone: enough to refuse before hundreds of layouts are traced.
    rows, refused = [], {}
    for run_fields in _asked(model, ranks, batch):
        try:
            # An illegal layout raises, and its sentence becomes a row of `refused`.
            config = RunConfig.of(model=model, device="cpu", **run_fields)
            check_runnable(config)
            rows.append(predicted_here(config, machine))
        except LabError as error:
            refused[", ".join(f"{name}={value}" for name, value in run_fields.items())] = str(error)
    if not rows:
        raise refusal(
            en=f"no layout of {model} on {ranks} processes divides a batch of {batch}: try a multiple of {ranks}.",
            fr=f"aucune configuration de {model} sur {ranks} processus ne divise un batch de {batch} : essayez un "
            f"multiple de {ranks}.",
        )
    ordered = tuple(sorted(rows, key=lambda row: row.step_s))
    return Here(rows[0].config.model_name, ranks, batch, machine, ordered, refused)


def predicted_here(config: RunConfig, machine: Measured) -> LocalChoice:
    """Predict the step of one layout on this machine.

    Raises:
        LabError: if the machine was not measured with so many ranks, or no time is known for such a layout.
    """
    parts = local_parts(machine, config)
    return LocalChoice(config, {field.name: float(getattr(parts, field.name)[0]) for field in fields(Parts)})


def _asked(model: str, ranks: int, batch: int) -> Iterator[dict[str, Any]]:
    """Degrees, stages, micro-batches and recomputation; what torch splits only in part is split by hand."""
    by_hand = models.spec(model).family == "image"
    for tp in divisors(ranks):
        for pp in divisors(ranks // tp):
            dp = ranks // tp // pp
            # Micro-batches that divide a replica's samples.
            numbers = (
                [divisor for divisor in divisors(batch // dp) if divisor <= MOST_MICRO_BATCHES]
                if batch % dp == 0
                else []
            )
            schedules = SCHEDULES if pp > 1 else (None,)
            zeros = (0, 2, 3) if dp > 1 and tp == pp == 1 else (0,)  # ZeRO is searched beside data parallelism alone
            for number, schedule, zero, checkpointing in itertools.product(numbers, schedules, zeros, ("none", "full")):
                layout_fields: dict[str, Any] = {"dp": dp, "tp": tp, "pp": pp, "micro_batches": number}
                layout_fields["micro_batch"] = batch // dp // number
                if zero:
                    layout_fields["zero"] = zero
                if checkpointing != "none":
                    layout_fields["checkpointing"] = checkpointing
                if schedule:
                    # Blocks differ in work: cut by FLOPs, not by count.
                    layout_fields |= {"schedule": schedule, "partition": "flops"}
                if tp > 1:
                    layout_fields["engine"] = "by_hand" if by_hand else "torch"
                yield layout_fields


def _check_memory(model: str, machine: Measured) -> None:
    from dlojz.cost_model.measured_machine import tensors_of

    # 10 classes: any head will do for a bound on the states.
    state_bytes = STATE_BYTES * tensors_of(model, None, None, 10).elements
    if state_bytes > machine.memory_bytes:
        raise refusal(
            en=f"{model} does not fit here: its states alone take {gigabytes(state_bytes)}, and this machine has "
            f"{gigabytes(machine.memory_bytes)}. Plan it on a cluster: dlojz.plan({model!r}, \"jean_zay_a100\").",
            fr=f"{model} ne tient pas ici : ses états seuls prennent {gigabytes(state_bytes)}, et cette machine a "
            f"{gigabytes(machine.memory_bytes)}. Planifiez-le sur un calculateur : dlojz.plan({model!r}, "
            "\"jean_zay_a100\").",
        )  # fmt: skip


__all__ = ["Here", "LocalChoice", "plan_here", "predicted_here"]
