"""ZeRO stage 2: each rank keeps gradients, too, for its share alone.

No rank ever holds all gradients. While backward still computes, each bucket of gradients that is full is
reduce-scattered and freed at once; one bucket fills while another is under way. Every rank reduces the same buckets in
the same order, whatever its own backward pass has used.

4Ψ bytes of weights, 4Ψ/N of gradients, one N-th of the optimizer's states; 2Ψ elements sent per step of one
micro-batch. With m micro-batches each is reduced, as nobody keeps whole gradients to add them to: (m + 1) Ψ.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.2 and §7.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.language import MEBIBYTE, Sentences
from dlojz.by_hand.ddp import fill_buckets
from dlojz.by_hand.zero.flat import FlatWeights, MakeOptimizer, Zero

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

BUCKET_BYTES = 1 * MEBIBYTE
"""Small enough that the lab's smallest models fill several; for a large model on GPUs, 25 MiB is usual."""


class ZeroStage2(Zero):
    """Model whose optimizer states and gradients are sharded. Use: see `Zero`.

    Args:
        bucket_bytes: a bucket leaves once it holds so much.

    Raises:
        LabError: as `Zero`, or if `bucket_bytes` is below 1.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        bucket_bytes: int = BUCKET_BYTES,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if bucket_bytes < 1:
            raise phrase.refused("no bucket", bucket_bytes=bucket_bytes)
        super().__init__(module, make_optimizer, group=group)
        # Backward reaches the last layers first: in reverse order, the first buckets are full early.
        buckets = fill_buckets(self.trainable[::-1], bucket_bytes)
        self._reduce_in_backward([FlatWeights(bucket, group) for bucket in buckets])
        self.optimizer = make_optimizer(self.shares)

    def _reduce_in_backward(self, flats: Sequence[FlatWeights]) -> None:
        """From now on, reduce these in this order, each as soon as backward has made all its gradients."""
        self.flats = list(flats)
        self._in_backward = False
        self._under_way: tuple[FlatWeights, Tensor, Tensor, Any] | None = None
        self._begin_backward()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_is_ready, number))
            for number, flat in enumerate(self.flats)
            for parameter in flat.parameters
        ]

    def _begin_backward(self) -> None:
        # Gradients that each bucket still waits for.
        self._missing = [len(flat.parameters) for flat in self.flats]
        self._next = 0

    def backward(self, loss: Tensor) -> None:
        """Backward, each bucket reduced on the way; then what backward has not used, as zeros."""
        self._begin_backward()
        self._in_backward = True
        try:
            loss.backward()
            while self._next < len(self.flats):
                self._reduce_next()
            self._wait()
        finally:
            self._in_backward, self._under_way = False, None

    def _gradient_is_ready(self, number: int, parameter: Tensor) -> None:
        """Autograd has made `parameter.grad`; reduce every bucket that is full. A full one waits for those before."""
        if not self._in_backward:
            raise phrase.refused("gradients whole")
        self._missing[number] -= 1
        while self._next < len(self.flats) and not self._missing[self._next]:
            self._reduce_next()

    @torch.no_grad()
    def _reduce_next(self) -> None:
        """Reduce-scatter the next bucket of gradients and free them; at most one bucket is under way."""
        self._wait()
        flat = self.flats[self._next]
        self._next += 1
        # (padded elements,); this frees the parameters' own gradients.
        gradient = flat.take_gradients()
        # For one process the share of the flat gradient, as it is.
        part, work = flat.part_of(gradient), None
        if self.size > 1:
            part = torch.empty_like(flat.share)
            # Who: all N ranks. What: one bucket of gradients, shape (padded elements,), summed; rank r gets the r-th
            # part, shape (padded elements / N,); the call returns at once. How much: the bucket's bytes, 4Ψ for all
            # buckets of one micro-batch; a rank sends (N − 1) / N of them.
            work = dist.reduce_scatter_tensor(part, gradient, group=self.group, async_op=True)
        self._under_way = flat, gradient, part, work  # what is being sent stays until it has arrived

    def _wait(self) -> None:
        """The bucket under way has arrived: add the mean to this rank's share of the gradient."""
        if self._under_way is None:
            return
        (flat, _, part, work), self._under_way = self._under_way, None
        if work is not None:
            work.wait()
        # Per micro-batch: means add up in the share's gradient.
        part.div_(self.size)
        if flat.share.grad is None:
            flat.share.grad = part
        else:
            flat.share.grad += part

    @torch.no_grad()
    def step(self) -> None:
        """Update this rank's share of the weights, and give it to all."""
        self._check_gradients()
        self.optimizer.step()
        self.optimizer.zero_grad()
        for flat in self.flats:
            if self.size > 1:
                # Who: all N ranks. What: each gives its updated share of a bucket of weights, shape (padded elements /
                # N,), and has all of them afterwards, shape (padded elements,), in place. How much: 4Ψ bytes for all
                # buckets; a rank sends (N − 1) / N of them.
                dist.all_gather_into_tensor(flat.whole, flat.share.detach(), group=self.group)
