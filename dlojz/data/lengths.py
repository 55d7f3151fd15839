"""Samples of one length per step: the tail of each is cut off, and what is left is counted.

Layer 0. Invariant: all micro-batches of a step have samples of one length, which follows from the number of the step
alone, so that all ranks cut alike and a run that goes on cuts as if it had not stopped.

Source: Li et al. 2021 (arXiv 2108.06084): samples are made of the whole length and truncated, which needs no other
order of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor


class CutToLength(Iterator[tuple[Tensor, Tensor]]):
    """Micro-batches of a text whose samples are cut to the length of their step.

    Args:
        batches: micro-batches `(inputs, targets)`, each of shape (samples, whole length).
        length_at: tokens per sample of a step, from the step's number; None leaves samples as they are, uncounted.
        micro_batches: of one step.
        first_step: the step that the first micro-batch belongs to.
    """

    def __init__(
        self,
        batches: Iterator[tuple[Tensor, Tensor]],
        length_at: Callable[[int], int] | None,
        *,
        micro_batches: int,
        first_step: int = 0,
    ) -> None:
        self._batches, self._length_at, self._micro_batches = batches, length_at, micro_batches
        self._read = first_step * micro_batches
        self._tokens = 0

    def __next__(self) -> tuple[Tensor, Tensor]:
        inputs_BT, targets_BT = next(self._batches)
        if self._length_at is None:
            return inputs_BT, targets_BT
        length = self._length_at(self._read // self._micro_batches)
        self._read += 1
        if length < inputs_BT.shape[1]:
            # A copy: a view would keep the storage of the whole sample.
            inputs_BT, targets_BT = inputs_BT[:, :length].contiguous(), targets_BT[:, :length].contiguous()
        self._tokens += inputs_BT.numel()
        return inputs_BT, targets_BT

    def take_tokens(self) -> int:
        """Tokens read since this was last asked: those of this replica's micro-batches; 0 for images."""
        tokens, self._tokens = self._tokens, 0
        return tokens
