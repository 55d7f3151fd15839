"""Volumes per step against the ZeRO paper; against the counted bytes they are tested in tests/train."""

from __future__ import annotations

import pytest

from dlojz import predict
from dlojz.config import RunConfig
from dlojz.predict.communication import ddp_buckets, deepspeed_buckets
from dlojz.units import MEBIBYTE


def sent_per_parameter(**fields: object) -> float:
    """Bytes that a rank sends in a ring, per parameter and per byte of a weight, times N/(N−1)."""
    config = RunConfig.of(model="coatnet_7", engine="deepspeed", precision="bf16", dp=64, **fields)
    footprint = predict(config)
    sent_bytes = sum(traffic.sent_bytes for traffic in footprint.communication if traffic.group == "dp")
    return sent_bytes / (63 / 64) / 2 / (footprint.parameters or 1)


@pytest.mark.parametrize(("stage", "volumes"), [(0, 2), (3, 3)])
def test_the_paper_s_volumes(stage: int, volumes: float) -> None:
    """Rajbhandari et al. 2020, §7.1 and §7.2.2: 2Ψ for data parallelism, 3Ψ for stage 3; padding is the tolerance."""
    assert sent_per_parameter(zero=stage) == pytest.approx(volumes, rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2])
def test_deepspeed_all_reduces_where_the_paper_reduce_scatters(stage: int) -> None:
    """The paper's 2Ψ for stages 1 and 2 need a reduce-scatter; DeepSpeed's bucketed all-reduce makes them 3Ψ."""
    assert sent_per_parameter(zero=stage) == pytest.approx(3, rel=1e-3)


def test_fsdp2_sends_what_the_paper_says() -> None:
    for stage, volumes in ((2, 2), (3, 3)):
        config = RunConfig.of(model="coatnet_7", dp=4, zero=stage)
        footprint = predict(config)
        sent_bytes = sum(traffic.sent_bytes for traffic in footprint.communication if traffic.group == "dp")
        assert sent_bytes / (3 / 4) / 4 / (footprint.parameters or 1) == pytest.approx(volumes, rel=1e-3)


def test_one_process_sends_nothing() -> None:
    assert predict(RunConfig.of()).communication == ()


def test_buckets() -> None:
    assert ddp_buckets([]) == 0
    assert ddp_buckets([MEBIBYTE, 25 * MEBIBYTE, 1]) == 3
    assert ddp_buckets([MEBIBYTE - 1, 1, 1]) == 2
    assert deepspeed_buckets([1_999_999, 1, 1]) == 2
    assert deepspeed_buckets([5_000_000, 1]) == 2
