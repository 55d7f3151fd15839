"""What the papers print of the models that the package counts.

Layer 6 (labs). Invariant: these figures are only ever shown beside our own, never used in place of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dlojz import models
from dlojz.text import say


@dataclass(frozen=True, kw_only=True)
class Published:
    """One model as its paper gives it; what the paper calls FLOPs are multiply-adds."""

    parameters: float
    multiply_adds: float
    image_size: int


# Dai et al. 2021 (arXiv 2106.04803v2), tables 4, 5 and 12. CoAtNet-0 to 2: the rows "strided DConv", which is the
# variant of `dlojz.models`; for the others the paper gives no such row.
COATNET = {
    "coatnet_0": Published(parameters=25e6, multiply_adds=4.6e9, image_size=224),
    "coatnet_1": Published(parameters=42e6, multiply_adds=8.8e9, image_size=224),
    "coatnet_2": Published(parameters=75e6, multiply_adds=16.6e9, image_size=224),
    "coatnet_3": Published(parameters=168e6, multiply_adds=34.7e9, image_size=224),
    "coatnet_4": Published(parameters=275e6, multiply_adds=189.5e9, image_size=384),
    "coatnet_5": Published(parameters=688e6, multiply_adds=812e9, image_size=512),
    "coatnet_6": Published(parameters=1.47e9, multiply_adds=1521e9, image_size=512),
    "coatnet_7": Published(parameters=2.44e9, multiply_adds=2586e9, image_size=512),
}


@dataclass(frozen=True)
class Line:
    """One model, counted and published."""

    name: str
    counted: models.ModelSummary
    published: Published

    @property
    def parameters_gap(self) -> float:
        """Relative difference of the parameters."""
        return self.counted.parameters / self.published.parameters - 1

    @property
    def multiply_adds_gap(self) -> float:
        """Relative difference of the multiply-adds."""
        return self.counted.multiply_adds / self.published.multiply_adds - 1


class Table:
    """CoAtNet-0…7: what the package counts beside what the paper prints."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.lines = tuple(lines)

    def __repr__(self) -> str:
        heads = (
            say(en="model", fr="modèle"),
            say(en="image", fr="image"),
            say(en="parameters (M)", fr="paramètres (M)"),
            say(en="paper", fr="article"),
            say(en="gap", fr="écart"),
            say(en="multiply-adds (G)", fr="mult.-additions (G)"),
            say(en="paper", fr="article"),
            say(en="gap", fr="écart"),
        )
        rows = [heads]
        for line in self.lines:
            ours, theirs = line.counted, line.published
            rows.append(
                (
                    line.name,
                    f"{theirs.image_size}²",
                    _number(ours.parameters / 1e6, 1),
                    _number(theirs.parameters / 1e6, 0),
                    _gap(line.parameters_gap),
                    _number(ours.multiply_adds / 1e9, 1),
                    _number(theirs.multiply_adds / 1e9, 1),
                    _gap(line.multiply_adds_gap),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )


def coatnet_table() -> Table:
    """Count CoAtNet-0…7 at the image sizes of the paper and lay them beside its figures."""
    return Table(
        Line(name, models.describe(name, published.image_size), published) for name, published in COATNET.items()
    )


def _number(value: float, digits: int) -> str:
    return say(en=f"{value:,.{digits}f}", fr=f"{value:,.{digits}f}".replace(",", "\u202f").replace(".", ","))


def _gap(share: float) -> str:
    return say(en=f"{share:+.1%}", fr=f"{share * 100:+.1f} %".replace(".", ","))
