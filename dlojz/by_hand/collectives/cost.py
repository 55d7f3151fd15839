"""Cost of a collective algorithm: rounds, bytes of the busiest rank, bytes added; the seconds; α and β from measures.

The closed forms equal, as exact fractions, what is counted from the programs. A message of n bytes takes α + β·n
seconds (Hockney 1994, "The communication challenge for MPP"), the time to add it in β; a rank sends and receives at
once; a round lasts as long as its busiest rank. With p ranks, L = ⌈log₂ p⌉, q = ⌊log₂ p⌋, s = 1 where p is no power of
two (else 0) and m = p/g nodes of g ranks:

| algorithm | rounds (α) | of the message (β) | added |
|--|--|--|--|
| ring reduce-scatter, all-gather | p − 1 | (p − 1)/p | (p − 1)/p, 0 |
| ring all-reduce | 2(p − 1) | 2(p − 1)/p | (p − 1)/p |
| binomial tree: broadcast, reduce | L | L | 0, L |
| binomial tree: all-reduce | 2L | 2L | L |
| recursive doubling | q + 2s | q + 2s | q + s |
| halving and doubling | 2q + 2s | 2(2^q − 1)/2^q + 2s | (2^q − 1)/2^q + s |
| two levels | 2(g − 1) + 2(m − 1) | 2(p − 1)/p | (p − 1)/p |
| all-to-all by pairs | p − 1, p for odd p | as many/p | 0 |

Source: Thakur, Rabenseifner & Gropp 2005, §3–5; Patarasuk & Yuan 2009; Rabenseifner 2004. A message is the whole tensor
that is reduced, gathered or, in all-to-all, held by one rank.

The fit of α and β minimises relative errors, so that a message of 1 KiB weighs as much as one of 16 MiB. β then is the
inverse of what nccl-tests calls bus bandwidth (its doc/PERFORMANCE.md), which does not depend on the number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.language import Sentences
from dlojz.by_hand.collectives import algorithms
from dlojz.by_hand.collectives.algorithm_catalogue import algorithm, node_size
from dlojz.by_hand.collectives.algorithms import largest_power
from dlojz.by_hand.collectives.running import TimedMessage, algorithm_of
from dlojz.hardware.links import Link, fit_line

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")


class Terms(NamedTuple):
    """Factors of α and β, and what is added.

    Args:
        rounds: messages that wait for each other.
        moved: bytes of the busiest rank, summed over rounds, per byte of the message.
        added: bytes it adds, summed over rounds, per byte of the message.
    """

    rounds: int
    moved: Fraction
    added: Fraction

    def __add__(self, addend: object) -> Terms:
        if not isinstance(addend, Terms):
            return NotImplemented
        return Terms(self.rounds + addend.rounds, self.moved + addend.moved, self.added + addend.added)

    def seconds(self, message_bytes: float, link: Link) -> float:
        """Compute the time over links of one kind; the time to add is counted in β."""
        # `rounds` messages, one after the other: α each, β for each of their bytes.
        return float(link.seconds(message_bytes * float(self.moved), self.rounds))


NONE = Terms(0, Fraction(0), Fraction(0))


def _ring(size: int, *, adds: bool) -> Terms:
    # All blocks but one pass each rank, in p − 1 rounds.
    share = Fraction(size - 1, size)
    return Terms(size - 1, share, share if adds else Fraction(0))


def _tree(size: int, *, adds: bool) -> Terms:
    # ⌈log₂ p⌉ rounds, each with the whole message.
    levels = (size - 1).bit_length()
    return Terms(levels, Fraction(levels), Fraction(levels if adds else 0))


def _surplus(size: int) -> Terms:
    # One fold in and one out, each with the whole message; only the first adds.
    folds = int(size != largest_power(size))
    return Terms(2 * folds, Fraction(2 * folds), Fraction(folds))


def _doubling(size: int) -> Terms:
    levels = largest_power(size).bit_length() - 1
    return Terms(levels, Fraction(levels), Fraction(levels)) + _surplus(size)


def _halving(size: int) -> Terms:
    power = largest_power(size)
    # 1/2 + 1/4 + … + 1/2^q of the message: once on the way in, once on the way back.
    share = Fraction(power - 1, power)
    return Terms(2 * (power.bit_length() - 1), 2 * share, share) + _surplus(size)


def _pairs(size: int) -> Terms:
    # In each round 1/p of what a rank holds.
    rounds = algorithms.num_rounds(size)
    return Terms(rounds, Fraction(rounds, size), Fraction(0))


_CLOSED: dict[str, Callable[[int], Terms]] = {
    "ring_reduce_scatter": lambda size: _ring(size, adds=True),
    "ring_all_gather": lambda size: _ring(size, adds=False),
    "ring_all_reduce": lambda size: _ring(size, adds=True) + _ring(size, adds=False),
    "tree_broadcast": lambda size: _tree(size, adds=False),
    "tree_reduce": lambda size: _tree(size, adds=True),
    "tree_all_reduce": lambda size: _tree(size, adds=True) + _tree(size, adds=False),
    "doubling_all_reduce": _doubling,
    "halving_doubling_all_reduce": _halving,
    "pairwise_all_to_all": _pairs,
}


def _levels(name: str, size: int, per_node: int | None) -> tuple[Terms, Terms]:
    """Terms inside nodes and across them; without nodes all is across."""
    if not algorithm(name).two_level:
        node_size(size, per_node)  # for its refusal alone
        return NONE, _CLOSED[name](size)
    inside = node_size(size, per_node)
    # The ring across works on one shard, 1/g of the message.
    ring = _CLOSED["ring_all_reduce"](size // inside)
    return _CLOSED["ring_all_reduce"](inside), Terms(ring.rounds, ring.moved / inside, ring.added / inside)


def terms(name: str, size: int, *, per_node: int | None = None) -> Terms:
    """Compute the closed form of an algorithm: the factors of α and β, and what is added.

    Raises:
        LabError: if the name or a number is not one that exists.
    """
    inside, across = _levels(name, size, per_node)
    return inside + across


def cost_s(
    name: str,
    message_bytes: float,
    size: int,
    *,
    alpha_s: float,
    beta_s_per_byte: float,
    per_node: int | None = None,
    inside: Link | None = None,
) -> float:
    """Compute the seconds of a collective in the α–β model; 0 for one rank.

    Args:
        message_bytes: the whole tensor, at least 0.
        alpha_s: seconds before the first byte of each message.
        per_node: ranks of one node, for `hierarchical_all_reduce`.
        inside: the links inside a node where they differ; only `hierarchical_all_reduce` gains, as in all others each
            round also crosses nodes.

    Raises:
        LabError: if a name or number is not legal.
    """
    numbers = {"message_bytes": message_bytes, "alpha_s": alpha_s, "beta_s_per_byte": beta_s_per_byte}
    for quantity, value in numbers.items():
        # bool is a subclass of int; infinity and NaN fail the comparison.
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise phrase.refused("no number from 0 on", quantity=quantity, value=value)
    link = Link(alpha_s, 1 / beta_s_per_byte if beta_s_per_byte else float("inf"))
    within, across = _levels(name, size, per_node)
    return within.seconds(message_bytes, inside or link) + across.seconds(message_bytes, link)


def crossover_bytes(
    algorithm_1: str, algorithm_2: str, size: int, *, alpha_s: float, beta_s_per_byte: float
) -> float | None:
    """Compute the message size for which two algorithms take as long; None where one is never the slower one.

    The times are linear: a₁α + b₁βn = a₂α + b₂βn, hence n = (a₁ − a₂)α / ((b₂ − b₁)β).
    """
    terms_1, terms_2 = terms(algorithm_1, size), terms(algorithm_2, size)
    slope_s = float(terms_2.moved - terms_1.moved) * beta_s_per_byte
    gap_s = (terms_1.rounds - terms_2.rounds) * alpha_s
    # Positive only if the algorithm of more rounds moves fewer bytes; else one of them is faster for every n.
    return gap_s / slope_s if slope_s * gap_s > 0 else None


MIN_POINTS = 3


class AlphaBetaFit(Contract):
    """Fit of α and β, with its points."""

    points: tuple[TimedMessage, ...] = Field(min_length=MIN_POINTS, description="what was measured")
    collective: str = Field(description="what was timed")
    algorithm: str = Field(description="the algorithm whose formula the times are read with")
    size: int = Field(ge=2, description="number of ranks")
    alpha_s: float = Field(ge=0, description="seconds before the first byte of a message")
    beta_s_per_byte: float = Field(ge=0, description="seconds per byte")

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """1/β; None where the times do not grow with the message."""
        return 1 / self.beta_s_per_byte if self.beta_s_per_byte else None

    @property
    def latency_s(self) -> float:
        """Seconds of an empty message on these ranks: all rounds, no byte."""
        return terms(self.algorithm, self.size).rounds * self.alpha_s

    @property
    def half_bytes(self) -> float | None:
        """Message size of which half of the time is latency, Hockney's n½; None where β is 0."""
        per_byte_s = float(terms(self.algorithm, self.size).moved) * self.beta_s_per_byte
        return self.latency_s / per_byte_s if per_byte_s else None

    @property
    def residual(self) -> float:
        """Root mean square of the relative errors: 0.1 means that a typical point lies 10 % off the line."""
        errors = [self.fitted_s(point.message_bytes) / point.time_s - 1 for point in self.points]
        return math.sqrt(sum(error**2 for error in errors) / len(errors))

    def fitted_s(self, message_bytes: float) -> float:
        """Seconds of the fit at a size of message, for the ranks that measured."""
        return self.predict_s(message_bytes, self.size)

    def predict_s(self, message_bytes: float, size: int, name: str | None = None) -> float:
        """Predict the seconds of other messages, other numbers of ranks, another algorithm.

        Args:
            size: number of ranks; links between all of them are assumed to be as those measured.
            name: an algorithm; by default that of the fit.

        Raises:
            LabError: if a name or number is not legal.
        """
        chosen = self.algorithm if name is None else name
        return cost_s(chosen, message_bytes, size, alpha_s=self.alpha_s, beta_s_per_byte=self.beta_s_per_byte)


def fit(points: Iterable[Sequence[object]]) -> AlphaBetaFit:
    """Fit α and β by least squares of relative errors, both at least 0.

    Args:
        points: at least 3, of at least 2 sizes of message, from one number of ranks and one collective, as
            `TimedMessage` or as JSON lists (bytes, seconds, ranks, collective).

    Raises:
        LabError: if the points do not determine a line.
    """
    measured = tuple(_point(point) for point in points)
    sizes = sorted({point.message_bytes for point in measured})
    # With one size of message, α and β cannot be told apart.
    if len(measured) < MIN_POINTS or len(sizes) < 2:
        raise phrase.refused("too few points", min_points=MIN_POINTS, measured=len(measured), sizes=len(sizes))
    kinds = sorted({(point.size, point.collective) for point in measured})
    # One line has one number of rounds: that of a collective on so many ranks.
    if len(kinds) > 1:
        kinds_en, kinds_fr = (
            ", ".join(f"{collective} {word} {size}" for size, collective in kinds) for word in ("on", "sur")
        )
        raise phrase.refused("points of several kinds", kinds_en=kinds_en, kinds_fr=kinds_fr)
    size, collective = kinds[0]
    name = algorithm_of(collective)
    line = terms(name, size)
    # t = rounds·α + moved·n·β is linear in α and β: one row (rounds, moved·n, seconds) per point.
    rows = [(line.rounds, float(line.moved) * point.message_bytes, point.time_s) for point in measured]
    alpha_s, beta_s_per_byte = fit_line(rows)
    fitted = {"alpha_s": alpha_s, "beta_s_per_byte": beta_s_per_byte}
    return AlphaBetaFit(points=measured, collective=collective, algorithm=name, size=size, **fitted)


def _point(fields: Sequence[object]) -> TimedMessage:
    try:
        point = TimedMessage(*fields)  # type: ignore[arg-type]
        # One rank sends nothing, and a time of 0 has no relative error.
        legal = point.message_bytes > 0 and 0 < point.time_s < math.inf
        legal = legal and isinstance(point.size, int) and point.size >= 2 and isinstance(point.collective, str)
    except TypeError:  # another number of parts, or a text where a number belongs
        legal = False
    if not legal:
        printable_fields = tuple(fields) if isinstance(fields, list | tuple) else fields
        raise phrase.refused("no point", printable_fields=printable_fields)
    return point
