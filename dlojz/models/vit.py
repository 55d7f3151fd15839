"""Vision Transformer: an image cut in patches, read by a plain encoder.

The dimensions and the number of parameters are those of the papers' ViT (class token, learned positions, biases
everywhere); the first block takes ``x_BCHW``, the middle ones ``x_BTD``, the last returns ``logits_BK``.

Shape suffixes: B batch, C channels, H and W pixels, T = patches + 1 tokens, D width, K classes.

Source: Dosovitskiy et al. 2020, "An Image is Worth 16x16 Words" (arXiv 2010.11929), section 3.1.
"""

import math

import torch
from torch import Tensor, nn

from dlojz.models.blocks import BlockList, TransformerBlock
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.sizes import ViTSize

NORM_EPS = 1e-6


class ViT(BlockList):
    """Vision Transformer of any size: ``x_BCHW`` in, ``logits_BK`` out.

    Args:
        size: Patch side, width, depth, heads.
        image_size: Side of the square image in pixels, a multiple of the patch side; fixes the position table.
        num_classes: Number of logits per image.
        in_channels: 1 for grey images, 3 for colour.
        checkpointing: Recomputation in the backward pass (see `BlockList`).
    """

    def __init__(
        self,
        size: ViTSize,
        *,
        image_size: int,
        num_classes: int,
        in_channels: int = 3,
        checkpointing: Checkpointing | bool = "none",
    ) -> None:
        encoder = (
            TransformerBlock(size.width, size.num_heads, size.mlp_width, causal=False, norm_eps=NORM_EPS)
            for _ in range(size.depth)
        )
        blocks = [
            PatchEmbedding(image_size, size.patch, in_channels, size.width),
            *encoder,
            ClassTokenHead(size.width, num_classes),
        ]
        super().__init__(blocks, checkpointing=checkpointing)
        self.apply(_initialise)


class PatchEmbedding(nn.Module):
    """Embedding of an image: one token per patch, the class token in front, positions added."""

    def __init__(self, image_size: int, patch: int, in_channels: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(in_channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, (image_size // patch) ** 2 + 1, width))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_channels, H, W)`` to ``(B, T, width)``."""
        patches_BTD = self.project(x_BCHW).flatten(2).transpose(1, 2)  # (B, D, H/p, W/p) → (B, patches, D)
        class_token_BTD = self.class_token.expand(patches_BTD.shape[0], -1, -1)
        return torch.cat((class_token_BTD, patches_BTD), dim=1) + self.position


class ClassTokenHead(nn.Module):
    """Head of ViT: norm, then a linear classifier on the class token, ``x_BTD`` to ``logits_BK``."""

    def __init__(self, width: int, num_classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.classifier = nn.Linear(width, num_classes)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to ``(B, num_classes)``."""
        logits_BK: Tensor = self.classifier(self.norm(x_BTD[:, 0]))  # (B, D) of the class token
        return logits_BK


def _initialise(module: nn.Module) -> None:
    # Scaled by the fan-in instead of the usual fixed 0.02, with which the loss of a narrow ViT such as vit_tiny moves
    # only after several hundred steps. Positions have the scale of the patches, for the same reason.
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.trunc_normal_(module.weight, std=math.sqrt(1.0 / module.weight[0].numel()))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, PatchEmbedding):
        nn.init.trunc_normal_(module.position, std=0.5)
        nn.init.trunc_normal_(module.class_token, std=0.02)
    elif isinstance(module, ClassTokenHead):
        nn.init.trunc_normal_(module.classifier.weight, std=0.02)
