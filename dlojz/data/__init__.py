"""Data sets of the lab: real images and real prose that need no download, synthetic data, ImageNet from a folder.

Sample `i` of a data set is the same on every rank and in every run; importing this package loads no torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dlojz.base.errors import LabError
from dlojz.base.language import one_of

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from dlojz.models.foreign.example import Example

Family = Literal["image", "text", "tensors"]


@dataclass(frozen=True)
class DataSpec:
    """Entry of the catalogue of data sets."""

    name: str
    families: tuple[Family, ...]
    num_classes: int | None
    """Classes (size of the vocabulary for text); None: as many as the model tells apart."""
    summary: str
    num_samples: int | None = None
    """Size, where it is known without opening the data set."""


_CATALOGUE = {
    spec.name: spec
    for spec in (
        DataSpec("digits", ("image",), 10, "1,797 handwritten digits of scikit-learn, scaled to the image size", 1797),
        DataSpec("synthetic", ("image", "text"), None, "random images or tokens of any size, the same in every run"),
        DataSpec("imagenet", ("image",), 1000, "ImageNet from --data-root or $DSDIR/imagenet (folder with train/)"),
        DataSpec("text", ("text",), 256, "English prose of the Python documentation, byte by byte"),
        DataSpec("example", ("tensors",), None, "random tensors shaped as those of a model's example_inputs()"),
    )
}


def names() -> list[str]:
    """List the data sets."""
    return list(_CATALOGUE)


def default_for(family: Family, vocabulary_size: int = 256) -> str:
    """Choose the data set that suits a model and needs no download.

    Text is read byte by byte; a model with another vocabulary reads random tokens, so that it keeps its size.
    """
    if family != "text":
        return "digits" if family == "image" else "example"
    return "text" if vocabulary_size == num_classes("text") else "synthetic"


def check(name: str, *, family: Family, model: str) -> None:
    """Refuse an unknown data set, or one that does not suit the model.

    Raises:
        LabError: naming the data sets that suit.
    """
    if name not in _CATALOGUE:
        raise LabError(one_of("data set", name, _CATALOGUE))
    if family not in _CATALOGUE[name].families:
        suited = [spec.name for spec in _CATALOGUE.values() if family in spec.families]
        raise LabError(f"{model} reads {family}, which data set {name!r} does not hold: use {' or '.join(suited)}.")


def num_classes(name: str) -> int | None:
    """Count the classes of a data set; None where it has as many as the model."""
    return _CATALOGUE[name].num_classes


def imagenet_folder(data_root: str | None) -> Path:
    """Find the folder of ImageNet's training images.

    Raises:
        LabError: if it is neither given nor found under `$DSDIR`.
    """
    # The folder of the data sets that a site shares.
    shared = os.environ.get("DSDIR")
    root = Path(data_root) if data_root else Path(shared) / "imagenet" if shared else None
    if root is None:
        raise LabError(
            "data set 'imagenet' needs its folder: give --data-root FOLDER, or set $DSDIR to the folder "
            "above imagenet/."
        )
    if not (root / "train").is_dir():
        raise LabError(
            f"data set 'imagenet' was looked for in {root}, which has no folder train/: give --data-root "
            "the folder that holds it, or use data 'digits' or 'synthetic'."
        )
    return root / "train"


def check_available(name: str, data_root: str | None = None, *, global_batch: int = 1) -> None:
    """Refuse a data set that is not on this machine or is smaller than a global batch, before anything is started.

    Raises:
        LabError: in one sentence that says where it was looked for, or how many samples there are.
    """
    if name == "imagenet":
        imagenet_folder(data_root)
    # None: there are as many as one likes, or it shows only when the data set is opened.
    size = _CATALOGUE[name].num_samples
    if size is not None and global_batch > size:
        raise LabError(
            f"a global batch of {global_batch} samples (micro_batch × micro_batches × dp) was asked for, but data set "
            f"{name!r} has {size}: make the batch smaller, or use data 'synthetic'."
        )


def load(
    name: str,
    *,
    family: Family,
    num_classes: int,
    seed: int = 0,
    image_size: int | None = None,
    sequence_length: int | tuple[int, int] | None = None,
    data_root: str | None = None,
    example: Example | None = None,
) -> Dataset:
    """Open a data set; a sample is `(input, target)`.

    Images: input float32 of shape (3, image_size, image_size), about zero mean, and an integer class. Text: input and
    target int64 of shape (sequence_length,), the target being the next token; of two lengths, of source and target,
    inputs have the longer one. Tensors: like `example`.
    """
    from dlojz.data import datasets

    if example is not None:
        return datasets.ExampleSamples(example, num_classes, seed)
    if family == "text":
        source, target = sequence_length if isinstance(sequence_length, tuple) else (sequence_length or 1, None)
        if name == "synthetic":
            return datasets.SyntheticTokens(source, target, num_classes, seed)
        return datasets.ProseWindows(source, target)
    size = image_size or 1
    if name == "digits":
        return datasets.Digits(size)
    if name == "synthetic":
        return datasets.SyntheticImages(size, num_classes, seed)
    return datasets.imagenet(imagenet_folder(data_root), size)
