"""TeraPipe: a pipeline over slices of each sequence, which is finer than one over micro-batches.

Layer 2. Invariant: within a sequence, forwards run from the first token on, because a causal attention looks back only,
and backwards from the last token on, because what a slice owes to its keys and values comes from the slices behind it.
"""

from __future__ import annotations

from dlojz.pipeline.action import BACKWARD, FORWARD, Action
from dlojz.pipeline.orders.writing import counted
from dlojz.pipeline.schedule import Schedule


def terapipe(ranks: int, micro_batches: int, token_slices: int) -> Schedule:
    """GPipe over (micro-batch, token slice): all forwards, then all backwards, on every rank.

    Forwards: micro-batch after micro-batch, its slices in order; backwards: micro-batch after micro-batch, its slices
    in reverse. A rank keeps everything, like GPipe. Each boundary is passed by as many bytes as in GPipe, in
    `token_slices` times as many messages. The times of the slices are `Costs.slice_times`; which lengths are best,
    `token_slices.plan_slices` tells. Needs a causal attention.

    Source: Li et al. 2021, TeraPipe (arXiv 2102.07988), §3.2.

    Raises:
        LabError: for fewer than one rank, micro-batch or slice.
    """
    counted("terapipe", ranks=ranks, micro_batches=micro_batches, token_slices=token_slices)
    slices = range(token_slices)
    orders = [
        [Action(FORWARD, rank, one, token_slice=part) for one in range(micro_batches) for part in slices]
        + [Action(BACKWARD, rank, one, token_slice=part) for one in range(micro_batches) for part in reversed(slices)]
        for rank in range(ranks)
    ]
    return Schedule.of("terapipe", orders, list(range(ranks)), micro_batches, token_slices=token_slices)
