"""Zero-bubble schedule in a V: two chunks per rank, of which the second runs back the way of the first (ZB-V).

Layer 2. Invariant: rank r holds stages r and 2p − 1 − r, so that the last rank turns round without a message and the
first rank sees both the input and the loss: every rank keeps the same number of activations.
"""

from __future__ import annotations

from dlojz.pipeline.orders.writing import Writer, counted, zigzag
from dlojz.pipeline.schedule import Schedule


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """ZB-V: no bubble on any rank for F = I = W, with 1F1B's peak memory (p micro-batches) on every rank.

    With a and b the two chunks of rank r: 2(p − r) − 1 forwards a; r × (F b, F a); (p − r) × (F b, I b, W b); then
    (F a, I a, W a), (F b, I b, W b) in turn; r × (I a, I b), (p − r) × (I a, W a), then the weight gradients that
    remain, b before a. With fewer than 2p − 1 micro-batches, what is written for the missing ones is left out.

    Source: Qi et al. 2024 (arXiv 2401.10241), §6; torch's ScheduleZBVZeroBubble.
    """
    counted("zb-v", ranks=ranks, micro_batches=micro_batches)
    padded = max(2 * ranks - 1, micro_batches)
    orders = []
    for rank in range(ranks):
        order = _order(rank, ranks, padded)
        orders.append([action for action in order.actions if action.micro_batch < micro_batches])
    return Schedule.of("zb-v", orders, zigzag(ranks, 2), micro_batches, barrier=False)


def _order(rank: int, ranks: int, micro_batches: int) -> Writer:
    order = Writer()
    first, second = rank, 2 * ranks - 1 - rank

    def step(stage: int) -> None:
        order.forward(stage)
        order.backward_input(stage)
        order.weight(stage)

    for _ in range(2 * (ranks - rank) - 1):
        order.forward(first)
    for _ in range(rank):
        order.forward(second)
        order.forward(first)
    for _ in range(ranks - rank):
        step(second)
    forwards = 2 * ranks - 1 - rank  # of the first chunk so far; of the second: p
    for _ in range(micro_batches - ranks):
        if forwards < micro_batches:
            order.forward(first)
            forwards += 1
        order.backward_input(first)
        order.weight(first)
        step(second)
    for _ in range(rank):
        order.backward_input(first)
        order.backward_input(second)
    for _ in range(ranks - rank):
        order.backward_input(first)
        order.weight(first)
    for stage in (second, first):
        for _ in range(micro_batches):
            order.weight(stage)
    return order
