"""Validate the cost model against published measurements: seconds and memory, row by row.

An error called held out comes from rows that no parameter was fitted on; one with the table left out from a fit that
saw no row of it, nor of its software. The trivial model, a constant rate per GPU, gets half of the table to fit its
one number. Of memory, the reserve and what one layer takes were fitted on the first half
of Jean Zay's readings; an out-of-memory row is found if the prediction is above what the GPU has. The planner's regret
is what its first choice among the measured layouts of a model loses to the best of them. `docs/validation.md` says all
of it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from dlojz.base.errors import LabError
from dlojz.base.language import brief_percent, one_of, refusal, say
from dlojz.cost_model.calibration import FOLDER, Calibration, calibration
from dlojz.cost_model.fit import FITTED_TABLES, completed, is_complete, is_fitted, predicted_s, usable
from dlojz.cost_model.layout_memory import Memories
from dlojz.cost_model.layouts import Layouts, Reals
from dlojz.cost_model.step import memories
from dlojz.cost_model.workload import decoder_workload
from dlojz.hardware import cluster
from dlojz.hardware.decoder_size import flops_per_sequence
from dlojz.hardware.evidence import TABLES, Measurement, table

NEVER_FITTED: Final = {"mt-nlg": "a100", "mpt-a100": "a100", "mpt-h100": "h100", "mpt-h100-fp8": "h100"}
"""Tables of which no row was fitted on, and the profile that predicts them."""
PROFILE_OF: Final = {name: key for key, tables in FITTED_TABLES.items() for name in tables} | NEVER_FITTED
"""The profile that predicts each table's times."""


class Tool(NamedTuple):
    """Error of another tool on a table.

    Attributes:
        name: of the tool.
        mean: mean absolute error, as a share; None where it follows from what it has published row by row.
        note: who found it, on what, and whether it was tuned to these rows.
    """

    name: str
    mean: float | None
    note: str


_AS_IT_COMES: Final = "run as it comes, not tuned: its A100 80 GB, full recomputation, 1F1B, no overlap"
TOOLS: Final = {
    "korthikanti-5": (
        Tool("Calculon", 0.0365, "its own validation (Isaev et al., SC23), eight of these rows, which it was tuned to"),
    ),
    "vtrain-multi": (
        Tool("vTrain", 0.1473, "its authors (Bang et al., MICRO 2024), all rows, profiled on the same GPUs"),
        Tool("Calculon", 0.154, _AS_IT_COMES),
    ),
    "jean-zay-a100": (
        Tool("Calculon", 0.24, f"{_AS_IT_COMES}; ZeRO-1, 25 GB/s between nodes (30 % with 6.25); it has no vocabulary"),
    ),
    "mt-nlg": (Tool("llm-analysis given the rate", None, "its own example, from the TFLOP/s measured: no prediction"),),
    "korthikanti-memory": (
        Tool("Calculon", 0.0208, "its own validation, activations of figure 1; 6.7 % on figure 7, 8.5 % on states"),
    ),
}
"""What is known of other tools, table by table."""


class Goal(NamedTuple):
    """Target error of the cost model.

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
"""On the half of a table that was not fitted on."""
LEFT_OUT_GOALS: Final = {
    "torchtitan": Goal(0.05),
    "vtrain-multi": Goal(0.06, 0.25),
    "mpt-a100": Goal(0.06),
    "mpt-h100": Goal(0.06),
}
"""On all rows of a table, by a fit that saw none of them."""
REGRET_GOAL: Final = Goal(0.02, 0.05)
"""Of the first choice: median of a table, and its worst model."""
LONG: Final = 16384
"""Tokens from which a sequence is called long."""
COVERED: Final = (0.75, 0.85)
"""Share of a table's rows that an interval called "four in five" may cover."""


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
        return tuple(result for result in self.rows if result.held_out)

    @property
    def mean(self) -> float:
        """Mean absolute error of the held-out rows."""
        return statistics.fmean(abs(result.error) for result in self.held)

    @property
    def worst(self) -> float:
        """Greatest absolute error of the held-out rows."""
        return max(abs(result.error) for result in self.held)

    @property
    def mean_of_all(self) -> float:
        """Mean absolute error of all rows."""
        return statistics.fmean(abs(result.error) for result in self.rows)

    @property
    def bias(self) -> float:
        """Mean error of the held-out rows, with its sign."""
        return statistics.fmean(result.error for result in self.held)

    @property
    def trivial(self) -> float:
        """Mean absolute error of a constant rate per GPU on the held-out rows."""
        return statistics.fmean(abs(result.trivial_s / result.measured_s - 1) for result in self.held)

    @property
    def rank_correlation(self) -> float:
        """Spearman's correlation of predicted and measured FLOP/s per GPU over all rows."""
        rates = [_flops(result.row) / result.row.gpus for result in self.rows]
        return spearman(
            [rate / result.measured_s for rate, result in zip(rates, self.rows, strict=True)],
            [rate / result.predicted_s for rate, result in zip(rates, self.rows, strict=True)],
        )

    @property
    def left_out_mean(self) -> float:
        """Mean absolute error of all rows, by the fit without this table."""
        return statistics.fmean(abs(result.left_out_error) for result in self.rows)

    @property
    def left_out_worst(self) -> float:
        """Greatest absolute error of a row, by the fit without this table."""
        return max(abs(result.left_out_error) for result in self.rows)

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Other tools of which an error on this table is known, with that error."""
        return tuple(
            tool if tool.mean is not None else tool._replace(mean=self._published_mean(tool.name))
            for tool in TOOLS.get(self.name, ())
        )

    def _published_mean(self, tool: str) -> float:
        figures = [
            (figure.step_s, result.measured_s)
            for result in self.rows
            for figure in result.row.published
            if figure.tool == tool
        ]
        return statistics.fmean(abs(step_s / measured_s - 1) for step_s, measured_s in figures)

    @property
    def goal(self) -> Goal | None:
        """Target error of the held-out half; None where none was set."""
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
        goal = self.goal
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
            "tools": [tool._asdict() for tool in self.tools],
        }


def spearman(x_values: Sequence[float], y_values: Sequence[float]) -> float:
    """Correlation of the ranks of two lists; equal values share their mean rank; not a number for one value alone.

    Source: Spearman 1904 (Am. J. Psychology 15).
    """
    ranks = []
    for values in (np.asarray(x_values, float), np.asarray(y_values, float)):
        _, inverse, count = np.unique(values, return_inverse=True, return_counts=True)
        # Mean rank of equal values.
        ranks.append((np.cumsum(count) - count / 2)[inverse])  # from 0.5: a constant changes no correlation
    if len(x_values) < 2 or min(np.ptp(list_ranks) for list_ranks in ranks) == 0:
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def validate(name: str) -> TableResult:
    """Validate one table: predict every usable row.

    Raises:
        LabError: for a table that prints no times, or that there is not.
    """
    if name not in PROFILE_OF:
        if name in TABLES:
            names = ", ".join(validated())
            raise refusal(
                en=f"the table {name!r} prints no step times of whole models, so there is nothing to compare: name "
                f"another one ({names}).",
                fr=f"le tableau {name!r} ne donne pas de durées d’itération de modèles entiers, il n’y a rien à "
                f"comparer : nommez-en un autre ({names}).",
            )
        raise LabError(one_of("table", name, validated()))
    profile = PROFILE_OF[name]
    parameters, left_out_calibration = calibration(profile), without_table(name)
    usable_rows = usable(table(name))
    rows = [completed(row, parameters) for row in usable_rows]
    predicted = predicted_s(rows, parameters)
    fitted = [name not in NEVER_FITTED and is_fitted(row) for row in usable_rows]  # True: the fit saw it
    measured = [row.seconds or math.nan for row in rows]
    left_out_s = predicted_s([completed(row, left_out_calibration) for row in usable_rows], left_out_calibration)
    rates = [_flops(row) / row.gpus / seconds for row, seconds in zip(rows, measured, strict=True)]
    # The trivial model gets its one number from the same half.
    rate = statistics.median(row_rate for row_rate, row in zip(rates, usable_rows, strict=True) if is_fitted(row))
    results = tuple(
        RowResult(row, seconds, float(guess), float(without_s), _flops(row) / row.gpus / rate, not in_fit)
        for row, seconds, guess, without_s, in_fit in zip(rows, measured, predicted, left_out_s, fitted, strict=True)
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
    parameters_by_table: dict[str, dict[str, float]] = json.loads(LEFT_OUT.read_text(encoding="utf-8"))
    return Calibration(PROFILE_OF[name], **parameters_by_table[name])


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
    # Measured over predicted, row by row.
    tables = [np.array([row.measured_s / row.left_out_s for row in result.rows]) for result in results]
    if len(results) == 1:  # nothing else was measured on these GPUs: the half that was held out
        tables = [np.array([row.measured_s / row.predicted_s for row in results[0].held])]
    for level in np.arange(share, 1.0, 0.005):  # widened until the coverage is met
        covered = []
        for index, ratios in enumerate(tables):
            low, high = _quantiles(tables[:index] + tables[index + 1 :] or [ratios], level)  # all tables but this one
            covered.append(float(((low <= ratios) & (ratios <= high)).mean()))
        coverage = float(np.average(covered, weights=[_weight(ratios) for ratios in tables]))
        if coverage >= share:
            break
    low, high = _quantiles(tables, level)
    pooled = np.concatenate(tables)
    mean = float(np.abs(1 / pooled - 1).mean())  # |predicted / measured − 1|
    return Interval(pooled.size, low, high, mean, coverage)


FULL_WEIGHT: Final = 10
"""Rows from which a table weighs as much as any other in an interval."""


def _weight(table_rows: Reals) -> int:
    return min(table_rows.size, FULL_WEIGHT)


def _quantiles(tables: Sequence[Reals], level: float) -> tuple[float, float]:
    """The (1 − level)/2 and (1 + level)/2 quantiles of all tables' values, each table with its weight."""
    values = np.concatenate(tables)
    weights = np.concatenate([np.full(ratios.size, _weight(ratios) / ratios.size) for ratios in tables])  # per row
    weights = weights / weights.sum()
    order = np.argsort(values)
    reached = np.cumsum(weights[order]) - weights[order] / 2  # middle of each row's weight
    low, high = np.interp([(1 - level) / 2, (1 + level) / 2], reached, values[order])
    return float(low), float(high)


_SAME: Final = ("cluster", "size", "gpus", "global_batch", "precision", "gradient_precision", "series")
_LAYOUT: Final = (
    "dp", "tp", "pp", "cp", "zero", "zero_shards", "micro_batch", "schedule", "chunks", "partition", "checkpointing",
    "sequence_parallel", "offload", "engine",
)  # fmt: skip
LEAST_LAYOUTS: Final = 5
"""Layouts of a model from which a choice among them tells something."""


class FirstChoice(NamedTuple):
    """Choice among the measured layouts of a model on as many GPUs with one batch, by the fit without their table.

    A layout that was measured several times counts once, with the median of its seconds.

    Attributes:
        chosen, best: a row of the layout that is predicted fastest, and one of the layout that was.
        layouts: how many there are, at least `LEAST_LAYOUTS`.
        regret: measured seconds of the chosen over those of the best, less one.
        random: the same of a random layout, in the mean; a constant rate does no better.
        correlation: of the ranks of measured and predicted seconds.
    """

    chosen: RowResult
    best: RowResult
    layouts: int
    regret: float
    random: float
    correlation: float


def first_choices(result: TableResult) -> tuple[FirstChoice, ...]:
    """Find what the planner's first choice would have lost, for each model with enough measured layouts."""
    models: dict[tuple[Any, ...], dict[tuple[Any, ...], list[RowResult]]] = {}
    for row_result in result.rows:
        model = tuple(getattr(row_result.row, name) for name in _SAME)  # rows with one such key differ in layout alone
        layout = tuple(getattr(row_result.row, name) for name in _LAYOUT)
        models.setdefault(model, {}).setdefault(layout, []).append(row_result)
    choices = []
    for layouts in models.values():
        if len(layouts) < LEAST_LAYOUTS:
            continue
        rows = [runs[0] for runs in layouts.values()]  # any row: they share the layout
        measured = [statistics.median(run.measured_s for run in runs) for runs in layouts.values()]
        predicted = [statistics.median(run.left_out_s for run in runs) for runs in layouts.values()]
        choice_index, best = predicted.index(min(predicted)), measured.index(min(measured))
        regret, random = measured[choice_index] / measured[best] - 1, statistics.fmean(measured) / measured[best] - 1
        choices.append(
            FirstChoice(rows[choice_index], rows[best], len(rows), regret, random, spearman(measured, predicted))
        )
    return tuple(choices)


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
        return self.predicted_bytes / self.measured_bytes - 1  # not of rows that ran out of memory: 0 bytes measured

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
        states: of Korthikanti: name, published and predicted bytes.
        ran: rows of all tables that ran and print their layout; their bytes where they were read.
        reserved: torchtitan's readings of what the allocator reserved.
    """

    readings: tuple[Reading, ...]
    ran_out: tuple[Reading, ...]
    activations: tuple[tuple[str, float, float], ...]
    states: tuple[tuple[str, float, float], ...]
    ran: tuple[Reading, ...]
    reserved: tuple[Reading, ...]

    @property
    def mean(self) -> float:
        """Mean absolute error of the held-out readings."""
        return statistics.fmean(abs(reading.error) for reading in self.readings if reading.held_out)

    @property
    def mean_of_all(self) -> float:
        """Mean absolute error of all readings."""
        return statistics.fmean(abs(reading.error) for reading in self.readings)

    @property
    def found(self) -> tuple[str, ...]:
        """Rows that ran out of memory, as predicted."""
        return tuple(reading.row.row for reading in self.ran_out if reading.too_much)

    @property
    def missed(self) -> tuple[str, ...]:
        """Rows that ran out of memory, against the prediction."""
        return tuple(reading.row.row for reading in self.ran_out if not reading.too_much)

    @property
    def false_alarms(self) -> tuple[str, ...]:
        """Rows of the readings that ran, against the prediction."""
        return tuple(reading.row.row for reading in self.readings if reading.too_much)

    @property
    def refused(self) -> tuple[str, ...]:
        """Rows of all tables that ran, against the prediction."""
        return tuple(reading.row.row for reading in self.ran if reading.too_much)

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
            "ran": len(self.ran),
            "refused": list(self.refused),
            "activations": len(self.activations),
            "activation_mean": self.activation_mean,
            "states": [predicted / published - 1 for _, published, predicted in self.states],
            "reserved": {reading.row.row: reading.error for reading in self.reserved},
        }


def validate_memory() -> MemoryResult:
    """Validate the memory model against all published readings, and against all runs that are known to have fit."""
    readings = [row for row in table(READINGS) if row.usable and row.micro_batch and row.memory_bytes is not None]
    oom = [row for row in table(READINGS) if row.usable and row.micro_batch and row.outcome == "oom"]
    ran = [
        row
        for name in validated()
        for row in table(name)
        # What is not printed cannot be held against the model.
        if row.usable and row.outcome == "ran" and is_complete(row) and row.size.layers > 1
    ]
    reserved = [row for row in ran if row.memory_reading == "reserved" and row.memory_bytes is not None]
    states = [row for row in table(ACTIVATIONS) if row.usable and row.memory_reading == "states"]
    state_memories = [_memory(row) for row in states]
    return MemoryResult(
        _readings(row for row in readings if row.outcome != "oom"),
        _readings(oom),
        tuple(_activations()),
        tuple(
            (
                row.row,
                row.memory_bytes or math.nan,
                float(memory.weights[0] + memory.gradients[0] + memory.optimizer[0]),
            )
            for row, memory in zip(states, state_memories, strict=True)
        ),
        _readings(ran),
        _readings(reserved),
    )


def _readings(rows: Iterable[Measurement]) -> tuple[Reading, ...]:
    """Predict the bytes of rows, those of one model together."""
    readings: dict[str, Reading] = {}
    models: dict[object, list[Measurement]] = {}
    order = []
    for row in rows:
        models.setdefault((row.size, row.precision), []).append(row)  # one workload and one precision per call
        order.append(row.row)
    for model_rows in models.values():
        predicted = memories(decoder_workload(model_rows[0].size), Layouts.from_measurements(model_rows)).total_bytes
        for row, total in zip(model_rows, predicted, strict=True):
            capacity = float(cluster(row.cluster).gpu.memory_bytes)
            held_out = row.table in NEVER_FITTED or not is_fitted(row)
            readings[row.row] = Reading(row, row.memory_bytes or 0.0, float(total), capacity, held_out)
    return tuple(readings[name] for name in order)


def _activations() -> list[tuple[str, float, float]]:
    """Name, published and predicted: bytes of the layers' activations, or their share of the plain layout's."""
    rows = [row for row in table(ACTIVATIONS) if row.usable and row.memory_reading == "activations"]
    plain = {
        row.size: float(_memory(row).activations[0])
        for row in rows
        if row.checkpointing == "none" and not row.sequence_parallel
    }
    figures = []
    for row in rows:
        predicted = float(_memory(row).activations[0])
        if row.memory_bytes is not None:
            figures.append((row.row, row.memory_bytes, predicted))
        elif row.memory_share is not None:
            # A share of the plain layout's, as the paper prints it.
            figures.append((row.row, row.memory_share, predicted / plain[row.size]))
    return figures


def _memory(row: Measurement) -> Memories:
    return memories(decoder_workload(row.size), Layouts.from_measurements([row]))


@dataclass(frozen=True)
class GoalResult:
    """Goal of the cost model, and what it comes to today.

    Attributes:
        name: that JSON gives it.
        what: in words.
        value: a share, or a number of rows or tables where `counted`.
        least, most: between which it is wanted.
        counted: whether the value is a number.
        detail: figures behind the value, in words.
        table: that it is of; empty for one of several tables.
    """

    name: str
    what: str
    value: float
    least: float = 0.0
    most: float = math.inf
    counted: bool = False
    detail: str = ""
    table: str = ""

    @property
    def reached(self) -> bool:
        """Whether the value is where it is wanted."""
        return self.least <= self.value <= self.most

    @property
    def reason(self) -> str:
        """Why the goal is missed, as far as is known; empty where it is reached or nothing is known."""
        return "" if self.reached else _reason(self.name)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "goal": self.name,
            "what": self.what,
            "value": self.value,
            "least": self.least,
            "most": None if math.isinf(self.most) else self.most,
            "reached": self.reached,
            "detail": self.detail,
            "reason": self.reason,
        }


def _reason(name: str) -> str:
    """Why a goal is missed, without a figure that could change; `docs/validation.md` says more."""
    match name:
        case "torchtitan, left out":
            return say(
                en="Its rows with several context-parallel ranks are slower than kernel and messages explain; nothing "
                "in the layout says why.",
                fr="Ses lignes à plusieurs rangs de parallélisme de contexte sont plus lentes que noyau et messages ne "
                "l’expliquent ; rien dans la configuration ne dit pourquoi.",
            )
        case "vtrain-multi, left out" | "vtrain-multi, left out, worst":
            return say(
                en="Some runs took 50% longer than the same layout with another micro-batch, one twice as long: "
                "a slow node or network, which no layout tells.",
                fr="Certaines exécutions ont duré 50 % de plus que la même configuration avec un autre micro-batch, "
                "l’une deux fois plus : un nœud ou un réseau lent, que la configuration ne dit pas.",
            )
        case "refused":
            return say(
                en="ZeRO-3 rows of V100 and SC21 do not print what was kept elsewhere beside the states: of some, the "
                "layer inputs alone exceed the GPU. NeMo does not print recomputation; none is taken.",
                fr="Les lignes ZeRO-3 de V100 et de SC21 ne disent pas ce qui, outre les états, était gardé ailleurs : "
                "de certaines, les seules entrées de couches dépassent le GPU. NeMo ne donne pas le recalcul ; on n’en "
                "compte aucun.",
            )
        case "constant":
            return say(
                en="MT-NLG is one layout on three numbers of GPUs, which one number meets; its software is slower than "
                "the same layout of Narayanan et al., and nothing was fitted on it.",
                fr="MT-NLG est une seule configuration sur trois nombres de GPU, qu’un seul nombre suffit à décrire ; "
                "son logiciel est plus lent que la même configuration de Narayanan et al., et rien n’y a été ajusté.",
            )
    return ""


def table_goals(result: TableResult) -> tuple[GoalResult, ...]:
    """List the goals of one table: its held-out half, its rows by the fit without it, its first choices."""
    name = result.name
    goal_results = []
    half, left_out_goal = GOALS.get(name), LEFT_OUT_GOALS.get(name)
    if left_out_goal is not None:
        words = say(en=f"{name}, table left out", fr=f"{name}, tableau écarté")
        detail = _long_rows(result) if any(_is_long(row_result) for row_result in result.rows) else ""
        goal_results.append(
            GoalResult(f"{name}, left out", words, result.left_out_mean, most=left_out_goal.mean, detail=detail)
        )
        if left_out_goal.worst is not None:
            worst = max(result.rows, key=lambda row_result: abs(row_result.left_out_error))
            words = say(en=f"{name}, table left out, worst row", fr=f"{name}, tableau écarté, pire ligne")
            limit, row = left_out_goal.worst, worst.row.row
            goal_results.append(
                GoalResult(f"{name}, left out, worst", words, result.left_out_worst, most=limit, detail=row)
            )
    if half is not None:
        words = say(en=f"{name}, half held out", fr=f"{name}, moitié mise de côté")
        goal_results.append(GoalResult(f"{name}, half", words, result.mean, most=half.mean))
        if half.worst is not None:
            words = say(en=f"{name}, half held out, worst row", fr=f"{name}, moitié mise de côté, pire ligne")
            goal_results.append(GoalResult(f"{name}, half, worst", words, result.worst, most=half.worst))
    regrets = [choice.regret for choice in first_choices(result)]
    if regrets and REGRET_GOAL.worst is not None:
        words = say(en=f"{name}, regret of the first choice, ", fr=f"{name}, regret du premier choix, ")
        median, greatest = say(en="median", fr="médiane"), say(en="worst", fr="pire")
        models = say(en=f"{len(regrets)} models", fr=f"{len(regrets)} modèles")
        middle, limit = statistics.median(regrets), REGRET_GOAL.mean  # seconds lost by the first choice, as a share
        goal_results.append(GoalResult(f"{name}, regret", words + median, middle, most=limit, detail=models))
        limit = REGRET_GOAL.worst
        goal_results.append(GoalResult(f"{name}, regret, worst", words + greatest, max(regrets), most=limit))
    return tuple(replace(goal, table=name) for goal in goal_results)


def _is_long(result: RowResult) -> bool:
    return result.row.size.sequence_length >= LONG


def _long_rows(result: TableResult) -> str:
    """Say how a table's long sequences do, and the others."""
    phrases = []
    for long, words in (
        (False, say(en=f"below {LONG} tokens", fr=f"sous {LONG} tokens")),
        (True, say(en="from there on", fr="à partir de là")),
    ):
        errors = [abs(row_result.left_out_error) for row_result in result.rows if _is_long(row_result) == long]
        phrases += [f"{words} {brief_percent(statistics.fmean(errors))} ({len(errors)})"] if errors else []
    return ", ".join(phrases)


def goals(results: Sequence[TableResult], memory: MemoryResult) -> tuple[GoalResult, ...]:
    """List all goals: those of each table, and those of several tables.

    Args:
        results: of all tables.
    """
    long = {result.name: [abs(row.left_out_error) for row in result.rows if _is_long(row)] for result in results}
    all_errors = [error for errors in long.values() for error in errors]
    error_text = ", ".join(
        f"{name} {brief_percent(statistics.fmean(errors))} ({len(errors)})" for name, errors in long.items() if errors
    )
    words = say(
        en=f"sequences of {LONG} tokens and more, table left out",
        fr=f"séquences de {LONG} tokens et plus, tableau écarté",
    )
    general_goals = [GoalResult("long", words, statistics.fmean(all_errors), most=0.08, detail=error_text)]
    beaten = [result.name for result in results if result.left_out_mean >= result.trivial]
    words = say(en="tables on which a constant rate is as good", fr="tableaux où un débit constant fait aussi bien")
    general_goals.append(GoalResult("constant", words, len(beaten), most=0, counted=True, detail=", ".join(beaten)))
    words = say(en="runs that ran and are refused", fr="exécutions qui ont tourné et sont refusées")
    share = len(memory.refused) / len(memory.ran)
    general_goals.append(GoalResult("refused", words, share, most=0.02, detail=_refusals(memory)))
    words = say(en="out-of-memory rows found", fr="lignes à court de mémoire trouvées")
    detail = say(en=f"of {len(memory.ran_out)}", fr=f"sur {len(memory.ran_out)}")
    general_goals.append(GoalResult("out of memory", words, len(memory.found), least=5, counted=True, detail=detail))
    words = say(en="memory read on Jean Zay, half held out", fr="mémoire relevée sur Jean Zay, moitié mise de côté")
    general_goals.append(GoalResult("memory", words, memory.mean, most=0.035))
    for profile in dict.fromkeys(result.profile for result in results):
        if sum(result.profile == profile for result in results) > 1:
            covered = interval(profile).coverage
            words = say(
                en=f"rows of a table left out within the interval, {profile.upper()}",
                fr=f"lignes d’un tableau écarté dans l’intervalle, {profile.upper()}",
            )
            general_goals.append(GoalResult(f"interval, {profile}", words, covered, *COVERED))
    single_table_goals = [goal for result in results for goal in table_goals(result)]
    return (*sorted(single_table_goals, key=lambda goal: _KINDS.index(goal.name.split(", ")[1])), *general_goals)


_KINDS: Final = ("left out", "half", "regret")


def _refusals(memory: MemoryResult) -> str:
    """Tables with refused rows that ran, and how many."""
    ran = Counter(reading.row.table for reading in memory.ran)
    lost = Counter(reading.row.table for reading in memory.ran if reading.too_much)
    preposition = say(en="of", fr="sur")
    counts = [f"{name} {number} {preposition} {ran[name]}" for name, number in lost.items()]
    remaining_runs = sum(number for name, number in ran.items() if name not in lost)
    return ", ".join(
        [*counts, say(en=f"all others 0 of {remaining_runs}", fr=f"tous les autres 0 sur {remaining_runs}")]
    )
