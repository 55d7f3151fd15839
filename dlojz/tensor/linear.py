"""A linear layer split by columns or by rows: the two halves of a parallel region.

Layer 2. Invariant: a column-parallel layer, then anything that treats each feature (or head) on its own, then a
row-parallel layer compute what the two whole layers would, with one sum over the ranks. "Columns" and "rows" are those
of the paper's A in Y = X A; torch keeps Aᵀ, of shape (out, in), so that columns are rows of `weight`.

    column   Y_i = X A_i          weight (out / n, in)    nothing is sent: X is whole, Y_i is this rank's features
    row      Y = Σ_i X_i A_i      weight (out, in / n)    the partial products are added up: one all-reduce

Shape suffixes: B batch, T tokens, D in-features, F out-features; f = F / n, d = D / n of one rank.

Source: Shoeybi et al. 2019, "Megatron-LM" (arXiv 1909.08053), §3, figure 3.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.tensor.axis import TensorAxis
from dlojz.tensor.operators import gather_features, leave, shared
from dlojz.tensor.slicing import own_slice


class ColumnParallelLinear(nn.Module):
    """A linear layer of which each rank computes some of the outputs.

    Its input is whole on every rank and has passed `operators.enter`, once for all the layers that read it.

    Args:
        whole: the layer to split.
        axis: the ranks that share it.
        gather_output: give all outputs to every rank (one all-gather of them) rather than each rank its own.
    """

    def __init__(self, whole: nn.Linear, axis: TensorAxis, *, gather_output: bool = False) -> None:
        super().__init__()
        self.axis, self.gather_output = axis, gather_output
        self.weight = own_slice(whole.weight, 0, axis)
        # A bias belongs to an output: it is split with them.
        self.bias = None if whole.bias is None else own_slice(whole.bias, 0, axis)
        self.split_dims = {"weight": 0} if self.bias is None else {"weight": 0, "bias": 0}

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, D)`` to ``(B, T, f)``, or ``(B, T, F)`` where the output is gathered."""
        y_BTf = F.linear(x_BTD, self.weight, self.bias)
        return gather_features(y_BTf, self.axis) if self.gather_output else y_BTf


class RowParallelLinear(nn.Module):
    """A linear layer of which each rank holds the weights of some of the inputs; the region's end is in it.

    Args:
        whole: the layer to split.
        axis: the ranks that share it.
    """

    def __init__(self, whole: nn.Linear, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = own_slice(whole.weight, 1, axis)
        self.bias = whole.bias
        self.split_dims = {"weight": 1}

    def forward(self, x_BTd: Tensor) -> Tensor:
        """``(B, T, d)`` to ``(B, T, F)``; with sequence parallelism each rank keeps ``(B, S, F)`` of it."""
        # Who: the ranks of the axis. What: their partial products, (B, T, F). How much: its bytes, all-reduced (or
        # reduce-scattered).
        y_BTF = leave(F.linear(x_BTd, self.weight), self.axis)
        # After the sum: added by every rank before it, the bias would count n times.
        return y_BTF if self.bias is None else y_BTF + shared(self.bias, self.axis).to(y_BTF.dtype)
