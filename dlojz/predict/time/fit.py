"""Fitting a calibration on a named half of published rows.

Layer 3. Invariant: which half a row belongs to follows from its name alone, so that nobody can choose; the fit sees
only the first half, within physical bounds, and writes down which rows those were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from dlojz.evidence import Measurement, table
from dlojz.hardware import Cluster, cluster
from dlojz.predict.time.calibration import BOUNDS, Calibration
from dlojz.predict.time.estimate import step_parts
from dlojz.predict.time.layouts import Layouts, Reals
from dlojz.predict.time.workload import decoder_workload

SERIES_FACTOR = {"before the PCIe fix": 1.05, "older formula": 1.05}
"""Jean Zay's rows before 25 February 2022 were taken with a fault of PCIe and NUMA; layouts run before and after its
repair took 5 % longer in the median of the five pairs (rows 726/848, 711/779, 608/781, 739/837, 740/838)."""


SLOW = "network slow"
"""Series of Jean Zay V100 rows on days when the same layout took 1.7 times as long: no layout explains them."""
PULL = 0.05
"""How strongly a parameter is held to where the search begins: its whole range weighs as much as an error of 5 % on one
row, which only matters for parameters that the rows hardly tell."""


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
    """Rows with a time that nothing excludes, of a whole model; not those taken on days of a slow network."""
    return [
        row for row in rows if row.usable and row.seconds is not None and row.size.layers > 1 and row.series != SLOW
    ]


def predicted_s(
    rows: Sequence[Measurement], calibration: Calibration, where: dict[str, Cluster] | None = None
) -> Reals:
    """Seconds of a step of every row, those of one size and cluster together."""
    found = np.zeros(len(rows))
    groups: dict[object, list[int]] = {}
    for place, row in enumerate(rows):
        groups.setdefault((row.size, row.cluster, row.precision), []).append(place)
    for places in groups.values():
        some = [rows[place] for place in places]
        machine = (where or {}).get(some[0].cluster) or cluster(some[0].cluster)
        made = step_parts(decoder_workload(some[0].size), machine, Layouts.from_measurements(some), calibration)
        found[places] = made.step_s
    return found * np.array([SERIES_FACTOR.get(row.series, 1.0) for row in rows])


def fitted(
    start: Calibration,
    rows: Sequence[Measurement],
    free: Sequence[str],
    *,
    weights: Callable[[Measurement], float] = lambda row: 1.0,
    evaluations: int = 60,
) -> Calibration:
    """The calibration that predicts these rows best, in the sum of absolute logarithms of predicted over measured.

    Absolute and not squared, because some published rows are off by what no layout explains (a slow node).

    Args:
        start: where the search begins; parameters that are not free stay as they are.
        rows: to fit on; each must print its micro-batch and a time.
        free: names of parameters.
        weights: of a row.
        evaluations: steps of the search at most.
    """
    from scipy.optimize import least_squares

    low = np.array([BOUNDS[name].low for name in free])
    high = np.array([BOUNDS[name].high for name in free])
    wanted = np.log(np.array([row.seconds for row in rows], float))
    weight = np.array([weights(row) for row in rows])
    expected = np.array([getattr(start, name) for name in free])

    def with_values(values: Reals) -> Calibration:
        scaled = low + np.clip(values, 0, 1) * (high - low)
        changed: dict[str, Any] = {name: float(value) for name, value in zip(free, scaled, strict=True)}
        return replace(start, **changed)

    def residuals(values: Reals) -> Reals:
        error = weight * (np.log(predicted_s(rows, with_values(values))) - wanted)
        away = low + values * (high - low) - expected
        return np.concatenate([error, PULL * away / (high - low)])

    begin = np.clip((np.array([getattr(start, name) for name in free]) - low) / (high - low), 1e-3, 1 - 1e-3)
    found = least_squares(
        residuals, begin, bounds=(0, 1), loss="soft_l1", f_scale=0.02, diff_step=1e-3, max_nfev=evaluations
    )
    return with_values(found.x)
