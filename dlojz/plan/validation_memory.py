"""The memory model against published readings: Jean Zay's, those that ran out, and Korthikanti's activations.

Layer 4. Invariant: the reserve and what one layer takes were fitted on the first half of Jean Zay's readings only; an
out-of-memory row is found if the prediction is above what the GPU has.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from dlojz.evidence import Measurement, table
from dlojz.hardware import cluster
from dlojz.predict.time.estimate import memories
from dlojz.predict.time.fit import is_fitted
from dlojz.predict.time.layouts import Layouts
from dlojz.predict.time.memory import Memories
from dlojz.predict.time.workload import decoder_workload

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
    """All readings.

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
    """All published memory that the cost model is held against."""
    rows = [row for row in table(READINGS) if row.usable and row.micro_batch]
    readings: list[Reading] = []
    ran_out: list[Reading] = []
    for row in rows:
        if row.memory_bytes is None and row.outcome != "oom":
            continue
        predicted = float(_memory(row).total_bytes[0])
        capacity = float(cluster(row.cluster).gpu.device.memory_bytes)
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


def largest_error(result: MemoryResult) -> float:
    """The greatest absolute error of all readings."""
    return float(np.max([abs(one.error) for one in result.readings]))
