"""Lab 06: the faults of a layer that is shared out, recognised from what the ranks hold.

Layer 6 (labs). Invariant: what ranks would hold under a fault is computed in one process, without communication; a
fault is named only if it explains every rank, for every result it speaks of. What no fault explains is left to the
general diagnosis (`rank_diagnosis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Wrong
from dlojz.labs.rank_evidence import same
from dlojz.labs.rank_judging import Trial, Values, by_ranks, limits_s
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer, spmd

if TYPE_CHECKING:
    from torch import Tensor

CASES = ((2, 11), (3, 12))
"""Number of ranks and seed; an odd number of ranks tells a sum over two from a sum over all."""

NO_FORWARD_SUM = Said(
    "Every rank keeps its partial result: the all-reduce of the forward pass is missing. Each rank has used a part of "
    "the inputs only, so the true result is the sum over the ranks.",
    "Chaque rang garde son résultat partiel : l’all-reduce de la passe avant manque. Chaque rang n’a utilisé qu’une "
    "partie des entrées ; le vrai résultat est la somme sur les rangs.",
)
NO_BACKWARD_SUM = Said(
    "The forward pass is right, and so is the loss of the first step; but the gradient of the input holds this rank's "
    "contribution only: the all-reduce of the backward pass is missing. No error will tell: the layers before learn "
    "something else on every rank, and their weights drift apart.",
    "La passe avant est juste, donc la perte du premier pas aussi ; mais le gradient de l’entrée ne contient que la "
    "contribution de ce rang : l’all-reduce de la passe arrière manque. Aucune erreur ne le dira : les couches "
    "précédentes apprennent autre chose sur chaque rang, et leurs poids s’écartent.",
)
COUNTED_AGAIN = Said(
    "The forward pass is right, but gradients are as many times too large as there are ranks: backward adds up, over "
    "the ranks, a gradient that is whole on each of them already. After a sum in forward, nothing is to be sent in "
    "backward.",
    "La passe avant est juste, mais des gradients sont trop grands d’un facteur égal au nombre de rangs : la passe "
    "arrière additionne, sur les rangs, un gradient déjà entier sur chacun d’eux. Après une somme en passe avant, il "
    "n’y a rien à envoyer en passe arrière.",
)
BIAS_EVERYWHERE = Said(
    "The bias is added on every rank before the sum, so it counts as many times as there are ranks: add it once, after "
    "the all-reduce.",
    "Le biais est ajouté sur chaque rang avant la somme, il compte donc autant de fois qu’il y a de rangs : "
    "ajoutez-le une seule fois, après l’all-reduce.",
)
NO_BIAS = Said("The bias is never added.", "Le biais n’est jamais ajouté.")
NO_OFFSET = Said(
    "The offset of the vocabulary is missing: word number `start` is row 0 of this rank's table. Every rank looks the "
    "words up as if its part began at 0: subtract `start` first.",
    "Le décalage du vocabulaire manque : le mot numéro `start` est la ligne 0 de la table de ce rang. Chaque rang "
    "cherche les mots comme si sa part commençait à 0 : retranchez d’abord `start`.",
)


@dataclass(frozen=True)
class Fault:
    """A plausible fault: what each rank would hold under it, and what to say to whoever made it.

    Args:
        values: `values(rank, size, seed)`, some of the results by name; None where the fault cannot be made.
        says: the sentence.
    """

    values: Callable[[int, int, int], Mapping[str, Tensor] | None]
    says: Said


def by_shares(
    *,
    trial: Trial,
    expected: Values,
    faults: Sequence[Fault],
    labels: Mapping[str, Said],
    inspect: Callable[[list[RankAnswer], int], None] | None = None,
    cases: Sequence[tuple[int, int]] = CASES,
) -> Callable[[Callable[..., Any]], None]:
    """`by_ranks`, with faults that are recognised without running them: a wrong answer is run once more, no more.

    Args:
        trial, expected, labels, inspect, cases: as in `by_ranks`.
        faults: tried in order where values differ.
    """
    general = by_ranks(trial=trial, expected=expected, labels=labels, inspect=inspect, cases=cases)

    def judge(answer: Callable[..., Any]) -> None:
        try:
            general(answer)
        except Wrong:
            for size, seed in cases:
                said = _recognised(trial, answer, expected, faults, size, seed)
                if said is not None:
                    raise Wrong(str(said)) from None
            raise

    judge.on_ranks = True  # type: ignore[attr-defined]
    return judge


def _recognised(
    trial: Trial, answer: Callable[..., Any], expected: Values, faults: Sequence[Fault], size: int, seed: int
) -> Said | None:
    def on_rank(rank: int, size: int) -> Any:
        from dlojz.ranks.wrapping import rebind

        rebind(getattr(answer, "__globals__", {}))
        result = trial(answer, rank, size, seed)
        values = result[1] if isinstance(result, tuple) else result
        return None, {name: value for name, value in values.items() if value is not None}

    wall_s, limit_s = limits_s()
    answers = spmd(on_rank, size, wall_s=wall_s, limit_s=limit_s)
    given = [one.tensors for one in answers]
    if any(one.error for one in answers) or _all_same(given, [expected(rank, size, seed) for rank in range(size)]):
        return None
    for fault in faults:
        would = [fault.values(rank, size, seed) for rank in range(size)]
        if None not in would and _all_same(given, would):
            return fault.says
    return None


def _all_same(given: Sequence[Mapping[str, Tensor]], would: Sequence[Mapping[str, Tensor] | None]) -> bool:
    return all(
        values is not None and all(same(mine.get(name), value) for name, value in values.items())
        for mine, values in zip(given, would, strict=True)
    )


def asked_for(answer: RankAnswer, *names: str) -> list[int]:
    """How many numbers each call to one of these collectives has sent or gathered, in order."""
    return [int(call["numel"]) for call in answer.calls if call["op"] in names]


def gathers(answer: RankAnswer) -> list[int]:
    """The same for everything that brings the ranks' tensors side by side."""
    return asked_for(answer, "all_gather", "all_gather_into_tensor", "gather", "broadcast", "all_to_all_single")


def added(tensors: Iterable[Tensor]) -> Tensor:
    """The sum that an all-reduce of these would give."""
    import torch

    return torch.stack(list(tensors)).sum(0)


def gradient(leaf: Tensor) -> Tensor:
    """What backward has left in a leaf; zeros where nothing came by."""
    import torch

    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad


def normal(seed: int, *shapes: tuple[int, ...]) -> Iterable[Tensor]:
    """Random tensors of these shapes, the same for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]
