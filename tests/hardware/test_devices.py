"""The GPUs of the course, and the common ones of everybody else."""

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.hardware import DEVICES, device
from dlojz.hardware.gpus import device_of_driver


def test_each_has_its_memory_and_less_than_what_is_sold() -> None:
    assert list(DEVICES) == [
        "t4", "a10g", "rtx3090", "l4", "v100-16", "v100-32", "a6000", "rtx4090", "a100-40", "a100-80", "l40s", "h100",
        "h200", "mi300x", "b200", "gb200",
    ]  # fmt: skip
    for name, gpu in DEVICES.items():
        sold_gb = int(gpu.title_en.split()[-2])
        in_gigabytes = name in ("h200", "b200", "gb200")  # of 10⁹ bytes
        share = gpu.memory_bytes / (sold_gb * (1e9 if in_gigabytes else 2**30))
        assert (0.99 if in_gigabytes else 0.9) < share < (1.07 if in_gigabytes else 1.0), (name, share)


@pytest.mark.parametrize("name", DEVICES)
def test_context_and_nccl_are_taken_off(name: str) -> None:
    found = device(name)
    assert found.name == name and found.title
    assert 0.47 * 2**30 <= found.context_bytes + 2**20 <= 0.92 * 2**30
    assert found.allocatable_bytes() == found.memory_bytes - found.context_bytes
    assert found.allocatable_bytes(8) == found.allocatable_bytes() - found.nccl_bytes > 0.85 * found.memory_bytes


def test_cublas_takes_more_from_hopper_on() -> None:
    for name, known in DEVICES.items():
        assert known.cublas_workspace_bytes == (33_554_432 if name in ("h100", "h200", "b200", "gb200") else 8_519_680)


def test_names_are_found_as_people_write_them() -> None:
    assert device("V100-32") is device("v100 32") is DEVICES["v100-32"]
    assert device("H100-80") is DEVICES["h100"]
    assert device("RTX 4090") is DEVICES["rtx4090"] and device("rtx-a6000") is DEVICES["a6000"]


@pytest.mark.parametrize(
    ("driver", "name"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 3090", "rtx3090"),
        ("NVIDIA GeForce RTX 3090 Ti", ""),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", ""),
        ("NVIDIA RTX A6000", "a6000"),
        ("NVIDIA RTX 6000 Ada Generation", ""),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("AMD Instinct MI300X", "mi300x"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("Tesla V100-SXM2-32GB", "v100-32"),
        ("Tesla V100 of a size that is not known", ""),
        ("NVIDIA GeForce RTX 3060", ""),
        ("NVIDIA GH200 480GB", ""),
    ],
)
def test_device_of_driver_takes_no_other_card_of_a_like_name(driver: str, name: str) -> None:
    found = device_of_driver(driver)
    assert ("" if found is None else found.name) == name


def test_peak_flops_by_hand_are_units_times_operations_times_clock() -> None:
    """Of an RTX 4090 128 multiprocessors × 4 units × 64 products × 2 operations × 2.52 GHz, with sums in fp32."""
    assert device("rtx4090").peak_flops["bf16"] == pytest.approx(128 * 4 * 64 * 2 * 2.52e9, rel=0.01)
    assert device("l40s").peak_flops["bf16"] == pytest.approx(142 * 4 * 128 * 2 * 2.52e9 * 0.99, rel=0.03)
    assert device("t4").peak_flops["fp16"] == pytest.approx(40 * 8 * 64 * 2 * 1.59e9, rel=0.01)
    assert device("rtx3090").peak_flops["bf16"] == pytest.approx(82 * 4 * 64 * 2 * 1.695e9, rel=0.01)


def test_an_unknown_one_is_refused_in_one_sentence() -> None:
    with pytest.raises(LabError, match=r"unknown device 'v100-64': did you mean 'v100-\d\d'\? Legal values: t4, a10g"):
        device("v100-64")
    use_language("fr")
    with pytest.raises(LabError, match="valeurs permises"):
        device("tpu")
