"""Calibration: how much of its peaks a generation of GPUs reaches with its software, in a dozen bounded parameters.

A profile says on which rows it was fitted; errors are reported on the other half. Nothing here is specific to one
model, table or cluster.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, refusal

FOLDER: Final = Path(__file__).with_name("data") / "calibrations"


class Bound(NamedTuple):
    """A parameter's physical range, and what it is.

    Attributes:
        low, high: the least and the greatest value that can be true.
        unit: empty for a share.
        meaning: in one phrase.
    """

    low: float
    high: float
    unit: str
    meaning: str

    def clip(self, value: float) -> float:
        """The nearest value within the range."""
        return min(max(value, self.low), self.high)


BOUNDS: Final[dict[str, Bound]] = {
    "product_efficiency": Bound(0.4, 0.98, "", "of the dense peak, large aligned product with full waves"),
    "attention_efficiency": Bound(0.05, 0.95, "", "of the dense peak, products of attention"),
    "memory_efficiency": Bound(0.4, 0.95, "", "of the memory's bandwidth, passes over large tensors"),
    "unaligned": Bound(0.02, 1.0, "", "speed of a product whose sizes are not multiples of 16 bytes"),
    "product_start": Bound(0.0, 1024.0, "elements", "inner size at which a product reaches half its speed"),
    "intra_efficiency": Bound(0.3, 1.1, "", "of the measured bandwidth within a node, while computing"),
    "inter_efficiency": Bound(0.1, 1.0, "", "of the measured bandwidth between nodes, while computing"),
    "launch_s": Bound(1e-6, 60e-6, "s", "the host needs for one kernel with what is around it in Python"),
    "serial_s": Bound(0.0, 100e-6, "s", "a kernel and its host lose where launches wait (CUDA_LAUNCH_BLOCKING=1)"),
    "micro_batch_s": Bound(0.0, 0.005, "s", "a pipeline stage loses per micro-batch and direction to synchronisation"),
    "step_s": Bound(0.0, 5.0, "s", "once per step: data, norms, loss scale, logging"),
    "overlap": Bound(0.0, 0.95, "", "of communication with computation: 0 none, towards 1 all of the shorter"),
}
"""At most twelve."""


@dataclass(frozen=True)
class Calibration:
    """Efficiencies and overheads of one generation of GPUs with its software.

    Attributes:
        name: of the profile, e.g. `a100`.
        product_efficiency, attention_efficiency, memory_efficiency, unaligned, product_start, intra_efficiency,
        inter_efficiency, launch_s, serial_s, micro_batch_s, step_s, overlap: as `BOUNDS` says.

    Raises:
        LabError: if a parameter is out of its bounds.
    """

    name: str
    product_efficiency: float = 0.87
    attention_efficiency: float = 0.5
    memory_efficiency: float = 0.8
    unaligned: float = 0.3
    product_start: float = 32.0
    intra_efficiency: float = 0.9
    inter_efficiency: float = 0.8
    launch_s: float = 35e-6
    serial_s: float = 30e-6
    micro_batch_s: float = 1e-3
    step_s: float = 0.1
    overlap: float = 0.5

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            value = getattr(self, name)
            # Also of a profile's file: a value beyond what is physical is refused, not clipped.
            if not (isinstance(value, int | float) and bound.low <= value <= bound.high):
                raise refusal(
                    en=f"{name} is {bound.meaning}, between {bound.low:g} and {bound.high:g} {bound.unit}".rstrip()
                    + f", but {value!r} was received.",
                    fr=f"{name} doit être compris entre {bound.low:g} et {bound.high:g} {bound.unit}".rstrip()
                    + f", mais {value!r} a été reçu.",
                )

    @property
    def values(self) -> dict[str, float]:
        """The parameters by name, in the order of `BOUNDS`."""
        return {name: getattr(self, name) for name in BOUNDS}


@dataclass(frozen=True)
class Profile:
    """Calibration with its provenance, as its file keeps it.

    Attributes:
        calibration: the parameters.
        fitted_on: names of the rows it was fitted on.
        held_out: names of the rows of the same tables that were kept for reporting.
        source, date: what made it, when.
        fixed: parameters that these rows do not tell, taken from elsewhere, with the reason.
    """

    calibration: Calibration
    fitted_on: tuple[str, ...]
    held_out: tuple[str, ...]
    source: str
    date: str
    fixed: Mapping[str, str]


def calibration(name: str) -> Calibration:
    """Read the parameters of a shipped profile (`v100`, `a100`, `h100`), or of a file.

    Raises:
        LabError: if there is none of this name, or the file is not legal.
    """
    return profile(name).calibration


@cache
def profile(name: str) -> Profile:
    """Read a shipped profile, or one from a file, with its provenance.

    Raises:
        LabError: if there is none of this name, or the file is not legal.
    """
    # A bare name is a shipped profile, anything with a folder or `.json` a file.
    path = FOLDER / f"{name}.json" if "/" not in name and not name.endswith(".json") else Path(name)
    names = sorted(file.stem for file in FOLDER.glob("*.json"))
    if not path.is_file():
        raise LabError(one_of("calibration", name, names))
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        values = {key: float(value) for key, value in raw["parameters"].items()}
        legal = {field.name for field in fields(Calibration)}
        for key in values:
            if key not in legal:
                raise LabError(one_of("parameter", key, BOUNDS))
        return Profile(
            Calibration(name=str(raw["name"]), **values),
            tuple(raw["fitted_on"]),
            tuple(raw["held_out"]),
            str(raw["source"]),
            str(raw["date"]),
            dict(raw.get("fixed", {})),
        )
    except LabError:  # a ValueError too, which the next clause would reword
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise refusal(
            en=f"{path.name} is no calibration ({error!r}): it needs name, parameters, fitted_on, held_out, source "
            "and date.",
            fr=f"{path.name} n’est pas un calibrage ({error!r}) : il lui faut name, parameters, fitted_on, "
            "held_out, source et date.",
        ) from None
