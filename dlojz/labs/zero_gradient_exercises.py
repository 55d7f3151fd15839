"""Lab 04: the gradients shared out among the ranks, by hand.

Layer 6 (labs). Invariant: an answer is held to the mean gradient that one process computes, and then to what each rank
has been sent for it: right values alone are not ZeRO.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.labs.zero_optimizer_exercises import random
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

SHAPES = ((3, 5), (4,), (2, 3))
"""25 gradients, which neither 2 nor 3 nor 4 ranks share evenly."""
_SHARE = "gradient share"


def reduce_gradients(gradients: Sequence[Tensor], *, way: str = "right") -> Tensor:
    """This rank's share of the mean gradient, flat; zeros fill the last share up. `way` spoils it.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.2; the padding is that of `dlojz.zero`.
    """
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F

    size = dist.get_world_size()
    pieces = [gradient.flatten() for gradient in gradients]
    if way == "each apart":
        pieces = [F.pad(piece, (0, -piece.numel() % size)) for piece in pieces]
    flat = torch.cat(pieces)
    missing = -flat.numel() % size
    flat = F.pad(flat, (missing, 0) if way == "in front" else (0, missing))
    if way == "every other":
        flat = flat.view(-1, size).T.flatten()
    share = flat.new_empty(flat.numel() // size)
    # Who: all ranks. What: all gradients, flat and padded, summed; rank r gets the r-th part. How much: their bytes.
    dist.reduce_scatter_tensor(share, flat)
    return share / size


def _gradients_of(rank: int, seed: int) -> list[Tensor]:
    return [random(1000 * seed + 10 * rank + number, *shape) for number, shape in enumerate(SHAPES)]


def _reduce_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    share = answer(_gradients_of(rank, seed))
    if share is None:
        return {"nothing": True}, _share_of(range(size), rank, size, seed)  # for `_inspect_volume` to refuse
    return {}, {_SHARE: share}


def _share_of(ranks: Sequence[int], rank: int, size: int, seed: int) -> dict[str, Tensor]:
    import torch
    import torch.nn.functional as F

    flats = [torch.cat([gradient.flatten() for gradient in _gradients_of(other, seed)]) for other in ranks]
    mean = torch.stack(flats).mean(0)
    return {_SHARE: F.pad(mean, (0, -mean.numel() % size)).chunk(size)[rank]}


def _inspect_volume(answers: list[RankAnswer], size: int) -> None:
    """The share is right; was anything sent that only other ranks need?"""
    if answers[0].value.get("nothing"):
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    whole = sum(math.prod(shape) for shape in SHAPES)
    if sum(call["numel"] for call in answers[0].calls if call["op"] == "all_reduce") >= whole:
        raise Wrong(
            say(
                en="The share is right, but the all-reduce brings the whole sum to every rank, and all but a share of "
                "it is thrown away: dist.reduce_scatter_tensor sends half as much, and no rank holds the whole sum.",
                fr="La part est juste, mais l’all-reduce apporte la somme entière à chaque rang, qui en jette tout "
                "sauf une part : dist.reduce_scatter_tensor envoie deux fois moins d’octets, et aucun rang ne détient "
                "la somme entière.",
            )
        )
    if any(call["op"] in ("all_gather", "all_gather_into_tensor", "gather") for call in answers[0].calls):
        raise Wrong(
            say(
                en="The share is right, but all gradients of all ranks are brought together to be added: that takes N "
                "times the memory; dist.reduce_scatter_tensor adds on the way.",
                fr="La part est juste, mais les gradients de tous les rangs sont d’abord réunis pour être additionnés "
                ": il y faut N fois la mémoire ; dist.reduce_scatter_tensor additionne en chemin.",
            )
        )


SHARD_GRADIENTS = Exercise(
    id="shard-gradients",
    title=Said("sharding the gradients (stage 2)", "répartir les gradients (stage 2)"),
    judge=by_ranks(
        trial=_reduce_trial,
        expected=lambda rank, size, seed: _share_of(range(size), rank, size, seed),
        local=lambda rank, size, seed: _share_of([rank], rank, size, seed),
        labels={_SHARE: Said("the share of the gradient", "le gradient (la part du rang)")},
        mistakes=(
            Mistake(
                lambda gradients: reduce_gradients(gradients, way="each apart"),
                Said(
                    "You pad each gradient by itself: the shares get longer than they need to be, and no longer match "
                    "those of the weights. Lay all end to end first, then pad once, at the end.",
                    "Vous complétez chaque gradient séparément : les parts sont plus longues que nécessaire, et ne "
                    "correspondent plus à celles des poids. Mettez-les d’abord bout à bout, puis complétez une seule "
                    "fois, à la fin.",
                ),
            ),
            Mistake(
                lambda gradients: reduce_gradients(gradients, way="in front"),
                Said(
                    "The zeros stand in front, which shifts every gradient: they belong at the end.",
                    "Les zéros sont au début, ce qui décale tous les gradients : mettez-les à la fin.",
                ),
            ),
            Mistake(
                lambda gradients: reduce_gradients(gradients, way="every other"),
                Said(
                    "Each rank gets every N-th number; a share is one piece: rank r owns the r-th of N equal ones.",
                    "Chaque rang reçoit un nombre sur N ; or une part est d’un seul tenant : le rang r possède le "
                    "r-ième de N morceaux égaux.",
                ),
            ),
        ),
        inspect=_inspect_volume,
    ),
    praise=Said(
        "Right: half an all-reduce, and no rank keeps more of the mean gradient than its share.",
        "Exact : un demi-all-reduce, et aucun rang ne garde du gradient moyen plus que sa part.",
    ),
    hints=(
        Said(
            "Lay the gradients end to end (flatten, torch.cat), and add zeros at the end until their number is a "
            "multiple of the number of ranks (F.pad).",
            "Mettez les gradients bout à bout (flatten, torch.cat), et ajoutez des zéros à la fin jusqu’à un multiple "
            "du nombre de rangs (F.pad).",
        ),
        Said(
            "-flat.numel() % size zeros are missing. Then dist.reduce_scatter_tensor(share, flat), where share has "
            "flat.numel() // size elements, and divide by size.",
            "Il manque -flat.numel() % size zéros. Ensuite, dist.reduce_scatter_tensor(share, flat), où share compte "
            "flat.numel() // size éléments, puis divisez par size.",
        ),
    ),
)
