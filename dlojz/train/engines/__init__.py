"""The engines: one way each of training a model on several ranks, behind one small interface.

Layer 3. Invariant: for the same global batch every engine gives the losses and weights of one process, and no engine
knows of the probes.
"""

from __future__ import annotations

from importlib import import_module

import torch
from torch import nn

from dlojz.config import RunConfig, Strategy
from dlojz.optimizer_stages import COMMUNICATING
from dlojz.pipeline.executable import ASYNCHRONOUS
from dlojz.train.engines.base import Engine

_ENGINES: dict[Strategy, str] = {
    "single": "base.Engine",
    "ddp": "ddp.DDPEngine",
    "by_hand": "by_hand.ByHandEngine",
    "by_hand-1": "zero_by_hand.ZeroByHandEngine",
    "by_hand-2": "zero_by_hand.ZeroByHandEngine",
    "by_hand-3": "zero_by_hand.ZeroByHandEngine",
    "fsdp2": "fsdp2.FSDP2Engine",
    "zero-0": "deepspeed.DeepSpeedEngine",
    "zero-1": "deepspeed.DeepSpeedEngine",
    "zero-2": "deepspeed.DeepSpeedEngine",
    "zero-3": "deepspeed.DeepSpeedEngine",
}
_PIPELINES = {
    "torch": "torch_pipeline.TorchPipelineEngine",
    "by_hand": "pipeline_by_hand.ByHandPipelineEngine",
    "deepspeed": "deepspeed_pipeline.DeepSpeedPipelineEngine",
}
_EXPERTS = {"by_hand": "experts.ExpertEngine", "deepspeed": "deepspeed_experts.DeepSpeedExpertEngine"}


def build(config: RunConfig, model: nn.Module, device: torch.device) -> Engine:
    """The engine that runs the layout of `config`, around a model every rank has built with the same weights."""
    if config.layout.pp > 1:
        return _build_pipeline(config, model, device)
    if config.layout.ep > 1:
        return _engine(_EXPERTS[config.layout.engine])(config, model, device)
    if config.optimizer in COMMUNICATING:
        return _engine("communicating.CommunicatingEngine")(config, model, device)
    if config.update == "in_backward" and config.layout.strategy == "by_hand":
        return _engine("in_backward.ByHandInBackwardEngine")(config, model, device)
    return _engine(_ENGINES[config.layout.strategy])(config, model, device)


def _build_pipeline(config: RunConfig, model: nn.Module, device: torch.device) -> Engine:
    layout = config.layout
    if layout.engine == "by_hand" and layout.schedule in ASYNCHRONOUS:
        return _engine("pipeline_asynchronous.AsynchronousPipelineEngine")(config, model, device)
    return _engine(_PIPELINES[layout.engine])(config, model, device)


def _engine(name: str) -> type[Engine]:
    """An engine's class; only its own libraries are loaded."""
    module, engine = name.split(".")
    found: type[Engine] = getattr(import_module(f"dlojz.train.engines.{module}"), engine)
    return found


__all__ = ["Engine", "build"]
