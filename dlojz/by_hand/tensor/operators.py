"""The conjugate operators: what a parallel region's two ends do in forward, and its mirror image in backward.

Each operator's backward is its transpose, so that a sum over ranks in one direction is a copy in the other. A region of
a layer, between `enter` and `leave`, thus computes exactly what one process would.

    operator          forward           backward          Megatron calls it
    copy              nothing           all-reduce        f
    add_up            all-reduce        nothing           g
    gather_tokens     all-gather        reduce-scatter    g: where a region begins with sequence parallelism
    scatter_tokens    reduce-scatter    all-gather        g-bar: where it ends
    take_tokens       own part          all-gather        (every rank has the stream, and goes on with its part)
    gather_features   all-gather        own part          (a column-parallel layer's output, whole on each rank)

Shape suffixes: B batch, T tokens of the whole sequence, S = T / n tokens of one rank, D width of the stream.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3 (f and g); Korthikanti et al. 2022 (arXiv 2205.05198),
§4.2.2 (g and g-bar).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from dlojz.by_hand.tensor.axis import TensorAxis

TOKENS = 1
"""Dimension of the tokens in `x_BTD`."""
FEATURES = -1


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Every rank has used x for its own columns: the gradient is the sum of what each has found.
        return ctx.axis.all_reduce(gradients[0].clone(memory_format=torch.contiguous_format)), None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        # A copy is summed, not x itself: selective checkpointing keeps the product that x is, to give it back later.
        return axis.all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.all_gather(x_BSD, TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.reduce_scatter(gradients[0], TOKENS), None


class _ScatterTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.reduce_scatter(x_BTD, TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_gather(gradients[0], TOKENS), None


class _TakeTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.part(x_BTD, TOKENS)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.all_gather(gradients[0], TOKENS), None


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: TensorAxis) -> Tensor:
        ctx.axis = axis
        return axis.all_gather(x, FEATURES)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.axis.part(gradients[0], FEATURES), None


def copy(x: Tensor, axis: TensorAxis) -> Tensor:
    """Every rank goes on with all of `x`; in backward the ranks' gradients of it are added up (its bytes)."""
    return _through(_Copy, x, axis)


def add_up(x: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of the ranks' `x` (its bytes, all-reduced); in backward the gradient is everybody's already."""
    return _through(_AddUp, x, axis)


def gather_tokens(x_BSD: Tensor, axis: TensorAxis) -> Tensor:
    """``(B, S, D)`` of each rank to ``(B, T, D)``; in backward the ranks' gradients are added up and shared out."""
    return _through(_GatherTokens, x_BSD, axis)


def scatter_tokens(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """The sum of the ranks' ``(B, T, D)``, of which each keeps its ``(B, S, D)``; in backward these are gathered."""
    return _through(_ScatterTokens, x_BTD, axis)


def take_tokens(x_BTD: Tensor, axis: TensorAxis) -> Tensor:
    """This rank's ``(B, S, D)`` of a stream that all ranks have; in backward the parts are gathered."""
    return _through(_TakeTokens, x_BTD, axis)


def gather_features(x: Tensor, axis: TensorAxis) -> Tensor:
    """All columns of a column-parallel layer's output; in backward each rank takes those of its own."""
    return _through(_GatherFeatures, x, axis)


def enter(x: Tensor, axis: TensorAxis) -> Tensor:
    """The beginning of a parallel region: each rank needs the whole `x` for its own columns or heads."""
    return gather_tokens(x, axis) if axis.sequence_parallel else copy(x, axis)


def leave(x: Tensor, axis: TensorAxis) -> Tensor:
    """The end of a parallel region: what the ranks have found from their own rows is added up."""
    return scatter_tokens(x, axis) if axis.sequence_parallel else add_up(x, axis)


def shared(parameter: Tensor, axis: TensorAxis) -> Tensor:
    """A parameter that all ranks have whole, where each sees its own tokens only: its gradients are added up.

    Without sequence parallelism every rank sees all tokens and finds the whole gradient itself. Who: all ranks of the
    axis, in backward. How much: the parameter's bytes, per micro-batch.
    """
    return copy(parameter, axis) if axis.sequence_parallel else parameter


def _through(operator: type[torch.autograd.Function], x: Tensor, axis: TensorAxis) -> Tensor:
    return x if axis.size == 1 else cast(Tensor, operator.apply(x, axis))
