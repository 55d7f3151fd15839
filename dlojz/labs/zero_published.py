"""Lab 04: what ZeRO's paper prints of the states per GPU, beside what a function gives.

Layer 6 (labs). Invariant: the paper's figures are only ever shown beside computed ones, never used in place of them.
"""

from __future__ import annotations

from collections.abc import Callable

from dlojz.text import say
from dlojz.units import format_count

RANKS = (1, 4, 16, 64, 256, 1024)
# Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: gigabytes (10⁹) per GPU by number of GPUs, for stages 1, 2 and 3.
TABLE_1: dict[float, tuple[str, ...]] = {
    7.5e9: ("120 120 120", "52.5 41.3 30", "35.6 21.6 7.5", "31.4 16.6 1.88", "30.4 15.4 0.47", "30.1 15.1 0.12"),
    128e9: ("2048 2048 2048", "896 704 512", "608 368 128", "536 284 32", "518 263 8", "513 257 2"),
    1e12: (
        "16000 16000 16000",
        "7000 5500 4000",
        "4750 2875 1000",
        "4187 2218 250",
        "4046 2054 62.5",
        "4011 2013 15.6",
    ),
}


class PublishedTable:
    """ZeRO's table 1, beside what a function of the bytes per rank gives.

    Args:
        state_bytes: called with parameters, ranks and stage.
    """

    def __init__(self, state_bytes: Callable[[float, int, int], float]) -> None:
        self.cells = [
            (parameters, ranks, stage, printed, state_bytes(parameters, ranks, stage) / 1e9)
            for parameters, rows in TABLE_1.items()
            for ranks, row in zip(RANKS, rows, strict=True)
            for stage, printed in enumerate(row.split(), start=1)
        ]

    @property
    def agreeing(self) -> int:
        """Cells that agree to the last digit printed; the paper rounds some and cuts others off."""
        return sum(abs(float(printed) - ours) < _last_digit(printed) for *_, printed, ours in self.cells)

    def __repr__(self) -> str:
        head = say(en="GB per GPU", fr="Go par GPU")
        stages = "".join(f"{f'stage {stage}':>19}" for stage in (1, 2, 3))
        lines = [f"{head:<12}{'N':>6}{stages}   " + say(en="(paper)", fr="(article)")]
        for start in range(0, len(self.cells), 3):
            parameters, ranks, *_ = self.cells[start]
            cells = "".join(
                f"{decimal(f'{ours:.2f}'):>10} {f'({decimal(printed)})':>8}"
                for *_, printed, ours in self.cells[start : start + 3]
            )
            lines.append(f"{format_count(parameters):<12}{ranks:>6}{cells}")
        agree = say(
            en=f"{self.agreeing} of {len(self.cells)} cells agree to the last digit printed.",
            fr=f"Cases égales au dernier chiffre imprimé près : {self.agreeing} sur {len(self.cells)}.",
        )
        return "\n".join([*lines, agree])


def _last_digit(printed: str) -> float:
    return float(10.0 ** -len(printed.partition(".")[2]))


def decimal(number: str) -> str:
    """A number with the decimal mark of the reader's language."""
    return number.replace(".", say(en=".", fr=","))
