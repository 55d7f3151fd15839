"""Data sets: handwritten digits, prose that every Python brings along, synthetic images and tokens, ImageNet.

A sample depends on its index (and the seed) alone. Tokens are bytes (vocabulary 256); the target of a position is the
byte that follows it.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from dlojz.models.foreign.example import Example
from dlojz.models.foreign.missing_operators import ensure_torchvision_imports


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
