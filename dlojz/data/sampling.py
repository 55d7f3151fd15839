"""Who reads which samples: the same global batch whatever the layout.

Layer 0. Invariant: step `s` trains on the same global batch, cut into the same micro-batches, for every layout with
that global batch. Micro-batch `j` of replica `r` is number `j·dp + r` of the step, so one process that accumulates
`dp · micro_batches` micro-batches sees exactly those that `dp` replicas see together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler

from dlojz.schema import LabError


class MicroBatchSampler(Sampler[list[int]]):
    """Indices of one replica's micro-batches, epoch after epoch without end.

    The samples are shuffled by seed and epoch and cut into micro-batches; `DistributedSampler` then deals whole
    micro-batches to the replicas in turn. What does not fill a global batch is left out of the epoch.

    Args:
        num_samples: size of the data set.
        micro_batch: samples per micro-batch.
        global_batch: samples per step over all replicas.
        dp: replicas; dp_rank: this one, from 0.
    """

    def __init__(
        self, num_samples: int, *, micro_batch: int, global_batch: int, dp: int = 1, dp_rank: int = 0, seed: int = 0
    ) -> None:
        if num_samples < global_batch:
            raise LabError(
                f"the data set has {num_samples} samples, fewer than one global batch of {global_batch} "
                "(micro_batch × micro_batches × dp): make the batch smaller."
            )
        self._num_samples, self._micro_batch, self._seed = num_samples, micro_batch, seed
        num_micro_batches = num_samples // global_batch * (global_batch // micro_batch)
        numbers = range(num_micro_batches)
        self._dealer: DistributedSampler[int] = DistributedSampler(
            numbers,  # type: ignore[arg-type]
            num_replicas=dp,
            rank=dp_rank,
            shuffle=False,
            drop_last=True,
        )

    def __iter__(self) -> Iterator[list[int]]:
        epoch = 0
        while True:
            shuffle = torch.Generator().manual_seed(self._seed + epoch)
            order = torch.randperm(self._num_samples, generator=shuffle).tolist()
            for number in self._dealer:
                yield order[number * self._micro_batch : (number + 1) * self._micro_batch]
            epoch += 1


def micro_batches(dataset: Dataset, sampler: MicroBatchSampler, **loader: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches `(inputs, targets)` without end; `loader` goes to `torch.utils.data.DataLoader`."""
    return iter(DataLoader(dataset, batch_sampler=sampler, **loader))
