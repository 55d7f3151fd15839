"""Dispatch and combine: all-to-alls that move each expert's rows to its rank and back.

Combine is the inverse of dispatch, and each is the other's backward pass; rows are moved, never summed. Every rank of a
group has rows for all E experts and holds E/ep of them, rank r those from r·E/ep on:

    (E, C, D) on each rank  ──dispatch──►  (E/ep, ep·C, D): for my experts, the rows of rank 0, then of rank 1 …
    (E, C, D) on each rank  ◄──combine───  (E/ep, ep·C, D)

Shape suffixes: E experts, C capacity, D width, R ranks of the group, L = E / R experts of one rank.

Source: Lepikhin et al. 2020, "GShard" (arXiv 2006.16668), whose all-to-all resharding this is.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def has_values(x: Tensor) -> bool:
    """Whether a tensor has values, not only a shape (meta device, or a forecast's trace)."""
    return not x.is_meta and not isinstance(x, FakeTensor)


_Move = Callable[[Tensor], Tensor]


class _Exchange(torch.autograd.Function):
    """Move rows by one function, and their gradients by its inverse."""

    @staticmethod
    def forward(
        context: Any, x: Tensor, move: Callable[[Tensor], Tensor], inverse: Callable[[Tensor], Tensor]
    ) -> Tensor:
        context.inverse = inverse
        return move(x)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return context.inverse(gradients[0]), None, None  # rows are only moved: the gradient takes the inverse way


def dispatch(x_ECD: Tensor, ep: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Bring each rank's rows to the experts: ``(E, C, D)`` to ``(E/ep, ep·C, D)``; a collective call if ep > 1.

    Args:
        x_ECD: this rank's rows for all experts.
        ep: ranks of the group; 1 leaves the rows where they are.
        group: None is all ranks.
    """
    if ep == 1:
        return x_ECD
    moves = partial(_to_experts, ep=ep, group=group), partial(_to_tokens, ep=ep, group=group)
    rows_LMD: Tensor = _Exchange.apply(x_ECD, *moves)
    return rows_LMD


def combine(y_LMD: Tensor, ep: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Bring the experts' outputs back to the tokens: ``(E/ep, ep·C, D)`` to ``(E, C, D)``; a collective call if ep > 1.

    Args:
        y_LMD: the outputs of this rank's experts, M = ep·C.
        ep: ranks of the group; 1 leaves the rows where they are.
        group: None is all ranks.
    """
    if ep == 1:
        return y_LMD
    moves = partial(_to_tokens, ep=ep, group=group), partial(_to_experts, ep=ep, group=group)
    rows_ECD: Tensor = _Exchange.apply(y_LMD, *moves)
    return rows_ECD


def _to_experts(x_ECD: Tensor, ep: int, group: dist.ProcessGroup | None) -> Tensor:
    # Pieces arrive in the order of their ranks: R times (L, C, D).
    received_RLCD = _all_to_all(x_ECD.contiguous(), group).unflatten(0, (ep, -1))
    return received_RLCD.transpose(0, 1).flatten(1, 2)  # (R, L, C, D) → (L, R, C, D) → (L, R·C, D)


def _to_tokens(y_LMD: Tensor, ep: int, group: dist.ProcessGroup | None) -> Tensor:
    # (L, R·C, D) → (L, R, C, D) → (R, L, C, D): piece r goes back to rank r.
    sent_RLCD = y_LMD.unflatten(1, (ep, -1)).transpose(0, 1).contiguous()
    return _all_to_all(sent_RLCD.flatten(0, 1), group)


def _all_to_all(rows: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    received = torch.empty_like(rows)
    # On the meta device and in a trace the shape is all that is asked: nothing is sent.
    if has_values(rows):
        # Who: every rank of the expert-parallel group to every other. What: E·C rows of D numbers, E/ep·C of them to
        # each rank. How much: E·C·D elements, of which 1/ep, for its own experts, stays.
        dist.all_to_all_single(received, rows, group=group)
    return received
