"""Operators into layers: every clustering tried, both goals, the limit of work, refusals."""

from __future__ import annotations

import itertools
import random

import pytest

from dlojz.plan.alpa.clustering import cluster, cluster_graph
from dlojz.plan.alpa.examples import chain
from dlojz.schema import LabError

Tensors = list[tuple[int, list[int], float]]


def tried(flops: list[float], tensors: Tensors, layers: int, delta: float) -> tuple[float, float] | None:
    """Least of the most received, then least sum of squares of work; None if no clustering is even enough."""
    mean = sum(flops) / layers
    best: tuple[float, float] | None = None
    for inner in itertools.combinations(range(1, len(flops)), layers - 1):
        bounds = (0, *inner, len(flops))
        works = [sum(flops[start:stop]) for start, stop in itertools.pairwise(bounds)]
        if max(works) > mean * (1 + delta) + 1e-9:
            continue
        received = [
            sum(size for maker, readers, size in tensors if maker < start and any(start <= r < stop for r in readers))
            for start, stop in itertools.pairwise(bounds)
        ]
        score = (max(received), sum(work**2 for work in works))
        best = score if best is None else min(best, score)
    return best


def test_60_random_graphs() -> None:
    generator = random.Random(0)
    met = 0
    for _ in range(60):
        count = generator.randint(2, 9)
        layers, delta = generator.randint(1, count), generator.choice([0.2, 0.5, 1.0])
        flops = [float(generator.randint(0, 9)) for _ in range(count)]
        tensors = [
            (maker, sorted({generator.randrange(maker + 1, count) for _ in range(2)}), float(generator.randint(1, 9)))
            for maker in range(count - 1)
        ]
        best = tried(flops, tensors, layers, delta)
        if best is None:
            with pytest.raises(LabError, match=r"use δ="):
                cluster(flops, tensors, layers, delta)
            continue
        met += 1
        found = cluster(flops, tensors, layers, delta)
        assert (found.worst_bytes, sum(work**2 for work in found.flops)) == best
    assert met > 20


def test_it_cuts_where_little_is_passed() -> None:
    found = cluster([1, 1, 1, 1], [(0, [1], 9), (1, [2], 1), (2, [3], 9)], 2)
    assert found.bounds == (0, 2, 4)
    assert found.received_bytes == (0, 1)
    far = cluster([1, 1, 1, 1], [(0, [3], 5), (1, [2], 1), (2, [3], 1)], 2, delta=0)
    assert far.worst_bytes == 6  # what skips ahead is received too


def test_layers_of_a_graph() -> None:
    found, names = cluster_graph(chain(4, 8, 6), 3)
    assert names == (("h1", "h2"), ("h3", "h4"), ("h5", "h6"))
    assert found.received_bytes == (0, 128, 128)


def test_the_smallest_even_enough_is_named_and_works() -> None:
    with pytest.raises(LabError, match=r"for δ=0.1: use δ=1 or more"):
        cluster([1, 4, 1, 2], [], 2 * 1 + 2, 0.1)
    assert cluster([1, 4, 1, 2], [], 4, 1.0).bounds == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("layers", [0, 5])
def test_more_layers_than_operators_are_refused(layers: int) -> None:
    with pytest.raises(LabError, match=rf"4 operators make 1 to 4 layers, but {layers} were asked for"):
        cluster([1] * 4, [], layers)
