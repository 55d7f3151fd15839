"""Convolutions split by channels: CoAtNet's stem and its MBConv block, depthwise and squeeze-excite included.

A 1×1 convolution is a linear layer over channels, and splits as one does; a depthwise convolution and a batch norm
treat each channel alone, so that each rank keeps its own channels, running statistics included. The gate of
squeeze-excite depends on all channels: it is a small parallel region with the row-parallel layer first.

    x ─ norm0 ─ enter ─ expand (columns) ─ norm1 ─ depthwise ─ norm2 ─ × gate ─ project (rows) leave ─ + shortcut
    gate: mean ─ squeeze (rows) leave ─ SiLU ─ enter ─ excite (columns) ─ sigmoid

Shape suffixes: B batch, C channels, H and W of the feature map; c channels of this rank, Q squeezed channels.

Source: the transposition of Shoeybi et al. 2019 (arXiv 1909.08053), §3, to channels; blocks: Dai et al. 2021 (arXiv
2106.04803), appendix A.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.by_hand.tensor.axis import TensorAxis, enter, leave, own_slice, share_bounds
from dlojz.by_hand.tensor.layers import ColumnParallelLinear, RowParallelLinear
from dlojz.models.coatnet import MBConvBlock, SqueezeExcitation, Stem


class ColumnParallelConv(nn.Module):
    """Convolution of which each rank computes some output channels; a depthwise one, those of its input channels.

    Args:
        conv: the convolution to split, with one group or as many as channels.
    """

    def __init__(self, conv: nn.Conv2d, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.stride, self.padding = axis, conv.stride, conv.padding
        # Output channels are dimension 0 of (out, in / groups, height, width).
        self.weight = own_slice(conv.weight, 0, axis)
        # Depthwise: as many groups as this rank has channels.
        self.groups = 1 if conv.groups == 1 else self.weight.shape[0]
        self.split_dims = {"weight": 0}

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, C, H, W)``, or ``(B, c, H, W)`` where it is depthwise, to this rank's channels."""
        return F.conv2d(x_BCHW, self.weight, stride=self.stride, padding=self.padding, groups=self.groups)


class RowParallelConv(nn.Module):
    """Convolution of which each rank holds the weights of some input channels; it ends the region."""

    def __init__(self, conv: nn.Conv2d, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.stride, self.padding = axis, conv.stride, conv.padding
        # Input channels.
        self.weight = own_slice(conv.weight, 1, axis)
        self.bias = conv.bias
        self.split_dims = {"weight": 1}

    def forward(self, x_BcHW: Tensor) -> Tensor:
        """``(B, c, H, W)`` to ``(B, C, H, W)``."""
        # Without the bias: added on every rank, it would count n times.
        partial_BCHW = F.conv2d(x_BcHW, self.weight, stride=self.stride, padding=self.padding)
        # Who: the ranks of the axis. What: their partial sums over channels, (B, C, H, W). How much: its bytes.
        y_BCHW = leave(partial_BCHW, self.axis)
        return y_BCHW if self.bias is None else y_BCHW + self.bias.to(y_BCHW.dtype)[:, None, None]


class ParallelBatchNorm(nn.BatchNorm2d):
    """Batch norm over this rank's channels."""

    def __init__(self, norm: nn.BatchNorm2d, axis: TensorAxis) -> None:
        start, end = share_bounds(norm.num_features, axis.size, axis.rank)
        super().__init__(end - start, eps=norm.eps, momentum=norm.momentum, device=norm.weight.device)
        self.weight, self.bias = own_slice(norm.weight, 0, axis), own_slice(norm.bias, 0, axis)
        self.axis, self.split_dims = axis, {"weight": 0, "bias": 0}
        for name in ("running_mean", "running_var"):
            setattr(self, name, getattr(norm, name)[start:end].clone())
        self.num_batches_tracked = norm.num_batches_tracked


class ParallelSqueezeExcitation(nn.Module):
    """Gate of each of this rank's channels, from the means of all channels."""

    def __init__(self, module: SqueezeExcitation, axis: TensorAxis) -> None:
        super().__init__()
        self.axis = axis
        self.squeeze = RowParallelLinear(module.squeeze, axis)
        self.excite = ColumnParallelLinear(module.excite, axis)

    def forward(self, x_BcHW: Tensor) -> Tensor:
        """``(B, c, H, W)`` to the same shape."""
        # Who: the ranks of the axis. What: (B, Q), summed in forward, and its gradient in backward. How much: twice its
        # bytes, the smallest message of the block.
        # (B, c), the mean over the map, @ (c, Q), this rank's rows.
        squeezed_BQ = F.silu(self.squeeze(x_BcHW.mean(dim=(2, 3))))
        gate_Bc = torch.sigmoid(self.excite(enter(squeezed_BQ, self.axis)))
        # (B, c, H, W) × (B, c, 1, 1).
        return x_BcHW * gate_Bc[:, :, None, None]


class ParallelMBConvBlock(nn.Module):
    """MBConv block of which each rank computes some hidden channels; the residual connection is whole on each."""

    def __init__(self, block: MBConvBlock, axis: TensorAxis) -> None:
        super().__init__()
        self.axis, self.shortcut, self.norm0 = axis, block.shortcut, block.norm0
        self.expand = ColumnParallelConv(block.expand, axis)
        self.norm1 = ParallelBatchNorm(block.norm1, axis)
        self.depthwise = ColumnParallelConv(block.depthwise, axis)
        self.norm2 = ParallelBatchNorm(block.norm2, axis)
        self.squeeze_excitation = ParallelSqueezeExcitation(block.squeeze_excitation, axis)
        self.project = RowParallelConv(block.project, axis)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_width, H, W)`` to ``(B, width, H/stride, W/stride)``."""
        # `enter` sends the input's gradient, (B, in_width, H, W), in backward.
        y_BcHW = F.gelu(self.norm1(self.expand(enter(self.norm0(x_BCHW), self.axis))))
        y_BcHW = F.gelu(self.norm2(self.depthwise(y_BcHW)))
        # `project` ends with a sum over the ranks, (B, width, H/stride, W/stride); the shortcut is added after it.
        output: Tensor = self.shortcut(x_BCHW) + self.project(self.squeeze_excitation(y_BcHW))
        return output


class ParallelStem(nn.Module):
    """First two convolutions of CoAtNet, the first by output channels, the second by input channels.

    Images need no gradient: nothing is sent in backward.
    """

    def __init__(self, stem: Stem, axis: TensorAxis) -> None:
        super().__init__()
        self.conv1 = ColumnParallelConv(stem.conv1, axis)
        self.norm = ParallelBatchNorm(stem.norm, axis)
        self.conv2 = RowParallelConv(stem.conv2, axis)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_channels, H, W)`` to ``(B, width, H/2, W/2)``."""
        output: Tensor = self.conv2(F.gelu(self.norm(self.conv1(x_BCHW))))
        return output
