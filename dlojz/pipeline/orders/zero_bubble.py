"""Zero-bubble schedules with one chunk per rank: ZB-H1 and ZB-H2, written by hand as their paper does.

Layer 2. Invariant: a backward is split into its part for the input, for which the stage before waits, and its part for
the weights, for which nobody waits: the latter fill what would be bubbles.
"""

from __future__ import annotations

from dlojz.pipeline.orders.interleaved import put_off
from dlojz.pipeline.orders.writing import counted, need_micro_batches
from dlojz.pipeline.schedule import Schedule


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B's memory and a third of its bubble.

    Rank r runs p − r forwards, then backward for the input and forward in turn; after the j-th (from 1) backward for
    the input, one for the weights if j > r; the r that remain come at the end.

    Raises:
        LabError: for fewer micro-batches than ranks.

    Source: Qi et al. 2024 (arXiv 2401.10241), §2.1 and Fig. 2.
    """
    counted("zb-h1", ranks=ranks, micro_batches=micro_batches)
    need_micro_batches("zb-h1", micro_batches, ranks, "p", "1f1b")
    ahead = [ranks - 1 - rank for rank in range(ranks)]
    return put_off("zb-h1", ranks, micro_batches, 1, micro_batches, ahead=ahead, lag=list(range(ranks)))


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H2: no bubble on any rank between its own first and last action, for about twice the memory of 1F1B.

    Rank r runs 2(p − r) − 1 forwards first and puts off 2r backwards for the weights. Ranks then start and end one
    after the other, so that only the span shrinks: with an optimizer that waits for all ranks nothing is gained over
    ZB-H1 (`barrier` is False: the paper validates the step afterwards instead, §4).

    Raises:
        LabError: for fewer than 2p − 1 micro-batches.

    Source: Qi et al. 2024 (arXiv 2401.10241), §2.2 and Fig. 3.
    """
    counted("zb-h2", ranks=ranks, micro_batches=micro_batches)
    need_micro_batches("zb-h2", micro_batches, 2 * ranks - 1, "2p − 1", "zb-h1" if micro_batches >= ranks else "1f1b")
    ahead = [2 * (ranks - 1 - rank) for rank in range(ranks)]
    lag = [2 * rank for rank in range(ranks)]
    return put_off("zb-h2", ranks, micro_batches, 1, micro_batches, ahead=ahead, lag=lag, barrier=False)
