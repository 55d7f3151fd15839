"""Amdahl's law over the layers: its arithmetic, with seconds that are given."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from dlojz.compress import quantized_speed
from dlojz.compress.measuring import Latency
from dlojz.compress.quantized_model import quantize_model
from dlojz.compress.quantized_speed import layer_shares, speed_forecast
from dlojz.compress.quantizers import Scheme


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def test_a_layer_of_a_shape_is_timed_once_and_counted_as_often_as_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []
    ratios = iter([0.5, 0.2])  # of the 8 × 8 layers, then of the 8 × 4 one

    def given(models: Sequence[nn.Module], inputs: torch.Tensor, rounds: int) -> list[Latency]:
        asked.append((len(models), *inputs.shape))
        return [Latency(ratio, ratio, ratio, ratio) for ratio in (1.0, next(ratios))]

    def shares(*_: object) -> tuple[dict[str, float], dict[str, torch.Size]]:
        return {"0": 0.2, "2": 0.25, "4": 0.3}, dict.fromkeys(("0", "2", "4"), torch.Size((5, 8)))

    monkeypatch.setattr(quantized_speed, "latencies", given)
    monkeypatch.setattr(quantized_speed, "layer_shares", shares)
    teacher = model()
    found = speed_forecast(teacher, quantize_model(teacher, Scheme()), torch.randn(5, 8))
    assert asked == [(2, 5, 8), (2, 5, 8)]
    after = (0.2 + 0.25) * 0.5 + 0.3 * 0.2
    assert found.share == pytest.approx(0.75)
    assert found.kernel_ratio == pytest.approx(after / 0.75)
    assert found.latency_ratio == pytest.approx(0.25 + after)


def test_every_layer_has_a_share_of_the_whole() -> None:
    shares, shapes = layer_shares(model(), torch.randn(5, 8), rounds=3)
    assert list(shares) == list(shapes) == ["0", "2", "4"]
    assert all(part > 0 for part in shares.values()) and sum(shares.values()) < 1
    assert all(shape == (5, 8) for shape in shapes.values())


def test_it_is_really_timed_and_leaves_no_hook() -> None:
    teacher = model()
    found = speed_forecast(teacher, quantize_model(teacher, Scheme()), torch.randn(5, 8), rounds=2)
    assert 0 < found.share < 1 and found.latency_ratio > 0
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in teacher.modules())
