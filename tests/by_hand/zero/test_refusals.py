"""What the ZeRO classes refuse, each in one sentence; one process is enough to see it."""

from typing import Any

import pytest
import torch
from torch import nn

from dlojz.base.errors import LabError
from dlojz.by_hand.zero import Zero, ZeroStage1, ZeroStage2, ZeroStage3
from dlojz.by_hand.zero.flat import check_elementwise

STAGES = [ZeroStage1, ZeroStage2, ZeroStage3]


class Lamb(torch.optim.Optimizer):
    """LAMB without its moments: a step as long as the weights of the whole tensor are large."""

    def __init__(self, parameters: Any, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                trust = parameter.norm() / parameter.grad.norm()
                parameter.sub_(group["lr"] * trust * parameter.grad)


def sgd(shares: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(shares, lr=0.1)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("optimizer", [Lamb, torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon])
def test_zero_refuses_an_optimizer_that_looks_at_a_whole_layer(stage: type[Zero], optimizer: Any) -> None:
    model = nn.Linear(3, 2)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises(LabError, match=f"ZeRO cannot shard {optimizer.__name__}: .*AdamW") as told:
        stage(model, optimizer)
    assert "\n" not in str(told.value)
    assert [parameter.data_ptr() for parameter in model.parameters()] == before, "nothing is half done"


@pytest.mark.parametrize(
    "make",
    [
        lambda shares: torch.optim.SGD(shares, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda shares: torch.optim.AdamW(shares, foreach=True, amsgrad=True),
        lambda shares: torch.optim.AdamW(shares, fused=True),
        lambda shares: torch.optim.Adam([{"params": list(shares), "lr": 1e-2}], weight_decay=0.1),
        torch.optim.Adagrad,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Adadelta,
        torch.optim.Rprop,
        torch.optim.ASGD,
    ],
)
def test_check_elementwise_lets_through_what_treats_each_number_by_itself(make: Any) -> None:
    check_elementwise(make, torch.device("cpu"))


@pytest.mark.parametrize("stage", STAGES)
def test_zero_misuse_is_told_in_one_sentence(stage: type[Zero]) -> None:
    with pytest.raises(LabError, match="no parameter of Linear needs a gradient"):
        stage(nn.Linear(2, 1).requires_grad_(False), sgd)
    with pytest.raises(LabError, match="must return a torch optimizer, but list was returned"):
        stage(nn.Linear(2, 1), list)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="Invalid learning rate"):  # a mistake of another kind, in torch's words
        stage(nn.Linear(2, 1), lambda shares: torch.optim.SGD(shares, lr=-1))
    zero = stage(nn.Sequential(nn.Linear(2, 1)), sgd)
    with pytest.raises(LabError, match=r"call backward\(loss\) first"):
        zero.step()
    loss = zero(torch.ones(1, 2)).sum()
    if stage is ZeroStage1:
        loss.backward()
        with pytest.raises(LabError, match=r"call backward\(loss\) first"):
            zero.step()
    else:
        with pytest.raises(LabError, match="leaves whole gradients"):
            loss.backward()
    zero.backward(zero(torch.ones(1, 2)).sum())
    zero.step()
    with pytest.raises(LabError, match=r"call backward\(loss\) first"):
        zero.step()


def test_zero_stages_check_buckets_and_units() -> None:
    with pytest.raises(LabError, match="bucket_bytes must be at least 1, but 0"):
        ZeroStage2(nn.Linear(2, 1), sgd, bucket_bytes=0)
    with pytest.raises(LabError, match="the unit Conv1d is not part of Linear"):
        ZeroStage3(nn.Linear(2, 1), sgd, units=[nn.Conv1d(1, 1, 1)])
    mixed = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1).bfloat16()))
    with pytest.raises(LabError, match=r"several types were received .torch.bfloat16, torch.float32."):
        ZeroStage3(mixed, sgd)
    assert [flat.whole.dtype for flat in ZeroStage1(mixed, sgd).flats] == [torch.float32, torch.bfloat16]


def test_zero_grad_out_of_habit_changes_nothing() -> None:
    """Stage 1's gradients are views; a loop that forgets them itself, before or after, trains all the same."""
    plain, model = nn.Linear(2, 1), nn.Linear(2, 1)
    model.load_state_dict(plain.state_dict())
    zero, optimizer = ZeroStage1(model, sgd), sgd(plain.parameters())
    for _ in range(2):
        zero.module.zero_grad()
        zero.backward(zero(torch.ones(1, 2)).sum())
        zero.step()
        optimizer.zero_grad()
        plain(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, plain.weight)


def test_a_freed_weight_is_empty_and_not_a_crash() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    ZeroStage3(model, sgd)
    assert model[0].weight.shape == (0,)
    assert float(model[0].weight.detach().sum()) == 0
