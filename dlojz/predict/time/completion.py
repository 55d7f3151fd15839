"""What a published row does not print, completed: its micro-batch and its chunks.

Layer 3. Invariant: the rule is the same for every row, and never looks at what was measured: authors are taken to have
chosen what the model finds fastest among what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from dlojz.evidence import Measurement
from dlojz.hardware import cluster
from dlojz.predict.time.calibration import Calibration
from dlojz.predict.time.estimate import estimate
from dlojz.predict.time.layouts import Layouts
from dlojz.predict.time.workload import decoder_workload

MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def is_complete(row: Measurement) -> bool:
    """Whether a row prints all that its time depends on."""
    return bool(row.micro_batch) and not (row.schedule == "interleaved" and row.chunks == 1)


def completed(row: Measurement, calibration: Calibration) -> Measurement:
    """The row itself, or with the micro-batch and chunks that are fastest among those that fit its GPUs.

    torchtitan makes as many micro-batches as there are stages unless it is told otherwise.

    Source: torchtitan, `job_config.py`, `pipeline_parallel_microbatches`, as of the paper.
    """
    if is_complete(row):
        return row
    candidates = list(_candidates(row))
    if not candidates:
        return replace(row, micro_batch=row.micro_batch or 1)
    made = estimate(
        decoder_workload(row.size), cluster(row.cluster), Layouts.from_measurements(candidates), calibration
    )
    fitting = np.where(made.fits, made.step_s, np.inf)
    best = int(np.argmin(fitting)) if np.isfinite(fitting).any() else int(np.argmin(made.memory_bytes))
    return candidates[best]


def _candidates(row: Measurement) -> Iterator[Measurement]:
    samples = row.global_batch // row.dp
    sizes = [row.micro_batch] if row.micro_batch else [one for one in MICRO_BATCHES if samples % one == 0]
    if row.micro_batch is None and row.engine == "torchtitan" and row.pp > 1 and samples % row.pp == 0:
        sizes = [samples // row.pp]
    layers = row.size.layers // row.pp
    for size in sizes:
        number = samples // size
        free = row.schedule == "interleaved" and row.chunks == 1
        chunks = [one for one in range(2, layers + 1) if layers % one == 0 and number % row.pp == 0] if free else []
        for one in chunks or [row.chunks]:
            yield replace(row, micro_batch=size, chunks=one)
