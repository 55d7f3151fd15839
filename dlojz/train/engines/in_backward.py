"""DDP by hand whose backward pass updates (`update="in_backward"`): a bucket is averaged, used and forgotten.

Layer 3. Invariant: a parameter is updated with the mean of its gradient over the ranks, never with this rank's own; the
weights are those of an update after backward, bit for bit.

Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237), for one process; see `dlojz.optim.in_backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from dlojz.data_parallel import BUCKET_BYTES, DataParallel, _Flight
from dlojz.train.engines.base import make_optimizer
from dlojz.train.engines.by_hand import ByHandEngine
from dlojz.train.engines.passes import PassOptimizer
from dlojz.units import MEBIBYTE


class UpdatingDataParallel(DataParallel):
    """The lab's DataParallel, which hands each parameter on as soon as its gradient is averaged.

    A bucket's gradients are forgotten once they are copied into its message, and the message once the next bucket has
    left: of 4Ψ bytes there are two buckets under way and the gradients of a third at most. Backward so waits for a
    bucket before it goes past the next one: what it saves in memory it may pay in overlap.
    """

    hand_on: Callable[[Tensor], None]
    """What updates a parameter and forgets its gradient; set before the first backward pass."""

    def _send(self) -> None:
        if self._next == 0:
            self._arrived = []
        bucket = self.buckets[self._next]
        super()._send()
        if self.size == 1:  # nobody to wait for: the optimizer's own hooks have done it
            return
        for parameter in bucket:
            parameter.grad = None
        while len(self._flying) > 1:
            self._arrive(self._flying.pop(0))

    def _arrive(self, flight: _Flight) -> None:
        mean, start = flight.wait().div_(self.size), 0
        for parameter in self.buckets[flight.bucket]:
            parameter.grad = mean[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            self.hand_on(parameter)
        self._arrived.append((flight.bucket, flight.num_bytes, flight.left, flight.arrived))

    @torch.no_grad()
    def synchronize(self) -> None:
        """Send what has not left yet, wait for the last buckets, and hand their parameters on."""
        self._compute_end = self._watch.now()
        try:
            while self._next < len(self.buckets):
                self._send()
            while self._flying:
                self._arrive(self._flying.pop(0))
        finally:
            self._begin_step()


class ByHandInBackwardEngine(ByHandEngine):
    """The lab's DataParallel with an update per bucket, within the backward pass."""

    def wrap(self, module: nn.Module) -> nn.Module:
        given_mib = self.config.layout.bucket_mib
        bucket_bytes = BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE)
        # Who: all dp ranks, while backward goes on. What: every gradient, in buckets, all-reduced (sum, then divided).
        # How much: 4 bytes per parameter and step, as without.
        return UpdatingDataParallel(module.to(self.device), bucket_bytes=bucket_bytes, group=self.axes.group("dp"))

    def make_optimizer(self) -> torch.optim.Optimizer:
        """What updates a bucket's parameters as it arrives; one process waits for no bucket."""
        model = cast(UpdatingDataParallel, self.model)
        make = partial(make_optimizer, self.config)
        optimizer = PassOptimizer(self.module, self.config, make, hooked=model.size == 1)
        model.hand_on = optimizer.passes.update
        return optimizer
