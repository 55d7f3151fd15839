"""Operators into layers: few enough for the outer level to search, alike in work, with little passed between them.

The outer level looks at every run of neighbouring layers, so its time grows with a high power of their number.
Thousands of operators are therefore first clustered into L layers, by dynamic programming:

    G(k, r) = min over i of max( G(i − 1, r − 1), C(i, k) )

where C(i, k) are the bytes that operators i to k receive from earlier ones. A layer may do at most (1 + δ) times the
mean work. Among the clusterings with the smallest G, the one with the least spread of work is taken.

Layer 4. Invariant: layers are contiguous, not empty, in order; both goals are met exactly, one after the other. No
torch.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §5.2, operator clustering.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from dlojz.plan.alpa.graph import Graph
from dlojz.schema import LabError
from dlojz.text import say


@dataclass(frozen=True)
class Clustering:
    """Operators cut into layers.

    Args:
        bounds: layer r holds operators `bounds[r]` to `bounds[r + 1]`, the latter excluded.
        received_bytes: of each layer, what it receives from earlier operators.
        flops: of each layer.
    """

    bounds: tuple[int, ...]
    received_bytes: tuple[float, ...]
    flops: tuple[float, ...]

    @property
    def worst_bytes(self) -> float:
        """G: the most that any layer receives."""
        return max(self.received_bytes)


def cluster(
    flops: Sequence[float], tensors: Sequence[tuple[int, Sequence[int], float]], layers: int, delta: float = 0.5
) -> Clustering:
    """Cut operators into layers.

    Args:
        flops: work of each operator, in order.
        tensors: (number of the operator that makes it, numbers of those that read it, its bytes).
        layers: L, at least 1, at most the number of operators.
        delta: δ, at least 0: how far above the mean the work of a layer may be.

    Returns:
        The clustering. O(K² L) for K operators.

    Raises:
        LabError: more layers than operators, or a δ that no clustering meets; the sentence gives the smallest that
        works.
    """
    count = len(flops)
    if not 1 <= layers <= count:
        raise LabError(
            say(
                en=f"{count} operators make 1 to {count} layers, but {layers} were asked for: ask for {count} at most.",
                fr=f"{count} opérateurs font de 1 à {count} couches, mais {layers} ont été demandées : demandez-en "
                f"{count} au plus.",
            )
        )
    sums = [0.0, *accumulate(flops)]
    received = _received(count, tensors)
    largest = sums[-1] / layers * (1 + delta) * (1 + 1e-12)  # a sum of floats may be off by its rounding

    def work(start: int, stop: int) -> float:
        return sums[stop] - sums[start]

    worst, _ = _best(count, layers, lambda i, k: received[i][k] if work(i, k) <= largest else math.inf, max)
    if math.isinf(worst):
        heaviest, _ = _best(count, layers, work, max)
        smallest = heaviest * layers / sums[-1] - 1 if sums[-1] else 0.0
        needed = math.ceil(smallest * 100) / 100
        raise LabError(
            say(
                en=f"no {layers} layers have all at most (1 + δ) times the mean work for δ={delta:g}: use "
                f"δ={needed:g} or more, or other numbers of layers.",
                fr=f"il n’y a pas {layers} couches dont le travail soit au plus (1 + δ) fois la moyenne pour "
                f"δ={delta:g} : prenez δ={needed:g} ou plus, ou un autre nombre de couches.",
            )
        )

    def uneven(i: int, k: int) -> float:
        return work(i, k) ** 2 if received[i][k] <= worst and work(i, k) <= largest else math.inf

    _, bounds = _best(count, layers, uneven, lambda before, own: before + own)
    return Clustering(
        tuple(bounds),
        tuple(received[start][stop] for start, stop in pairwise(bounds)),
        tuple(work(start, stop) for start, stop in pairwise(bounds)),
    )


def cluster_graph(graph: Graph, layers: int, delta: float = 0.5) -> tuple[Clustering, tuple[tuple[str, ...], ...]]:
    """Cut the forward operators of a graph into layers; the names of each layer's operators beside the clustering.

    Raises:
        LabError: as `cluster`.
    """
    names = [node.name for node in graph.nodes.values() if node.kind == "forward"]
    number = {name: index for index, name in enumerate(names)}
    flops = [operator.flops if (operator := graph.nodes[name].operator) else 0.0 for name in names]
    tensors = [
        (
            number[name],
            [number[reader.name] for reader, _ in graph.readers(name) if reader.name in number],
            float(graph.nodes[name].tensor_bytes),
        )
        for name in names
    ]
    found = cluster(flops, tensors, layers, delta)
    return found, tuple(tuple(names[start:stop]) for start, stop in pairwise(found.bounds))


def _received(count: int, tensors: Sequence[tuple[int, Sequence[int], float]]) -> list[list[float]]:
    """C: row i, column k + 1, the bytes that operators i to k receive, each tensor once however many read it."""
    table = [[0.0] * (count + 1) for _ in range(count)]
    for maker, readers, tensor_bytes in tensors:
        for start in range(maker + 1, count):
            first = min((reader for reader in readers if reader >= start), default=count)
            for stop in range(first + 1, count + 1):
                table[start][stop] += tensor_bytes
    return table


def _best(
    count: int, layers: int, cost: Callable[[int, int], float], join: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The cut of `count` operators into `layers` runs whose joined cost is least, and its bounds."""
    best = [0.0] + [math.inf] * count
    choices: list[list[int]] = []
    for _ in range(layers):
        following, chosen = [math.inf] * (count + 1), [0] * (count + 1)
        for stop in range(1, count + 1):
            for start in range(stop):
                if math.isinf(best[start]):
                    continue
                total = join(best[start], cost(start, stop))
                if total < following[stop]:
                    following[stop], chosen[stop] = total, start
        best = following
        choices.append(chosen)
    bounds = [count]
    for chosen in reversed(choices):
        bounds.append(chosen[bounds[-1]])
    return best[count], bounds[::-1]
