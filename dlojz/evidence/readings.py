"""Smaller tables of another form: collectives by message size, and the energy of a whole training.

Layer 1. Invariant: as in `loader`: what is read was understood word by word, else the sentence names file and line.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from dlojz.evidence.loader import FOLDER
from dlojz.schema import LabError
from dlojz.text import say

Reading = TypeVar("Reading")


@dataclass(frozen=True)
class CollectiveTime:
    """One measured collective: all-reduce of `message_bytes` among `ranks` GPUs of one node, in `time_s`."""

    gpu: str
    collective: str
    ranks: int
    message_bytes: int
    time_s: float


@dataclass(frozen=True)
class EnergyReading:
    """One published energy; `gpu_hours` and `gpu_power_w` are None where it is not that of the GPUs.

    Energy in kWh; carbon intensity in g of CO₂ equivalent per kWh; carbon in tonnes.
    """

    row: str
    source: str
    gpu_hours: float | None
    gpu_power_w: float | None
    energy_kwh: float
    carbon_g_per_kwh: float
    carbon_t: float


def _read(path: Path, build: Callable[[dict[str, str]], Reading]) -> tuple[Reading, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(
            say(en=f"{path.name} cannot be read: {error}.", fr=f"{path.name} est illisible : {error}.")
        ) from None
    skipped = sum(line.startswith("#") for line in lines)
    reader = csv.DictReader(lines[skipped:], strict=True)
    rows: list[Reading] = []
    try:
        for cells in reader:
            rows.append(build(cells))
    except (csv.Error, ValueError, KeyError, TypeError, AttributeError):
        line = skipped + reader.line_num
        raise LabError(
            say(
                en=f"{path.name}, line {line}: a number is missing or is none.",
                fr=f"{path.name}, ligne {line} : un nombre manque ou n’en est pas un.",
            )
        ) from None
    return tuple(rows)


def _collective(cells: dict[str, str]) -> CollectiveTime:
    sizes = int(cells["ranks"]), int(cells["message_bytes"])
    return CollectiveTime(cells["gpu"], cells["collective"], *sizes, float(cells["time_ns"]) * 1e-9)


def _energy(cells: dict[str, str]) -> EnergyReading:
    optional = [float(cells[name]) if cells[name].strip() else None for name in ("gpu_hours", "gpu_power_w")]
    figures = [float(cells[name]) for name in ("energy_kwh", "carbon_g_per_kwh", "carbon_t")]
    return EnergyReading(cells["row"], cells["source"], optional[0], optional[1], *figures)


def collective_times(path: Path = FOLDER / "collectives.csv") -> tuple[CollectiveTime, ...]:
    """Measured all-reduces by GPU, number of ranks and message size.

    Raises:
        LabError: if a line of the file is not legal.
    """
    return _read(path, _collective)


def energy(path: Path = FOLDER / "energy.csv") -> tuple[EnergyReading, ...]:
    """Published energies of a whole training (BLOOM's).

    Raises:
        LabError: if a line of the file is not legal.
    """
    return _read(path, _energy)
