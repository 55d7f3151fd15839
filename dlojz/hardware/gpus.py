"""The GPUs' speed: peaks by precision, memory bandwidth, multiprocessors and power, read from files.

Layer 0. Invariant: a peak that a GPU does not have is absent, never zero; peaks are those of dense matrices (without
structured sparsity), per second, decimal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal, get_args

from dlojz.hardware.constants import Constant, ConstantsFile
from dlojz.hardware.devices import ALIASES, DEVICES, Device
from dlojz.schema import LabError, one_of

Precision = Literal["fp32", "tf32", "fp16", "bf16", "fp8"]
PRECISIONS: Final = get_args(Precision)
FOLDER: Final = Path(__file__).with_name("data") / "gpus"
GPUS: Final = tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))
"""Names of all GPUs, those of `DEVICES`, and `cpu` for a process without one."""
CPU: Final = "cpu"
SCALARS: Final = {
    "memory_bandwidth": "B/s",
    "multiprocessors": "1",
    "thermal_design_power": "W",
    "idle_power": "W",
}
"""Constants of a GPU's file besides its peaks, with their units."""
_OPTIONAL: Final = {"memory": "B"}
_KEYS: Final = ("title", "peak", *SCALARS, *_OPTIONAL)


@dataclass(frozen=True)
class Gpu:
    """A GPU as the cost model sees it.

    Args:
        name: as it is asked for, e.g. `a100-80`.
        title: as it is shown.
        device: its memory, and what is taken of it before a model gets anything.
        peak_flops: dense peak of the matrix units by precision, in FLOP/s; absent where the GPU has none.
        memory_bytes_per_s: bandwidth of its memory.
        num_sms: multiprocessors, over which the tiles of a product are dealt out.
        tdp_w: thermal design power.
        idle_w: power without work.
        constants: each figure with its source.
    """

    name: str
    title: str
    device: Device
    peak_flops: Mapping[Precision, float]
    memory_bytes_per_s: float
    num_sms: int
    tdp_w: float
    idle_w: float
    constants: Mapping[str, Constant]


def read_gpu(path: Path) -> Gpu:
    """The GPU that a file describes; its memory is that of the device of the same name, or stands in the file.

    Raises:
        LabError: if the file lacks a constant, or holds an illegal one.
    """
    file = ConstantsFile.read(path)
    file.keys(_KEYS)
    peaks = file.table("peak")
    file.keys(PRECISIONS, peaks)
    constants = {f"peak.{key}": file.constant(key, "FLOP/s", peaks, f"peak.{key}") for key in peaks}
    constants |= {key: file.constant(key, unit) for key, unit in SCALARS.items()}
    device = DEVICES.get(path.stem)
    if device is None:
        memory = file.constant("memory", _OPTIONAL["memory"])
        constants["memory"] = memory
        device = Device(path.stem, file.text("title"), int(memory.value), 0, 0, 0, memory.source)
    return Gpu(
        path.stem,
        file.text("title"),
        device,
        {key: constants[f"peak.{key}"].value for key in PRECISIONS if key in peaks},
        constants["memory_bandwidth"].value,
        int(constants["multiprocessors"].value),
        constants["thermal_design_power"].value,
        constants["idle_power"].value,
        constants,
    )


@cache
def _shipped(name: str) -> Gpu:
    return read_gpu(FOLDER / f"{name}.toml")


def gpu(name: str) -> Gpu:
    """The GPU of this name, in capitals or not.

    Raises:
        LabError: if there is none; the sentence lists those there are.
    """
    key = str(name).strip().lower().replace(" ", "-").replace("_", "-")
    key = ALIASES.get(key, key)
    if key not in GPUS:
        raise LabError(one_of("GPU", name, GPUS))
    return _shipped(key)
