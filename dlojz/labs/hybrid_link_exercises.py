"""Lab 07: how many bytes of a ring leave their node.

Layer 6 (labs). Invariant: the reference counts the flows that `dlojz.predict.link_flows` gives to a ring, which goes
through its group in the order of the ranks and closes itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.verdict import Said

ROUNDS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
"""How often each chunk goes round, as in lab 03: an all-reduce is a reduce-scatter, then an all-gather."""
BetweenNodes = Callable[[str, int, Sequence[int], int], float]


def between_nodes(collective: str, message_bytes: int, group: Sequence[int], gpus_per_node: int) -> float:
    """Bytes that the ranks of one group, all together, send to another node for one message.

    Each rank sends `rounds · (n − 1)/n` of the message to the next rank of the ring, the last one to the first.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3.
    """
    return _sent(collective, message_bytes, len(group)) * _crossings(group, gpus_per_node)


def _sent(collective: str, message_bytes: int, size: int) -> float:
    return ROUNDS[collective] * (size - 1) / size * message_bytes


def _crossings(group: Sequence[int], gpus_per_node: int) -> int:
    """Ranks of the ring whose next one is on another node."""
    nodes = [rank // gpus_per_node for rank in group]
    return sum(here != there for here, there in zip(nodes, [*nodes[1:], nodes[0]], strict=True))


def _open(group: Sequence[int], gpus_per_node: int) -> int:
    """The same of a chain that does not close itself."""
    return _crossings(group, gpus_per_node) - (group[0] // gpus_per_node != group[-1] // gpus_per_node)


def _cases() -> Iterator[tuple[str, int, tuple[int, ...], int]]:
    dice = random.Random(7)
    groups = (
        ((0, 1), 8),
        ((0, 8), 8),
        ((0, 4, 8, 12), 8),
        ((1, 3, 5), 4),
        ((0, 1, 2, 3, 4, 5, 6, 7), 4),
        ((5, 11, 17, 23), 4),
        ((2, 3), 1),
    )
    for group, gpus_per_node in groups:
        for collective in ROUNDS:
            yield collective, 840 * dice.randrange(1, 5000), group, gpus_per_node


BETWEEN_NODES = Exercise(
    id="between-nodes",
    title=Said("what leaves the node", "ce qui sort du nœud"),
    judge=by_reference(
        between_nodes,
        cases=_cases,
        mistakes=(
            Mistake(
                lambda collective, m, group, per: _sent(collective, m, len(group)) * _open(group, per),
                Said(
                    "Your chain does not close: in a ring the last rank sends to the first, and that message too may "
                    "leave the node.",
                    "Votre chaîne ne se referme pas : dans un anneau, le dernier rang envoie au premier, et ce message "
                    "aussi peut sortir du nœud.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: ROUNDS[collective] * m * _crossings(group, per),
                Said(
                    "You count the whole message: with n ranks each sends n − 1 chunks of 1/n of it per round.",
                    "Vous comptez le message entier : avec n rangs, chacun envoie par tour n − 1 morceaux d’un n-ième.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: m * _crossings(group, per),
                Said(
                    "You count one whole message per boundary: each rank sends (n − 1)/n of it per round, and an "
                    "all-reduce goes round twice.",
                    "Vous comptez un message entier par frontière : chaque rang en envoie (n − 1)/n par tour, et un "
                    "all-reduce fait deux tours.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: (len(group) - 1) / len(group) * m * _crossings(group, per),
                Said(
                    "An all-reduce goes round twice, a reduce-scatter and then an all-gather; you count one round for "
                    "each.",
                    "Un all-reduce fait deux tours, un reduce-scatter puis un all-gather ; vous n’en comptez qu’un.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: 2 * (len(group) - 1) / len(group) * m * _crossings(group, per),
                Said(
                    "You count two rounds for every collective; a reduce-scatter and an all-gather are each one half "
                    "of an all-reduce.",
                    "Vous comptez deux tours pour chaque collective ; un reduce-scatter et un all-gather sont chacun "
                    "une moitié d’all-reduce.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: (
                    _sent(collective, m, len(group)) * len(group) * (_crossings(group, per) > 0)
                ),
                Said(
                    "You count all that the group sends as soon as it touches two nodes; only the ranks whose "
                    "neighbour in the ring is on another node send out of theirs.",
                    "Dès que le groupe touche deux nœuds, vous comptez tout ce qu’il envoie ; seuls les rangs dont le "
                    "voisin dans l’anneau est sur un autre nœud envoient hors du leur.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: _sent(collective, m, len(group)) * (_crossings(group, per) > 0),
                Said(
                    "You count one rank only: every rank whose neighbour is on another node sends as much; on two "
                    "nodes, there are two at least.",
                    "Vous ne comptez qu’un rang : chaque rang dont le voisin est sur un autre nœud envoie autant ; "
                    "entre deux nœuds, il y en a au moins deux.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: _sent(collective, m, len(group)) * len(group),
                Said(
                    "You count everything that the group sends; messages between two ranks of one node stay inside it.",
                    "Vous comptez tout ce qu’envoie le groupe ; les messages entre deux rangs d’un même nœud y "
                    "restent.",
                ),
            ),
            Mistake(
                lambda collective, m, group, per: (
                    _sent(collective, m, len(group))
                    * sum(one % per != other % per for one, other in zip(group, [*group[1:], group[0]], strict=True))
                ),
                Said(
                    "You take rank % gpus_per_node, the number of a GPU within its node; the node is rank // "
                    "gpus_per_node.",
                    "Vous prenez rank % gpus_per_node, le numéro du GPU dans son nœud ; le nœud, c’est rank // "
                    "gpus_per_node.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: a ring enters and leaves each node once if its ranks are in order, however many it has there.",
        "Exact : un anneau dont les rangs sont dans l’ordre entre et sort une fois de chaque nœud, quel que soit le "
        "nombre de rangs qu’il y a.",
    ),
    hints=(
        Said(
            "Two factors: what one rank sends to its neighbour (lab 03), and how many ranks have their neighbour on "
            "another node. Who is the neighbour of the last?",
            "Deux facteurs : ce qu’un rang envoie à son voisin (TP 03), et combien de rangs ont leur voisin sur un "
            "autre nœud. Qui est le voisin du dernier ?",
        ),
        Said(
            "2 (n − 1)/n · message_bytes for an all-reduce, half of it for the others; times the number of i for which "
            "group[i] // gpus_per_node differs from group[(i + 1) % n] // gpus_per_node.",
            "2 (n − 1)/n · message_bytes pour un all-reduce, la moitié pour les autres ; multiplié par le nombre de i "
            "pour lesquels group[i] // gpus_per_node diffère de group[(i + 1) % n] // gpus_per_node.",
        ),
    ),
)
