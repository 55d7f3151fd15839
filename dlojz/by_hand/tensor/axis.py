"""Tensor-parallel axis: a rank's place, the calls that communicate along it, and the conjugate operators built on them.

A pretended axis sends nothing and gives tensors of the shapes that real calls give, so that a rank's part of a model
can be traced without any other rank. A module names the dimension along which each of its parameters is split
(`split_dims`); the ranks' slices side by side are the whole parameter.

A sum over ranks in one direction is a copy in the other. A region of a layer, between `enter` and `leave`, has one
communication in forward and its transpose in backward, and thus computes exactly what one process would.

    operator          forward           backward          Megatron calls it
    copy              nothing           all-reduce        f
    add_up            all-reduce        nothing           g
    gather_tokens     all-gather        reduce-scatter    g: where a region begins with sequence parallelism
    scatter_tokens    reduce-scatter    all-gather        g-bar: where it ends
    take_tokens       own part          all-gather        (every rank has the stream, and continues with its part)
    gather_features   all-gather        own part          (a column-parallel layer's output, whole on each rank)

Shape suffixes: B batch, T tokens of the whole sequence, n ranks of the axis, S = T / n tokens of one rank, D width of
the stream.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3 (f and g); Korthikanti et al. 2022 (arXiv 2205.05198),
§4.2.2 (g and g-bar).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.language import Sentences
from dlojz.models.foreign.tensor_regions import own_columns

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")


class TensorAxis:
    """Place of a rank among the ranks that share each layer.

    Args:
        group: the ranks; None for a pretended axis (give `rank` and `size`), or one process.
        rank: number of the pretended rank.
        size: how many ranks are pretended.
        sequence_parallel: outside of the parallel regions each rank holds T / n tokens of every sequence, not all.
    """

    def __init__(
        self, group: dist.ProcessGroup | None = None, *, rank: int = 0, size: int = 1, sequence_parallel: bool = False
    ) -> None:
        self.group = group
        self.rank = rank if group is None else dist.get_rank(group)
        self.size = size if group is None else group.size()
        self.sequence_parallel = sequence_parallel and self.size > 1  # alone, all tokens are its own
        self._pretends = group is None
        self.pretended: list[int] = []
        """Bytes of each sum that a pretended axis would have made."""

    @contextmanager
    def pretending(self) -> Iterator[None]:
        """Send nothing within this context: shapes can be traced without the other ranks."""
        before, self._pretends = self._pretends, True
        try:
            yield
        finally:
            self._pretends = before

    def all_reduce(self, x: Tensor, *, largest: bool = False) -> Tensor:
        """Sum over the ranks (or take the largest), in the memory of `x` itself, which must be contiguous.

        Who: all ranks of the axis. What: `x`. How much: its bytes.
        """
        if self.size > 1 and not self._pretends:
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(x, op=operation, group=self.group)
        elif self.size > 1:
            # The predictor of a model from elsewhere counts these bytes instead of a real run.
            self.pretended.append(x.nbytes)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate all ranks' `x` along `dim`.

        Who: all ranks of the axis. What: `x` from each. How much: n times the bytes of `x` arrive.
        """
        if self.size == 1:
            return x
        # c10d stacks the ranks along a new dimension; `cat` then copies once more. Megatron avoids that copy by putting
        # the sequence first.
        parts = x.new_empty(self.size, *x.shape)
        if not self._pretends:
            dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=self.group)
        return torch.cat(parts.unbind(), dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Sum over the ranks and keep this rank's part along `dim`.

        Who: all ranks of the axis. What: `x`, cut in n equal parts along `dim`. How much: the bytes of `x`.
        """
        if self.size == 1:
            return x
        # (n, …): one part per rank, side by side as c10d reads them.
        parts = torch.stack(self._parts(x, dim))
        part = parts.new_empty(parts.shape[1:])
        if not self._pretends:
            dist.reduce_scatter_tensor(part.view(-1), parts.view(-1), group=self.group)
        return part

    def part(self, x: Tensor, dim: int) -> Tensor:
        """Take this rank's part of `x` along `dim`; nothing is sent."""
        return self._parts(x, dim)[self.rank].contiguous() if self.size > 1 else x

    def _parts(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        if x.shape[dim] % self.size:
            raise phrase.refused("uneven slices", axis=self, dim=dim, shape=tuple(x.shape))
        return x.chunk(self.size, dim=dim)


ALONE = TensorAxis()
"""Axis of one rank: a layer that is not split uses it, and communicates nothing."""


def share_bounds(length: int, size: int, rank: int) -> tuple[int, int]:
    """Compute the first index of a rank's part, and the one after its last: equal parts, the last ones may be smaller.

    Example:
        >>> [share_bounds(10, 4, rank) for rank in range(4)]
        [(0, 3), (3, 6), (6, 9), (9, 10)]

    Raises:
        LabError: if a rank would have nothing.
    """
    # ⌈length / n⌉, as torch's `chunk` cuts; later ranks get what is left.
    share = -(-length // size)
    if rank * share >= length:
        raise phrase.refused("nothing for a rank", length=length, rank=rank, size=size)
    return rank * share, min((rank + 1) * share, length)


def own_slice(parameter: Tensor, dim: int, axis: TensorAxis) -> nn.Parameter:
    """Copy this rank's slice of a parameter along `dim`, as a parameter."""
    start, end = share_bounds(parameter.shape[dim], axis.size, axis.rank)
    return nn.Parameter(parameter.detach().narrow(dim, start, end - start).clone())


def split_dims(model: nn.Module) -> dict[str, int]:
    """Map the split parameters of a model to the dimension along which each is split."""
    dims_by_name: dict[str, int] = {}
    for path, module in model.named_modules():
        dims: dict[str, int] = getattr(module, "split_dims", {})
        if dims and module.axis.size == 1:
            continue  # a part that the pattern has left whole
        dims_by_name |= {f"{path}.{name}" if path else name: dim for name, dim in dims.items()}
    return dims_by_name


def split_parts(model: nn.Module) -> dict[str, Sequence[int]]:
    """Map parameters that are split part by part, as of a fused projection, to the lengths of their parts."""
    lengths_by_name: dict[str, Sequence[int]] = {}
    for path, module in model.named_modules():
        parts: dict[str, Sequence[int]] = getattr(module, "split_parts", {})
        lengths_by_name |= {f"{path}.{name}": lengths for name, lengths in parts.items() if len(lengths) > 1}
    return lengths_by_name


def gather_whole(
    rank_slice: Tensor, dim: int, shape: Sequence[int], axis: TensorAxis, parts: Sequence[int] | None = None
) -> Tensor:
    """Gather a whole parameter, of the given shape, from the ranks' slices; each of its `parts` is split by itself.

    Who: all ranks of the axis, at the end of a run. What: the slices, padded to the longest. How much: the parameter's
    bytes.
    """
    padded_shape = list(rank_slice.shape)
    padded_shape[dim] = -(-shape[dim] // axis.size)
    padded = rank_slice.new_zeros(padded_shape)
    padded.narrow(dim, 0, rank_slice.shape[dim]).copy_(rank_slice)
    gathered_slices = axis.all_gather(padded, dim).narrow(dim, 0, shape[dim])
    if parts is None:
        return gathered_slices
    # Of a fused parameter each slice holds a share of every part: column j of the slices belongs at `order[j]`.
    order = torch.cat([own_columns(parts, axis.size, rank, gathered_slices.device) for rank in range(axis.size)])
    return torch.empty_like(gathered_slices).index_copy_(dim, order, gathered_slices)


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
