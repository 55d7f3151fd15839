"""An engine that somebody else has built, as the probes see it: what it holds, and what its final weights are.

Layer 3, loads torch. Invariant: nothing is wrapped, moved or changed here; what is looked at is what the library's own
objects hold at that moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dlojz.config import RunConfig
from dlojz.libraries import LIBRARIES
from dlojz.train.engines.base import Engine, Inventory, locals_of, optimizer_states
from dlojz.train.engines.ddp import DDPEngine
from dlojz.train.engines.deepspeed import DeepSpeedEngine

_WRAPPERS = ("module.", "network.", "_orig_mod.")


def plain_name(name: str) -> str:
    """A parameter's name in the bare model: without those of what is wrapped around it."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


class SeenTorch(Engine):
    """A model that torch's own means train, whoever calls them.

    Args:
        config: the run.
        module: what the program calls, with all that is wrapped around the model.
        device: where it trains.
    """

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model = self.module = module
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that have made a step, in the order of their first."""

    @property
    def group_names(self) -> dict[str, str]:
        """As every engine; here all groups are replicas."""
        return {}

    def inventory(self) -> Inventory:
        parameters = list(self.module.parameters())
        return locals_of(
            {
                "weights": [*parameters],
                "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
                "optimizer": [state for optimizer in self.optimizers for state in optimizer_states(optimizer)],
                "buffers": list(self.module.buffers()),
            }
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            whole = parameter.detach()
            # Who: all ranks. What: one parameter, all-gathered whole where it is sharded; at the end of the run only.
            yield plain_name(name), (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()

    def close(self) -> None:
        """The program's own objects go with it."""


class SeenDDP(SeenTorch):
    """A model in torch's DDP, which times its messages."""

    def __init__(self, config: RunConfig, module: DistributedDataParallel, device: torch.device) -> None:
        super().__init__(config, module, device)
        module._set_ddp_runtime_logging_sample_rate(1)  # a few clock readings per step: it times every step

    communications = DDPEngine.communications


class SeenDeepSpeed(DeepSpeedEngine):
    """A model that DeepSpeed trains."""

    def __init__(self, config: RunConfig, module: Any, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model, self.module, self.optimizer = module, module.module, module.optimizer
        self.optimizers: list[torch.optim.Optimizer] = []

    @property
    def group_names(self) -> dict[str, str]:
        """As every engine; here all groups are replicas."""
        return {}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().weights():
            yield plain_name(name), weight


def seen(config: RunConfig, module: nn.Module, device: torch.device) -> SeenTorch | SeenDeepSpeed:
    """What the probes may look at, given the outermost module that a program calls."""
    own = LIBRARIES[config.library].seen
    if own:
        found: SeenTorch = import_module(own).Seen(config, module, device)
        return found
    if type(module).__module__.startswith("deepspeed."):
        return SeenDeepSpeed(config, module, device)
    if isinstance(module, DistributedDataParallel):
        return SeenDDP(config, module, device)
    return SeenTorch(config, module, device)
