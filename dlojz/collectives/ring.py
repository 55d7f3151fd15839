"""The ring: every rank speaks to its right neighbour only, and all links are busy in every round.

Layer 2. Invariant: after reduce-scatter the rank at place i holds the whole sum of block i, which is where all-gather
begins; all-reduce is nothing but the two, one after the other.

Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", who also show
that no algorithm sends less than 2(p − 1)/p of the message per rank.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlojz.collectives.steps import Receive, Send, Step, Steps

Block = tuple[int, ...]


def reduce_scatter(place: int, ranks: Sequence[int], blocks: Sequence[Block]) -> Steps:
    """Each block travels once round the ring, and every rank it passes adds its own part.

    Args:
        place: this rank's place in the ring.
        ranks: the ring, in its order.
        blocks: the chunks of each place's block; place i ends with the whole sum of `blocks[i]`.
    """
    size = len(ranks)
    left, right = ranks[(place - 1) % size], ranks[(place + 1) % size]
    for step in range(size - 1):
        leaving, arriving = blocks[(place - step - 1) % size], blocks[(place - step - 2) % size]
        yield Step(Send(right, leaving), Receive(left, arriving, add=True))


def all_gather(place: int, ranks: Sequence[int], blocks: Sequence[Block]) -> Steps:
    """Each rank passes on what it received in the step before, beginning with its own block.

    Args:
        place: this rank's place in the ring, who holds `blocks[place]` at the start.
        ranks: the ring, in its order.
        blocks: the chunks of each place's block; all ranks end with all of them.
    """
    size = len(ranks)
    left, right = ranks[(place - 1) % size], ranks[(place + 1) % size]
    for step in range(size - 1):
        leaving, arriving = blocks[(place - step) % size], blocks[(place - step - 1) % size]
        yield Step(Send(right, leaving), Receive(left, arriving, add=False))


def all_reduce(place: int, ranks: Sequence[int], blocks: Sequence[Block]) -> Steps:
    """Reduce-scatter, then all-gather: 2(p − 1) steps, each with one block of 1/p of the message."""
    yield from reduce_scatter(place, ranks, blocks)
    yield from all_gather(place, ranks, blocks)
