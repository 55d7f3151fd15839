"""Answers that run on ranks: every usual fault of parallel code is told by its name, forward and backward."""

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.base.language import use_language
from dlojz.labs.kit.exercise import Exercise, Mistake, NotDone, Said, judge
from dlojz.labs.kit.judges import Judge
from dlojz.labs.kit.rank_judges import RankEvidence, diagnose, same
from dlojz.processes.forks import RankAnswer

ROWS, WIDTH_IN, WIDTH_OUT = 5, 24, 12


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exercise(judged: Callable[..., None]) -> Exercise:
    texts = dict.fromkeys(("title", "hint", "nearer"), Said("said", "dit"))
    return Exercise(id="ranks", judge=judged, praise=Said("Right.", "Juste."), **texts)


# ---- the mean over ranks, as data parallelism needs it


def part(rank: int, seed: int) -> Tensor:
    return torch.randn(8, 3, generator=generator(100 * seed + rank))


MEAN = exercise(
    Judge(
        lambda rank, size, seed: {"gradient": torch.stack([part(r, seed) for r in range(size)]).mean(0)},
        on_ranks=True,
        trial=lambda answer, rank, size, seed: {"gradient": answer(part(rank, seed))},
        local=lambda rank, size, seed: {"gradient": part(rank, seed)},
        labels={"gradient": Said("the gradient", "le gradient")},
    )
)


MEAN_OF_3 = replace(MEAN, judge=replace(MEAN.judge, cases=((3, 12),)))  # type: ignore[type-var]


def mean(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x / dist.get_world_size()


def summed(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def divided_twice(x: Tensor) -> Tensor:
    return mean(x) / dist.get_world_size()


def reduced_to_one(x: Tensor) -> Tensor:
    mine = x.clone()
    dist.reduce(x, 0)
    return x / dist.get_world_size() if dist.get_rank() == 0 else mine


def broadcast_only(x: Tensor) -> Tensor:
    dist.broadcast(x, 0)
    return x


def half_of_the_sum(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x / 2


def noise_of_each_rank(x: Tensor) -> Tensor:
    return mean(x) + 0.1 * torch.randn(8, 3, generator=generator(dist.get_rank()))


def one_stays_away(x: Tensor) -> Tensor:
    if dist.get_rank() != 1:
        dist.all_reduce(x)
    return x


def another_shape(x: Tensor) -> Tensor:
    x = x[: 8 - dist.get_rank()].contiguous()
    dist.all_reduce(x)
    return x


def another_order(x: Tensor) -> Tensor:
    calls = [lambda: dist.all_reduce(x), lambda: dist.broadcast(x, 0)]
    for call in calls if dist.get_rank() else reversed(calls):
        call()
    return x


def all_receive_first(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.recv(x, (rank - 1) % size)
    dist.send(x, (rank + 1) % size)
    return x


def all_send_first(x: Tensor) -> Tensor:
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.send(x, (rank + 1) % size)
    dist.recv(x, (rank - 1) % size)
    return x


def raises_on_one(x: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        raise IndexError("no such layer")
    return mean(x)


def exits(x: Tensor) -> Tensor:
    if dist.get_rank() == 1:
        os._exit(3)
    return mean(x)


def never_ends(x: Tensor) -> Tensor:
    while True:
        time.sleep(0.1)


def one_never_ends(x: Tensor) -> Tensor:
    if dist.get_rank() == 0:
        never_ends(x)
    return mean(x)


def too_many_arguments(x: Tensor, y: Tensor) -> Tensor:
    return x


# ---- a linear layer split over ranks, forward and backward


class Copied(torch.autograd.Function):
    """Identity forward, all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Reduced(torch.autograd.Function):
    """All-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class ReducedBothWays(Reduced):
    """All-reduce forward and, wrongly, backward too."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


def layer(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Input, weight, bias, and the gradient that reaches the output: the same on all ranks."""
    draw = generator(seed)
    return (
        torch.randn(ROWS, WIDTH_IN, generator=draw),
        torch.randn(WIDTH_IN, WIDTH_OUT, generator=draw),
        torch.randn(WIDTH_OUT, generator=draw),
        torch.randn(ROWS, WIDTH_OUT, generator=draw),
    )


def split_column(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Every rank holds some columns of the weight and gives these columns of the output."""
    x, weight, bias, upstream = layer(seed)
    x.requires_grad_()
    output = answer(x, weight, bias, rank, size)
    if output.shape == (ROWS, WIDTH_OUT // size):
        output.backward(upstream.chunk(size, 1)[rank])
    return {"output": output.detach(), "gradient of x": x.grad}  # type: ignore[dict-item]


def whole_layer(size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, upstream = layer(seed)
    return {"output": x @ weight + bias, "gradient of x": upstream @ weight.T}


COLUMN = exercise(
    Judge(
        lambda rank, size, seed: {
            "output": whole_layer(size, seed)["output"].chunk(size, 1)[rank],
            "gradient of x": whole_layer(size, seed)["gradient of x"],
        },
        on_ranks=True,
        trial=split_column,
        local=lambda rank, size, seed: {
            "gradient of x": layer(seed)[3].chunk(size, 1)[rank] @ layer(seed)[1].chunk(size, 1)[rank].T
        },
        labels={"gradient of x": Said("the gradient of x", "le gradient de x")},
    )
)


def column(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    return Copied.apply(x) @ weight.chunk(size, 1)[rank] + bias.chunk(size)[rank]


def column_without_backward(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    return x @ weight.chunk(size, 1)[rank] + bias.chunk(size)[rank]


def column_reversed(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    return Copied.apply(x) @ weight.chunk(size, 1)[-1 - rank] + bias.chunk(size)[-1 - rank]


def column_cut_off(x: Tensor, weight: Tensor, bias: Tensor, rank: int, size: int) -> Tensor:
    return column(x.detach(), weight, bias, rank, size).requires_grad_()


def split_row(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """Every rank holds some rows of the weight and the same part of the input; all get the whole output."""
    x, weight, bias, upstream = layer(seed)
    mine = x.chunk(size, 1)[rank].clone().requires_grad_()
    output = answer(mine, weight.chunk(size, 0)[rank], bias, rank)
    output.backward(upstream)
    return {"output": output.detach(), "gradient of x": mine.grad}  # type: ignore[dict-item]


ROW = exercise(
    Judge(
        lambda rank, size, seed: {
            "output": whole_layer(size, seed)["output"],
            "gradient of x": whole_layer(size, seed)["gradient of x"].chunk(size, 1)[rank],
        },
        on_ranks=True,
        trial=split_row,
        local=lambda rank, size, seed: {
            "output": layer(seed)[0].chunk(size, 1)[rank] @ layer(seed)[1].chunk(size, 0)[rank] + layer(seed)[2]
        },
        bias=lambda size, seed: {"output": layer(seed)[2]},
        labels={"gradient of x": Said("the gradient of x", "le gradient de x")},
    )
)


def row(x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> Tensor:
    return Reduced.apply(x @ weight) + bias


def row_bias_everywhere(x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> Tensor:
    return Reduced.apply(x @ weight + bias)


def row_without_bias(x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> Tensor:
    return Reduced.apply(x @ weight)


def row_not_reduced(x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> Tensor:
    return x @ weight + bias


def row_reduced_both_ways(x: Tensor, weight: Tensor, bias: Tensor, rank: int) -> Tensor:
    return ReducedBothWays.apply(x @ weight) + bias


# ---- gathering, where order matters

GATHER = exercise(
    Judge(
        lambda rank, size, seed: {"output": torch.cat([part(r, seed)[0] for r in range(size)])},
        on_ranks=True,
        trial=lambda answer, rank, size, seed: {"output": answer(part(rank, seed)[0], rank, size)},
    )
)


def gather(x: Tensor, rank: int, size: int) -> Tensor:
    parts = [torch.empty_like(x) for _ in range(size)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def gather_from_mine_on(x: Tensor, rank: int, size: int) -> Tensor:
    return gather(x, rank, size).roll(-3 * rank)


def nothing(x: Tensor, *more: Any) -> None:
    return None


def a_list(x: Tensor, *more: Any) -> list[Tensor]:
    return [x]


def test_the_rank_that_is_farthest_off_is_named() -> None:
    right = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 5.0])]
    given = [right[0] + torch.tensor([0.5, 0.0]), right[1] + torch.tensor([0.0, 2.0])]
    said = diagnose(RankEvidence(name="loss", label=Said("the loss", "la loss"), given=given, expected=right))
    assert said is not None
    away = "up to 2 away from what one process computes (rank 1)."
    assert said.said.en == f"Wrong values on ranks 0 and 1, the loss: {away}"


def unpadded(x: Tensor) -> Tensor:
    flat = x.flatten()[1:]
    share = torch.empty(flat.numel() // dist.get_world_size())
    dist.reduce_scatter_tensor(share, flat)
    return share


def other_dimensions(x: Tensor) -> Tensor:
    parts = [torch.empty(1, *x.shape) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return torch.cat(parts).mean(0)


def fewer_received(x: Tensor) -> Tensor:
    received = torch.empty(dist.get_world_size(), 11)
    dist.all_to_all_single(received, x.view(dist.get_world_size(), -1))
    return received


WRONG: list[tuple[Exercise, Callable[..., Any], str]] = [
    (MEAN, summed, "times too large, as many times as there are ranks"),
    (MEAN, divided_twice, "divided by the number of ranks once too often"),
    (MEAN, lambda x: x, "communication of the backward pass is missing"),
    (MEAN, lambda x: x / dist.get_world_size(), "the sum over the ranks is missing"),
    (MEAN, reduced_to_one, "Only rank 0 got the result"),
    (MEAN, broadcast_only, "Every rank holds rank 0's own part of the gradient"),
    (MEAN_OF_3, half_of_the_sum, "In every case your result is 1.5 times too large"),
    (MEAN, noise_of_each_rank, "a different random state"),
    (MEAN, one_stays_away, "Missing rank: rank 1 ended without calling all_reduce #1 [8, 3] float32"),
    (MEAN, another_shape, "Different shape: rank 0 calls all_reduce #1 [8, 3]"),
    (MEAN, another_order, "Different order: rank 0 calls broadcast #1"),
    (MEAN, all_receive_first, "Deadlock between ranks 0 and 1: rank 0 waits to receive from rank 1"),
    (MEAN, all_send_first, "All of them send first: use isend and irecv"),
    (MEAN, raises_on_one, "raised IndexError: no such layer\non rank 1, at line"),
    (MEAN, exits, "The process of rank 1 ended without an answer (exit code 3)"),
    (MEAN, never_ends, " s on ranks 0 and 1 and was stopped: look for a loop that never ends"),
    (MEAN, one_never_ends, "rank 1 waits in all_reduce #1 [8, 3] float32 for rank 0; rank 0 is still computing"),
    (MEAN, too_many_arguments, "missing 1 required positional argument"),
    (MEAN, nothing, "There is no gradient"),
    (MEAN, a_list, "returns a list"),
    (MEAN, unpadded, "Check failed: outputShape[0] * worldSize == inputShape[0] (22 vs. 23).\non every rank, at line"),
    (MEAN, unpadded, "have room for 22, but 23 are handed over: both must be equal"),
    (MEAN, other_dimensions, "one has the shape (8, 3) and another (1, 8, 3): give them the same shape"),
    (MEAN, fewer_received, "What is sent and what receives it have different shapes"),
    (COLUMN, column_without_backward, "communication of the backward pass is missing"),
    (COLUMN, column_reversed, "The order of the ranks is another one: rank 0 holds what rank 1 should"),
    (COLUMN, column_cut_off, "cuts the chain of the backward pass"),
    (ROW, row_bias_everywhere, "The bias is added on every rank before the sum, so it counts 2 times"),
    (ROW, row_without_bias, "The bias is never added"),
    (ROW, row_not_reduced, "communication of the forward pass is missing"),
    (ROW, row_reduced_both_ways, "The gradient of x is 2 times too large"),
    (GATHER, gather_from_mine_on, "in another order on rank 1"),
    (GATHER, nothing, "returns nothing"),
]


@pytest.mark.parametrize(("exercise", "answer", "words"), WRONG, ids=[answer.__name__ for _, answer, _ in WRONG])
def test_a_fault_between_ranks_is_told_by_its_name(exercise: Exercise, answer: Callable[..., Any], words: str) -> None:
    verdict = judge(exercise, answer)
    assert verdict.state == "wrong"
    assert words in verdict.message
    assert "Check failed" not in verdict.printed  # the message tells what torch's log prints


def test_a_mistake_is_named_only_where_every_rank_holds_its_values() -> None:
    """Left alone, a gradient is what a broadcast of rank 0's gives on rank 0, and there alone."""
    named = exercise(
        Judge(
            lambda rank, size, seed: {"gradient": torch.stack([part(r, seed) for r in range(size)]).mean(0)},
            on_ranks=True,
            trial=lambda answer, rank, size, seed: {"gradient": answer(part(rank, seed))},
            mistakes=(Mistake(lambda x: x, "Nothing is sent.", "Rien n’est envoyé."),),
            cases=((2, 11),),
        )
    )
    assert judge(named, lambda x: x.clone()).message == "Nothing is sent."
    assert "Wrong values on ranks 0 and 1, the gradient: up to" in judge(named, broadcast_only).message
    assert "differs between rank 0 and rank 1" in judge(named, reduced_to_one).message  # alone, rank 1 kept its own


def test_calls_of_a_rank_answer_hold_functions_imported_by_name_too() -> None:
    namespace: dict[str, Any] = {}
    exec("from torch.distributed import all_reduce\ndef answer(x):\n    all_reduce(x)\n    return x", namespace)
    counted: list[int] = []

    def inspect(answers: list[RankAnswer], size: int) -> None:
        counted.extend(len(one.calls) for one in answers)

    total = Judge(
        lambda rank, size, seed: {"output": torch.stack([part(r, seed) for r in range(size)]).sum(0)},
        on_ranks=True,
        trial=lambda answer, rank, size, seed: {"output": answer(part(rank, seed))},
        inspect=inspect,
        cases=((2, 1),),
    )
    total(namespace["answer"])
    assert counted == [1, 1]


@pytest.mark.parametrize(("exercise", "answer"), [(MEAN, mean), (COLUMN, column), (ROW, row), (GATHER, gather)])
def test_judge_on_ranks_accepts_a_right_answer(exercise: Exercise, answer: Callable[..., Any]) -> None:
    verdict = judge(exercise, answer)
    assert (verdict.state, verdict.message) == ("right", "Right.")


def test_judge_on_ranks_calls_a_stub_still_to_do_and_not_wrong() -> None:
    def stub(x: Tensor) -> Tensor:
        raise NotDone("ranks")

    assert judge(MEAN, stub).state == "todo"


def test_judge_on_ranks_tells_faults_in_french_too() -> None:
    use_language("fr")
    assert "2 fois trop grand" in judge(MEAN, summed).message
    assert "Interblocage entre les rangs 0 et 1" in judge(MEAN, all_receive_first).message
    assert "le rang 1 a terminé sans appeler all_reduce" in judge(MEAN, one_stays_away).message


@pytest.mark.parametrize(
    ("given", "right", "is_same"),
    [
        ((0.0, 9e-5), (0.0, 0.0), True),  # rounding beside zeros: 1e-4 of at least 1
        ((0.0, 1.1e-4), (0.0, 0.0), False),
        ((0.25, 0.25009), (0.25, 0.25), True),
        ((1000.0, 500.09), (1000.0, 500.0), True),  # 1e-4 of the largest, which is 0.1
        ((1000.0, 500.11), (1000.0, 500.0), False),
    ],
)
def test_same_is_up_to_a_share_of_the_largest_and_at_least_of_1(
    given: tuple[float, ...], right: tuple[float, ...], is_same: bool
) -> None:
    value, expected = (torch.tensor(one, dtype=torch.float64) for one in (given, right))
    assert same(value, expected) is is_same
