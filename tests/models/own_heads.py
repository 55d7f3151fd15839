"""Transformers of a file of one's own, for the tests of tensor parallelism."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, WORDS, TOKENS = 32, 4, 2, 256, 16


class Block(nn.Module):
    """All layers are the block's; queries and keys are normalised head by head, with one weight for all heads."""

    def __init__(self, heads: int = HEADS, interleaved: bool = False) -> None:
        super().__init__()
        self.n_heads, self.interleaved = heads, interleaved
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.norm_head = nn.LayerNorm(WIDTH // heads)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(self.norm1(x))
        if self.interleaved:
            q, k, v = qkv.view(batch, tokens, self.n_heads, 3, -1).permute(3, 0, 2, 1, 4)
        else:
            q, k, v = qkv.view(batch, tokens, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(self.norm_head(q), self.norm_head(k), v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        hidden: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return hidden


class Mixing(Block):
    """Its hidden features are normalised together, and its heads are reshaped by the width of the input."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        x = x + self.out(F.softmax(q + k, dim=-1) * v)
        hidden: Tensor = x + self.down(F.layer_norm(self.up(self.norm2(x)), [4 * WIDTH]))
        return hidden


class Text(nn.Module):
    def __init__(self, block: type[Block] = Block, **options: object) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.Sequential(*(block(**options) for _ in range(LAYERS)))  # type: ignore[arg-type]
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.token(tokens)))
        return logits


def build() -> nn.Module:
    return Text()


def interleaved() -> nn.Module:
    return Text(interleaved=True)


def mixing() -> nn.Module:
    return Text(Mixing)


def example_inputs() -> Tensor:
    return torch.zeros(2, TOKENS, dtype=torch.long)
