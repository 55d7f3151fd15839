"""Models of one's own that read wide images of one channel and a row of numbers, as two arguments, for the tests."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.convolution(x)))


class Wide(nn.Module):
    """Classifies an image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.layers = nn.Sequential(*(Residual() for _ in range(3)))
        self.head = nn.Linear(16, 5)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.stem(image)).mean(dim=(2, 3)))
        return logits


class WithNumbers(Wide):
    """Classifies an image and a row of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Linear(6, 16)

    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:  # type: ignore[override]
        x = self.layers(self.stem(image)).mean(dim=(2, 3)) + self.numbers(numbers)
        logits: Tensor = self.head(x)
        return logits


def build() -> nn.Module:
    return WithNumbers()


def example_inputs() -> tuple[Tensor, Tensor]:
    return torch.zeros(2, 1, 24, 40), torch.zeros(2, 6)
