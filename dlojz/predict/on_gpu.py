"""What a GPU does otherwise than the CPU on which a model is traced.

Layer 3. Invariant: only what changes the bytes that are kept is changed: the operators that a CUDA device would choose
are called on the same fake CPU tensors.

Source: torch 2.13 `aten/src/ATen/autocast_mode.h` (lists of operators in fp32), `aten/src/ATen/native/transformers`
(which attention kernel), `aten/src/ATen/native/Dropout.cpp` (a mask of one byte).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

IN_FP32 = frozenset(
    {torch.layer_norm, torch.group_norm, torch.softmax, torch.log_softmax, F.softmax, F.log_softmax, F.layer_norm}
)
"""Computed in fp32 under CUDA's autocast, in bf16 under the CPU's."""


class cuda_ways(TorchFunctionMode):  # noqa: N801 - reads as the context manager that it is
    """Within it, attention, dropout and autocast choose what they would choose on a CUDA device.

    Args:
        compute: the precision, as `tracing.trace` takes it.
    """

    def __init__(self, compute: str) -> None:
        super().__init__()
        self._autocast = compute == "autocast"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        if func is F.dropout or func is torch.dropout:
            return _dropout(*args, **kwargs)
        if self._autocast and func in IN_FP32:
            with torch.autocast("cpu", enabled=False):
                return func(*tree_map(_to_fp32, args), **tree_map(_to_fp32, kwargs))
        return func(*args, **kwargs)


def _to_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    del inplace
    if not training or p == 0:
        return x
    kept: Tensor = torch.native_dropout(x, p, True)[0]
    return kept


def _attention(query: Tensor, key: Tensor, value: Tensor, attn_mask: Any = None, *args: Any, **options: Any) -> Tensor:
    # The CPU's fused kernel takes no bias that needs a gradient and falls back on the plain product, which keeps all
    # scores; CUDA's memory-efficient kernel takes it.
    if isinstance(attn_mask, Tensor) and attn_mask.requires_grad and not args and not options.get("dropout_p"):
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value, attn_mask = (tensor.to(dtype) for tensor in (query, key, value, attn_mask))
        bias = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        attended: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, bias, True)[0]
        return attended
    return F.scaled_dot_product_attention(query, key, value, attn_mask, *args, **options)
