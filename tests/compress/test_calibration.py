"""Watching the inputs of layers: the model is left as it was, and nothing is calibrated on no images."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress.quantizers import Scheme, linear_layers, observe


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return models.build("vit_tiny", image_size=16, num_classes=10).eval()


def images(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def test_every_linear_layer_is_seen_with_all_its_rows(model: nn.Module) -> None:
    seen = observe(model, images(70))  # two batches, the second not full
    assert list(seen) == list(linear_layers(model))
    tokens = model.blocks[0].position.shape[1]  # type: ignore[index, union-attr]
    for name, linear in linear_layers(model).items():
        rows = 70 if "classifier" in name else 70 * tokens
        assert seen[name].inputs_MI.shape == (rows, linear.in_features)


def test_observe_sees_what_enters_a_layer(model: nn.Module) -> None:
    last = list(linear_layers(model))[-1]
    seen = observe(model, images(8), [last])
    assert list(seen) == [last]
    with torch.no_grad():
        answer = model.get_submodule(last)(seen[last].inputs_MI)
        torch.testing.assert_close(answer, model(images(8)), rtol=1e-5, atol=1e-6)


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    observe(model, images(4))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("side", [3, 5])  # channels: 5 fail
def test_a_model_in_training_is_watched_without_dropout_and_goes_on_in_training(side: int) -> None:
    torch.manual_seed(0)
    model = models.build("vit_tiny", image_size=16, num_classes=10).train()
    frozen = model.get_submodule(next(iter(linear_layers(model)))).eval()
    seen: list[bool] = []
    hook = model.register_forward_pre_hook(lambda module, _: seen.append(module.training))
    with contextlib.suppress(RuntimeError):
        observe(model, torch.zeros(2, side, 16, 16))
    hook.remove()
    assert seen == [False]
    assert not frozen.training and all(module.training for module in model.modules() if module is not frozen)


def test_hooks_are_taken_off_after_a_failure(model: nn.Module) -> None:
    with pytest.raises(RuntimeError):
        observe(model, torch.zeros(2, 5, 16, 16))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_range_is_the_extremes_of_all_batches(model: nn.Module) -> None:
    name = next(iter(linear_layers(model)))
    seen = observe(model, images(70), [name])[name]
    low, high = seen.range(Scheme(8, False, False))
    assert (float(low), float(high)) == (float(seen.inputs_MI.min()), float(seen.inputs_MI.max()))


@pytest.mark.parametrize("nothing", [None, torch.zeros(0, 3, 16, 16)])
def test_calibration_without_data_is_refused_in_both_languages(model: nn.Module, nothing: torch.Tensor | None) -> None:
    for language, words in (("en", "0 images, but a static grid"), ("fr", "0 image, or une grille statique")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            observe(model, nothing)
