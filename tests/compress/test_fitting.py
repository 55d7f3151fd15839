"""The one training loop: the same seed the same weights, and each hook called when it should be."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress.task import Settings, accuracy, digits, fit, latencies, logits, new_model


def test_fit_gives_the_same_weights_for_the_same_seed_and_others_for_another() -> None:
    task = digits().few(96)
    found = []
    for seed in (0, 0, 1):
        model = new_model("vit_mini", task, seed)
        fit(model, task, Settings(epochs=1, batch_size=32, seed=seed))
        found.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


def test_fit_learns_and_tells() -> None:
    task, model = digits(), None
    model = new_model("vit_mini", task, 0)
    told: list[tuple[int, int]] = []
    after: list[int] = []
    settings = Settings(epochs=2)
    losses = fit(model, task, settings, after_step=after.append, progress=lambda *at: told.append(at))
    assert len(losses) == settings.steps(task) == 44
    assert after == list(range(1, 45)) and told == [(step, 44) for step in after]
    assert not model.training and accuracy(model, task) > 0.8 and losses[-1] < losses[0] / 2


def test_fit_leaves_what_does_not_learn() -> None:
    task, model = digits().few(64), new_model("vit_mini", digits(), 0)
    frozen = model.blocks[0]
    assert isinstance(frozen, nn.Module)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fit(model, task, Settings(epochs=1))
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if not name.startswith("blocks.0.")}


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"epochs": 0}, "epochs must be at least 1, but 0 was received"),
        ({"epochs": -3}, "epochs must be at least 1, but -3 was received"),
        ({"batch_size": 0}, "batch_size must be at least 1, but 0 was received"),
        ({"learning_rate": 0.0}, "learning_rate must be finite and above 0, but 0.0 was received"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite and above 0, but nan was received"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite and above 0, but inf was received"),
    ],
)
def test_settings_that_train_nothing_are_refused(asked: dict[str, Any], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        Settings(**asked)
    use_language("fr")
    with pytest.raises(LabError, match="mais .* a été reçu"):
        Settings(**asked)


def test_a_turn_may_be_of_several_calls_and_its_seconds_are_of_one() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, inputs: Tensor) -> Tensor:
            self.calls += 1
            time.sleep(0.002)
            return inputs

    counted = [Counting(), Counting()]
    found = latencies(counted, torch.zeros(1), rounds=3, calls=5)
    assert [one.calls for one in counted] == [2 + 3 * 5] * 2
    assert all(one.seconds >= 0.002 for one in found)
    for asked in ({"rounds": 0}, {"calls": 0}):
        with pytest.raises(LabError, match="must be at least 1, but 0 was received"):
            latencies(counted, torch.zeros(1), **asked)


def test_accuracy_is_the_share_that_is_right() -> None:
    task = digits()

    class Always(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return torch.nn.functional.one_hot(torch.full((len(inputs),), 3), 10).float()

    assert accuracy(Always(), task) == int((task.held_out_labels_N == 3).sum()) / 360
    assert logits(Always(), task.held_out_NCHW, batch_size=100).shape == (360, 10)
