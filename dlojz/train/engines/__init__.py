"""The engines: one way each of training a model on several ranks, behind one small interface.

Layer 3. Invariant: for the same global batch every engine gives the losses and weights of one process, and no engine
knows of the probes.
"""

from __future__ import annotations

import torch
from torch import nn

from dlojz.config import RunConfig
from dlojz.train.engines.base import Engine


def build(config: RunConfig, model: nn.Module, device: torch.device) -> Engine:
    """The engine that runs the layout of `config`, around a model every rank has built with the same weights."""
    strategy = config.layout.strategy
    if strategy == "single":
        return Engine(config, model, device)
    if strategy == "ddp":
        from dlojz.train.engines.ddp import DDPEngine

        return DDPEngine(config, model, device)
    if strategy == "by_hand":
        from dlojz.train.engines.by_hand import ByHandEngine

        return ByHandEngine(config, model, device)
    if strategy in ("by_hand-1", "by_hand-2", "by_hand-3"):
        from dlojz.train.engines.zero_by_hand import ZeroByHandEngine

        return ZeroByHandEngine(config, model, device)
    if strategy == "fsdp2":
        from dlojz.train.engines.fsdp2 import FSDP2Engine

        return FSDP2Engine(config, model, device)
    from dlojz.train.engines.deepspeed import DeepSpeedEngine

    return DeepSpeedEngine(config, model, device)


__all__ = ["Engine", "build"]
