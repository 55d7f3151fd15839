"""torch DistributedDataParallel: every rank holds the whole model; gradients are averaged by all-reduce.

Layer 3. Invariant: after the last micro-batch's backward every rank holds the same gradient.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv 2006.15704).
"""

from __future__ import annotations

import warnings

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dlojz.train.engines.base import Engine


class DDPEngine(Engine):
    """DDP over all ranks."""

    def wrap(self, module: nn.Module) -> nn.Module:
        # BatchNorm statistics stay each rank's own, as in the sharded engines: broadcasting them would be one more
        # collective per step that has no part in the gradient. Newer torch renames the option, older knows only this.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(module.to(self.device), device_ids=device_ids, broadcast_buffers=False)

    def forward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        # Who: all dp ranks, in the last micro-batch's backward only. What: every gradient, in buckets, all-reduced
        # (mean). How much: 4 bytes per parameter and step.
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last
        return super().forward(inputs, targets, last=last)
