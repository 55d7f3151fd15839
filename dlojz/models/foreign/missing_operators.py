"""Operators that an installation lacks: torchvision's extension, and torch's rule of shapes for grouped products."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlojz.base.requirements import missing_library

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("nms", "qnms")
# torch drops the operators of a Library that is garbage-collected: these lists keep them alive.
_libraries: list[object] = []
_rules: list[object] = []


def ensure_torchvision_imports() -> None:
    """Make ``import torchvision`` and ``import timm`` work; call it before either, as often as you like.

    With a CPU-only torch the extension of PyPI's torchvision does not load, its operators are not registered, and
    ``import torchvision`` stops at ``operator torchvision::nms does not exist``. Two schemas without an implementation
    are enough; the lab never calls them. Where the extension loads, nothing changes.

    Raises:
        ModuleNotFoundError: torchvision is not installed.
    """
    if _libraries or _extension_loads():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in _OPERATORS:
        # An operator may be defined once in a process only.
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}{_SCHEMA}")
    _libraries.append(library)


def _extension_loads() -> bool:
    """Say whether torchvision's compiled operators are registered, or register now."""
    if hasattr(torch.ops.torchvision, "nms"):
        return True
    described = importlib.util.find_spec("torchvision")
    if described is None or described.origin is None:
        raise ModuleNotFoundError(missing_library("torchvision"), name="torchvision")
    for extension in Path(described.origin).parent.glob("_C*"):
        try:
            torch.ops.load_library(str(extension))
        except OSError:
            continue
    return hasattr(torch.ops.torchvision, "nms")


@lru_cache(maxsize=1)
def ensure_grouped_products_on_meta() -> None:
    """Let `grouped_mm`, the product of all experts at once, run on the meta device in every precision.

    torch's kernels take fp32 and fp16 too, but its rule for shapes refuses all but bf16. Source: torch 2.13,
    `_meta_registrations.py`, `_meta_grouped_mm_common`; `aten/src/ATen/native/GroupedMMUtils.h`,
    `create_grouped_gemm_output_tensor` (a row takes a multiple of 16 bytes).
    """
    library = torch.library.Library("aten", "IMPL", "Meta")
    library.impl("_grouped_mm", _grouped_product_on_meta, allow_override=True)
    _rules.append(library)


def _grouped_product_on_meta(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    del bias
    dtype = out_dtype or a.dtype
    # Of the same dimensions: one product for each group. Else (M, K) @ (G, K, N) → (M, N), rows by group.
    groups = a.shape[0] if offs is None else offs.shape[0]
    shape = (*((groups,) if a.dim() == b.dim() else ()), a.shape[-2], b.shape[-1])
    row_multiple = 16 // dtype.itemsize
    row = -(-shape[-1] // row_multiple) * row_multiple  # in elements, a multiple of 16 bytes
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
