"""All-to-all by pairs: in each round everybody swaps one block with another partner.

Layer 2. Invariant: a rank's place j holds its block for rank j until it has met j, and then j's block for it; seen
over all ranks, the table of blocks is transposed. The pairs are those of a round-robin tournament, so that a swap needs
no second buffer: p − 1 rounds for an even number of ranks; for an odd one p, as one rank rests in each.

Source: pairwise exchange of Thakur, Rabenseifner & Gropp 2005, §4, which for powers of two has the pairs r ↔ r xor k;
the pairs for any p are those of Kirkman 1847 (the "circle method").
"""

from __future__ import annotations

from dlojz.collectives.steps import IDLE, Receive, Send, Step, Steps


def all_to_all(rank: int, size: int) -> Steps:
    """One swap per round, with every other rank once."""
    for step in range(num_rounds(size)):
        partner = _partner(rank, step, size)
        yield IDLE if partner == rank else Step(Send(partner, (partner,)), Receive(partner, (partner,), add=False))


def num_rounds(size: int) -> int:
    """Rounds of the tournament."""
    return size - 1 if size % 2 == 0 else size * (size > 1)


def _partner(rank: int, step: int, size: int) -> int:
    """Whom a rank meets; itself where it rests."""
    odd = size - 1 if size % 2 == 0 else size
    last = size - 1
    if size % 2 == 0 and rank == last:  # the one who keeps its seat meets whoever would meet themselves
        return next(other for other in range(odd) if (2 * other - step) % odd == 0)
    partner = (step - rank) % odd
    return last if partner == rank and size % 2 == 0 else partner
