"""Recursive halving and doubling: the bandwidth of the ring in the rounds of a tree.

Layer 2. Invariant: a rank answers for a window of chunks that halves with each round of the first part, until it is one
chunk; the second part undoes the first, round by round. The largest messages go to the nearest ranks.

Source: Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur, Rabenseifner & Gropp 2005, §4–5
(reduce-scatter by recursive vector halving and distance doubling, all-gather by the reverse).
"""

from __future__ import annotations

from dlojz.collectives.folding import folded, largest_power
from dlojz.collectives.steps import Receive, Send, Step, Steps


def all_reduce(rank: int, size: int) -> Steps:
    """2 log₂ p swaps, of a half, a quarter, an eighth … of the message, and back."""
    power = largest_power(size)

    def swaps(number: int, ranks: list[int]) -> Steps:
        window, undo = tuple(range(power)), []
        distance = 1
        while distance < power:
            partner, middle = ranks[number ^ distance], len(window) // 2
            kept, given = window[:middle], window[middle:]
            if number & distance:
                kept, given = given, kept
            yield Step(Send(partner, given), Receive(partner, kept, add=True))
            undo.append((partner, kept, given))
            window, distance = kept, 2 * distance
        for partner, kept, given in reversed(undo):
            yield Step(Send(partner, kept), Receive(partner, given, add=False))

    yield from folded(rank, size, tuple(range(power)), swaps, num_rounds=2 * (power.bit_length() - 1))
