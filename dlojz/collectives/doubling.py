"""Recursive doubling: partners at distance 1, 2, 4 … swap all they have, and both add.

Layer 2. Invariant: after the round of distance d a rank holds the sum over the 2d ranks whose numbers differ from its
own in the bits below 2d only. Fewest rounds of all, but each moves the whole message: for short messages.

Source: Thakur, Rabenseifner & Gropp 2005, §4–5.
"""

from __future__ import annotations

from dlojz.collectives.folding import folded, largest_power
from dlojz.collectives.steps import Receive, Send, Step, Steps

WHOLE = (0,)


def all_reduce(rank: int, size: int) -> Steps:
    """log₂ p swaps of the whole message."""
    power = largest_power(size)

    def swaps(number: int, ranks: list[int]) -> Steps:
        distance = 1
        while distance < power:
            partner = ranks[number ^ distance]
            yield Step(Send(partner, WHOLE), Receive(partner, WHOLE, add=True))
            distance *= 2

    yield from folded(rank, size, WHOLE, swaps, num_rounds=power.bit_length() - 1)
