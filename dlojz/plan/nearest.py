"""The published measurement that is closest to a planned layout: evidence to hold the figure against.

Layer 4. Invariant: closeness counts doublings (of parameters, GPUs, degrees, tokens of a step) and unlike choices; the
distance is shown, so that nobody takes a far row for proof.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import log2
from typing import Any

from dlojz.evidence import Measurement, measurements
from dlojz.hardware import cluster
from dlojz.plan.candidate import Candidate
from dlojz.plan.question import Question
from dlojz.plan.reasons import decimal
from dlojz.predict.time import Layouts, estimate, workload
from dlojz.predict.time.completion import completed
from dlojz.text import say

OTHER_GENERATION = 4.0
"""Doublings that another generation of GPUs counts for; another cluster of the same one counts for 1."""
FAR = 6.0
"""Distance from which a row says little."""


@dataclass(frozen=True)
class Evidence:
    """A measured row beside a planned layout.

    Attributes:
        row: as published.
        distance: in doublings and unlike choices, at least 0.
        measured_s: seconds of its step.
        predicted_s: by the same calibration that planned.
    """

    row: Measurement
    distance: float
    measured_s: float
    predicted_s: float

    @property
    def words(self) -> str:
        """In one line."""
        one, billions = self.row, decimal(self.row.size.num_parameters / 1e9, 1)
        error = 100 * (self.predicted_s / self.measured_s - 1)
        told = decimal(abs(error), 1)
        sign = "+" if error >= 0 else "−"
        far = say(en="; far from this plan", fr=" ; loin de ce plan") if self.distance > FAR else ""
        ring = f" · cp {one.cp}" if one.cp > 1 else ""
        layout = f"{one.gpus} GPU, dp {one.dp} · tp {one.tp} · pp {one.pp}{ring}, batch {one.global_batch}"
        return say(
            en=f"{one.row}: {billions} B, {layout}: measured {decimal(self.measured_s, 2)} s, our model says "
            f"{sign}{told} %{far}.",
            fr=f"{one.row} : {billions} milliards, {layout} : mesuré {decimal(self.measured_s, 2)} s, notre modèle dit "
            f"{sign}{told} %{far}.",
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON."""
        return {
            "row": self.row.row,
            "source": self.row.source,
            "distance": round(self.distance, 2),
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
        }


@cache
def _known() -> tuple[Measurement, ...]:
    return tuple(row for row in measurements() if row.usable and row.seconds and row.outcome == "ran" and row.gpus > 1)


def generation(cluster_name: str) -> str:
    """Of a cluster's GPUs: `a100`, `h100`, …"""
    return cluster(cluster_name).gpu.name.split("-")[0]


def distance(question: Question, one: Candidate, row: Measurement) -> float:
    """How unlike a row is: doublings apart, and choices that differ."""
    own, size = question.subject.size, row.size
    assert own is not None
    apart = 0.0
    for here, there in (
        (own.num_parameters, size.num_parameters),
        (one.gpus, row.gpus),
        (one.tp, row.tp),
        (one.pp, row.pp),
        (one.cp, row.cp),
        (own.sequence_length * one.global_batch, size.sequence_length * row.global_batch),
    ):
        apart += abs(log2(here / there))
    apart += 0.5 * abs(log2(one.micro_batch / row.micro_batch)) if row.micro_batch else 0.5
    apart += (one.checkpointing != row.checkpointing) + 0.5 * abs(one.zero - row.zero)
    apart += 0.5 * (one.sequence_parallel != row.sequence_parallel) + 0.5 * (one.chunks != row.chunks)
    if row.cluster != question.cluster.name:
        same = generation(row.cluster) == question.cluster.gpu.name.split("-")[0]
        apart += 1.0 if same else OTHER_GENERATION
    return apart


def closest(question: Question, one: Candidate) -> Evidence | None:
    """The closest measured row; None for an image model, of which none is published."""
    if question.subject.size is None:
        return None
    apart, row = min(((distance(question, one, row), row) for row in _known()), key=lambda pair: pair[0])
    row = completed(row, question.calibration)
    layout = Layouts.from_measurements([row])
    made = estimate(workload(row.size), cluster(row.cluster), layout, question.calibration)
    return Evidence(row, apart, float(row.seconds or 0.0), float(made.step_s[0]))
