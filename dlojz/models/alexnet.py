"""AlexNet: eight layers, eight blocks, the smallest model worth cutting into a pipeline.

One block per layer with weights, each with the activation and the pooling that follow it; blocks 1 to 5 convolve, 6 to
8 are dense. With 224 pixels, 1000 classes and the full size, the layers are those of torchvision's ``alexnet``. No
dropout: a model has the same losses in every layout.

Shape suffixes: B batch, C channels, H and W side of the feature map, D features, K classes.

Source: Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks" (arXiv 1404.5997), figure 1.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.blocks import BlockList
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.sizes import AlexNetSize


@dataclass(frozen=True)
class _Convolution:
    kernel: int
    stride: int
    padding: int
    pool: bool

    def side_after(self, side: int) -> int:
        # As torch rounds, down: of 224 pixels the five convolutions leave 27, 13, 13, 13 and 6.
        side = (side + 2 * self.padding - self.kernel) // self.stride + 1
        return (side - POOL_KERNEL) // POOL_STRIDE + 1 if self.pool else side


POOL_KERNEL, POOL_STRIDE = 3, 2
_CONVOLUTIONS = (
    _Convolution(kernel=11, stride=4, padding=2, pool=True),
    _Convolution(kernel=5, stride=1, padding=2, pool=True),
    _Convolution(kernel=3, stride=1, padding=1, pool=False),
    _Convolution(kernel=3, stride=1, padding=1, pool=False),
    _Convolution(kernel=3, stride=1, padding=1, pool=True),
)


class AlexNet(BlockList):
    """AlexNet of any width: ``x_BCHW`` in, ``logits_BK`` out.

    Args:
        size: Channels of the convolutions, width of the dense layers.
        image_size: Side of the square image in pixels, at least 63; fixes the first dense layer.
        num_classes: Number of logits per image.
        in_channels: 1 for grey images, 3 for colour.
        checkpointing: Recomputation in the backward pass (see `BlockList`).
    """

    def __init__(
        self,
        size: AlexNetSize,
        *,
        image_size: int,
        num_classes: int,
        in_channels: int = 3,
        checkpointing: Checkpointing | bool = "none",
    ) -> None:
        blocks: list[nn.Module] = []
        width, side = in_channels, image_size
        for channels, shape in zip(size.channels, _CONVOLUTIONS, strict=True):
            blocks.append(ConvolutionBlock(width, channels, shape))
            width, side = channels, shape.side_after(side)
        classifier = nn.Linear(size.dense_width, num_classes)
        blocks += [
            DenseBlock(width * side**2, size.dense_width),  # 256 × 6² = 9,216 inputs at full size
            DenseBlock(size.dense_width, size.dense_width),
            classifier,
        ]
        super().__init__(blocks, checkpointing=checkpointing)
        self.apply(_initialise)
        # There is no norm before it: larger weights would start with confident, wrong answers.
        nn.init.normal_(classifier.weight, std=0.01)


class ConvolutionBlock(nn.Module):
    """Convolution, ReLU and, in some layers, a 3×3 max pooling of stride 2."""

    def __init__(self, in_channels: int, channels: int, shape: _Convolution) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(in_channels, channels, shape.kernel, stride=shape.stride, padding=shape.padding)
        self.pool = nn.MaxPool2d(POOL_KERNEL, POOL_STRIDE) if shape.pool else nn.Identity()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """``(B, in_channels, H, W)`` to ``(B, channels, H', W')``."""
        output: Tensor = self.pool(F.relu(self.convolution(x_BCHW)))
        return output


class DenseBlock(nn.Module):
    """Dense layer and ReLU; flattens its input."""

    def __init__(self, in_width: int, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(in_width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x_BCHW`` or ``x_BD`` to ``(B, width)``."""
        return F.relu(self.dense(x.flatten(1)))


def _initialise(module: nn.Module) -> None:
    # Eight layers without normalisation: He's law keeps the signal's scale from one ReLU to the next.
    if isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
        if module.bias is not None:
            nn.init.zeros_(module.bias)
