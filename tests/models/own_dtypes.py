"""Models of a file of one's own whose weights are in other types than fp32, or frozen in part, for the tests."""

import torch
from torch import Tensor, nn

WIDTH, LAYERS, WORDS, TOKENS = 64, 4, 500, 32


class LowRank(nn.Module):
    """A frozen layer with two trained matrices beside it (LoRA). Source: Hu et al. 2021, arXiv 2106.09685."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.layer(x) + self.b(self.a(x).to(x.dtype))
        return adapted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        residual: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return residual


class Text(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.token = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.token.weight
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x.to(self.head.weight.dtype))
        return logits


def bf16() -> nn.Module:
    return Text().bfloat16()


def float64() -> nn.Module:
    return Text().double()


def mixed() -> nn.Module:
    """Blocks in bf16, embedding and head in fp32, as where a part is converted by hand."""
    model = Text()
    model.layers.bfloat16()
    model.token.bfloat16()
    return model


def lora() -> nn.Module:
    """Everything is frozen but two matrices beside each layer of the blocks."""
    model = Text().requires_grad_(False)
    for block in model.layers:
        block.up, block.down = LowRank(block.up), LowRank(block.down)  # type: ignore[assignment]
    return model


def qlora() -> nn.Module:
    """The same, with the frozen layers in bf16."""
    model = lora()
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.bfloat16()
    for block in model.layers:
        for part in (block.up, block.down):
            part.forward = _adapted.__get__(part)  # type: ignore[method-assign, union-attr, assignment]
    return model


def _adapted(self: LowRank, x: Tensor) -> Tensor:
    """Compute the adapter in fp32, as peft does."""
    adapted: Tensor = self.layer(x) + self.b(self.a(x.float())).to(x.dtype)
    return adapted


def biases() -> nn.Module:
    """Only the biases are trained (BitFit). Source: Ben Zaken et al. 2021, arXiv 2106.10199."""
    model = Text()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def embedding() -> nn.Module:
    """The embedding and the first block are frozen, so that backward ends above them."""
    model = Text()
    model.token.requires_grad_(False)
    model.layers[0].requires_grad_(False)
    return model


def tied() -> nn.Module:
    """The matrix of a tied head is frozen: embedding and head alike."""
    model = Text(tied=True)
    model.token.requires_grad_(False)
    return model


def head() -> nn.Module:
    """Only the head is trained, on frozen features."""
    model = Text().requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def unused() -> nn.Module:
    """A second head, and a norm in one block, that forward does not call."""
    model = Text()
    model.spare_head = nn.Linear(WIDTH, WORDS)
    model.layers[1].spare_norm = nn.LayerNorm(WIDTH)
    return model


class Unreached(Text):
    """The same second head and norm, in a model that reads no weight outside of its module.

    DeepSpeed's stage 3 would gather it there (`runtime/zero/parameter_offload.py`, `ZeROOrderedDict`).
    """

    def __init__(self) -> None:
        super().__init__()
        self.spare_head = nn.Linear(WIDTH, WORDS)
        self.layers[1].spare_norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


class Recurrent(Text):
    """Layers that read a text word by word."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.LSTM(WIDTH, WIDTH, batch_first=True)])

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers[0](self.token(tokens))[0])
        return logits


def example_inputs() -> Tensor:
    return torch.zeros(2, TOKENS, dtype=torch.long)
