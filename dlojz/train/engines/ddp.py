"""torch DistributedDataParallel: every rank holds the whole model; gradients are averaged by all-reduce.

Layer 3. Invariant: after the last micro-batch's backward every rank holds the same gradient.

Source: Li et al. 2020, "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv 2006.15704).
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from dlojz.footprint import Overlap
from dlojz.layout_gradients import begins_anew
from dlojz.train.engines.base import Engine, Inventory
from dlojz.train.engines.gradient_hooks import attach_hook, held
from dlojz.train.engines.states import Source
from dlojz.train.engines.torch_tensor import PlainParameters


class DDPEngine(Engine):
    """DDP over all ranks."""

    powersgd: PowerSGDState | None
    """What PowerSGD keeps from step to step, where gradients leave so."""

    def wrap(self, module: nn.Module) -> nn.Module:
        # BatchNorm statistics stay each rank's own, as in the sharded engines: broadcasting them would be one more
        # collective per step that has no part in the gradient. Newer torch renames the option, older knows only this.
        warnings.filterwarnings("ignore", message=".*broadcast_buffers.*", category=FutureWarning)
        layout = self.config.layout
        options: dict[str, Any] = {"gradient_as_bucket_view": layout.gradient_as_bucket_view}
        if layout.bucket_mib is not None:  # given, it holds for the first bucket too
            options["bucket_cap_mb"] = layout.bucket_mib
        if self.device.type == "cuda":
            options["device_ids"] = [self.device.index]
        group = self.axes.group("dp")
        module = module.to(self.device)
        if self.config.layout.tp > 1:  # DDP takes no DTensors
            module = PlainParameters(module)
        model = DistributedDataParallel(module, process_group=group, broadcast_buffers=False, **options)
        model._set_ddp_runtime_logging_sample_rate(1)  # a few clock readings per step: it times every step
        self.powersgd = attach_hook(model, layout, steps=self.config.steps, group=group)
        return model

    def forward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        # Who: all dp ranks, in the last micro-batch's backward only. What: every gradient, in buckets, all-reduced
        # (mean). How much: 4 bytes per parameter and step, or what `gradient_hooks` makes of it.
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last
        return super().forward(inputs, targets, last=last)

    def update(self) -> None:
        self.optimizer.step()
        # A gradient that is a view of its bucket stays there, as zeros: forgotten, it would be made anew elsewhere by
        # the first micro-batch, and accumulated beside the bucket.
        self.optimizer.zero_grad(set_to_none=not self.config.layout.gradient_as_bucket_view)

    def inventory(self) -> Inventory:
        """With what PowerSGD holds back: errors, P and Q."""
        found = super().inventory()
        if self.powersgd is not None:
            found["optimizer"] += held(self.powersgd)
        return found

    def restore_buffers(self, source: Source) -> None:
        """As every engine; of PowerSGD nothing is kept, as its errors belong to buckets that DDP is yet to fill anew.

        Raises:
            LabError: if the buffers are another model's.
        """
        super().restore_buffers(source)
        if self.powersgd is not None:
            self.left_out = begins_anew(self.powersgd.start_powerSGD_iter)

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """As every engine; with tensor parallelism the optimizer updates plain tensors, which share their memory."""
        plain = {}
        if isinstance(self.model.module, PlainParameters):
            plain = {name.replace("/", "."): own for name, own in self.model.module.plain.items()}
        for name, parameter in self.module.named_parameters():
            yield name, parameter, plain.get(name, parameter)

    def communications(self) -> Overlap | None:
        """As torch's reducer has timed it: the first bucket's departure, the last one's arrival, and pauses between.

        Source: torch `csrc/distributed/c10d/logger.cpp`, `set_runtime_stats_and_log`.
        """
        if not isinstance(self.model, DistributedDataParallel):
            return None
        logger: Any = self.model.logger
        logger.set_runtime_stats_and_log()  # otherwise told in the next forward only
        told_ns = self.model._get_ddp_logging_data()
        if "backward_comm_time" not in told_ns:
            return None
        left_s = told_ns["backward_comm_time_start"] / 1e9 - (time.time() - time.perf_counter())
        arrived_s = left_s + told_ns["backward_comm_time"] / 1e9
        return Overlap(((left_s, arrived_s),), left_s + told_ns["backward_compute_comm_overlap_time"] / 1e9)
