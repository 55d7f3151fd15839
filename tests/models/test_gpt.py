"""GPT: exact sizes, and no token that sees the future."""

from __future__ import annotations

import pytest
import torch

from dlojz import models

# Source: the released GPT-2 weights, whose output layer is the embedding; ours has its own, of vocabulary × width.
RELEASED = {
    "gpt2": (124_439_808, 768),
    "gpt2_medium": (354_823_168, 1024),
    "gpt2_large": (774_030_080, 1280),
    "gpt2_xl": (1_557_611_200, 1600),
}


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_are_those_released_plus_the_output_layer(name: str) -> None:
    released, width = RELEASED[name]
    assert models.describe(name).parameters == released + 50257 * width


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_logits_depend_on_no_later_token(name: str) -> None:
    torch.manual_seed(0)
    model = models.build(name).eval()
    tokens_BT = torch.randint(256, (1, 32))
    changed_BT = tokens_BT.clone()
    changed_BT[0, 20] = (changed_BT[0, 20] + 1) % 256
    with torch.no_grad():
        before, after = model(tokens_BT), model(changed_BT)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.allclose(before[:, 20:], after[:, 20:])


def test_a_sequence_may_be_shorter_than_the_table() -> None:
    model = models.build("gpt_tiny", sequence_length=64)
    assert model(torch.randint(256, (2, 10))).shape == (2, 10, 256)


@pytest.mark.parametrize("name", ["gpt_tiny", "llama_tiny"])
def test_first_loss_is_that_of_a_uniform_guess(name: str) -> None:
    torch.manual_seed(0)
    model, tokens_BT = models.build(name), torch.randint(256, (4, 128))
    loss = torch.nn.functional.cross_entropy(model(tokens_BT).flatten(0, 1), torch.randint(256, (512,)))
    assert loss.item() == pytest.approx(torch.tensor(256.0).log().item(), rel=0.03)
