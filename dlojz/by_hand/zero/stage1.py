"""ZeRO stage 1: every rank has all weights and all gradients, but optimizer states for its share alone.

4Ψ bytes of weights, 4Ψ of gradients, and one N-th of the optimizer's states; 2Ψ elements sent per step, as many as data
parallelism sends: an all-reduce IS a reduce-scatter, then an all-gather. Stage 1 does nothing but put the optimizer
between the two.

Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.1 and §7.1.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.by_hand.ddp import fill_buckets
from dlojz.by_hand.zero.flat import FlatWeights, MakeOptimizer, Zero

_ALL = 2**62  # bytes: never full, so that only a new type begins a bucket


class ZeroStage1(Zero):
    """Model whose optimizer states are sharded. Arguments and use: see `Zero`.

    Gradients are whole on every rank from the first micro-batch's backward to the step, in one flat tensor that is made
    once and of which each `parameter.grad` is a view; they are averaged in `step`, once however many micro-batches.
    """

    def __init__(
        self, module: nn.Module, make_optimizer: MakeOptimizer, *, group: dist.ProcessGroup | None = None
    ) -> None:
        super().__init__(module, make_optimizer, group=group)
        # One flat tensor (one per type of number, where a model mixes them).
        self.flats = [FlatWeights(parameters, group) for parameters in fill_buckets(self.trainable, _ALL)]
        self.gradients = [torch.zeros_like(flat.whole) for flat in self.flats]
        self.optimizer = make_optimizer(self.shares)
        self._attach()

    def _attach(self) -> None:
        """Make each parameter's gradient a view of the flat one, where backward adds to it."""
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            for parameter, piece in zip(flat.parameters, flat.pieces(gradient), strict=True):
                if parameter.grad is None:  # at the start, or after somebody's zero_grad()
                    piece.zero_()
                    parameter.grad = piece

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradients to the flat ones; nothing is communicated."""
        self._attach()
        loss.backward()
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            # A view of the flat gradient: once that is reduced, it holds the mean.
            flat.share.grad = flat.part_of(gradient)

    @torch.no_grad()
    def step(self) -> None:
        """Average each rank's share of the gradients, update its share of the weights, and give it to all."""
        self._check_gradients()
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            part = flat.part_of(gradient)
            if self.size > 1:
                # Who: all N ranks. What: all gradients, flat, shape (padded Ψ,), summed; rank r keeps the r-th part of
                # the sum, shape (padded Ψ / N,), in its place. How much: 4Ψ bytes; a rank sends (N − 1) / N of them.
                dist.reduce_scatter_tensor(part, gradient, group=self.group)
            part.div_(self.size)
        self.optimizer.step()
        for flat, gradient in zip(self.flats, self.gradients, strict=True):
            if self.size > 1:
                # Who: all N ranks. What: each gives its updated share, shape (padded Ψ / N,), and has all of them
                # afterwards, shape (padded Ψ,), in place. How much: 4Ψ bytes; a rank sends (N − 1) / N of them.
                dist.all_gather_into_tensor(flat.whole, flat.share.detach(), group=self.group)
            # Zeroed, not freed: every `parameter.grad` is a view of it.
            gradient.zero_()
            flat.share.grad = None

    def release(self) -> None:
        """Restore the module as `Zero` does, without gradients."""
        super().release()
        for parameter in self.trainable:
            parameter.grad = None
