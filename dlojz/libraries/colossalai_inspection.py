"""What Colossal-AI's objects hold, as the probes see it.

Nothing is wrapped, moved or changed here: its model is torch's DDP, with one more wrapper around.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlojz.config.run_config import RunConfig
from dlojz.libraries.watched_training import SeenDDP


class Seen(SeenDDP):
    """A model that `TorchDDPPlugin` has boosted.

    Args:
        config: the run.
        module: Colossal-AI's wrapper.
        device: where it trains.
    """

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        super().__init__(config, cast(DistributedDataParallel, module.module), device)
