"""The flat list of blocks that every model of the lab is made of.

Layer 1 (models). Invariant: a model IS its list of blocks. ``for block in model.blocks: x = block(x)`` is the whole
forward pass; every block takes one tensor and gives one contiguous tensor, so a pipeline can cut between any two.
No block owns a buffer except BatchNorm's running statistics: a model built on the meta device and given its
weights later lacks nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class BlockList(nn.Module):
    """A model as a flat list of blocks, run one after the other.

    Args:
        blocks: Modules in the order of the forward pass, stem and head included.
        checkpointing: Keep only each block's input for the backward pass and compute the rest again.

    Source: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), section 4,
    for the checkpointing.
    """

    def __init__(self, blocks: Iterable[nn.Module], *, checkpointing: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        """Run all blocks: ``x_BCHW`` (images) or ``tokens_BT`` (text) to logits."""
        recompute = self.checkpointing and self.training and torch.is_grad_enabled()
        for block in self.blocks:
            x = run_checkpointed(block, x) if recompute else block(x)
        return x


def run_checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    """Run one block, keeping its input only; the backward pass runs it again.

    Outputs, gradients and BatchNorm's running statistics are those of ``block(x)``.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _batch_norm_statistics_kept(block)

    output: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return output


@contextmanager
def _batch_norm_statistics_kept(block: nn.Module) -> Iterator[None]:
    # Without this the second forward would move the running statistics a second time within one step, and a
    # checkpointed model would no longer evaluate like the same model without checkpointing.
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count


def split_heads(qkv_BTE: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Cut a fused projection into queries, keys and values, each ``BNTH``.

    The last dimension E is laid out head by head, (N, 3, H), so that a contiguous slice of the projection's rows is a
    whole number of heads: what tensor parallelism shards.
    """
    q_BTNH, k_BTNH, v_BTNH = qkv_BTE.unflatten(-1, (-1, 3, head_dim)).unbind(dim=-2)
    return q_BTNH.transpose(1, 2), k_BTNH.transpose(1, 2), v_BTNH.transpose(1, 2)


def merge_heads(x_BNTH: Tensor) -> Tensor:
    """Lay the heads side by side again: ``BNTH`` to ``BTE`` with E = N × H."""
    return x_BNTH.transpose(1, 2).flatten(start_dim=-2)
