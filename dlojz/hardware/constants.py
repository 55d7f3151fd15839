"""Read constants from TOML files: each figure with its unit, source, date, and how far it is to be trusted.

A constant that was read has the unit that is due, is positive, and is measured, published, derived from such figures,
or unconfirmed; a missing one is refused.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from dlojz.base.errors import LabError
from dlojz.base.language import one_of, say

STANDINGS: Final = ("measured", "published", "derived", "unconfirmed")
"""How far a figure is to be trusted, the most first."""
_PARTS: Final = ("value", "unit", "source", "date", "standing")


class Constant(NamedTuple):
    """Figure with its unit and source; `standing` is one of `STANDINGS`, `date` is when it was looked up."""

    value: float
    unit: str
    source: str
    date: str
    standing: str


def title_words(title: str) -> str:
    """Write the title of a GPU or a cluster in the reader's language."""
    return say(en=title, fr=title.replace(" GB", " Go").replace("per node", "par nœud"))


def _are_counts(ranks: object) -> TypeGuard[list[int]]:
    """Whether this is a list of numbers of ranks that grow from 2 on."""
    # `type`, as True is an int for isinstance.
    if not isinstance(ranks, list) or not ranks or any(type(rank) is not int for rank in ranks):
        return False
    # Equal to its own sorted set: it grows strictly.
    return ranks[0] >= 2 and sorted(set(ranks)) == ranks


@dataclass(frozen=True)
class ConstantsFile:
    """Reader of the constants of one file; a fault names the file and the key."""

    path: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> ConstantsFile:
        """Read the TOML file at this path.

        Raises:
            LabError: if it cannot be read or is no TOML.
        """
        try:
            return cls(path, tomllib.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            sentence = say(
                en=f"the hardware file {path.name} cannot be read: {error}.",
                fr=f"le fichier de matériel {path.name} est illisible : {error}.",
            )
            raise LabError(sentence) from None

    def refuse(self, english: str, french: str) -> LabError:
        """Make the error of this file, in one sentence."""
        return LabError(say(en=f"{self.path.name}: {english}", fr=f"{self.path.name} : {french}"))

    def keys(self, legal: Iterable[str], table: Mapping[str, Any] | None = None) -> None:
        """Refuse unknown keys.

        Raises:
            LabError: naming the file and the keys there are.
        """
        legal = list(legal)
        for key in self.content if table is None else table:
            if key not in legal:
                sentence = one_of("key", key, legal)
                raise self.refuse(sentence, sentence)

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string.

        Raises:
            LabError: if it is missing and has no default, or is no string.
        """
        value = self.content.get(key, default)
        return str(self._fitting(key, value, isinstance(value, str), "a text", "un texte"))

    def count(self, key: str) -> int:
        """Read a whole number of at least 1.

        Raises:
            LabError: if it is missing, or none.
        """
        value = self.content.get(key)
        fits = type(value) is int and value >= 1
        words = "a whole number of at least 1", "un nombre entier au moins égal à 1"
        return int(self._fitting(key, value, fits, *words))

    def table(self, key: str, within: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        """Read a table.

        Raises:
            LabError: if it is missing, or none.
        """
        value = (self.content if within is None else within).get(key)
        section: Mapping[str, Any] = self._fitting(key, value, isinstance(value, Mapping), "a table", "une table")
        return section

    def _fitting(self, key: str, value: Any, fits: bool, english: str, french: str) -> Any:
        if value is None:
            raise self.missing(key)
        if not fits:
            raise self.refuse(
                f"{key} must be {english}, but {value!r} was received.",
                f"{key} doit être {french}, mais {value!r} a été reçu.",
            )
        return value

    def missing(self, key: str) -> LabError:
        """Make the error of a missing constant."""
        return self.refuse(
            f"the constant {key} is missing: give it a value, a unit, a source, a date and a standing.",
            f"la constante {key} manque : donnez-lui une valeur, une unité, une source, une date et un statut.",
        )

    def constant(self, key: str, unit: str, within: Mapping[str, Any] | None = None, name: str = "") -> Constant:
        """Read a constant.

        Args:
            key: of the constant.
            unit: that it must have.
            within: the table it stands in; without it, the top of the file.
            name: as it is called in a refusal; the key without it.

        Raises:
            LabError: if it or a part of it is missing, its unit is another, or its value is not positive.
        """
        name = name or key
        table = self.table(key, within)
        figure = self._described(table, name, unit, "value")
        return Constant(self._positive(figure, name), *(str(table[part]) for part in _PARTS[1:]))

    def curve(self, key: str, unit: str, within: Mapping[str, Any], name: str) -> dict[int, Constant]:
        """Read a constant that is known for several numbers of ranks, as lists `ranks` and `values`.

        Raises:
            LabError: as `constant`, or if the two are not of one length, or the ranks do not grow from 2 on.
        """
        table = self.table(key, within)
        values = self._described(table, name, unit, "values")
        ranks = table.get("ranks")
        if not _are_counts(ranks) or not isinstance(values, list) or len(ranks) != len(values):
            raise self.refuse(
                f"{name} needs as many values as ranks, and ranks that grow from 2 on; {ranks!r} and {values!r} were "
                "received.",
                f"{name} demande autant de valeurs que de rangs, et des rangs croissants à partir de 2 ; {ranks!r} et "
                f"{values!r} ont été reçus.",
            )
        provenance = [str(table[part]) for part in _PARTS[1:]]
        return {
            rank: Constant(self._positive(value, name), *provenance) for rank, value in zip(ranks, values, strict=True)
        }

    def _described(self, table: Mapping[str, Any], name: str, unit: str, values: str) -> Any:
        # A curve has `values` and `ranks`, a single figure a `value`.
        self.keys((*_PARTS[1:], values, *(("ranks",) if values == "values" else ())), table)
        for part in (values, *_PARTS[1:]):
            if part not in table:
                raise self.missing(f"{name}.{part}")
        if table["unit"] != unit:
            raise self.refuse(
                f"{name} must be given in {unit}, but its unit is {table['unit']!r}.",
                f"{name} doit être donné en {unit}, mais son unité est {table['unit']!r}.",
            )
        if table["standing"] not in STANDINGS:
            sentence = one_of(f"{name}.standing", table["standing"], STANDINGS)
            raise self.refuse(sentence, sentence)
        return table[values]

    def _positive(self, value: object, name: str) -> float:
        # TOML knows inf and nan; 0 < nan is false.
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        return float(self._fitting(name, value, fits, "greater than 0", "plus grand que 0"))
