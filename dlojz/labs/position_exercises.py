"""Lab 01: the relative position bias.

Layer 6 (labs). Invariant: the reference gives what `dlojz.models.coatnet` adds to its scores (tested).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dlojz.labs.attention_exercises import random_tensors
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said


def _bias_by(row_sign: int, column_sign: int, swap: bool = False) -> Callable[[Any, int], Any]:
    def way(table: Any, side: int) -> Any:
        import torch

        index = torch.arange(side * side)
        row, column = index // side, index % side
        rows = row_sign * (row[:, None] - row[None, :]) + side - 1
        columns = column_sign * (column[:, None] - column[None, :]) + side - 1
        return table[columns, rows] if swap else table[rows, columns]

    return way


def relative_bias(table: Any, side: int) -> Any:
    """Bias of every (query, key) pair, shape (side², side²), from a table of (2 side − 1)² relative positions.

    Source: Dai et al. 2021 (arXiv 2106.04803), equation 3: w_{i−j}; equal to that of `dlojz.models.coatnet` (tested).
    """
    return _bias_by(1, 1)(table, side)


def _tables() -> Iterator[tuple[Any, int]]:
    for side, seed in ((3, 12), (4, 13), (2, 14)):
        yield random_tensors((2 * side - 1, 2 * side - 1), seed=seed)[0], side


def _without_offset(table: Any, side: int) -> Any:
    import torch

    index = torch.arange(side * side)
    row, column = index // side, index % side
    return table[row[:, None] - row[None, :], column[:, None] - column[None, :]]


RELATIVE_BIAS = Exercise(
    id="relative-bias",
    title=Said("the relative position bias", "le biais de position relative"),
    judge=by_reference(
        relative_bias,
        cases=_tables,
        mistakes=(
            Mistake(
                _bias_by(-1, -1),
                Said(
                    "The sign is reversed: the difference is query − key, and yours is key − query.",
                    "Le signe est inversé : la différence est requête − clé, et la vôtre est clé − requête.",
                ),
            ),
            Mistake(
                _bias_by(1, 1, swap=True),
                Said(
                    "Rows and columns are swapped: the first index of the table is the difference of rows.",
                    "Lignes et colonnes sont échangées : le premier indice de la table est la différence des lignes.",
                ),
            ),
            Mistake(
                _without_offset,
                Said(
                    "The differences go from −(side − 1) to side − 1, but an index starts at 0: without adding side "
                    "− 1, Python reads the negative ones from the end of the table.",
                    "Les différences vont de −(side − 1) à side − 1, mais un indice commence à 0 : sans ajouter side "
                    "− 1, Python lit les négatives depuis la fin de la table.",
                ),
            ),
            Mistake(
                lambda table, side: table[:side, :side].reshape(-1)[None].expand(side * side, -1),
                Said(
                    "Every query gets the same row: this is an absolute position of the key, not one relative to the "
                    "query.",
                    "Chaque requête reçoit la même ligne : c’est une position absolue de la clé, et non relative à la "
                    "requête.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right. Two pairs at the same distance share one number, wherever they are: that is how attention gets "
        "something of a convolution.",
        "Exact. Deux paires de même décalage partagent un nombre, où qu’elles soient : l’attention reprend ainsi "
        "quelque chose de la convolution.",
    ),
    hints=(
        Said(
            "Token t stands at row t // side and column t % side. What is the difference of rows of all pairs, as a "
            "(T, T) tensor?",
            "Le token t est à la ligne t // side et à la colonne t % side. Quelle est la différence des lignes de "
            "toutes les paires, en un tenseur (T, T) ?",
        ),
        Said(
            "row[:, None] - row[None, :] + side - 1 is the first index, the same with columns the second; a table "
            "can be indexed by two tensors at once.",
            "row[:, None] - row[None, :] + side - 1 est le premier indice, de même avec les colonnes pour le "
            "second ; une table s’indexe par deux tenseurs à la fois.",
        ),
    ),
)
