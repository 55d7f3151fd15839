"""The GPUs of the course."""

from __future__ import annotations

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.hardware import DEVICES, device


def test_each_has_its_memory_and_less_than_what_is_sold() -> None:
    assert list(DEVICES) == ["v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200"]
    for name, sold_gb in (("v100-16", 16), ("v100-32", 32), ("a100-40", 40), ("a100-80", 80), ("h100", 80)):
        assert 0.97 * sold_gb * 2**30 < DEVICES[name].memory_bytes < sold_gb * 2**30
    assert 0.97 * 141e9 < DEVICES["h200"].memory_bytes < 1.07 * 141e9


@pytest.mark.parametrize("name", DEVICES)
def test_context_and_nccl_are_taken_off(name: str) -> None:
    found = device(name)
    assert found.name == name and found.title
    assert 0.47 * 2**30 <= found.context_bytes + 2**20 <= 0.92 * 2**30
    assert found.allocatable_bytes() == found.memory_bytes - found.context_bytes
    assert found.allocatable_bytes(8) == found.allocatable_bytes() - found.nccl_bytes > 0.85 * found.memory_bytes


def test_cublas_takes_more_from_hopper_on() -> None:
    for name, known in DEVICES.items():
        assert known.cublas_workspace_bytes == (33_554_432 if name in ("h100", "h200") else 8_519_680)


def test_names_are_found_as_people_write_them() -> None:
    assert device("V100-32") is device("v100 32") is DEVICES["v100-32"]
    assert device("H100-80") is DEVICES["h100"]


def test_an_unknown_one_is_refused_in_one_sentence() -> None:
    with pytest.raises(LabError, match=r"unknown device 'v100-64': did you mean 'v100-\d\d'\? Legal values: v100-16"):
        device("v100-64")
    use_language("fr")
    with pytest.raises(LabError, match="valeurs permises"):
        device("tpu")
