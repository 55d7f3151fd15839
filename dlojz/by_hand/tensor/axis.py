"""Tensor-parallel axis: a rank's place, the only calls that communicate along it, and its slices of parameters.

A pretended axis sends nothing and gives tensors of the shapes that real calls give, so that a rank's part of a model
can be traced without any other rank. A module names the dimension along which each of its parameters is split
(`split_dims`); the ranks' slices side by side are the whole parameter.

Shape suffixes: n ranks of the axis; S = T / n, one rank's part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.language import refusal
from dlojz.models.foreign.tensor_regions import own_columns


class TensorAxis:
    """Place of a rank among the ranks that share each layer.

    Args:
        group: the ranks; None for a pretended axis (give `rank` and `size`), or one process.
        rank: number of the pretended rank.
        size: how many ranks are pretended.
        sequence_parallel: outside of the parallel regions each rank holds T / n tokens of every sequence, not all.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        rank: int = 0,
        size: int = 1,
        sequence_parallel: bool = False,
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
            raise refusal(
                en=f"{self.size} ranks cannot share dimension {dim} of a tensor of shape {tuple(x.shape)} equally: "
                f"use a length that {self.size} divides.",
                fr=f"{self.size} rangs ne peuvent pas se partager également la dimension {dim} d’un tenseur de "
                f"forme {tuple(x.shape)} : prenez une longueur que {self.size} divise.",
            )
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
        raise refusal(
            en=f"a dimension of {length} leaves nothing to rank {rank} of {size}: use fewer tensor-parallel ranks.",
            fr=f"une dimension de {length} ne laisse rien au rang {rank} sur {size} : prenez moins de rangs de "
            "Tensor Parallelism.",
        )
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
