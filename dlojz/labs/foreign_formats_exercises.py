"""Lab 04: which shares of an old checkpoint a rank reads where the number of ranks has changed.

Layer 6 (labs). Invariant: the reference is pure arithmetic; that its pieces, read in order, are the new share is
checked in the tests on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.verdict import Said
from dlojz.text import say

Pieces = list[tuple[int, int, int]]
CASES = ((12, 2, 3), (12, 3, 2), (10, 4, 3), (10, 3, 4), (7, 2, 2), (9, 1, 2), (9, 4, 1), (23, 5, 4))
"""Elements, ranks that have written, ranks that read; each is asked for every reading rank."""


def shares_to_read(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """Pieces of the old shares that make up a rank's new share, in order.

    N ranks cut a flat vector in shares of ceil(elements / N), of which the last ones are shorter, or empty.

    Args:
        elements: of the vector.
        old_ranks: that have each written their share.
        new_ranks: among which it is cut anew.
        rank: 0 to new_ranks − 1.

    Returns:
        Old rank, first and last place (excluded) within that rank's share; nothing empty.

    Source: what DCP computes for each dimension of a tensor: torch 2.13,
    `distributed/checkpoint/resharding.py`, `_shards_get_overlap_region_wrt_saved_tensor`.
    """
    old, new = -(-elements // old_ranks), -(-elements // new_ranks)
    return _overlaps(elements, old, old_ranks, rank * new, min((rank + 1) * new, elements))


def _overlaps(elements: int, old: int, old_ranks: int, first: int, last: int) -> Pieces:
    found: Pieces = []
    for other in range(old_ranks):
        start, stop = max(first, other * old), min(last, (other + 1) * old, elements)
        if start < stop:
            found.append((other, start - other * old, stop - other * old))
    return found


def _in_the_vector(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """Places in the whole vector rather than in the share."""
    old = -(-elements // old_ranks)
    pieces = shares_to_read(elements, old_ranks, new_ranks, rank)
    return [(other, start + other * old, stop + other * old) for other, start, stop in pieces]


def _rounded_down(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """Shares of floor(elements / N): what is left over is nobody's."""
    old, new = elements // old_ranks, elements // new_ranks
    return _overlaps(elements, old, old_ranks, rank * new, (rank + 1) * new)


def _with_padding(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """Beyond the end of the vector, as if the last share were as long as the others."""
    old, new = -(-elements // old_ranks), -(-elements // new_ranks)
    return _overlaps(old * old_ranks, old, old_ranks, rank * new, (rank + 1) * new)


def _with_empty(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """A piece of every old rank, of no length where the two do not meet."""
    found = {piece[0]: piece for piece in shares_to_read(elements, old_ranks, new_ranks, rank)}
    return [found.get(other, (other, 0, 0)) for other in range(old_ranks)]


def _whole_shares(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """The whole of every share that is touched."""
    old = -(-elements // old_ranks)
    return [
        (other, 0, min(old, elements - other * old))
        for other, _, _ in shares_to_read(elements, old_ranks, new_ranks, rank)
    ]


MISTAKES = (
    Mistake(
        _in_the_vector,
        Said(
            "The pieces are the right ones, but their places are counted from the beginning of the vector: a file "
            "holds a share alone, so subtract the place where that share begins.",
            "Ce sont les bons morceaux, mais leurs positions sont comptées depuis le début du vecteur : un fichier ne "
            "contient qu’une part ; retranchez donc la position où cette part commence.",
        ),
    ),
    Mistake(
        _rounded_down,
        Said(
            "Elements are lost at the end of the vector: where the number of ranks does not divide it, the length of "
            "a share is rounded up.",
            "Des éléments se perdent à la fin du vecteur : quand le nombre de rangs ne le divise pas, la longueur "
            "d’une part s’arrondit vers le haut.",
        ),
    ),
    Mistake(
        _with_padding,
        Said(
            "The last share is shorter than the others: nothing may be read beyond the end of the vector.",
            "La dernière part est plus courte que les autres : rien ne doit être lu au-delà de la fin du vecteur.",
        ),
    ),
    Mistake(
        _with_empty,
        Said(
            "Almost: leave out the ranks of which there is nothing to read; there may be hundreds of files.",
            "Presque : laissez de côté les rangs dont il n’y a rien à lire ; les fichiers peuvent se compter par "
            "centaines.",
        ),
    ),
    Mistake(
        _whole_shares,
        Said(
            "The right ranks, but too much of each: the new share begins and ends in the midst of an old one. Keep "
            "the places where the two overlap.",
            "Ce sont les bons rangs, mais trop de chacun : la nouvelle part commence et finit au milieu d’une "
            "ancienne. Ne gardez que les positions où les deux se recouvrent.",
        ),
    ),
)


def _judge(answer: Callable[..., Any]) -> None:
    inputs = [(*case, rank) for case in CASES for rank in range(case[2])]
    given = [_pieces(answer(*case)) for case in inputs]
    expected = [shares_to_read(*case) for case in inputs]
    if given == expected:
        return
    if [sorted(pieces) for pieces in given] == expected:
        raise Wrong(
            say(
                en="The right pieces, but in another order: laid end to end they must give the new share.",
                fr="Ce sont les bons morceaux, mais dans un autre ordre : mis bout à bout, ils doivent donner la "
                "nouvelle part.",
            )
        )
    for mistake in MISTAKES:
        if given == [mistake.way(*case) for case in inputs]:
            raise Wrong(str(mistake.says))
    case, found, right = next(row for row in zip(inputs, given, expected, strict=True) if row[1] != row[2])
    raise Wrong(
        say(
            en=f"For the arguments {case}, {right} is expected, but your function returns {found}.",
            fr=f"Pour les arguments {case}, on attend {right}, mais votre fonction renvoie {found}.",
        )
    )


def _pieces(value: Any) -> Pieces:
    """What an answer returned, as pieces; lists do as well as tuples."""
    fine = isinstance(value, Sequence) and all(
        isinstance(piece, Sequence) and len(piece) == 3 and all(type(number) is int for number in piece)
        for piece in value
    )
    if not fine:
        raise Wrong(
            say(
                en="Return a list of triples of whole numbers: (old rank, first place, last place excluded).",
                fr="Renvoyez une liste de triplets d’entiers : (ancien rang, première position, dernière position "
                "exclue).",
            )
        )
    return [(piece[0], piece[1], piece[2]) for piece in value]


SHARES_TO_READ = Exercise(
    id="shares-to-read",
    title=Said("reading with another number of ranks", "relire avec un autre nombre de rangs"),
    judge=_judge,
    praise=Said(
        "Right. That is what DCP does for each tensor, and what DeepSpeed leaves to its universal checkpoint.",
        "Exact. C’est ce que DCP fait pour chaque tenseur, et ce que DeepSpeed laisse à son universal checkpoint.",
    ),
    hints=(
        Said(
            "The new share goes from rank · new to (rank + 1) · new in the vector, where new = ceil(elements / "
            "new_ranks); the share of the old rank r from r · old to (r + 1) · old. Where do the two overlap?",
            "Dans le vecteur, la nouvelle part va de rank · new à (rank + 1) · new, où new = ceil(elements / "
            "new_ranks) ; celle de l’ancien rang r, de r · old à (r + 1) · old. Où se recouvrent-elles ?",
        ),
        Said(
            "For each r: start = max(rank · new, r · old); stop = min((rank + 1) · new, (r + 1) · old, elements). If "
            "start < stop, the piece is (r, start − r · old, stop − r · old).",
            "Pour chaque r : start = max(rank · new, r · old) ; stop = min((rank + 1) · new, (r + 1) · old, elements). "
            "Si start < stop, le morceau est (r, start − r · old, stop − r · old).",
        ),
    ),
)
