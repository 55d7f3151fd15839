"""A figure that the student writes down first, then sees laid under the real one.

Layer 6 (labs). Invariant: the real figure is computed or measured by the package and handed in; none is typed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dlojz.labs.verdict import Said, Verdict
from dlojz.text import say
from dlojz.units import format_bytes, format_count, format_seconds

Kind = Literal["bytes", "count", "seconds", "ratio"]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One question whose answer is a number.

    Args:
        id: Stable name, as in `lab.predict("parameters", …)`.
        question: What to predict, in one sentence.
        kind: How the number is written.
        tolerance: Relative distance up to which a prediction counts as good.
    """

    id: str
    question: Said
    kind: Kind
    tolerance: float = 0.1

    @property
    def unit(self) -> str:
        """The unit the number is in, in words."""
        return str(
            {
                "bytes": Said("in bytes", "en octets"),
                "count": Said("without unit", "sans unité"),
                "seconds": Said("in seconds", "en secondes"),
                "ratio": Said("without unit", "sans unité"),
            }[self.kind]
        )

    def format(self, value: float) -> str:
        """The number with its unit."""
        if self.kind == "bytes":
            return say(
                en=f"{format_bytes(value)} ({value:,.0f} B)",
                fr=f"{format_bytes(value)} ({_spaced(value)} octets)",
            )
        if self.kind == "seconds":
            return format_seconds(value)
        if self.kind == "count" and abs(value) >= 10_000:
            short = format_count(value)
            return say(en=f"{short} ({value:,.0f})", fr=f"{short} ({_spaced(value)})")
        return say(en=f"{value:g}", fr=f"{value:g}".replace(".", ","))

    def laid_over(self, predicted: float, value: float | None) -> Verdict:
        """Both numbers, and how far apart they are."""
        if value is None:
            return Verdict(
                "wrong",
                say(
                    en="There is no figure to compare with: the run did not get so far; look at its logs.",
                    fr="Aucune valeur à comparer : l’exécution n’est pas allée jusque-là ; consultez ses journaux.",
                ),
            )
        both = say(
            en=f"Predicted: {self.format(predicted)}\nResult: {self.format(value)}",
            fr=f"Prédit : {self.format(predicted)}\nObtenu : {self.format(value)}",
        )
        if predicted == value:
            return Verdict("right", both + say(en="\nExactly right.", fr="\nC’est exact."))
        off = abs(predicted - value) / abs(value) if value else float("inf")
        if off <= self.tolerance:
            gap = (
                say(en="Less than 0.1% apart", fr="Moins de 0,1 % d’écart")
                if off < 1e-3
                else say(en=f"{off:.1%} apart", fr=f"{_comma(off)} d’écart")
            )
            return Verdict("right", both + say(en=f"\n{gap}: well predicted.", fr=f"\n{gap} : bien prédit."))
        times = max(predicted, value) / min(predicted, value) if min(predicted, value) > 0 else None
        far = (
            say(en="far apart", fr="très éloignés")
            if times is None
            else say(en=f"{times:.3g} times apart", fr=f"un facteur {times:.3g}".replace(".", ","))
        )
        return Verdict(
            "note",
            both
            + say(
                en=f"\n{far}: find out why before you read on.",
                fr=f"\nL’écart : {far}. Cherchez pourquoi avant de poursuivre.",
            ),
        )


def _spaced(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f")


def _comma(share: float) -> str:
    return f"{share * 100:.1f} %".replace(".", ",")
