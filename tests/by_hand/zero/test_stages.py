"""ZeRO by hand on forked ranks: the training of one process, what each rank holds, what it says and when."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.by_hand.zero import Zero, ZeroStage1, ZeroStage2, ZeroStage3
from dlojz.models.blocks import BlockList
from dlojz.processes.forks import RankAnswer, spmd

WIDTH = 7
STAGES: dict[str, Callable[..., Zero]] = {
    "1": ZeroStage1,
    "2": ZeroStage2,
    "2, small buckets": lambda *args, **kwargs: ZeroStage2(*args, bucket_bytes=1, **kwargs),
    "3": ZeroStage3,
    "3, no prefetch": lambda *args, **kwargs: ZeroStage3(*args, prefetch=False, **kwargs),
}


class Odd(nn.Module):
    """Sizes that no number of ranks divides, a tied weight, a frozen layer, a weight outside of all children."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.scale = nn.Parameter(torch.ones(()))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 5, bias=False), nn.Tanh(), nn.Linear(5, WIDTH)) for _ in range(2)
        )
        self.left, self.unused, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("shift", torch.ones(1))

    def forward(self, x_BD: Tensor, left: bool = True) -> Tensor:  # noqa: N803
        x_BD = self.frozen(self.first(x_BD)).tanh() + self.shift
        for layer in self.layers:
            x_BD = x_BD + layer(x_BD)
        x_BD = x_BD + self.left(x_BD) if left else x_BD
        return self.tied(x_BD) * self.scale


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def adamw(shares: Sequence[Tensor]) -> torch.optim.Optimizer:
    # Its epsilon keeps a gradient that is rounding alone (a weight without effect) from becoming a step of full length.
    return torch.optim.AdamW(shares, lr=0.01, weight_decay=0.1, eps=1e-3)


def momentum(shares: Sequence[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(shares, lr=0.05, momentum=0.9)


def values(answers: list[RankAnswer]) -> list[Any]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.value for answer in answers]


def left_of(stage: str, step: int, rank: int) -> bool:
    """Up to stage 2 each rank may use other layers than the others."""
    return stage[0] == "3" or (step + rank) % 2 == 0


def trained_by_one(stage: str, size: int, micro_batches: int, steps: int) -> dict[str, Tensor]:
    model = Odd()
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for parameter in model.parameters():  # what nobody uses gets a gradient of zero, and decays
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    for step in range(steps):
        for number in range(micro_batches):
            for rank in range(size):
                which = step * micro_batches + number
                loss = model(samples(which, rank), left_of(stage, which, rank)).square().mean()
                (loss / micro_batches / size).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("stage", STAGES)
def test_zero_stages_train_as_one_process(stage: str, size: int) -> None:
    """Three steps of two micro-batches; rank 0's weights win at the start; the same bits on every rank."""

    def ranks(rank: int, size: int) -> tuple[Any, dict[str, Tensor]]:
        model = Odd()
        if rank:
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.detach().mul_(rank + 2)
        zero = STAGES[stage](model, adamw)
        for step in range(3):
            for number in range(2):
                which = 2 * step + number
                zero.backward(zero(samples(which, rank), left_of(stage, which, rank)).square().mean() / 2)
            zero.step()
        with torch.no_grad():
            output = zero(samples(0, 0))
        whole = {name: weight.clone() for name, weight in zero.weights()}
        zero.release()
        released = {f"released.{name}": weight.detach() for name, weight in model.named_parameters()}
        return None, {**whole, **released, "output": output, "again": model(samples(0, 0)).detach()}

    answers = spmd(ranks, size)
    values(answers)
    expected = trained_by_one(stage, size, 2, 3)
    for answer in answers:
        found = answer.tensors
        for name, weight in expected.items():
            # fp32 sums of a few terms in another order, over three steps
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6)
            assert torch.equal(found[name], answers[0].tensors[name]), "the same bits on every rank"
            assert torch.equal(found[f"released.{name}"], found[name]), "released, the module is whole"
        assert found.keys() - expected.keys() == {f"released.{name}" for name in expected} | {"output", "again"}
        assert torch.equal(found["output"], found["again"]), "an evaluation computes with the same weights"


def numel(tensors: Any) -> int:
    return sum(tensor.numel() for tensor in tensors if tensor is not None)


@pytest.mark.parametrize(("stage", "states"), [("1", (1, 1, 3)), ("2", (1, 3, 3)), ("3", (3, 3, 3))])
def test_each_stage_shares_out_one_thing_more(stage: str, states: tuple[int, int, int]) -> None:
    """Elements of weights, gradients and moments on one of three ranks: Ψ over 1 or 3, and padding."""

    def ranks(rank: int, size: int) -> list[int]:
        model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(5)))
        zero = STAGES[stage](model, adamw)
        zero.backward(zero(torch.ones(2, 10)).square().sum())
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() // 4
            for tensor in (*model.parameters(), *zero.shares)
            if tensor.untyped_storage().nbytes()
        }
        gradients = {
            tensor.grad.untyped_storage().data_ptr(): tensor.grad.untyped_storage().nbytes() // 4
            for tensor in (*model.parameters(), *zero.shares)
            if tensor.grad is not None
        }
        zero.step()
        moments = [state[key] for state in zero.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
        assert numel(share.grad for share in zero.shares) == 0
        return [sum(storages.values()), sum(gradients.values()), numel(moments)]

    # Each layer has 100 weights, three ranks 34 each: two elements of padding per unit, for all weights one (stage 1).
    padded = {"1": 501, "2": 501, "3": 510}[stage]
    for weights, gradients, moments in values(spmd(ranks, 3)):
        assert weights == padded // states[0]
        assert gradients == padded // states[1]
        assert moments == 2 * padded // states[2]


@contextmanager
def watched() -> Iterator[list[tuple[str, int, str]]]:
    """Collectives called meanwhile: name, elements of the whole message, type."""
    seen: list[tuple[str, int, str]] = []
    whole = {"reduce_scatter_tensor": 1, "all_gather_into_tensor": 0}
    originals = {name: getattr(dist, name) for name in whole}

    def watch(name: str) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            message = args[whole[name]]
            seen.append((name.partition("_t")[0].partition("_i")[0], message.numel(), str(message.dtype)[6:]))
            return originals[name](*args, **kwargs)

        return called

    for name in originals:
        setattr(dist, name, watch(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def layers(number: int = 4) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(number)))


@pytest.mark.parametrize(("stage", "volumes"), [("1", 2), ("2", 2), ("2, small buckets", 2), ("3", 3)])
def test_zero_stages_send_two_volumes_and_three(stage: str, volumes: int) -> None:
    """Rajbhandari et al. 2020, §7: 2Ψ for stages 1 and 2, 3Ψ for stage 3; Ψ = 4 × 36, nothing to pad."""

    def ranks(rank: int, size: int) -> Any:
        zero = STAGES[stage](layers(), momentum)
        with watched() as seen:
            zero.backward(zero(torch.ones(2, 6)).square().sum())
            zero.step()
        return seen

    for seen in values(spmd(ranks, 2)):
        assert sum(elements for _, elements, _ in seen) == volumes * 4 * 36
        assert {name for name, _, _ in seen} == {"reduce_scatter", "all_gather"}


def test_stage_2_never_holds_all_gradients() -> None:
    """Each layer is a bucket: when a layer's gradient is ready, those of the layers after it are gone."""

    def ranks(rank: int, size: int) -> list[int]:
        model = layers(6)
        zero = ZeroStage2(model, momentum, bucket_bytes=1)
        held: list[int] = []
        for parameter in model.parameters():
            parameter.register_hook(lambda _: held.append(sum(p.grad is not None for p in model.parameters())))
        zero.backward(zero(torch.ones(2, 6)).square().sum())
        return [*held, sum(p.grad is not None for p in model.parameters())]

    for held in values(spmd(ranks, 2)):
        assert held == [0] * 7


def test_stage_3_holds_two_units_at_most_and_asks_for_the_next_one() -> None:
    """What is whole as each layer computes, in forward and backward; what is asked for before it computes."""

    def ranks(rank: int, size: int, prefetch: bool) -> dict[str, Any]:
        model = layers()
        zero = ZeroStage3(model, momentum, prefetch=prefetch)
        events: list[Any] = []

        def whole() -> list[int]:
            return [n for n, unit in enumerate(zero.units) if unit.whole.untyped_storage().nbytes()]

        for number, layer in enumerate(model):  # type: ignore[arg-type]
            layer.register_forward_pre_hook(lambda *_, n=number: events.append(["forward", n, whole()]))
            layer.register_forward_hook(
                lambda _, __, output, n=number: (
                    output.register_hook(lambda _: events.append(["backward", n, whole()])) and None
                )
            )
        loss = zero(torch.ones(2, 6)).square().sum()
        between = whole()
        zero.backward(loss)
        return {"events": events, "between": between, "after": whole(), "left": numel(model.parameters())}

    for told in values(spmd(lambda rank, size: ranks(rank, size, True), 2)):
        assert told["events"] == [
            ["forward", 0, [0, 1]],
            ["forward", 1, [1, 2]],
            ["forward", 2, [2, 3]],
            ["forward", 3, [3]],
            ["backward", 3, [2, 3]],
            ["backward", 2, [1, 2]],
            ["backward", 1, [0, 1]],
            ["backward", 0, [0]],
        ]
        assert (told["between"], told["after"], told["left"]) == ([], [], 0)
    for told in values(spmd(lambda rank, size: ranks(rank, size, False), 2)):
        assert [whole for _, _, whole in told["events"]] == [[0], [1], [2], [3], [3], [2], [1], [0]]


def test_stage_3_in_bf16_gathers_half_the_bytes_and_keeps_fp32_shares() -> None:
    def ranks(rank: int, size: int) -> Any:
        zero = ZeroStage3(nn.Sequential(*layers(), nn.BatchNorm1d(6)), momentum, compute_dtype=torch.bfloat16)
        with watched() as seen:
            output = zero(samples(0, rank)[:, :6])
            zero.backward(output.float().square().mean())
            zero.step()
        types = [{str(tensor.dtype) for tensor in some} for some in (zero.shares, [output])]
        weights = {name: weight.clone() for name, weight in zero.weights()}
        return [sorted({(name, dtype) for name, _, dtype in seen}), [sorted(one) for one in types]], weights

    answers = spmd(ranks, 2)
    for calls, types in values(answers):
        assert calls == [["all_gather", "bfloat16"], ["reduce_scatter", "float32"]]
        assert types == [["torch.float32"], ["torch.bfloat16"]]
    assert {str(weight.dtype) for weight in answers[0].tensors.values()} == {"torch.float32"}


def checkpointed() -> BlockList:
    blocks = [nn.Sequential(layer, nn.Tanh()) for layer in layers().children()]
    return BlockList(blocks, checkpointing=True)


@pytest.mark.parametrize(("stage", "gathers"), [("1", 1), ("2", 1), ("3", 8)])
def test_checkpointed_blocks_gather_no_more(stage: str, gathers: int) -> None:
    """A block that is computed again in backward has its weights for it already."""

    def ranks(rank: int, size: int) -> Any:
        zero = STAGES[stage](checkpointed(), momentum)
        with watched() as seen:
            zero.backward(zero(torch.ones(2, 6)).square().sum())
            zero.step()
        return [name for name, _, _ in seen].count("all_gather"), {n: w.clone() for n, w in zero.weights()}

    answers = spmd(ranks, 2)
    assert values(answers) == [gathers] * 2
    plain = checkpointed()
    optimizer = momentum(list(plain.parameters()))
    plain(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(answers[0].tensors[name], parameter.detach(), rtol=1e-5, atol=1e-7)


def test_units_can_be_named_and_overlap() -> None:
    """What lies in two of the units, or in none, is whole for the whole pass."""

    def ranks(rank: int, size: int) -> Any:
        model = Odd()
        zero = ZeroStage3(model, adamw, units=[model.first, *model.layers, model.tied])
        assert zero.rest is not None
        whole = {id(parameter) for parameter in zero.rest.parameters}
        names = sorted(name for name, parameter in model.named_parameters() if id(parameter) in whole)
        for _ in range(2):
            zero.backward(zero(samples(0, rank)).square().mean())
            zero.step()
        return [names, [[list(shape) for shape in unit.shapes] for unit in zero.units]]

    for names, shapes in values(spmd(ranks, 2)):
        assert names == ["first.weight", "left.bias", "left.weight", "scale", "unused.bias", "unused.weight"]
        assert shapes == [[[7]], [[5, 7], [7, 5], [7]], [[5, 7], [7, 5], [7]], [[7]]]


@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_a_group_shares_among_its_own_ranks(stage: str) -> None:
    def ranks(rank: int, size: int) -> tuple[Any, dict[str, Tensor]]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        layer = nn.Linear(3, 1, bias=False)
        layer.weight.detach().fill_(rank)
        zero = STAGES[stage](
            nn.Sequential(layer), lambda shares: torch.optim.SGD(shares, lr=1.0), group=groups[rank // 2]
        )
        zero.backward((zero(torch.ones(1, 3)) * rank).sum())
        zero.step()
        return None, {"weight": dict(zero.weights())["0.weight"].clone()}

    answers = spmd(ranks, 4)
    values(answers)
    for answer in answers:
        first = answer.rank // 2 * 2
        assert torch.equal(answer.tensors["weight"], torch.full((1, 3), first - (first + 0.5)))


def test_a_module_that_is_wrapped_again_obeys_the_last_wrapper() -> None:
    """Stage after stage on the same module, as in a notebook whose cells are run in any order."""

    def ranks(rank: int, size: int) -> Any:
        model, losses = layers(), []
        for stage in ("1", "3", "2", "3", "3", "1"):
            zero = STAGES[stage](model, lambda shares: torch.optim.SGD(shares, lr=0.0))
            for _ in range(2):
                loss = zero(torch.ones(2, 6)).square().sum()
                zero.backward(loss)
                zero.step()
                losses.append(float(loss))
        return losses

    for losses in values(spmd(ranks, 2)):
        assert losses == [losses[0]] * 12
