"""Experts divided over real ranks: the same outputs and gradients for ep = 1, 2, 4; as many bytes as predicted."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.models.experts.exchange import combine, dispatch
from dlojz.models.experts.layer import Flavour, MixtureOfExperts, expert_parameters, shard_experts
from dlojz.models.experts.routing import Routing, all_to_all_bytes
from dlojz.processes.forks import spmd
from dlojz.train.dispatch_trace import StorageTrace

RANKS, WIDTH, TOKENS = 4, 16, 24
DEGREES = (1, 2, 4)


def whole_layer(top_k: int, flavour: Flavour) -> MixtureOfExperts:
    torch.manual_seed(0)
    routing = Routing(experts=8, top_k=top_k, capacity_factor=0.8, balance_loss=0.1, z_loss=0.01)
    layer = MixtureOfExperts(WIDTH, 32, routing, flavour)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return layer


def given_to(rank: int) -> Tensor:
    return torch.randn(2, TOKENS // 2, WIDTH, generator=torch.Generator().manual_seed(10 + rank))


def one_pass(layer: MixtureOfExperts, rank: int, prefix: str) -> dict[str, Tensor]:
    x_BTD = given_to(rank).requires_grad_()
    y_BTD = layer(x_BTD)
    y_BTD.square().sum().backward()
    assert x_BTD.grad is not None
    found = {f"{prefix}y": y_BTD.detach(), f"{prefix}x.grad": x_BTD.grad}
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        found[f"{prefix}{name}"] = parameter.grad
    return found


def assert_close(found: Tensor, expected: Tensor) -> None:
    """Equal but for rounding: products of another shape sum the same numbers in another order."""
    largest = float(expected.abs().max())
    assert largest > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize(("top_k", "flavour"), [(1, "gelu"), (2, "swiglu")])
def test_ep_changes_where_experts_are_computed_and_nothing_else(top_k: int, flavour: Flavour) -> None:
    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        found = {}
        for ep in DEGREES:
            groups = [dist.new_group(list(range(first, first + ep))) for first in range(0, size, ep)]
            layer = whole_layer(top_k, flavour)
            shard_experts(layer, rank % ep, ep, groups[rank // ep])
            found |= one_pass(layer, rank, f"{ep}.")
        return {}, found

    answers = spmd(ranks, RANKS)
    assert [answer.error for answer in answers] == [None] * RANKS
    experts = {f"experts.{name}" for name, _ in whole_layer(top_k, flavour).experts.named_parameters()}
    names = [name.removeprefix("1.") for name in answers[0].tensors if name.startswith("1.")]
    assert experts < set(names)
    for ep in (2, 4):
        for name in names:
            if name not in experts:
                for answer in answers:
                    assert_close(answer.tensors[f"{ep}.{name}"], answer.tensors[f"1.{name}"])
                continue
            # An expert's gradient over all ranks' tokens: at ep=1 every rank has a part of each expert's, at ep each
            # rank has that of its own experts from its group's tokens.
            expected = torch.stack([answer.tensors[f"1.{name}"] for answer in answers]).sum(dim=0)
            parts = [answer.tensors[f"{ep}.{name}"] for answer in answers]
            assert_close(torch.cat([torch.stack(parts[place::ep]).sum(dim=0) for place in range(ep)]), expected)


def test_bytes_of_the_all_to_alls_are_those_predicted() -> None:
    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        layer = whole_layer(2, "gelu")
        shard_experts(layer, rank, size)
        found = []
        for mixed in (False, True):
            x_BTD = given_to(rank).requires_grad_()
            with StorageTrace({}) as trace:
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    output = layer(x_BTD)
                output.float().sum().backward()
            found.append([[call.collective, call.group_size, call.message_bytes] for call in trace.trace.calls])
        return found

    capacity = Routing(experts=8, top_k=2, capacity_factor=0.8).capacity(TOKENS)
    for answer in spmd(ranks, 2):
        assert answer.error is None
        for calls, element_bytes in zip(answer.value, (4, 2), strict=True):
            one = all_to_all_bytes(experts=8, capacity=capacity, width=WIDTH, element_bytes=element_bytes)
            # Dispatch and combine, forward and backward; experts compute in bf16 what comes to them in bf16.
            assert calls == [["all_to_all", 2, one]] * 4


def test_combine_undoes_dispatch_and_rows_come_by_expert_and_then_by_rank() -> None:
    def ranks(rank: int, size: int) -> Any:
        rows_ECD = torch.arange(4)[:, None, None] * 10.0 + rank * 100 + torch.zeros(4, 3, 2)
        there = dispatch(rows_ECD, size)
        assert torch.equal(combine(there, size), rows_ECD)
        return {}, {"there": there}

    answers = spmd(ranks, 2)
    assert [answer.error for answer in answers] == [None] * 2
    for rank, answer in enumerate(answers):
        there = answer.tensors["there"]
        assert there.shape == (2, 6, 2)
        for place in range(2):
            expert = 2 * rank + place
            assert there[place, :, 0].tolist() == [expert * 10.0] * 3 + [expert * 10.0 + 100] * 3


def test_a_rank_keeps_its_block_of_the_experts_and_all_the_rest() -> None:
    torch.manual_seed(0)
    whole, mine = models.build("moe_tiny"), models.build("moe_tiny")
    mine.load_state_dict(whole.state_dict())
    shard_experts(mine, 1, 4)
    cut = set(expert_parameters(whole))
    assert cut == set(expert_parameters(mine))
    kept = dict(mine.named_parameters())
    for name, parameter in whole.named_parameters():
        assert torch.equal(kept[name], parameter[2:4] if name in cut else parameter)
        assert kept[name].untyped_storage().nbytes() == kept[name].nbytes  # no view of all the experts
    assert list(mine.state_dict()) == list(whole.state_dict())


def test_shapes_alone_can_be_sharded_and_run_without_ranks() -> None:
    with torch.device("meta"):
        model = models.build("moe_tiny")
        shard_experts(model, 3, 8)
        assert model(torch.empty(2, 128, dtype=torch.long)).shape == (2, 128, 256)


REFUSED = [
    ((0, 3), "ep=3 does not divide the 8 experts: use ep=1, ep=2, ep=4, ep=8.",
     "ep=3 ne divise pas les 8 experts : prenez ep=1, ep=2, ep=4, ep=8."),
    ((0, 0), "ep must be a whole number, at least 1, but 0 was received.",
     "ep doit être un nombre entier, au moins 1, mais 0 a été reçu."),
    ((2, 2), "ep_rank must be at least 0 and less than ep=2, but 2 was received.",
     "ep_rank doit être au moins 0 et plus petit que ep=2, mais 2 a été reçu."),
]  # fmt: skip


@pytest.mark.parametrize(("given", "english", "french"), REFUSED)
def test_shard_experts_refusals(given: tuple[int, int], english: str, french: str) -> None:
    model = models.build("moe_tiny")
    for name, sentence in (("en", english), ("fr", french)):
        use_language(name)
        with pytest.raises(LabError) as refused:
            shard_experts(model, *given)
        assert str(refused.value) == sentence


def test_experts_are_shared_out_once() -> None:
    model = models.build("moe_tiny")
    shard_experts(model, 0, 2)
    with pytest.raises(LabError) as refused:
        shard_experts(model, 0, 2)
    assert str(refused.value) == (
        "the experts of blocks.2.mixture are divided over ep=2 ranks already: build the model again, whole."
    )
    use_language("fr")
    with pytest.raises(LabError, match="les experts de blocks.2.mixture sont déjà répartis sur ep=2 rangs"):
        shard_experts(model, 0, 2)
