"""Lab 04: the optimizer shared out among the ranks, by hand.

Layer 6 (labs). Invariant: an answer is held to the weights of one process, and then to what each rank has kept and
communicated for them: right values alone are not ZeRO.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

MakeOptimizer = Callable[[Sequence[Any]], Any]
WEIGHTS, STEPS = 24, 3
_WEIGHTS = "weights"


def random(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _adam(tensors: Sequence[Any]) -> Any:
    import torch

    return torch.optim.Adam(tensors, lr=0.1)


def shard_optimizer(weights: Tensor, make_optimizer: MakeOptimizer, *, way: str = "right") -> Callable[[Tensor], None]:
    """An optimizer for this rank's share of the weights; the function returned makes a step. `way` spoils it.

    Source: Rajbhandari et al. 2020 (arXiv 1910.02054), §5.1.
    """
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()
    share = weights.chunk(size)[0 if way == "first" else rank]
    optimizer = make_optimizer([share])

    def step(gradient: Tensor) -> None:
        nonlocal optimizer
        if way == "anew":
            optimizer = make_optimizer([share])
        share.grad = gradient
        if way == "gathers before":
            dist.all_gather_into_tensor(weights, share)
        optimizer.step()
        if way == "adds":
            dist.all_reduce(weights)
        elif way != "gathers before":
            # Who: all ranks. What: each gives its updated share, and has all of them. How much: the weights' bytes.
            dist.all_gather_into_tensor(weights, share)

    return step


def _shard_optimizer_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    """Several steps, so that moments count."""
    made: list[int] = []

    def make_optimizer(tensors: Any) -> Any:
        optimizer = _adam(tensors)
        made.append(sum(tensor.numel() for group in optimizer.param_groups for tensor in group["params"]))
        return optimizer

    weights = random(seed, WEIGHTS)
    step = answer(weights, make_optimizer)
    if not callable(step):
        return {"returned": type(step).__name__}, _weights_after(rank, size, seed)  # for `_inspect_states` to refuse
    for number in range(STEPS):
        step(random(seed + 1 + number, WEIGHTS).chunk(size)[rank].clone())
    return {"elements": made}, {_WEIGHTS: weights}


def _weights_after(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    weights = random(seed, WEIGHTS)
    optimizer = _adam([weights])
    for number in range(STEPS):
        weights.grad = random(seed + 1 + number, WEIGHTS)
        optimizer.step()
    return {_WEIGHTS: weights}


def _own_share_updated(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    weights = random(seed, WEIGHTS)
    weights.chunk(size)[rank].copy_(_weights_after(rank, size, seed)[_WEIGHTS].chunk(size)[rank])
    return {_WEIGHTS: weights}


def _inspect_states(answers: list[RankAnswer], size: int) -> None:
    """The weights are right; has each rank kept the states of its share alone?"""
    returned = answers[0].value.get("returned")
    if returned:
        raise Wrong(
            say(
                en=f"Your function must return the function step, without calling it, but it returns a {returned}.",
                fr="Votre fonction doit renvoyer la fonction step, sans l’appeler, mais elle renvoie un objet de type "
                f"{returned}.",
            )
        )
    share = WEIGHTS // size
    kept = max(answers[0].value["elements"], default=share)
    if kept > share:
        raise Wrong(
            say(
                en=f"The weights are right, but rank 0's optimizer has been given {kept} numbers of {WEIGHTS}, so it "
                f"keeps moments for all of these; its share is {share}: give make_optimizer the share alone.",
                fr=f"Les poids sont justes, mais l’optimiseur du rang 0 a reçu {kept} nombres sur {WEIGHTS} : il garde "
                f"donc des moments pour chacun d’eux. Sa part en compte {share} : ne donnez que celle-ci à "
                "make_optimizer.",
            )
        )
    if any(call["op"] == "all_reduce" and call["numel"] >= WEIGHTS for call in answers[0].calls):
        raise Wrong(
            say(
                en="The weights are right, but an all-reduce of them sends twice as much as needed: nothing is to be "
                "summed here, an all-gather of the shares is enough.",
                fr="Les poids sont justes, mais un all-reduce des poids envoie le double du nécessaire : il n’y a rien "
                "à additionner ici, un all-gather des parts suffit.",
            )
        )


SHARD_OPTIMIZER = Exercise(
    id="shard-optimizer",
    title=Said("sharding the optimizer (stage 1)", "répartir l’optimiseur (stage 1)"),
    judge=by_ranks(
        trial=_shard_optimizer_trial,
        expected=_weights_after,
        local=_own_share_updated,
        labels={_WEIGHTS: Said("the weights", "les poids")},
        mistakes=(
            Mistake(
                lambda weights, make: shard_optimizer(weights, make, way="anew"),
                Said(
                    "The optimizer is made anew in every step, and its moments start from zero each time: make it "
                    "once, outside step.",
                    "L’optimiseur est recréé à chaque pas, et ses moments repartent de zéro : créez-le une seule fois, "
                    "hors de step.",
                ),
            ),
            Mistake(
                lambda weights, make: shard_optimizer(weights, make, way="first"),
                Said(
                    "Every rank updates the first share: rank r owns the r-th one, weights.chunk(size)[rank].",
                    "Tous les rangs mettent à jour la première part : le rang r possède la r-ième, "
                    "weights.chunk(size)[rank].",
                ),
            ),
            Mistake(
                lambda weights, make: shard_optimizer(weights, make, way="adds"),
                Said(
                    "All-reduce adds up the weights of all ranks; here nothing is to be added, each rank's updated "
                    "share is to be brought to the others: an all-gather.",
                    "L’all-reduce additionne les poids de tous les rangs ; or il n’y a rien à additionner : la part "
                    "mise à jour de chaque rang doit parvenir aux autres, c’est un all-gather.",
                ),
            ),
            Mistake(
                lambda weights, make: shard_optimizer(weights, make, way="gathers before"),
                Said(
                    "The shares are gathered before the update: the last step of the others never arrives. First "
                    "optimizer.step(), then the all-gather.",
                    "Les parts sont rassemblées avant la mise à jour : le dernier pas des autres n’arrive jamais. "
                    "D’abord optimizer.step(), ensuite l’all-gather.",
                ),
            ),
        ),
        inspect=_inspect_states,
    ),
    praise=Said(
        "Right: one N-th of the moments on each rank, and the same weights as one process.",
        "Exact : un N-ième des moments sur chaque rang, et les mêmes poids qu’un seul processus.",
    ),
    hints=(
        Said(
            "weights.chunk(size)[rank] is a view: what the optimizer writes there is written in weights. What do the "
            "other ranks still lack then?",
            "weights.chunk(size)[rank] est une vue : ce que l’optimiseur y écrit s’écrit dans weights. Que manque-t-il "
            "encore aux autres rangs ?",
        ),
        Said(
            "Once: share = weights.chunk(size)[rank], and the optimizer made of [share]. In each step: share.grad = "
            "gradient, optimizer.step(), then dist.all_gather_into_tensor(weights, share).",
            "Une fois : share = weights.chunk(size)[rank], et l’optimiseur créé avec [share]. À chaque pas : "
            "share.grad = gradient, optimizer.step(), puis dist.all_gather_into_tensor(weights, share).",
        ),
    ),
)
