"""Steps that `make gpu` has measured on a GPU are what today's code predicts of them."""

import statistics
from pathlib import Path

import pytest

from benchmarks import gpu, gpu_units
from benchmarks.gpu_units import Unit
from dlojz.cost_model.measured_machine import Measured, local_step_s

FOLDERS = sorted(path.parent for path in gpu.RECORDS.glob("gpu-*/place.json"))
SOME = ("gpt2-bf16", "coatnet_0-bf16-selective", "tinyllama_1b-bf16-in_backward", "tinyllama_1b-fp32-in_backward")
"""Of 66, which `python benchmarks/gpu.py --records FOLDER --predict` shows: a decoder, convolutions with recomputation,
heads that share keys in both precisions (two other kernels of attention)."""
TIMED = ("gpt2-fp32", "gpt2-bf16-sgd", "gpt2-bf16-in_forward", "coatnet_0-bf16-sgd")
"""The GPU is the slower one in the first, its host in the others; two of them are in every folder."""
MOST_OFF = 0.11
"""Of the seconds, in the median: that of the 66 is 0.08."""


def unit(name: str) -> Unit:
    return next(one for one in gpu_units.units(stand_in=False) if one.id == f"memory-{name}")


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
@pytest.mark.parametrize("name", SOME)
def test_gpu_records_have_the_tensors_predicted_and_nearly_what_is_allocated(folder: Path, name: str) -> None:
    place = gpu.read_place(folder)
    record = gpu.Records(folder, place).read(unit(name))
    assert record is not None and record.state == "done"
    told = gpu_units.predict(unit(name), place)
    assert told is not None
    assert told["peak_bytes"] - told["cublas_bytes"] == pytest.approx(record.result["traced"]["peak_bytes"], rel=1e-4)
    assert told["allocated_bytes"] == pytest.approx(record.result["allocator"]["allocated_bytes"], rel=0.01)


@pytest.mark.parametrize("folder", FOLDERS, ids=[folder.name for folder in FOLDERS])
def test_seconds_are_near_those_predicted_from_kernels_and_host(folder: Path) -> None:
    records = gpu.Records(folder, gpu.read_place(folder))
    calibrated = records.read(next(one for one in gpu_units.units(stand_in=False) if one.id == "time-calibration"))
    assert calibrated is not None
    machine, errors = Measured.from_dict(calibrated.result), []
    for name in TIMED:
        record, config = records.read(unit(name)), unit(name).config
        assert config is not None
        if record is not None:
            errors.append(abs(local_step_s(machine, config) / record.result["step_s"]["median"] - 1))
    assert len(errors) >= 2
    assert statistics.median(errors) < MOST_OFF and max(errors) < 2 * MOST_OFF
