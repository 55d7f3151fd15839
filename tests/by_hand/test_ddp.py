"""Data parallelism by hand, on forked ranks: the mean of the gradients, whatever each rank has used; when it left."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.by_hand.ddp import BucketCommunication, DataParallel, fill_buckets
from dlojz.processes.forks import RankAnswer, spmd
from dlojz.results.footprint import Overlap

WIDTH = 8


class Branches(nn.Module):
    """Two branches, of which each call uses those named; the first layer and the last are shared by both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.left, self.right, self.frozen = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x_BD: Tensor, used: str = "lr") -> Tensor:  # noqa: N803
        x_BD = self.frozen(self.first(x_BD)).tanh()
        x_BD = x_BD + self.left(x_BD) if "l" in used else x_BD
        x_BD = x_BD + self.right(x_BD) if "r" in used else x_BD
        return torch.nn.functional.linear(x_BD, self.first.weight) * self.scale  # first.weight is used twice


def samples(step: int, rank: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def values(answers: list[RankAnswer]) -> list[Any]:
    assert [answer.error for answer in answers] == [None] * len(answers)
    return [answer.value for answer in answers]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("bucket_bytes", [1, 300, 2**20])
def test_every_rank_gets_the_mean_whatever_it_has_used(size: int, overlap: bool, bucket_bytes: int) -> None:
    """Five steps with other branches on each rank and in each step; the reference is one process with all samples."""
    used = [["lr", "l", "r"], ["l", "l", "l"], ["r", "", "lr"], ["", "", ""], ["lr", "lr", "lr"]]

    def ranks(rank: int, size: int) -> tuple[None, dict[str, Tensor]]:
        model = Branches()
        if rank:  # the weights of rank 0 must win
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.detach().mul_(rank + 2)
        parallel = DataParallel(model, bucket_bytes=bucket_bytes, overlap=overlap)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        seen = {}
        for step, branches in enumerate(used):
            parallel(samples(step, rank), branches[rank]).square().mean().backward()
            parallel.synchronize()
            seen |= {f"{step}.{name}": gradient for name, gradient in gradients(model).items()}
            optimizer.step()
            optimizer.zero_grad()
        return None, seen

    answers = spmd(ranks, size)
    values(answers)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = {}
    for step, branches in enumerate(used):
        torch.stack([model(samples(step, r), branches[r]).square().mean() for r in range(size)]).mean().backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                expected[f"{step}.{name}"] = (
                    torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                )
        optimizer.step()
        optimizer.zero_grad()
    for answer in answers:
        assert answer.tensors.keys() == expected.keys(), "a frozen parameter has none, all others have one"
        for name, gradient in expected.items():
            # fp32 sums of a few terms in another order
            torch.testing.assert_close(answer.tensors[name], gradient, rtol=1e-5, atol=1e-7)
            assert torch.equal(answer.tensors[name], answers[0].tensors[name]), "the same bits on every rank"


def test_data_parallel_accumulation_communicates_once_and_gives_the_sum() -> None:
    def ranks(rank: int, size: int) -> tuple[Any, dict[str, Tensor]]:
        model = Branches()
        parallel = DataParallel(model, bucket_bytes=300)
        calls = _counted(lambda: _accumulate(parallel, rank))
        return calls, gradients(model)

    answers = spmd(ranks, 2)
    buckets = len(DataParallel(Branches(), bucket_bytes=300).buckets)
    assert values(answers) == [buckets] * 2
    model = Branches()
    for rank in range(2):
        for step in range(3):
            (model(samples(step, rank), "lr" if step else "l").square().mean() / 2).backward()
    for name, gradient in gradients(model).items():
        for answer in answers:
            torch.testing.assert_close(answer.tensors[name], gradient, rtol=1e-5, atol=1e-7)


def _accumulate(parallel: DataParallel, rank: int) -> None:
    for step in range(2):
        with parallel.no_sync():
            parallel(samples(step, rank), "lr" if step else "l").square().mean().backward()
    parallel(samples(2, rank), "lr").square().mean().backward()
    parallel.synchronize()


def _counted(act: Callable[[], object]) -> int:
    """All-reduces called meanwhile."""
    original, calls = dist.all_reduce, []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    dist.all_reduce = counting
    try:
        act()
    finally:
        dist.all_reduce = original
    return len(calls)


def test_synchronize_sends_late_what_was_accumulated_only() -> None:
    """A synchronize() after a backward pass under no_sync(): all the same a mean, without overlap."""

    def ranks(rank: int, size: int) -> Tensor:
        parallel = DataParallel(nn.Linear(2, 1, bias=False))
        with parallel.no_sync():
            parallel(torch.full((1, 2), float(rank + 1))).sum().backward()
        parallel.synchronize()
        return parallel.module.weight.grad  # type: ignore[union-attr, return-value]

    for answer in spmd(ranks, 2):
        assert torch.equal(answer.tensors["value"], torch.full((1, 2), 1.5))


def _events(rank: int, size: int, overlap: bool) -> list[str]:
    """What happens in one backward pass, in order: bucket 0 leaves, a layer's gradient is there, …"""
    seen: list[str] = []
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    parallel = DataParallel(model, bucket_bytes=1, overlap=overlap)
    original = dist.all_reduce

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append("all_reduce")
        return original(*args, **kwargs)

    dist.all_reduce = watched
    for number, layer in enumerate(model):
        layer.weight.register_hook(lambda gradient, n=number: seen.append(f"gradient {n}"))
    parallel(torch.ones(32, 64)).sum().backward()
    seen.append("backward has ended")
    parallel.synchronize()
    return seen


def test_buckets_leave_while_backward_computes() -> None:
    for seen in values(spmd(lambda rank, size: _events(rank, size, True), 2)):
        assert seen.index("all_reduce") < seen.index("gradient 0"), "the first layer's gradient is the last to come"
        assert seen[seen.index("backward has ended") :] == ["backward has ended"], "all had left by then"
    for seen in values(spmd(lambda rank, size: _events(rank, size, False), 2)):
        assert seen.index("all_reduce") > seen.index("backward has ended")


def test_communications_say_when_they_left_and_arrived() -> None:
    def ranks(rank: int, size: int) -> list[Any]:
        parallel = DataParallel(nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))), bucket_bytes=1)
        assert parallel.communications == ()
        for _ in range(2):
            parallel(torch.ones(32, 64)).sum().backward()
            parallel.synchronize()
        return [[vars(one) for one in parallel.communications], parallel.timing.intervals, parallel.timing.hidden_s]

    for told, intervals, hidden_s in values(spmd(ranks, 2)):
        communications = [BucketCommunication(**one) for one in told]
        assert [one.bucket for one in communications] == list(range(12)), "the last step alone, in the order sent"
        assert {one.num_bytes for one in communications} == {4 * 64, 4 * 64 * 64}
        assert all(one.left_s < one.arrived_s for one in communications)
        assert [list(each) for each in intervals] == [[one.left_s, one.arrived_s] for one in communications]
        assert [one.left_s for one in communications] == sorted(one.left_s for one in communications)
        assert hidden_s > 0


@pytest.mark.parametrize(
    ("intervals", "hidden_s", "exposed_s"),
    [
        ((), 0, 0),
        (((1, 2),), 1, 0),
        (((1, 3), (2, 4)), 3, 0),  # together they travelled for 3 s
        (((1, 2), (3, 4)), 2, 0),  # and nothing from 2 to 3
        (((1, 4), (2, 3)), 3, 0),  # one within the other
        (((9, 12),), 1, 2),
        (((9, 12), (11, 15)), 1, 5),
        (((10, 13), (10, 16)), 0, 6),  # all left after backward
    ],
)
def test_exposed_and_hidden_seconds(
    intervals: tuple[tuple[float, float], ...], hidden_s: float, exposed_s: float
) -> None:
    overlap = Overlap.after_backward(intervals, compute_end_s=10)
    assert (overlap.hidden_s, overlap.exposed_s) == (hidden_s, exposed_s)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=40),
    bucket_bytes=st.integers(1, 400),
    halves=st.lists(st.booleans(), min_size=40, max_size=40),
)
@settings(max_examples=100)
def test_buckets_hold_everything_once_in_order(sizes: list[int], bucket_bytes: int, halves: list[bool]) -> None:
    parameters = [
        torch.empty(size, dtype=torch.bfloat16 if half else torch.float32)
        for size, half in zip(sizes, halves, strict=False)
    ]
    buckets = fill_buckets(parameters, bucket_bytes)
    assert [id(one) for bucket in buckets for one in bucket] == [id(one) for one in parameters]
    for bucket, following in zip(buckets, [*buckets[1:], None], strict=True):
        assert len({one.dtype for one in bucket}) == 1
        *before, last = bucket
        assert sum(one.nbytes for one in before) < bucket_bytes, "closed as soon as it is full"
        if following and following[0].dtype == last.dtype:
            assert sum(one.nbytes for one in bucket) >= bucket_bytes


def test_data_parallel_averages_bf16_gradients_and_mixed_types() -> None:
    def ranks(rank: int, size: int) -> tuple[Any, dict[str, Tensor]]:
        model = nn.ModuleList([nn.Linear(2, 1, bias=False).bfloat16(), nn.Linear(2, 1, bias=False)])
        parallel = DataParallel(model)
        (sum(layer.weight.float().sum() for layer in model) * (rank + 1)).backward()  # type: ignore[union-attr]
        parallel.synchronize()
        return len(parallel.buckets), gradients(model)

    answers = spmd(ranks, 2)
    assert values(answers) == [2, 2]
    for answer in answers:
        for name, dtype in (("0.weight", torch.bfloat16), ("1.weight", torch.float32)):
            assert torch.equal(answer.tensors[name], torch.full((1, 2), 1.5, dtype=dtype))


def test_a_group_averages_among_its_own_ranks() -> None:
    def ranks(rank: int, size: int) -> tuple[None, dict[str, Tensor]]:
        groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.detach().fill_(rank)
        parallel = DataParallel(layer, group=groups[rank // 2])
        (parallel(torch.ones(1, 2)) * rank).sum().backward()
        parallel.synchronize()
        return None, {"weight": layer.weight, "grad": gradients(layer)["weight"]}

    for answer in spmd(ranks, 4):
        first = answer.rank // 2 * 2
        assert torch.equal(answer.tensors["weight"], torch.full((1, 2), float(first)))
        assert torch.equal(answer.tensors["grad"], torch.full((1, 2), first + 0.5))


def test_data_parallel_of_one_process_communicates_nothing_and_trains_as_without() -> None:
    plain = Branches()
    parallel = DataParallel(copy.deepcopy(plain))
    for model in (plain, parallel):
        model(samples(0, 0), "l").square().mean().backward()
    parallel.synchronize()
    expected, found = gradients(plain), gradients(parallel.module)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert parallel.communications == ()
    assert (parallel.timing.hidden_s, parallel.timing.exposed_s) == (0, 0)


def test_data_parallel_misuse_is_told_in_one_sentence() -> None:
    layer = nn.Linear(2, 1)
    with pytest.raises(LabError, match="no parameter of Linear needs a gradient"):
        DataParallel(copy.deepcopy(layer).requires_grad_(False))
    with pytest.raises(LabError, match="bucket_bytes must be at least 1, but 0"):
        DataParallel(layer, bucket_bytes=0)
    parallel = DataParallel(layer)
    with pytest.raises(LabError, match="call loss.backward.. first"):
        parallel.synchronize()
    first, second = (parallel(torch.ones(1, 2)).sum() for _ in range(2))
    first.backward()
    with pytest.raises(LabError, match="under no_sync"):
        second.backward()
    with pytest.raises(LabError, match="call synchronize"):
        parallel(torch.ones(1, 2))
    with torch.no_grad():
        parallel(torch.ones(1, 2))  # an evaluation disturbs nothing
    parallel.synchronize()
    parallel(torch.ones(1, 2)).sum().backward()
    parallel.synchronize()
    with pytest.raises(LabError, match="call loss.backward.. first"):
        parallel.synchronize()


def test_data_parallel_around_a_wrapped_module_obeys_the_last_wrapper() -> None:
    layer = nn.Linear(2, 1)
    retired, parallel = DataParallel(layer), DataParallel(layer)
    parallel(torch.ones(1, 2)).sum().backward()
    parallel.synchronize()
    with pytest.raises(LabError, match="no gradient to average"):
        retired.synchronize()


def test_data_parallel_tells_a_lost_rank_and_can_go_on() -> None:
    """What the collective raises is not swallowed, and no half-finished step stays behind."""

    def ranks(rank: int, size: int) -> str:
        parallel = DataParallel(nn.Linear(2, 1))
        if rank == 1:
            raise KeyError("on purpose")
        try:
            parallel(torch.ones(1, 2)).sum().backward()
            parallel.synchronize()
        except RuntimeError as error:
            parallel(torch.ones(1, 2))
            return type(error).__name__
        return "nothing was raised"

    first, second = spmd(ranks, 2)
    assert second.error is not None and second.error.name == "KeyError"
    assert (first.value, first.error) == ("CollectiveFault", None)
