"""Schedules with one stage per rank whose weights wait for the whole batch: naive, GPipe, 1F1B and eager 1F1B.

Layer 2. Invariant: stage s is on rank s; each rank passes every micro-batch forward once, backward once, whole. The
schedules differ only in how many forwards a rank runs ahead of its backwards: 1, all, p − r, or 2(p − r) − 1.
"""

from __future__ import annotations

from dlojz.pipeline.action import BACKWARD, FORWARD, Action
from dlojz.pipeline.orders.writing import Writer, counted
from dlojz.pipeline.schedule import Schedule


def naive(ranks: int, micro_batches: int) -> Schedule:
    """Naive model parallelism: one micro-batch at a time through all stages and back; one rank works, all others wait.

    Source: Huang et al. 2019 (GPipe, arXiv 1811.06965), Fig. 2b.
    """
    return _ahead("naive", ranks, micro_batches, [1] * ranks)


def gpipe(ranks: int, micro_batches: int, *, lifo: bool = False) -> Schedule:
    """GPipe: all forwards, then all backwards.

    Args:
        ranks: number of ranks, and of stages.
        micro_batches: any number; every rank keeps the activations of all of them.
        lifo: backwards begin with the last micro-batch (the paper's figure) rather than with the first (torch).

    Source: Huang et al. 2019 (arXiv 1811.06965), §2.3 and Fig. 2c.
    """
    counted("gpipe", ranks=ranks, micro_batches=micro_batches)
    numbers = range(micro_batches)
    backwards = numbers[::-1] if lifo else numbers
    orders = [
        [Action(FORWARD, rank, number) for number in numbers] + [Action(BACKWARD, rank, number) for number in backwards]
        for rank in range(ranks)
    ]
    return Schedule.of("gpipe", orders, range(ranks), micro_batches)


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """1F1B (DAPPLE, PipeDream-Flush): rank r runs min(p − r, m) forwards, then one backward, one forward in turn.

    Its bubble is GPipe's; what it saves is memory: rank r keeps at most min(p − r, m) micro-batches.

    Sources: Fan et al. 2021 (DAPPLE, arXiv 2007.01045); Narayanan et al. 2021 (PipeDream-Flush, arXiv 2006.09503)
    and Megatron-LM (arXiv 2104.04473), §2.2.
    """
    return _ahead("1f1b", ranks, micro_batches, [ranks - rank for rank in range(ranks)])


def eager_one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Eager 1F1B: min(2(p − r) − 1, m) forwards first, so that a message has the time of one more action to travel.

    Without latency it lasts as long as 1F1B and keeps nearly twice as much; with latency it loses 2(p − 1) hops only.

    Source: Zhuang et al. 2023 (arXiv 2211.05322); DAPPLE's policy P_B (arXiv 2007.01045).
    """
    return _ahead("eager-1f1b", ranks, micro_batches, [2 * (ranks - rank) - 1 for rank in range(ranks)])


def deepspeed_train_schedule(ranks: int, micro_batches: int) -> Schedule:
    """DeepSpeed's TrainSchedule, from its slots: stage s runs F_i at slot 2i + s and B_i at slot 2i + 2p − 1 − s.

    The order is that of 1F1B; in DeepSpeed sends block besides (`Costs.sends`).

    Source: deepspeed/runtime/pipe/schedule.py, class TrainSchedule.
    """
    counted("deepspeed", ranks=ranks, micro_batches=micro_batches)
    orders = []
    for rank in range(ranks):
        slots = {2 * number + rank: Action(FORWARD, rank, number) for number in range(micro_batches)}
        slots |= {2 * (number + ranks) - 1 - rank: Action(BACKWARD, rank, number) for number in range(micro_batches)}
        orders.append([slots[slot] for slot in sorted(slots)])
    return Schedule.of("1f1b", orders, range(ranks), micro_batches)


def _ahead(name: str, ranks: int, micro_batches: int, ahead: list[int]) -> Schedule:
    """So many forwards first, then backward and forward in turn, then the backwards that remain."""
    counted(name, ranks=ranks, micro_batches=micro_batches)
    orders = []
    for rank in range(ranks):
        first = min(ahead[rank], micro_batches)
        order = Writer()
        for _ in range(first):
            order.forward(rank)
        for _ in range(micro_batches - first):
            order.backward(rank)
            order.forward(rank)
        for _ in range(first):
            order.backward(rank)
        orders.append(order.actions)
    return Schedule.of(name, orders, range(ranks), micro_batches)
