"""Steps that `make gpu` has measured on a GPU are what today's code predicts of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu, gpu_units
from benchmarks.gpu_units import Unit

FOLDERS = sorted(path.parent for path in gpu.RECORDS.glob("gpu-*/place.json"))
SOME = ("gpt2-bf16", "coatnet_0-bf16-selective", "tinyllama_1b-bf16-in_backward", "tinyllama_1b-fp32-in_backward")
"""Of 66, which `python benchmarks/gpu.py --records FOLDER --predict` shows: a decoder, convolutions with recomputation,
heads that share keys in both precisions (two other kernels of attention)."""


def unit(name: str) -> Unit:
    return next(one for one in gpu_units.units(stand_in=False) if one.id == f"memory-{name}")


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
@pytest.mark.parametrize("name", SOME)
def test_tensors_are_those_predicted_and_what_is_allocated_is_near(folder: Path, name: str) -> None:
    place = gpu.read_place(folder)
    record = gpu.Records(folder, place).read(unit(name))
    assert record is not None and record.state == "done"
    told = gpu_units.predict(unit(name), place)
    assert told is not None
    assert told["peak_bytes"] - told["cublas_bytes"] == pytest.approx(record.result["traced"]["peak_bytes"], rel=1e-4)
    assert told["allocated_bytes"] == pytest.approx(record.result["allocator"]["allocated_bytes"], rel=0.01)
