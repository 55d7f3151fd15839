"""Peaks of activations against a simulator of exact fractions, written without the package's own."""

import random
from fractions import Fraction

import pytest

from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import memory_curves, simulate

Times = tuple[Fraction, Fraction, Fraction]
"""Of a forward, of a backward, of a message."""


def exact_peaks(name: str, ranks: int, micro_batches: int, times: Times) -> tuple[list[int], Fraction]:
    """Peak of each rank in micro-batches, and the makespan, of GPipe or 1F1B; one stage per rank, no rounding."""
    forward, backward, latency = times
    orders = []
    for rank in range(ranks):
        ahead = micro_batches if name == "gpipe" else min(ranks - rank, micro_batches)
        order = [("F", number) for number in range(ahead)]
        for number in range(micro_batches):
            order.append(("B", number))
            if ahead + number < micro_batches:
                order.append(("F", ahead + number))
        orders.append(order)
    ended: dict[tuple[str, int, int], Fraction] = {}
    spans: list[list[tuple[Fraction, Fraction, str]]] = [[] for _ in range(ranks)]
    while any(orders):
        for rank, order in enumerate(orders):
            while order:
                kind, number = order[0]
                source = rank - 1 if kind == "F" else rank + 1
                arrived = Fraction(0)
                if 0 <= source < ranks:
                    if (kind, number, source) not in ended:
                        break
                    arrived = ended[kind, number, source] + latency
                start = max(arrived, spans[rank][-1][1] if spans[rank] else Fraction(0))
                ended[kind, number, rank] = start + (forward if kind == "F" else backward)
                spans[rank].append((start, ended[kind, number, rank], kind))
                order.pop(0)
    peaks = []
    for of_rank in spans:
        moments = [start for start, _, kind in of_rank if kind == "F"]
        gone = [end for _, end, kind in of_rank if kind == "B"]
        peaks.append(max(sum(at <= now for at in moments) - sum(at <= now for at in gone) for now in moments))
    return peaks, max(ended.values())


def cases() -> list[tuple[str, int, int, Times]]:
    chosen = random.Random(21)
    found = [
        ("1f1b", 3, 28, (Fraction("3.7"), Fraction(3), Fraction("0.3"))),
        ("1f1b", 12, 29, (Fraction(2), Fraction("4.1"), Fraction(0))),
    ]
    while len(found) < 40:
        times = (Fraction(chosen.randint(1, 99), 10), Fraction(chosen.randint(1, 99), 10))
        latency = Fraction(chosen.choice((0, 0, chosen.randint(1, 30))), 10)
        name = chosen.choice(("1f1b", "1f1b", "gpipe"))
        found.append((name, chosen.randint(1, 12), chosen.randint(1, 40), (*times, latency)))
    return found


@pytest.mark.parametrize(("name", "ranks", "micro_batches", "times"), cases())
def test_peaks_do_not_hang_on_rounding(name: str, ranks: int, micro_batches: int, times: Times) -> None:
    forward, backward, latency = map(float, times)
    costs = Costs(forward, backward / 2, backward / 2, latency=latency)
    timeline = simulate(build(name, ranks, micro_batches, costs=costs), costs)
    peaks, makespan = exact_peaks(name, ranks, micro_batches, times)
    assert [curve.peak for curve in memory_curves(timeline)] == peaks
    assert timeline.makespan == pytest.approx(float(makespan))
