"""Hanayo: chunks that run to and fro over the ranks in waves, without a second copy of the weights.

Layer 2. Invariant: with W waves a rank holds 2W chunks, placed 0…p−1, p−1…0, …; where a wave turns, no message is sent.
The order is a list schedule: whoever is free takes what has arrived, a backward before any forward.
"""

from __future__ import annotations

import heapq

from dlojz.pipeline.action import BACKWARD, FORWARD, Action
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.orders.writing import counted, zigzag
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import UNIT_COSTS

_BACKWARD_FIRST = {BACKWARD: 0, FORWARD: 1}


def hanayo(ranks: int, micro_batches: int, waves: int = 1, costs: Costs = UNIT_COSTS) -> Schedule:
    """Hanayo's waves, at most p micro-batches in flight.

    A free rank takes the backward that has arrived, else the forward; of several the oldest micro-batch, and of that
    the deepest stage. This is our reading of the paper, which gives the rule but no table of orders.

    Args:
        ranks: number of ranks p.
        micro_batches: any number; the paper runs p at a time.
        waves: W, at least 1; a rank holds 2W chunks.
        costs: times of forward and backward with which the order is found (latency is left out).

    Source: Liu et al. 2023 (arXiv 2308.15762).
    """
    counted("hanayo", ranks=ranks, micro_batches=micro_batches, waves=waves)
    placement = zigzag(ranks, 2 * waves)
    stages = len(placement)
    times = {FORWARD: costs.per_stage("forward", stages), BACKWARD: costs.per_stage("backward", stages)}
    arrived: list[list[tuple[int, int, int, Action]]] = [[] for _ in range(ranks)]
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    running: list[tuple[float, int, Action]] = []
    idle = set(range(ranks))

    def arrive(kind: str, stage: int, micro_batch: int) -> None:
        key = (_BACKWARD_FIRST[kind], micro_batch, -stage)
        heapq.heappush(arrived[placement[stage]], (*key, Action(kind, stage, micro_batch)))

    entered = min(ranks, micro_batches)
    for micro_batch in range(entered):
        arrive(FORWARD, 0, micro_batch)
    now = 0.0
    while True:
        for rank in sorted(idle):
            if arrived[rank]:
                action = heapq.heappop(arrived[rank])[-1]
                orders[rank].append(action)
                idle.remove(rank)
                heapq.heappush(running, (now + times[action.kind][action.stage], rank, action))
        if not running:
            return Schedule.of("hanayo", orders, placement, micro_batches)
        now = running[0][0]
        while running and running[0][0] <= now:
            _, rank, action = heapq.heappop(running)
            idle.add(rank)
            kind, stage, micro_batch = action[:3]
            if kind == FORWARD and stage < stages - 1:
                arrive(FORWARD, stage + 1, micro_batch)
            elif kind == FORWARD or stage:
                arrive(BACKWARD, stage - (kind == BACKWARD), micro_batch)
            elif entered < micro_batches:
                arrive(FORWARD, 0, entered)
                entered += 1
