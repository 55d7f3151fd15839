"""What the programs of all ranks send and add, counted step by step."""

from fractions import Fraction

from dlojz.by_hand.collectives.algorithm_catalogue import num_chunks, programs
from dlojz.by_hand.collectives.algorithms import IDLE
from dlojz.by_hand.collectives.cost import NONE, Terms


def counted(name: str, size: int, *, per_node: int | None = None) -> Terms:
    """The terms of a collective, counted step by step from the programs of all ranks."""
    chunk = Fraction(1, num_chunks(name, size))
    all_steps = programs(name, size, per_node=per_node)
    total = NONE
    for steps in zip(*all_steps, strict=True):
        busy = [step for step in steps if step != IDLE]
        moved = max(max(len(s.send.chunks) if s.send else 0, len(s.receive.chunks) if s.receive else 0) for s in busy)
        added = max(len(s.receive.chunks) if s.receive and s.receive.add else 0 for s in busy)
        total += Terms(1, moved * chunk, added * chunk)
    return total


def sent_share(name: str, rank: int, size: int, *, per_node: int | None = None) -> Fraction:
    """What one rank sends in all, per byte of the message."""
    steps = programs(name, size, per_node=per_node)[rank]
    return Fraction(sum(len(step.send.chunks) for step in steps if step.send), num_chunks(name, size))
