"""Exercises of lab 06 on layers: linear by columns and by rows, the MLP with one all-reduce, attention by heads.

An answer is held to the outputs and gradients of the whole layer in one process, and then to what it sent for them: a
second sum gives the same values.

Shape suffixes: B batch, T tokens, D width, N heads, H width of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import expect_several
from dlojz.labs.kit.rank_judges import (
    BIAS_EVERYWHERE,
    COUNTED_AGAIN,
    NO_BACKWARD_SUM,
    NO_BIAS,
    NO_FORWARD_SUM,
    OF_X,
    OUTPUT,
    TENSOR_CASES,
    Values,
    added,
    asked_for,
    gathers,
    gradient,
    normals,
    only,
    refuse_gathers,
    times_ranks,
)
from dlojz.processes.forks import RankAnswer

TEXTS = Texts(__file__)

LINEAR_SAMPLES, NARROW, WIDE = 5, 12, 24
OF_WEIGHT, OF_BIAS_ROW = "gradient of the weight", "gradient of the bias"
LINEAR_LABELS = {
    OF_WEIGHT: Said("the gradient of the weight", "le gradient du poids"),
    OF_BIAS_ROW: Said("the gradient of the bias", "le gradient du biais"),
}


def _column_inputs(seed: int) -> Any:
    """x, the whole weight and bias, the whole gradient of the output."""
    return normals(seed, (LINEAR_SAMPLES, NARROW), (WIDE, NARROW), (WIDE,), (LINEAR_SAMPLES, WIDE))


def _column_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, bias, gradient = _column_inputs(seed)
    with FlopCounterMode(display=False) as counted:
        returned = answer(x, weight, bias, gradient.chunk(size, dim=1)[rank].contiguous())
    y, of_x = expect_several(returned, "(y, gradient)", 2)
    if of_x is None:
        raise TEXTS.wrong("column-linear", "the second result is None")
    return {"flops": counted.get_total_flops()}, {OUTPUT: y, OF_X: of_x}


def _column(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, gradient = _column_inputs(seed)
    # (samples, NARROW) @ (NARROW, WIDE): a rank has WIDE / N columns. The gradient of x needs all of them.
    return {OUTPUT: (x @ weight.T + bias).chunk(size, dim=1)[rank], OF_X: gradient @ weight}


def _own_of_x(rank: int, size: int, seed: int) -> Tensor:
    _, weight, _, gradient = _column_inputs(seed)
    # (samples, WIDE / N) @ (WIDE / N, NARROW): this rank's contribution to the gradient of x.
    part: Tensor = gradient.chunk(size, dim=1)[rank] @ weight.chunk(size)[rank]
    return part


def _by_rows(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, _ = _column_inputs(seed)
    return {OUTPUT: x.chunk(size, dim=1)[rank] @ weight.chunk(size, dim=1)[rank].T + bias}


def _added_columns(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, _ = _column_inputs(seed)
    return {OUTPUT: added((x @ weight.T + bias).chunk(size, dim=1))}


def _every_nth(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, _ = _column_inputs(seed)
    return {OUTPUT: (x @ weight.T + bias)[:, rank::size]}


def _largest(tensors: list[Tensor]) -> Tensor:
    return torch.stack(tensors).amax(0)


def _inspect_column(answers: list[RankAnswer], size: int) -> None:
    """The values are right; was only the gradient of x sent, and only this rank's part computed?"""
    x_numel = LINEAR_SAMPLES * NARROW
    summed, gathered_numels = asked_for(answers[0], "all_reduce"), gathers(answers[0])
    if gathered_numels:
        raise TEXTS.wrong("column-linear", "tensors are brought together side by side")
    # A product of this rank's rows in each direction, two operations per number.
    if answers[0].value["flops"] > 1.01 * 2 * 2 * LINEAR_SAMPLES * NARROW * WIDE / size:
        raise TEXTS.wrong("column-linear", "every rank computes more than its part")
    if sum(summed) > x_numel:
        raise TEXTS.wrong(
            "column-linear", "more than the gradient goes through all-reduce", summed=sum(summed), x_numel=x_numel
        )


COLUMN_LINEAR = TEXTS.exercise(
    "column-linear",
    _column,
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_column_trial,
    inspect=_inspect_column,
    faults={
        "the wrong dimension is split": _by_rows,
        "you add up the outputs of the ranks": _added_columns,
        "every rank holds the whole output": lambda rank, size, seed: {
            OUTPUT: _column_inputs(seed)[0] @ _column_inputs(seed)[1].T + _column_inputs(seed)[2]
        },
        "you take every N-th feature": _every_nth,
        "the bias is left out": Mistake(
            lambda rank, size, seed: {
                OUTPUT: _column(rank, size, seed)[OUTPUT] - _column_inputs(seed)[2].chunk(size)[rank]
            },
            *NO_BIAS,
        ),
        "no sum of x's gradient in backward": Mistake(
            lambda rank, size, seed: {
                OUTPUT: _column(rank, size, seed)[OUTPUT],
                OF_X: _own_of_x(rank, size, seed),
            },
            *NO_BACKWARD_SUM,
        ),
        "gradients of x laid side by side": lambda rank, size, seed: {
            OF_X: torch.cat([_own_of_x(peer, size, seed) for peer in range(size)], dim=1)
        },
        "every rank adds rank 0's part of the bias": lambda rank, size, seed: {
            OUTPUT: _column(rank, size, seed)[OUTPUT]
            + _column_inputs(seed)[2].chunk(size)[0]
            - _column_inputs(seed)[2].chunk(size)[rank]
        },
        "every rank computes rank 0's outputs": lambda rank, size, seed: {OUTPUT: _column(0, size, seed)[OUTPUT]},
        "the order of the ranks is reversed": lambda rank, size, seed: {
            OUTPUT: _column(size - 1 - rank, size, seed)[OUTPUT]
        },
        "the two results are swapped": lambda rank, size, seed: {
            OUTPUT: _column(rank, size, seed)[OF_X],
            OF_X: _column(rank, size, seed)[OUTPUT],
        },
        "largest contribution to the gradient of x": lambda rank, size, seed: {
            OUTPUT: _column(rank, size, seed)[OUTPUT],
            OF_X: _largest([_own_of_x(peer, size, seed) for peer in range(size)]),
        },
        "you add up y_gradient over the ranks": lambda rank, size, seed: {
            OUTPUT: _column(rank, size, seed)[OUTPUT],
            OF_X: added(_column_inputs(seed)[3].chunk(size, dim=1)) @ _column_inputs(seed)[1].chunk(size)[rank],
        },
    },
)


def _row_inputs(seed: int) -> Any:
    """x, the whole weight and bias, the coefficients of the loss."""
    return normals(seed, (LINEAR_SAMPLES, WIDE), (NARROW, WIDE), (NARROW,), (LINEAR_SAMPLES, NARROW))


def _row_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    x, weight, bias, coefficients = _row_inputs(seed)
    x_own = x.chunk(size, dim=1)[rank].clone().requires_grad_()
    weight.requires_grad_(), bias.requires_grad_()
    y = answer(x_own, weight, bias)
    if y is not None and y.shape == coefficients.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_X: x_own.grad, OF_WEIGHT: weight.grad, OF_BIAS_ROW: gradient(bias)}


def _row(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, coefficients = _row_inputs(seed)
    # The answer is given the whole weight; the gradient reaches this rank's columns only, the others get zeros.
    of_weight = torch.zeros_like(weight)
    columns = slice(rank * WIDE // size, (rank + 1) * WIDE // size)
    of_weight[:, columns] = coefficients.T @ x[:, columns]
    return {
        OUTPUT: x @ weight.T + bias,
        OF_X: (coefficients @ weight)[:, columns],
        OF_WEIGHT: of_weight,
        OF_BIAS_ROW: coefficients.sum(0),
    }


def _mismatched(size: int, seed: int, take: Callable[[Tensor, int], Tensor]) -> Tensor:
    """The output, where ranks multiply their inputs by other columns of the weight."""
    x, weight, bias, _ = _row_inputs(seed)
    return added(part @ take(weight, rank).T for rank, part in enumerate(x.chunk(size, dim=1))) + bias


def _partial(rank: int, size: int, seed: int) -> Tensor:
    x, weight, _, _ = _row_inputs(seed)
    part: Tensor = x.chunk(size, dim=1)[rank] @ weight.chunk(size, dim=1)[rank].T
    return part


ROW_LINEAR = TEXTS.exercise(
    "row-linear",
    _row,
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_row_trial,
    labels=LINEAR_LABELS,
    faults={
        "no sum in forward, bias added": Mistake(
            lambda rank, size, seed: {OUTPUT: _partial(rank, size, seed) + _row_inputs(seed)[2]},
            *NO_FORWARD_SUM,
        ),
        "no sum in forward, no bias": Mistake(
            lambda rank, size, seed: {OUTPUT: _partial(rank, size, seed)}, *NO_FORWARD_SUM
        ),
        "bias added on every rank before the sum": Mistake(
            lambda rank, size, seed: {OUTPUT: _row(rank, size, seed)[OUTPUT] + (size - 1) * _row_inputs(seed)[2]},
            *BIAS_EVERYWHERE,
        ),
        "the bias is left out": Mistake(
            lambda rank, size, seed: {OUTPUT: _row(rank, size, seed)[OUTPUT] - _row_inputs(seed)[2]}, *NO_BIAS
        ),
        "you lay the partial products side by side": lambda rank, size, seed: {
            OUTPUT: _joined([_partial(peer, size, seed) for peer in range(size)])
        },
        "you average the partial products": lambda rank, size, seed: {
            OUTPUT: (_row(rank, size, seed)[OUTPUT] - _row_inputs(seed)[2]) / size + _row_inputs(seed)[2]
        },
        "gradient of x times the ranks": Mistake(times_ranks(_row, OF_X), *COUNTED_AGAIN),
        "you take every N-th input of the weight": lambda rank, size, seed: {
            OUTPUT: _mismatched(size, seed, lambda w, shard: w[:, shard::size])
        },
        "the order of the ranks is reversed": lambda rank, size, seed: {
            OUTPUT: _mismatched(size, seed, lambda w, shard: w.chunk(size, dim=1)[size - 1 - shard])
        },
        "every rank takes rank 0's columns": lambda rank, size, seed: {
            OUTPUT: _mismatched(size, seed, lambda w, shard: w.chunk(size, dim=1)[0])
        },
        "you take the largest partial product": lambda rank, size, seed: {
            OUTPUT: _largest([_partial(peer, size, seed) for peer in range(size)]) + _row_inputs(seed)[2]
        },
        "the bias takes part in the sum": tuple(
            lambda rank, size, seed, share=share: {
                OUTPUT: _row(rank, size, seed)[OUTPUT],
                OF_BIAS_ROW: share(rank, size) * _row(rank, size, seed)[OF_BIAS_ROW],
            }
            for share in (
                lambda rank, size: float(rank == 0),
                lambda rank, size: 1 / size,
                lambda rank, size: float(rank == size - 1),
            )
        ),
    },
    inspect=refuse_gathers(TEXTS.sentence("row-linear", "the ranks bring tensors together side by side")),
)


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1)


MLP_SAMPLES, MLP_WIDTH, HIDDEN = 5, 8, 24
OF_EXPAND, OF_PROJECT, OF_BIAS = "gradient of expand", "gradient of project", "gradient of project_bias"


def _mlp_inputs(seed: int) -> Any:
    """x, the two layers with their biases, the coefficients of the loss."""
    stream = (MLP_SAMPLES, MLP_WIDTH)
    return normals(seed, stream, (HIDDEN, MLP_WIDTH), (HIDDEN,), (MLP_WIDTH, HIDDEN), (MLP_WIDTH,), stream)


def _own(rank: int, size: int, seed: int) -> tuple[Tensor, ...]:
    """What the answer is given on a rank, ready for gradients."""
    x, expand, expand_bias, project, project_bias, _ = _mlp_inputs(seed)
    parts = (x, expand.chunk(size)[rank], expand_bias.chunk(size)[rank], project.chunk(size, dim=1)[rank], project_bias)
    return tuple(part.clone().requires_grad_() for part in parts)


def _mlp_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    inputs = _own(rank, size, seed)
    y = answer(*inputs)
    if y is not None and y.requires_grad:
        (y * _mlp_inputs(seed)[-1]).sum().backward()
    x, expand, _, project, project_bias = inputs
    of_weights = {OF_EXPAND: expand.grad, OF_PROJECT: project.grad, OF_BIAS: project_bias.grad}
    return {OUTPUT: y, OF_X: x.grad, **of_weights}


def _mlp_shares(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The gradient of x is this rank's contribution; all else is right."""
    shares = [_own(peer, size, seed) for peer in range(size)]
    # (samples, HIDDEN / N) @ (HIDDEN / N, width): partial products of the shape of y, summed by one all-reduce.
    partials = [F.gelu(x @ expand.T + bias) @ project.T for x, expand, bias, project, _ in shares]
    x, expand, _, project, project_bias = shares[rank]
    y = added(partials) + project_bias
    (y * _mlp_inputs(seed)[-1]).sum().backward()
    values = {
        OUTPUT: y, OF_X: gradient(x), OF_EXPAND: gradient(expand), OF_PROJECT: gradient(project),
        OF_BIAS: gradient(project_bias), "partial": partials[rank], "bias": project_bias,
        "sum of x": added(gradient(share[0]) for share in shares),
    }  # fmt: skip
    return {name: value.detach() for name, value in values.items()}


_mlp_expected = only(
    _mlp_shares, {name: name for name in (OUTPUT, OF_EXPAND, OF_PROJECT, OF_BIAS)} | {OF_X: "sum of x"}
)


def _with_bias(times: Callable[[int], int]) -> Callable[[int, int, int], dict[str, Tensor]]:
    """The bias counted another number of times."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        shares = _mlp_shares(rank, size, seed)
        return {OUTPUT: shares[OUTPUT] + (times(size) - 1) * shares["bias"]}

    return values


def _mlp_like(
    act: str = "gelu", bias: bool = True, hidden_summed: bool = False, input_summed: bool = False, twice: bool = False
) -> Values:
    """The output of another MLP, computed in one process."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        activations: dict[str, Callable[[Tensor], Tensor]] = {
            "gelu": F.gelu, "relu": F.relu, "silu": F.silu, "none": lambda h: h,
            "tanh gelu": lambda h: F.gelu(h, approximate="tanh"),
        }  # fmt: skip
        x, expand, expand_bias, project, project_bias, _ = _mlp_inputs(seed)
        h = (size * x if input_summed else x) @ expand.T + bias * expand_bias
        if hidden_summed:
            y = added(
                activations[act](added(h.chunk(size, dim=1))) @ columns.T for columns in project.chunk(size, dim=1)
            )
        else:
            y = activations.get(act, activations["none"])(h) @ project.T
        if act == "last":
            y = F.gelu(y)
        return {OUTPUT: (size * y if twice else y) + project_bias}

    return values


def _unsummed(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    shares = _mlp_shares(rank, size, seed)
    return {OUTPUT: shares["partial"] + shares["bias"]}


def _mlp_inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; were there two sums, one each way, however made, and nothing else?"""
    output_numel = MLP_SAMPLES * MLP_WIDTH
    # A sum made of a reduce-scatter and an all-gather has messages of all numbers of y, or of one N-th.
    brought = [*gathers(answers[0]), *asked_for(answers[0], "reduce_scatter_tensor", "reduce_scatter")]
    if any(numel not in (output_numel, output_numel // size) for numel in brought):
        raise TEXTS.wrong("one-all-reduce", "hidden features are brought together")
    sums = len(asked_for(answers[0], "all_reduce"))
    if sums > 2:
        raise TEXTS.wrong("one-all-reduce", "more than two all-reduces", sums=sums)


ONE_ALL_REDUCE = TEXTS.exercise(
    "one-all-reduce",
    _mlp_expected,
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_mlp_trial,
    faults={
        "no sum of x's gradient in backward": Mistake(only(_mlp_shares, (OUTPUT, OF_X)), *NO_BACKWARD_SUM),
        "no sum in forward, bias added": Mistake(_unsummed, *NO_FORWARD_SUM),
        "no sum in forward, no bias": Mistake(only(_mlp_shares, {OUTPUT: "partial"}), *NO_FORWARD_SUM),
        "bias added on every rank before the sum": Mistake(_with_bias(lambda size: size), *BIAS_EVERYWHERE),
        "the bias is left out": Mistake(_with_bias(lambda size: 0), *NO_BIAS),
        "gradient of project times the ranks": Mistake(times_ranks(_mlp_shares, OF_PROJECT), *COUNTED_AGAIN),
        "gradient of x averaged in backward": lambda rank, size, seed: {
            OUTPUT: _mlp_expected(rank, size, seed)[OUTPUT],
            OF_X: _mlp_expected(rank, size, seed)[OF_X] / size,
        },
        "the activation is another one": tuple(_mlp_like(act=act) for act in ("relu", "tanh gelu", "silu", "none")),
        "GELU comes after the second layer": _mlp_like(act="last"),
        "you add the hidden features up over the ranks": _mlp_like(hidden_summed=True),
        "expand_bias is left out of the first layer": _mlp_like(bias=False),
        "your f adds x up in forward": _mlp_like(input_summed=True),
        "the partial products are added up twice": _mlp_like(twice=True),
        "largest contribution to the gradient of x": lambda rank, size, seed: {
            OUTPUT: _mlp_expected(rank, size, seed)[OUTPUT],
            OF_X: _largest([_mlp_shares(peer, size, seed)[OF_X] for peer in range(size)]),
        },
    },
    inspect=_mlp_inspect,
)


BATCH, TOKENS, HEADS, HEAD = 2, 5, 6, 4
ATTENTION_WIDTH = HEADS * HEAD
OF_QKV = "gradient of qkv"


def _attention_inputs(seed: int) -> Any:
    x, qkv, project, loss = normals(
        seed,
        (BATCH, TOKENS, ATTENTION_WIDTH),
        (3 * ATTENTION_WIDTH, ATTENTION_WIDTH),
        (ATTENTION_WIDTH, ATTENTION_WIDTH),
        (BATCH, TOKENS, 1),
    )
    return x, qkv / ATTENTION_WIDTH**0.5 * 2, project / ATTENTION_WIDTH**0.5, loss


def _attention_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    from dlojz.by_hand.tensor.axis import TensorAxis

    x, qkv, project, coefficients = _attention_inputs(seed)
    x.requires_grad_(), qkv.requires_grad_()
    y = answer(x, qkv, project, HEADS, TensorAxis(dist.group.WORLD))
    if y is not None and y.shape == x.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_X: x.grad, OF_QKV: qkv.grad}


def _attend(x_BTD: Tensor, rows_3NHD: Tensor, project_DE: Tensor, *, merge: bool = True) -> Tensor:
    q_BNTH, k_BNTH, v_BNTH = torch.einsum("btd,pnhd->pbnth", x_BTD, rows_3NHD)
    attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH)
    merged = attended_BNTH.transpose(1, 2) if merge else attended_BNTH
    return merged.reshape(BATCH, TOKENS, -1) @ project_DE.T


def _own_rows(qkv: Tensor, rank: int, size: int, variant: str) -> Tensor:
    """The projection's rows that a rank takes, as (3, heads, H, D)."""
    rows_3NHD = qkv.view(3, HEADS, HEAD, ATTENTION_WIDTH)
    if variant == "naive slice":
        return qkv.chunk(size)[rank].view(3, -1, HEAD, ATTENTION_WIDTH)
    if variant == "head by head":
        return qkv.chunk(size)[rank].view(-1, 3, HEAD, ATTENTION_WIDTH).transpose(0, 1)
    if variant == "interleaved":
        return rows_3NHD[:, rank::size]
    return rows_3NHD.chunk(size, dim=1)[rank]


def _attention_shares(rank: int, size: int, seed: int, variant: str = "right") -> dict[str, Tensor]:
    """What ranks hold; `own x` is this rank's contribution to the gradient of x."""
    x, qkv, project, coefficients = _attention_inputs(seed)
    qkv.requires_grad_()
    copies = [x.clone().requires_grad_() for _ in range(size)]
    partials = []
    for peer, copy in enumerate(copies):
        columns = project.chunk(size, dim=1)[peer]
        if variant == "project by outputs":
            columns = project.chunk(size)[peer].T
        partials.append(_attend(copy, _own_rows(qkv, peer, size, variant), columns, merge=variant != "unmerged"))
    # Backward from this rank's partial product alone: what it would have without an all-reduce of x's gradient.
    (partials[rank] * coefficients).sum().backward(retain_graph=True)
    of_qkv, own_x = qkv.grad.clone(), copies[rank].grad.clone()
    # The second backward, from the sum over all ranks, must not add to the gradients of the first.
    for copy in copies:
        copy.grad = None
    (sum(partials) * coefficients).sum().backward()
    values = {OUTPUT: sum(partials), OF_X: sum(copy.grad for copy in copies), OF_QKV: of_qkv}
    return {name: value.detach() for name, value in {**values, "partial": partials[rank], "own x": own_x}.items()}


def _attention_like(
    scale: float | None = None,
    causal: bool = False,
    order: tuple[int, int, int] = (0, 1, 2),
    heads_of: Callable[[int, int], int] = lambda rank, size: rank,
    columns_of: Callable[[int, int], int] = lambda rank, size: rank,
) -> Values:
    """The output of another attention, and where ranks take other heads, or other columns of project."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        x, qkv, project, _ = _attention_inputs(seed)
        # One product for queries, keys and values: (B, T, D) with (3, N, H, D) gives (3, B, N, T, H).
        qkv_3BNTH = torch.einsum("btd,pnhd->pbnth", x, qkv.view(3, HEADS, HEAD, ATTENTION_WIDTH))
        q, k, v = qkv_3BNTH[list(order)]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        heads = [part.transpose(1, 2).flatten(2) for part in attended.chunk(size, dim=1)]
        columns = project.chunk(size, dim=1)
        return {OUTPUT: added(heads[heads_of(r, size)] @ columns[columns_of(r, size)].T for r in range(size))}

    return values


def _output(variant: str) -> Values:
    return only(_attention_shares, [OUTPUT], variant)


def _attention_inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; were there two sums, one each way, and nothing else?"""
    if gathers(answers[0]):
        raise TEXTS.wrong("attention-heads", "heads are gathered")
    sums = len(asked_for(answers[0], "all_reduce"))
    if sums > 2:
        raise TEXTS.wrong("attention-heads", "more than two all-reduces", sums=sums)


ATTENTION_HEADS = TEXTS.exercise(
    "attention-heads",
    only(_attention_shares, (OUTPUT, OF_X, OF_QKV)),
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_attention_trial,
    faults={
        "queries keys and values are mixed": _output("naive slice"),
        "you read qkv head by head": _output("head by head"),
        "the order of the heads is another one": _output("interleaved"),
        "heads joined without transposing back": _output("unmerged"),
        "the wrong dimension of project is split": _output("project by outputs"),
        "no sum in forward": Mistake(only(_attention_shares, {OUTPUT: "partial"}), *NO_FORWARD_SUM),
        "no sum of x's gradient in backward": Mistake(
            only(_attention_shares, {OUTPUT: OUTPUT, OF_X: "own x"}), *NO_BACKWARD_SUM
        ),
        "the scores are not divided by √H": tuple(
            _attention_like(scale=scale) for scale in (1.0, ATTENTION_WIDTH**-0.5, 1 / HEAD)
        ),
        "your attention is causal": _attention_like(causal=True),
        "queries, keys and values are exchanged": tuple(
            _attention_like(order=order) for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1))
        ),
        "every rank computes the heads of rank 0": _attention_like(
            heads_of=lambda rank, size: 0, columns_of=lambda rank, size: 0
        ),
        "heads and columns of project do not go together": tuple(
            _attention_like(heads_of=heads_of, columns_of=columns_of)
            for heads_of, columns_of in (
                (lambda rank, size: rank, lambda rank, size: 0),
                (lambda rank, size: size - 1 - rank, lambda rank, size: rank),
                (lambda rank, size: 0, lambda rank, size: rank),
            )
        ),
    },
    inspect=_attention_inspect,
)
