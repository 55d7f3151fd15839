"""Chimera: two pipes in opposite directions over the same ranks, so that one fills the other's bubbles.

Layer 2. Invariant: every stage lives on two ranks (s in the pipe down, p − 1 − s in the pipe up), whose weight
gradients are summed before the optimizer. Micro-batches 0 to m/2 − 1 go down (pipe 0), m/2 to m − 1 up (pipe 1).
"""

from __future__ import annotations

from dlojz.pipeline.action import BACKWARD, FORWARD, Action
from dlojz.pipeline.orders.writing import counted, need_even_ranks, need_multiple
from dlojz.pipeline.schedule import Schedule


def chimera(ranks: int, micro_batches: int) -> Schedule:
    """Chimera with one pair of pipes: units of p micro-batches, half of them down and half up.

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
                start = 2 * (number % half) + 2 * ranks * (number // half)
                micro_batch = number + pipe * (micro_batches // 2)
                slots[start + stage] = Action(FORWARD, stage, micro_batch, pipe)
                slots[start + 2 * ranks - 1 - stage] = Action(BACKWARD, stage, micro_batch, pipe)
        orders.append([slots[slot] for slot in sorted(slots)])
    down = tuple(range(ranks))
    return Schedule.of("chimera", orders, (down, down[::-1]), micro_batches)
