"""Validate the cost model against published measurements: seconds and memory, row by row.

An error called held out comes from rows that no parameter was fitted on; one with the table left out from a fit that
saw no row of it, nor of its software. The trivial model, a constant rate per GPU, gets half of the table to fit its
one number. Of memory, the reserve and what one layer takes were fitted on the first half
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
from dlojz.cost_model.calibration import FOLDER, Calibration, calibration
from dlojz.cost_model.fit import RECIPES, completed, is_fitted, leave_table_out, predicted_s, usable
from dlojz.cost_model.layout_memory import Memories
from dlojz.cost_model.layouts import Layouts, Reals
from dlojz.cost_model.step import memories
from dlojz.cost_model.workload import decoder_workload
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import flops_per_sequence
from dlojz.hardware.evidence import TABLES, Measurement, table

NEVER_FITTED: Final = {"mt-nlg": "a100", "mpt-a100": "a100", "mpt-h100": "h100", "mpt-h100-fp8": "h100"}
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
        left_out_s: by the fit without this table.
        trivial_s: of the trivial model.
        held_out: whether nothing was fitted on it.
    """

    row: Measurement
    measured_s: float
    predicted_s: float
    left_out_s: float
    trivial_s: float
    held_out: bool

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_s / self.measured_s - 1

    @property
    def left_out_error(self) -> float:
        """The same by the fit without this table."""
        return self.left_out_s / self.measured_s - 1


@dataclass(frozen=True)
class TableResult:
    """Validation of one table.

    Attributes:
        name: of the table.
        profile: the calibration that predicted it.
        rows: all usable ones.
    """

    name: str
    profile: str
    rows: tuple[RowResult, ...]

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
    def left_out_mean(self) -> float:
        """Mean absolute error of all rows, by the fit without this table."""
        return statistics.fmean(abs(one.left_out_error) for one in self.rows)

    @property
    def left_out_worst(self) -> float:
        """Greatest absolute error of a row, by the fit without this table."""
        return max(abs(one.left_out_error) for one in self.rows)

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
            "left_out_worst": self.left_out_worst,
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
    parameters, left = calibration(profile), without_table(name)
    found = usable(table(name))
    rows = [completed(row, parameters) for row in found]
    predicted = predicted_s(rows, parameters)
    fitted = [name not in NEVER_FITTED and is_fitted(row) for row in found]
    measured = [row.seconds or math.nan for row in rows]
    alone = predicted_s([completed(row, left) for row in found], left)
    rates = [_flops(row) / row.gpus / seconds for row, seconds in zip(rows, measured, strict=True)]
    rate = statistics.median(one for one, row in zip(rates, found, strict=True) if is_fitted(row))
    results = tuple(
        RowResult(row, seconds, float(guess), float(other), _flops(row) / row.gpus / rate, not known)
        for row, seconds, guess, other, known in zip(rows, measured, predicted, alone, fitted, strict=True)
    )
    return TableResult(name, profile, results)


def validated() -> tuple[str, ...]:
    """Names of all tables that `validate` knows, in the order in which they are shown."""
    return tuple(name for name in PROFILE_OF if name in TABLES)


def _flops(row: Measurement) -> float:
    """Operations of a step, those of recomputation among them where the row recomputes."""
    counted = flops_per_sequence(row.size, "recompute" if row.checkpointing == "full" else "model")
    return float(row.global_batch * counted)


LEFT_OUT: Final = FOLDER.with_name("table_left_out.json")
"""Parameters of the fits that saw no row of a table, by its name."""


@cache
def without_table(name: str) -> Calibration:
    """Read the calibration that saw no row of a table; the shipped one where none of its rows was fitted on."""
    if name in NEVER_FITTED:
        return calibration(NEVER_FITTED[name])
    known: dict[str, dict[str, float]] = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
    return Calibration(PROFILE_OF[name], **known[name])


def write_left_out() -> None:
    """Fit every profile again without each of its tables, and keep the parameters."""
    made = {name: leave_table_out(name, key).values for key, one in RECIPES.items() for name in one.tables}
    LEFT_OUT.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


class Interval(NamedTuple):
    """Factors on a predicted time between which four in five measured ones are, of software that was never seen.

    Attributes:
        rows: of how many measurements.
        low, high: the factors.
        mean: mean absolute error of these rows, as a share.
        coverage: share of a table's rows within the interval that all other tables give, mean over the tables.
    """

    rows: int
    low: float
    high: float
    mean: float
    coverage: float


def interval(profile: str, share: float = 0.8) -> Interval:
    """Find the interval of a profile from fits that saw no row of the table predicted.

    Each table weighs the same, but one of less than `FULL_WEIGHT` rows as its rows.

    Each table is covered by the interval of all the others, and the interval is widened until that comes to `share`.
    Stragglers only add time, so that its upper part is the wider one.

    Args:
        profile: its name.
        share: of the rows to be covered.
    """
    results = [validate(name) for name in validated() if PROFILE_OF[name] == profile]
    tables = [np.array([row.measured_s / row.left_out_s for row in one.rows]) for one in results]
    if len(results) == 1:  # nothing else was measured on these GPUs: the half that was held out
        tables = [np.array([row.measured_s / row.predicted_s for row in results[0].held])]
    for level in np.arange(share, 1.0, 0.005):
        covered = []
        for place, own in enumerate(tables):
            low, high = _quantiles(tables[:place] + tables[place + 1 :] or [own], level)
            covered.append(float(((low <= own) & (own <= high)).mean()))
        coverage = float(np.average(covered, weights=[_weight(own) for own in tables]))
        if coverage >= share:
            break
    low, high = _quantiles(tables, level)
    pooled = np.concatenate(tables)
    mean = float(np.abs(1 / pooled - 1).mean())
    return Interval(pooled.size, low, high, mean, coverage)


FULL_WEIGHT: Final = 10
"""Rows from which a table weighs as much as any other in an interval."""


def _weight(table_rows: Reals) -> int:
    return min(table_rows.size, FULL_WEIGHT)


def _quantiles(tables: Sequence[Reals], level: float) -> tuple[float, float]:
    """The (1 − level)/2 and (1 + level)/2 quantiles of all tables' values, each table with its weight."""
    values = np.concatenate(tables)
    weights = np.concatenate([np.full(one.size, _weight(one) / one.size) for one in tables])
    weights = weights / weights.sum()
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) - weights[order] / 2
    low, high = np.interp([(1 - level) / 2, (1 + level) / 2], reached, values[order])
    return float(low), float(high)


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
