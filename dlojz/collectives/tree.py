"""The binomial tree: few rounds, but each moves the whole message, and half of the ranks have nothing to do.

Layer 2. Invariant: in the round of distance d, the ranks that are odd multiples of d speak to the rank d below them;
rank 0 is the root.

Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH", §4.
"""

from __future__ import annotations

from dlojz.collectives.steps import IDLE, Receive, Send, Step, Steps

WHOLE = (0,)


def reduce(rank: int, size: int) -> Steps:
    """Every rank adds its children's sums to its own, then sends all to its parent: leaves first."""
    distance = 1
    while distance < size:
        if rank % (2 * distance) == distance:
            yield Step(send=Send(rank - distance, WHOLE))
        elif rank % (2 * distance) == 0 and rank + distance < size:
            yield Step(receive=Receive(rank + distance, WHOLE, add=True))
        else:
            yield IDLE
        distance *= 2


def broadcast(rank: int, size: int) -> Steps:
    """The same tree from its root: the number of ranks that know the message doubles with each round."""
    distance = 1 << (size - 1).bit_length() >> 1
    while distance:
        if rank % (2 * distance) == distance:
            yield Step(receive=Receive(rank - distance, WHOLE, add=False))
        elif rank % (2 * distance) == 0 and rank + distance < size:
            yield Step(send=Send(rank + distance, WHOLE))
        else:
            yield IDLE
        distance //= 2


def all_reduce(rank: int, size: int) -> Steps:
    """Reduce to rank 0, then broadcast from it."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)
