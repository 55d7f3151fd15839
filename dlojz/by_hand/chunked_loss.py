"""Loss of a text model by parts of its tokens, so that the logits of all of them never exist at once.

The last block ends before its head. Of each part the head's logits and their loss are computed, and in backward again:
of N tokens and V words, n parts take N·V/n numbers at a time, and 2·N·D·V FLOPs more (D: width). The gradient of the
head's weight is summed part by part.

Source: Chen et al. 2016 (arXiv 1604.06174), §4, for recomputing; Hsu et al. 2024, "Liger Kernel" (arXiv 2410.10989),
§3.2, for a head and its loss by parts (its kernel computes the gradients in forward already).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlojz.base.language import refusal
from dlojz.models.blocks import BlockList


class PartLoss(nn.Module):
    """Sum of the cross-entropies of some tokens, from what the head reads of them.

    Args:
        head: gives the logits; its weight stays where it is.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self._head = [head]  # in a list: it is no part of this module

    def forward(self, x_ND: Tensor, targets_N: Tensor) -> Tensor:
        """``(N, D)`` and N words to a scalar."""
        logits_NV = self._head[0](x_ND)  # (N, D) @ (D, V)
        return F.cross_entropy(logits_NV.float(), targets_N, reduction="sum")


def chunk_loss(model: BlockList, parts: int) -> None:
    """Let the last block of a text model give the mean loss, computed in so many parts, where targets are known.

    Raises:
        LabError: no linear layer gives the logits as they are.
    """
    last = model.blocks[-1]
    head = next(iter(model.logits_heads), getattr(last, "output", None))
    if not isinstance(head, nn.Linear):
        raise refusal(
            en=f"loss_chunks={parts} was received, but this model's logits are not those of one linear layer: leave it "
            "out.",
            fr=f"loss_chunks={parts} a été reçu, mais les logits de ce modèle ne sont pas ceux d’une seule couche "
            "linéaire : retirez-le.",
        )
    whole, last.part_loss = last.forward, PartLoss(head)

    def forward(*inputs: Any, **named: Any) -> Any:
        targets = model.targets
        if targets is None:
            return whole(*inputs, **named)
        given_logits = head.forward
        try:
            # Without its head the block gives what the head would read.
            head.forward = _unchanged  # type: ignore[method-assign, assignment]
            x_BTD = whole(*inputs, **named)
        finally:
            head.forward = given_logits  # type: ignore[method-assign]
        # (B, T, D) → (B·T, D), cut into parts that are views.
        pieces = zip(x_BTD.flatten(0, 1).chunk(parts), targets.flatten().chunk(parts), strict=True)
        # Kept of a part: its x_ND, a view, and its targets; its logits live while their loss is computed, twice.
        losses = [checkpoint(last.part_loss, x_ND, targets_N, use_reentrant=False) for x_ND, targets_N in pieces]
        return torch.stack(losses).sum() / targets.numel()

    last.forward = forward
    model.loss = _given_loss  # type: ignore[assignment]


@contextmanager
def knowing_targets(model: Any, targets: Any) -> Iterator[None]:
    """Let a model whose loss is computed in parts know the targets of what it reads within."""
    if getattr(model, "loss", None) is not _given_loss:
        yield
        return
    model.targets = targets
    try:
        yield
    finally:
        model.targets = None


def _unchanged(x: Tensor) -> Tensor:
    return x


def _given_loss(loss: Any, targets: Tensor) -> Tensor:
    del targets  # the last block has read them
    mean: Tensor = loss
    return mean
