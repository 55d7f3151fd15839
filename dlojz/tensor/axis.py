"""One rank's place on the tensor-parallel axis, and the only four calls that communicate along it.

Layer 2. Invariant: every byte that tensor parallelism sends passes through a method of `TensorAxis`; a pretended axis
sends nothing and gives tensors of the shapes that real calls give, so that a rank's part of a model can be traced
without any other rank.

Shape suffixes: n ranks of the axis; S = T / n, one rank's part of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.schema import LabError
from dlojz.text import say


class TensorAxis:
    """A rank's place among the ranks that share each layer.

    Args:
        group: the ranks; None pretends (give `rank` and `size`), or stands for one process alone.
        rank: number of the pretended rank.
        size: how many ranks are pretended.
        sequence_parallel: outside of the parallel regions each rank holds T / n tokens of every sequence, not all.

    Attributes:
        rank: this rank's number on the axis.
        size: how many ranks it has.
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
        self.sequence_parallel = sequence_parallel and self.size > 1
        self._pretends = group is None

    @contextmanager
    def pretending(self) -> Iterator[None]:
        """Within it nothing is sent: shapes can be asked for without the other ranks."""
        before, self._pretends = self._pretends, True
        try:
            yield
        finally:
            self._pretends = before

    def all_reduce(self, x: Tensor, *, largest: bool = False) -> Tensor:
        """The sum (or the largest) over the ranks, in the memory of `x` itself, which must be contiguous.

        Who: all ranks of the axis. What: `x`. How much: its bytes.
        """
        if self.size > 1 and not self._pretends:
            operation = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(x, op=operation, group=self.group)
        return x

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """All ranks' `x` side by side along `dim`.

        Who: all ranks of the axis. What: `x` from each. How much: n times the bytes of `x` arrive.
        """
        if self.size == 1:
            return x
        # c10d lays the ranks one after the other along a dimension of their own; `cat` then copies once more. Megatron
        # avoids that copy by putting the sequence first.
        parts = x.new_empty(self.size, *x.shape)
        if not self._pretends:
            dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1), group=self.group)
        return torch.cat(parts.unbind(), dim=dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part, along `dim`, of the sum over the ranks.

        Who: all ranks of the axis. What: `x`, cut in n equal parts along `dim`. How much: the bytes of `x`.
        """
        if self.size == 1:
            return x
        parts = torch.stack(self._parts(x, dim))
        own = parts.new_empty(parts.shape[1:])
        if not self._pretends:
            dist.reduce_scatter_tensor(own.view(-1), parts.view(-1), group=self.group)
        return own

    def part(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of `x` along `dim`; nothing is sent."""
        return self._parts(x, dim)[self.rank].contiguous() if self.size > 1 else x

    def _parts(self, x: Tensor, dim: int) -> tuple[Tensor, ...]:
        if x.shape[dim] % self.size:
            raise LabError(
                say(
                    en=f"{self.size} ranks cannot share dimension {dim} of a tensor of shape {tuple(x.shape)} equally: "
                    f"use a length that {self.size} divides.",
                    fr=f"{self.size} rangs ne peuvent pas se partager également la dimension {dim} d’un tenseur de "
                    f"forme {tuple(x.shape)} : prenez une longueur que {self.size} divise.",
                )
            )
        return x.chunk(self.size, dim=dim)


ALONE = TensorAxis()
"""An axis of one rank: what is not split is a parallel layer on this axis, and communicates nothing."""
