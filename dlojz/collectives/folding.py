"""How algorithms made for powers of two serve any number of ranks: the surplus is folded in, and out again.

Layer 2. Invariant: of the first 2·surplus ranks each odd one gives all it has to the even one below, sleeps while the
others work under new numbers 0 … power − 1, and gets the result at the end.

Source: Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur et al. 2005, §4–5.
"""

from __future__ import annotations

from collections.abc import Callable

from dlojz.collectives.steps import IDLE, Receive, Send, Step, Steps


def largest_power(size: int) -> int:
    """The largest power of two that is at most `size`."""
    return 1 << size.bit_length() - 1


def folded(
    rank: int, size: int, chunks: tuple[int, ...], core: Callable[[int, list[int]], Steps], num_rounds: int
) -> Steps:
    """The steps of `core`, between those that fold the surplus ranks in and out.

    Args:
        rank: this rank.
        size: number of ranks.
        chunks: all chunks of the message.
        core: steps of the rank with a new number, given the ranks by their new numbers.
        num_rounds: how many steps `core` has.
    """
    surplus = size - largest_power(size)
    awake = [rank for rank in range(size) if rank >= 2 * surplus or rank % 2 == 0]
    if not surplus:
        yield from core(rank, awake)
    elif rank not in awake:
        yield Step(send=Send(rank - 1, chunks))
        yield from [IDLE] * num_rounds
        yield Step(receive=Receive(rank - 1, chunks, add=False))
    else:
        pair = rank + 1 if rank < 2 * surplus else None
        yield IDLE if pair is None else Step(receive=Receive(pair, chunks, add=True))
        yield from core(awake.index(rank), awake)
        yield IDLE if pair is None else Step(send=Send(pair, chunks))
