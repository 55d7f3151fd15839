"""GPT: exact sizes, and no token that sees the future."""

import pytest
import torch

from dlojz import models
from dlojz.models.blocks import VocabularyHead, tie, tied_names, untie

# Source: the released weights of GPT-2 and Qwen3, whose output layer is the embedding.
RELEASED = {
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "qwen_3_0_6b": 596_049_920,
    "qwen_3_4b": 4_022_468_096,
}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_are_those_released(name: str) -> None:
    assert models.describe(name).parameters == RELEASED[name]


def test_a_tied_head_computes_with_the_embedding_and_costs_the_same() -> None:
    tied, untied = models.build("gpt2_tiny"), models.build("gpt_tiny")
    head = tied.blocks[-1]
    assert isinstance(head, VocabularyHead) and head.output.weight is tied.get_parameter("blocks.0.token.weight")
    assert tied_names(tied) == {"blocks.5.output.weight": "blocks.0.token.weight"} and tied_names(untied) == {}
    counted = [models.describe(name) for name in ("gpt2_tiny", "gpt_tiny")]
    assert counted[1].parameters - counted[0].parameters == 256 * 128 and counted[0].flops == counted[1].flops


def test_an_untied_model_has_two_equal_matrices_until_it_is_tied_again() -> None:
    model = models.build("qwen_tiny")
    first, copied = "blocks.0.weight", "blocks.5.output.weight"
    assert untie(model) == {copied: first}
    matrix, copy = model.get_parameter(first), model.get_parameter(copied)
    assert matrix is not copy and torch.equal(matrix, copy)
    tie(model, {copied: first})
    assert model.get_parameter(copied) is matrix


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_gpt_and_llama_logits_depend_on_no_later_token(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name).eval()
    tokens_BT = torch.randint(256, (1, 32))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 20] = (changed_BT[0, 20] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens_BT), model(changed_BT)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_gpt_sequence_may_be_shorter_than_the_table() -> None:
    model = models.build("gpt_tiny", sequence_length=64)
    assert model(torch.randint(256, (2, 10))).shape == (2, 10, 256)


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_gpt_and_llama_first_loss_is_that_of_a_uniform_guess(name: str) -> None:
    torch.manual_seed(0)
    model, tokens_BT = models.build(name), torch.randint(256, (4, 128))
    loss = torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), torch.randint(256, (512,)))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.03)
