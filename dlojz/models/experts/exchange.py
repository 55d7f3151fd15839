"""Dispatch and combine: the rows that each rank has for each expert, brought to the rank that holds the expert.

Combine undoes dispatch, and each is the other's backward pass; rows are moved, never summed, so that where experts are
computed changes nothing but rounding.

Every rank of a group has rows for all E experts and holds E/ep of them, those of rank r being r·E/ep and the next:

    (E, C, D) on each rank  ──dispatch──►  (E/ep, ep·C, D): for my experts, the rows of rank 0, then of rank 1 …
    (E, C, D) on each rank  ◄──combine───  (E/ep, ep·C, D)

Shape suffixes: E experts, C capacity, D width, R ranks of the group, L = E / R experts of one rank.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), whose all-to-all resharding this is.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(x: Tensor) -> bool:
    """Whether a tensor holds numbers, and not a shape alone (meta device, or a trace of a forecast)."""
    return not x.is_meta and not isinstance(x, FakeTensor)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x_ECD: Tensor, ep: int, group: dist.ProcessGroup | None) -> Tensor:
        context.ep, context.group = ep, group
        return _to_experts(x_ECD, ep, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(gradients[0], context.ep, context.group), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, y_LMD: Tensor, ep: int, group: dist.ProcessGroup | None) -> Tensor:
        context.ep, context.group = ep, group
        return _to_tokens(y_LMD, ep, group)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _to_experts(gradients[0], context.ep, context.group), None, None


def dispatch(x_ECD: Tensor, ep: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Bring each rank's rows to the experts: ``(E, C, D)`` to ``(E/ep, ep·C, D)``; a collective call if ep > 1.

    Args:
        x_ECD: this rank's rows for all experts.
        ep: ranks of the group; 1 leaves the rows where they are.
        group: None is all ranks.
    """
    if ep == 1:
        return x_ECD
    moved: Tensor = _Dispatch.apply(x_ECD, ep, group)
    return moved


def combine(y_LMD: Tensor, ep: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Bring the experts' outputs back to the tokens: ``(E/ep, ep·C, D)`` to ``(E, C, D)``; a collective call if ep > 1.

    Args:
        y_LMD: the outputs of this rank's experts, M = ep·C.
        ep: ranks of the group; 1 leaves the rows where they are.
        group: None is all ranks.
    """
    if ep == 1:
        return y_LMD
    moved: Tensor = _Combine.apply(y_LMD, ep, group)
    return moved


def _to_experts(x_ECD: Tensor, ep: int, group: dist.ProcessGroup | None) -> Tensor:
    received_RLCD = _all_to_all(x_ECD.contiguous(), group).unflatten(0, (ep, -1))
    return received_RLCD.transpose(0, 1).flatten(1, 2)


def _to_tokens(y_LMD: Tensor, ep: int, group: dist.ProcessGroup | None) -> Tensor:
    sent_RLCD = y_LMD.unflatten(1, (ep, -1)).transpose(0, 1).contiguous()
    return _all_to_all(sent_RLCD.flatten(0, 1), group)


def _all_to_all(sent: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    received = torch.empty_like(sent)
    if has_values(sent):
        # Who: every rank of the expert-parallel group to every other. What: E·C rows of D numbers, E/ep·C of them to
        # each rank. How much: E·C·D elements, of which the share of its own experts, 1/ep, stays.
        dist.all_to_all_single(received, sent, group=group)
    return received
