"""The shipped profiles: on which tables each was fitted, from where, which parameters those tables tell.

Layer 3. Invariant: `fit_profile(name)` makes the shipped file again; nobody writes a parameter by hand.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from typing import Any, Final, NamedTuple

import numpy as np

from dlojz.evidence import Measurement, table
from dlojz.predict.time.calibration import BOUNDS, Calibration, Profile
from dlojz.predict.time.completion import completed
from dlojz.predict.time.fit import fitted, is_fitted, predicted_s, usable
from dlojz.schema import LabError, one_of


class Recipe(NamedTuple):
    """How a profile is made.

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


_ALWAYS: Final = (
    "product_efficiency", "attention_efficiency", "memory_efficiency", "intra_efficiency", "inter_efficiency",
    "micro_batch_s", "step_s", "overlap",
)  # fmt: skip
_AS_A100: Final = "about as on A100: these few rows, on a network that varied by 1.7, do not tell it"
_LAUNCH_S: Final = 3.5e-5
_LAUNCH: Final = (
    "3.4 ms for a layer of width 1024 and micro-batch 1 in vTrain's single-node set (ground_truth_single.csv), "
    "whatever its layout: no row of the tables here is bound by launching kernels"
)
RECIPES: Final[dict[str, Recipe]] = {
    "a100": Recipe(
        ("korthikanti-5", "sc21-1", "sc21-2", "jean-zay-a100", "vtrain-multi"),
        Calibration(
            "a100",
            0.82,
            0.3,
            0.88,
            0.15,
            32.0,
            1.0,
            0.8,
            _LAUNCH_S,
            serial_s=5e-5,
            micro_batch_s=5e-4,
            step_s=0.03,
            overlap=0.5,
        ),
        (*_ALWAYS, "unaligned", "product_start", "serial_s"),
        {"launch_s": _LAUNCH},
    ),
    "h100": Recipe(
        ("megatron-h100", "torchtitan", "llama-3", "nemo-h100"),
        Calibration(
            "h100", 0.72, 0.5, 0.88, 0.15, 64.0, 1.0, 0.8, _LAUNCH_S, micro_batch_s=2e-4, step_s=0.01, overlap=0.6
        ),
        (*_ALWAYS, "product_start"),
        {"launch_s": _LAUNCH, "unaligned": "as on A100: all sizes are aligned", "serial_s": "as on A100"},
    ),
    "v100": Recipe(
        ("jean-zay-v100",),
        Calibration(
            "v100",
            0.75,
            0.3,
            0.88,
            0.5,
            0.0,
            1.0,
            0.8,
            _LAUNCH_S,
            serial_s=5e-5,
            micro_batch_s=5e-4,
            step_s=0.03,
            overlap=0.5,
        ),
        ("product_efficiency", "inter_efficiency", "micro_batch_s", "overlap", "unaligned"),
        {
            "launch_s": _LAUNCH,
            "attention_efficiency": _AS_A100,
            "memory_efficiency": "0.88 of the peak, as STREAM-like benchmarks reach on V100",
            "product_start": "as on A100, where it is 0",
            "intra_efficiency": "the link was measured on these nodes",
            "serial_s": _AS_A100,
            "step_s": _AS_A100,
        },
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
    return [row for one in recipe(name).tables for row in usable(table(one))]


def fit_profile(name: str, *, without: str = "", rounds: int = 2, evaluations: int = 60) -> Profile:
    """Fit a profile on its half of the rows.

    Args:
        name: of the profile.
        without: of a model (`model_of`) whose rows are all left out.
        rounds: what rows do not print is completed again after each.
        evaluations: steps of the search at most.
    """
    tables, found, free, fixed = recipe(name)
    rows = [row for row in rows_of(name) if is_fitted(row) and model_of(row) != without]
    held = [row.row for row in rows_of(name) if not is_fitted(row) or model_of(row) == without]
    number = {one: sum(row.table == one for row in rows) for one in tables}

    def weigh(row: Measurement) -> float:
        return float((20 / number[row.table]) ** 0.5)

    for _ in range(rounds):
        some = [completed(row, found) for row in rows]
        found = fitted(found, some, free, weights=weigh, evaluations=evaluations)
    rounded: dict[str, Any] = {one: float(f"{value:.5g}") for one, value in found.values.items()}
    found = replace(found, **rounded)
    return Profile(
        found,
        tuple(row.row for row in rows),
        tuple(held),
        f"least absolute error on every second row (by SHA-256 of its name) of {', '.join(tables)}",
        date.today().isoformat(),
        {one: fixed[one] for one in BOUNDS if one not in free},
    )


def model_of(row: Measurement) -> str:
    """The model of a row, by its width and depth: what is left out whole when one model is."""
    return f"{row.size.hidden}x{row.size.layers}"


def leave_one_out(name: str, *, evaluations: int = 15) -> dict[str, float]:
    """Mean absolute error on all rows of each model, of a fit that saw none of them.

    Args:
        name: of the profile.
        evaluations: steps of each search; there is one for each model.
    """
    rows = rows_of(name)
    errors: dict[str, float] = {}
    for model in dict.fromkeys(model_of(row) for row in rows):
        found = fit_profile(name, without=model, rounds=1, evaluations=evaluations).calibration
        own = [completed(row, found) for row in rows if model_of(row) == model]
        measured = np.array([row.seconds for row in own], float)
        errors[model] = float(np.abs(predicted_s(own, found) / measured - 1).mean())
    return errors
