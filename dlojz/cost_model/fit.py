"""Select published rows for the fit of a calibration, predict them, and complete what a row does not print.

Which half of a table a row belongs to follows from its name alone; the fit sees the first half, and the profile lists
its rows. What a row does not print (micro-batch, chunks) is what the model finds fastest among what fits, whatever was
measured. `benchmarks/fit_cost_model.py` makes the shipped profiles again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import numpy as np

from dlojz.cost_model.calibration import Calibration
from dlojz.cost_model.layouts import Layouts, Reals
from dlojz.cost_model.step import estimate, step_parts
from dlojz.cost_model.workload import decoder_workload
from dlojz.hardware import Cluster, Device, cluster
from dlojz.hardware.evidence import Measurement, table

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
    """Names of the rows of a table that are fitted on: every second one in the order of their names' SHA-256.

    Args:
        name: of the table.
    """
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
