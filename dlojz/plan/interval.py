"""How far a predicted step may be from a measured one: an interval from rows that no parameter was fitted on.

Layer 4. Invariant: empirical, from `dlojz.plan.validation`: of the held-out rows of a profile, four in five had a
measured time within the interval's factors of the predicted one. Nothing is assumed normal, and a model or machine
unlike those rows may be further off, which is said.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from dlojz.plan.validation import PROFILE_OF, validate, validated

FILE: Final = Path(__file__).with_name("held_out.json")
SHARE: Final = 0.8
"""Of the held-out rows within the interval."""


class HeldOut(NamedTuple):
    """Errors of a profile on rows that it was not fitted on.

    Attributes:
        rows: how many.
        low, high: factors on a predicted time between which `SHARE` of the measured ones were.
        mean: mean absolute error, as a share.
    """

    rows: int
    low: float
    high: float
    mean: float


def measured_held_out(profile: str) -> HeldOut:
    """The errors of a profile, from all its held-out rows; takes a second."""
    rows = [row for name in validated() if PROFILE_OF[name] == profile for row in validate(name).held]
    ratios = np.array([row.measured_s / row.predicted_s for row in rows])
    low, high = np.quantile(ratios, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    mean = float(np.abs(1 / ratios - 1).mean())
    return HeldOut(len(rows), round(float(low), 4), round(float(high), 4), round(mean, 4))


@cache
def held_out(profile: str) -> HeldOut | None:
    """The errors of a shipped profile, as kept in a file; None for another calibration, which nothing is known of."""
    kept: dict[str, list[float]] = json.loads(FILE.read_text(encoding="utf-8"))
    found = kept.get(profile)
    return None if found is None else HeldOut(int(found[0]), *found[1:])


def write_held_out() -> None:
    """Make the file again, after a profile was fitted anew."""
    made = {name: list(measured_held_out(name)) for name in sorted(set(PROFILE_OF.values()))}
    FILE.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
