"""Carry the weights of timm's CoAtNets into ours: the oracle that says our blocks compute the published model.

Invariant: every tensor of timm's model, BatchNorm's statistics included, lands in exactly one of
ours, and none of ours is left without one.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import one_of
from dlojz.models.coatnet import CoAtNet
from dlojz.models.foreign.vision_packages import ensure_torchvision_imports
from dlojz.models.sizes import COATNET_SIZES, CoAtNetSize

# timm has CoAtNet-0 to 5 in the paper's layout; its coatnet_5 keeps heads of 32 where the paper's table 11 has 64.
TIMM_SIZES: dict[str, CoAtNetSize] = {
    f"{name}_224": replace(COATNET_SIZES[name], head_dim=32) for name in (f"coatnet_{index}" for index in range(6))
}

_STEM = {"conv1": "conv1", "norm": "norm1", "conv2": "conv2"}
_HEAD = {"norm": "norm", "hidden": "pre_logits.fc", "classifier": "fc"}
_CONVOLUTION = {
    "shortcut.project": "shortcut.expand",
    "norm0": "pre_norm",
    "expand": "conv1_1x1",
    "norm1": "norm1",
    "depthwise": "conv2_kxk",
    "norm2": "norm2",
    "squeeze_excitation.squeeze": "se.fc1",
    "squeeze_excitation.excite": "se.fc2",
    "project": "conv3_1x1",
}
_ATTENTION = {
    "shortcut.project": "shortcut.expand",
    "norm1": "norm1",
    "attention.qkv": "attn.qkv",
    "attention": "attn.rel_pos",
    "attention.project": "attn.proj",
    "norm2": "norm2",
    "mlp_expand": "mlp.fc1",
    "mlp_project": "mlp.fc2",
}


def key_map(size: CoAtNetSize) -> dict[str, str]:
    """Prefix of every module of timm's CoAtNet, and the prefix of ours that takes its tensors.

    Example:
        >>> key_map(TIMM_SIZES["coatnet_0_224"])["stages.2.blocks.0.attn.qkv"]
        'blocks.6.attention.qkv'
    """
    prefixes = {f"stem.{theirs}": f"blocks.0.{ours}" for ours, theirs in _STEM.items()}
    position = 1
    for stage_index, stage in enumerate(size.stages):
        modules = _CONVOLUTION if stage.kind == "convolution" else _ATTENTION
        for index in range(stage.depth):
            for ours, theirs in modules.items():
                prefixes[f"stages.{stage_index}.blocks.{index}.{theirs}"] = f"blocks.{position}.{ours}"
            if stage.kind == "attention" and index == 0:
                # timm puts norm and pooling of a stage's first attention block in one Sequential.
                prefixes[f"stages.{stage_index}.blocks.0.norm1.norm"] = f"blocks.{position}.norm1"
            position += 1
    prefixes |= {f"head.{theirs}": f"blocks.{position}.{ours}" for ours, theirs in _HEAD.items()}
    return prefixes


def renamed(state: Mapping[str, Tensor], size: CoAtNetSize) -> dict[str, Tensor]:
    """Give each tensor of timm's ``state_dict`` the name that it has in ours; shapes stay timm's.

    Raises:
        LabError: a tensor has no place in a CoAtNet of this size.
    """
    prefixes = key_map(size)
    ours: dict[str, Tensor] = {}
    for key, tensor in state.items():
        prefix, _, leaf = key.rpartition(".")
        if prefix not in prefixes:
            raise LabError(f"{key!r} of timm's model has no place in a CoAtNet of this size: check the model's name.")
        if leaf == "relative_position_bias_table":
            # One row per relative position in timm's table, one map per head in ours.
            ours[f"{prefixes[prefix]}.position_bias"] = tensor.t()
        else:
            ours[f"{prefixes[prefix]}.{leaf}"] = tensor
    return ours


def from_timm(model: nn.Module) -> CoAtNet:
    """Make our CoAtNet from timm's: same logits, and the same memory (the large tensors are shared, not copied).

    Args:
        model: What ``timm.create_model("coatnet_0_224")`` to ``"coatnet_5_224"`` gives, at any image size.

    Raises:
        LabError: the model is none of those.
    """
    config = getattr(model, "default_cfg", None) or {}
    name = config.get("architecture", type(model).__name__)
    if name not in TIMM_SIZES:
        raise LabError(one_of("timm CoAtNet", name, TIMM_SIZES))
    size = TIMM_SIZES[name]
    tensors = renamed(model.state_dict(), size)
    height_width: tuple[int, int] = model.img_size  # type: ignore[assignment]
    classifier = tensors[f"blocks.{sum(stage.depth for stage in size.stages) + 1}.classifier.weight"]
    with torch.device("meta"):
        ours = CoAtNet(
            size,
            image_size=height_width[0],
            num_classes=classifier.shape[0],
            in_channels=tensors["blocks.0.conv1.weight"].shape[1],
        )
    # timm's 1×1 convolutions are our dense layers, and its flat position tables our maps: same elements, other shape.
    shapes = {key: tensor.shape for key, tensor in ours.state_dict().items()}
    state = {key: tensor.reshape(shapes.get(key, tensor.shape)) for key, tensor in tensors.items()}
    ours.load_state_dict(state, strict=True, assign=True)
    return ours.train(model.training)


def create_timm_model(name: str, **options: Any) -> nn.Module:
    """Call ``timm.create_model`` where timm would not import by itself beside a CPU-only torch."""
    ensure_torchvision_imports()
    import timm

    model: nn.Module = timm.create_model(name, **options)
    return model
