"""DualPipe and DualPipeV: forward and backward of two directions at once, each hiding the other's communication.

Layer 2. Invariant: a rank serves two sides: its own (phase 0) and the opposite one (phase 1). In DualPipe they are two
pipes in opposite directions, with every stage on two ranks; in DualPipeV ("cut in half") they are the two legs of a V,
with every stage on one rank. Both follow the same eight steps.
"""

from __future__ import annotations

from dlojz.pipeline.orders.writing import Writer, counted, need_even_ranks, need_micro_batches, need_multiple, zigzag
from dlojz.pipeline.schedule import Schedule

Side = tuple[int, int]
"""Stage and pipe."""


def dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """DualPipe: micro-batches 0 to m/2 − 1 go down from rank 0 (pipe 0), the others up from the last rank (pipe 1).

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
        order = Writer(first=(0, half))
        sides = (rank, 0), (ranks - 1 - rank, 1)
        outer = min(rank, ranks - 1 - rank)  # 0 at both ends, p/2 − 1 in the middle
        _steps(order, *(sides if rank < ranks // 2 else sides[::-1]), outer, ranks // 2, half)
        orders.append(order.actions)
    down = tuple(range(ranks))
    return Schedule.of("dualpipe", orders, (down, down[::-1]), micro_batches)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """DualPipeV: DualPipe cut in half, one pipe in a V over p ranks with 2p stages, each on one rank only.

    Raises:
        LabError: for fewer than 2p micro-batches.

    Source: github.com/deepseek-ai/DualPipe, dualpipev.py (after Sea AI Lab's "cut in half"); torch's ScheduleDualPipeV.
    """
    counted("dualpipe-v", ranks=ranks, micro_batches=micro_batches)
    need_micro_batches("dualpipe-v", micro_batches, 2 * ranks, "2p", "zb-v")
    orders = []
    for rank in range(ranks):
        order = Writer()
        _steps(order, (rank, 0), (2 * ranks - 1 - rank, 0), rank, ranks, micro_batches)
        orders.append(order.actions)
    return Schedule.of("dualpipe-v", orders, zigzag(ranks, 2), micro_batches)


def _steps(order: Writer, own: Side, opposite: Side, outer: int, half: int, micro_batches: int) -> None:
    """The eight steps of a rank.

    Args:
        order: where they are written.
        own, opposite: phase 0 and phase 1 of the rank.
        outer: distance of the rank from its end of the pipe; `half` − 1 where the sides meet.
        half: ranks from that end to where the sides meet.
        micro_batches: of each side.
    """
    inner = half - 1 - outer
    for _ in range(2 * inner):
        order.forward(*own)
    for _ in range(outer + 1):
        order.forward(*own)
        order.forward(*opposite)
    for _ in range(inner):
        order.backward_input(*opposite)
        order.weight()
        order.forward(*opposite)
    for number in range(micro_batches - 2 * half + outer + 1):
        if number == 0 and inner == 0:  # where the sides meet: its parts wait for each other's neighbours anyway
            order.forward(*own)
            order.backward(*opposite)
        else:
            order.both(own, opposite)
        order.both(opposite, own)
    for _ in range(inner):
        order.backward(*opposite)
        order.both(opposite, own)
    _drain(order, own, opposite, outer, inner)


def _drain(order: Writer, own: Side, opposite: Side, outer: int, inner: int) -> None:
    """The last backwards, the second half of them for the input only, so that the neighbours wait less."""
    for number in range(2 * (outer + 1)):
        side = own if number % 2 else opposite
        (order.backward_input if number > outer else order.backward)(*side)
    for _ in range(inner):
        order.weight()
        order.backward_input(*own)
    for _ in range(outer + 1):
        order.weight()
