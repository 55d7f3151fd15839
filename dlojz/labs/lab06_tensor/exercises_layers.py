"""Exercises of lab 06 on layers: linear by columns and by rows, the MLP with one all-reduce, attention by heads.

An answer is held to the outputs and gradients of the whole layer in one process, and then to what it sent for them: a
second sum gives the same values.

Shape suffixes: B batch, T tokens, D width, N heads, H width of a head.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dlojz.labs.kit.exercise import Mistake, Said
from dlojz.labs.kit.exercise_texts import Texts, edited_when_called
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


def _column_output(edits: str) -> Values:
    return only(edited_when_called((_column,), edits), [OUTPUT])


COLUMN_LINEAR = TEXTS.exercise(
    "column-linear",
    _column,
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_column_trial,
    inspect=_inspect_column,
    faults={
        "the wrong dimension is split": _column_output(
            "(x @ weight.T + bias).chunk(size, dim=1)[rank] → "
            "x.chunk(size, dim=1)[rank] @ weight.chunk(size, dim=1)[rank].T + bias"
        ),
        "you add up the outputs of the ranks": _column_output(
            "(x @ weight.T + bias).chunk(size, dim=1)[rank] → added((x @ weight.T + bias).chunk(size, dim=1))"
        ),
        "every rank holds the whole output": _column_output(".chunk(size, dim=1)[rank] →"),
        "you take every N-th feature": _column_output(".chunk(size, dim=1)[rank] → [:, rank::size]"),
        "the bias is left out": Mistake(_column_output("+ bias →"), *NO_BIAS),
        "no sum of x's gradient in backward": Mistake(
            edited_when_called((_column,), "gradient @ weight → _own_of_x(rank, size, seed)"), *NO_BACKWARD_SUM
        ),
        "gradients of x laid side by side": lambda rank, size, seed: {
            OF_X: torch.cat([_own_of_x(peer, size, seed) for peer in range(size)], dim=1)
        },
        "every rank adds rank 0's part of the bias": _column_output(
            "(x @ weight.T + bias).chunk(size, dim=1)[rank] → "
            "(x @ weight.T).chunk(size, dim=1)[rank] + bias.chunk(size)[0]"
        ),
        "every rank computes rank 0's outputs": _column_output("[rank] → [0]"),
        "the order of the ranks is reversed": _column_output("[rank] → [-1 - rank]"),
        "the two results are swapped": "OUTPUT: (x → OF_X: (x; OF_X: gradient → OUTPUT: gradient",
        "largest contribution to the gradient of x": (
            "gradient @ weight → _largest([_own_of_x(peer, size, seed) for peer in range(size)])"
        ),
        "you add up y_gradient over the ranks": (
            "gradient @ weight → added(gradient.chunk(size, dim=1)) @ weight.chunk(size)[rank]"
        ),
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


def _partial(rank: int, size: int, seed: int) -> Tensor:
    x, weight, _, _ = _row_inputs(seed)
    part: Tensor = x.chunk(size, dim=1)[rank] @ weight.chunk(size, dim=1)[rank].T
    return part


def _row_output(edits: str, *names: str) -> Values:
    return only(edited_when_called((_row,), edits), [OUTPUT, *names])


ROW_LINEAR = TEXTS.exercise(
    "row-linear",
    _row,
    on_ranks=True,
    cases=TENSOR_CASES,
    trial=_row_trial,
    labels=LINEAR_LABELS,
    faults={
        "no sum in forward, bias added": Mistake(
            _row_output("x @ weight.T → _partial(rank, size, seed)"), *NO_FORWARD_SUM
        ),
        "no sum in forward, no bias": Mistake(
            _row_output("x @ weight.T + bias → _partial(rank, size, seed)"), *NO_FORWARD_SUM
        ),
        "bias added on every rank before the sum": Mistake(_row_output("+ bias → + size * bias"), *BIAS_EVERYWHERE),
        "the bias is left out": Mistake(_row_output("+ bias →"), *NO_BIAS),
        "you lay the partial products side by side": _row_output(
            "x @ weight.T + bias → torch.cat([_partial(peer, size, seed) for peer in range(size)], dim=1)"
        ),
        "you average the partial products": _row_output("weight.T + bias → weight.T / size + bias"),
        "gradient of x times the ranks": Mistake(times_ranks(_row, OF_X), *COUNTED_AGAIN),
        "you take every N-th input of the weight": _row_output(
            "@ weight.T → @ torch.cat([weight[:, peer::size] for peer in range(size)], dim=1).T"
        ),
        "the order of the ranks is reversed": _row_output(
            "@ weight.T → @ torch.cat(weight.chunk(size, dim=1)[::-1], dim=1).T"
        ),
        "every rank takes rank 0's columns": _row_output(
            "@ weight.T → @ weight.chunk(size, dim=1)[0].repeat(1, size).T"
        ),
        "you take the largest partial product": _row_output(
            "x @ weight.T → _largest([_partial(peer, size, seed) for peer in range(size)])"
        ),
        "the bias takes part in the sum": tuple(
            _row_output(f"coefficients.sum(0) → coefficients.sum(0) * {share}", OF_BIAS_ROW)
            for share in ("(rank == 0)", "(1 / size)", "(rank == size - 1)")
        ),
    },
    inspect=refuse_gathers(TEXTS.sentence("row-linear", "the ranks bring tensors together side by side")),
)


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


def _mlp_output(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The output alone, computed in one process: what the usual mistakes change."""
    x, expand, expand_bias, project, project_bias, _ = _mlp_inputs(seed)
    h = x @ expand.T + expand_bias
    return {OUTPUT: F.gelu(h) @ project.T + project_bias}


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
    source=(_mlp_output,),
    faults={
        "no sum of x's gradient in backward": Mistake(only(_mlp_shares, (OUTPUT, OF_X)), *NO_BACKWARD_SUM),
        "no sum in forward, bias added": Mistake(_unsummed, *NO_FORWARD_SUM),
        "no sum in forward, no bias": Mistake(only(_mlp_shares, {OUTPUT: "partial"}), *NO_FORWARD_SUM),
        "bias added on every rank before the sum": Mistake(
            edited_when_called((_mlp_output,), "+ project_bias → + size * project_bias"), *BIAS_EVERYWHERE
        ),
        "the bias is left out": Mistake(edited_when_called((_mlp_output,), "+ project_bias →"), *NO_BIAS),
        "gradient of project times the ranks": Mistake(times_ranks(_mlp_shares, OF_PROJECT), *COUNTED_AGAIN),
        "gradient of x averaged in backward": lambda rank, size, seed: {
            OUTPUT: _mlp_expected(rank, size, seed)[OUTPUT],
            OF_X: _mlp_expected(rank, size, seed)[OF_X] / size,
        },
        "the activation is another one": (
            "F.gelu(h) → F.relu(h)",
            "F.gelu(h) → F.gelu(h, approximate='tanh')",
            "F.gelu(h) → F.silu(h)",
            "F.gelu(h) → h",
        ),
        "GELU comes after the second layer": "F.gelu(h) @ project.T → F.gelu(h @ project.T)",
        "you add the hidden features up over the ranks": (
            "F.gelu(h) @ project.T → F.gelu(added(h.chunk(size, dim=1))) @ added(project.chunk(size, dim=1)).T"
        ),
        "expand_bias is left out of the first layer": "+ expand_bias →",
        "your f adds x up in forward": "x @ expand.T → size * x @ expand.T",
        "the partial products are added up twice": "F.gelu(h) @ → size * F.gelu(h) @",
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


def _attend(x_BTD: Tensor, rows_3NHD: Tensor, project_DE: Tensor) -> Tensor:
    q_BNTH, k_BNTH, v_BNTH = torch.einsum("btd,pnhd->pbnth", x_BTD, rows_3NHD)
    attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH)
    return attended_BNTH.transpose(1, 2).reshape(BATCH, TOKENS, -1) @ project_DE.T


def _attention_shares(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """What ranks hold; `own x` is this rank's contribution to the gradient of x."""
    x, qkv, project, coefficients = _attention_inputs(seed)
    qkv.requires_grad_()
    copies = [x.clone().requires_grad_() for _ in range(size)]
    rows_3NHD = qkv.view(3, HEADS, HEAD, ATTENTION_WIDTH)
    partials = [
        _attend(copy, rows_3NHD.chunk(size, dim=1)[peer], project.chunk(size, dim=1)[peer])
        for peer, copy in enumerate(copies)
    ]
    # Backward from this rank's partial product alone: what it would have without an all-reduce of x's gradient.
    (partials[rank] * coefficients).sum().backward(retain_graph=True)
    of_qkv, own_x = qkv.grad.clone(), copies[rank].grad.clone()
    # The second backward, from the sum over all ranks, must not add to the gradients of the first.
    for copy in copies:
        copy.grad = None
    (sum(partials) * coefficients).sum().backward()
    values = {OUTPUT: sum(partials), OF_X: sum(copy.grad for copy in copies), OF_QKV: of_qkv}
    return {name: value.detach() for name, value in {**values, "partial": partials[rank], "own x": own_x}.items()}


def _attention_output(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The output alone: what the usual mistakes change."""
    x, qkv, project, _ = _attention_inputs(seed)
    rows = qkv.view(3, HEADS, HEAD, ATTENTION_WIDTH).chunk(size, dim=1)
    columns = project.chunk(size, dim=1)
    return {OUTPUT: added(_attend(x, rows[peer], columns[peer]) for peer in range(size))}


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
    source=(_attention_output, _attend),
    faults={
        "queries keys and values are mixed": "rows[peer] → qkv.chunk(size)[peer].view(3, -1, HEAD, ATTENTION_WIDTH)",
        "you read qkv head by head": (
            "rows[peer] → qkv.chunk(size)[peer].view(-1, 3, HEAD, ATTENTION_WIDTH).transpose(0, 1)"
        ),
        "the order of the heads is another one": (
            "rows[peer] → qkv.view(3, HEADS, HEAD, ATTENTION_WIDTH)[:, peer::size]"
        ),
        "heads joined without transposing back": "attended_BNTH.transpose(1, 2) → attended_BNTH",
        "the wrong dimension of project is split": "columns[peer] → project.chunk(size)[peer].T",
        "no sum in forward": Mistake(only(_attention_shares, {OUTPUT: "partial"}), *NO_FORWARD_SUM),
        "no sum of x's gradient in backward": Mistake(
            only(_attention_shares, {OUTPUT: OUTPUT, OF_X: "own x"}), *NO_BACKWARD_SUM
        ),
        "the scores are not divided by √H": tuple(
            f"k_BNTH, v_BNTH) → k_BNTH, v_BNTH, scale={scale})"
            for scale in ("1.0", "ATTENTION_WIDTH**-0.5", "1 / HEAD")
        ),
        "your attention is causal": "k_BNTH, v_BNTH) → k_BNTH, v_BNTH, is_causal=True)",
        "queries, keys and values are exchanged": tuple(
            f"q_BNTH, k_BNTH, v_BNTH = → {order} ="
            for order in (
                "k_BNTH, q_BNTH, v_BNTH",
                "v_BNTH, k_BNTH, q_BNTH",
                "q_BNTH, v_BNTH, k_BNTH",
                "k_BNTH, v_BNTH, q_BNTH",
                "v_BNTH, q_BNTH, k_BNTH",
            )
        ),
        "every rank computes the heads of rank 0": "rows[peer], columns[peer] → rows[0], columns[0]",
        "heads and columns of project do not go together": (
            "columns[peer] → columns[0]",
            "rows[peer] → rows[-1 - peer]",
            "rows[peer] → rows[0]",
        ),
    },
    inspect=_attention_inspect,
)
