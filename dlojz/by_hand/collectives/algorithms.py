"""Algorithms of the collectives: ring, tree, halving, doubling, hierarchical, pairwise; one rank's steps of each.

A step is at most one message out and one message in; it names ranks and chunks and holds no data, so that the same
program is simulated on numbers, counted in bytes and run on real ranks. The message is cut into chunks, numbered from
0. A rank may send and receive at once (full duplex, one port: the model of Thakur, Rabenseifner & Gropp 2005,
"Optimization of collective communication operations in MPICH", §3); it sends what it held when the step began.

- Ring: every rank sends to its right neighbour, and all links are busy in every round. After reduce-scatter the rank at
  place i holds the whole sum of block i, where all-gather begins; all-reduce is the two, one after the other. Source:
  Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", who also show that no
  algorithm sends less than 2(p − 1)/p of the message per rank.
- Binomial tree: few rounds, but each moves the whole message, and half of the ranks are idle. In the round of distance
  d, the ranks that are odd multiples of d exchange with the rank d below them; rank 0 is the root. Source: Thakur et
  al. 2005, §4.
- Two levels: only 1/g of the message leaves each GPU of a node of g. Node k holds the ranks k·g … k·g + g − 1; after
  the first part the i-th rank of a node holds shard i, which it reduces with the i-th ranks of all other nodes.
  Source: Mikami et al. 2018 (arXiv 1811.05233), "2D-torus all-reduce"; Jia et al. 2018 (arXiv 1807.11205), with a
  reduce and a broadcast inside the node.
- All-to-all by pairs: in each round everybody swaps one block with another partner, so that a swap needs no second
  buffer: p − 1 rounds for an even number of ranks; p for an odd one, as one rank rests in each. Source: pairwise
  exchange of Thakur et al. 2005, §4, whose pairs are r ↔ r xor k for powers of two; for any p the round-robin
  tournament of Kirkman 1847 (the "circle method").
- Folding, for numbers of ranks that are no power of two: of the first 2·surplus ranks each odd one gives all it has to
  the even one below, waits while the others work under new numbers, and gets the result at the end. Source:
  Rabenseifner 2004, "Optimization of collective reduction operations"; Thakur et al. 2005, §4–5.
- Recursive halving and doubling: the bandwidth of the ring in the rounds of a tree. A rank's window of chunks halves
  with each round of the first part, until it is one chunk; the second part undoes the first. The largest messages go
  to the nearest ranks. Source: as for folding.
- Recursive doubling: partners at distance 1, 2, 4 … swap all they have, and both add. Fewest rounds of all, but each
  moves the whole message: for short messages. Source: Thakur et al. 2005, §4–5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple


class Send(NamedTuple):
    """Message out.

    Args:
        chunks: numbers of the chunks in it, in their order.
    """

    to: int
    chunks: tuple[int, ...]


class Receive(NamedTuple):
    """Message in.

    Args:
        chunks: places of its chunks, in their order.
        add: whether each is added to what is held there, or replaces it.
    """

    source: int
    chunks: tuple[int, ...]
    add: bool


class CollectiveStep(NamedTuple):
    """Step of one rank in one round; empty where only other ranks are busy."""

    send: Send | None = None
    receive: Receive | None = None


IDLE = CollectiveStep()
Steps = Iterator[CollectiveStep]

Block = tuple[int, ...]


def reduce_scatter(position: int, ranks: Sequence[int], blocks: Sequence[Block]) -> Steps:
    """Reduce-scatter on a ring: each block travels round, and every rank it passes adds its own part.

    Args:
        blocks: the chunks of each place's block; place i ends with the whole sum of `blocks[i]`.
    """
    size = len(ranks)
    left_rank, right_rank = ranks[(position - 1) % size], ranks[(position + 1) % size]
    # p − 1 steps; in each one block goes out and one comes in (1/p of the message, where blocks are equal).
    for step in range(size - 1):
        # Block i leaves position i + 1 in step 0, and reaches position i in the last step with all p parts added.
        leaving, arriving = blocks[(position - step - 1) % size], blocks[(position - step - 2) % size]
        yield CollectiveStep(Send(right_rank, leaving), Receive(left_rank, arriving, add=True))


def all_gather(position: int, ranks: Sequence[int], blocks: Sequence[Block]) -> Steps:
    """All-gather on a ring: each rank passes on what it received in the step before, beginning with its own block.

    Args:
        position: this rank's place in the ring, who holds `blocks[position]` at the start.
        blocks: the chunks of each place's block; all ranks end with all of them.
    """
    size = len(ranks)
    left_rank, right_rank = ranks[(position - 1) % size], ranks[(position + 1) % size]
    # Step 0: this position's own block; step s: the one that came in step s − 1.
    for step in range(size - 1):
        leaving, arriving = blocks[(position - step) % size], blocks[(position - step - 1) % size]
        yield CollectiveStep(Send(right_rank, leaving), Receive(left_rank, arriving, add=False))


def ring_all_reduce(position: int, ranks: Sequence[int], blocks: Sequence[Block]) -> Steps:
    """All-reduce on a ring: reduce-scatter, then all-gather, 2(p − 1) steps with 1/p of the message each.

    In step s of the reduce-scatter, place r sends block r − s, so that it ends with the whole sum of block r + 1.
    """
    turned = [*blocks[1:], *blocks[:1]]
    yield from reduce_scatter(position, ranks, turned)
    yield from all_gather(position, ranks, turned)


WHOLE = (0,)


def reduce(rank: int, size: int) -> Steps:
    """Reduce up the tree: every rank adds its children's sums to its own, then sends all to its parent."""
    distance = 1
    while distance < size:
        # An odd multiple of `distance`: a child, which sends its subtree's sum and is done.
        if rank % (2 * distance) == distance:
            yield CollectiveStep(send=Send(rank - distance, WHOLE))
        # A parent; for p no power of two the last child may be missing.
        elif rank % (2 * distance) == 0 and rank + distance < size:
            yield CollectiveStep(receive=Receive(rank + distance, WHOLE, add=True))
        else:
            yield IDLE
        distance *= 2


def broadcast(rank: int, size: int) -> Steps:
    """Broadcast down the tree: the number of ranks that have the message doubles with each round."""
    # The largest power of two below p, 0 for one rank: the tree is walked from its root.
    distance = 1 << (size - 1).bit_length() >> 1
    while distance:
        if rank % (2 * distance) == distance:
            yield CollectiveStep(receive=Receive(rank - distance, WHOLE, add=False))
        elif rank % (2 * distance) == 0 and rank + distance < size:
            yield CollectiveStep(send=Send(rank + distance, WHOLE))
        else:
            yield IDLE
        distance //= 2


def tree_all_reduce(rank: int, size: int) -> Steps:
    """All-reduce by a tree: reduce to rank 0, then broadcast from it."""
    yield from reduce(rank, size)
    yield from broadcast(rank, size)


def hierarchical_all_reduce(rank: int, size: int, per_node: int) -> Steps:
    """All-reduce on two levels of rings: reduce-scatter inside the node, all-reduce across, all-gather inside."""
    num_nodes = size // per_node
    node, position = divmod(rank, per_node)
    # Node's ranks in order; `across`: the ranks at the same position of every node.
    inside = [node * per_node + local_rank for local_rank in range(per_node)]
    across = [peer_node * per_node + position for peer_node in range(num_nodes)]
    # p chunks: shard i is chunks i·m … i·m + m − 1 for m nodes, one chunk per node for the ring across.
    shards = [tuple(range(shard * num_nodes, (shard + 1) * num_nodes)) for shard in range(per_node)]
    # g − 1 steps with 1/g of the message, inside the node.
    yield from reduce_scatter(position, inside, shards)
    # 2(m − 1) steps with 1/p of the message: this rank's shard alone crosses nodes.
    yield from ring_all_reduce(node, across, [(chunk,) for chunk in shards[position]])
    # g − 1 steps with 1/g again.
    yield from all_gather(position, inside, shards)


def default_per_node(size: int) -> int:
    """Default ranks per node: the largest divisor of `size` that is at most 4 and leaves two nodes."""
    return max((number for number in range(1, 5) if size % number == 0 and number < size), default=1)


def all_to_all(rank: int, size: int) -> Steps:
    """All-to-all by pairs: one swap per round, with every other rank once."""
    for step in range(num_rounds(size)):
        partner = _partner(rank, step, size)
        # 1/p of the message: chunk `partner` leaves, and the partner's chunk for this rank takes its place.
        yield (
            IDLE
            if partner == rank
            else CollectiveStep(Send(partner, (partner,)), Receive(partner, (partner,), add=False))
        )


def num_rounds(size: int) -> int:
    """Count the rounds of the tournament."""
    return size - 1 if size % 2 == 0 else size * (size > 1)


def _partner(rank: int, step: int, size: int) -> int:
    """Partner of a rank; itself where it rests."""
    # Circle method over `odd` seats: r meets step − r; for an even p the last rank meets whoever would meet themselves.
    odd = size - 1 if size % 2 == 0 else size
    last_rank = size - 1
    if size % 2 == 0 and rank == last_rank:  # it keeps its seat, and meets whoever would meet themselves
        return next(candidate for candidate in range(odd) if (2 * candidate - step) % odd == 0)
    partner = (step - rank) % odd
    return last_rank if partner == rank and size % 2 == 0 else partner


def largest_power(size: int) -> int:
    """Return the largest power of two that is at most `size`."""
    return 1 << size.bit_length() - 1


def folded(
    rank: int, size: int, chunks: tuple[int, ...], core: Callable[[int, list[int]], Steps], num_rounds: int
) -> Steps:
    """Fold the surplus ranks in and out around the steps of `core`.

    Args:
        core: steps of the rank with a new number, given the ranks by their new numbers.
        num_rounds: how many steps `core` has.
    """
    surplus = size - largest_power(size)
    # New numbers are positions in this list, 0 to 2^q − 1.
    awake = [rank for rank in range(size) if rank >= 2 * surplus or rank % 2 == 0]
    if not surplus:
        yield from core(rank, awake)
    elif rank not in awake:
        # An odd surplus rank: its whole message out, and the result back at the end.
        yield CollectiveStep(send=Send(rank - 1, chunks))
        # As many steps as the others: step k of a rank must meet step k of its partner.
        yield from [IDLE] * num_rounds
        yield CollectiveStep(receive=Receive(rank - 1, chunks, add=False))
    else:
        pair = rank + 1 if rank < 2 * surplus else None
        yield IDLE if pair is None else CollectiveStep(receive=Receive(pair, chunks, add=True))
        yield from core(awake.index(rank), awake)
        yield IDLE if pair is None else CollectiveStep(send=Send(pair, chunks))


def halving_all_reduce(rank: int, size: int) -> Steps:
    """All-reduce by halving and doubling: 2 log₂ p swaps, of a half, a quarter, … of the message, and back."""
    power = largest_power(size)

    def swaps(number: int, ranks: list[int]) -> Steps:
        # All chunks at first; `undo` keeps the swaps for the second part.
        window, undo = tuple(range(power)), []
        distance = 1
        while distance < power:
            partner, middle = ranks[number ^ distance], len(window) // 2
            own_half, partner_half = window[:middle], window[middle:]
            # Partners differ in this bit of their numbers; the one that has it set goes on with the upper half.
            if number & distance:
                own_half, partner_half = partner_half, own_half
            yield CollectiveStep(Send(partner, partner_half), Receive(partner, own_half, add=True))
            undo.append((partner, own_half, partner_half))
            window, distance = own_half, 2 * distance
        # The way back: each sends the half whose whole sum it has, and gets the other one.
        for partner, own_half, partner_half in reversed(undo):
            yield CollectiveStep(Send(partner, own_half), Receive(partner, partner_half, add=False))

    yield from folded(rank, size, tuple(range(power)), swaps, num_rounds=2 * (power.bit_length() - 1))


def doubling_all_reduce(rank: int, size: int) -> Steps:
    """All-reduce by recursive doubling: log₂ p swaps of the whole message."""
    power = largest_power(size)

    def swaps(number: int, ranks: list[int]) -> Steps:
        distance = 1
        while distance < power:
            partner = ranks[number ^ distance]
            yield CollectiveStep(Send(partner, WHOLE), Receive(partner, WHOLE, add=True))
            distance *= 2

    yield from folded(rank, size, WHOLE, swaps, num_rounds=power.bit_length() - 1)
