"""Weights in fp32 and moments out of DeepSpeed's optimizers, one parameter at a time, and back into them.

Layer 3. Invariant: what comes out is whole and by the parameter's name; what goes in reaches the copy that the
optimizer updates and the weights that forward reads. DeepSpeed's own checkpoints (one file per rank, pickled) are
neither written nor read.

Source: DeepSpeed 0.19, `utils/tensor_fragment.py` (`safe_get_full_fp32_param` and its like, whose setter forgets the
padding of stage 3 and the weights of 16 bit), `runtime/zero/stage3.py`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from dlojz.train.engines.states import WEIGHTS, begun

_FLATS = ("single_partition_of_fp32_groups", "fp32_groups_flat_partition", "fp32_partitioned_groups_flat")
"""Where stages 1 and 2, stage 0 in bf16, and stage 3 keep what they update: flat pieces of a copy in fp32."""


def whole_state(optimizer: Any, parameter: Tensor, kind: str) -> Tensor:
    """One parameter, or one of its moments, whole and in fp32; a collective call over the data axis.

    Who: the ranks that share it. What: it, all-gathered (stage 3), or summed from pieces that are zero on all ranks but
    one. How much: 4 bytes per element.
    """
    held: Any = parameter
    key = None if kind == WEIGHTS else kind
    if hasattr(held, "ds_id"):
        found: Tensor = optimizer.get_full_hp_param(held, key)
    elif hasattr(held, "_hp_mapping"):
        found = held.get_full_hp_param(key)
    else:
        updated = _updated(optimizer, parameter)
        found = updated if key is None else getattr(optimizer, "optimizer", optimizer).state[updated][key]
    return found.detach().float()


def begin(optimizer: Any, kinds: tuple[str, ...], updates: int) -> None:
    """Let the optimizer have its states before its first step, as it has them after."""
    inner = getattr(optimizer, "optimizer", optimizer)
    for flat in next((list(getattr(optimizer, name)) for name in _FLATS if getattr(optimizer, name, None)), []):
        begun(inner, flat, kinds, updates)
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        optimizer._lazy_init_hp_params_optimizer_state()


def put_state(optimizer: Any, parameter: Tensor, kind: str, whole: Tensor, updates: int) -> None:
    """Put a whole parameter, or a moment, into the share that this rank keeps of it; nothing is sent."""
    held: Any = parameter
    key = None if kind == WEIGHTS else kind
    whole = whole.to(parameter.device)
    if hasattr(held, "ds_id"):
        share, _ = optimizer._get_fp32_opt_state_partition(held, release_swap_buffers=False, optim_state_key=key)
        part = _partition(whole, share.numel(), optimizer._get_param_partition_rank(held))
        share[: part.numel()].copy_(part)  # what is beyond is padding
        if key is None:
            held.ds_tensor.data[: part.numel()].copy_(part)
    elif hasattr(held, "_hp_mapping"):
        held.set_full_hp_param(whole, key)
        if key is None:
            held.data.copy_(whole)
    elif key is None:
        held.data.copy_(whole)
        _updated(optimizer, parameter).data.copy_(whole)
    else:
        begun(getattr(optimizer, "optimizer", optimizer), _updated(optimizer, parameter), (key,), updates)[key].copy_(
            whole
        )


def _updated(optimizer: Any, parameter: Tensor) -> Tensor:
    """What stage 0 updates for a parameter: itself, or its copy in fp32 where it has 16 bit."""
    groups = zip(getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", []), strict=False)
    for low, high in groups:
        for own, copied in zip(low, high, strict=True):
            if own is parameter:
                return copied
    return parameter


def _partition(whole: Tensor, share_numel: int, rank: int) -> Tensor:
    flat = whole.flatten()
    start = min(rank * share_numel, flat.numel())
    return flat[start : min(start + share_numel, flat.numel())]
