"""Detection backbone of torchvision as a model of one's own file: its output is five maps, so that it has a loss().

dlojz run --model benchmarks/own_backbone.py:build --dp 2 --zero 3
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz.models.foreign.vision_packages import ensure_torchvision_imports


def build() -> nn.Module:
    """Build a ResNet-18 with a feature pyramid."""
    ensure_torchvision_imports()  # one's own file just imports torchvision, where its extension loads
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    module: nn.Module = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    return module


def example_inputs() -> Tensor:
    """Make a batch of images."""
    return torch.zeros(2, 3, 64, 64)


def loss(output: dict[str, Tensor], targets: Tensor) -> Tensor:
    """Classify each image by the sum of its maps: (N, 256) numbers, of which the first are the classes'."""
    return F.cross_entropy(torch.stack([level.mean(dim=(2, 3)) for level in output.values()]).sum(dim=0), targets)
