"""Lab 03: the ring all-reduce by hand, on real ranks.

Layer 6 (labs). Invariant: what counts is the sum on every rank and what was sent for it, not how the code is written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

CHUNK = 3
"""Elements of a chunk: more than one, so that a chunk is not taken for an element."""
_NAME = "sum"


def _input(rank: int, size: int, seed: int) -> Tensor:
    import torch

    return torch.randn(CHUNK * size, generator=torch.Generator().manual_seed(1000 * seed + rank))


def _sum(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    import torch

    return {_NAME: torch.stack([_input(other, size, seed) for other in range(size)]).sum(0)}


def _own(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    return {_NAME: _input(rank, size, seed)}


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    x = _input(rank, size, seed)
    returned = answer(x)
    return {_NAME: x if returned is None else returned}


def ring(
    x: Tensor, *, gather: bool = True, add_again: bool = False, turn: bool = True, steps_less: int = 0, first: int = 1
) -> Tensor:
    """The ring all-reduce of a vector, in place; the options spoil it in the usual ways.

    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    chunks, received = x.chunk(size), torch.empty(CHUNK)

    def pass_on(sent: int, kept: int, add: bool) -> None:
        # Who: rank to its right neighbour. What: one chunk, (CHUNK,). How much: 4 · CHUNK bytes.
        sending = dist.isend(chunks[sent % size].clone(), (rank + 1) % size)
        dist.recv(received, (rank - 1) % size)
        sending.wait()  # type: ignore[union-attr]
        chunks[kept % size].copy_(chunks[kept % size] + received if add else received)

    for step in range(size - 1 - steps_less):
        back = step if turn else 0
        pass_on(rank - back, rank - back - 1, True)
    for step in range(size - 1 - steps_less if gather else 0):
        back = step if turn else 0
        pass_on(rank + first - back, rank + first - back - 1, add_again)
    return x


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The sum is right everywhere; was it a ring?"""
    for answer in answers:
        library = [call["op"] for call in answer.calls if call["op"] not in ("send", "recv")]
        sent = sum(call["numel"] for call in answer.calls if call["op"] == "send")
        if library or not sent:
            raise Wrong(
                say(
                    en=f"The sum is right, but it is torch's own {(library or ['all_reduce'])[0]} that made it: use "
                    "dist.isend and dist.recv only.",
                    fr=f"La somme est juste, mais c’est {(library or ['all_reduce'])[0]}, de torch, qui l’a faite : "
                    "n’utilisez que dist.isend et dist.recv.",
                )
            )
        most = 2 * (size - 1) * CHUNK
        if sent > most:
            raise Wrong(
                say(
                    en=f"The sum is right, but with {size} ranks, rank {answer.rank} sends {sent} elements for a "
                    f"tensor of {CHUNK * size}; a ring sends 2 (size − 1) chunks, that is {most}. Send one chunk per "
                    "step, not the whole tensor.",
                    fr=f"La somme est juste, mais avec {size} rangs, le rang {answer.rank} envoie {sent} éléments pour "
                    f"un tenseur de {CHUNK * size} ; un anneau envoie 2 (size − 1) morceaux, soit {most}. Envoyez un "
                    "morceau par étape, et non tout le tenseur.",
                )
            )


RING_ALL_REDUCE = Exercise(
    id="ring-all-reduce",
    title=Said("all-reduce as a ring", "l’all-reduce en anneau"),
    judge=by_ranks(
        trial=_trial,
        expected=_sum,
        local=_own,
        labels={_NAME: Said("the sum", "la somme")},
        mistakes=(
            Mistake(
                lambda x: ring(x, gather=False),
                Said(
                    "That is the reduce-scatter: each rank holds one chunk fully summed, and partial sums elsewhere. "
                    "The all-gather is missing: size − 1 more steps, in which a chunk received replaces one's own.",
                    "C’est le reduce-scatter : chaque rang détient un morceau entièrement sommé, et des sommes "
                    "partielles ailleurs. Il manque l’all-gather : size − 1 étapes de plus, où chaque morceau reçu "
                    "remplace celui que le rang détenait.",
                ),
            ),
            Mistake(
                lambda x: ring(x, add_again=True),
                Said(
                    "In the all-gather you still add what arrives; it is a finished sum there, and replaces the chunk.",
                    "Dans l’all-gather, vous ajoutez encore ce qui arrive ; c’est alors une somme achevée, qui "
                    "remplace le morceau.",
                ),
            ),
            Mistake(
                lambda x: ring(x, turn=False),
                Said(
                    "You send the same chunk in every step; a ring passes on what it has just received: the number of "
                    "the chunk goes down by one per step.",
                    "Vous envoyez le même morceau à chaque étape ; dans un anneau, on transmet ce que l’on vient de "
                    "recevoir : le numéro du morceau baisse d’un à chaque étape.",
                ),
            ),
            Mistake(
                lambda x: ring(x, first=0),
                Said(
                    "The all-gather starts with the wrong chunk: after the reduce-scatter, rank r holds the whole sum "
                    "of chunk r + 1, not of chunk r.",
                    "L’all-gather part du mauvais morceau : après le reduce-scatter, le rang r détient la somme "
                    "complète du morceau r + 1, et non du morceau r.",
                ),
            ),
            Mistake(
                lambda x: ring(x) / (len(x) // CHUNK),
                Said(
                    "That is the mean; all-reduce gives the sum, and whoever wants a mean divides.",
                    "C’est la moyenne ; l’all-reduce donne la somme, et qui veut une moyenne divise.",
                ),
            ),
        ),
        inspect=_inspect,
    ),
    praise=Said(
        "Right, on 2, 3 and 4 ranks: every chunk has gone round the ring twice, once to be summed, once to be shared.",
        "Exact, sur 2, 3 et 4 rangs : chaque morceau a fait deux tours, un pour être sommé, un pour être diffusé.",
    ),
    hints=(
        Said(
            "In step s of the reduce-scatter, rank r sends chunk r − s (modulo size) and receives chunk r − s − 1, "
            "which it adds to its own. Which does it send in the all-gather?",
            "À l’étape s du reduce-scatter, le rang r envoie le morceau r − s (modulo size) et reçoit le morceau "
            "r − s − 1, qu’il ajoute au sien. Lequel envoie-t-il dans l’all-gather ?",
        ),
        Said(
            "sending = dist.isend(chunk, right), then dist.recv(received, left), then sending.wait(); in step s of the "
            "all-gather, rank r sends chunk r + 1 − s and receives chunk r − s in place of its own.",
            "sending = dist.isend(morceau, right), puis dist.recv(received, left), puis sending.wait() ; à l’étape s "
            "de l’all-gather, le rang r envoie le morceau r + 1 − s et reçoit le morceau r − s à la place du sien.",
        ),
    ),
)
