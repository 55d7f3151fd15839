"""Amdahl's law over the layers: its arithmetic, with seconds that are given."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from dlojz.compress import quantized_model
from dlojz.compress.quantized_model import layer_shares, quantize_model, speed_forecast
from dlojz.compress.quantizers import Scheme
from dlojz.compress.task import Latency


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

    monkeypatch.setattr(quantized_model, "latencies", given)
    monkeypatch.setattr(quantized_model, "layer_shares", shares)
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


def test_what_is_made_of_one_teacher_is_foreseen_from_the_same_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    timed = layer_shares

    def counted(*given: object) -> object:
        asked.append(1)
        return timed(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(quantized_model, "layer_shares", counted)
    teacher, images = model(), torch.randn(5, 8)
    forms = [quantize_model(teacher, Scheme(bits)) for bits in (8, 4)]
    first, second = (speed_forecast(teacher, form, images, rounds=2) for form in forms)
    assert len(asked) == 1 and first.share == second.share
    speed_forecast(teacher, forms[0], torch.randn(6, 8), rounds=2)
    speed_forecast(model(), forms[0], images, rounds=2)
    assert len(asked) == 3


def test_layer_shares_are_not_decided_by_an_interrupted_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two layers, a hundred times as long as an answer; and within one, in another round."""
    clock = [0.0]
    monkeypatch.setattr(quantized_model.time, "perf_counter", lambda: clock[0])

    class Ticking(nn.Linear):
        after = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            clock[0] += self.after
            return super().forward(x)

    class Between(nn.Module):
        turn = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Between.turn += 1
            Ticking.after = 500.0 if Between.turn == 5 else 1.0
            clock[0] += 300.0 if Between.turn == 3 else 3.0
            return x

    teacher = nn.Sequential(Between(), Ticking(4, 4))
    shares, _ = layer_shares(teacher, torch.zeros(1, 4), rounds=5)
    assert shares == {"1": 0.25}
