"""Exercises of lab 11 on pruning: global masks, the 2:4 pattern, SR-STE, permutations, the lottery ticket.

Where magnitudes are equal, it is free which of them goes: a global mask is judged by the count alone there, the 2:4
pattern by the count and magnitude of each group of four. Weights removed in earlier rounds of the lottery are not zero
in the trained weights, so that forgetting the mask shows.

Shape suffixes: O outputs, I inputs, H hidden units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.base.language import say
from dlojz.labs.kit.exercise import Exercise, Mistake, Said, Wrong
from dlojz.labs.kit.judges import Judge, expect_mask, expect_several, expect_tensor, normal

if TYPE_CHECKING:
    from torch import Tensor

Masks = list["Tensor"]


def global_masks(weights: Sequence[Tensor], sparsity: float) -> Masks:
    """Make one mask per weight, 1 where it is kept: the smallest magnitudes of all together go.

    Args:
        weights: of any shapes.
        sparsity: share that goes, at least 0 and below 1; round(sparsity × number of weights) of them.

    Source: Han et al. 2015 (arXiv 1506.02626) for magnitudes; Frankle and Carbin 2019 (arXiv 1803.03635) for a
    threshold that all layers share.
    """
    import torch

    sizes = torch.cat([weight.detach().abs().flatten() for weight in weights])
    keep = torch.ones_like(sizes)
    keep[sizes.argsort()[: round(sparsity * len(sizes))]] = 0.0
    parts = keep.split([weight.numel() for weight in weights])
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]


def _mask_cases() -> Iterator[tuple[Any, ...]]:
    # 60 weights: shares of which neither the truncation nor the next whole number is the nearest.
    for seed, sparsity in ((1, 0.5), (2, 0.78), (3, 0.104), (4, 0.52)):
        yield [3 * normal(seed, 4, 5) - 1, 0.5 * normal(seed + 10, 10, 3), normal(seed + 20, 10)], sparsity


def _mask_trial(answer: Callable[..., Any], weights: list[Tensor], sparsity: float) -> Tensor:
    import torch

    given = [weight.clone() for weight in weights]
    masks = expect_several(answer(given, sparsity), f"[{', '.join(['mask'] * len(weights))}]", len(weights))
    names = [f"mask {number}" for number in range(len(weights))]
    read = [expect_mask(mask, name, w.shape) for mask, name, w in zip(masks, names, weights, strict=True)]
    return torch.cat([mask.flatten() for mask in read])


def _expect_equal_magnitudes(answer: Callable[..., Any]) -> None:
    """Refuse a threshold where it removes other than as many weights as are asked for: many have its magnitude."""
    weights, sparsity = [normal(5, 5, 6).round(), normal(15, 20).round()], 0.5
    asked = round(sparsity * sum(weight.numel() for weight in weights))
    gone = int((_mask_trial(answer, weights, sparsity) == 0).sum())
    if gone != asked:
        raise Wrong(
            en=f"Where many weights have the same magnitude, {gone} go, and not {asked}: a threshold takes all that "
            "have its magnitude, or none. Take the first of sizes.argsort().",
            fr=f"Quand beaucoup de poids ont la même valeur absolue, il en part {gone}, et non {asked} : un seuil "
            "prend tous ceux qui ont sa valeur, ou aucun. Prenez les premiers de sizes.argsort().",
        )


def _mask_signed(weights: Sequence[Tensor], sparsity: float) -> Masks:
    smallest = min(float(weight.min()) for weight in weights)
    return global_masks([weight - smallest for weight in weights], sparsity)


def _counted(count: Callable[[float], int]) -> Callable[[Sequence[Tensor], float], Masks]:
    """As many as `count` makes of sparsity × total."""

    def way(weights: Sequence[Tensor], sparsity: float) -> Masks:
        total = sum(weight.numel() for weight in weights)
        return global_masks(weights, min(max(count(sparsity * total) / total, 0.0), 1.0))

    return way


def _by_layer(weights: Sequence[Tensor], sparsity: float) -> Masks:
    """Each layer's weights measured by its largest, then one threshold."""
    return global_masks([weight / weight.abs().max() for weight in weights], sparsity)


def _by_quantile(weights: Sequence[Tensor], sparsity: float) -> Masks:
    import torch

    limit = torch.quantile(torch.cat([weight.abs().flatten() for weight in weights]), sparsity)
    return [(weight.abs() >= limit).float() for weight in weights]


_COUNT = Said(
    "The choice is right, but not the number: round(sparsity × total number) weights go; int() truncates, ceil() "
    "rounds "
    "up, and a threshold found by interpolation (quantile) takes what it finds.",
    "Le choix est bon, mais pas le nombre : round(sparsity × nombre total) poids partent ; int() tronque, ceil() "
    "arrondit vers le haut, et un seuil interpolé (quantile) en prend ce qu’il trouve.",
)


def _scaled(weights: Sequence[Tensor], sparsity: float) -> Masks:
    """A share of the largest magnitude as the threshold."""
    largest = max(float(weight.abs().max()) for weight in weights)
    return [(weight.abs() >= sparsity * largest).float() for weight in weights]


GLOBAL_MASKS = Exercise(
    id="global-masks",
    title=Said("the smallest weights go", "les plus petits poids partent"),
    judge=Judge(
        global_masks,
        trial=_mask_trial,
        cases=_mask_cases,
        mistakes=(
            Mistake(
                lambda weights, sparsity: [global_masks([weight], sparsity)[0] for weight in weights],
                "Each layer loses the same share: one threshold for all of them is asked for, so that a layer of large "
                "weights keeps more than a layer of small ones.",
                "Chaque couche perd la même part : on demande un seuil commun, pour qu’une couche de grands poids en "
                "garde plus qu’une couche de petits.",
            ),
            Mistake(
                _mask_signed,
                "You remove the most negative weights: it is the magnitude that counts, weight.abs().",
                "Vous enlevez les poids les plus négatifs : c’est la valeur absolue qui compte, weight.abs().",
            ),
            Mistake(
                lambda weights, sparsity: global_masks(weights, 1 - sparsity),
                "The sparsity is the share that goes; you keep as much.",
                "sparsity est la part des poids à enlever ; c’est celle que vous gardez.",
            ),
            Mistake(
                lambda weights, sparsity: [1 - mask for mask in global_masks(weights, sparsity)],
                "Your mask is 1 where a weight goes: 1 is for what stays, since the mask multiplies the weights.",
                "Votre masque vaut 1 là où un poids part : 1 désigne ce qui reste, puisque le masque multiplie les "
                "poids.",
            ),
            Mistake(
                lambda weights, sparsity: [1 - mask for mask in global_masks(weights, 1 - sparsity)],
                "The largest weights go: it is the smallest ones that matter least.",
                "Ce sont les plus grands poids qui partent : or les plus petits comptent le moins.",
            ),
            Mistake(
                _scaled,
                "Your threshold is a share of the largest magnitude: then the number of weights that go depends on one "
                "outlier. Sort them, and take as many as are asked for.",
                "Votre seuil est une fraction de la plus grande valeur : le nombre de poids enlevés dépend alors d’un "
                "seul extrême. Triez-les, et prenez-en autant qu’il est demandé.",
            ),
            *(
                Mistake(_counted(count), *_COUNT)
                for count in (int, math.ceil, lambda share: round(share) + 1, lambda share: round(share) - 1)
            ),
            Mistake(
                _by_layer,
                "You measure each layer's weights by its largest one: one threshold for the magnitudes as they are is "
                "asked for.",
                "Vous mesurez les poids de chaque couche à son plus grand : on demande un seuil commun pour les "
                "valeurs absolues "
                "telles quelles.",
            ),
            Mistake(
                lambda weights, sparsity: _mask_signed([-weight for weight in weights], sparsity),
                "You remove the most positive weights: it is the magnitude that counts, weight.abs().",
                "Vous enlevez les poids les plus positifs : c’est la valeur absolue qui compte, weight.abs().",
            ),
            Mistake(_by_quantile, *_COUNT),
        ),
        then=_expect_equal_magnitudes,
    ),
    praise_en="Right: with one threshold for all layers, a layer of large weights keeps more of them.",
    praise_fr="Exact : avec un seuil commun à toutes, une couche de grands poids en garde davantage.",
    hint_en="Put all magnitudes into one long tensor, mark the smallest ones, then cut it into pieces of the layers' "
    "shapes.",
    hint_fr="Mettez toutes les valeurs absolues dans un long tenseur, marquez les plus petites, puis découpez-le selon "
    "les formes des couches.",
    nearer_en="sizes = torch.cat([w.abs().flatten() for w in weights]); keep[sizes.argsort()[:round(sparsity * "
    "len(sizes))]] = 0; keep.split([w.numel() for w in weights]), each viewed as its weight.",
    nearer_fr="sizes = torch.cat([w.abs().flatten() for w in weights]) ; keep[sizes.argsort()[:round(sparsity * "
    "len(sizes))]] = 0 ; keep.split([w.numel() for w in weights]), chacun mis à la forme de son poids.",
)


def two_of_four(weight_OI: Tensor) -> Tensor:
    """Make a mask, (O, I), that keeps the two largest magnitudes of every four consecutive inputs.

    Args:
        weight_OI: I is a multiple of 4.

    Source: Mishra et al. 2021, "Accelerating Sparse Deep Neural Networks" (arXiv 2104.08378): the 2:4 pattern.
    """
    import torch

    groups = weight_OI.detach().abs().unflatten(1, (-1, 4))
    return torch.zeros_like(groups).scatter(2, groups.topk(2, dim=2).indices, 1.0).flatten(1)


def sr_ste(weight_OI: Tensor, mask_OI: Tensor, gradient_OI: Tensor, decay: float) -> Tensor:
    """Compute the gradient of the dense weights: that of the sparse ones, plus the decay of pruned weights.

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

    mask_OI = expect_mask(answer(weight_OI.clone()), say(en="The mask", fr="Le masque"), weight_OI.shape)
    sizes_OI = mask_OI * weight_OI.abs().double()
    counts, magnitudes = (one.unflatten(1, (-1, 4)).sum(2).flatten() for one in (mask_OI, sizes_OI))
    return torch.cat([counts, magnitudes])


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


def _threshold(weight: Tensor) -> Tensor:
    groups = weight.abs().unflatten(1, (-1, 4))
    return (groups >= groups.topk(2, dim=2).values[..., -1:]).float().flatten(1)


def _strict(weight: Tensor) -> Tensor:
    groups = weight.abs().unflatten(1, (-1, 4))
    return (groups > groups.topk(3, dim=2).values[..., -1:]).float().flatten(1)


def _rows_of(groups: Tensor, weight: Tensor) -> Tensor:
    import torch

    return torch.zeros_like(groups).scatter(1, groups.abs().topk(2).indices, 1.0).reshape(weight.shape)


def _best_of_four(weight: Tensor, count: int) -> Tensor:
    import torch

    groups = weight.abs().unflatten(1, (-1, 4))
    return torch.zeros_like(groups).scatter(2, groups.topk(count).indices, 1.0).flatten(1)


def _always(weight: Tensor, places: Sequence[int]) -> Tensor:
    """The same two places of every group."""
    import torch

    groups = torch.zeros_like(weight).unflatten(1, (-1, 4))
    groups[..., list(places)] = 1.0
    return groups.flatten(1)


_TWO_EXACTLY = Said(
    "You do not keep two weights of each group, but another number: topk(2).",
    "Vous ne gardez pas deux poids par groupe, mais un autre nombre : topk(2).",
)
_ALWAYS = Said(
    "You keep the same two places of every group: which ones stay depends on the magnitudes, topk(2).",
    "Vous gardez les deux mêmes places de chaque groupe : celles qui restent dépendent des valeurs absolues, topk(2).",
)
_TIES = Said(
    "Right where no two weights of a group are equal; where they are, comparing with a threshold keeps more than two, "
    "or fewer, and the hardware has room for exactly two. topk(2).indices always gives two.",
    "C’est juste quand les poids d’un groupe sont tous différents ; sinon, la comparaison à un seuil en garde plus de "
    "deux, ou moins, alors que le matériel a de la place pour deux exactement. topk(2).indices en donne toujours deux.",
)

TWO_OF_FOUR = Exercise(
    id="two-of-four",
    title=Said("two of four", "deux sur quatre"),
    judge=Judge(
        two_of_four,
        trial=_kept,
        cases=_weights,
        mistakes=(
            Mistake(
                lambda weight: two_of_four(weight.T.contiguous()).T,
                "Your groups run along the outputs: the hardware skips terms of a sum, and sums run over the inputs, "
                "the last dimension.",
                "Vos groupes suivent les sorties : le matériel saute des termes d’une somme, et l’on somme sur les "
                "entrées, la dernière dimension.",
            ),
            Mistake(
                _half_of_row,
                "You keep half of each row, but not two of each four: unflatten(1, (-1, 4)) makes the groups.",
                "Vous gardez la moitié de chaque ligne, mais pas deux poids sur chaque quatre : unflatten(1, (-1, 4)) "
                "forme les groupes.",
            ),
            Mistake(
                _half_of_all,
                "You keep half of all weights, but not two of each four: unflatten(1, (-1, 4)) makes the groups.",
                "Vous gardez la moitié de tous les poids, mais pas deux sur chaque quatre : unflatten(1, (-1, 4)) "
                "forme les groupes.",
            ),
            Mistake(
                _strided,
                "The four weights of a group are not consecutive: the 4 comes last, (-1, 4), not (4, -1).",
                "Les quatre poids d’un groupe ne se suivent pas : le 4 vient en dernier, (-1, 4), et non (4, -1).",
            ),
            Mistake(
                lambda weight: two_of_four(weight - weight.min() + 1.0),
                "You compare the weights with their signs: a large negative weight matters as much, so abs().",
                "Vous comparez les poids avec leur signe : un grand poids négatif compte autant, donc abs().",
            ),
            Mistake(
                lambda weight: 1 - two_of_four(weight),
                "The two smallest are kept: keep the two largest.",
                "Ce sont les deux plus petits qui restent : gardez les deux plus grands.",
            ),
            Mistake(_threshold, *_TIES),
            Mistake(_strict, *_TIES),
            *(Mistake(lambda weight, count=count: _best_of_four(weight, count), *_TWO_EXACTLY) for count in (1, 3)),
            Mistake(
                lambda weight: _rows_of(weight.T.reshape(-1, 4), weight),
                "Your groups follow the transposed matrix: four consecutive weights of a row are a group, "
                "unflatten(1, (-1, 4)).",
                "Vos groupes suivent la matrice transposée : quatre poids consécutifs d’une ligne font un groupe, "
                "unflatten(1, "
                "(-1, 4)).",
            ),
            Mistake(
                lambda weight: (weight.abs() >= weight.abs().median()).float(),
                "You compare all weights with one threshold: each group of four keeps its own two largest, "
                "unflatten(1, (-1, 4)).",
                "Vous comparez tous les poids à un seul seuil : chaque groupe de quatre garde ses deux plus grands, "
                "unflatten(1, "
                "(-1, 4)).",
            ),
            *(
                Mistake(lambda weight, places=places: _always(weight, places), *_ALWAYS)
                for places in itertools.combinations(range(4), 2)
            ),
        ),
    ),
    praise_en="Right: exactly two of four, everywhere: half of the numbers, and two bits for the place of each.",
    praise_fr="Exact : deux sur quatre, partout : la moitié des nombres, et deux bits pour la place de chacun.",
    hint_en="weight.abs().unflatten(1, (-1, 4)) has the shape (outputs, groups, 4); topk works on the last dimension.",
    hint_fr="weight.abs().unflatten(1, (-1, 4)) est de forme (sorties, groupes, 4) ; topk porte sur la dernière "
    "dimension.",
    nearer_en="torch.zeros_like(groups).scatter(2, groups.topk(2).indices, 1.0) writes a 1 in two places of each "
    "group; flatten(1) gives the shape of the weight back.",
    nearer_fr="torch.zeros_like(groups).scatter(2, groups.topk(2).indices, 1.0) écrit un 1 à deux places de chaque "
    "groupe ; flatten(1) redonne la forme du poids.",
)


def _steps() -> Iterator[tuple[Any, ...]]:
    for seed, decay in ((4, 0.2), (5, 0.05)):
        weight_OI = normal(seed, 4, 8)
        yield weight_OI, two_of_four(weight_OI), normal(seed + 10, 4, 8), decay


SR_STE = Exercise(
    id="sr-ste",
    title=Said("pruned weights that may come back", "des poids coupés qui peuvent revenir"),
    judge=Judge(
        sr_ste,
        cases=_steps,
        mistakes=(
            Mistake(
                lambda weight, mask, gradient, decay: gradient * mask,
                "You mask the gradient: a pruned weight then never moves again, so the mask of the first step is that "
                "of the last. Let the whole gradient pass, and add the decay of pruned weights.",
                "Vous masquez le gradient : un poids coupé ne bouge alors plus jamais, et le masque du premier pas est "
                "celui du dernier. Laissez passer tout le gradient, et ajoutez le rappel des poids coupés.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: sr_ste(weight, mask, gradient * mask, decay),
                "You mask the gradient: pruned weights only shrink, and could never come back. Let the whole gradient "
                "pass.",
                "Vous masquez le gradient : les poids coupés ne font que décroître, sans jamais pouvoir revenir. "
                "Laissez passer tout le gradient.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient + decay * mask * weight,
                "The decay pulls on the weights that are kept: it is meant for the others, 1 − mask.",
                "Le rappel tire sur les poids gardés : il vise les autres, 1 − mask.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient + decay * weight,
                "That is ordinary weight decay, on all weights: only pruned ones are to be pulled to zero, (1 − mask) "
                "* weight.",
                "C’est un weight decay ordinaire, sur tous les poids : seuls les poids coupés sont tirés vers zéro, (1 "
                "− mask) * weight.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient - decay * (1 - mask) * weight,
                "The sign is wrong: the step goes against the gradient, so a decay is added to it.",
                "Le signe est faux : le pas se fait contre le gradient, un rappel vers zéro s’y ajoute donc.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient,
                "That is the straight-through estimator alone: pruned weights wander, and the mask changes from step "
                "to step. Add decay * (1 − mask) * weight.",
                "C’est le straight-through seul : les poids coupés errent, et le masque change de pas en pas. Ajoutez "
                "decay * (1 − mask) * weight.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient + (1 - mask) * weight,
                "The decay is left out: add decay * (1 − mask) * weight.",
                "Le coefficient decay est oublié : ajoutez decay * (1 − mask) * weight.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient + decay * (1 - mask),
                "What is added does not depend on the weight: add decay times the weight itself, (1 − mask) * weight.",
                "Ce qui est ajouté ne dépend pas du poids : ajoutez decay fois le poids lui-même, (1 − mask) * weight.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient * (1 - mask) + decay * (1 - mask) * weight,
                "Weights that are kept get no gradient: the whole gradient passes, for all weights.",
                "Les poids gardés ne reçoivent pas de gradient : tout le gradient passe, pour tous les poids.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: gradient + decay * (1 - mask) * gradient,
                "You add decay times the gradient: it is the weight that is pulled to zero, decay * (1 − mask) * "
                "weight.",
                "Vous ajoutez decay fois le gradient : c’est le poids qui est tiré vers zéro, decay * (1 − mask) * "
                "weight.",
            ),
            *(
                Mistake(
                    lambda weight, mask, gradient, decay, of=of: gradient + decay * (1 - mask) * of(weight),
                    "The pull is not towards zero, or not proportional to the weight: decay times the weight with its "
                    "sign.",
                    "Le rappel ne va pas vers zéro, ou n’est pas proportionnel au poids : decay fois le poids, avec "
                    "son signe.",
                )
                for of in (lambda weight: weight.abs(), lambda weight: weight.sign(), lambda weight: weight.square())
            ),
            Mistake(
                lambda weight, mask, gradient, decay: weight - sr_ste(weight, mask, gradient, decay),
                "You make the step yourself: return the gradient alone, the optimizer makes the step.",
                "Vous faites le pas vous-même : renvoyez seulement le gradient, c’est l’optimiseur qui fait le pas.",
            ),
            Mistake(
                lambda weight, mask, gradient, decay: decay * (1 - mask) * weight,
                "The gradient is missing: it is added to the decay of pruned weights.",
                "Le gradient manque : il s’ajoute au rappel des poids coupés.",
            ),
        ),
    ),
    praise_en="Right: a pruned weight receives the whole gradient, and decays to zero unless the gradient keeps it up.",
    praise_fr="Exact : un poids coupé reçoit tout le gradient, et décroît vers zéro si le gradient ne le maintient "
    "pas.",
    hint_en="Two terms: the gradient, which passes straight through the mask; and the derivative of (decay / 2) × the "
    "sum of the squares of the pruned weights.",
    hint_fr="Deux termes : le gradient, qui traverse le masque tel quel ; et la dérivée de (decay / 2) × la somme des "
    "carrés des poids coupés.",
    nearer_en="gradient + decay * (1 − mask) * weight.",
    nearer_fr="La somme de gradient et de decay * (1 − mask) * weight.",
)


Layers = tuple["Tensor", "Tensor", "Tensor"]


def reorder(expand_HI: Tensor, bias_H: Tensor, project_OH: Tensor, order_H: Tensor) -> Layers:
    """Permute the hidden units of two consecutive layers, whose output stays the same.

    Args:
        expand_HI: weights of the first layer.
        bias_H: of the first layer.
        project_OH: weights of the second.
        order_H: unit number `order_H[i]` comes to place i.

    Source: Pool and Yu 2021, "Channel Permutations for N:M Sparsity" (NeurIPS 2021).
    """
    return expand_HI[order_H], bias_H[order_H], project_OH[:, order_H]


def _permutation_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    # As wide as it is deep once: there an exchange of rows and columns gives no error of shape.
    for seed, hidden, inputs, outputs in ((1, 8, 5, 3), (2, 6, 6, 6)):
        order_H = torch.randperm(hidden, generator=torch.Generator().manual_seed(seed + 30))
        yield normal(seed, hidden, inputs), normal(seed + 10, hidden), normal(seed + 20, outputs, hidden), order_H


def _permutation_trial(
    answer: Callable[..., Any], expand: Tensor, bias: Tensor, project: Tensor, order: Tensor
) -> Tensor:
    import torch

    given = answer(expand.clone(), bias.clone(), project.clone(), order.clone())
    names = "(expand, bias, project)"
    read = [
        expect_tensor(one, name, wanted.shape)
        for one, name, wanted in zip(
            expect_several(given, names, 3), ("expand", "bias", "project"), (expand, bias, project), strict=True
        )
    ]
    return torch.cat([one.double().flatten() for one in read])


def _transposing(answer: Callable[..., Any], *, expand: bool, project: bool) -> Callable[..., Layers]:
    """The answer with the other dimension of one matrix, or of both, where it moves one."""

    def way(expand_HI: Tensor, bias_H: Tensor, project_OH: Tensor, order_H: Tensor) -> Layers:
        layers = answer(expand_HI.T if expand else expand_HI, bias_H, project_OH.T if project else project_OH, order_H)
        return layers[0].T if expand else layers[0], layers[1], layers[2].T if project else layers[2]

    return way


PERMUTATION = Exercise(
    id="permutation",
    title=Said("another order, the same output", "un autre ordre, la même sortie"),
    judge=Judge(
        reorder,
        trial=_permutation_trial,
        cases=_permutation_cases,
        mistakes=(
            Mistake(
                lambda expand, bias, project, order: (expand[order], bias, project[:, order]),
                "The bias stays where it was: each hidden unit must take its own along.",
                "Le biais reste en place : chaque unité cachée doit emporter le sien.",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand[order], bias[order], project),
                "The second layer still reads the units in their old order: move its columns, project[:, order].",
                "La seconde couche lit toujours les unités dans l’ancien ordre : déplacez ses colonnes, project[:, "
                "order].",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand, bias, project[:, order]),
                "Only the second layer is moved: the rows of the first one, and its bias, make the units.",
                "Seule la seconde couche est déplacée : or ce sont les lignes de la première, et son biais, qui font "
                "les unités.",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand[order], bias[order], project[:, order.argsort()]),
                "The second layer is moved by the inverse order: unit order[i] is now at place i, and it is there that "
                "its column must be, so project[:, order] too.",
                "La seconde couche est déplacée par l’ordre inverse : l’unité order[i] est maintenant à la place i, et "
                "sa colonne doit y être aussi, donc encore project[:, order].",
            ),
            Mistake(
                lambda expand, bias, project, order: reorder(expand, bias, project, order.argsort()),
                "The output is the same, but the order is the inverse one: order[i] says which unit comes to place i, "
                "so index by order itself.",
                "La sortie est la même, mais l’ordre est l’inverse : order[i] dit quelle unité vient à la place i ; "
                "indexez donc par order lui-même.",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand, bias, project),
                "Nothing is moved: the output is the same, of course.",
                "Rien n’est déplacé : la sortie est la même, évidemment.",
            ),
            Mistake(
                lambda expand, bias, project, order: (
                    expand[:, order] if expand.shape[0] == expand.shape[1] else expand,
                    bias[order],
                    project[:, order],
                ),
                "The first layer is not moved by its hidden units: they are its rows, expand[order].",
                "La première couche n’est pas déplacée par unités cachées : celles-ci sont ses lignes, expand[order].",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand, bias[order], project[:, order]),
                "The rows of the first layer stay where they were: expand[order].",
                "Les lignes de la première couche restent en place : expand[order].",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand[order], bias[order.argsort()], project[:, order]),
                "The bias is moved by the inverse order: bias[order], like the rows of the first layer.",
                "Le biais est déplacé par l’ordre inverse : bias[order], comme les lignes de la première couche.",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand[order.argsort()], bias[order], project[:, order]),
                "The first layer is moved by the inverse order: unit order[i] comes to place i, so expand[order].",
                "La première couche est déplacée par l’ordre inverse : l’unité order[i] vient à la place i, donc "
                "expand[order].",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand.sort(0).values, bias.sort().values, project[:, order]),
                "You sort the values; it is whole units that move, in the order that is given: expand[order].",
                "Vous triez les valeurs ; or ce sont des unités entières qui se déplacent, dans l’ordre donné : "
                "expand[order].",
            ),
            Mistake(
                lambda expand, bias, project, order: (expand.flip(0), bias.flip(0), project.flip(1)),
                "You reverse the order of the units, whatever `order` says: index by it, expand[order].",
                "Vous renversez l’ordre des unités, quoi que dise `order` : indexez par lui, expand[order].",
            ),
            Mistake(
                lambda expand, bias, project, order: reorder(expand, bias, project, order[order]),
                "The order is applied twice: index by order once.",
                "L’ordre est appliqué deux fois : indexez une seule fois par order.",
            ),
        ),
        repairs=(
            Mistake(
                lambda answer: _transposing(answer, expand=True, project=False),
                "You move the columns of the first layer, its inputs; its hidden units are the rows: expand[order].",
                "Vous déplacez les colonnes de la première couche, ses entrées ; ses unités cachées sont les lignes : "
                "expand[order].",
            ),
            Mistake(
                lambda answer: _transposing(answer, expand=False, project=True),
                "You move the rows of the second layer, its outputs; it reads the hidden units in its columns: "
                "project[:, order].",
                "Vous déplacez les lignes de la seconde couche, ses sorties ; elle lit les unités cachées dans ses "
                "colonnes : project[:, order].",
            ),
            Mistake(
                lambda answer: _transposing(answer, expand=True, project=True),
                "In both layers you move the wrong dimension: hidden units are rows of the first, expand[order], and "
                "columns of the second, project[:, order].",
                "Dans les deux couches, vous déplacez la mauvaise dimension : les unités cachées sont des lignes de la "
                "première, expand[order], et des colonnes de la seconde, project[:, order].",
            ),
        ),
    ),
    praise_en="Right: the order of the hidden units does not change the output, so one may choose the order that suits "
    "the mask.",
    praise_fr="Exact : l’ordre des unités cachées ne change pas la sortie ; on peut donc choisir celui qui convient au "
    "masque.",
    hint_en="A hidden unit is a row of expand, an element of bias, and a column of project: all three move together.",
    hint_fr="Une unité cachée, c’est une ligne de expand, un élément de bias et une colonne de project : les trois se "
    "déplacent ensemble.",
    nearer_en="expand[order], bias[order], project[:, order].",
    nearer_fr="Dans l’ordre : expand[order], bias[order], project[:, order].",
)


Ticket = tuple["Tensor", "Tensor"]


def next_ticket(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
    """Return the mask of the next round, and the weights it starts from.

    Args:
        start: weights before any training.
        trained: weights after training with the mask.
        mask: 1 where a weight is still there.
        rate: share of the remaining weights that goes; round(rate × remaining) of them, the smallest when trained.

    Source: Frankle and Carbin 2019, "The Lottery Ticket Hypothesis" (arXiv 1803.03635): iterative pruning.
    """
    import torch

    remaining = int(mask.sum())
    sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten()
    new_mask = mask.clone().flatten()
    new_mask[sizes.argsort()[: round(rate * remaining)]] = 0.0
    new_mask = new_mask.view_as(mask)
    return new_mask, start * new_mask


def _ticket_cases() -> Iterator[tuple[Any, ...]]:
    import torch

    # A share of what remains that is rounded down (11.2, 5.8 up), and one that comes out even.
    for seed, rows, removed, rate in ((1, 5, 10, 0.2), (2, 6, 20, 0.4), (3, 5, 0, 0.3), (4, 5, 11, 0.2)):
        start, trained = normal(seed, rows, 8), normal(seed + 10, rows, 8)
        mask = torch.ones(rows * 8)
        mask[torch.randperm(rows * 8, generator=torch.Generator().manual_seed(seed))[:removed]] = 0.0
        yield start, trained, mask.view(rows, 8), rate


def _ticket_trial(answer: Callable[..., Any], start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    import torch

    found, weights = expect_several(answer(start.clone(), trained.clone(), mask.clone(), rate), "(mask, weights)", 2)
    # A name that is singular in both languages: it is the subject of the sentences that refuse a shape.
    names = say(en="The mask", fr="Le masque"), say(en="The tensor of weights", fr="Le tenseur des poids")
    read = expect_mask(found, names[0], mask.shape), expect_tensor(weights, names[1], mask.shape).double()
    return torch.cat([one.flatten() for one in read])


def _with_mask(choose: Callable[..., Tensor]) -> Callable[..., Ticket]:
    def way(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
        new_mask = choose(start, trained, mask, rate)
        return new_mask, start * new_mask

    return way


def _of_all(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    """The rate of all weights: those removed before are lost from sight."""
    return next_ticket(start, trained, mask, min(rate * mask.numel() / float(mask.sum()), 1.0))[0]


def _masked_sizes(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    """Zeros are the smallest: the same weights are removed again."""
    import torch

    sizes = (trained * mask).abs().flatten()
    found = torch.ones_like(sizes)
    found[sizes.argsort()[: round(rate * len(sizes))]] = 0.0
    return found.view_as(mask) * mask


def _forgets(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    import torch

    return next_ticket(start, trained, torch.ones_like(mask), rate)[0]


def _of_remaining_anywhere(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    """As many as should go, but of all weights: the old mask is forgotten."""
    import torch

    return next_ticket(start, trained, torch.ones_like(mask), rate * float(mask.sum()) / mask.numel())[0]


def _truncated(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Tensor:
    remaining = int(mask.sum())
    return next_ticket(start, trained, mask, int(rate * remaining) / remaining)[0]


def _not_rewound(start: Tensor, trained: Tensor, mask: Tensor, rate: float) -> Ticket:
    new_mask, _ = next_ticket(start, trained, mask, rate)
    return new_mask, trained * new_mask


TICKET = Exercise(
    id="ticket",
    title=Said("the winning ticket", "le ticket gagnant"),
    judge=Judge(
        next_ticket,
        trial=_ticket_trial,
        cases=_ticket_cases,
        mistakes=(
            Mistake(
                _with_mask(_of_remaining_anywhere),
                "So many weights go as should, but those removed before are there again, and may be chosen: start "
                "from the old mask, and choose among what it leaves.",
                "Il part autant de poids qu’il faut, mais ceux déjà enlevés sont de nouveau là, et peuvent être "
                "choisis : partez de l’ancien masque, et choisissez parmi ce qu’il laisse.",
            ),
            Mistake(
                _not_rewound,
                "The weights go on from where they were trained: that is fine-tuning. A ticket is rewound to its "
                "weights before training, start * mask.",
                "Les poids repartent de là où ils ont été entraînés : c’est du fine-tuning. Un ticket est ramené à ses "
                "poids d’avant l’entraînement, start * mask.",
            ),
            Mistake(
                lambda start, trained, mask, rate: (next_ticket(start, trained, mask, rate)[0], start),
                "The weights are rewound, but those removed are there again: multiply start by the new mask.",
                "Les poids sont ramenés au départ, mais ceux qui ont été enlevés y sont de nouveau : multipliez start "
                "par le nouveau masque.",
            ),
            Mistake(
                _with_mask(_of_all),
                "The rate is taken of all weights: it is a share of those that remain, mask.sum().",
                "Le taux porte sur tous les poids : c’est une part de ceux qui restent, mask.sum().",
            ),
            Mistake(
                _with_mask(_masked_sizes),
                "Weights removed before count among the smallest, so the same ones are removed again: leave them out "
                "of the choice, and take the share of those that remain.",
                "Les poids déjà enlevés comptent parmi les plus petits, et ce sont les mêmes qu’on enlève encore : "
                "écartez-les du choix, et prenez la part de ceux qui restent.",
            ),
            Mistake(
                _with_mask(_forgets),
                "The mask of the earlier rounds is forgotten: what was removed comes back.",
                "Le masque des tours précédents est oublié : ce qui avait été enlevé revient.",
            ),
            Mistake(
                _with_mask(lambda start, trained, mask, rate: next_ticket(start, start, mask, rate)[0]),
                "You compare the weights before training: what training has made of them tells which ones matter.",
                "Vous comparez les poids d’avant l’entraînement : c’est ce que l’entraînement en a fait qui dit "
                "lesquels comptent.",
            ),
            Mistake(
                _with_mask(lambda start, trained, mask, rate: next_ticket(start, 1 / trained, mask, rate)[0]),
                "The largest weights go: the smallest ones must.",
                "Ce sont les plus grands poids qui partent : il faut que ce soient les plus petits.",
            ),
            Mistake(
                _with_mask(_truncated),
                "The choice is right, but not the number: round(rate × number of weights that remain) go; int() "
                "truncates.",
                "Le choix est bon, mais pas le nombre : round(rate × nombre de poids restants) partent ; int() "
                "tronque.",
            ),
            Mistake(
                _with_mask(lambda start, trained, mask, rate: next_ticket(start, trained, mask, 1 - rate)[0]),
                "You keep `rate` of what remains: it is the share that goes.",
                "Vous gardez la part `rate` de ce qui reste : c’est celle qui part.",
            ),
            Mistake(
                _with_mask(
                    lambda start, trained, mask, rate: next_ticket(start, trained - trained.min() + 1, mask, rate)[0]
                ),
                "You remove the most negative weights: it is the magnitude that counts, trained.abs().",
                "Vous enlevez les poids les plus négatifs : c’est la valeur absolue qui compte, trained.abs().",
            ),
            Mistake(
                _with_mask(lambda start, trained, mask, rate: next_ticket(start, trained - start, mask, rate)[0]),
                "You compare how far weights have moved: here the smallest magnitudes after training go, "
                "trained.abs().",
                "Vous comparez le chemin parcouru par les poids : ici partent les plus petites valeurs absolues après "
                "l’entraînement, trained.abs().",
            ),
            Mistake(
                _with_mask(lambda start, trained, mask, rate: 1 - next_ticket(start, trained, mask, rate)[0]),
                "Your mask is 1 where a weight goes: 1 is for what stays.",
                "Votre masque vaut 1 là où un poids part : 1 désigne ce qui reste.",
            ),
            Mistake(
                _with_mask(lambda start, trained, mask, rate: mask),
                "Nothing more is removed: return a new mask, from which round(rate × mask.sum()) more weights have "
                "gone.",
                "Rien de plus n’est enlevé : renvoyez un nouveau masque, où round(rate × mask.sum()) poids de plus "
                "sont partis.",
            ),
        ),
    ),
    praise_en="Right: the trained weights choose the mask; training starts again from the initial weights.",
    praise_fr="Exact : les poids entraînés choisissent le masque ; l’entraînement repart des poids initiaux.",
    hint_en="Two different sets of weights serve for two things: trained to choose which go, start to begin again. How "
    "do you keep removed weights from being chosen once more?",
    hint_fr="Deux jeux de poids servent à deux choses : trained pour choisir ceux qui partent, start pour recommencer. "
    "Comment éviter que des poids enlevés soient choisis de nouveau ?",
    nearer_en="sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten(): what is removed is never small. Then "
    "as in the global mask, with round(rate * mask.sum()) of them.",
    nearer_fr="sizes = torch.where(mask > 0, trained.abs(), torch.inf).flatten() : ce qui est enlevé n’est jamais "
    "petit. Puis comme pour le masque global, en enlevant round(rate * mask.sum()) poids.",
)
