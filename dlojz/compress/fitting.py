"""One training loop for every method: the loss, and what follows an update, are parameters.

Layer 2. Invariant: same model, task, settings and seed on the same number of threads give the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz import models
from dlojz.compress.task import Task
from dlojz.schema import LabError
from dlojz.text import say

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs, labels) → a scalar."""
AfterStep = Callable[[int], None]
"""Called with the number of updates made so far, after each."""
Progress = Callable[[int, int], None]
"""Called with (done, total), as long work goes on."""


@dataclass(frozen=True)
class Settings:
    """How long and how fast to train.

    Args:
        epochs: passes over the task's samples.
        learning_rate: of AdamW at the beginning; it falls to 0 along half a cosine.
        batch_size: samples of a step.
        seed: of the order of the samples.

    Raises:
        LabError: unless there is an epoch, a sample in a batch and a finite learning rate above 0.
    """

    epochs: int = 12
    learning_rate: float = 1e-3
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in (("epochs", self.epochs), ("batch_size", self.batch_size)):
            if value < 1:
                raise LabError(
                    say(
                        en=f"{name} must be at least 1, but {value} was received.",
                        fr=f"{name} doit être au moins égal à 1, mais {value} a été reçu.",
                    )
                )
        if not 0 < self.learning_rate < math.inf:  # false for NaN too
            raise LabError(
                say(
                    en=f"learning_rate must be finite and above 0, but {self.learning_rate} was received.",
                    fr=f"learning_rate doit être fini et strictement positif, mais {self.learning_rate} a été reçu.",
                )
            )

    def steps(self, task: Task) -> int:
        """Updates that this makes."""
        return self.epochs * task.batches_per_epoch(self.batch_size)


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The loss on the true labels, averaged over the samples."""
    return F.cross_entropy(model(inputs), labels)


def new_model(name: str, task: Task, seed: int) -> nn.Module:
    """A model of the catalogue that fits a task, with the weights of a seed."""
    torch.manual_seed(seed)
    return models.build(name, image_size=task.image_size, num_classes=task.num_classes)


def fit(
    model: nn.Module,
    task: Task,
    settings: Settings,
    *,
    loss: Loss = cross_entropy,
    after_step: AfterStep | None = None,
    progress: Progress | None = None,
) -> list[float]:
    """Train a model in place with AdamW; returns the loss of every step.

    Args:
        model: what is trained; it ends in evaluation mode.
        task: what it learns.
        settings: how long and how fast.
        loss: what is made small.
        after_step: what follows an update, such as putting pruned weights back to zero.
        progress: told after each step.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=settings.learning_rate, weight_decay=0.01)
    total = settings.steps(task)
    losses: list[float] = []
    model.train()
    for epoch in range(settings.epochs):
        for inputs, labels in task.batches(settings.batch_size, seed=settings.seed * 10_007 + epoch):
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * 0.5 * (1 + math.cos(math.pi * len(losses) / total))
            value = loss(model, inputs, labels)
            optimizer.zero_grad()
            torch.autograd.backward(value)
            optimizer.step()
            losses.append(float(value.detach()))
            if after_step is not None:
                after_step(len(losses))
            if progress is not None:
                progress(len(losses), total)
    model.eval()
    return losses


@torch.inference_mode()
def logits(model: nn.Module, inputs_NCHW: Tensor, batch_size: int = 256) -> Tensor:
    """What a model in evaluation mode answers, ``(N, K)``."""
    model.eval()
    starts = range(0, len(inputs_NCHW), batch_size)
    return torch.cat([model(inputs_NCHW[start : start + batch_size]) for start in starts])


def accuracy(model: nn.Module, task: Task) -> float:
    """Share of the held-out samples that a model gets right, from 0 to 1."""
    right_N = logits(model, task.held_out_NCHW).argmax(dim=1) == task.held_out_labels_N
    return int(right_N.sum()) / len(right_N)
