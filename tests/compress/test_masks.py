"""Masks by magnitude: as many as asked for, those that torch would choose, and held while the rest learns."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import prune

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import masks
from dlojz.compress.task import Task, cross_entropy, digits, new_model


@pytest.fixture(scope="module")
def task() -> Task:
    return digits().few(128)


@pytest.mark.parametrize("sparsity", [-0.1, 1, 1.0, 2, math.nan, -math.inf])
@pytest.mark.parametrize(("language", "words"), [("en", "from 0 to below 1, but"), ("fr", "de 0 compris à 1 exclu")])
def test_magnitude_masks_refuse_a_sparsity_outside_its_range_in_one_sentence(
    sparsity: float, language: str, words: str
) -> None:
    use_language(language)
    for ask in (
        lambda: masks.pruned_count(10, sparsity),
        lambda: masks.magnitude_mask(torch.ones(4), sparsity),
        lambda: masks.magnitude_masks({"a": torch.ones(4)}, sparsity, per_layer=True),
    ):
        with pytest.raises(LabError, match=words) as refused:
            ask()
        assert str(sparsity) in str(refused.value) and "\n" not in str(refused.value)


@given(st.integers(1, 300), st.floats(0, 1, exclude_max=True), st.integers(0, 3))
def test_magnitude_mask_removes_exactly_as_many_as_are_asked_for(elements: int, sparsity: float, levels: int) -> None:
    """With few different magnitudes nearly all are equal: a threshold would take too many."""
    weight = torch.arange(elements).remainder(levels + 1).float() - 1
    mask = masks.magnitude_mask(weight, sparsity)
    assert int((~mask).sum()) == round(sparsity * elements)
    if 0 < int(mask.sum()) < elements:
        assert weight[~mask].abs().max() <= weight[mask].abs().min()


def test_of_equal_magnitudes_the_first_go() -> None:
    assert masks.magnitude_mask(torch.tensor([1.0, -1.0, 1.0, -1.0]), 0.5).tolist() == [False, False, True, True]


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.77, 0.99])
def test_they_are_the_masks_of_torch(sparsity: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Conv1d(3, 5, 4), nn.LayerNorm(7), nn.Linear(30, 7))
    found = masks.weights(model)
    assert set(found) == {"0", "2", "4"}
    globally, each = copy.deepcopy(model), copy.deepcopy(model)
    layers = [(module, "weight") for module in masks.prunable(globally).values()]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=sparsity)
    for name, mask in masks.magnitude_masks(found, sparsity).items():
        assert torch.equal(mask, globally.get_submodule(name).weight_mask.bool())
    for name, mask in masks.magnitude_masks(found, sparsity, per_layer=True).items():
        prune.l1_unstructured(each.get_submodule(name), "weight", amount=sparsity)
        assert torch.equal(mask, each.get_submodule(name).weight_mask.bool())


def test_what_is_masked_gets_no_gradient_and_the_rest_the_gradient_of_the_masked_model(task: Task) -> None:
    model = new_model("vit_mini", task, 0)
    kept = masks.magnitude_masks(masks.weights(model), 0.5, per_layer=True)
    plain = copy.deepcopy(model)
    masks.hold(plain, kept)
    masks.release(plain)
    masks.hold(model, kept)
    for one in (model, plain):
        torch.autograd.backward(cross_entropy(one, *next(task.batches(32, 0))))
    for name, mask in kept.items():
        gradient = model.get_submodule(name).weight_orig.grad
        assert not gradient[~mask].any()
        assert torch.equal(gradient[mask], plain.get_submodule(name).weight.grad[mask])


def test_layers_without_a_mask_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = model[1].weight.clone()
    masks.hold(model, {"0": torch.zeros(4, 4, dtype=torch.bool)})
    assert prune.is_pruned(model[0]) and not prune.is_pruned(model[1])
    masks.release(model)
    assert not model[0].weight.any() and torch.equal(model[1].weight, before)


def test_weights_are_those_of_now_and_not_of_the_last_forward_pass() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    masks.hold(model)
    with torch.no_grad():
        model[0].weight_orig.fill_(3.0)
    masks.renew(model, {"0": torch.tensor([[True, False], [True, True]])})
    assert masks.weights(model)["0"].tolist() == [[3.0, 0.0], [3.0, 3.0]]
    assert masks.removed_and_all(model) == (1, 4)
