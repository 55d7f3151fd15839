"""Lab 11: which weights go, over a whole model: the global magnitude mask.

Layer 6 (labs). Invariant: an answer is held to every mask; layers differ in size, and no two magnitudes are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import masks_of, normal, several
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

Masks = list["Tensor"]


def global_masks(weights: Sequence[Tensor], sparsity: float) -> Masks:
    """One mask per weight, 1 where it is kept: the smallest magnitudes of all of them together go.

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


def _cases() -> Iterator[tuple[Any, ...]]:
    for seed, sparsity in ((1, 0.5), (2, 0.8), (3, 0.3)):
        yield [3 * normal(seed, 4, 5) - 1, 0.5 * normal(seed + 10, 10, 3), normal(seed + 20, 10)], sparsity


def _trial(answer: Callable[..., Any], weights: list[Tensor], sparsity: float) -> Tensor:
    import torch

    given = [weight.clone() for weight in weights]
    masks = several(answer(given, sparsity), f"[{', '.join(['mask'] * len(weights))}]", len(weights))
    names = [f"mask {number}" for number in range(len(weights))]
    read = [masks_of(mask, name, w.shape) for mask, name, w in zip(masks, names, weights, strict=True)]
    return torch.cat([mask.flatten() for mask in read])


def _per_layer(weights: Sequence[Tensor], sparsity: float) -> Masks:
    return [global_masks([weight], sparsity)[0] for weight in weights]


def _signed(weights: Sequence[Tensor], sparsity: float) -> Masks:
    smallest = min(float(weight.min()) for weight in weights)
    return global_masks([weight - smallest for weight in weights], sparsity)


def _swapped(weights: Sequence[Tensor], sparsity: float) -> Masks:
    return global_masks(weights, 1 - sparsity)


def _removed(weights: Sequence[Tensor], sparsity: float) -> Masks:
    return [1 - mask for mask in global_masks(weights, sparsity)]


def _largest_go(weights: Sequence[Tensor], sparsity: float) -> Masks:
    return [1 - mask for mask in global_masks(weights, 1 - sparsity)]


def _scaled(weights: Sequence[Tensor], sparsity: float) -> Masks:
    """A share of the largest magnitude as the threshold."""
    largest = max(float(weight.abs().max()) for weight in weights)
    return [(weight.abs() >= sparsity * largest).float() for weight in weights]


GLOBAL_MASKS = Exercise(
    id="global-masks",
    title=Said("the smallest weights go", "les plus petits poids partent"),
    judge=by_trial(
        _trial,
        global_masks,
        cases=_cases,
        mistakes=(
            Mistake(
                _per_layer,
                Said(
                    "Each layer loses the same share: one threshold for all of them is asked for, so that a layer of "
                    "large weights keeps more than a layer of small ones.",
                    "Chaque couche perd la même part : on demande un seuil commun, pour qu’une couche de grands poids "
                    "en garde plus qu’une couche de petits.",
                ),
            ),
            Mistake(
                _signed,
                Said(
                    "You remove the most negative weights: it is the magnitude that counts, weight.abs().",
                    "Vous enlevez les poids les plus négatifs : c’est la valeur absolue qui compte, weight.abs().",
                ),
            ),
            Mistake(
                _swapped,
                Said(
                    "The sparsity is the share that goes; you keep as much.",
                    "sparsity est la part des poids à enlever ; c’est celle que vous gardez.",
                ),
            ),
            Mistake(
                _removed,
                Said(
                    "Your mask is 1 where a weight goes: 1 is for what stays, since the mask multiplies the weights.",
                    "Votre masque vaut 1 là où un poids part : 1 désigne ce qui reste, puisque le masque multiplie les "
                    "poids.",
                ),
            ),
            Mistake(
                _largest_go,
                Said(
                    "The largest weights go: it is the smallest ones that matter least.",
                    "Ce sont les plus grands poids qui partent : or les plus petits comptent le moins.",
                ),
            ),
            Mistake(
                _scaled,
                Said(
                    "Your threshold is a share of the largest magnitude: then the number of weights that go depends on "
                    "one outlier. Sort them, and take as many as are asked for.",
                    "Votre seuil est une fraction de la plus grande valeur : le nombre de poids enlevés dépend alors "
                    "d’un seul extrême. Triez-les, et prenez-en autant qu’il est demandé.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: one threshold for all; each layer keeps what it has that is large.",
        "Exact : un seuil pour toutes ; chaque couche garde ce qu’elle a de grand.",
    ),
    hints=(
        Said(
            "Put all magnitudes into one long tensor, mark the smallest ones, then cut it into pieces of the layers' "
            "shapes.",
            "Mettez toutes les valeurs absolues dans un long tenseur, marquez les plus petites, puis découpez-le selon "
            "les formes des couches.",
        ),
        Said(
            "sizes = torch.cat([w.abs().flatten() for w in weights]); keep[sizes.argsort()[:round(sparsity * "
            "len(sizes))]] = 0; keep.split([w.numel() for w in weights]), each viewed as its weight.",
            "sizes = torch.cat([w.abs().flatten() for w in weights]) ; keep[sizes.argsort()[:round(sparsity * "
            "len(sizes))]] = 0 ; keep.split([w.numel() for w in weights]), chacun mis à la forme de son poids.",
        ),
    ),
)
