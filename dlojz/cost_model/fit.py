"""Fit the cost model's calibration to published rows, and complete what a row does not print.

Which half of a table a row belongs to follows from its name alone; the fit sees the first half, and the profile lists
its rows. What a row does not print (micro-batch, chunks) is what the model finds fastest among what fits, whatever was
measured. `fit_profile(name)` makes a shipped profile again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np

from dlojz.base.errors import LabError
from dlojz.base.language import one_of
from dlojz.cost_model.calibration import BOUNDS, Calibration, Profile
from dlojz.cost_model.layouts import Layouts, Reals
from dlojz.cost_model.step import estimate, step_parts
from dlojz.cost_model.workload import decoder_workload
from dlojz.hardware import Cluster, cluster
from dlojz.hardware.evidence import Measurement, table

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
    """Select rows with a time that nothing excludes, of a whole model, without those of a slow network."""
    return [
        row for row in rows if row.usable and row.seconds is not None and row.size.layers > 1 and row.series != SLOW
    ]


def predicted_s(
    rows: Sequence[Measurement], calibration: Calibration, clusters: dict[str, Cluster] | None = None
) -> Reals:
    """Predict the seconds of a step of every row."""
    step_s = np.zeros(len(rows))
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        # One call of the cost model per group: its layouts share model, cluster and precision.
        groups.setdefault((row.size, row.cluster, row.precision), []).append(index)
    for indices in groups.values():
        group_rows = [rows[index] for index in indices]
        machine = (clusters or {}).get(group_rows[0].cluster) or cluster(group_rows[0].cluster)
        parts = step_parts(
            decoder_workload(group_rows[0].size), machine, Layouts.from_measurements(group_rows), calibration
        )
        step_s[indices] = parts.step_s
    return step_s * np.array([SERIES_FACTOR.get(row.series, 1.0) for row in rows])


def fitted(
    start: Calibration,
    rows: Sequence[Measurement],
    free: Sequence[str],
    *,
    weights: Callable[[Measurement], float] = lambda row: 1.0,
    evaluations: int = 60,
) -> Calibration:
    """Fit the calibration that predicts these rows best: least sum of |log(predicted / measured)|.

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
    log_measured = np.log(np.array([row.seconds for row in rows], float))
    weight = np.array([weights(row) for row in rows])
    expected = np.array([getattr(start, name) for name in free])

    # Every parameter goes from 0 to 1 over its bounds, so that one step of differences suits all.
    def with_values(values: Reals) -> Calibration:
        scaled = low + np.clip(values, 0, 1) * (high - low)
        changed: dict[str, Any] = {name: float(value) for name, value in zip(free, scaled, strict=True)}
        return replace(start, **changed)

    def residuals(values: Reals) -> Reals:
        # Of logarithms: twice too slow weighs as much as twice too fast.
        error = weight * (np.log(predicted_s(rows, with_values(values))) - log_measured)
        away = low + values * (high - low) - expected
        return np.concatenate([error, PULL * away / (high - low)])

    # Strictly inside the bounds, where differences can be taken.
    begin = np.clip((np.array([getattr(start, name) for name in free]) - low) / (high - low), 1e-3, 1 - 1e-3)
    solution = least_squares(
        # soft_l1: quadratic up to an error of 2 %, linear beyond.
        residuals,
        begin,
        bounds=(0, 1),
        loss="soft_l1",
        f_scale=0.02,
        diff_step=1e-3,
        max_nfev=evaluations,
    )
    return with_values(solution.x)


MICRO_BATCHES = (1, 2, 3, 4, 5, 6, 8, 12, 16)


def is_complete(row: Measurement) -> bool:
    """Whether a row prints all that its time depends on."""
    return bool(row.micro_batch) and not (row.schedule == "interleaved" and row.chunks == 1)


def completed(row: Measurement, calibration: Calibration) -> Measurement:
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
        decoder_workload(row.size), cluster(row.cluster), Layouts.from_measurements(candidates), calibration
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


class Recipe(NamedTuple):
    """Recipe of a profile: tables, start and free parameters of its fit.

    Attributes:
        tables: whose first halves it is fitted on; each table weighs the same.
        start: where the search begins: what is known of this generation.
        free: the parameters that these tables tell.
        fixed: why the others are not fitted.
    """

    tables: tuple[str, ...]
    start: Calibration
    free: tuple[str, ...]
    fixed: dict[str, str]


_AS_A100: Final = "about as on A100: these few rows, on a network that varied by 1.7, do not tell it"
_LAUNCH_S: Final = 2e-5
_FIXED: Final = {
    "launch_s": "taken: 10 µs of PyTorch and of the CUDA driver, and as much of the module's Python around it; no row "
    "of the tables here is bound by launching kernels",
    "memory_efficiency": "0.88 of the peak, as STREAM-like benchmarks reach",
    "intra_efficiency": "the links were measured as they are; what computing takes of them is in overlap",
    "inter_efficiency": "as intra_efficiency",
    "overlap": "24 channels of NCCL take as many multiprocessors: what a product of 1 to 10 waves loses to the waves "
    "it needs more, in the mean, is never hidden",
    "step_s": "launches and scalar all-reduces of a step are counted",
    "product_start": "prologue and epilogue of a tile: its inner loop takes 64 elements at a time",
}
RECIPES: Final[dict[str, Recipe]] = {
    "a100": Recipe(
        ("korthikanti-5", "sc21-1", "sc21-2", "jean-zay-a100", "vtrain-multi"),
        Calibration(
            "a100", 0.82, 0.3, 0.88, 0.15, 64.0, 1.0, 1.0, _LAUNCH_S, 5e-5, micro_batch_s=2e-4, step_s=0.0, overlap=0.56
        ),
        ("product_efficiency", "attention_efficiency", "unaligned", "serial_s"),
        _FIXED | {"micro_batch_s": "ten launches refill the GPU that Megatron's p2p_communication has synchronised"},
    ),
    "h100": Recipe(
        ("megatron-h100", "torchtitan", "llama-3", "nemo-h100"),
        Calibration(
            "h100", 0.72, 0.3, 0.88, 0.15, 64.0, 1.0, 1.0, _LAUNCH_S, micro_batch_s=0.0, step_s=0.0, overlap=0.61
        ),
        ("product_efficiency",),
        _FIXED
        | {
            "attention_efficiency": "as on A100: attention is fused in all rows",
            "unaligned": "as on A100: all sizes are aligned",
            "serial_s": "as on A100",
            "micro_batch_s": "messages between stages are asynchronous: nothing is synchronised",
        },
    ),
    "v100": Recipe(
        ("jean-zay-v100",),
        Calibration(
            "v100", 0.75, 0.3, 0.88, 0.5, 64.0, 1.0, 1.0, _LAUNCH_S, 5e-5, micro_batch_s=2e-4, step_s=0.0, overlap=0.44
        ),
        ("product_efficiency", "inter_efficiency", "unaligned"),
        _FIXED | dict.fromkeys(("attention_efficiency", "serial_s", "micro_batch_s"), _AS_A100),
    ),
}
"""How each shipped profile is made. Searches begin where benchmarks of products are (MAMF: 0.87 of the peak on A100,
0.80 on H100; less under a training's power)."""


def recipe(name: str) -> Recipe:
    """How a profile is made.

    Raises:
        LabError: if there is none of this name.
    """
    if name not in RECIPES:
        raise LabError(one_of("calibration", name, RECIPES))
    return RECIPES[name]


def rows_of(name: str) -> list[Measurement]:
    """All usable rows of a profile's tables."""
    return [row for table_name in recipe(name).tables for row in usable(table(table_name))]


def fit_profile(name: str, *, without: str = "", rounds: int = 2, evaluations: int = 40) -> Profile:
    """Fit a profile on its half of the rows.

    Args:
        name: of the profile.
        without: of a table whose rows are all left out; then all rows of the others are fitted on.
        rounds: what rows do not print is completed again after each.
        evaluations: steps of the search at most.
    """
    tables, calibration, free, fixed = recipe(name)
    rows = [row for row in rows_of(name) if row.table != without and (without or is_fitted(row))]
    held_out = [row.row for row in rows_of(name) if row not in rows]
    number = {table_name: sum(row.table == table_name for row in rows) for table_name in tables}

    def weigh(row: Measurement) -> float:
        return float((20 / number[row.table]) ** 0.5)  # squared, each table weighs as 20 rows

    for _ in range(rounds if rows else 0):
        # What is fastest depends on the parameters, so what a row leaves out is filled in anew.
        complete_rows = [completed(row, calibration) for row in rows]
        calibration = fitted(calibration, complete_rows, free, weights=weigh, evaluations=evaluations)
    # Five significant digits, as the file keeps them.
    rounded: dict[str, Any] = {parameter: float(f"{value:.5g}") for parameter, value in calibration.values.items()}
    calibration = replace(calibration, **rounded)
    return Profile(
        calibration,
        tuple(row.row for row in rows),
        tuple(held_out),
        f"least absolute error on every second row (by SHA-256 of its name) of {', '.join(tables)}",
        date.today().isoformat(),
        {parameter: fixed[parameter] for parameter in BOUNDS if parameter not in free},
    )


def leave_table_out(table_name: str, name: str, *, evaluations: int = 4) -> Calibration:
    """Fit a profile on all rows of its other tables; where there is none, nothing is fitted.

    Args:
        table_name: of the table whose rows are left out.
        name: of the profile.
        evaluations: steps of the search at most.
    """
    return fit_profile(name, without=table_name, rounds=1, evaluations=evaluations).calibration
