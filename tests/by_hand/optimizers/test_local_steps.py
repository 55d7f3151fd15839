"""Local SGD and DiLoCo on forked ranks: what they equal, line by line, and when they meet."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.by_hand.optimizers.local_sgd import OUTER_MOMENTUM, OUTER_RATE, DiLoCo, LocalSGD, LocalSteps
from dlojz.config.schedules import meets
from dlojz.processes.forks import spmd

STEPS, H = 7, 3
RATE = 0.05


class Odd(nn.Module):
    """In float64, so that what is equal in exact arithmetic is so to 1e-12; a layer that is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.unused, self.last = nn.Linear(7, 9), nn.Linear(3, 3), nn.Linear(9, 3)
        self.double()

    def forward(self, samples_BD: Tensor) -> Tensor:  # noqa: N803
        return self.last(self.first(samples_BD).tanh())


def backward(model: nn.Module, step: int, rank: int) -> None:
    """This rank's own gradient."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    samples = torch.randn(6, 7, generator=generator, dtype=torch.float64)
    model.zero_grad()
    nn.functional.cross_entropy(model(samples), torch.randint(0, 3, (6,), generator=generator)).backward()


def make(kind: type[LocalSteps], model: nn.Module, **more: Any) -> LocalSteps:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with one process it says that it does nothing
        return kind(model.parameters(), RATE, **{"local_steps": H, **more})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def on_ranks(function: Callable[[], dict[str, Tensor]], size: int) -> list[dict[str, Tensor]]:
    """What the function returns on each forked rank."""
    answers = spmd(lambda rank, size: (None, function()), size=size)
    assert [answer.error for answer in answers] == [None] * size
    return [answer.tensors for answer in answers]


def trained(kind: type[LocalSteps], steps: int = STEPS, **more: Any) -> dict[str, Tensor]:
    """Weights after each step, on this rank."""
    model = Odd()
    optimizer, found = make(kind, model, **more), {}
    for step in range(steps):
        backward(model, step, dist.get_rank())
        optimizer.step()
        found[f"{step}"] = weights(model).clone()
    return found


def on_averaged_gradients(size: int, steps: int, weight_decay: float) -> dict[str, Tensor]:
    """SGD in one process on the mean of all ranks' gradients."""
    model = Odd()
    optimizer, found = torch.optim.SGD(model.parameters(), RATE, weight_decay=weight_decay), {}
    for step in range(steps):
        gradients = []
        for rank in range(size):
            backward(model, step, rank)
            gradients.append(
                [p.grad.clone() if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
            )
        for parameter, *own in zip(model.parameters(), *gradients, strict=True):
            parameter.grad = sum(own) / size
        optimizer.step()
        found[f"{step}"] = weights(model).clone()
    return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_with_one_local_step_it_is_sgd_on_averaged_gradients(size: int, weight_decay: float) -> None:
    """Equal in exact arithmetic; in float64 to some hundred roundings of 1e-16, relative to weights of size 1."""
    answers = on_ranks(lambda: trained(LocalSGD, local_steps=1, weight_decay=weight_decay), size)
    expected = on_averaged_gradients(size, STEPS, weight_decay)
    for step in expected:
        assert torch.allclose(answers[0][step], expected[step], rtol=0, atol=1e-12), step
    two = on_ranks(lambda: trained(LocalSGD, local_steps=2, total_steps=STEPS), size)
    assert not torch.allclose(two[0]["6"], expected["6"], rtol=0, atol=1e-6)  # with two it is not


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_the_replicas_are_one_where_they_meet_and_apart_elsewhere(kind: type[LocalSteps]) -> None:
    """H = 3 in seven steps: after the third, the sixth, and the last; the same bits on all ranks."""
    answers = on_ranks(lambda: trained(kind, total_steps=STEPS), 3)
    together = [
        step for step in range(STEPS) if all(torch.equal(one[f"{step}"], answers[0][f"{step}"]) for one in answers)
    ]
    assert together == [step for step in range(STEPS) if meets(step, H, 0, STEPS)] == [2, 5, 6]


def by_hand(size: int, rounds: int) -> Tensor:
    """DiLoCo as its algorithm 1 is written, with torch's own optimizers, in one process."""
    replicas = [Odd() for _ in range(size)]
    inner = [torch.optim.AdamW(replica.parameters(), RATE, weight_decay=0.0) for replica in replicas]
    shared = Odd()
    outer = torch.optim.SGD(shared.parameters(), OUTER_RATE, momentum=OUTER_MOMENTUM, nesterov=True)
    for number in range(rounds):
        for rank, (replica, optimizer) in enumerate(zip(replicas, inner, strict=True)):
            replica.load_state_dict(shared.state_dict())
            for step in range(H * number, H * number + H):
                backward(replica, step, rank)
                for parameter in replica.parameters():
                    parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                optimizer.step()
        for parameter, *own in zip(shared.parameters(), *(replica.parameters() for replica in replicas), strict=True):
            parameter.grad = sum(parameter.detach() - one.detach() for one in own) / size
        outer.step()
    return weights(shared)


@pytest.mark.parametrize("size", [1, 2])
def test_diloco_is_its_algorithm_1(size: int) -> None:
    answers = on_ranks(lambda: trained(DiLoCo, steps=3 * H), size)
    assert torch.allclose(answers[0][f"{3 * H - 1}"], by_hand(size, 3), rtol=0, atol=1e-12)


def test_the_inner_steps_are_adamw_to_the_bit() -> None:
    """Before the first meeting, with one process."""
    model, plain = Odd(), Odd()
    optimizer, adamw = make(DiLoCo, model), torch.optim.AdamW(plain.parameters(), RATE, weight_decay=0.0)
    for step in range(H - 1):
        for one, its in ((model, optimizer), (plain, adamw)):
            backward(one, step, 0)
            its.step()
    assert torch.equal(weights(model), weights(plain))


def test_local_sgd_averages_gradients_in_the_first_stage() -> None:
    """Post-local SGD: four steps of SGD on averaged gradients, then local ones."""
    answers = on_ranks(lambda: trained(LocalSGD, warmup_steps=4), 2)
    expected = on_averaged_gradients(2, 4, 0.0)
    for step in range(STEPS):
        assert torch.equal(answers[0][f"{step}"], answers[1][f"{step}"]) is (step < 4 or step == 6), step
        if step < 4:
            assert torch.allclose(answers[0][f"{step}"], expected[f"{step}"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_a_state_goes_on_between_two_meetings(kind: type[LocalSteps]) -> None:
    """Each rank's own `state_dict`, its weights, after four steps of seven: the same bits as without the cut."""

    def cut() -> dict[str, Tensor]:
        model = Odd()
        optimizer = make(kind, model, total_steps=STEPS)
        for step in range(STEPS):
            if step == 4:
                kept, model = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
                optimizer = make(kind, model, total_steps=STEPS)
                optimizer.load_state_dict(kept)
            backward(model, step, dist.get_rank())
            optimizer.step()
        return {"end": weights(model)}

    whole = on_ranks(lambda: trained(kind, total_steps=STEPS), 2)
    assert all(torch.equal(a["end"], b["6"]) for a, b in zip(on_ranks(cut, 2), whole, strict=True))


@pytest.mark.parametrize("kind", [LocalSGD, DiLoCo])
def test_local_steps_with_one_process_say_that_they_send_nothing(kind: type[LocalSteps]) -> None:
    model = Odd()
    with pytest.warns(UserWarning, match=f"{kind.__name__} has one process: it sends nothing"):
        optimizer = kind(model.parameters(), RATE, local_steps=H)
    use_language("fr")
    with pytest.warns(UserWarning, match="n’a qu’un processus : il n’envoie rien"):
        kind(model.parameters(), RATE, local_steps=H)
    if kind is DiLoCo:
        return
    plain = Odd()
    sgd = torch.optim.SGD(plain.parameters(), RATE)
    for step in range(STEPS):
        for one, its in ((model, optimizer), (plain, sgd)):
            backward(one, step, 0)
            its.step()
    assert torch.equal(weights(model), weights(plain))


@pytest.mark.parametrize(
    ("local_steps", "said"), [(0, "must be at least 1, but 0"), (8, "longer than the run of 7 steps")]
)
def test_local_sgd_refuses_what_cannot_be(local_steps: int, said: str) -> None:
    with pytest.raises(LabError, match=said):
        LocalSGD(Odd().parameters(), RATE, local_steps=local_steps, total_steps=7)
    with pytest.raises(LabError, match="warmup_steps=7 leaves nothing"):
        LocalSGD(Odd().parameters(), RATE, local_steps=2, total_steps=7, warmup_steps=7)
