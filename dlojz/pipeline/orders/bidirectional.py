"""Orders that run the pipeline in two directions or in waves: Chimera, DualPipe, Hanayo.

**Chimera**: two pipes in opposite directions over the same ranks, each filling the other’s bubbles. Every stage is on
two ranks (s in the pipe down, p − 1 − s in the pipe up), whose weight gradients are summed before the optimizer.
Micro-batches 0 to m/2 − 1 go down (pipe 0), m/2 to m − 1 up (pipe 1).

**DualPipe and DualPipeV** run forward and backward of two directions at once, each hiding the other's communication. A
rank serves its own side (phase 0) and the opposite one (phase 1): in DualPipe two pipes in opposite directions, with
every stage on two ranks; in DualPipeV ("cut in half") the two legs of a V, with every stage on one rank. Both follow
the same eight steps.

**Hanayo** runs chunks to and fro over the ranks in waves, without a second copy of the weights. With W waves a rank
holds 2W chunks, placed 0…p−1, p−1…0, …; where a wave turns, no message is sent. The order is a list schedule: a free
rank takes what has arrived, a backward before any forward.
"""

from __future__ import annotations

import heapq

from dlojz.pipeline.orders.synchronous import (
    OrderBuilder,
    counted,
    need_even_ranks,
    need_micro_batches,
    need_multiple,
    zigzag,
)
from dlojz.pipeline.schedule import BACKWARD, FORWARD, Action, Costs, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS


def chimera(ranks: int, micro_batches: int) -> Schedule:
    """Order Chimera with one pair of pipes: units of p micro-batches, half of them down and half up.

    In the pipe down, micro-batch j < p/2 of a unit has its forward at slot 2j + s and its backward at slot
    2j + 2p − 1 − s on stage s, which is on rank s; the pipe up is its mirror image. A rank runs its actions in the
    order of their slots; the next unit comes 2p slots later. Units are put one behind the other directly: with B > F
    and several units that leaves bubbles in between, for which the paper doubles the forwards instead.

    Raises:
        LabError: for an odd number of ranks, or micro-batches that are no multiple of it.

    Source: Li and Hoefler 2021 (arXiv 2107.06925), §3.
    """
    counted("chimera", ranks=ranks, micro_batches=micro_batches)
    need_even_ranks("chimera", ranks, "1f1b")
    need_multiple("chimera", micro_batches, ranks, ("a unit is p of them", "une unité en compte p"))
    half = ranks // 2
    orders = []
    for rank in range(ranks):
        slots: dict[int, Action] = {}
        for pipe, stage in enumerate((rank, ranks - 1 - rank)):
            for number in range(micro_batches // 2):
                # Slot of its forward on stage 0; a unit takes 2p slots.
                start = 2 * (number % half) + 2 * ranks * (number // half)
                micro_batch = number + pipe * (micro_batches // 2)
                # The two pipes never ask for one slot of a rank, as p is even and units come 2p slots apart.
                slots[start + stage] = Action(FORWARD, stage, micro_batch, pipe)
                slots[start + 2 * ranks - 1 - stage] = Action(BACKWARD, stage, micro_batch, pipe)
        orders.append([slots[slot] for slot in sorted(slots)])
    down = tuple(range(ranks))
    return Schedule.of("chimera", orders, (down, down[::-1]), micro_batches)


Side = tuple[int, int]
"""Stage and pipe."""


def dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """Order DualPipe: micro-batches 0 to m/2 − 1 go down from rank 0 (pipe 0), the others up from the last (pipe 1).

    Raises:
        LabError: for an odd number of ranks, an odd number of micro-batches, or fewer than 2p of them.

    Source: DeepSeek-AI 2024 (DeepSeek-V3, arXiv 2412.19437), §3.2.1, Fig. 5; github.com/deepseek-ai/DualPipe,
    dualpipe.py.
    """
    counted("dualpipe", ranks=ranks, micro_batches=micro_batches)
    need_even_ranks("dualpipe", ranks, "dualpipe-v")
    need_micro_batches("dualpipe", micro_batches, 2 * ranks, "2p", "1f1b")
    need_multiple("dualpipe", micro_batches, 2, ("half go each way", "une moitié dans chaque sens"))
    half = micro_batches // 2
    orders = []
    for rank in range(ranks):
        order = OrderBuilder(first_micro_batches=(0, half))
        sides = (rank, 0), (ranks - 1 - rank, 1)
        outer = min(rank, ranks - 1 - rank)  # 0 at both ends, p/2 − 1 in the middle
        # Ranks of the second half serve the pipe up first.
        _steps(order, *(sides if rank < ranks // 2 else sides[::-1]), outer, ranks // 2, half)
        orders.append(order.actions)
    down = tuple(range(ranks))
    return Schedule.of("dualpipe", orders, (down, down[::-1]), micro_batches)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """Order DualPipeV: DualPipe cut in half, one pipe in a V over p ranks with 2p stages, each on one rank only.

    Raises:
        LabError: for fewer than 2p micro-batches.

    Source: github.com/deepseek-ai/DualPipe, dualpipev.py (after Sea AI Lab's "cut in half"); torch's ScheduleDualPipeV.
    """
    counted("dualpipe-v", ranks=ranks, micro_batches=micro_batches)
    need_micro_batches("dualpipe-v", micro_batches, 2 * ranks, "2p", "zb-v")
    orders = []
    for rank in range(ranks):
        order = OrderBuilder()
        _steps(order, (rank, 0), (2 * ranks - 1 - rank, 0), rank, ranks, micro_batches)
        orders.append(order.actions)
    return Schedule.of("dualpipe-v", orders, zigzag(ranks, 2), micro_batches)


def _steps(order: OrderBuilder, near_side: Side, far_side: Side, outer: int, half: int, micro_batches: int) -> None:
    """Write the eight steps of a rank.

    Args:
        near_side, far_side: phase 0 and phase 1 of the rank.
        outer: distance of the rank from its end of the pipe; `half` − 1 where the sides meet.
        half: ranks from that end to where the sides meet.
        micro_batches: of each side.
    """
    # Ranks between this one and where the sides meet. Steps are named as in dualpipe.py.
    inner = half - 1 - outer
    # Step 1: nF0.
    for _ in range(2 * inner):
        order.forward(*near_side)
    # Step 2: nF0F1.
    for _ in range(outer + 1):
        order.forward(*near_side)
        order.forward(*far_side)
    # Step 3: nB1W1F1, the backward split.
    for _ in range(inner):
        order.backward_input(*far_side)
        order.weight()
        order.forward(*far_side)
    # Step 4: nF0B1F1B0, the overlapped pairs.
    for number in range(micro_batches - 2 * half + outer + 1):
        if number == 0 and inner == 0:  # where the sides meet: its parts wait for each other's neighbours anyway
            order.forward(*near_side)
            order.backward(*far_side)
        else:
            order.both(near_side, far_side)
        order.both(far_side, near_side)
    # Step 5: nB1F1B0.
    for _ in range(inner):
        order.backward(*far_side)
        order.both(far_side, near_side)
    _drain(order, near_side, far_side, outer, inner)


def _drain(order: OrderBuilder, near_side: Side, far_side: Side, outer: int, inner: int) -> None:
    """The last backwards, the second half of them for the input only, so that the neighbours wait less."""
    # Step 6: nB1B0, the second half of them split.
    for number in range(2 * (outer + 1)):
        side = near_side if number % 2 else far_side
        (order.backward_input if number > outer else order.backward)(*side)
    # Step 7: nWB0.
    for _ in range(inner):
        order.weight()
        order.backward_input(*near_side)
    # Step 8: nW.
    for _ in range(outer + 1):
        order.weight()


def hanayo(ranks: int, micro_batches: int, waves: int = 1, costs: Costs = UNIT_COSTS) -> Schedule:
    """Order Hanayo's waves, at most p micro-batches in flight.

    A free rank takes the backward that has arrived, else the forward; of several the oldest micro-batch, then the
    deepest stage. This is our reading of the paper, which gives the rule but no table of orders.

    Args:
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
        key = (kind == FORWARD, micro_batch, -stage)
        heapq.heappush(arrived[placement[stage]], (*key, Action(kind, stage, micro_batch)))

    num_entered = min(ranks, micro_batches)
    for micro_batch in range(num_entered):
        arrive(FORWARD, 0, micro_batch)
    clock = 0.0
    while True:
        for rank in sorted(idle):
            if arrived[rank]:
                action = heapq.heappop(arrived[rank])[-1]
                orders[rank].append(action)
                idle.remove(rank)
                heapq.heappush(running, (clock + times[action.kind][action.stage], rank, action))
        if not running:
            return Schedule.of("hanayo", orders, placement, micro_batches)
        clock = running[0][0]
        # All that end at this moment, before any rank chooses again.
        while running and running[0][0] <= clock:
            _, rank, action = heapq.heappop(running)
            idle.add(rank)
            kind, stage, micro_batch = action[:3]
            if kind == FORWARD and stage < stages - 1:
                arrive(FORWARD, stage + 1, micro_batch)
            elif kind == FORWARD or stage:
                # After the last stage's forward its own backward, else the stage before.
                arrive(BACKWARD, stage - (kind == BACKWARD), micro_batch)
            elif num_entered < micro_batches:
                arrive(FORWARD, 0, num_entered)
                num_entered += 1
