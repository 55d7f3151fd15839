"""Conjugate operators at the two ends of a parallel region: one communication in forward, its transpose in backward.

A sum over ranks in one direction is a copy in the other. A region of a layer, between `enter` and `leave`, thus
computes exactly what one process would.

    operator          forward           backward          Megatron calls it
    copy              nothing           all-reduce        f
    add_up            all-reduce        nothing           g
    gather_tokens     all-gather        reduce-scatter    g: where a region begins with sequence parallelism
    scatter_tokens    reduce-scatter    all-gather        g-bar: where it ends
    take_tokens       own part          all-gather        (every rank has the stream, and continues with its part)
    gather_features   all-gather        own part          (a column-parallel layer's output, whole on each rank)

Shape suffixes: B batch, T tokens of the whole sequence, S = T / n tokens of one rank, D width of the stream.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3 (f and g); Korthikanti et al. 2022 (arXiv 2205.05198),
§4.2.2 (g and g-bar).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from dlojz.by_hand.tensor.axis import TensorAxis

TOKENS = 1
"""Dimension of the tokens in `x_BTD`."""
FEATURES = -1
_Function = Callable[[Tensor], Tensor]


class _Conjugate(torch.autograd.Function):
    """Apply one function in forward, its transpose to the gradient in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: _Function, transpose: _Function) -> Tensor:
        ctx.transpose = transpose
        return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # One gradient per argument of forward; a function has none.
        return ctx.transpose(gradients[0]), None, None


def _conjugate(x: Tensor, axis: TensorAxis, function: _Function, transpose: _Function) -> Tensor:
    # One rank: no node in the graph, nothing sent.
    return x if axis.size == 1 else cast(Tensor, _Conjugate.apply(x, function, transpose))


def copy(x: Tensor, axis: TensorAxis) -> Tensor:
    """Give all of `x` to every rank's own columns; in backward the ranks' gradients of it are summed (its bytes)."""
    # view_as: a new tensor on the same memory.
    return _conjugate(x, axis, lambda x: x.view_as(x), lambda gradient: _sum(gradient, axis))


def add_up(x: Tensor, axis: TensorAxis) -> Tensor:
    """Sum the ranks' `x` (its bytes, all-reduced); in backward every rank has the whole gradient already."""
    return _conjugate(x, axis, lambda x: _sum(x, axis), lambda gradient: gradient)


def gather_tokens(x_BSD: Tensor, axis: TensorAxis) -> Tensor:
    """Gather ``(B, S, D)`` of each rank to ``(B, T, D)``; in backward the gradients are summed and scattered."""
    return _conjugate(x_BSD, axis, lambda x: axis.all_gather(x, TOKENS), lambda grad: axis.reduce_scatter(grad, TOKENS))


def scatter_tokens(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """Sum the ranks' ``(B, T, D)``, of which each keeps its ``(B, S, D)``; in backward these are gathered."""
    return _conjugate(x_BTD, axis, lambda x: axis.reduce_scatter(x, TOKENS), lambda grad: axis.all_gather(grad, TOKENS))


def take_tokens(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """Take this rank's ``(B, S, D)`` of a stream that all ranks have; in backward the parts are gathered."""
    return _conjugate(x_BTD, axis, lambda x: axis.part(x, TOKENS), lambda gradient: axis.all_gather(gradient, TOKENS))


def gather_features(x: Tensor, axis: TensorAxis) -> Tensor:
    """Gather all columns of a column-parallel layer's output; in backward each rank takes its own."""
    return _conjugate(x, axis, lambda x: axis.all_gather(x, FEATURES), lambda gradient: axis.part(gradient, FEATURES))


def _sum(x: Tensor, axis: TensorAxis) -> Tensor:
    # A copy is summed, not x itself: selective checkpointing keeps the product that x is, for backward.
    return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))


def enter(x: Tensor, axis: TensorAxis) -> Tensor:
    """Enter a parallel region: each rank needs the whole `x` for its own columns or heads."""
    return gather_tokens(x, axis) if axis.sequence_parallel else copy(x, axis)


def leave(x: Tensor, axis: TensorAxis) -> Tensor:
    """Leave a parallel region: the ranks' partial products are summed."""
    return scatter_tokens(x, axis) if axis.sequence_parallel else add_up(x, axis)


def shared(parameter: Tensor, axis: TensorAxis) -> Tensor:
    """Sum the gradients of a parameter that all ranks hold whole, where each rank has its own tokens only.

    Without sequence parallelism every rank has all tokens and computes the whole gradient. Who: all ranks of the axis,
    in backward. How much: the parameter's bytes, per micro-batch.
    """
    return copy(parameter, axis) if axis.sequence_parallel else parameter
