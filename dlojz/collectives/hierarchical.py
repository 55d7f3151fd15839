"""Two levels: what can stay inside a node stays there, and only 1/g of the message leaves each GPU of a node of g.

Layer 2. Invariant: node k holds the ranks k·g … k·g + g − 1; after the first part the i-th rank of a node answers for
shard i, which it then reduces with the i-th ranks of all other nodes.

Source: Mikami et al. 2018 (arXiv 1811.05233), "2D-torus all-reduce"; Jia et al. 2018 (arXiv 1807.11205) do the same
with a reduce and a broadcast inside the node.
"""

from __future__ import annotations

from dlojz.collectives import ring
from dlojz.collectives.steps import Steps


def all_reduce(rank: int, size: int, per_node: int) -> Steps:
    """Reduce-scatter inside the node, all-reduce across nodes, all-gather inside the node: a ring each.

    Args:
        rank: this rank.
        size: number of ranks, a multiple of `per_node`.
        per_node: ranks of one node.
    """
    num_nodes = size // per_node
    node, place = divmod(rank, per_node)
    inside = [node * per_node + other for other in range(per_node)]
    across = [other * per_node + place for other in range(num_nodes)]
    shards = [tuple(range(shard * num_nodes, (shard + 1) * num_nodes)) for shard in range(per_node)]
    yield from ring.reduce_scatter(place, inside, shards)
    yield from ring.all_reduce(node, across, [(chunk,) for chunk in shards[place]])
    yield from ring.all_gather(place, inside, shards)


def default_per_node(size: int) -> int:
    """Ranks of one node where none are given: the largest divisor of `size` that is at most 4 and leaves two nodes."""
    return max((number for number in range(1, 5) if size % number == 0 and number < size), default=1)
