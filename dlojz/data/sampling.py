"""Sample batches: who reads which samples in which step, and at which length.

Step `s` trains on the same global batch, cut into the same micro-batches, for every layout with that global batch.
Micro-batch `j` of replica `r` is number `j·dp + r` of the step, so one process that accumulates `dp · micro_batches`
micro-batches sees exactly those that `dp` replicas see together. With a curriculum, all micro-batches of a step have
samples of one length, which follows from the number of the step alone: a resumed run cuts as if it had not stopped.

Source: Li et al. 2021 (arXiv 2108.06084): samples are made of the whole length and truncated, which needs no other
order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from dlojz.base.errors import LabError


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
