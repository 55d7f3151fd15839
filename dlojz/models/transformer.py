"""The pre-norm transformer block that ViT and GPT share.

Layer 1 (models). Invariant: ``x_BTD`` in, contiguous ``x_BTD`` out, of the same shape; no dropout, so that a model
gives the same losses however it is laid on the devices.

Shape suffixes: B batch, T tokens, D width, N heads, H = D / N width of a head, E = N × 3 × H rows of the projection.
"""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.blocks import merge_heads, split_heads
from dlojz.moe.layer import MixtureOfExperts
from dlojz.moe.routing import Routing


class TransformerBlock(nn.Module):
    """Self-attention, then an MLP, each normalised before and added to the stream.

    Args:
        width: Width D of the stream.
        num_heads: Attention heads; divides ``width``.
        mlp_width: Width of the MLP's hidden layer.
        causal: Let a token see only itself and earlier tokens.
        norm_eps: Term added to the variance in the layer norms.
        gelu: ``"none"`` is the exact GELU, ``"tanh"`` the approximation that GPT-2 uses, and experts always.
        routing: of the mixture of experts that the block has in the place of its MLP; None: it has an MLP.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3; pre-norm: Xiong et al. 2020 (arXiv 2002.04745).
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_width: int,
        *,
        causal: bool,
        norm_eps: float,
        gelu: Literal["none", "tanh"] = "none",
        routing: Routing | None = None,
    ) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.causal = causal
        self.gelu = gelu
        self.norm1 = nn.LayerNorm(width, eps=norm_eps)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=norm_eps)
        self.mixture: MixtureOfExperts | None = None
        if routing is None:
            self.mlp_expand = nn.Linear(width, mlp_width)
            self.mlp_project = nn.Linear(mlp_width, width)
        else:
            self.mixture = MixtureOfExperts(width, mlp_width, routing, "gelu")

    def forward(self, x_BTD: Tensor) -> Tensor:
        """``(B, T, width)`` to the same shape."""
        q_BNTH, k_BNTH, v_BNTH = split_heads(self.qkv(self.norm1(x_BTD)), self.head_dim)
        attended_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BNTH, v_BNTH, is_causal=self.causal)
        x_BTD = x_BTD + self.attention_project(merge_heads(attended_BNTH))
        return x_BTD + self._feed_forward(self.norm2(x_BTD))

    def _feed_forward(self, x_BTD: Tensor) -> Tensor:
        if self.mixture is not None:
            mixed_BTD: Tensor = self.mixture(x_BTD)
            return mixed_BTD
        projected_BTD: Tensor = self.mlp_project(F.gelu(self.mlp_expand(x_BTD), approximate=self.gelu))
        return projected_BTD


def initialise_transformer(module: nn.Module) -> None:
    """Give one module the usual weights: truncated normal of deviation 0.02, biases zero; for ``model.apply``.

    Source: Radford et al. 2018 (GPT), section 4.1.
    """
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.trunc_normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
