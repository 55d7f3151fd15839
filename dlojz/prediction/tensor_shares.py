"""Tell how tensor parallelism splits a model from elsewhere: layer by layer, the bytes of a rank, what is sent."""

from __future__ import annotations

import re
from typing import Any, Literal, NamedTuple

from dlojz.base.language import refusal
from dlojz.config.run_config import RunConfig
from dlojz.models.foreign.elsewhere import is_elsewhere
from dlojz.prediction.shapes import FP32_BYTES, build_on_meta, share_shapes


class TensorShareRow(NamedTuple):
    """Layers of the same place in their blocks.

    Attributes:
        layers: path with `*` for numbers, which is a pattern of a `tp_plan`; empty for all that is whole.
        style: of their split; `inner` is whole, but its gradient is summed.
        number: how many layers.
        heads: attention heads of each that the ranks share; 0 where it has none.
        parts: outputs of each fused part, which is split by itself; one number where none is fused.
        rank_bytes: fp32 weights of all of them on a rank.
    """

    layers: str
    style: Literal["colwise", "rowwise", "inner", "whole"]
    number: int
    heads: int
    parts: tuple[int, ...]
    rank_bytes: int


def tensor_share_rows(config: RunConfig) -> list[TensorShareRow]:
    """List what a rank of the tensor axis holds of a model from elsewhere, in the order of the blocks; whole is last.

    Raises:
        LabError: for a model of the catalogue, or one of which nothing can be split among so many ranks.
    """
    layout = config.layout
    if not is_elsewhere(config.model):
        raise refusal(
            en=f"the blocks of {config.model} are written in tensor-parallel form, and need no plan: `dlojz predict "
            f"{config.model} --tp {layout.tp}` tells what they send; a plan is found for timm:NAME, hf:FOLDER or "
            "FILE.py:FUNCTION.",
            fr=f"les blocs de {config.model} sont écrits sous forme Tensor Parallel et n’ont pas besoin de plan : "
            f"`dlojz predict {config.model} --tp {layout.tp}` dit ce qu’ils envoient ; un plan se cherche pour "
            "timm:NOM, hf:DOSSIER ou FICHIER.py:FONCTION.",
        )
    built = build_on_meta(config.built_model, config.image_size, config.sequence_length, config.num_classes)
    assert built.tensor_plan is not None  # of every model from elsewhere
    told: dict[str, tuple[Any, int, tuple[int, ...]]] = {}
    inner: set[str] = set()
    for region in built.tensor_plan(layout.tp, layout.tensor_parts):
        for layer in region.layers:
            told[f"{region.block}.{layer.path}"] = (layer.style, region.heads, layer.parts)
        inner |= {f"{region.block}.{path}" for path in region.inner}
    shapes = share_shapes(config, 0)
    rows: dict[tuple[str, Any, int, tuple[int, ...]], tuple[set[str], int]] = {}
    for parameter in shapes.parameters:
        path = shapes.own_path(parameter.module)
        style, heads, parts = told.get(path, ("whole", 0, ()))
        if f"{path}.{parameter.name.rpartition('.')[2]}" in inner:
            style = "inner"
        key = ("" if style == "whole" else pattern_of(path), style, heads, parts)
        layers, num_bytes = rows.get(key, (set(), 0))
        rows[key] = (layers | {path}, num_bytes + FP32_BYTES * parameter.numel)
    found = [
        TensorShareRow(layers, style, len(paths), heads, parts, num_bytes)
        for (layers, style, heads, parts), (paths, num_bytes) in rows.items()
    ]
    return sorted(found, key=lambda row: row.style == "whole")


def pattern_of(path: str) -> str:
    """Write a path with `*` for the numbers of blocks.

    Example:
        >>> pattern_of("stages.1.blocks.0.mlp.fc1")
        'stages.*.blocks.*.mlp.fc1'
    """
    return re.sub(r"\d+(?=\.)", "*", path)
