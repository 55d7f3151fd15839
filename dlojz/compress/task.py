"""Task of lab 11: handwritten digits to learn from, others that judge, and what is measured of a model.

Shape suffixes: N samples, C channels, H and W pixels.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlojz import data as datasets
from dlojz import models

IMAGE_SIZE = 16
"""Pixels of a side of the digits: twice what they were scanned with, as small as vit_tiny's patches allow for."""
HELD_OUT = 360
"""Samples that judge: a fifth of the digits."""
_CLASSES = 10
_SPLIT_SEED = 20260
_BATCH = 256


@dataclass(frozen=True)
class Task:
    """Classification task: samples to learn from, and held-out samples that judge.

    Args:
        inputs_NCHW: images that are learnt from.
        labels_N: their classes.
        held_out_NCHW: images that judge.
        held_out_labels_N: their classes.
    """

    inputs_NCHW: Tensor
    labels_N: Tensor
    held_out_NCHW: Tensor
    held_out_labels_N: Tensor


def digits() -> Task:
    """Load the 1,797 handwritten digits: 1,437 to learn from, and always the same 360 held out."""
    dataset = datasets.load("digits", family="image", num_classes=_CLASSES, seed=0, image_size=IMAGE_SIZE)
    samples = [dataset[index] for index in range(len(dataset))]  # type: ignore[arg-type]
    images_NCHW = torch.stack([image for image, _ in samples]).contiguous()
    labels_N = torch.stack([label for _, label in samples])
    order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    judged_N, learnt_N = order_N[:HELD_OUT], order_N[HELD_OUT:]
    return Task(images_NCHW[learnt_N], labels_N[learnt_N], images_NCHW[judged_N], labels_N[judged_N])


def new_model(name: str, task: Task, seed: int) -> nn.Module:
    """Build a model of the catalogue that fits a task, with the weights of a seed."""
    torch.manual_seed(seed)
    return models.build(name, image_size=task.inputs_NCHW.shape[-1], num_classes=_CLASSES)


@torch.inference_mode()
def logits(model: nn.Module, inputs_NCHW: Tensor) -> Tensor:
    """Compute the logits of a model in evaluation mode, ``(N, K)``."""
    model.eval()
    return torch.cat([model(batch_NCHW) for batch_NCHW in inputs_NCHW.split(_BATCH)])


def accuracy(model: nn.Module, task: Task) -> float:
    """Measure the share of the held-out samples that a model gets right, from 0 to 1."""
    right_N = logits(model, task.held_out_NCHW).argmax(dim=1) == task.held_out_labels_N
    return int(right_N.sum()) / len(right_N)


def parameters(model: nn.Module) -> int:
    """Count the parameters of a model, zeros included."""
    return sum(parameter.numel() for parameter in model.parameters())
