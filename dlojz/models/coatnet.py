"""CoAtNet: convolution blocks, then attention blocks, as one flat list.

Every block takes an image ``x_BCHW`` and returns a contiguous one (the head returns logits); they compute what timm's
``coatnet_0_224`` to ``coatnet_5_224`` compute (the tests carry their weights over).

    S0  stem       two 3×3 convolutions, side ÷ 2
    S1  MBConv     side ÷ 2      x + conv1×1(SE(dwconv3×3(conv1×1(norm(x)))))
    S2  MBConv     side ÷ 2
    S3  attention  side ÷ 2      x + attention(norm(x)), then x + MLP(norm(x))
    S4  attention  side ÷ 2
    head           mean over positions, norm, dense + tanh, dense

Shape suffixes: B batch, C channels, H height and W width of the feature map, T = H × W positions (tokens), D width of a
token, N heads, E = N × 3 × (D / N) rows of the fused projection, K classes.

Source: Dai et al. 2021, "CoAtNet: Marrying Convolution and Attention for All Data Sizes" (arXiv 2106.04803).
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.blocks import BlockList, merge_heads, split_heads
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.sizes import CoAtNetSize

EXPANSION = 4
SQUEEZE_RATIO = 4
NORM_EPS = 1e-6


class CoAtNet(BlockList):
    """CoAtNet of any size: ``x_BCHW`` in, ``logits_BK`` out.

    Args:
        size: Widths and depths of the stages.
        image_size: Side of the square image in pixels, a multiple of 32; fixes the relative position tables.
        num_classes: Number of logits per image.
        in_channels: 1 for grey images, 3 for colour.
        checkpointing: Recomputation in the backward pass (see `BlockList`).

    Source: arXiv 2106.04803, section 2.2 and table 3.
    """

    def __init__(
        self,
        size: CoAtNetSize,
        *,
        image_size: int,
        num_classes: int,
        in_channels: int = 3,
        checkpointing: Checkpointing | bool = "none",
    ) -> None:
        blocks: list[nn.Module] = [Stem(in_channels, size.stem_width)]
        width, side = size.stem_width, image_size // 2
        for stage in size.stages:
            side //= stage.stride
            for index in range(stage.depth):
                stride = stage.stride if index == 0 else 1
                if stage.kind == "convolution":
                    blocks.append(MBConvBlock(width, stage.width, stride))
                else:
                    blocks.append(AttentionBlock(width, stage.width, stride, side, size.head_dim))
                width = stage.width
        blocks.append(PoolingHead(width, num_classes))
        super().__init__(blocks, checkpointing=checkpointing)
        self.apply(_initialise)


class Stem(nn.Module):
    """Stem S0, two 3×3 convolutions: ``x_BCHW`` to half the side."""

    def __init__(self, in_channels: int, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_channels, H, W)`` to ``(B, width, H/2, W/2)``."""
        x_BCHW = F.gelu(self.norm(self.conv1(x_BCHW)))
        output: Tensor = self.conv2(x_BCHW)
        return output


class MBConvBlock(nn.Module):
    """Inverted bottleneck with a depthwise convolution and squeeze-and-excitation, normalised before.

    Source: arXiv 2106.04803, section 2.2.2 and appendix A.1; the depthwise convolution has the stride (the paper's
    "strided DConv" row), not the first 1×1.
    """

    def __init__(self, in_width: int, width: int, stride: int) -> None:
        super().__init__()
        hidden = EXPANSION * width
        self.shortcut = _shortcut(in_width, width, stride)
        self.norm0 = nn.BatchNorm2d(in_width)
        self.expand = nn.Conv2d(in_width, hidden, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(hidden)
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False)
        self.norm2 = nn.BatchNorm2d(hidden)
        self.squeeze_excitation = SqueezeExcitation(hidden, width // SQUEEZE_RATIO)
        self.project = nn.Conv2d(hidden, width, 1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_width, H, W)`` to ``(B, width, H/stride, W/stride)``."""
        y_BCHW = F.gelu(self.norm1(self.expand(self.norm0(x_BCHW))))  # (B, 4·width, H, W)
        y_BCHW = F.gelu(self.norm2(self.depthwise(y_BCHW)))  # (B, 4·width, H/stride, W/stride)
        # (B, width, H/stride, W/stride): the shortcut is pooled and projected to the same shape.
        output: Tensor = self.shortcut(x_BCHW) + self.project(self.squeeze_excitation(y_BCHW))
        return output


class SqueezeExcitation(nn.Module):
    """Scale each channel by a gate computed from the mean of all channels.

    Source: Hu et al. 2017 (arXiv 1709.01507), section 3.
    """

    def __init__(self, width: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Linear(width, squeezed)
        self.excite = nn.Linear(squeezed, width)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``x_BCHW`` to the same shape."""
        mean_BC = x_BCHW.mean(dim=(2, 3))
        gate_BC = torch.sigmoid(self.excite(F.silu(self.squeeze(mean_BC))))
        return x_BCHW * gate_BC[:, :, None, None]  # (B, C, 1, 1) over (B, C, H, W)


class AttentionBlock(nn.Module):
    """Self-attention with relative positions over the whole feature map, then an MLP.

    With stride 2 the map is pooled before the attention and on the residual connection.
    Source: arXiv 2106.04803, section 2.2 and appendix A.1.
    """

    def __init__(self, in_width: int, width: int, stride: int, side: int, head_dim: int) -> None:
        super().__init__()
        self.shortcut = _shortcut(in_width, width, stride)
        self.norm1 = nn.LayerNorm(in_width, eps=NORM_EPS)
        self.pool = nn.AvgPool2d(2) if stride == 2 else nn.Identity()
        self.attention = RelativeAttention(in_width, width, side, head_dim)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp_expand = nn.Linear(width, EXPANSION * width)
        self.mlp_project = nn.Linear(EXPANSION * width, width)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_width, H, W)`` to ``(B, width, H/stride, W/stride)``."""
        shortcut_BCHW = self.shortcut(x_BCHW)
        # LayerNorm works along the last dimension: the channels go there and back.
        normed_BCHW = self.norm1(x_BCHW.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        # (B, C, H, W) → (B, T, C) on both sides, with T of the pooled map.
        x_BTD = _tokens(shortcut_BCHW) + self.attention(_tokens(self.pool(normed_BCHW)))
        x_BTD = x_BTD + self.mlp_project(F.gelu(self.mlp_expand(self.norm2(x_BTD))))
        # Point-to-point sends refuse strided views, and a pipeline may cut after any block.
        return x_BTD.transpose(1, 2).reshape(shortcut_BCHW.shape).contiguous()


class RelativeAttention(nn.Module):
    """Multi-head attention whose scores get a learned bias per head and relative position (Δ row, Δ column).

    Source: arXiv 2106.04803, equation 3 ("pre-normalisation" variant of the relative attention).
    """

    def __init__(self, in_width: int, width: int, side: int, head_dim: int) -> None:
        super().__init__()
        self.side, self.head_dim = side, head_dim
        self.qkv = nn.Linear(in_width, 3 * width)
        self.position_bias = nn.Parameter(torch.empty(width // head_dim, 2 * side - 1, 2 * side - 1))
        self.project = nn.Linear(width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, in_width)`` to ``(B, T, width)``, with T = side²."""
        q_BNTH, k_BNTH, v_BNTH = split_heads(self.qkv(x_BTD), self.head_dim)
        bias_NTT = self.relative_bias().to(q_BNTH.dtype)
        # One bias of (N, T, T) for the whole batch, added to the scores before the softmax.
        attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, attn_mask=bias_NTT)
        output: Tensor = self.project(merge_heads(attended_BNTH))
        return output

    def relative_bias(self) -> Tensor:
        """``bias_NTT`` of each head and (query, key) pair: ``position_bias[n, Δrow + side-1, Δcolumn + side-1]``."""
        # Sliding windows instead of a table of indices: no buffer to place, broadcast or initialise, and a backward
        # pass that is deterministic on GPUs. Flipped, because Δ = query - key shrinks as a window's offset grows.
        windows = self.position_bias.unfold(1, self.side, 1).unfold(2, self.side, 1).flip(3, 4)
        return windows.reshape(windows.shape[0], self.side**2, self.side**2)


class PoolingHead(nn.Module):
    """Head of CoAtNet: mean over positions, then a small classifier, ``x_BCHW`` to ``logits_BK``."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.hidden = nn.Linear(width, width)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, width, H, W)`` to ``(B, num_classes)``."""
        pooled_BD = self.norm(x_BCHW.mean(dim=(2, 3)))
        logits_BK: Tensor = self.classifier(torch.tanh(self.hidden(pooled_BD)))
        return logits_BK


def _shortcut(in_width: int, width: int, stride: int) -> nn.Module:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if stride == 2:
        layers["pool"] = nn.AvgPool2d(2)
    if in_width != width:
        layers["project"] = nn.Conv2d(in_width, width, 1)
    return nn.Sequential(layers)


def _tokens(x_BCHW: Tensor) -> Tensor:
    return x_BCHW.flatten(2).transpose(1, 2)


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Conv2d):
        # Each output sees kernel² × inputs of its group; a normal law on the fan-out keeps the gradient's scale.
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
    elif isinstance(module, RelativeAttention):
        nn.init.trunc_normal_(module.position_bias, std=0.02)
    if isinstance(module, (nn.Conv2d, nn.Linear)) and module.bias is not None:
        nn.init.zeros_(module.bias)
