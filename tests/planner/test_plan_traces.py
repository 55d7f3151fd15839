"""A kind of checkpointing that a model does not bear refuses its own layouts, not the plan."""

from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.planner.ask import plan
from dlojz.prediction.forecast import forecast
from dlojz.prediction.many_layouts import trace_refusal

IN_PLACE = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu_(self.conv(x))


def build() -> nn.Module:
    blocks = [Block() for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 8, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


def example_inputs() -> torch.Tensor:
    return torch.zeros(4, 3, 16, 16)
"""


@pytest.fixture
def in_place(tmp_path: Path) -> str:
    """A model whose blocks overwrite what selective checkpointing keeps: the result of a convolution."""
    file = tmp_path / "in_place.py"
    file.write_text(IN_PLACE)
    return f"{file}:build"


def test_forecast_refuses_selective_checkpointing_of_what_is_overwritten(in_place: str) -> None:
    forecast(RunConfig.of(model=in_place, checkpointing="full"))
    with pytest.raises(LabError, match=r"checkpointing='selective' cannot run with in_place.py:build, which runs with"):
        forecast(RunConfig.of(model=in_place, checkpointing="selective"))


def test_trace_refusal_is_the_forecast_s_sentence_and_empty_for_what_can_be_traced(in_place: str) -> None:
    assert trace_refusal(RunConfig.of(model=in_place, checkpointing="full")) == ""
    refused = RunConfig.of(model=in_place, checkpointing="selective")
    for _ in range(2):  # the second from what is remembered
        assert "checkpointing='selective' cannot run with in_place.py:build" in trace_refusal(refused)


def test_plan_refuses_one_layout_that_cannot_be_traced(in_place: str) -> None:
    made = plan(in_place, gpus=2, batch=8)
    assert made.found.admitted.size > 0
    assert made.why(dp=2, micro_batch=2, checkpointing="full").admitted
    verdict = made.why(dp=2, micro_batch=2, checkpointing="selective")
    assert not verdict.admitted and verdict.reason == "engine"
    assert "cannot run with in_place.py:build, which runs without it" in verdict.sentence
    assert verdict.change is not None
