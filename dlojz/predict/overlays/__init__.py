"""What each engine holds besides the model states and what one process would allocate, and when.

Layer 3. Invariant: one overlay per engine, each measured against in tests/predict/test_forecast.py.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.optimizer_stages import COMPRESSED, LOCAL
from dlojz.optimizer_update import IN_PASSES
from dlojz.predict.overlays import in_backward
from dlojz.predict.overlays.base import Moments, Overlay
from dlojz.predict.overlays.compressed import Compressed
from dlojz.predict.overlays.deepspeed import DeepSpeed, DeepSpeed3, DeepSpeed12
from dlojz.predict.overlays.experts import DeepSpeedExperts, Experts
from dlojz.predict.overlays.fsdp2 import FSDP2
from dlojz.predict.overlays.hooked import HookedDDP
from dlojz.predict.overlays.local_steps import LocalSteps
from dlojz.predict.overlays.megatron import Megatron
from dlojz.predict.overlays.replicated import DDP, ByHand
from dlojz.predict.overlays.zero_by_hand import ZeroStage1, ZeroStage2, ZeroStage3
from dlojz.predict.shapes import ModelShapes

_OVERLAYS: dict[str, type[Overlay]] = {
    "single": Overlay,
    "ddp": DDP,
    "by_hand": ByHand,
    "by_hand-1": ZeroStage1,
    "by_hand-2": ZeroStage2,
    "by_hand-3": ZeroStage3,
    "fsdp2": FSDP2,
    "zero-0": DeepSpeed,
    "zero-1": DeepSpeed12,
    "zero-2": DeepSpeed12,
    "zero-3": DeepSpeed3,
}


def overlay(config: RunConfig, shapes: ModelShapes, *, dp_rank: int = 0, on_gpu: bool = False) -> Overlay:
    """The overlay of the engine that runs a layout, on one data-parallel rank."""
    kind = Compressed if config.optimizer in COMPRESSED else _OVERLAYS[config.layout.strategy]
    if config.layout.gradient_compression != "none":
        kind = HookedDDP
    if config.optimizer in LOCAL:
        kind = LocalSteps
    if config.layout.ep > 1:
        kind = DeepSpeedExperts if config.layout.engine == "deepspeed" else Experts
    if config.library == "megatron":
        kind = Megatron
    if config.update in IN_PASSES:
        kind = in_backward.kind_of(config)
    made = kind(config, shapes)
    made.on_gpu, made.dp_rank = on_gpu, dp_rank
    return made


__all__ = ["Moments", "Overlay", "overlay"]
