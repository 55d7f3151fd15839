"""A split model on real ranks is the whole model: losses, gradients and weights, for every family."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.by_hand.tensor.axis import TensorAxis, gather_whole, split_dims
from dlojz.by_hand.tensor.split import parallel_loss, parts_of, split_model
from dlojz.models.blocks import BlockList
from dlojz.processes.forks import spmd

IMAGE = {"image_size": 32, "sequence_length": None, "num_classes": 10}
TEXT = {"image_size": None, "sequence_length": 16, "num_classes": 256}
CASES: dict[str, dict[str, Any]] = {
    "coatnet": {"model": "coatnet_tiny"},
    "vit": {"model": "vit_tiny"},
    "gpt": {"model": "gpt_tiny"},
    "llama": {"model": "llama_tiny"},
    "gpt-sequence": {"model": "gpt_tiny", "sequence_parallel": True},
    "llama-sequence": {"model": "llama_tiny", "sequence_parallel": True},
    "llama-mlp-only": {"model": "llama_tiny", "pattern": "mlp"},
    "coatnet-attention-only": {"model": "coatnet_tiny", "pattern": r"attention"},
    "coatnet-checkpointed": {"model": "coatnet_tiny", "checkpointing": "full"},
    "gpt-selective": {"model": "gpt_tiny", "checkpointing": "selective"},
    "llama-sequence-selective": {"model": "llama_tiny", "sequence_parallel": True, "checkpointing": "selective"},
}
STEPS = 5


def whole_model(case: dict[str, Any]) -> BlockList:
    torch.manual_seed(0)
    sizes = TEXT if case["model"].startswith(("gpt", "llama")) else IMAGE
    model = models.build(case["model"], **sizes, checkpointing=case.get("checkpointing", "none"))
    assert isinstance(model, BlockList)
    return model


def batch(case: dict[str, Any], step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    if case["model"].startswith(("gpt", "llama")):
        tokens_BT = torch.randint(256, (2, 17), generator=generator)
        return tokens_BT[:, :-1].contiguous(), tokens_BT[:, 1:].contiguous()
    return torch.randn(4, 3, 32, 32, generator=generator), torch.randint(10, (4,), generator=generator)


def train(model: BlockList, case: dict[str, Any]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss_of, losses = parallel_loss(model), []
    for step in range(STEPS):
        inputs, targets = batch(case, step)
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def trained_on_ranks(case: dict[str, Any]) -> Any:
    def ranks(rank: int, size: int) -> dict[str, Any]:
        axis = TensorAxis(dist.group.WORLD, sequence_parallel=case.get("sequence_parallel", False))
        whole = whole_model(case)
        shapes = {name: tuple(one.shape) for name, one in whole.named_parameters()}
        model = split_model(whole, axis, case.get("pattern", ""))
        losses = train(model, case)
        dims = split_dims(model)
        weights = {
            name: gather_whole(one.detach(), dims[name], shapes[name], axis) if name in dims else one.detach()
            for name, one in [*model.named_parameters(), *model.named_buffers()]
            if name in shapes
        }
        return {"losses": losses, "weights": weights}

    return ranks


@pytest.mark.parametrize("name", CASES)
def test_a_split_model_trains_as_the_whole_one(name: str) -> None:
    case = CASES[name]
    alone = whole_model(case)
    losses = train(alone, case)

    def ranks(rank: int, size: int) -> dict[str, Any]:
        told = trained_on_ranks(case)(rank, size)
        for key, value in alone.named_parameters():
            torch.testing.assert_close(told["weights"][key], value.detach(), rtol=0, atol=1e-5, msg=key)
        return {"losses": told["losses"]}

    for answer in spmd(ranks, 2):
        assert answer.error is None, answer.error
        assert answer.value["losses"] == pytest.approx(losses, rel=1e-5)


def test_split_model_refuses_a_pattern_that_matches_nothing() -> None:
    axis = TensorAxis(rank=0, size=2)
    with pytest.raises(LabError, match=r"no part of GPT matches 'convolution': its parts are called blocks\.0\.emb"):
        split_model(whole_model(CASES["gpt"]), axis, "convolution")
    alexnet = models.build("alexnet_tiny", image_size=64, sequence_length=None, num_classes=10)
    assert isinstance(alexnet, BlockList)
    with pytest.raises(LabError, match="AlexNet has no tensor-parallel form"):
        split_model(alexnet, axis)
    with pytest.raises(LabError, match=r"sequence_parallel needs every part split.*leaves out blocks\.0\.embedding"):
        split_model(whole_model(CASES["gpt"]), TensorAxis(rank=0, size=2, sequence_parallel=True), "mlp")


@pytest.mark.parametrize("name", ["coatnet", "vit", "gpt", "llama"])
def test_the_parts_of_all_ranks_are_the_model(name: str) -> None:
    """Split tensors add up to the whole; what is not split is on every rank; names stay, in their order."""
    whole = whole_model(CASES[name])
    shapes = {key: one.shape for key, one in whole.named_parameters()}
    parts = [split_model(whole_model(CASES[name]), TensorAxis(rank=rank, size=2)) for rank in range(2)]
    dims = split_dims(parts[0])
    assert len(list(parts_of(whole))) > 2
    for part in parts:
        assert [key for key, _ in part.named_parameters()] == list(shapes)
    for key, shape in shapes.items():
        held = [dict(part.named_parameters())[key].shape for part in parts]
        if key in dims:
            assert sum(one[dims[key]] for one in held) == shape[dims[key]]
        else:
            assert held == [shape, shape]
    split = sum(shapes[key].numel() for key in dims)
    assert split > 0.85 * sum(shape.numel() for shape in shapes.values())
