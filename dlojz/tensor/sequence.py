"""Sequence parallelism: between two parallel regions each rank holds, normalises and adds T / n tokens only.

Layer 2. Invariant: a norm treats each token on its own, so that on a part of the sequence it gives that part of the
whole result; its weights, whole on every rank, get a gradient from each rank's tokens, and these are added up. The
all-reduce at the region's end becomes a reduce-scatter, the next region begins with an all-gather: the same bytes over
the wire, and 1 / n of the activations that tensor parallelism alone keeps n times.

Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198),
§4.2.2.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.tensor.axis import TensorAxis
from dlojz.tensor.operators import shared


class SequenceLayerNorm(nn.Module):
    """A layer norm over this rank's tokens; without sequence parallelism these are all tokens.

    Args:
        whole: the norm.
        axis: the ranks that share the sequence.
    """

    def __init__(self, whole: nn.LayerNorm, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.shape, self.eps = axis, whole.normalized_shape, whole.eps
        self.weight, self.bias = whole.weight, whole.bias

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``(B, S, D)`` to the same shape."""
        weight, bias = shared(self.weight, self.axis), shared(self.bias, self.axis)
        return F.layer_norm(x_BSD, self.shape, weight, bias, self.eps)


class SequenceRMSNorm(nn.Module):
    """The same for a root-mean-square norm, which has no bias.

    Args:
        whole: the norm.
        axis: the ranks that share the sequence.
    """

    def __init__(self, whole: nn.RMSNorm, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.shape, self.eps = axis, whole.normalized_shape, whole.eps
        self.weight = whole.weight

    def forward(self, x_BSD: Tensor) -> Tensor:
        """``(B, S, D)`` to the same shape."""
        return F.rms_norm(x_BSD, self.shape, shared(self.weight, self.axis), self.eps)
