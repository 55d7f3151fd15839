"""A momentum in units of its frozen variance: what the second stage compresses.

Layer 2, loads torch. Invariant: a number that had no variance when it froze is never moved, and takes no part in the
scale of its block.

Algorithm 1 of 1-bit Adam and of 1-bit LAMB leave the compression C open. Here it is C[x] = √v × 1bit[x / √v], the same
√v on all ranks: what is compressed is the step that each number is to go, which has one order of magnitude for all of
them, and not its momentum, which has not. Under one scale for all, what is said of a number of tiny variance is the
noise of the others, and is then divided by next to nothing: in 100 steps of the lab's `vit_tiny` (lr 0.003, warm-up 20)
the largest weight, a bias of the attention's keys, which has no gradient but rounding, grew to 109, where Adam's is
1.6 and this one's 1.9. DeepSpeed multiplies each layer by a scale of its own (1-bit LAMB, `scaling_coeff`) and
masks out what has no gradient (`exp_avg_mask`).
"""

from __future__ import annotations

import math

from torch import Tensor


def root_of(variance: Tensor, correction: float, eps: float) -> Tensor:
    """√v + ε, as Adam divides by it.

    Args:
        variance: `exp_avg_sq`, any shape.
        correction: of its bias, 1 − β2^t, of the step in which it was last renewed.
        eps: added to the root.
    """
    return (variance.sqrt() / math.sqrt(correction)).add_(eps)


def in_roots(values: Tensor, variance: Tensor, root: Tensor) -> Tensor:
    """Numbers in units of their root; 0 where there is no variance."""
    return (values / root).masked_fill_(variance == 0, 0.0)
