"""Lab 09: one bit per number, and what it loses on average.

Layer 6 (labs). Invariant: the scale is the one of `dlojz.optim.signs`, the mean magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake, by_reference
from dlojz.labs.optimizer_trials import normal
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

Scale = Callable[["Tensor"], "Tensor"]


def compress(values: Tensor) -> Tensor:
    """Every number's sign times the mean magnitude of all; zero counts as positive.

    Args:
        values: any shape.

    Source: Karimireddy et al. 2019, "Error Feedback Fixes SignSGD" (arXiv 1901.09847): the scaled sign.
    """
    return _signs(values) * values.abs().mean()


def bias(draws: Tensor) -> Tensor:
    """What compression adds on average to gradients of the same weights.

    Args:
        draws: one gradient per row, shape (draws, weights).

    Returns:
        the mean of the compressed rows, less the mean of the rows, shape (weights,).
    """
    import torch

    return torch.stack([compress(row) for row in draws]).mean(0) - draws.mean(0)


def _signs(values: Tensor) -> Tensor:
    import torch

    return torch.where(values >= 0, 1.0, -1.0)


def _scaled(scale: Scale) -> Callable[[Tensor], Tensor]:
    return lambda values: _signs(values) * scale(values)


def _vectors() -> Iterator[tuple[Tensor]]:
    """Unlike in length and size, not centred, each with a zero."""
    for seed, numel, size in ((1, 5, 1.0), (2, 64, 20.0), (3, 33, 7.0)):
        values = size * (normal(seed, numel) - 0.4)
        values[numel // 2] = 0.0
        yield (values,)


def _gradients() -> Iterator[tuple[Tensor]]:
    for seed, draws, weights in ((4, 6, 3), (5, 15, 8)):
        yield (3 * normal(seed, draws, weights) + normal(seed + 10, weights),)


COMPRESS_SIGNS = Exercise(
    id="compress-signs",
    title=Said("one bit per number", "un bit par nombre"),
    judge=by_reference(
        compress,
        cases=_vectors,
        mistakes=(
            Mistake(
                lambda values: values.sign() * values.abs().mean(),
                Said(
                    "Where the number is zero you give zero: torch.sign has three results, and one bit has room for "
                    "two. Let zero count as positive: torch.where(values >= 0, 1.0, -1.0).",
                    "Là où le nombre est nul, vous renvoyez zéro : torch.sign a trois résultats, or un bit n’en "
                    "distingue que deux. Comptez zéro comme positif : torch.where(values >= 0, 1.0, -1.0).",
                ),
            ),
            Mistake(
                lambda values: -_signs(-values) * values.abs().mean(),
                Said(
                    "All is right but for zero, which counts as positive here: >= rather than >.",
                    "Tout est juste, sauf pour zéro, qui compte ici comme positif : >= plutôt que >.",
                ),
            ),
            Mistake(
                _signs,
                Said(
                    "The signs are right, but the scale is missing: without it a gradient of 10⁻⁶ and one of 10⁶ say "
                    "the same. Multiply by the mean magnitude.",
                    "Les signes sont justes, mais l’échelle manque : sans elle, un gradient de 10⁻⁶ et un autre de 10⁶ "
                    "disent la même chose. Multipliez par la moyenne des valeurs absolues.",
                ),
            ),
            Mistake(
                _scaled(lambda values: values.mean()),
                Said(
                    "The scale is the mean of the numbers, in which positive and negative ones cancel out: take the "
                    "mean of their magnitudes, values.abs().mean().",
                    "L’échelle est ici la moyenne des nombres, où positifs et négatifs se compensent : prenez celle de "
                    "leurs valeurs absolues, values.abs().mean().",
                ),
            ),
            Mistake(
                _scaled(lambda values: values.square().mean().sqrt()),
                Said(
                    "Your scale is the root mean square: it keeps the norm, as in the paper on 1-bit Adam, but is not "
                    "the nearest to the numbers. Of all c, the one that makes ‖x − c sign(x)‖ smallest is the mean "
                    "magnitude.",
                    "Votre échelle est la moyenne quadratique : elle conserve la norme, comme dans l’article de 1-bit "
                    "Adam, mais n’est pas la plus proche des nombres. Parmi tous les c, celui qui minimise "
                    "‖x − c sign(x)‖ est la moyenne des valeurs absolues.",
                ),
            ),
            Mistake(
                _scaled(lambda values: values.abs().max()),
                Said(
                    "The scale is the largest magnitude: almost every number comes out too large. Take the mean one.",
                    "L’échelle est la plus grande valeur absolue : presque tous les nombres en ressortent trop grands. "
                    "Prenez la moyenne.",
                ),
            ),
            Mistake(
                _scaled(lambda values: values.abs().sum()),
                Said(
                    "The scale is the sum of the magnitudes: divide it by how many there are.",
                    "L’échelle est la somme des valeurs absolues : divisez-la par leur nombre.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: of 32 bits one is left, and one scale for all.",
        "Exact : des 32 bits, il en reste un, et une échelle pour tous.",
    ),
    hints=(
        Said(
            "Two parts: a tensor of +1 and −1, and one single number by which it is multiplied.",
            "Deux morceaux : un tenseur de +1 et de −1, et un seul nombre qui le multiplie.",
        ),
        Said(
            "torch.where(condition, 1.0, -1.0) gives the signs, values.abs().mean() the scale.",
            "torch.where(condition, 1.0, -1.0) donne les signes, values.abs().mean() l’échelle.",
        ),
    ),
)

SIGN_BIAS = Exercise(
    id="sign-bias",
    title=Said("the bias of the signs", "le biais des signes"),
    judge=by_reference(
        bias,
        cases=_gradients,
        mistakes=(
            Mistake(
                lambda draws: -bias(draws),
                Said(
                    "The difference is the other way round: what arrives, less what should have arrived.",
                    "La différence est prise à l’envers : ce qui arrive, moins ce qui aurait dû arriver.",
                ),
            ),
            Mistake(
                lambda draws: compress(draws.mean(0)) - draws.mean(0),
                Said(
                    "You compress the mean. In a training each gradient is compressed as it comes, and the mean is "
                    "made of what arrives: compress row by row, then average.",
                    "Vous compressez la moyenne. Dans un entraînement, chaque gradient est compressé à mesure, et "
                    "c’est ce qui arrive que l’on moyenne : compressez ligne par ligne, puis moyennez.",
                ),
            ),
            Mistake(
                lambda draws: compress(draws).mean(0) - draws.mean(0),
                Said(
                    "You compress all rows at a stroke, under one scale: each row is a gradient of its own, and has a "
                    "scale of its own.",
                    "Vous compressez toutes les lignes d’un coup, avec une même échelle : chaque ligne est un "
                    "gradient, et a sa propre échelle.",
                ),
            ),
            Mistake(
                lambda draws: bias(draws).abs(),
                Said(
                    "You give the magnitude of the bias; its sign tells which way the weights are pushed: keep it.",
                    "Vous donnez la valeur absolue du biais ; or son signe dit dans quel sens les poids sont "
                    "poussés : gardez-le.",
                ),
            ),
            Mistake(
                lambda draws: bias(draws) + draws.mean(0),
                Said(
                    "That is the mean of what arrives; the bias is what it differs by: take draws.mean(0) away.",
                    "C’est la moyenne de ce qui arrive ; le biais est l’écart avec ce qui devait arriver : retranchez "
                    "draws.mean(0).",
                ),
            ),
            Mistake(
                lambda draws: bias(draws).mean(),
                Said(
                    "One number is left, averaged over the weights too, where biases cancel out: average over the "
                    "draws alone, mean(0).",
                    "Il ne reste qu’un nombre, moyenné aussi sur les poids, où les biais se compensent : ne moyennez "
                    "que sur les tirages, mean(0).",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: no number of steps takes this away; on average too, something else arrives than was sent.",
        "Exact : aucun nombre de pas n’y remédie ; même en moyenne, ce qui arrive n’est pas ce qui a été envoyé.",
    ),
    hints=(
        Said(
            "Compress each row by itself, and look at two means over the rows.",
            "Compressez chaque ligne séparément, et comparez deux moyennes sur les lignes.",
        ),
        Said(
            "torch.stack([compress(row) for row in draws]) has the shape of draws; its mean(0), less draws.mean(0).",
            "torch.stack([compress(row) for row in draws]) a la forme de draws ; son mean(0), moins draws.mean(0).",
        ),
    ),
)
