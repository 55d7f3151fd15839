"""Fit the planner's cost model to published rows again, and write the files that the package ships of it.

    python benchmarks/fit_cost_model.py --profile a100   # its parameters: dlojz/cost_model/data/calibrations/a100.json
    python benchmarks/fit_cost_model.py --left-out       # the fits without each table, and the intervals from them

After one of them `python benchmarks/validation_page.py docs/validation.md` writes the pages of the errors again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import tyro

from dlojz.base.files import write_atomic
from dlojz.cost_model.calibration import BOUNDS, FOLDER, Calibration, Profile
from dlojz.cost_model.layouts import Reals
from dlojz.cost_model.validation import (
    FITTED_TABLES,
    LEFT_OUT,
    PROFILE_OF,
    completed,
    interval,
    is_fitted,
    predicted_s,
    usable,
)
from dlojz.hardware.evidence import Measurement, table
from dlojz.planner.answer import FILE, HeldOutErrors

PULL = 0.05
"""How strongly a parameter is held to where the search begins: its whole range weighs as much as an error of 5 % on one
row, which only matters for parameters that the rows hardly tell."""


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


class Recipe(NamedTuple):
    """Recipe of a profile: start and free parameters of its fit; each of its tables weighs the same.

    Attributes:
        start: where the search begins: what is known of this generation.
        free: the parameters that these tables tell.
        fixed: why the others are not fitted.
    """

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
        Calibration(
            "a100", 0.82, 0.3, 0.88, 0.15, 64.0, 1.0, 1.0, _LAUNCH_S, 5e-5, micro_batch_s=2e-4, step_s=0.0, overlap=0.56
        ),
        ("product_efficiency", "attention_efficiency", "unaligned", "serial_s"),
        _FIXED | {"micro_batch_s": "ten launches refill the GPU that Megatron's p2p_communication has synchronised"},
    ),
    "h100": Recipe(
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
        Calibration(
            "v100", 0.75, 0.3, 0.88, 0.5, 64.0, 1.0, 1.0, _LAUNCH_S, 5e-5, micro_batch_s=2e-4, step_s=0.0, overlap=0.44
        ),
        ("product_efficiency", "inter_efficiency", "unaligned"),
        _FIXED | dict.fromkeys(("attention_efficiency", "serial_s", "micro_batch_s"), _AS_A100),
    ),
}
"""How each shipped profile is made. Searches begin where benchmarks of products are (MAMF: 0.87 of the peak on A100,
0.80 on H100; less under a training's power)."""


def rows_of(name: str) -> list[Measurement]:
    """All usable rows of a profile's tables."""
    return [row for table_name in FITTED_TABLES[name] for row in usable(table(table_name))]


def fit_profile(name: str, *, without: str = "", rounds: int = 2, evaluations: int = 40) -> Profile:
    """Fit a profile on its half of the rows.

    Args:
        name: of the profile.
        without: of a table whose rows are all left out; then all rows of the others are fitted on.
        rounds: what rows do not print is completed again after each.
        evaluations: steps of the search at most.
    """
    calibration, free, fixed = RECIPES[name]
    tables = FITTED_TABLES[name]
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


def write_profile(path: Path, fitted_profile: Profile) -> None:
    """Write a profile as JSON, one row's name per line."""
    raw = asdict(fitted_profile) | {
        "name": fitted_profile.calibration.name,
        "parameters": fitted_profile.calibration.values,
    }
    del raw["calibration"]  # `name` and `parameters` stand for it
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(raw, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def write_left_out() -> None:
    """Fit every profile again without each of its tables, and keep the parameters."""
    parameters_by_table = {
        name: leave_table_out(name, key).values for key, tables in FITTED_TABLES.items() for name in tables
    }
    LEFT_OUT.write_text(json.dumps(parameters_by_table, indent=1) + "\n", encoding="utf-8")


def measured_held_out(profile: str) -> HeldOutErrors:
    """Compute the held-out errors of a profile; takes seconds."""
    errors = interval(profile)
    return HeldOutErrors(errors.rows, round(errors.low, 4), round(errors.high, 4), round(errors.mean, 4))


def write_held_out() -> None:
    """Fit without each table, and write the file of held-out errors again, after a profile was fitted."""
    write_left_out()  # the fits that the intervals are taken from
    profile_errors = {name: list(measured_held_out(name)) for name in sorted(set(PROFILE_OF.values()))}
    FILE.write_text(json.dumps(profile_errors, indent=1) + "\n", encoding="utf-8")


def main(profile: str = "", left_out: bool = False) -> None:
    """Fit and write.

    Args:
        profile: the one to fit again on its half of the rows: a100, h100, v100.
        left_out: fit without each table, and write the intervals of the planner's answers.
    """
    if profile:
        write_profile(FOLDER / f"{profile}.json", fit_profile(profile))
    if left_out:
        write_held_out()


if __name__ == "__main__":
    tyro.cli(main)
