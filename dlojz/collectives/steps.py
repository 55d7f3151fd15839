"""What an algorithm is made of: one rank's steps, each at most one message out and one message in.

Layer 2. Invariant: a step says whom it speaks to and which chunks move; it holds no data, so that the same program is
simulated on numbers, counted in bytes and run on real ranks.

The message is cut into chunks, numbered from 0. In a step a rank may send and receive at once (full duplex, one port:
the model of Thakur, Rabenseifner & Gropp 2005, §3); what it sends is what it held when the step began.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Send(NamedTuple):
    """One message out.

    Args:
        to: rank that receives it.
        chunks: numbers of the chunks in it, in their order.
    """

    to: int
    chunks: tuple[int, ...]


class Receive(NamedTuple):
    """One message in.

    Args:
        source: rank that sends it.
        chunks: where its chunks go, in the order in which they come.
        add: whether each is added to what is held there, or kept in its place.
    """

    source: int
    chunks: tuple[int, ...]
    add: bool


class Step(NamedTuple):
    """What one rank does in one round; nothing at all is legal, where only other ranks are busy."""

    send: Send | None = None
    receive: Receive | None = None


IDLE = Step()
Steps = Iterator[Step]
