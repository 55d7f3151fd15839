"""Validate the cost model against published measurements: seconds and memory, row by row.

An error called held out comes from rows that no parameter was fitted on; the trivial model, a constant rate per GPU,
gets the same half to fit its one number. Of memory, the reserve and what one layer takes were fitted on the first half
of Jean Zay's readings; an out-of-memory row is found if the prediction is above what the GPU has.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from dlojz.base.errors import LabError
from dlojz.base.language import one_of
from dlojz.cost_model.calibration import FOLDER, calibration
from dlojz.cost_model.fit import RECIPES, completed, is_fitted, model_of, predicted_s, rows_of, usable
from dlojz.cost_model.layout_memory import Memories
from dlojz.cost_model.layouts import Layouts
from dlojz.cost_model.step import memories
from dlojz.cost_model.workload import decoder_workload
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import flops_per_sequence
from dlojz.hardware.evidence import TABLES, Measurement, table

NEVER_FITTED: Final = {"mt-nlg": "a100"}
"""Tables of which no row was fitted on, and the profile that predicts them."""
PROFILE_OF: Final = {name: key for key, one in RECIPES.items() for name in one.tables} | NEVER_FITTED
"""The profile that predicts each table's times."""


class Tool(NamedTuple):
    """Error that a published tool reports on a table.

    Attributes:
        name: of the tool.
        mean: mean absolute error, as a share.
        note: on what, and whether it was tuned to these rows.
    """

    name: str
    mean: float
    note: str


TOOLS: Final = {
    "korthikanti-5": Tool("Calculon", 0.0365, "Isaev et al., SC23, its own validation; tuned to these rows"),
    "vtrain-multi": Tool("vTrain", 0.1473, "Bang et al., MICRO 2024, all rows; profiled on the same GPUs"),
    "jean-zay-a100": Tool("constant rate", 0.084, "no tool has published an error on these rows"),
}


class Goal(NamedTuple):
    """Target error of the cost model on rows not used in the fit.

    Attributes:
        mean: mean absolute error, as a share.
        worst: of a single row; None where none is set.
    """

    mean: float
    worst: float | None = None


GOALS: Final = {
    "korthikanti-5": Goal(0.035, 0.08),
    "sc21-1": Goal(0.07),
    "sc21-2": Goal(0.07),
    "jean-zay-a100": Goal(0.05),
    "vtrain-multi": Goal(0.06),
    "megatron-h100": Goal(0.08),
    "torchtitan": Goal(0.08),
    "llama-3": Goal(0.08),
}


@dataclass(frozen=True)
class RowResult:
    """Validation of one row.

    Attributes:
        row: as published, completed where it leaves something out.
        measured_s, predicted_s: seconds of a step.
        trivial_s: of the trivial model.
        held_out: whether nothing was fitted on it.
    """

    row: Measurement
    measured_s: float
    predicted_s: float
    trivial_s: float
    held_out: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class TableResult:
    """Validation of one table.

    Attributes:
        name: of the table.
        profile: the calibration that predicted it.
        rows: all usable ones.
        left_out: mean absolute error on each model's rows, of a fit that saw no row of that model; empty if not run.
    """

    name: str
    profile: str
    rows: tuple[RowResult, ...]
    left_out: dict[str, float]

    @property
    def held(self) -> tuple[RowResult, ...]:
        """Rows that nothing was fitted on."""
        return tuple(one for one in self.rows if one.held_out)

    @property
    def mean(self) -> float:
        """Mean absolute error of the held-out rows."""
        return statistics.fmean(abs(one.error) for one in self.held)

    @property
    def worst(self) -> float:
        """Greatest absolute error of the held-out rows."""
        return max(abs(one.error) for one in self.held)

    @property
    def mean_of_all(self) -> float:
        """Mean absolute error of all rows."""
        return statistics.fmean(abs(one.error) for one in self.rows)

    @property
    def bias(self) -> float:
        """Mean error of the held-out rows, with its sign."""
        return statistics.fmean(one.error for one in self.held)

    @property
    def trivial(self) -> float:
        """Mean absolute error of a constant rate per GPU on the held-out rows."""
        return statistics.fmean(abs(one.trivial_s / one.measured_s - 1) for one in self.held)

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of predicted and measured FLOP/s per GPU over all rows."""
        rates = [_flops(one.row) / one.row.gpus for one in self.rows]
        return spearman(
            [rate / one.measured_s for rate, one in zip(rates, self.rows, strict=True)],
            [rate / one.predicted_s for rate, one in zip(rates, self.rows, strict=True)],
        )

    @property
    def left_out_mean(self) -> float | None:
        """Mean over all rows of the error of fits without their model; None if those fits were not made."""
        known = [one for one in self.rows if model_of(one.row) in self.left_out]
        if not known:
            return None
        return statistics.fmean(self.left_out[model_of(one.row)] for one in known)

    @property
    def goal(self) -> Goal | None:
        """Target error; None where none was set."""
        return GOALS.get(self.name)

    @property
    def reached(self) -> bool | None:
        """Whether the goal is reached; None without one."""
        goal = self.goal
        if goal is None:
            return None
        return self.mean <= goal.mean and (goal.worst is None or self.worst <= goal.worst)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        goal, tool = self.goal, TOOLS.get(self.name)
        return {
            "table": self.name,
            "profile": self.profile,
            "rows": len(self.rows),
            "held_out": len(self.held),
            "mean": self.mean,
            "worst": self.worst,
            "mean_of_all": self.mean_of_all,
            "bias": self.bias,
            "trivial": self.trivial,
            "rank_correlation": None if math.isnan(self.rank_correlation) else self.rank_correlation,
            "left_out_mean": self.left_out_mean,
            "goal": goal._asdict() if goal else None,
            "reached": self.reached,
            "tool": tool._asdict() if tool else None,
        }


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Correlation of the ranks of two lists; equal values share their mean rank; not a number for one value alone.

    Source: Spearman 1904 (Am. J. Psychology 15).
    """
    ranks = []
    for values in (np.asarray(one, float), np.asarray(other, float)):
        _, place, count = np.unique(values, return_inverse=True, return_counts=True)
        ranks.append((np.cumsum(count) - count / 2)[place])  # from 0.5: a constant changes no correlation
    if len(one) < 2 or min(np.ptp(each) for each in ranks) == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def validate(name: str) -> TableResult:
    """Validate one table: predict every usable row.

    Raises:
        LabError: for a table that prints no times, or that there is not.
    """
    if name not in PROFILE_OF:
        raise LabError(one_of("table", name, validated()))
    profile = PROFILE_OF[name]
    parameters = calibration(profile)
    found = usable(table(name))
    rows = [completed(row, parameters) for row in found]
    predicted = predicted_s(rows, parameters)
    fitted = [name not in NEVER_FITTED and is_fitted(row) for row in found]
    measured = [row.seconds or math.nan for row in rows]
    rates = [_flops(row) / row.gpus / seconds for row, seconds in zip(rows, measured, strict=True)]
    known_rates = [one for one, known in zip(rates, fitted, strict=True) if known]
    rate = statistics.median(known_rates or _rates_of(profile))
    results = tuple(
        RowResult(row, seconds, float(guess), _flops(row) / row.gpus / rate, not known)
        for row, seconds, guess, known in zip(rows, measured, predicted, fitted, strict=True)
    )
    return TableResult(name, profile, results, {} if name in NEVER_FITTED else _left_out().get(profile, {}))


def validated() -> tuple[str, ...]:
    """Names of all tables that `validate` knows, in the order in which they are shown."""
    return tuple(name for name in PROFILE_OF if name in TABLES)


@cache
def _rates_of(profile: str) -> tuple[float, ...]:
    """FLOP/s per GPU of all rows that a profile was fitted on: what a table without any such row is guessed from."""
    rows = [row for row in rows_of(profile) if is_fitted(row)]
    return tuple(_flops(row) / row.gpus / row.seconds for row in rows if row.seconds)


def _flops(row: Measurement) -> float:
    """Operations of a step, those of recomputation among them where the row recomputes."""
    counted = flops_per_sequence(row.size, "recompute" if row.checkpointing == "full" else "model")
    return float(row.global_batch * counted)


@cache
def _left_out() -> dict[str, dict[str, float]]:
    path = FOLDER.with_name("leave_one_out.json")
    if not path.is_file():
        return {}
    known: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return known


READINGS = "jean-zay-a100"
ACTIVATIONS = "korthikanti-memory"


@dataclass(frozen=True)
class Reading:
    """A published reading and its prediction.

    Attributes:
        row: as published.
        measured_bytes: as read; 0 where it ran out of memory.
        predicted_bytes: as `nvidia-smi` would show them, or of activations where those were published.
        capacity_bytes: of the GPU.
        held_out: whether nothing was fitted on it.
    """

    row: Measurement
    measured_bytes: float
    predicted_bytes: float
    capacity_bytes: float
    held_out: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_bytes / self.measured_bytes - 1

    @property
    def too_much(self) -> bool:
        """Whether more is predicted than the GPU has."""
        return self.predicted_bytes > self.capacity_bytes


@dataclass(frozen=True)
class MemoryResult:
    """Validation of the memory model.

    Attributes:
        readings: those with a figure, of Jean Zay.
        ran_out: those that ran out of memory.
        activations: those of Korthikanti, in bytes or relative to the layout without recomputation.
    """

    readings: tuple[Reading, ...]
    ran_out: tuple[Reading, ...]
    activations: tuple[tuple[str, float, float], ...]

    @property
    def mean(self) -> float:
        """Mean absolute error of the held-out readings."""
        return statistics.fmean(abs(one.error) for one in self.readings if one.held_out)

    @property
    def mean_of_all(self) -> float:
        """Mean absolute error of all readings."""
        return statistics.fmean(abs(one.error) for one in self.readings)

    @property
    def found(self) -> tuple[str, ...]:
        """Rows that ran out of memory, as predicted."""
        return tuple(one.row.row for one in self.ran_out if one.too_much)

    @property
    def missed(self) -> tuple[str, ...]:
        """Rows that ran out of memory, against the prediction."""
        return tuple(one.row.row for one in self.ran_out if not one.too_much)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Rows that ran, against the prediction."""
        return tuple(one.row.row for one in self.readings if one.too_much)

    @property
    def activation_mean(self) -> float:
        """Mean absolute error of Korthikanti's activations."""
        return statistics.fmean(abs(predicted / published - 1) for _, published, predicted in self.activations)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return {
            "readings": len(self.readings),
            "mean": self.mean,
            "mean_of_all": self.mean_of_all,
            "out_of_memory": {"found": list(self.found), "missed": list(self.missed)},
            "false_alarms": list(self.false_alarms),
            "activations": len(self.activations),
            "activation_mean": self.activation_mean,
        }


def validate_memory() -> MemoryResult:
    """Validate the memory model against all published readings."""
    rows = [row for row in table(READINGS) if row.usable and row.micro_batch]
    readings: list[Reading] = []
    ran_out: list[Reading] = []
    for row in rows:
        if row.memory_bytes is None and row.outcome != "oom":
            continue
        predicted = float(_memory(row).total_bytes[0])
        capacity = float(cluster(row.cluster).gpu.memory_bytes)
        made = Reading(row, row.memory_bytes or 0.0, predicted, capacity, not is_fitted(row))
        (ran_out if row.outcome == "oom" else readings).append(made)
    return MemoryResult(tuple(readings), tuple(ran_out), tuple(_activations()))


def _activations() -> list[tuple[str, float, float]]:
    """Name, published and predicted: bytes of the layers' activations, or their share of the plain layout's."""
    rows = [row for row in table(ACTIVATIONS) if row.usable and row.memory_reading == "activations"]
    plain = {
        row.size: float(_memory(row).activations[0])
        for row in rows
        if row.checkpointing == "none" and not row.sequence_parallel
    }
    found = []
    for row in rows:
        predicted = float(_memory(row).activations[0])
        if row.memory_bytes is not None:
            found.append((row.row, row.memory_bytes, predicted))
        elif row.memory_share is not None:
            found.append((row.row, row.memory_share, predicted / plain[row.size]))
    return found


def _memory(row: Measurement) -> Memories:
    return memories(decoder_workload(row.size), Layouts.from_measurements([row]))
