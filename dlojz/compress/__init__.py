"""Compression in lab 11: its task and the 2:4 pattern. Importing this package loads no torch.

Source: Mishra et al. 2021 (arXiv 2104.08378) for 2:4.
"""

from collections.abc import Sequence

from dlojz.base.language import refusal

GROUP = 4
KEPT = 2


def check_groups(shape: Sequence[int], name: str = "weight") -> None:
    """Refuse a weight whose rows do not divide into groups of four.

    Raises:
        LabError: if it has no two dimensions, or an input dimension that is not a multiple of 4.
    """
    if len(shape) != 2 or shape[1] % GROUP or not shape[1]:
        dimensions = " × ".join(str(length) for length in shape)
        raise refusal(
            en=f"2:4 keeps two of every four weights along the input dimension, which must be a multiple of 4 in "
            f"a matrix (outputs × inputs), but {name} is {dimensions}.",
            fr=f"2:4 garde deux poids sur quatre le long de la dimension d’entrée, qui doit être un multiple de 4 "
            f"dans une matrice (sorties × entrées), mais {name} mesure {dimensions}.",
        )
