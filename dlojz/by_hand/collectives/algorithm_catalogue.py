"""Catalogue of the collective algorithms: title, number of chunks, and one rank's program.

All programs of one algorithm and one number of ranks have the same number of steps, so that step k of a rank meets step
k of its partner.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of, say
from dlojz.by_hand.collectives import algorithms
from dlojz.by_hand.collectives.algorithms import CollectiveStep, Steps, largest_power

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

Collective = Literal["reduce_scatter", "all_gather", "all_reduce", "broadcast", "reduce", "all_to_all"]
ADDING: tuple[Collective, ...] = ("reduce_scatter", "all_reduce", "reduce")


class Algorithm(NamedTuple):
    """Algorithm of a collective.

    Args:
        collective: what it computes.
        num_chunks: into how many chunks it cuts the message, for a number of ranks.
        steps: one rank's steps: of the rank, the number of ranks and the ranks of one node.
        two_level: whether it distinguishes nodes.
    """

    collective: Collective
    title: Callable[[], str]
    num_chunks: Callable[[int], int]
    steps: Callable[[int, int, int], Steps]
    two_level: bool = False


def _algorithm(
    collective: Collective, en: str, fr: str, num_chunks: Callable[[int], int], steps: Callable[[int, int], Steps]
) -> Algorithm:
    # Algorithms without nodes ignore `per_node`.
    # The title is made when it is asked for, in the language of that moment.
    return Algorithm(collective, lambda: say(en=en, fr=fr), num_chunks, lambda rank, size, per_node: steps(rank, size))


def _on_ring(walk: Callable[[int, range, list[tuple[int, ...]]], Steps]) -> Callable[[int, int], Steps]:
    # One chunk per block: block i is chunk i.
    return lambda rank, size: walk(rank, range(size), [(chunk,) for chunk in range(size)])


def _each(size: int) -> int:
    return size


def _one(size: int) -> int:
    return 1


ALGORITHMS: dict[str, Algorithm] = {
    "ring_reduce_scatter": _algorithm(
        "reduce_scatter",
        "reduce-scatter on a ring",
        "reduce-scatter en anneau",
        _each,
        _on_ring(algorithms.reduce_scatter),
    ),
    "ring_all_gather": _algorithm(
        "all_gather", "all-gather on a ring", "all-gather en anneau", _each, _on_ring(algorithms.all_gather)
    ),
    "ring_all_reduce": _algorithm(
        "all_reduce", "all-reduce on a ring", "all-reduce en anneau", _each, _on_ring(algorithms.ring_all_reduce)
    ),
    # Trees and recursive doubling never cut the message: one chunk.
    "tree_broadcast": _algorithm(
        "broadcast", "broadcast down a binomial tree", "broadcast par arbre binomial", _one, algorithms.broadcast
    ),
    "tree_reduce": _algorithm(
        "reduce", "reduce up a binomial tree", "reduce par arbre binomial", _one, algorithms.reduce
    ),
    "tree_all_reduce": _algorithm(
        "all_reduce", "all-reduce by a binomial tree", "all-reduce par arbre binomial", _one, algorithms.tree_all_reduce
    ),
    "doubling_all_reduce": _algorithm(
        "all_reduce",
        "all-reduce by recursive doubling",
        "all-reduce par doublement récursif",
        _one,
        algorithms.doubling_all_reduce,
    ),
    "halving_doubling_all_reduce": _algorithm(
        "all_reduce",
        "all-reduce by halving and doubling",
        "all-reduce par division et doublement",
        # 2^q chunks: surplus ranks are folded into their neighbours first.
        largest_power,
        algorithms.halving_all_reduce,
    ),
    "hierarchical_all_reduce": Algorithm(
        "all_reduce",
        lambda: say(en="all-reduce on two levels", fr="all-reduce à deux niveaux"),
        _each,
        algorithms.hierarchical_all_reduce,
        two_level=True,
    ),
    "pairwise_all_to_all": _algorithm(
        "all_to_all", "all-to-all by pairs", "all-to-all par paires", _each, algorithms.all_to_all
    ),
}


def names() -> list[str]:
    """List the names of the algorithms."""
    return list(ALGORITHMS)


def algorithm(name: str) -> Algorithm:
    """Look up an algorithm by its name.

    Raises:
        LabError: if there is none; the closest is named.
    """
    if name not in ALGORITHMS:
        raise LabError(one_of(say(en="algorithm", fr="algorithme"), name, ALGORITHMS))
    return ALGORITHMS[name]


def check_size(size: int) -> int:
    """Check a number of ranks, and return it.

    Raises:
        LabError: if it is not a whole number of at least 1.
    """
    # bool is a subclass of int: True would pass as 1 rank.
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise phrase.refused("no number of ranks", size=size)
    return size


def node_size(size: int, per_node: int | None = None) -> int:
    """Return the ranks of one node: those given, else at most 4, as on Jean Zay's usual nodes.

    Raises:
        LabError: if they do not divide the number of ranks.
    """
    check_size(size)
    if per_node is None:
        return algorithms.default_per_node(size)
    if isinstance(per_node, bool) or not isinstance(per_node, int) or per_node < 1 or size % per_node:
        divisors = ", ".join(str(number) for number in range(1, min(size, 64) + 1) if size % number == 0)
        raise phrase.refused("no such nodes", size=size, per_node=per_node, divisors=divisors)
    return per_node


def num_chunks(name: str, size: int) -> int:
    """Return the number of chunks into which the algorithm cuts the message."""
    return algorithm(name).num_chunks(check_size(size))


def program(name: str, rank: int, size: int, *, per_node: int | None = None) -> tuple[CollectiveStep, ...]:
    """Return one rank's steps: whom it sends which chunks, whose chunks it receives, adds or keeps.

    Args:
        size: number of ranks, at least 1; no powers of two are needed.
        per_node: ranks of one node, for `hierarchical_all_reduce`; a divisor of `size`.

    Raises:
        LabError: if the name, the rank or a number is not one that exists.

    Example:
        >>> program("ring_all_gather", 0, 2)
        (CollectiveStep(send=Send(to=1, chunks=(0,)), receive=Receive(source=1, chunks=(1,), add=False)),)
    """
    chosen = algorithm(name)
    # Checked for every algorithm, though only those with nodes use it.
    node_ranks = node_size(size, per_node)
    if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < size:
        raise phrase.refused("no such rank", rank=rank, size=size, last_rank=size - 1)
    return tuple(chosen.steps(rank, size, node_ranks))


def programs(name: str, size: int, *, per_node: int | None = None) -> list[tuple[CollectiveStep, ...]]:
    """Return the programs of all ranks, by rank."""
    return [program(name, rank, size, per_node=per_node) for rank in range(check_size(size))]


def holds_at_start(collective: Collective, rank: int, chunk: int) -> bool:
    """Tell whether a rank has its own value in this chunk before the first step."""
    # An all-gather begins with each rank's own chunk, a broadcast with all on rank 0, the others with all everywhere.
    if collective == "all_gather":
        return chunk == rank
    return rank == 0 if collective == "broadcast" else True


def wanted_at_end(collective: Collective, rank: int, chunk: int) -> bool:
    """Tell whether this chunk belongs to the rank's result."""
    # A reduce-scatter leaves each rank one chunk, a reduce gives all to rank 0, the others all to everyone.
    if collective == "reduce_scatter":
        return chunk == rank
    return rank == 0 if collective == "reduce" else True
