"""The parallel layers one by one, against the whole ones: outputs, gradients, and what crosses the wire."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.by_hand.tensor import axis as operators
from dlojz.by_hand.tensor.axis import ALONE, TensorAxis, gather_whole, own_slice, share_bounds
from dlojz.by_hand.tensor.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    vocabulary_parallel_cross_entropy,
)
from dlojz.processes.forks import RankAnswer, spmd

SIZE = 3
B, T, D, V = 2, 6, 12, 10  # V is not a multiple of 3: the last rank has fewer words


def near(own: Tensor, expected: Tensor, what: str = "") -> None:
    torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-6, msg=lambda said: f"{what}: {said}")


def values(answers: list[RankAnswer]) -> list[RankAnswer]:
    for answer in answers:
        assert answer.error is None, (answer.rank, answer.error)
    return answers


def seeded(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Operator = Callable[[Tensor, TensorAxis], Tensor]
OPERATORS: dict[str, tuple[Operator, tuple[int, ...], tuple[int, ...]]] = {
    "copy": (operators.copy, (B, T, D), (B, T, D)),
    "add_up": (operators.add_up, (B, T, D), (B, T, D)),
    "gather_tokens": (operators.gather_tokens, (B, T // SIZE, D), (B, T, D)),
    "scatter_tokens": (operators.scatter_tokens, (B, T, D), (B, T // SIZE, D)),
    "take_tokens": (operators.take_tokens, (B, T, D), (B, T // SIZE, D)),
    "gather_features": (operators.gather_features, (B, T, D // SIZE), (B, T, D)),
}


def test_every_layer_on_three_ranks() -> None:  # one launch: what each rank finds is compared where it is found
    def ranks(rank: int, size: int) -> None:
        axis = TensorAxis(dist.group.WORLD)
        shapes_of_operators(axis)
        column_then_row(axis)
        gathered_output(axis)
        embedding_and_loss(axis)

    values(spmd(ranks, SIZE))


def shapes_of_operators(axis: TensorAxis) -> None:
    """A real axis and a pretended one give the same shapes, forward and backward."""
    pretended = TensorAxis(rank=axis.rank, size=axis.size)
    for name, (operator, before, after) in OPERATORS.items():
        for one in (axis, pretended):
            x = seeded(axis.rank, *before).requires_grad_()
            y = operator(x * 1.0, one)
            y.sum().backward()
            assert (tuple(y.shape), x.grad is not None and tuple(x.grad.shape)) == (after, before), name


def column_then_row(axis: TensorAxis) -> None:
    torch.manual_seed(0)
    expand, project = nn.Linear(D, 24), nn.Linear(24, D)
    x_BTD = seeded(1, B, T, D).requires_grad_()
    whole_BTD = project(F.gelu(expand(x_BTD)))
    whole_BTD.backward(seeded(2, B, T, D))
    column, row = ColumnParallelLinear(expand, axis), RowParallelLinear(project, axis)
    own_BTD = seeded(1, B, T, D).requires_grad_()
    output_BTD = row(F.gelu(column(operators.enter(own_BTD, axis))))
    output_BTD.backward(seeded(2, B, T, D))
    near(output_BTD, whole_BTD, "output")
    assert x_BTD.grad is not None and own_BTD.grad is not None
    near(own_BTD.grad, x_BTD.grad, "gradient of the input")
    for name, own, whole, dim in (
        ("column weight", column.weight, expand.weight, 0),
        ("column bias", column.bias, expand.bias, 0),
        ("row weight", row.weight, project.weight, 1),
    ):
        assert own is not None and own.grad is not None and whole.grad is not None
        near(own.grad, own_slice(whole.grad, dim, axis), name)
        near(gather_whole(own.grad, dim, whole.shape, axis), whole.grad, name)


def gathered_output(axis: TensorAxis) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(D, 24)
    x_BTD = seeded(3, B, T, D)
    near(ColumnParallelLinear(linear, axis, gather_output=True)(x_BTD), linear(x_BTD), "gathered")


def embedding_and_loss(axis: TensorAxis) -> None:
    torch.manual_seed(0)
    table, output = nn.Embedding(V, D), nn.Linear(D, V, bias=False)
    tokens_BT = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(4))
    targets_BT = torch.randint(V, (B, T), generator=torch.Generator().manual_seed(5))
    loss = F.cross_entropy(output(table(tokens_BT)).flatten(0, 1), targets_BT.flatten())
    (3.0 * loss).backward()
    words, column = VocabularyParallelEmbedding(table, axis), ColumnParallelLinear(output, axis)
    own_BTv = column(operators.enter(words(tokens_BT), axis))
    own_loss = vocabulary_parallel_cross_entropy(own_BTv, targets_BT, words.start, axis)
    (3.0 * own_loss).backward()
    near(own_loss, loss, "loss")
    for own, whole in ((words.weight, table.weight), (column.weight, output.weight)):
        assert own.grad is not None and whole.grad is not None
        near(own.grad, own_slice(whole.grad, 0, axis), "vocabulary")


def test_vocabulary_parallel_cross_entropy_overflows_nowhere_by_large_logits() -> None:
    logits_BTv = seeded(0, B, T, V) * 1e4
    targets_BT = torch.zeros(B, T, dtype=torch.long)
    own = vocabulary_parallel_cross_entropy(logits_BTv, targets_BT, 0, ALONE)
    near(own, F.cross_entropy(logits_BTv.flatten(0, 1), targets_BT.flatten()))


def test_a_rank_sends_what_the_layers_say() -> None:
    """One all-reduce forward and one backward for a pair; three numbers per token for the loss; no logits."""

    def ranks(rank: int, size: int) -> None:
        axis = TensorAxis(dist.group.WORLD)
        pair(axis)
        loss_of(axis)

    def pair(axis: TensorAxis) -> None:
        column, row = ColumnParallelLinear(nn.Linear(D, 24), axis), RowParallelLinear(nn.Linear(24, D), axis)
        x_BTD = seeded(0, B, T, D).requires_grad_()
        row(column(operators.enter(x_BTD, axis))).sum().backward()

    def loss_of(axis: TensorAxis) -> None:
        logits_BTv = seeded(0, B, T, V // 2).requires_grad_()
        targets_BT = torch.zeros(B, T, dtype=torch.long)
        vocabulary_parallel_cross_entropy(logits_BTv, targets_BT, axis.rank * (V // 2), axis).backward()

    for answer in values(spmd(ranks, 2)):
        told = [(call["op"], call["numel"]) for call in answer.calls]
        assert told == [("all_reduce", B * T * D)] * 2 + [("all_reduce", B * T), ("all_reduce", 2 * B * T)]


@pytest.mark.parametrize("length", [1, 2, 7, 8, 12])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_shares_cover_everything_once(length: int, size: int) -> None:
    try:
        bounds = [share_bounds(length, size, rank) for rank in range(size)]
    except LabError:
        assert -(-length // size) * (size - 1) >= length
        return
    assert [index for start, end in bounds for index in range(start, end)] == list(range(length))


def test_tensor_axis_and_share_bounds_refuse_lengths_that_do_not_divide() -> None:
    with pytest.raises(LabError, match=r"2 ranks cannot share dimension 1 of a tensor of shape \(1, 5, 4\)"):
        TensorAxis(rank=0, size=2).part(torch.zeros(1, 5, 4), 1)
    with pytest.raises(LabError, match="a dimension of 2 leaves nothing to rank 2 of 4"):
        share_bounds(2, 4, 2)


def test_an_axis_alone_sends_nothing() -> None:
    x: Any = seeded(0, B, T, D)
    for operator, _, _ in OPERATORS.values():
        assert operator(x, ALONE) is x
