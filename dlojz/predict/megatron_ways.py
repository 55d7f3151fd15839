"""What Megatron-core allocates otherwise than the lab's decoder, where Transformer Engine is not there.

Layer 3. Invariant: only what is held, and for how long, is told; the numbers mean nothing, as in every trace. Of two
calls: attention, which Megatron-core writes out where torch has one kernel, and the loss, which it computes in place.

With s tokens, b samples, a heads and v words on a rank, in fp32:

    attention, forward     the scores, then the softmax: 4·a·s²·b each; the softmax is kept for backward
    attention, backward    up to 4 such tensors at once: scores that were masked in place are a view, whose gradient
                           autograd copies to find that of the whole
    loss                   the logits become their softmax, then their gradient: 4·s·b·v, in one place

Source: megatron-core 0.16.1, `transformer/dot_product_attention.py`, `fusions/fused_softmax.py` (without fusion) and
`tensor_parallel/cross_entropy.py`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dlojz.predict.on_gpu import cuda_ways


class megatron_ways(cuda_ways):  # noqa: N801 - reads as the context manager that it is
    """Within it, attention and the loss allocate what Megatron-core's do.

    Args:
        compute: the precision, as `tracing.trace` takes it.
        on_gpu: all else as on a CUDA device.
    """

    def __init__(self, compute: str, *, on_gpu: bool) -> None:
        super().__init__(compute)
        self._on_gpu = on_gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _WrittenOut.apply(*args[:3])
        if func is F.cross_entropy:
            return _InPlace.apply(*args[:2])
        if self._on_gpu:
            return super().__torch_function__(func, types, args, kwargs)
        return func(*args, **(kwargs or {}))


class _WrittenOut(torch.autograd.Function):
    """Attention as a product, a mask, a softmax and a product; queries, keys and values as (B, N, T, H)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, tokens, _ = q.shape
        scores = q.new_empty(batch, heads, tokens, tokens)
        weights = torch.softmax(scores, dim=-1)
        attended = q.new_empty(q.shape)
        ctx.save_for_backward(q, k, v, weights)
        return attended.transpose(1, 2).contiguous().transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = ctx.saved_tensors
        # Megatron-core's holds four by then, and the gradient of the values; here the weights stay until the end, and
        # so does the gradient that has come in.
        copies = [torch.empty_like(weights) for _ in range(3)]
        del copies
        return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


class _InPlace(torch.autograd.Function):
    """The mean loss of logits that it overwrites."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.new_empty(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        return logits, None
