"""Simulate collectives: all ranks' programs in lockstep, on plain numbers, with the ranks that contributed to each.

In every step each receive matches one send with as many chunks, and no send is left over; a mismatch, which would hang
on real ranks, is refused with the ranks' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from dlojz.base.language import Sentences
from dlojz.by_hand.collectives.algorithm_catalogue import (
    ADDING,
    algorithm,
    check_size,
    holds_at_start,
    num_chunks,
    programs,
    wanted_at_end,
)
from dlojz.by_hand.collectives.algorithms import IDLE, CollectiveStep

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")


class Held(NamedTuple):
    """Number that one rank holds in one chunk, or None, and the ranks that contributed (twice if added twice)."""

    value: float | None
    ranks: tuple[int, ...]


MAX_RANKS = 128
NOTHING = Held(None, ())
State = tuple[tuple[Held, ...], ...]
"""By rank, then by chunk."""


class Transfer(NamedTuple):
    """Message of a step."""

    source: int
    to: int
    chunks: tuple[int, ...]
    places: tuple[int, ...]
    add: bool


class Simulation(NamedTuple):
    """States of the ranks before the first step and after each, and the messages.

    Args:
        states: one more than there are steps; `states[k][rank][chunk]` after k steps.
    """

    name: str
    size: int
    states: tuple[State, ...]
    transfers: tuple[tuple[Transfer, ...], ...]

    def values(self, step: int = -1) -> list[list[float | None]]:
        """Return the numbers alone, by rank and chunk: after all steps, or after `step` of them."""
        return [[content.value for content in row] for row in self.states[step]]

    def done(self, step: int, rank: int, chunk: int) -> bool:
        """Tell whether what a rank holds in a chunk after `step` steps is part of its result."""
        collective, content = algorithm(self.name).collective, self.states[step][rank][chunk]
        if not wanted_at_end(collective, rank, chunk):
            return False
        if collective in ADDING:
            # Every rank's part exactly once: one added twice would repeat its number.
            return content.ranks == tuple(range(self.size))
        return content.ranks == (chunk,) if collective == "all_to_all" else content.value is not None


def default_values(size: int, chunks: int) -> list[list[float]]:
    """Make numbers that show their origin: 23 is rank 2's chunk 3."""
    return [[10 * rank + chunk for chunk in range(chunks)] for rank in range(size)]


def simulate(name: str, values: Sequence[Sequence[float | None]] | int, *, per_node: int | None = None) -> Simulation:
    """Simulate an algorithm on numbers, step by step.

    Args:
        values: by rank, one number per chunk (`num_chunks(name, size)`); ignored where a rank has nothing at the start
            (all-gather, broadcast). An integer is a number of ranks, with `default_values`.
        per_node: ranks of one node, for `hierarchical_all_reduce`.

    Raises:
        LabError: if the values do not have one row per rank and one number per chunk, or there are over 128 ranks.

    Example:
        >>> simulate("ring_all_reduce", [[1, 2], [10, 20]]).values()
        [[11, 22], [11, 22]]
    """
    if isinstance(values, int):
        values = default_values(_checked(values), num_chunks(name, values))
    size = _checked(len(values))
    chunks = num_chunks(name, size)
    for rank, row in enumerate(values):
        if len(row) != chunks:
            raise phrase.refused(
                "other number of chunks", name=name, size=size, chunks=chunks, rank=rank, received_chunks=len(row)
            )
    collective = algorithm(name).collective
    # [rank][chunk]: the number, and who has contributed to it.
    start = tuple(
        tuple(
            Held(value, (rank,)) if holds_at_start(collective, rank, chunk) else NOTHING
            for chunk, value in enumerate(row)
        )
        for rank, row in enumerate(values)
    )
    states, transfers = lockstep(programs(name, size, per_node=per_node), start)
    return Simulation(name, size, states, transfers)


def _checked(size: int) -> int:
    if check_size(size) > MAX_RANKS:
        raise phrase.refused("too many ranks", size=size, max_ranks=MAX_RANKS)
    return size


def lockstep(
    all_programs: Sequence[Sequence[CollectiveStep]], start: State
) -> tuple[tuple[State, ...], tuple[tuple[Transfer, ...], ...]]:
    """Run programs of all ranks together, from any state.

    Args:
        all_programs: by rank; a shorter one idles at its end.
        start: what each rank holds.

    Returns:
        The states (one more than steps) and the messages of each step.

    Raises:
        LabError: if a message has no partner, or sends what the rank does not hold.
    """
    states, transfers = [start], []
    for number in range(max(map(len, all_programs), default=0)):
        steps = [steps[number] if number < len(steps) else IDLE for steps in all_programs]
        step_transfers = matched(steps, number)
        # All messages of a step leave at once: read from the last state, written into a copy.
        state = [list(row) for row in states[-1]]
        for transfer in step_transfers:
            for chunk, position in zip(transfer.chunks, transfer.places, strict=True):
                payload = states[-1][transfer.source][chunk]  # as it was when the step began
                if payload.value is None:
                    raise phrase.refused("chunk not there", step=number + 1, transfer=transfer, chunk=chunk)
                old_content = state[transfer.to][position]
                # An add into an empty chunk stores what came.
                joined = Held(
                    (old_content.value or 0) + payload.value, tuple(sorted(old_content.ranks + payload.ranks))
                )
                state[transfer.to][position] = joined if transfer.add else payload
        states.append(tuple(map(tuple, state)))
        transfers.append(step_transfers)
    return tuple(states), tuple(transfers)


def matched(steps: Sequence[CollectiveStep], number: int) -> tuple[Transfer, ...]:
    """Match each send of one step with its receive.

    Raises:
        LabError: naming the ranks, if a send or a receive has no partner, or the two differ in length.
    """
    # A rank sends at most one message per step, so (from, to) is a key.
    sends = {(rank, step.send.to): step.send for rank, step in enumerate(steps) if step.send}
    step_transfers = []
    for rank, step in enumerate(steps):
        if step.receive is None:
            continue
        receive = step.receive
        # Taken out: what is left at the end has no receiver.
        send = sends.pop((receive.source, rank), None)
        if send is None:
            raise phrase.refused("nothing received", step=number + 1, rank=rank, receive=receive)
        # Only the lengths must agree: a chunk may be stored under another number.
        if len(send.chunks) != len(receive.chunks):
            raise phrase.refused(
                "other chunks",
                step=number + 1,
                receive=receive,
                chunks=len(send.chunks),
                rank=rank,
                awaited_chunks=len(receive.chunks),
            )
        step_transfers.append(Transfer(receive.source, rank, send.chunks, receive.chunks, receive.add))
    for source, to in sends:
        raise phrase.refused("not received", step=number + 1, source=source, to=to)
    return tuple(sorted(step_transfers))
