"""Activation checkpointing of a block: what the backward pass computes again.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (arXiv 1604.06174), section 4, for full
checkpointing; Korthikanti et al. 2022 (arXiv 2205.05198), section 5, for choosing what is cheap to compute again;
Liang et al. 2024 (arXiv 2410.06511), section 2.3, and torchtitan's `_apply_ac_to_transformer_block` ("op"), for every
second product.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dlojz.base.errors import LabError
from dlojz.base.language import one_of

Checkpointing = Literal["none", "selective", "every_second", "full"]
LEVELS: tuple[Checkpointing, ...] = ("none", "selective", "every_second", "full")
# Products of `nn.Linear`: without a bias (mm), with one (addmm). The batched ones always stay.
_ALTERNATING = ("mm", "addmm")
_KEPT = ("mm", "addmm", "bmm", "baddbmm", "convolution")
_KEPT_ATTENTION = "_scaled_dot_product_"


def level_of(checkpointing: Checkpointing | bool) -> Checkpointing:
    """Check the level of checkpointing; False stands for `none`, True for `full`.

    Raises:
        LabError: for anything else; the sentence lists the levels.
    """
    if isinstance(checkpointing, bool):
        return "full" if checkpointing else "none"
    if checkpointing not in LEVELS:
        raise LabError(one_of("checkpointing", checkpointing, LEVELS))
    return checkpointing


def run_checkpointed(block: nn.Module, x: Tensor, level: Checkpointing = "full") -> Tensor:
    """Run one block and keep its input only; the backward pass runs it again.

    Outputs, gradients and BatchNorm's running statistics are those of ``block(x)``. `selective` also keeps the outputs
    of matrix products, convolutions and attention: only norms, activation functions, casts and sums are computed again;
    `every_second` keeps them too, but of the products of two matrices the first, the third and so on alone.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        if level == "full":
            return nullcontext(), _batch_norm_statistics_kept(block)
        # A new policy for each call: it counts the products of this block alone.
        policy = _EverySecondProduct() if level == "every_second" else _policy
        keeping, giving_back = create_selective_checkpoint_contexts(policy)
        return keeping, _both(_batch_norm_statistics_kept(block), giving_back)

    # The reentrant form takes no `context_fn`, and needs an input with a gradient.
    output: Tensor = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
    return output


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_kept(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class _EverySecondProduct:
    """Policy of one block: of its products of two matrices, keep those with odd numbers."""

    def __init__(self) -> None:
        # Forward (False) and recomputation (True) count each on its own, so that both keep the same products.
        self._products = {True: 0, False: 0}

    def __call__(self, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator.overloadpacket.__name__ in _ALTERNATING:
            self._products[context.is_recompute] += 1
            if self._products[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return _policy(context, operator)


@lru_cache(maxsize=1024)
def _is_kept(operator: Any) -> bool:
    """Whether an operator's output is kept: it costs far more operations than bytes."""
    namespace, _, name = operator._schema.name.partition("::")
    return namespace == "aten" and (name in _KEPT or name.startswith(_KEPT_ATTENTION))


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:  # the statistics first: their copies are not among the tensors that the block has kept
        yield


@contextmanager
def _batch_norm_statistics_kept(block: nn.Module) -> Iterator[None]:
    # Without this the second forward would update the running statistics a second time within one step.
    norms = [module for module in block.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        # Momentum 0 leaves the running mean and variance as they are; the counter of batches is a copy meanwhile.
        norm.momentum = 0.0
        if norm.num_batches_tracked is not None:
            norm.num_batches_tracked = norm.num_batches_tracked.clone()
    try:
        yield
    finally:
        for norm, (momentum, count) in zip(norms, before, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, count
