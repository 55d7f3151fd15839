"""BPipe: 1F1B whose first ranks lend activations to its last ones, so that all ranks need about the same memory.

Layer 2. Invariant: the computation is 1F1B's, action for action; between them stand evictions and loads, as many of the
one as of the other, and no rank keeps more than ⌈(p + 2) / 2⌉ micro-batches where transfers take no time.
"""

from __future__ import annotations

from dlojz.pipeline.action import BACKWARD, EVICT, FORWARD, LOAD, Action
from dlojz.pipeline.orders.flush import one_f_one_b
from dlojz.pipeline.orders.writing import counted
from dlojz.pipeline.schedule import Schedule


def bpipe(ranks: int, micro_batches: int) -> Schedule:
    """1F1B with evictions: rank r sends activations to rank p − 1 − r, and has them back before their backward.

    In 1F1B rank r keeps min(p − r, m) micro-batches, its partner r + 1: p + 1 together, however uneven. A rank that
    would keep more than `most_kept` evicts its latest micro-batch, whose backward is the farthest away, as soon as its
    forward is done, so that the transfer has a backward's time to pass; it loads it back just before the forward that
    precedes its backward, so that this forward hides the transfer. Each of both sends one stage's activations of one
    micro-batch (rank r to p − 1 − r, then back), which wants a fast link between the two.

    The simulator lets nobody wait for an eviction to arrive: with a slow link a rank's peak rises by what is still
    under way. A backward does wait for its load.

    Source: Kim et al. 2023, BPipe: Memory-Balanced Pipeline Parallelism for Training Large Language Models (ICML), §3;
    where exactly evictions and loads stand between the actions of 1F1B is ours.

    Raises:
        LabError: for fewer than one rank or micro-batch.
    """
    counted("bpipe", ranks=ranks, micro_batches=micro_batches)
    limit = most_kept(ranks)
    plain = one_f_one_b(ranks, micro_batches)
    orders = [_evicting(list(order), rank, limit) for rank, order in enumerate(plain.orders)]
    return Schedule.of("bpipe", orders, list(range(ranks)), micro_batches)


def most_kept(ranks: int) -> int:
    """⌈(p + 2) / 2⌉: micro-batches that no rank of BPipe exceeds.

    A pair shares p + 1, and one micro-batch is with both while evictions and loads pass each other (derived; Kim et al.
    2023 state the bound).
    """
    return (ranks + 3) // 2


def _evicting(order: list[Action], stage: int, limit: int) -> list[Action]:
    """The same order with evictions and loads, so that at most `limit` micro-batches are here at a time."""
    done: list[Action] = []
    here: list[int] = []  # in the order of their forwards
    away: list[int] = []

    def evict() -> None:
        victim = here.pop()
        away.append(victim)
        done.insert(done.index(Action(FORWARD, stage, victim)) + 1, Action(EVICT, stage, victim))

    def load(micro_batch: int) -> None:
        away.remove(micro_batch)
        here.insert(0, micro_batch)  # its backward is the next
        done.append(Action(LOAD, stage, micro_batch))

    for number, action in enumerate(order):
        if action.kind == FORWARD:
            following = next((one.micro_batch for one in order[number:] if one.kind == BACKWARD), None)
            wanted = following in away and order[number + 1].kind == BACKWARD
            while len(here) + 1 + wanted > limit:
                evict()
            if wanted and following is not None:
                load(following)
            here.append(action.micro_batch)
        done.append(action)
        if action.kind == BACKWARD:
            here.remove(action.micro_batch)
            if all(one.kind == BACKWARD for one in order[number + 1 :]):  # the drain: only backwards are left
                while away and len(here) < limit:
                    load(min(away))
    return done
