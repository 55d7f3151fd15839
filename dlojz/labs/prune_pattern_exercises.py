"""Lab 11: two of four: the mask that a GPU can use, and the gradient that lets it change its mind.

Layer 6 (labs). Invariant: a mask is held to what each group of four keeps, count and magnitude, so that equal weights
may be told apart either way.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import masks_of, normal
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor


def two_of_four(weight_OI: Tensor) -> Tensor:
    """A mask, (O, I), that keeps the two largest magnitudes of every four consecutive inputs.

    Args:
        weight_OI: I is a multiple of 4.

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378): the 2:4 pattern.
    """
    import torch

    groups = weight_OI.detach().abs().unflatten(1, (-1, 4))
    return torch.zeros_like(groups).scatter(2, groups.topk(2, dim=2).indices, 1.0).flatten(1)


def sr_ste(weight_OI: Tensor, mask_OI: Tensor, gradient_OI: Tensor, decay: float) -> Tensor:
    """The gradient of the dense weights: that of the sparse ones, plus what pulls pruned weights to zero.

    Source: Zhou et al. 2021, "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch"
    (arXiv 2102.04010): the sparse-refined straight-through estimator.
    """
    return gradient_OI + decay * (1 - mask_OI) * weight_OI


def _weights() -> Iterator[tuple[Any, ...]]:
    import torch

    for seed, outputs, inputs in ((1, 4, 8), (2, 8, 12)):
        yield (normal(seed, outputs, inputs) - 0.3,)
    tied_I = torch.tensor([1.0, 1.0, 1.0, 0.5, 2.0, 2.0, 2.0, 2.0])
    tied_OI = normal(3, 4, 8).sign() * tied_I * torch.arange(1.0, 5.0).unsqueeze(1)
    yield (tied_OI,)


def _kept(answer: Callable[..., Any], weight_OI: Tensor) -> Tensor:
    """How many of each group of four, and how much magnitude."""
    import torch

    mask_OI = masks_of(answer(weight_OI.clone()), say(en="The mask", fr="Le masque"), weight_OI.shape)
    sizes_OI = mask_OI * weight_OI.abs().double()
    counts, magnitudes = (one.unflatten(1, (-1, 4)).sum(2).flatten() for one in (mask_OI, sizes_OI))
    return torch.cat([counts, magnitudes])


def _columns(weight: Tensor) -> Tensor:
    return two_of_four(weight.T.contiguous()).T


def _half_of_row(weight: Tensor) -> Tensor:
    import torch

    best = weight.abs().topk(weight.shape[1] // 2, dim=1).indices
    return torch.zeros_like(weight).scatter(1, best, 1.0)


def _half_of_all(weight: Tensor) -> Tensor:
    import torch

    flat = weight.abs().flatten()
    return torch.zeros_like(flat).scatter(0, flat.topk(len(flat) // 2).indices, 1.0).view_as(weight)


def _strided(weight: Tensor) -> Tensor:
    """Four inputs that lie I / 4 apart, as view(O, 4, -1) gives."""
    import torch

    groups = weight.abs().unflatten(1, (4, -1))
    return torch.zeros_like(groups).scatter(1, groups.topk(2, dim=1).indices, 1.0).flatten(1)


def _signed(weight: Tensor) -> Tensor:
    return two_of_four(weight - weight.min() + 1.0)


def _smallest(weight: Tensor) -> Tensor:
    return 1 - two_of_four(weight)


def _threshold(weight: Tensor) -> Tensor:
    groups = weight.abs().unflatten(1, (-1, 4))
    return (groups >= groups.topk(2, dim=2).values[..., -1:]).float().flatten(1)


def _strict(weight: Tensor) -> Tensor:
    groups = weight.abs().unflatten(1, (-1, 4))
    return (groups > groups.topk(3, dim=2).values[..., -1:]).float().flatten(1)


_TIES = Said(
    "Right where no two weights of a group are equal; where they are, comparing with a threshold keeps more than two, "
    "or fewer, and the hardware has room for exactly two. topk(2).indices always gives two.",
    "C’est juste quand les poids d’un groupe sont tous différents ; sinon, la comparaison à un seuil en garde plus de "
    "deux, ou moins, alors que le matériel a de la place pour deux exactement. topk(2).indices en donne toujours deux.",
)

TWO_OF_FOUR = Exercise(
    id="two-of-four",
    title=Said("two of four", "deux sur quatre"),
    judge=by_trial(
        _kept,
        two_of_four,
        cases=_weights,
        mistakes=(
            Mistake(
                _columns,
                Said(
                    "Your groups run along the outputs: the hardware skips terms of a sum, and sums run over the "
                    "inputs, the last dimension.",
                    "Vos groupes suivent les sorties : le matériel saute des termes d’une somme, et l’on somme sur les "
                    "entrées, la dernière dimension.",
                ),
            ),
            Mistake(
                _half_of_row,
                Said(
                    "You keep half of each row, but not two of each four: unflatten(1, (-1, 4)) makes the groups.",
                    "Vous gardez la moitié de chaque ligne, mais pas deux poids sur chaque quatre : "
                    "unflatten(1, (-1, 4)) forme les groupes.",
                ),
            ),
            Mistake(
                _half_of_all,
                Said(
                    "You keep half of all weights, but not two of each four: unflatten(1, (-1, 4)) makes the groups.",
                    "Vous gardez la moitié de tous les poids, mais pas deux sur chaque quatre : "
                    "unflatten(1, (-1, 4)) forme les groupes.",
                ),
            ),
            Mistake(
                _strided,
                Said(
                    "The four weights of a group are not consecutive: the 4 comes last, (-1, 4), not (4, -1).",
                    "Les quatre poids d’un groupe ne se suivent pas : le 4 vient en dernier, (-1, 4), et non (4, -1).",
                ),
            ),
            Mistake(
                _signed,
                Said(
                    "You compare the weights with their signs: a large negative weight matters as much, so abs().",
                    "Vous comparez les poids avec leur signe : un grand poids négatif compte autant, donc abs().",
                ),
            ),
            Mistake(
                _smallest,
                Said("The two smallest are kept: keep the two largest.",
                     "Ce sont les deux plus petits qui restent : gardez les deux plus grands."),
            ),
            Mistake(_threshold, _TIES),
            Mistake(_strict, _TIES),
        ),
    ),
    praise=Said(
        "Right: exactly two of four, everywhere: half of the numbers, and two bits each to say where they were.",
        "Exact : deux sur quatre, partout : la moitié des nombres, et deux bits chacun pour dire où ils étaient.",
    ),
    hints=(
        Said(
            "weight.abs().unflatten(1, (-1, 4)) has the shape (outputs, groups, 4); topk works on the last dimension.",
            "weight.abs().unflatten(1, (-1, 4)) est de forme (sorties, groupes, 4) ; topk porte sur la dernière "
            "dimension.",
        ),
        Said(
            "torch.zeros_like(groups).scatter(2, groups.topk(2).indices, 1.0) writes a 1 in two places of each group; "
            "flatten(1) gives the shape of the weight back.",
            "torch.zeros_like(groups).scatter(2, groups.topk(2).indices, 1.0) écrit un 1 à deux places de chaque "
            "groupe ; flatten(1) redonne la forme du poids.",
        ),
    ),
)  # fmt: skip


def _steps() -> Iterator[tuple[Any, ...]]:
    for seed, decay in ((4, 0.2), (5, 0.05)):
        weight_OI = normal(seed, 4, 8)
        yield weight_OI, two_of_four(weight_OI), normal(seed + 10, 4, 8), decay


SR_STE = Exercise(
    id="sr-ste",
    title=Said("pruned weights that may come back", "des poids coupés qui peuvent revenir"),
    judge=by_reference(
        sr_ste,
        cases=_steps,
        mistakes=(
            Mistake(
                lambda weight, mask, gradient, decay: gradient * mask,
                Said(
                    "You mask the gradient: a pruned weight then never moves again, so the mask of the first step is "
                    "that of the last. Let the whole gradient pass, and add the decay of pruned weights.",
                    "Vous masquez le gradient : un poids coupé ne bouge alors plus jamais, et le masque du premier pas "
                    "est celui du dernier. Laissez passer tout le gradient, et ajoutez le rappel des poids coupés.",
                ),
            ),
            Mistake(
                lambda weight, mask, gradient, decay: sr_ste(weight, mask, gradient * mask, decay),
                Said(
                    "You mask the gradient: pruned weights only shrink, and could never come back. Let the whole "
                    "gradient pass.",
                    "Vous masquez le gradient : les poids coupés ne font que décroître, sans jamais pouvoir revenir. "
                    "Laissez passer tout le gradient.",
                ),
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient + decay * mask * weight,
                Said(
                    "The decay pulls on the weights that are kept: it is meant for the others, 1 − mask.",
                    "Le rappel tire sur les poids gardés : il vise les autres, 1 − mask.",
                ),
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient + decay * weight,
                Said(
                    "That is ordinary weight decay, on all weights: only pruned ones are to be pulled to zero, "
                    "(1 − mask) * weight.",
                    "C’est un weight decay ordinaire, sur tous les poids : seuls les poids coupés sont tirés vers "
                    "zéro, (1 − mask) * weight.",
                ),
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient - decay * (1 - mask) * weight,
                Said(
                    "The sign is wrong: the step goes against the gradient, so a decay is added to it.",
                    "Le signe est faux : le pas se fait contre le gradient, un rappel vers zéro s’y ajoute donc.",
                ),
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient,
                Said(
                    "That is the straight-through estimator alone: pruned weights wander, and the mask changes from "
                    "step to step. Add decay * (1 − mask) * weight.",
                    "C’est le straight-through seul : les poids coupés errent, et le masque change de pas en pas. "
                    "Ajoutez decay * (1 − mask) * weight.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: a pruned weight hears what the loss wants of it, and is pulled to zero unless that insists.",
        "Exact : un poids coupé entend ce que la perte lui demande, et retombe à zéro si elle n’insiste pas.",
    ),
    hints=(
        Said(
            "Two terms: the gradient, which passes straight through the mask; and the derivative of (decay / 2) × the "
            "sum of the squares of the pruned weights.",
            "Deux termes : le gradient, qui traverse le masque tel quel ; et la dérivée de (decay / 2) × la somme des "
            "carrés des poids coupés.",
        ),
        Said("gradient + decay * (1 − mask) * weight.", "La somme de gradient et de decay * (1 − mask) * weight."),
    ),
)
