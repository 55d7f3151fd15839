"""Build and count models on the meta device, where a tensor has a shape and neither memory nor values.

Initial values are skipped: on the meta device the first of torch's random numbers loads its compiler (`torch._dynamo`,
a second of processor time).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dlojz.base.language import refusing_overflow
from dlojz.models.catalogue import spec

if TYPE_CHECKING:
    from dlojz.models.blocks import BlockList

_FILL = {Tensor.normal_, Tensor.uniform_, Tensor.fill_, Tensor.zero_}
_CHANGE = {Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_}
"""How timm draws a truncated normal distribution; a forward pass calls them too, but not on a parameter."""
# torch drops the operators of a Library that is garbage-collected: this list keeps them alive.
_rules: list[object] = []


class _WithoutInitialising(TorchFunctionMode):
    """Context that skips the initialisation of tensors (`torch.nn.init`)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        drawn = func in _FILL or (func in _CHANGE and isinstance(args[0], torch.nn.Parameter))
        if drawn or getattr(func, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def on_meta() -> Iterator[None]:
    """Make new modules and tensors on the meta device, without initial values.

    Raises:
        LabError: for a tensor of more bytes than torch can count.
    """
    with refusing_overflow(), torch.device("meta"), _WithoutInitialising():
        yield


@refusing_overflow()
def sample_inputs(
    name: str,
    samples: int = 1,
    *,
    image_size: int | None = None,
    sequence_length: int | None = None,
    in_channels: int | None = None,
    device: str = "meta",
) -> Any:
    """Make an input of a model: right shape and type, no values; ``(B, C, H, W)``, ``(B, T)``, or as its example."""
    entry = spec(name)
    if entry.example is not None:
        return entry.example.inputs(samples, device)
    if entry.family == "text":
        length = max(sequence_length or entry.sequence_length or 1, entry.target_length or 0)
        return torch.empty(samples, length, dtype=torch.long, device=device)
    side = image_size or entry.image_size or 1
    return torch.empty(samples, in_channels or entry.in_channels or 3, side, side, device=device)


def targets_shape(name: str, samples: int, sequence_length: int | None = None) -> tuple[int, ...]:
    """Return the shape of a model's targets: a class number for each sample, token or place of its example's output."""
    entry = spec(name)
    if entry.example is not None:
        return (samples, *entry.example.targets)
    length = entry.target_length or sequence_length or entry.sequence_length or 1
    return (samples, length) if entry.family == "text" else (samples,)


@refusing_overflow()
def flops_by_block(model: BlockList, sample: Any) -> list[int]:
    """Count the FLOPs of one forward pass of each block of a model.

    Blocks that print alike and read the same shape cost the same: each kind is run once.

    Args:
        model: on the meta device, in evaluation mode.
        sample: its input there.
    """
    from torch.utils.flop_counter import FlopCounterMode

    if not model.is_chain:
        return _flops_of_nested(model, sample)
    counts_by_kind: dict[tuple[str, torch.Size], tuple[int, Tensor]] = {}
    flops_of, x = [], sample
    # The fused attention kernels are one opaque operator each, which the counter misses on some devices; the plain one
    # is made of two matrix products, which it knows.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        for block in model.blocks:
            kind = (repr(block), x.shape)
            if kind not in counts_by_kind:
                with FlopCounterMode(display=False) as counter:
                    output = block(x)
                counts_by_kind[kind] = (int(counter.get_total_flops()), output)
            flops, x = counts_by_kind[kind]
            flops_of.append(flops)
    return flops_of


def _flops_of_nested(model: BlockList, sample: Any) -> list[int]:
    """FLOPs of blocks of which the last one calls the others."""
    from torch.utils.flop_counter import FlopCounterMode

    parts = model.blocks[:-1]  # the last block is the module, which calls them
    flops_of: list[int] = []
    counter = FlopCounterMode(display=False)

    def begin(_: Any, __: Any) -> None:
        # The count before, subtracted, and the count behind, added: the FLOPs of this part.
        flops_of.append(-counter.get_total_flops())

    def end(_: Any, __: Any, ___: Any) -> None:
        flops_of[-1] += counter.get_total_flops()

    hooks = [part.register_forward_pre_hook(begin) for part in parts]
    hooks += [part.register_forward_hook(end) for part in parts]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        model(sample)
    for hook in hooks:
        hook.remove()
    return [*flops_of, counter.get_total_flops() - sum(flops_of)]  # of the module, what no part has


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
