"""Lab 10: the gradients of a model whose experts are shared out: whose are added up over whom, and divided by what.

Layer 6 (labs). Invariant: what each rank must hold is the mean over all replicas of what each finds from its own
tokens; what a wrong way would give is computed here, in one process, without any communication.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.rank_diagnosis import diagnose
from dlojz.labs.rank_evidence import gathered, same
from dlojz.labs.rank_judging import by_ranks
from dlojz.labs.tensor_diagnosis import added, normal
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer

if TYPE_CHECKING:
    from torch import Tensor

EP = {4: 2, 3: 3}
"""Ranks that share the experts out, by the number of replicas: two copies of each expert, then one of each."""
CASES = ((4, 41), (3, 42))
SHARED, OWN = "gradient of shared", "gradient of own"
LABELS = {
    SHARED: Said("the gradient of a parameter that all ranks have", "le gradient d’un paramètre que tous ont"),
    OWN: Said("the gradient of this rank's experts", "le gradient des experts de ce rang"),
}
WORLD, REPLICAS, ALONE = "world", "replicas", "alone"
Reduction = tuple[str, str]
"""Over whom a gradient is added up, and by whose number it is divided."""
RIGHT: Reduction = (WORLD, WORLD)


def average_gradients(shared: list[Tensor], own: list[Tensor], replicas: Any) -> None:
    """Turn gradients of this rank's loss into those of the mean loss of all ranks, in place.

    Backward has already added up, for each expert, what the tokens of its group of ranks have found: the all-to-all
    brings gradients back to it. What is missing are the other groups, and the division.

    Args:
        shared: gradients of what every rank has: attention, norms, router.
        own: gradients of this rank's experts.
        replicas: the group of ranks that hold the same experts.

    Source: Rajbhandari et al. 2022, "DeepSpeed-MoE" (arXiv 2201.05596), expert and data parallelism combined.
    """
    import torch.distributed as dist

    world = dist.get_world_size()
    for gradient in shared:
        dist.all_reduce(gradient)  # Who: all ranks. What: the gradient. How much: its bytes.
        gradient.div_(world)
    for gradient in own:
        dist.all_reduce(gradient, group=replicas)  # Who: those with the same experts. How much: its bytes.
        gradient.div_(world)


def _found(size: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """What each rank's tokens give for the shared parameter, (n, 3), and for all experts, (n, E, 2)."""
    shared_R3, experts_RE2 = normal(seed, (size, 3), (size, 2 * EP[size], 2))
    return list(shared_R3), list(experts_RE2)


def _group(rank: int, size: int) -> range:
    """The ranks that share the experts out with this one: its neighbours."""
    first = rank - rank % EP[size]
    return range(first, first + EP[size])


def _after_backward(rank: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    shared, experts = _found(size, seed)
    place = rank % EP[size]
    return shared[rank], added(experts[other][2 * place : 2 * place + 2] for other in _group(rank, size))


def _members(rank: int, size: int, whom: str) -> range:
    return {WORLD: range(size), REPLICAS: range(rank % EP[size], size, EP[size])}.get(whom, range(rank, rank + 1))


def _held(rank: int, size: int, seed: int, shared: Reduction, own: Reduction) -> dict[str, Tensor]:
    """What a rank would hold if the two kinds were reduced so."""
    values = {}
    for number, (name, (whom, by)) in enumerate(((SHARED, shared), (OWN, own))):
        terms = [_after_backward(other, size, seed)[number] for other in _members(rank, size, whom)]
        values[name] = added(terms) / len(_members(rank, size, by))
    return values


def expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The mean over the replicas of what each one's tokens give, for what this rank holds."""
    shared, experts = _found(size, seed)
    place = rank % EP[size]
    mine = [one[2 * place : 2 * place + 2] for one in experts]
    return {SHARED: added(shared) / size, OWN: added(mine) / size}


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> tuple[Any, dict[str, Any]]:
    import torch.distributed as dist

    replicas = None
    for place in range(EP[size]):
        ranks = list(range(place, size, EP[size]))
        made = dist.new_group(ranks)  # every rank makes every group, and keeps its own
        if rank in ranks:
            replicas = made
    shared, own = (one.clone() for one in _after_backward(rank, size, seed))
    answer([shared], [own], replicas)
    return None, {SHARED: shared, OWN: own}


_OF_SHARED: dict[Reduction, Said] = {
    (ALONE, ALONE): Said(
        "The gradients of what all ranks have are left as they are: each rank has read its own tokens, so average them "
        "over all ranks.",
        "Les gradients de ce que tous ont restent tels quels : chaque rang a lu ses propres tokens, faites-en donc la "
        "moyenne sur tous les rangs.",
    ),
    (REPLICAS, REPLICAS): Said(
        "The gradients of what all ranks have are averaged over the replicas of an expert only: attention, norms and "
        "router are whole on all ranks, so average over all of them.",
        "Les gradients de ce que tous ont ne sont moyennés que sur les répliques d’un expert : l’attention, les normes "
        "et le routeur sont entiers sur tous les rangs, moyennez donc sur tous.",
    ),
    (WORLD, ALONE): Said(
        "The gradients of what all ranks have are added up, but not divided by the number of ranks.",
        "Les gradients de ce que tous ont sont additionnés, mais pas divisés par le nombre de rangs.",
    ),
    (WORLD, REPLICAS): Said(
        "The gradients of what all ranks have are added up over all ranks, but divided by the number of replicas of an "
        "expert: divide by the number of ranks.",
        "Les gradients de ce que tous ont sont additionnés sur tous les rangs, mais divisés par le nombre de répliques "
        "d’un expert : divisez par le nombre de rangs.",
    ),
}
_OF_OWN: dict[Reduction, Said] = {
    (REPLICAS, REPLICAS): Said(
        "The gradients of the experts are divided by the number of their replicas, and so are ep times too large: each "
        "expert has already added up the tokens of ep ranks, and each of these divides its loss by its own tokens. "
        "Divide by the number of all ranks.",
        "Les gradients des experts sont divisés par le nombre de leurs répliques, et donc ep fois trop grands : chaque "
        "expert a déjà additionné ce que donnent les tokens de ep rangs, dont chacun divise sa perte par ses propres "
        "tokens. Divisez par le nombre de tous les rangs.",
    ),
    (WORLD, WORLD): Said(
        "The gradients of the experts are added up over all ranks: that mixes different experts. Only the ranks of "
        "replicas hold the same ones (group=replicas).",
        "Les gradients des experts sont additionnés sur tous les rangs : cela mélange des experts différents. Seuls "
        "les rangs de replicas détiennent les mêmes (group=replicas).",
    ),
    (ALONE, ALONE): Said(
        "The gradients of the experts are left as they are: other ranks hold the same experts and have seen other "
        "tokens; without a sum over replicas the copies of an expert drift apart.",
        "Les gradients des experts restent tels quels : d’autres rangs détiennent les mêmes experts et ont vu d’autres "
        "tokens ; sans somme sur replicas, les copies d’un expert s’écartent.",
    ),
    (ALONE, WORLD): Said(
        "The gradients of the experts are divided, but not added up over the ranks that hold the same experts "
        "(replicas): the copies of an expert drift apart.",
        "Les gradients des experts sont divisés, mais pas additionnés sur les rangs qui détiennent les mêmes experts "
        "(replicas) : les copies d’un expert s’écartent.",
    ),
    (REPLICAS, ALONE): Said(
        "The gradients of the experts are added up, but not divided: the loss is a mean over all ranks.",
        "Les gradients des experts sont additionnés, mais pas divisés : la perte est une moyenne sur tous les rangs.",
    ),
}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    seed = next(seed for ranks, seed in CASES if ranks == size)
    given = [one.tensors for one in answers]
    truth = [expected(rank, size, seed) for rank in range(size)]
    for name, faults in ((SHARED, _OF_SHARED), (OWN, _OF_OWN)):
        if all(same(mine[name], right[name]) for mine, right in zip(given, truth, strict=True)):
            continue
        for way, says in faults.items():
            would = [_held(rank, size, seed, way, way)[name] for rank in range(size)]
            if all(same(mine[name], value) for mine, value in zip(given, would, strict=True)):
                raise Wrong(str(says))
    for evidence in gathered(given, truth, labels=LABELS):
        said = diagnose(evidence)
        if said is not None:
            raise Wrong(str(said))


def _judge() -> Callable[[Callable[..., Any]], None]:
    judge = by_ranks(trial=_trial, expected=lambda rank, size, seed: {}, cases=CASES, inspect=_inspect)
    judge.on_ranks = True  # type: ignore[attr-defined]
    return judge


PARITY = Exercise(
    id="expert-gradients",
    title=Said("the gradients of the experts", "les gradients des experts"),
    judge=_judge(),
    praise=Said(
        "Right, with two copies of each expert and with one: the gradients of data parallelism alone.",
        "Exact, avec deux copies de chaque expert et avec une seule : les gradients de Data Parallelism seul.",
    ),
    hints=(
        Said(
            "Ask of each gradient: which ranks hold the same parameter? These add up. And then: over how many losses "
            "is the mean taken? By that it is divided, for experts too.",
            "Pour chaque gradient, demandez-vous : quels rangs détiennent le même paramètre ? Ceux-là additionnent. "
            "Puis : de combien de pertes prend-on la moyenne ? C’est par ce nombre que l’on divise, pour les experts "
            "aussi.",
        ),
        Said(
            "shared: dist.all_reduce(gradient); own: dist.all_reduce(gradient, group=replicas); both divided by "
            "dist.get_world_size(), in place (/=).",
            "shared : dist.all_reduce(gradient) ; own : dist.all_reduce(gradient, group=replicas) ; les deux divisés "
            "par dist.get_world_size(), en place (/=).",
        ),
    ),
)
