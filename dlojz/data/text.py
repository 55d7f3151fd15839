"""Text: the English prose that Python carries with itself, and random tokens.

Layer 0. Invariant: tokens are bytes (vocabulary 256); the target of a position is the byte that follows it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.data import Dataset


class Prose(Dataset):
    """Python's language reference (`pydoc_data.topics`), cut into windows of `sequence_length` bytes."""

    def __init__(self, sequence_length: int) -> None:
        from pydoc_data import topics

        prose = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
        self._bytes = torch.frombuffer(bytearray(prose.encode()), dtype=torch.uint8)
        self._length = sequence_length

    def __len__(self) -> int:
        return (len(self._bytes) - 1) // self._length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self._length
        window_T = self._bytes[start : start + self._length + 1].long()
        return window_T[:-1], window_T[1:]


class SyntheticTokens(Dataset):
    """Random tokens, the same in every run of one seed; the target is the input shifted by one."""

    def __init__(self, sequence_length: int, vocabulary: int, seed: int, num_samples: int = 2**16) -> None:
        self._length, self._vocabulary = sequence_length, vocabulary
        self._seed, self._num_samples = seed, num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self._seed * self._num_samples + index)
        window_T = torch.randint(self._vocabulary, (self._length + 1,), generator=generator)
        return window_T[:-1], window_T[1:]
