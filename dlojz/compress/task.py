"""Task of the compression methods: data, training loop, and what is measured of a model.

The held-out samples are the same whatever the seed of a training, and nobody learns from them. Same model, task,
settings and seed on the same number of threads give the same weights.

Shape suffixes: N samples, C channels, H and W pixels, B batch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlojz import data as datasets
from dlojz import models
from dlojz.base.contract import check_at_least
from dlojz.base.display_hook import bar
from dlojz.base.language import refusal

IMAGE_SIZE = 16
"""Pixels of a side of the digits: twice what they were scanned with, as small as vit_tiny's patches allow for."""
UNKNOWN = -1
"""Label of an image of which nobody has said what it shows."""
HELD_OUT = 360
"""Samples that judge: a fifth of the digits."""
_SPLIT_SEED = 20260


@dataclass(frozen=True)
class Task:
    """Classification task: samples to learn from, and held-out samples that judge.

    Args:
        image_size: pixels of a side.
        inputs_NCHW: images that are learnt from.
        labels_N: their classes; `UNKNOWN` where nobody has told it.
        held_out_NCHW: images that judge.
        held_out_labels_N: their classes.
    """

    name: str
    image_size: int
    inputs_NCHW: Tensor
    labels_N: Tensor
    held_out_NCHW: Tensor
    held_out_labels_N: Tensor

    @property
    def num_classes(self) -> int:
        """Classes to tell apart."""
        return datasets.num_classes(self.name) or int(self.labels_N.max()) + 1

    def few(self, samples: int) -> Task:
        """Keep the first so many samples to learn from.

        Raises:
            LabError: if there are not so many, or none is asked for.
        """
        self._check(samples)
        return replace(self, inputs_NCHW=self.inputs_NCHW[:samples], labels_N=self.labels_N[:samples])

    def partly_labelled(self, samples: int) -> Task:
        """Keep the labels of the first so many images; the others get `UNKNOWN`.

        Raises:
            LabError: if there are not so many, or none is asked for.
        """
        self._check(samples)
        labels_N = self.labels_N.clone()
        labels_N[samples:] = UNKNOWN
        return replace(self, labels_N=labels_N)

    def _check(self, samples: int) -> None:
        if not 1 <= samples <= len(self.labels_N):
            raise refusal(
                en=f"samples must be from 1 to {len(self.labels_N)}, the images that can be learnt from, but "
                f"{samples} was received.",
                fr=f"samples va de 1 à {len(self.labels_N)}, le nombre d’images d’apprentissage, mais {samples} a "
                "été reçu.",
            )

    def batches(self, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Shuffle one epoch into batches; a last batch that is not full is left out, unless it is the only one."""
        order_N = torch.randperm(len(self.labels_N), generator=torch.Generator().manual_seed(seed))
        for batch in range(self.batches_per_epoch(batch_size)):
            index_B = order_N[batch * batch_size : (batch + 1) * batch_size]
            yield self.inputs_NCHW[index_B], self.labels_N[index_B]

    def batches_per_epoch(self, batch_size: int) -> int:
        """Count the batches of an epoch."""
        return max(len(self.labels_N) // batch_size, 1)


def digits(image_size: int = IMAGE_SIZE) -> Task:
    """Load the 1,797 handwritten digits: 1,437 to learn from, 360 held out.

    Args:
        image_size: pixels of a side.
    """
    dataset = datasets.load("digits", family="image", num_classes=10, seed=0, image_size=image_size)
    samples = [dataset[index] for index in range(len(dataset))]  # type: ignore[arg-type]
    images_NCHW = torch.stack([image for image, _ in samples]).contiguous()
    labels_N = torch.stack([label for _, label in samples])
    order_N = torch.randperm(len(labels_N), generator=torch.Generator().manual_seed(_SPLIT_SEED))
    judged_N, learnt_N = order_N[:HELD_OUT], order_N[HELD_OUT:]
    return Task(
        name="digits",
        image_size=image_size,
        inputs_NCHW=images_NCHW[learnt_N],
        labels_N=labels_N[learnt_N],
        held_out_NCHW=images_NCHW[judged_N],
        held_out_labels_N=labels_N[judged_N],
    )


Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
"""(model, inputs, labels) → a scalar."""
AfterStep = Callable[[int], None]
"""Called with the number of updates made so far, after each."""
Progress = Callable[[int, int], None]
"""Called with (done, total), as long work goes on."""


@dataclass(frozen=True)
class Settings:
    """Settings of a training.

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
        check_at_least(1, epochs=self.epochs, batch_size=self.batch_size)
        if not 0 < self.learning_rate < math.inf:  # false for NaN too
            raise refusal(
                en=f"learning_rate must be finite and above 0, but {self.learning_rate} was received.",
                fr=f"learning_rate doit être fini et strictement positif, mais {self.learning_rate} a été reçu.",
            )

    def steps(self, task: Task) -> int:
        """Count the updates of the training."""
        return self.epochs * task.batches_per_epoch(self.batch_size)


def cross_entropy(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Average the loss on the true labels over the samples."""
    return F.cross_entropy(model(inputs), labels)


def new_model(name: str, task: Task, seed: int) -> nn.Module:
    """Build a model of the catalogue that fits a task, with the weights of a seed."""
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
        loss: what is made small.
        after_step: what follows an update, such as putting pruned weights back to zero.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=settings.learning_rate, weight_decay=0.01)
    total = settings.steps(task)
    losses: list[float] = []
    show = bar(total) if progress is None else None
    model.train()
    for epoch in range(settings.epochs):
        # Another order in each epoch; no two seeds share one within 10,007 epochs.
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
            if show is not None:
                show(len(losses))
            elif progress is not None:
                progress(len(losses), total)
    model.eval()
    return losses


@torch.inference_mode()
def logits(model: nn.Module, inputs_NCHW: Tensor, batch_size: int = 256) -> Tensor:
    """Compute the logits of a model in evaluation mode, ``(N, K)``."""
    model.eval()
    starts = range(0, len(inputs_NCHW), batch_size)
    return torch.cat([model(inputs_NCHW[start : start + batch_size]) for start in starts])


def accuracy(model: nn.Module, task: Task) -> float:
    """Measure the share of the held-out samples that a model gets right, from 0 to 1."""
    right_N = logits(model, task.held_out_NCHW).argmax(dim=1) == task.held_out_labels_N
    return int(right_N.sum()) / len(right_N)


def parameters(model: nn.Module) -> int:
    """Count the parameters of a model, zeros included."""
    return sum(parameter.numel() for parameter in model.parameters())


def payload_bytes(tensors: Mapping[str, Tensor]) -> int:
    """Sum the bytes of the tensors that a file keeps, without its header."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


@dataclass(frozen=True)
class Latency:
    """Latency of one answer.

    Args:
        seconds: median over the rounds.
        ratio: median over the rounds of its seconds to those of the first model in the same round.
        ratio_low: a quarter of the rounds were below.
        ratio_high: a quarter were above.
    """

    seconds: float
    ratio: float
    ratio_low: float
    ratio_high: float


@torch.inference_mode()
def latencies(models: Sequence[nn.Module], inputs: Tensor, rounds: int = 20, calls: int = 1) -> list[Latency]:
    """Time models in turns on the same inputs; ratios are to the first of them.

    A GPU is waited for once, after all the calls of a turn: with many of them the time is the device's, while a single
    short one would be timed with the Python that launches it.

    Args:
        models: in evaluation mode.
        inputs: one batch.
        rounds: how often each of them has its turn, after two answers that are not timed; at least 1.
        calls: answers of a turn, of which the mean is taken; at least 1.

    Raises:
        LabError: without a round or a call.
    """
    check_at_least(1, rounds=rounds, calls=calls)
    for model in models:
        model.eval()
        model(inputs)
        model(inputs)  # the first answers choose kernels and fill caches
    _wait_for(inputs)
    seconds: list[list[float]] = [[] for _ in models]
    for turn in range(rounds):
        # Each round begins with the next model: none is always first.
        for index in (*range(turn % len(models), len(models)), *range(turn % len(models))):
            start_s = time.perf_counter()
            for _ in range(calls):
                models[index](inputs)
            _wait_for(inputs)
            seconds[index].append((time.perf_counter() - start_s) / calls)
    results = []
    for model_seconds in seconds:
        # Within a round: what slows the machine for a while slows both.
        ratios = [model_s / base for model_s, base in zip(model_seconds, seconds[0], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else (ratios[0],) * 3
        results.append(Latency(statistics.median(model_seconds), middle, low, high))
    return results


def _wait_for(inputs: Tensor) -> None:
    if inputs.is_cuda:
        torch.cuda.synchronize(inputs.device)
