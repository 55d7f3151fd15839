"""Lab 10: the gate of two levels, which chooses a group of experts first, then experts within it.

Layer 6 (labs). Invariant: an answer is held to the weight of every expert for every token, as the flat gate is.

Shape suffixes: T tokens, E experts, K choices of a token, G groups, J = E / G experts of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise
from dlojz.labs.expert_gate_exercises import Chosen, by_weights, gate
from dlojz.labs.judging import Mistake
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor


def two_level_gate(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    """The k best experts of each token's best group, and their weights, (T, K) each.

    The weight is the probability of the group times what the flat gate gives among the experts of the group.

    Source: Shazeer et al. 2017 (arXiv 1701.06538), the hierarchical mixture of experts.
    """
    groups = group_logits_TG.shape[1]
    group_T = group_logits_TG.argmax(-1)
    inside_TGJ = expert_logits_TE.unflatten(1, (groups, -1))
    weights_TK, chosen_TK = gate(inside_TGJ[range(len(group_T)), group_T], k)
    group_weight_T1 = group_logits_TG.softmax(-1).amax(-1, keepdim=True)
    return group_weight_T1 * weights_TK, chosen_TK + group_T.unsqueeze(-1) * inside_TGJ.shape[2]


def _two_level_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    generator = torch.Generator().manual_seed(11)
    for tokens, groups, inside, k in ((7, 2, 4, 1), (9, 3, 2, 1), (6, 2, 4, 2)):
        yield (
            torch.randn(tokens, groups, generator=generator),
            2 * torch.randn(tokens, groups * inside, generator=generator),
            k,
        )


def _flat(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    return gate(expert_logits_TE, k)


def _without_group(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    return weights_TK / group_logits_TG.softmax(-1).amax(-1, keepdim=True), chosen_TK


def _without_expert(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    return group_logits_TG.softmax(-1).amax(-1, keepdim=True).expand_as(weights_TK), chosen_TK


def _over_all(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    _, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    group_T1 = group_logits_TG.softmax(-1).amax(-1, keepdim=True)
    return group_T1 * expert_logits_TE.softmax(-1).gather(1, chosen_TK), chosen_TK


def _undivided(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    _, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    inside_TE = expert_logits_TE.unflatten(1, (group_logits_TG.shape[1], -1)).softmax(-1).flatten(1)
    return group_logits_TG.softmax(-1).amax(-1, keepdim=True) * inside_TE.gather(1, chosen_TK), chosen_TK


def _best_product(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    inside_TGJ = expert_logits_TE.unflatten(1, (group_logits_TG.shape[1], -1)).softmax(-1)
    products_TE = (group_logits_TG.softmax(-1).unsqueeze(-1) * inside_TGJ).flatten(1)
    weights_TK, chosen_TK = products_TE.topk(k)
    return weights_TK, chosen_TK


def _local_numbers(group_logits_TG: Tensor, expert_logits_TE: Tensor, k: int) -> Chosen:
    weights_TK, chosen_TK = two_level_gate(group_logits_TG, expert_logits_TE, k)
    return weights_TK, chosen_TK % (expert_logits_TE.shape[1] // group_logits_TG.shape[1])


TWO_LEVEL = Exercise(
    id="two-level-gate",
    title=Said("the gate of two levels", "la porte à deux niveaux"),
    judge=by_weights(
        two_level_gate,
        _two_level_cases,
        (
            Mistake(
                _flat,
                Said(
                    "The groups are left out: that is the flat gate, over all experts. Choose each token's group "
                    "first, then look at the experts of that group alone.",
                    "Les groupes sont ignorés : c’est la porte plate, sur tous les experts. Choisissez d’abord le "
                    "groupe de chaque token, puis ne regardez que les experts de ce groupe.",
                ),
            ),
            Mistake(
                _without_group,
                Said(
                    "The experts are the right ones, but the probability of the group is missing from the weight: "
                    "without it the router of groups gets no gradient.",
                    "Les experts sont les bons, mais la probabilité du groupe manque dans le poids : sans elle, le "
                    "routeur des groupes ne reçoit aucun gradient.",
                ),
            ),
            Mistake(
                _without_expert,
                Said(
                    "The experts are the right ones, but the weight is that of the group alone: times the probability "
                    "of the expert within its group.",
                    "Les experts sont les bons, mais le poids est celui du groupe seul : multipliez par la probabilité "
                    "de l’expert dans son groupe.",
                ),
            ),
            Mistake(
                _over_all,
                Said(
                    "The second softmax runs over all experts: it is over those of the chosen group, whose "
                    "probabilities add up to 1.",
                    "Le second softmax porte sur tous les experts : il porte sur ceux du groupe choisi, dont les "
                    "probabilités ont pour somme 1.",
                ),
            ),
            Mistake(
                _undivided,
                Said(
                    "The experts are the right ones; but with k ≥ 2 the weights within the group must add up to 1, as "
                    "those of the flat gate do, before they are multiplied by the probability of the group.",
                    "Les experts sont les bons ; mais avec k ≥ 2, les poids dans le groupe doivent avoir pour somme 1, "
                    "comme ceux de la porte plate, avant d’être multipliés par la probabilité du groupe.",
                ),
            ),
            Mistake(
                _best_product,
                Said(
                    "You take the largest products over all experts; but the group is chosen first, by its own "
                    "probability alone, and the others are not even looked at: that is what makes it cheaper.",
                    "Vous prenez les plus grands produits sur tous les experts ; or le groupe se choisit d’abord, par "
                    "sa seule probabilité, sans même regarder les autres : c’est ce qui coûte moins cher.",
                ),
            ),
            Mistake(
                _local_numbers,
                Said(
                    "The numbers of the experts are counted within their group: add the first number of the group, "
                    "group × (experts per group).",
                    "Les numéros des experts sont comptés dans leur groupe : ajoutez le premier numéro du groupe, "
                    "groupe × (experts par groupe).",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: two small choices in place of a large one, and a token that stays within one group.",
        "Exact : deux petits choix au lieu d’un grand, et un token qui reste dans un seul groupe.",
    ),
    hints=(
        Said(
            "The best group of each token, by argmax; then the logits of that group's experts only: unflatten the "
            "experts into (groups, experts per group).",
            "Le meilleur groupe de chaque token, par argmax ; puis les logits des seuls experts de ce groupe : "
            "unflatten coupe les experts en (groupes, experts par groupe).",
        ),
        Said(
            "inside = expert_logits.unflatten(1, (groups, -1))[torch.arange(tokens), group]; choose(inside, k); "
            "weights times the group's probability; numbers plus group × experts per group.",
            "inside = expert_logits.unflatten(1, (groups, -1))[torch.arange(tokens), group] ; choose(inside, k) ; "
            "poids fois la probabilité du groupe ; numéros plus groupe × experts par groupe.",
        ),
    ),
)
