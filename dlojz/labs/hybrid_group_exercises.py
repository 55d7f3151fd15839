"""Lab 07: the groups of ranks along each axis of the grid.

Layer 6 (labs). Invariant: the reference is `dlojz.grid.Grid.groups`; the order of the groups, and of the ranks within
one, is nobody's business here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlojz.grid import AXES, Grid
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.hybrid_answers import read_groups
from dlojz.labs.hybrid_grid_exercises import SIZES, grid_of
from dlojz.labs.verdict import Said
from dlojz.text import say

Groups = list[tuple[int, ...]]
_AXES = ("tp", "dp", "pp")


def groups_of(axis: str, dp: int, pp: int, tp: int) -> tuple[tuple[int, ...], ...]:
    """The groups along an axis: ranks that differ in their place along it alone.

    Source: Megatron-LM, `megatron/core/parallel_state.py`, `initialize_model_parallel`.
    """
    return grid_of((dp, pp, tp)).groups(axis)


def _consecutive(axis: str, grid: Grid) -> Groups:
    size = grid.size(axis)
    return [tuple(range(first, first + size)) for first in range(0, grid.world_size, size)]


def _ordered(order: str) -> Callable[[str, Grid], Groups]:
    return lambda axis, grid: list(Grid(dp=grid.dp, pp=grid.pp, tp=grid.tp, order=order).groups(axis))


def _same_place(axis: str, grid: Grid) -> Groups:
    """Ranks with the same place along the axis: what the group must not have in common."""
    found: dict[int, list[int]] = {}
    for rank in range(grid.world_size):
        found.setdefault(getattr(grid.coordinates(rank), axis), []).append(rank)
    return [tuple(ranks) for ranks in found.values()]


def _as_many_as_groups(axis: str, grid: Grid) -> Groups:
    """As Megatron writes the pipeline's groups, for every axis: `range(i, world, world // degree)`."""
    step = grid.world_size // grid.size(axis)
    return [tuple(range(first, grid.world_size, step)) for first in range(step)]


_WAYS: tuple[tuple[Callable[[str, Grid], Groups], Said], ...] = (
    (
        _consecutive,
        Said(
            "Your groups are consecutive ranks along every axis. That is right for tp, the innermost axis, alone: dp "
            "neighbours are tp ranks apart, pp neighbours dp × tp.",
            "Vos groupes sont faits de rangs consécutifs selon chaque axe. C’est juste pour tp seulement, l’axe le "
            "plus intérieur : les voisins selon dp sont à tp rangs l’un de l’autre, selon pp à dp × tp.",
        ),
    ),
    (
        _ordered("tp-pp-dp"),
        Said(
            "The axes dp and pp have changed places: the neighbour along dp is tp ranks further, along pp dp × tp "
            "ranks further.",
            "Les axes dp et pp ont échangé leurs places : le voisin selon dp est tp rangs plus loin, selon pp dp × tp "
            "rangs plus loin.",
        ),
    ),
    (
        _ordered("pp-dp-tp"),
        Said(
            "The order of the axes is the other way round: you number the stages first, so the tensor groups are "
            "spread as far as possible, over all nodes. tp is the innermost.",
            "L’ordre des axes est à l’envers : vous numérotez d’abord les étages, et les groupes de tenseur sont "
            "dispersés au plus loin, sur tous les nœuds. tp est le plus intérieur.",
        ),
    ),
    (
        _same_place,
        Said(
            "You group the ranks that have the same place along the axis. A group holds the opposite: ranks whose "
            "place along the axis differs, and all else is equal (a tensor group: the slices of one layer of one "
            "stage, in one replica).",
            "Vous groupez les rangs de même place selon l’axe. C’est le contraire : dans un groupe, la place selon "
            "l’axe diffère, et tout le reste est égal (un groupe de tenseur : les tranches d’une couche, dans un "
            "étage et une réplique).",
        ),
    ),
    (
        _as_many_as_groups,
        Said(
            "You count in steps of (ranks ÷ degree) along every axis. That is right for pp, the outermost axis, alone.",
            "Vous comptez par pas de (rangs ÷ degré) selon chaque axe. C’est juste pour pp seulement, l’axe le plus "
            "extérieur.",
        ),
    ),
)


def _judge(answer: Callable[..., Any]) -> None:
    cases = [(axis, size) for size in SIZES for axis in _AXES]
    given: list[Groups] = []
    for axis, size in cases:
        grid = grid_of(size)
        given.append(read_groups(answer(axis, *size), grid.world_size))
    right = [sorted(grid_of(size).groups(axis)) for axis, size in cases]
    if given == right:
        return
    for way, says in _WAYS:
        if given == [sorted(tuple(sorted(group)) for group in way(axis, grid_of(size))) for axis, size in cases]:
            raise Wrong(str(says))
    number = next(index for index, groups in enumerate(given) if groups != right[index])
    axis, size = cases[number]
    raise Wrong(_difference(axis, grid_of(size), given[number]))


def _difference(axis: str, grid: Grid, given: Groups) -> str:
    size = grid.size(axis)
    if {len(group) for group in given} != {size}:
        return say(
            en=f"With {grid.degrees} the groups along {axis} have {size} rank(s) each, {len(grid.groups(axis))} groups "
            f"in all, but you return {len(given)} groups, the first of {len(given[0])}.",
            fr=f"Avec {grid.degrees}, les groupes selon {axis} sont de {size} rang(s), {len(grid.groups(axis))} "
            f"groupes en tout, mais vous en renvoyez {len(given)}, le premier de {len(given[0])}.",
        )
    group = next(group for group in given if group not in grid.groups(axis))
    one, other = group[:2]
    differ = [name for name in AXES if getattr(grid.coordinates(one), name) != getattr(grid.coordinates(other), name)]
    return say(
        en=f"With {grid.degrees} you put ranks {one} and {other} into one group along {axis}, but they differ along "
        f"{' and '.join(differ)}: ranks of a group along {axis} differ along {axis} alone.",
        fr=f"Avec {grid.degrees}, vous mettez les rangs {one} et {other} dans un même groupe selon {axis}, mais ils "
        f"diffèrent selon {' et '.join(differ)} : les rangs d’un groupe selon {axis} ne diffèrent que selon {axis}.",
    )


GROUPS = Exercise(
    id="grid-groups",
    title=Said("the groups along each axis", "les groupes selon chaque axe"),
    judge=_judge,
    praise=Said(
        "Right: along each axis every rank has one group, and two groups of a rank have nothing but the rank in "
        "common.",
        "Exact : selon chaque axe, tout rang a un groupe, et deux groupes d’un même rang n’ont que lui en commun.",
    ),
    hints=(
        Said(
            "Hold two of the three places, let the third run: that is one group. Do so for each choice of the two "
            "held.",
            "Fixez deux des trois places, faites varier la troisième : voilà un groupe. Recommencez pour chaque choix "
            "des deux places fixées.",
        ),
        Said(
            "From rank to rank along tp it is 1, along dp tp, along pp dp * tp: call that step. A group begins at each "
            "rank whose place along the axis is 0 (place_of tells it), and is [first + i * step for i in "
            "range(degree)].",
            "D’un rang au suivant, l’écart est de 1 selon tp, de tp selon dp, de dp * tp selon pp : appelez-le step. "
            "Un groupe commence à chaque rang dont la place selon l’axe est 0 (place_of la donne) ; c’est [first + i * "
            "step for i in range(degree)].",
        ),
    ),
)
