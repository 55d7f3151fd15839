"""Permutations: the model computes the same, and 2:4 keeps of its weights what was said."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.compress import permutations
from dlojz.compress.permutations import kept_magnitude, permuted_for_2_of_4, together
from dlojz.compress.two_to_four import linear_layers
from dlojz.models.blocks import TransformerBlock


def magnitude_kept(weight_OI: torch.Tensor) -> float:
    """Share of the sum of all magnitudes that 2:4 leaves."""
    return kept_magnitude(weight_OI) / float(weight_OI.abs().double().sum())


ROUNDED = 5e-6
"""Of the output's norm: float32 rounds to 6e-8, some twenty sums one after the other; how they are cut into vectors,
and with it the rounding, hangs on the processor (8e-7 seen with AVX-512, 1.1e-6 without)."""


def model_and_inputs(name: str) -> tuple[nn.Module, Tensor]:
    """With biases and norms that are not the 0 and 1 of the beginning, which hide a permutation that forgot them."""
    torch.manual_seed(0)
    if name == "vit_tiny":
        model, inputs = models.build(name, image_size=16, num_classes=10), torch.randn(8, 3, 16, 16)
    else:
        model, inputs = models.build(name, sequence_length=16), torch.randint(0, 256, (4, 16))
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model.eval(), inputs


@torch.no_grad()
def shuffled(model: nn.Module, kind: str) -> nn.Module:
    """A copy under permutations drawn at random, another one in every block and head."""
    found, generator = copy.deepcopy(model), torch.Generator().manual_seed(7)

    def order(length: int) -> Tensor:
        return torch.randperm(length, generator=generator)

    if kind == "stream":
        permutations.permute_stream(found, order(128))
    for block in found.modules():
        if isinstance(block, TransformerBlock):
            if kind == "hidden":
                permutations.permute_dense_pair(block.mlp_expand, block.mlp_project, order(512))
            for head in range(4):
                if kind == "query_key":
                    permutations.permute_query_key(block, head, order(32))
                if kind == "value_output":
                    permutations.permute_value_output(block, head, order(32))
    return found


@pytest.mark.parametrize("name", ["vit_tiny", "gpt_tiny"])
@pytest.mark.parametrize("kind", ["stream", "hidden", "value_output", "query_key"])
@torch.no_grad()
def test_the_output_is_unchanged(name: str, kind: str) -> None:
    """In float64 to 1e-12 of the output; in float32 to what sums in another order round differently."""
    model, inputs = model_and_inputs(name)
    found = shuffled(model, kind)
    changed = [key for key, tensor in model.state_dict().items() if not torch.equal(tensor, found.state_dict()[key])]
    assert len(changed) >= 8
    before, after = model(inputs), found(inputs)
    assert (after - before).norm() < ROUNDED * before.norm()
    if inputs.is_floating_point():
        inputs = inputs.double()
    before, after = model.double()(inputs), found.double()(inputs)
    assert (after - before).abs().max() < 1e-12 * before.abs().max()


@torch.no_grad()
def test_an_order_that_is_applied_to_one_side_only_changes_the_output() -> None:
    """So that the test above can fail."""
    model, inputs = model_and_inputs("vit_tiny")
    for side in ("mlp_expand", "mlp_project"):
        found = shuffled(model, "hidden")
        for block, other in zip(found.modules(), model.modules(), strict=True):
            if isinstance(block, TransformerBlock):
                getattr(block, side).load_state_dict(getattr(other, side).state_dict())
        assert (found(inputs) - model(inputs)).norm() > 0.01 * model(inputs).norm()


@torch.no_grad()
def test_consecutive_dense_layers_of_another_model() -> None:
    torch.manual_seed(0)
    model = models.build("alexnet_tiny", image_size=64, num_classes=10).eval()
    model, inputs = model.double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    before = model(inputs)
    first, second, last = model.blocks[-3].dense, model.blocks[-2].dense, model.blocks[-1]
    permutations.permute_dense_pair(first, second, torch.randperm(first.out_features))
    permutations.permute_dense_pair(second, last, torch.randperm(second.out_features))
    assert (model(inputs) - before).norm() < 1e-12 * before.norm()


@torch.no_grad()
def test_the_orders_chosen_keep_more_and_the_layers_really_keep_what_is_said() -> None:
    model, inputs = model_and_inputs("vit_tiny")
    weights = {name: layer.weight.clone() for name, layer in linear_layers(model).items()}
    found, kept = permuted_for_2_of_4(model, sweeps=1)
    both = copy.deepcopy(model).double()(inputs.double()), copy.deepcopy(found).double()(inputs.double())
    assert (both[1] - both[0]).norm() < 1e-12 * both[0].norm()
    assert all(torch.equal(layer.weight, weights[name]) for name, layer in linear_layers(model).items())
    assert all(one.after > one.before >= 0.5 for one in kept)
    layers = linear_layers(found)
    for kind, block in {(one.kind, one.block) for one in kept}:
        one = together([head for head in kept if (head.kind, head.block) == (kind, block)], block)
        name = {"hidden": f"{one.block}.mlp_project", "value_output": f"{one.block}.attention_project"}.get(one.kind)
        if name is not None:
            assert magnitude_kept(weights[name]) == pytest.approx(one.before, abs=1e-9)
            assert magnitude_kept(layers[name].weight) == pytest.approx(one.after, abs=1e-9)
    # Stream, hidden and values together are all dense layers, each once.
    total = sum(float(weight.abs().double().sum()) for weight in weights.values())
    after = sum(magnitude_kept(layer.weight) * float(layer.weight.abs().double().sum()) for layer in layers.values())
    assert together(kept).magnitude == pytest.approx(total, rel=1e-6)
    assert together(kept).after == pytest.approx(after / total, rel=1e-6)


@pytest.mark.parametrize(("name", "what"), [("moe_tiny", "TransformerBlock"), ("llama_tiny", "Embedding")])
def test_models_whose_permutations_are_not_written_are_refused(name: str, what: str) -> None:
    model = models.build(name, sequence_length=16)
    for language, words in (("en", f"but {what} was received"), ("fr", f"mais {what} a été reçu")):
        use_language(language)
        with pytest.raises(LabError, match=words):
            permuted_for_2_of_4(model)
