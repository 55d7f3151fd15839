"""Models of a file of one's own, for the tests: one that trains, and some that are refused."""

import torch
from torch import Tensor, nn

WIDTH, LAYERS, WORDS, TOKENS = 32, 5, 256, 16


class Residual(nn.Module):
    """A block that reads two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * self.mlp(self.norm(x))


class Tied(nn.Module):
    """A text model with a tied head and buffers; one weight, the last norm's, is used between the blocks too."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.token.weight
        self.register_buffer("scales", torch.full((LAYERS,), 0.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for number, layer in enumerate(self.layers):
            x = layer(x, self.scales[number])
        logits: Tensor = self.head(self.norm(x))
        return logits


class Choosing(Tied):
    """Depends on the values of its data."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.sum() > 0:
            tokens = tokens + 0
        return super().forward(tokens)


class Counting(nn.Module):
    """Needs the value of a tensor to be built."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(int(torch.ones(3).sum()), 3)


class Pair(Tied):
    """Returns its logits and something else."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens), tokens  # type: ignore[return-value]


class Shared(Tied):
    """Its blocks have one weight in common, or one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].norm.weight = self.layers[0].norm.weight  # type: ignore[assignment]
        self.layers[3] = self.layers[2]


class Chained(Tied):
    """A chain: its head has a weight of its own; each block reads a number of one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)


class Skipping(Chained):
    """No chain: the third block reads what the first has given too."""

    def forward(self, tokens: Tensor) -> Tensor:
        first = self.layers[0](self.token(tokens), self.scales[0])
        x = self.layers[2](self.layers[1](first, self.scales[1]) + first, self.scales[2])
        logits: Tensor = self.head(self.norm(self.layers[4](self.layers[3](x, self.scales[3]), self.scales[4])))
        return logits


class Measuring(Chained):
    """Cannot be traced symbolically: it chooses by the number of tokens."""

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > TOKENS:
            tokens = tokens[:, :TOKENS]
        return super().forward(tokens)


class Frozen(Chained):
    """Its embedding is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.token.requires_grad_(False)


def build() -> nn.Module:
    return Tied()


choosing, counting, pair, shared = Choosing, Counting, Pair, Shared
chained, skipping, measuring, frozen = Chained, Skipping, Measuring, Frozen


def example_inputs() -> Tensor:
    return torch.zeros(2, TOKENS, dtype=torch.long)
