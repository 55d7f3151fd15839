"""Validate the cost model against published measurements: seconds and memory, row by row.

Which half of a table a row belongs to follows from its name alone; the fit of a profile sees the first half
(`benchmarks/fit_cost_model.py`), and the profile lists its rows. What a row does not print (micro-batch, chunks) is
what the model finds fastest among what fits, whatever was measured.

An error called held out comes from rows that no parameter was fitted on; one with the table left out from a fit that
saw no row of it, nor of its software. The trivial model, a constant rate per GPU, is fitted on the very rows that it is
measured on. Of memory, the reserve and what one layer takes were fitted on the first half
of Jean Zay's readings; an out-of-memory row is found if the prediction is above what the GPU has. The planner's regret
is what its first choice among the measured layouts of a model loses to the best of them. `docs/validation.md` says all
of it.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal, say
from dlojz.cost_model.calibration import FOLDER, Calibration, calibration, of_gpu
from dlojz.cost_model.layout_memory import Memories
from dlojz.cost_model.layouts import Layouts, Reals
from dlojz.cost_model.step import estimate, memories, step_parts
from dlojz.cost_model.workload import decoder_workload
from dlojz.hardware import Cluster, Device, cluster
from dlojz.hardware.decoder_size import flops_per_sequence
from dlojz.hardware.evidence import TABLES, Measurement, table

SERIES_FACTOR = {"before the PCIe fix": 1.05, "older formula": 1.05}
"""Jean Zay's rows before 25 February 2022 were taken with a fault of PCIe and NUMA; layouts run before and after its
repair took 5 % longer in the median of the five pairs (rows 726/848, 711/779, 608/781, 739/837, 740/838)."""
FITTED_TABLES: Final = {
    "a100": ("korthikanti-5", "sc21-1", "sc21-2", "jean-zay-a100", "vtrain-multi"),
    "h100": ("megatron-h100", "torchtitan", "llama-3", "nemo-h100"),
    "v100": ("jean-zay-v100",),
}
"""By profile: the tables on whose first halves it was fitted."""
SLOW = "network slow"
"""Series of Jean Zay V100 rows on days when the same layout took 1.7 times as long: no layout explains them."""


@cache
def fitted_half(name: str) -> frozenset[str]:
    """Names of the rows of a table that are fitted on: every second one in the order of their names' SHA-256."""
    names = [row.row for row in usable(table(name))]
    return frozenset(sorted(names, key=lambda row: hashlib.sha256(row.encode()).hexdigest())[1::2])


def is_fitted(row: Measurement) -> bool:
    """Whether a row is in the half of its table that is fitted on."""
    return row.row in fitted_half(row.table)


def usable(rows: Iterable[Measurement]) -> list[Measurement]:
    """Select rows with a time that nothing excludes, of a whole model, without those of a slow network."""
    return [
        row for row in rows if row.usable and row.seconds is not None and row.size.layers > 1 and row.series != SLOW
    ]


def cluster_of(row: Measurement, gpu: Device | None = None) -> Cluster:
    """The cluster of a row, with another GPU where one is given."""
    return cluster(row.cluster) if gpu is None else replace(cluster(row.cluster), gpu=gpu)


def predicted_s(rows: Sequence[Measurement], calibration: Calibration, gpu: Device | None = None) -> Reals:
    """Predict the seconds of a step of every row; with another GPU than its cluster's where one is given."""
    step_s = np.zeros(len(rows))
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        # One call of the cost model per group: its layouts share model, cluster and precision.
        groups.setdefault((row.size, row.cluster, row.precision), []).append(index)
    for indices in groups.values():
        group_rows = [rows[index] for index in indices]
        machine = cluster_of(group_rows[0], gpu)
        parts = step_parts(
            decoder_workload(group_rows[0].size), machine, Layouts.from_measurements(group_rows), calibration
        )
        step_s[indices] = parts.step_s
    return step_s * np.array([SERIES_FACTOR.get(row.series, 1.0) for row in rows])


MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def is_complete(row: Measurement) -> bool:
    """Whether a row prints all that its time depends on."""
    return bool(row.micro_batch) and not (row.schedule == "interleaved" and row.chunks == 1)


def completed(row: Measurement, calibration: Calibration, gpu: Device | None = None) -> Measurement:
    """Fill in the micro-batch and chunks of a row: the fastest among those that fit its GPUs.

    torchtitan makes as many micro-batches as there are stages unless configured otherwise.

    Source: torchtitan, `job_config.py`, `pipeline_parallel_microbatches`, as of the paper.
    """
    if is_complete(row):
        return row
    candidates = list(_candidates(row))
    if not candidates:
        return replace(row, micro_batch=row.micro_batch or 1)  # no listed micro-batch divides the batch
    estimates = estimate(
        decoder_workload(row.size), cluster_of(row, gpu), Layouts.from_measurements(candidates), calibration
    )
    fitting = np.where(estimates.fits, estimates.step_s, np.inf)
    # None fits: the one that needs least.
    best = int(np.argmin(fitting)) if np.isfinite(fitting).any() else int(np.argmin(estimates.memory_bytes))
    return candidates[best]


def _candidates(row: Measurement) -> Iterator[Measurement]:
    samples = row.global_batch // row.dp  # of a replica per step
    sizes = [row.micro_batch] if row.micro_batch else [size for size in MICRO_BATCHES if samples % size == 0]
    if row.micro_batch is None and row.engine == "torchtitan" and row.pp > 1 and samples % row.pp == 0:
        sizes = [samples // row.pp]  # as many micro-batches as stages
    layers = row.size.layers // row.pp
    for size in sizes:
        number = samples // size
        free = row.schedule == "interleaved" and row.chunks == 1
        # Equal chunks of a stage, two at least; interleaving takes a multiple of pp micro-batches.
        chunks = (
            [divisor for divisor in range(2, layers + 1) if layers % divisor == 0 and number % row.pp == 0]
            if free
            else []
        )
        for num_chunks in chunks or [row.chunks]:
            yield replace(row, micro_batch=size, chunks=num_chunks)


NEVER_FITTED: Final = {
    "mt-nlg": "a100", "mpt-a100": "a100", "fms-a100": "a100", "mpt-h100": "h100", "mpt-h100-fp8": "h100",
    "fms-h100": "h100", "nemo-long": "h100", "bridge-moe": "h100",
}  # fmt: skip
"""Tables of which no row was fitted on, and the profile that predicts them."""
PROFILE_OF: Final = {name: key for key, tables in FITTED_TABLES.items() for name in tables} | NEVER_FITTED
"""The profile that predicts each table's times."""


class Tool(NamedTuple):
    """Error of another tool on a table.

    Attributes:
        mean: mean absolute error, as a share; None where it follows from what it has published row by row.
        note: who found it, on what, and whether it was tuned to these rows.
    """

    name: str
    mean: float | None
    note: str


def _tools() -> dict[str, tuple[Tool, ...]]:
    tables = tomllib.loads((Path(__file__).with_name("data") / "tools.toml").read_text(encoding="utf-8"))
    return {
        name: tuple(Tool(tool["name"], tool.get("mean"), tool["note"]) for tool in tools)
        for name, tools in tables.items()
    }


TOOLS: Final = _tools()
"""What is known of other tools, table by table."""


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
        profile: the calibration that predicted it.
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
        """Mean absolute error of all rows by the constant rate per GPU that makes it least."""
        return statistics.fmean(abs(result.trivial_s / result.measured_s - 1) for result in self.rows)

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

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
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


def validate(name: str, gpu: Device | None = None) -> TableResult:
    """Validate one table: predict every usable row.

    Args:
        name: of a table, or a `.csv` file, of which nothing was fitted on.
        gpu: instead of that of the rows' clusters, with the calibration of its generation.

    Raises:
        LabError: for a table that prints no times, or that there is not.
    """
    if name not in PROFILE_OF and not name.endswith(".csv"):
        if name in TABLES:
            names = ", ".join(validated())
            raise refusal(
                en=f"the table {name!r} prints no step times of whole models, so there is nothing to compare: name "
                f"another one ({names}).",
                fr=f"le tableau {name!r} ne donne pas de durées d’itération de modèles entiers, il n’y a rien à "
                f"comparer : nommez-en un autre ({names}).",
            )
        raise LabError(one_of("table", name, validated()))
    usable_rows = usable(table(name))
    is_own = gpu is not None or name not in PROFILE_OF
    if not usable_rows:
        raise LabError(say(en=f"{name} prints no step times.", fr=f"{name} ne donne pas de durées d’itération."))
    parameters = of_gpu(cluster_of(usable_rows[0], gpu).gpu) if is_own else calibration(PROFILE_OF[name])
    left_out_calibration = parameters if is_own else without_table(name)
    rows = [completed(row, parameters, gpu) for row in usable_rows]
    predicted = predicted_s(rows, parameters, gpu)
    fitted = [not is_own and name not in NEVER_FITTED and is_fitted(row) for row in usable_rows]  # True: the fit saw it
    measured = [row.seconds or math.nan for row in rows]
    left_out_rows = [completed(row, left_out_calibration, gpu) for row in usable_rows]
    left_out_s = predicted_s(left_out_rows, left_out_calibration, gpu)
    rates = [_flops(row) / row.gpus / seconds for row, seconds in zip(rows, measured, strict=True)]
    rate = constant_rate(rates)
    results = tuple(
        RowResult(row, seconds, float(guess), float(without_s), _flops(row) / row.gpus / rate, not in_fit)
        for row, seconds, guess, without_s, in_fit in zip(rows, measured, predicted, left_out_s, fitted, strict=True)
    )
    return TableResult(name, parameters.name, results)


def constant_rate(rates: Sequence[float]) -> float:
    """Find the constant whose mean absolute error of seconds, as a share, is least on rows of these rates.

    The error of row i is |rateᵢ/rate − 1|, a weighted distance of 1/rate from 1/rateᵢ: its weighted median is least.
    """
    rising = np.sort(rates)
    return float(rising[np.searchsorted(np.cumsum(rising), rising.sum() / 2)])


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


def interval(profile: str) -> Interval:
    """Find the interval of a profile from fits that saw no row of the table predicted.

    Each table weighs the same, but one of less than `FULL_WEIGHT` rows as its rows.

    Each table is covered by the interval of all the others, and the interval is widened until that comes to four
    in five. Stragglers only add time, so that its upper part is the wider one.
    """
    results = [validate(name) for name in validated() if PROFILE_OF[name] == profile]
    # Measured over predicted, row by row.
    tables = [np.array([row.measured_s / row.left_out_s for row in result.rows]) for result in results]
    if len(results) == 1:  # nothing else was measured on these GPUs: the half that was held out
        tables = [np.array([row.measured_s / row.predicted_s for row in results[0].held])]
    for level in np.arange(0.8, 1.0, 0.005):  # widened until the coverage is met
        covered = []
        for index, ratios in enumerate(tables):
            low, high = _quantiles(tables[:index] + tables[index + 1 :] or [ratios], level)  # all tables but this one
            covered.append(float(((low <= ratios) & (ratios <= high)).mean()))
        coverage = float(np.average(covered, weights=[_weight(ratios) for ratios in tables]))
        if coverage >= 0.8:
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
        if "checkpointing" not in row.assumed
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
