"""Models with mixtures: as many parameters as published, and a routing of one's own where there are experts."""

import pytest
import torch

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.models.experts.layer import expert_parameters, mixtures
from dlojz.models.experts.routing import Routing
from dlojz.models.sizes import GPTSize

# Jiang et al. 2024 (arXiv 2401.04088) and the announcement of 8x22B print these, in billions.
PUBLISHED = {"mixtral_8x7b": (46.7, 12.9), "mixtral_8x22b": (141, 39)}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    summary = models.describe(name)
    total, active = PUBLISHED[name]
    assert summary.parameters / 1e9 == pytest.approx(total, rel=0.004)
    assert summary.active_parameters / 1e9 == pytest.approx(active, rel=0.006)


def test_a_token_meets_all_of_a_dense_model() -> None:
    summary = models.describe("gpt_tiny")
    assert summary.active_parameters == summary.parameters


def test_moe_tiny_is_gpt_tiny_with_experts_in_every_second_block() -> None:
    dense, mixed = models.describe("gpt_tiny"), models.describe("moe_tiny")
    one_mlp = 2 * 128 * 512 + 512 + 128
    assert mixed.parameters - dense.parameters == 2 * (7 * one_mlp + 8 * 128)  # 7 experts more, and a gate
    assert mixed.active_parameters - dense.parameters == 2 * 8 * 128
    model = models.build("moe_tiny")
    assert [name for name, _ in mixtures(model)] == ["blocks.2.mixture", "blocks.4.mixture"]
    assert len(expert_parameters(model)) == 8


def test_the_routing_is_the_models_own_or_the_one_given() -> None:
    size = models.spec("moe_tiny").size
    assert isinstance(size, GPTSize) and size.experts is not None
    own = next(layer for _, layer in mixtures(models.build("moe_tiny")))
    assert own.routing == size.experts.routing() == Routing(experts=8)
    assert size.experts.defaults() == {
        "experts": 8,
        "top_k": 1,
        "capacity_factor": 1.25,
        "balance_loss": 0.01,
        "z_loss": 0.0,
        "expert_groups": 1,
    }
    given = Routing(experts=4, top_k=2, groups=2, z_loss=0.001)
    layers = [layer for _, layer in mixtures(models.build("moe_tiny", routing=given))]
    assert [layer.routing for layer in layers] == [given] * 2
    assert layers[0].experts.up_EDF.shape == (4, 128, 512)


def test_a_model_without_experts_takes_no_routing() -> None:
    for name in ("gpt_tiny", "vit_tiny"):
        with pytest.raises(LabError) as refused:
            models.build(name, routing=Routing(experts=4))
        assert str(refused.value) == (
            f"a routing over 4 experts was received, but {name} has no experts: use a model with a mixture of experts "
            "such as moe_tiny, or leave it out."
        )
    use_language("fr")
    with pytest.raises(LabError, match="un routage entre 4 experts a été reçu, mais gpt_tiny n’a pas d’experts : "):
        models.build("gpt_tiny", routing=Routing(experts=4))


def test_moe_tiny_first_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model, tokens_BT = models.build("moe_tiny"), torch.randint(256, (4, 128))
    loss = torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), torch.randint(256, (512,)))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.03)


def test_a_llama_with_experts_in_every_block_trains() -> None:
    size = models.spec("llama_tiny").size
    from dataclasses import replace

    from dlojz.models.llama import Llama
    from dlojz.models.sizes import ExpertsSize

    torch.manual_seed(0)
    experts = ExpertsSize(num_experts=4, top_k=2)
    model = Llama(replace(size, experts=experts), sequence_length=16, vocabulary_size=256, routing=experts.routing())  # type: ignore[type-var]
    assert len(list(mixtures(model))) == 4
    model(torch.randint(256, (2, 16))).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
