"""What a model is asked to do: real samples, divided into those it learns from and those that judge it.

Layer 2. Invariant: the held-out samples are the same whatever the seed of a training, and nobody learns from them.

Shape suffixes: N samples, C channels, H and W pixels, B batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dlojz import data as datasets
from dlojz.schema import LabError
from dlojz.text import say

UNKNOWN = -1
"""Label of an image of which nobody has said what it shows."""
HELD_OUT = 360
"""Samples that judge: a fifth of the digits."""
_SPLIT_SEED = 20260
IMAGE_SIZE = 16
"""Pixels of a side: twice what the digits were scanned with, as small as vit_tiny's patches allow for."""


@dataclass(frozen=True)
class Task:
    """A classification: what is learnt from, and what judges.

    Args:
        name: of the data set.
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
        """The same task with the first so many samples to learn from.

        Raises:
            LabError: if there are not so many, or none is asked for.
        """
        self._check(samples)
        return replace(self, inputs_NCHW=self.inputs_NCHW[:samples], labels_N=self.labels_N[:samples])

    def partly_labelled(self, samples: int) -> Task:
        """The same images, of which only the first so many keep their label; the others get `UNKNOWN`.

        Raises:
            LabError: if there are not so many, or none is asked for.
        """
        self._check(samples)
        labels_N = self.labels_N.clone()
        labels_N[samples:] = UNKNOWN
        return replace(self, labels_N=labels_N)

    def _check(self, samples: int) -> None:
        if not 1 <= samples <= len(self.labels_N):
            raise LabError(
                say(
                    en=f"samples must be from 1 to {len(self.labels_N)}, the images that can be learnt from, but "
                    f"{samples} was received.",
                    fr=f"samples va de 1 à {len(self.labels_N)}, le nombre d’images d’apprentissage, mais {samples} a "
                    "été reçu.",
                )
            )

    def batches(self, batch_size: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch in an order of its own; a last batch that is not full is left out, unless it is the only one."""
        order_N = torch.randperm(len(self.labels_N), generator=torch.Generator().manual_seed(seed))
        for batch in range(self.batches_per_epoch(batch_size)):
            index_B = order_N[batch * batch_size : (batch + 1) * batch_size]
            yield self.inputs_NCHW[index_B], self.labels_N[index_B]

    def batches_per_epoch(self, batch_size: int) -> int:
        """How many of them there are."""
        return max(len(self.labels_N) // batch_size, 1)


def digits(image_size: int = IMAGE_SIZE) -> Task:
    """The 1,797 handwritten digits: 1,437 to learn from, 360 held out.

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
