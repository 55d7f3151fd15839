"""Lab 07: where a rank stands in the grid, and the degree that is left over.

Layer 6 (labs). Invariant: the references are `dlojz.grid`'s own; a wrong answer is named only if it makes one mistake
on every rank of every grid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from dlojz.grid import Grid, complete
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.hybrid_answers import read_triple
from dlojz.labs.verdict import NotDone, Said
from dlojz.text import say

SIZES = ((2, 4, 2), (2, 2, 2), (3, 2, 4), (2, 3, 1), (5, 1, 3))
"""(dp, pp, tp): the course's picture, this lab's, and degrees that all differ."""
Place = Callable[[int, int, int, int], tuple[int, int, int]]


def place_of(rank: int, dp: int, pp: int, tp: int) -> tuple[int, int, int]:
    """(pp_rank, dp_rank, tp_rank) of a rank where rank = (pp_rank·dp + dp_rank)·tp + tp_rank.

    Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.2; Megatron-LM, `initialize_model_parallel`.
    """
    return rank // tp // dp, rank // tp % dp, rank % tp


_WAYS: tuple[tuple[Place, Said], ...] = (
    (
        lambda rank, dp, pp, tp: (rank % pp, rank // pp % dp, rank // pp // dp),
        Said(
            "Your axes are the other way round: in your answer neighbouring ranks differ in their stage. Here tp is "
            "innermost: ranks 0 and 1 share each layer, and pp changes last.",
            "Vos axes sont à l’envers : chez vous, deux rangs voisins diffèrent par leur étage. Ici, tp est le plus "
            "intérieur : les rangs 0 et 1 se partagent chaque couche, et pp change en dernier.",
        ),
    ),
    (
        lambda rank, dp, pp, tp: (rank // tp % pp, rank // tp // pp, rank % tp),
        Said(
            "tp is right, but dp and pp have changed places: once the tensor axis is full, the next rank is another "
            "replica of the same stage.",
            "tp est juste, mais dp et pp ont échangé leurs places : une fois l’axe de tenseur rempli, le rang suivant "
            "est une autre réplique du même étage.",
        ),
    ),
    (
        lambda rank, dp, pp, tp: (rank // dp // tp, rank % dp, rank // dp % tp),
        Said(
            "pp is right, but dp and tp have changed places: the innermost axis, rank % tp, is the tensor one.",
            "pp est juste, mais dp et tp ont échangé leurs places : l’axe le plus intérieur, rank % tp, est celui de "
            "tenseur.",
        ),
    ),
    (
        lambda rank, dp, pp, tp: (rank % tp, rank // tp % dp, rank // tp // dp),
        Said(
            "The three numbers are right, but in another order: (pp_rank, dp_rank, tp_rank) is asked for, the "
            "outermost first.",
            "Les trois nombres sont justes, mais dans un autre ordre : on demande (pp_rank, dp_rank, tp_rank), le plus "
            "extérieur d’abord.",
        ),
    ),
    (
        lambda rank, dp, pp, tp: (rank // tp // dp, rank // tp, rank % tp),
        Said(
            "dp_rank grows beyond dp: rank // tp counts the replicas of all stages; take what is left of it modulo dp.",
            "dp_rank dépasse dp : rank // tp compte les répliques de tous les étages ; prenez-en le reste modulo dp.",
        ),
    ),
    (
        lambda rank, dp, pp, tp: (rank % pp, rank % dp, rank % tp),
        Said(
            "You take the remainder of the rank itself three times: two ranks then stand in one place. Divide by the "
            "degrees further in first, as for hours, minutes and seconds.",
            "Vous prenez trois fois le reste du rang lui-même : deux rangs ont alors la même place. Divisez d’abord "
            "par les degrés plus intérieurs, comme pour les heures, minutes et secondes.",
        ),
    ),
)


def _ranks() -> Iterator[tuple[int, int, int, int]]:
    for dp, pp, tp in SIZES:
        yield from ((rank, dp, pp, tp) for rank in range(dp * pp * tp))


def _judge_place(answer: Callable[..., Any]) -> None:
    cases = list(_ranks())
    given = [read_triple(answer(*case), "(pp_rank, dp_rank, tp_rank)") for case in cases]
    if given == [place_of(*case) for case in cases]:
        return
    for way, says in _WAYS:
        if given == [way(*case) for case in cases]:
            raise Wrong(str(says))
    case, place = next((case, place) for case, place in zip(cases, given, strict=True) if place != place_of(*case))
    rank, dp, pp, tp = case
    back = (place[0] * dp + place[1]) * tp + place[2]
    raise Wrong(
        say(
            en=f"With dp={dp}, pp={pp}, tp={tp} you put rank {rank} at (pp, dp, tp) = {place}, but there the formula "
            f"gives rank {back}"
            + (", and a place is outside its axis." if back == rank else f"; {rank} is at {place_of(*case)}."),
            fr=f"Avec dp={dp}, pp={pp}, tp={tp}, vous mettez le rang {rank} en (pp, dp, tp) = {place}, mais là, la "
            f"formule donne le rang {back}"
            + (", et une place sort de son axe." if back == rank else f" ; {rank} est en {place_of(*case)}."),
        )
    )


PLACE = Exercise(
    id="grid-place",
    title=Said("the place of a rank", "la place d’un rang"),
    judge=_judge_place,
    praise=Said(
        "Right, for every rank of five grids: the number of a process tells its stage, its replica and its slice.",
        "Exact, pour chaque rang de cinq grilles : le numéro d’un processus dit son étage, sa réplique et sa tranche.",
    ),
    hints=(
        Said(
            "The formula is a number written in three digits, like hours, minutes and seconds. Which remainder gives "
            "the last digit, and what is left then?",
            "La formule est un nombre à trois chiffres, comme des heures, minutes et secondes. Quel reste donne le "
            "dernier chiffre, et que reste-t-il ensuite ?",
        ),
        Said(
            "tp_rank is rank % tp; rank // tp is pp_rank · dp + dp_rank, which you take apart in the same way with dp.",
            "tp_rank vaut rank % tp ; rank // tp vaut pp_rank · dp + dp_rank, que vous décomposez de même avec dp.",
        ),
    ),
)

_DEGREES = (
    ((16, None, 4, 2), Said("the course's picture", "la figure du cours")),
    ((8, None, 2, 1), Said("SageMaker's example", "l’exemple de SageMaker")),
    ((24, 3, None, 4), None),
    ((64, 2, 4, None), None),
    ((8, 2, 2, 2), None),
    ((4, 4, 1, None), None),
)
_REFUSED = ((12, None, 4, 2), (16, 3, None, 2), (8, 2, 2, 4))
Degrees = tuple[int, int | None, int | None, int | None]


def missing_degree(
    processes: int, dp: int | None = None, pp: int | None = None, tp: int | None = None
) -> tuple[int, int, int]:
    """(dp, pp, tp), the one left out derived.

    Raises:
        LabError: where no whole degree would do.

    Source: Amazon SageMaker, "Introduction to Model Parallelism": processes_per_host is the product of the degrees.
    """
    return complete(processes, dp, pp, tp)


def _told(case: Degrees) -> str:
    processes, dp, pp, tp = case
    return f"processes={processes}, dp={dp}, pp={pp}, tp={tp}"


def _judge_degrees(answer: Callable[..., Any]) -> None:
    for case, _ in _DEGREES:
        given = read_triple(answer(*case), "(dp, pp, tp)")
        right = missing_degree(*case)
        if given == right:
            continue
        processes, *degrees = case
        others = sum(degree for degree in degrees if degree is not None)
        derived = [number for number, degree in zip(given, degrees, strict=True) if degree is None]
        if sorted(given) == sorted(right):
            raise Wrong(
                say(
                    en=f"For {_told(case)} the three numbers are right, but in another order: (dp, pp, tp), not "
                    f"{given}.",
                    fr=f"Pour {_told(case)}, les trois nombres sont justes, mais dans un autre ordre : (dp, pp, tp), "
                    f"et non {given}.",
                )
            )
        if derived and derived[0] == processes - others:
            raise Wrong(
                say(
                    en=f"For {_told(case)} you subtract: degrees multiply. Each replica is a whole pipeline, and each "
                    "of its stages a whole tensor group.",
                    fr=f"Pour {_told(case)}, vous soustrayez : les degrés se multiplient. Chaque réplique est un "
                    "pipeline entier, et chacun de ses étages un groupe de tenseur entier.",
                )
            )
        product = given[0] * given[1] * given[2]
        named = dict(zip(("dp", "pp", "tp"), degrees, strict=True))
        forgotten = next(
            (f"{name}={degree}" for name, degree in named.items() if product == processes * (degree or 0)), ""
        )
        if derived and forgotten:
            raise Wrong(
                say(
                    en=f"For {_told(case)} you return (dp, pp, tp) = {given}, which makes {product} processes: divide "
                    f"by {forgotten} too.",
                    fr=f"Pour {_told(case)}, vous renvoyez (dp, pp, tp) = {given}, ce qui fait {product} processus : "
                    f"divisez aussi par {forgotten}.",
                )
            )
        raise Wrong(
            say(
                en=f"For {_told(case)} you return (dp, pp, tp) = {given}, which makes {product} processes, not "
                f"{processes}.",
                fr=f"Pour {_told(case)}, vous renvoyez (dp, pp, tp) = {given}, ce qui fait {product} processus, et "
                f"non {processes}.",
            )
        )
    for case in _REFUSED:
        _must_refuse(answer, case)


def _must_refuse(answer: Callable[..., Any], case: Degrees) -> None:
    try:
        given = answer(*case)
    except NotDone:
        raise
    except ValueError:
        return
    except ArithmeticError as error:
        given = type(error).__name__
    raise Wrong(
        say(
            en=f"{_told(case)} cannot be: no whole degree makes this product. Raise a ValueError; your function gives "
            f"{given}. Rounded degrees would leave processes without work.",
            fr=f"{_told(case)} est impossible : aucun degré entier ne donne ce produit. Levez une ValueError ; votre "
            f"fonction donne {given}. Des degrés arrondis laisseraient des processus sans travail.",
        )
    )


DEGREES = Exercise(
    id="grid-degrees",
    title=Said("the missing degree", "le degré manquant"),
    judge=_judge_degrees,
    praise=Said(
        "Right, and what does not come out even is refused: a job asks for processes, the degrees must use all of "
        "them.",
        "Exact, et ce qui ne tombe pas juste est refusé : un travail demande des processus, les degrés doivent tous "
        "les employer.",
    ),
    hints=(
        Said(
            "processes = dp × pp × tp. What must hold of the product of the degrees that are given, so that the third "
            "is whole?",
            "processus = dp × pp × tp. Que doit vérifier le produit des degrés donnés pour que le troisième soit "
            "entier ?",
        ),
        Said(
            "known = (dp or 1) * (pp or 1) * (tp or 1); if processes % known, raise ValueError; the missing one is "
            "processes // known. And where none is missing, known must be processes.",
            "known = (dp or 1) * (pp or 1) * (tp or 1) ; si processes % known, levez ValueError ; le degré manquant "
            "vaut processes // known. Et s’il n’en manque aucun, known doit valoir processes.",
        ),
    ),
)


def grid_of(case: tuple[int, int, int]) -> Grid:
    """The lab's own grid of (dp, pp, tp)."""
    dp, pp, tp = case
    return Grid(dp=dp, pp=pp, tp=tp)
