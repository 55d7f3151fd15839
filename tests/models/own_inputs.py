"""Models of one's own that read several tensors, for the tests; the example is a dict for the keywords of forward."""

from typing import Any

import torch
from torch import Tensor, nn

WIDTH, LAYERS, WORDS, TOKENS = 32, 4, 64, 12


class Layer(nn.Module):
    """A block that reads the stream and the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.mlp(x + self.attention(normed, normed, normed, key_padding_mask=mask, need_weights=False)[0])


class Masked(nn.Module):
    """A classifier of tokens, features of theirs and which of them are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.feature = nn.Linear(3, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, tokens: Tensor, mask: Tensor, *, features: Tensor) -> Tensor:
        x = self.token(tokens) + self.feature(features)
        for layer in self.layers:
            x = layer(x, mask)
        logits: Tensor = self.head(x)
        return logits


def build() -> nn.Module:
    return Masked()


def example_inputs() -> dict[str, Any]:
    mask = torch.zeros(3, TOKENS, dtype=torch.bool)
    mask[1, -4:] = True
    tokens = torch.arange(3 * TOKENS).reshape(3, TOKENS) % WORDS
    return {"tokens": tokens, "mask": mask, "features": torch.zeros(3, TOKENS, 3)}
