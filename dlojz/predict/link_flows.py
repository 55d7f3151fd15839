"""Whom each collective sends to, and how much: one rank's traffic as flows to other ranks of a grid.

Layer 3. Invariant: what a rank sends here is `Traffic.sent_bytes` for rings and sends; a receiver adds nothing.

Who sends what to whom, per step and rank, for a message of M bytes in a group of n ranks:

| collective | goes to | bytes |
|--|--|--|
| all_reduce | the next rank of the group | 2(n − 1)/n · M |
| all_gather, reduce_scatter | the next rank of the group | (n − 1)/n · M |
| broadcast | the next rank, but for the last | M |
| reduce | the rank before, but for the first | M |
| all_to_all | every other rank | M/n each |
| gather, scatter | the first rank, from the first rank | M/n each |
| send | the ranks that hold the stages beside its own | M in all |

A ring goes through its group in the order of the ranks, so it enters and leaves each node once, which is the least
possible.

Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3 (rings).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from dlojz.footprint import Traffic
from dlojz.grid import AXES, Grid
from dlojz.schema import LabError
from dlojz.text import say

Destinations = Sequence[Mapping[int, Fraction]]
"""Per pipeline rank, to which pipeline ranks it sends, each with its share of the bytes sent."""
EXPERT_GROUPS = ("ep", "edp")
"""Groups within the data axis: ranks that share the experts out, and ranks that hold the same ones."""
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
"""How often a ring goes round, as a multiple of n − 1 messages."""


class Flow(NamedTuple):
    """What one rank sends to another in one step, for one collective.

    Args:
        group: mesh axis (dp, tp, pp), `ep` and `edp` (parts of dp, see `EXPERT_GROUPS`), `twins` (the two copies of a
            stage, along pp) or `control` (the lab's own).
        collective: its name.
        source: the rank that sends.
        target: the rank that receives.
        num_bytes: exact; a ring's chunks need not be whole bytes.
        messages: one after the other.
    """

    group: str
    collective: str
    source: int
    target: int
    num_bytes: Fraction
    messages: Fraction


def plain_destinations(pp: int) -> Destinations:
    """Whom the ranks of a plain pipeline send to: activations to the next rank, as many bytes of gradients back."""
    beside = [[other for other in (rank - 1, rank + 1) if 0 <= other < pp] for rank in range(pp)]
    return [{other: Fraction(1, len(others)) for other in others} for others in beside]


def flows_of(told: Traffic, rank: int, grid: Grid, destinations: Destinations) -> Iterator[Flow]:
    """What one rank sends for one line of its traffic; nothing where it is alone in its group.

    Raises:
        LabError: if the grid has no such group, or gives it another size.
    """
    group = _members(told.group, rank, grid, told.group_size)
    size, whole, count = len(group), Fraction(told.message_bytes), told.count or 0
    if told.group_size != size:
        raise LabError(
            say(
                en=f"a group along {told.group} has {size} ranks in this grid, but {told.collective} was told of "
                f"{told.group_size}: give traffic and grid the same degrees.",
                fr=f"un groupe selon {told.group} a {size} rangs dans cette grille, mais {told.collective} en "
                f"annonce {told.group_size} : donnez au trafic et à la grille les mêmes degrés.",
            )
        )
    if size == 1:
        return
    place, share = group.index(rank), whole / size

    def flow(target: int, num_bytes: Fraction, messages: int | Fraction = count) -> Flow:
        return Flow(told.group, told.collective, rank, target, num_bytes, Fraction(messages))

    if told.collective in _ROUNDS:
        hops = _ROUNDS[told.collective] * (size - 1)
        yield flow(group[(place + 1) % size], share * hops, count * hops)
    elif told.collective == "send":
        for stage, part in destinations[grid.coordinates(rank).pp].items():
            yield flow(group[stage], whole * part, count * part)
    elif told.collective == "all_to_all":
        yield from (flow(other, share) for other in group if other != rank)
    elif told.collective == "scatter" and place == 0:
        yield from (flow(other, share) for other in group[1:])
    elif told.collective == "gather" and place:
        yield flow(group[0], share)
    elif told.collective == "broadcast" and place < size - 1:
        yield flow(group[place + 1], whole)
    elif told.collective == "reduce" and place:
        yield flow(group[place - 1], whole)


def _members(name: str, rank: int, grid: Grid, told_size: int) -> tuple[int, ...]:
    """The ranks of a group, in the order in which a ring goes through them.

    Groups of experts are parts of a data-parallel one: `ep` neighbours on the axis, or ranks as far apart (`edp`).
    """
    if name in EXPERT_GROUPS:
        replicas, place = grid.group_of(rank, "dp"), grid.coordinates(rank).dp
        if name == "ep":
            first = place - place % told_size
            return replicas[first : first + told_size]
        apart = max(1, grid.dp // told_size)
        return replicas[place % apart :: apart]
    if name in AXES:
        return grid.group_of(rank, name)
    if name == "twins":  # a bidirectional pipeline holds each stage on two ranks, as far from one end as from the other
        stages, place = grid.group_of(rank, "pp"), grid.coordinates(rank).pp
        return tuple(sorted({stages[place], stages[grid.pp - 1 - place]}))
    if name == "control":
        return tuple(range(grid.world_size))
    raise LabError(
        say(
            en=f"the group {name!r} is none of a grid: use pp, dp, tp, ep, edp, twins or control.",
            fr=f"le groupe {name!r} n’est pas d’une grille : prenez pp, dp, tp, ep, edp, twins ou control.",
        )
    )
