"""Optimizers that send one bit per number, on forked ranks: the first stage to the bit, the second as its lines say."""

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
from dlojz.by_hand.optimizers.adam import OneBitAdam, ZeroOneAdam
from dlojz.by_hand.optimizers.communicating import OWN, Communicating
from dlojz.by_hand.optimizers.lamb import Lamb, OneBitLamb
from dlojz.by_hand.optimizers.sent_bytes import synchronises, variance_steps
from dlojz.processes.forks import RankAnswer, spmd

WARM, STEPS = 3, 8
OPTIONS: dict[str, Any] = {"lr": 0.01, "weight_decay": 0.1}
OPTIMIZERS: dict[str, Callable[..., Communicating]] = {
    "1-bit Adam": OneBitAdam,
    "1-bit LAMB": OneBitLamb,
    "0/1 Adam": ZeroOneAdam,
    # The variance is renewed in steps 0 and 1, step 2 is one bit already; from step 5 on every other one is local.
    "0/1 Adam, local": lambda *args, **kw: ZeroOneAdam(*args, **kw, variance_scaler=1, local_scaler=2),
}
PLAIN: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "1-bit Adam": torch.optim.AdamW,
    "1-bit LAMB": Lamb,
    "0/1 Adam": torch.optim.AdamW,
}


class Odd(nn.Module):
    """Sizes that no number of ranks divides; a row of an embedding, and a whole layer, without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(5, 7)
        self.first, self.unused, self.last = nn.Linear(7, 9), nn.Linear(3, 3), nn.Linear(9, 3)

    def forward(self, tokens_B: Tensor) -> Tensor:  # noqa: N803
        return self.last(self.first(self.embedding(tokens_B)).tanh())


def backward(model: nn.Module, step: int, rank: int) -> None:
    """This rank's own gradient; token 4 never comes."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens, targets = torch.randint(0, 4, (6,), generator=generator), torch.randint(0, 3, (6,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(tokens), targets).backward()


def make(name: str, model: nn.Module, **more: Any) -> Communicating:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with one process it says that it does nothing
        return OPTIMIZERS[name](model.parameters(), **{**OPTIONS, "warmup_steps": WARM, **more})


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def tensors(answers: list[RankAnswer]) -> list[dict[str, Tensor]]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.tensors for answer in answers]


def mean_gradients(model: nn.Module, size: int) -> None:
    """As data parallelism without buckets does it: all gradients in one message, no gradient counting as zeros."""
    parameters = list(model.parameters())
    flat = torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in parameters])
    dist.all_reduce(flat)
    for parameter, piece in zip(parameters, flat.div_(size).split([p.numel() for p in parameters]), strict=True):
        parameter.grad = piece.view_as(parameter).clone()


def first_stage(name: str, rank: int, size: int) -> tuple[list[bool], dict[str, Tensor]]:
    """Whether weights and momenta were the plain optimizer's, and the variance froze so; the weights after steps."""
    model, twin = Odd(), Odd()
    optimizer, plain = make(name, model), PLAIN[name](twin.parameters(), **OPTIONS)
    pairs, same, frozen, told = [*zip(model.parameters(), twin.parameters(), strict=True)], [], [], {}
    for step in range(STEPS):
        backward(model, step, rank)
        assert optimizer.compresses == (step >= WARM)
        optimizer.step()
        if step < WARM:
            backward(twin, step, rank)
            mean_gradients(twin, size)
            plain.step()
            same.append(torch.equal(weights(model), weights(twin)))
            same += [torch.equal(optimizer.state[own]["exp_avg"], plain.state[it]["exp_avg"]) for own, it in pairs]
        frozen += [torch.equal(optimizer.state[own]["exp_avg_sq"], plain.state[it]["exp_avg_sq"]) for own, it in pairs]
        told[f"{name}.{step}"] = weights(model)
    return [all(same), all(frozen)], told


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_communicating_optimizers_are_the_plain_ones_first_then_send_one_bit(size: int) -> None:
    """Weights and moments of the first stage; in the second, the variance that it has left, and equal ranks."""

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        found = {name: first_stage(name, rank, size) for name in PLAIN}
        told = {key: tensor for _, tensors in found.values() for key, tensor in tensors.items()}
        return {name: truths for name, (truths, _) in found.items()}, told

    answers = spmd(ranks, size)
    first, *others = tensors(answers)
    for told in others:
        assert [key for key in first if not torch.equal(told[key], first[key])] == []
    assert [answer.value for answer in answers] == [{name: [True, True] for name in PLAIN}] * size
    for name in PLAIN:
        assert not torch.equal(first[f"{name}.{STEPS - 1}"], first[f"{name}.{WARM - 1}"])


def test_communicating_optimizers_leave_what_had_no_gradient_in_the_first_stage() -> None:
    """A row of the embedding and a layer: their variance is 0, and what is said of them would be divided by ε."""

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        found = {}
        for name in OPTIMIZERS:
            model, start = Odd(), Odd()
            optimizer = make(name, model, weight_decay=0.0)
            for step in range(STEPS):
                backward(model, step, rank)
                optimizer.step()
            row = torch.equal(model.embedding.weight[4], start.embedding.weight[4])
            layer = torch.equal(model.unused.weight, start.unused.weight)
            found[name] = [row, layer, float((model.embedding.weight[:4] - start.embedding.weight[:4]).abs().max())]
        return found

    for answer in spmd(ranks, 2):
        assert answer.error is None
        for row, layer, moved in answer.value.values():
            assert row and layer and 0.001 < moved < 0.5


def resumed(name: str, at: int, rank: int) -> list[bool]:
    """Whether a new optimizer goes on to the same bits: with the state of a step, and with its errors left out."""
    model = Odd()
    optimizer = make(name, model, total_steps=STEPS)
    for step in range(STEPS):
        if step == at:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        backward(model, step, rank)
        optimizer.step()
    whole, same = weights(model), []
    for way in ("with its errors", "without"):
        model.load_state_dict(kept[0])
        optimizer = make(name, model, total_steps=STEPS)
        state = copy.deepcopy(kept[1])
        if way == "without":
            del state[OWN]
        optimizer.load_state_dict(state)
        for step in range(at, STEPS):
            backward(model, step, rank)
            optimizer.step()
        same.append(torch.equal(weights(model), whole))
    return same


def test_it_goes_on_from_its_state_in_either_stage_to_the_bit() -> None:
    """The same rank's state into a new optimizer; in the first stage there are no errors yet."""

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        return [[resumed(name, at, rank) for at in (WARM - 1, WARM + 3)] for name in OPTIMIZERS]

    for answer in spmd(ranks, 2):
        assert answer.error is None
        assert answer.value == [[[True, True], [True, False]]] * len(OPTIMIZERS)


def test_own_states_hold_what_local_steps_have_made_different() -> None:
    """Weights of rank 0 and each rank's own states are enough to go on between two synchronisations."""

    def ranks(rank: int, size: int) -> Any:
        torch.set_num_threads(1)
        model, apart, kept = Odd(), [], {}
        optimizer = make("0/1 Adam, local", model)
        for step in range(STEPS):
            backward(model, step, rank)
            optimizer.step()
            all_weights = [torch.empty_like(weights(model)) for _ in range(size)]
            dist.all_gather(all_weights, weights(model))
            apart.append(not torch.equal(all_weights[0], all_weights[1]))
            if step == 5:
                common = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
                kept = {name: tensor.clone() for name, tensor in optimizer.own_states().items()}
        whole = weights(model)
        model.load_state_dict(common[0])
        for parameter in model.parameters():
            dist.broadcast(parameter.detach(), src=0)  # as a checkpoint gives all ranks those of the first
        optimizer = make("0/1 Adam, local", model)
        del common[1][OWN]
        optimizer.load_state_dict(common[1])
        for _, _, state in optimizer.each():
            dist.broadcast(state["exp_avg"], src=0)
            for local in ("met", "moved", "rates"):
                state.pop(local, None)
        optimizer.take_own_states(kept)
        for step in range(6, STEPS):
            backward(model, step, rank)
            optimizer.step()
        return [apart, torch.equal(weights(model), whole)]

    for answer in spmd(ranks, 2):
        assert answer.error is None
        apart, equal = answer.value
        in_sync = [synchronises(step, WARM, scaler=2) for step in range(STEPS)]
        assert apart == [not one for one in in_sync]
        assert apart[5] and equal


def test_the_steps_of_0_1_adam() -> None:
    """k_{j+1} − k_j = 2^⌊j/κ⌋ (Lu et al. 2022); synchronisations at every step, then ever rarer, up to H."""
    assert list(variance_steps(20, scaler=2)) == [0, 1, 2, 4, 6, 10, 14]
    assert list(variance_steps(5)) == [0, 1, 2, 3, 4]
    steps = [step for step in range(60) if synchronises(step, 10, scaler=2, clipper=4)]
    assert steps == [*range(10), 10, 11, 13, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59]
    assert synchronises(13, 10, 14, scaler=2) and not synchronises(12, 10, 14, scaler=2)


def test_0_1_adam_synchronises_what_it_has_gone_since_the_ranks_last_met() -> None:
    """Lu et al. 2022, algorithm 1, on one rank and by hand: a step in full, by one bit, local, by one bit.

    |g| = 1 in the first step, so that √v = 1; x = x′ − Σ γ m over all steps since x′, and m = Σ γ m / Σ γ.
    """
    weight, lr, beta = nn.Parameter(torch.tensor([1.0, 2.0])), 0.1, 0.5
    with pytest.warns(UserWarning, match="does nothing but freeze"):
        optimizer = ZeroOneAdam([weight], lr, warmup_steps=1, betas=(beta, 0.9), eps=0.0, local_scaler=1)
    gradients = torch.tensor([[1.0, -1.0], [0.5, 2.0], [-3.0, 1.0], [2.0, 0.25]])
    expected, momentum = torch.tensor([1.0, 2.0]), torch.zeros(2)
    moved, rates = torch.zeros(2), 0.0
    for step, gradient in enumerate(gradients):
        weight.grad = gradient.clone()
        optimizer.step()
        rate = lr / (1 - beta ** (step + 1))
        momentum = beta * momentum + (1 - beta) * gradient
        expected -= rate * momentum
        moved, rates = (moved + rate * momentum, rates + rate) if step > 1 else (moved, rates)
    assert [synchronises(step, 1, scaler=1) for step in range(4)] == [True, True, False, True]
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], moved / rates)


def test_1_bit_lamb_scales_a_layer_by_the_largest_ratio_of_its_variances() -> None:
    """Li et al. 2021, algorithm 1, lines 13 to 21, on one rank and by hand: a step in full and one by one bit."""
    weight, lr = nn.Parameter(torch.tensor([3.0, 4.0])), 0.1
    with pytest.warns(UserWarning, match="does nothing but freeze"):
        optimizer = OneBitLamb(
            [weight], lr, warmup_steps=1, betas=(0.5, 0.75), eps=0.0, factor_clip=(0.01, 100.0), factor_threshold=10.0
        )
    weight.grad = torch.tensor([1.0, -2.0])
    optimizer.step()
    ratio = 5 / 2**0.5  # ‖x‖ / ‖u‖, of u = ±1
    first = torch.tensor([3.0 - lr * ratio, 4.0 + lr * ratio])
    torch.testing.assert_close(weight.detach(), first)
    weight.grad = torch.tensor([3.0, 1.0])
    optimizer.step()
    momentum = torch.tensor([0.5 * 0.5 + 0.5 * 3.0, -0.5 * 1.0 + 0.5 * 1.0])
    # v of the warm-up (1/4, 1), and (39/16, 1) with the second gradient; without their bias, v_Tw / v is 1.75 at most.
    factor = 1.0 * (1 - 0.75**2) / (1 - 0.75)
    update = momentum / torch.tensor([1.0, 2.0]) / (1 - 0.5**2)
    torch.testing.assert_close(weight.detach(), first - lr * factor * ratio * update)


def test_lamb_steps_by_the_norm_of_the_layer() -> None:
    """You et al. 2020, algorithm 2: a step of lr × ‖x‖, whatever the gradient's scale; without weights, of lr × ‖u‖."""
    layer, empty = nn.Parameter(torch.full((4,), 3.0)), nn.Parameter(torch.zeros(4))
    for scale in (1e-3, 1e3):
        layer.data.fill_(3.0)
        empty.data.zero_()
        layer.grad = empty.grad = torch.tensor([1.0, -2.0, 3.0, -4.0]) * scale
        Lamb([layer, empty], lr=0.1).step()
        assert float((layer.detach() - 3).norm()) == pytest.approx(0.1 * 6.0, rel=1e-4)
        # In the first step u = g / (|g| + ε), of norm √4, all but ε.
        assert float(empty.detach().norm()) == pytest.approx(0.1 * 2.0, rel=2e-3)


@pytest.mark.parametrize("language", ["en", "fr"])
@pytest.mark.parametrize("name", ["1-bit Adam", "1-bit LAMB", "0/1 Adam"])
def test_communicating_optimizers_refuse_impossible_stages_in_one_sentence(name: str, language: str) -> None:
    received = {
        (0, 10): {"en": "at least 1, but 0 was received", "fr": "au moins 1, mais 0 a été reçu"},
        (10, 10): {"en": "at most 9, or more steps", "fr": "au plus 9, ou davantage"},
        (50, 20): {"en": "warmup_steps=50 leaves nothing to compress", "fr": "warmup_steps=50 ne laisse rien"},
    }
    use_language(language)
    for (warmup_steps, total_steps), sentences in received.items():
        with pytest.raises(LabError, match=sentences[language]) as refused:
            make(name, nn.Linear(2, 2), warmup_steps=warmup_steps, total_steps=total_steps)
        assert str(refused.value).endswith(".") and str(refused.value).count(". ") == 0
    said = {"en": "compression does nothing but freeze", "fr": "ne fait rien d’autre que geler"}[language]
    with pytest.warns(UserWarning, match=said):
        OPTIMIZERS[name](nn.Linear(2, 2).parameters(), warmup_steps=1)


def test_errors_of_another_number_of_ranks_are_refused() -> None:
    def ranks(rank: int, size: int) -> Any:
        optimizer = make("1-bit Adam", nn.Linear(20, 2))
        with pytest.raises(LabError, match="another number of ranks than 2"):
            optimizer.take_own_states({"worker_error": torch.zeros(48), "server_error": torch.zeros(16)})

    assert [answer.error for answer in spmd(ranks, 2)] == [None, None]
