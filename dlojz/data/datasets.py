"""Data sets: handwritten digits, prose that every Python brings along, synthetic images and tokens, ImageNet; batches.

A sample depends on its index (and the seed) alone. Tokens are bytes (vocabulary 256); the target of a position is the
byte that follows it.

Step `s` trains on the same global batch, cut into the same micro-batches, for every layout with that global batch.
Micro-batch `j` of replica `r` is number `j·dp + r` of the step, so one process that accumulates `dp · micro_batches`
micro-batches sees exactly those that `dp` replicas see together. With a curriculum, all micro-batches of a step have
samples of one length, which follows from the number of the step alone: a resumed run cuts as if it had not stopped.

Source: Li et al. 2021 (arXiv 2108.06084): samples are made of the whole length and truncated, which needs no other
order of the data.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from dlojz.base.errors import LabError
from dlojz.models.foreign.example import Example
from dlojz.models.foreign.vision_packages import ensure_torchvision_imports


class Digits(Dataset):
    """1,797 real handwritten digits, 8×8 pixels in 17 grey levels, scaled up to `image_size`.

    Source: E. Alpaydin and C. Kaynak 1998, "Optical Recognition of Handwritten Digits" (UCI), as embedded in
    scikit-learn (`sklearn.datasets.load_digits`).
    """

    def __init__(self, image_size: int) -> None:
        # `load_digits` reads this file too, but importing it (SciPy, pandas) takes longer than importing torch.
        if (package := find_spec("sklearn")) is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
        # (N, 65): 64 pixels, row by row, and the digit.
        rows = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
        self._image_size = image_size
        # (N, 8, 8); grey levels 0 to 16 become 0 to 1.
        grey_NHW = torch.from_numpy(rows[:, :-1]).reshape(-1, 8, 8).float() / 16
        # (N, 1, 8, 8), with mean 0 and standard deviation 1 over all pixels.
        self._images_N1HW = ((grey_NHW - grey_NHW.mean()) / grey_NHW.std()).unsqueeze(1)
        self._labels_N = torch.from_numpy(rows[:, -1]).long()

    def __len__(self) -> int:
        return len(self._labels_N)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        size = (self._image_size, self._image_size)
        # (1, 1, 8, 8) → (1, size, size): `interpolate` needs the batch axis, which [0] drops.
        image = F.interpolate(self._images_N1HW[index : index + 1], size, mode="bilinear", align_corners=False)[0]
        # (3, size, size): three views of one channel, no copy.
        return image.expand(3, *size), self._labels_N[index]


SYNTHETIC_SAMPLES = 2**16
"""Samples of each random data set."""


class SyntheticImages(Dataset):
    """Random normal images of any size with random classes, the same in every run of one seed."""

    def __init__(self, image_size: int, num_classes: int, seed: int) -> None:
        self._shape = (3, image_size, image_size)
        self._num_classes, self._seed = num_classes, seed

    def __len__(self) -> int:
        return SYNTHETIC_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # A generator per sample: no two pairs of seed and index share its seed.
        generator = torch.Generator().manual_seed(self._seed * SYNTHETIC_SAMPLES + index)
        image = torch.randn(self._shape, generator=generator)
        return image, torch.randint(self._num_classes, (), generator=generator)


class ExampleSamples(Dataset):
    """Random samples shaped as a model's example inputs, with random classes, the same in every run of one seed."""

    def __init__(self, example: Example, num_classes: int, seed: int) -> None:
        self._example, self._num_classes = example, num_classes
        self._seed = seed

    def __len__(self) -> int:
        return SYNTHETIC_SAMPLES

    def __getitem__(self, index: int) -> tuple[Any, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * SYNTHETIC_SAMPLES + index)
        sample = self._example.sample(index, generator)
        return sample, torch.randint(self._num_classes, self._example.targets, generator=generator)


def imagenet(folder: Path, image_size: int) -> Dataset:
    """Open ImageNet's training images, cropped to `image_size` at their centre, from one folder per class."""
    ensure_torchvision_imports()
    from torchvision import datasets, transforms

    prepare = transforms.Compose(
        [
            # The crop keeps 224 of 256 parts of the shorter side.
            transforms.Resize(round(image_size * 256 / 224)),
            transforms.CenterCrop(image_size),
            transforms.ToTensor(),
            # Mean and standard deviation of ImageNet's channels.
            transforms.Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)),
        ]
    )
    dataset: Dataset = datasets.ImageFolder(str(folder), prepare)
    return dataset


class ProseWindows(Dataset):
    """Python's language reference (`pydoc_data.topics`), cut into windows of `sequence_length` bytes."""

    def __init__(self, sequence_length: int, target_length: int | None = None) -> None:
        from pydoc_data import topics

        prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        self._bytes = torch.frombuffer(bytearray(prose.encode()), dtype=torch.uint8)
        self._length, self._target_length = max(sequence_length, target_length or 0), target_length

    def __len__(self) -> int:
        # The last window needs one byte more, as a target.
        return (len(self._bytes) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        # (length + 1,): inputs are all but the last, targets all but the first.
        window_T = self._bytes[start : start + self._length + 1].long()
        return window_T[:-1], window_T[1:][: self._target_length]


class SyntheticTokens(Dataset):
    """Random tokens, the same in every run of one seed; the target is the input shifted by one."""

    def __init__(self, sequence_length: int, target_length: int | None, vocabulary: int, seed: int) -> None:
        self._length, self._target_length = max(sequence_length, target_length or 0), target_length
        self._vocabulary, self._seed = vocabulary, seed

    def __len__(self) -> int:
        return SYNTHETIC_SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * SYNTHETIC_SAMPLES + index)
        window_T = torch.randint(self._vocabulary, (self._length + 1,), generator=generator)
        return window_T[:-1], window_T[1:][: self._target_length]


class MicroBatchSampler(Sampler[list[int]]):
    """Indices of one replica's micro-batches, epoch after epoch.

    The samples are shuffled by seed and epoch and cut into micro-batches; `DistributedSampler` then deals whole
    micro-batches to the replicas in turn. What does not fill a global batch is left out of the epoch.

    Args:
        micro_batch: samples per micro-batch.
        global_batch: samples per step over all replicas.
        dp: replicas; dp_rank: this one, from 0.
        skipped: micro-batches of this replica that a run has used before it was resumed.
        number: micro-batches of this replica after those; None: without end.
    """

    def __init__(
        self,
        num_samples: int,
        *,
        micro_batch: int,
        global_batch: int,
        dp: int = 1,
        dp_rank: int = 0,
        seed: int = 0,
        skipped: int = 0,
        number: int | None = None,
    ) -> None:
        if num_samples < global_batch:
            raise LabError(
                f"the data set has {num_samples} samples, fewer than one global batch of {global_batch} "
                "(micro_batch × micro_batches × dp): make the batch smaller."
            )
        self._num_samples, self._micro_batch, self._seed = num_samples, micro_batch, seed
        self._skipped, self._number = skipped, number
        # Whole global batches × micro-batches in each.
        num_micro_batches = num_samples // global_batch * (global_batch // micro_batch)
        numbers = range(num_micro_batches)
        # It deals the numbers in turn: replica r gets r, r + dp, …
        self._dealer: DistributedSampler[int] = DistributedSampler(
            numbers,  # type: ignore[arg-type]
            num_replicas=dp,
            rank=dp_rank,
            shuffle=False,
            drop_last=True,
        )

    def __len__(self) -> int:
        if self._number is None:
            raise TypeError("micro-batches without end have no length")
        return self._number

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self._endless(), self._skipped, None if self._number is None else self._skipped + self._number)

    def _endless(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            # Seed and epoch alone: the same order on every replica.
            shuffle = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._num_samples, generator=shuffle).tolist()
            for number in self._dealer:
                yield order[number * self._micro_batch : (number + 1) * self._micro_batch]
            epoch += 1


def micro_batches(dataset: Dataset, sampler: MicroBatchSampler, **loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Load micro-batches `(inputs, targets)` without end; `loader` goes to `torch.utils.data.DataLoader`."""
    return iter(DataLoader(dataset, batch_sampler=sampler, **loader))


class CutToLength(Iterator[tuple[Tensor, Tensor]]):
    """Iterator of micro-batches of text whose samples are cut to the length of their step.

    Args:
        batches: micro-batches `(inputs, targets)`, each of shape (samples, whole length).
        length_at: tokens per sample of a step, from the step's number; None leaves samples as they are, uncounted.
        micro_batches: of one step.
        first_step: the step that the first micro-batch belongs to.
        own: cuts a rank's part of the tokens out of whole samples, of inputs and of targets; by default all.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        length_at: Callable[[int], int] | None,
        *,
        micro_batches: int,
        first_step: int = 0,
        own: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._own = own
        self._batches, self._length_at, self._micro_batches = batches, length_at, micro_batches
        self._read = first_step * micro_batches
        self._tokens = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        inputs_BT, targets_BT = next(self._batches)
        if self._length_at is None:
            return inputs_BT, targets_BT
        # The step follows from how many micro-batches were read.
        length = self._length_at(self._read // self._micro_batches)
        self._read += 1
        if length < inputs_BT.shape[1]:
            # A copy: a view would keep the storage of the whole sample.
            inputs_BT, targets_BT = inputs_BT[:, :length].contiguous(), targets_BT[:, :length].contiguous()
        # (B, T) before a context-parallel rank takes its part: tokens of the replica.
        self._tokens += inputs_BT.numel()
        return (inputs_BT, targets_BT) if self._own is None else (self._own(inputs_BT), self._own(targets_BT))

    def take_tokens(self) -> int:
        """Return the tokens of this replica, on whichever of its ranks, since the last call; 0 for images."""
        tokens, self._tokens = self._tokens, 0
        return tokens
