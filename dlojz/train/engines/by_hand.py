"""Data parallelism as the lab writes it (`dlojz.data_parallel`), behind the interface of all engines.

Layer 3. Invariant: after the last micro-batch's backward every rank holds the same gradient.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv 2006.15704).
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from dlojz.data_parallel import BUCKET_BYTES, DataParallel
from dlojz.footprint import Overlap
from dlojz.train.engines.base import Engine
from dlojz.units import MEBIBYTE


class ByHandEngine(Engine):
    """The lab's DataParallel over all ranks."""

    def wrap(self, module: nn.Module) -> nn.Module:
        given_mib = self.config.layout.bucket_mib
        bucket_bytes = BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE)
        return DataParallel(module.to(self.device), bucket_bytes=bucket_bytes, group=self.axes.group("dp"))

    def backward(self, loss: Tensor, *, last: bool) -> None:
        model = cast(DataParallel, self.model)
        if not last:
            with model.no_sync():
                super().backward(loss, last=last)
            return
        # Who: all dp ranks, in the last micro-batch's backward only. What: every gradient, in buckets, all-reduced
        # (sum, then divided). How much: 4 bytes per parameter and step.
        super().backward(loss, last=last)
        model.synchronize()

    def communications(self) -> Overlap | None:
        """As the model has timed it, bucket by bucket."""
        return cast(DataParallel, self.model).timing
