"""Fit α and β of the present links to measured points, and predict other messages and other ranks.

The fit minimises relative errors, so that a message of 1 KiB weighs as much as one of 16 MiB; α and β are never
negative. The times of a collective follow the formula of one algorithm (`cost`): t = rounds·α + moved·β·n. β then is
the inverse of what nccl-tests calls bus bandwidth (its doc/PERFORMANCE.md), which does not depend on the number of
ranks; the time to add bytes is part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from pydantic import Field

from dlojz.base.contract import Contract
from dlojz.base.language import refusal
from dlojz.by_hand.collectives.cost import cost_s, terms
from dlojz.by_hand.collectives.running import TimedMessage, algorithm_of
from dlojz.hardware.links import fit_line

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
        # Seconds per byte of the message: the busiest rank moves `moved` bytes for each of them.
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
            message_bytes: the whole tensor, at least 0.
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
        raise refusal(
            en=f"a line takes at least {MIN_POINTS} points of at least 2 sizes of message, "
            f"but {len(measured)} point(s) of {len(sizes)} size(s) were received: measure more sizes.",
            fr=f"une droite demande au moins {MIN_POINTS} points d’au moins 2 tailles de message, "
            f"mais {len(measured)} point(s) de {len(sizes)} taille(s) ont été reçus : mesurez d’autres tailles.",
        )
    kinds = sorted({(point.size, point.collective) for point in measured})
    # One line has one number of rounds: that of a collective on so many ranks.
    if len(kinds) > 1:
        raise refusal(
            en="the points must come from one collective on one number of ranks, but these come from "
            + ", ".join(f"{collective} on {size}" for size, collective in kinds)
            + ": fit each alone.",
            fr="les points doivent venir d’une seule communication sur un seul nombre de rangs, "
            "mais ceux-ci viennent de "
            + ", ".join(f"{collective} sur {size}" for size, collective in kinds)
            + " : ajustez-les à part.",
        )
    size, collective = kinds[0]
    name = algorithm_of(collective)
    line = terms(name, size)
    # t = rounds·α + moved·n·β is linear in α and β: one row (rounds, moved·n, seconds) per point.
    alpha_s, beta_s_per_byte = fit_line(
        [(line.rounds, float(line.moved) * point.message_bytes, point.time_s) for point in measured]
    )
    return AlphaBetaFit(
        points=measured,
        collective=collective,
        algorithm=name,
        size=size,
        alpha_s=alpha_s,
        beta_s_per_byte=beta_s_per_byte,
    )


def _point(fields: Sequence[object]) -> TimedMessage:
    try:
        point = TimedMessage(*fields)  # type: ignore[arg-type]
        # One rank sends nothing, and a time of 0 has no relative error.
        legal = (
            point.message_bytes > 0
            and 0 < point.time_s < math.inf
            and isinstance(point.size, int)
            and point.size >= 2
            and isinstance(point.collective, str)
        )
    except TypeError:  # another number of parts, or a text where a number belongs
        legal = False
    if not legal:
        printable_fields = tuple(fields) if isinstance(fields, list | tuple) else fields
        raise refusal(
            en="a point is (bytes, seconds, ranks, collective) with positive bytes and seconds "
            f"and at least 2 ranks, but {printable_fields!r} was received.",
            fr="un point est (octets, secondes, rangs, communication) avec des octets et des secondes positifs "
            f"et au moins 2 rangs, mais {printable_fields!r} a été reçu.",
        )
    return point
