"""Lab 06: one linear layer, by columns and by rows.

Layer 6 (labs). Invariant: an answer is held to the outputs and gradients of the whole layer in one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.tensor_diagnosis import (
    BIAS_EVERYWHERE,
    COUNTED_AGAIN,
    NO_BACKWARD_SUM,
    NO_BIAS,
    NO_FORWARD_SUM,
    Fault,
    added,
    by_shares,
    gathers,
    normal,
)
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES, NARROW, WIDE = 5, 12, 24
OUTPUT, OF_X, OF_WEIGHT = "output", "gradient of x", "gradient of the weight"
LABELS = {
    OUTPUT: Said("the output", "la sortie"),
    OF_X: Said("the gradient of x", "le gradient de x"),
    OF_WEIGHT: Said("the gradient of the weight", "le gradient du poids"),
}


def _column_inputs(seed: int) -> Any:
    """x, the whole weight and bias, the whole gradient of the output."""
    return normal(seed, (SAMPLES, NARROW), (WIDE, NARROW), (WIDE,), (SAMPLES, WIDE))


def _column_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    x, weight, bias, gradient = _column_inputs(seed)
    y, of_x = answer(x, weight, bias, gradient.chunk(size, dim=1)[rank].contiguous())
    return {OUTPUT: y, OF_X: of_x}


def _column(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, gradient = _column_inputs(seed)
    return {OUTPUT: (x @ weight.T + bias).chunk(size, dim=1)[rank], OF_X: gradient @ weight}


def _own_of_x(rank: int, size: int, seed: int) -> Tensor:
    _, weight, _, gradient = _column_inputs(seed)
    part: Tensor = gradient.chunk(size, dim=1)[rank] @ weight.chunk(size)[rank]
    return part


def _by_rows(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, _ = _column_inputs(seed)
    return {OUTPUT: x.chunk(size, dim=1)[rank] @ weight.chunk(size, dim=1)[rank].T + bias}


def _added_columns(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, _ = _column_inputs(seed)
    return {OUTPUT: added((x @ weight.T + bias).chunk(size, dim=1))}


def _every_nth(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    x, weight, bias, _ = _column_inputs(seed)
    return {OUTPUT: (x @ weight.T + bias)[:, rank::size]}


def _side_by_side(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    import torch

    return {OF_X: torch.cat([_own_of_x(other, size, seed) for other in range(size)], dim=1)}


COLUMN_LINEAR = Exercise(
    id="column-linear",
    title=Said("a linear layer by columns", "une couche linéaire par colonne"),
    judge=by_shares(
        trial=_column_trial,
        expected=_column,
        labels=LABELS,
        faults=(
            Fault(
                _by_rows,
                Said(
                    "The wrong dimension is split: you share out the inputs (dim=1 of the weight), which is the split "
                    "by rows. By columns, a rank computes some of the outputs: rows of torch's weight, dim=0.",
                    "Ce n’est pas la bonne dimension : vous partagez les entrées (dim=1 du poids), c’est le découpage "
                    "par ligne. Par colonne, un rang calcule une partie des sorties : des lignes du poids de torch, "
                    "dim=0.",
                ),
            ),
            Fault(
                _added_columns,
                Said(
                    "You add up the outputs of the ranks; but these are different features, which stand side by side. "
                    "By columns, the forward pass needs no sum at all.",
                    "Vous additionnez les sorties des rangs ; or ce sont des neurones différents, qui se juxtaposent. "
                    "Par colonne, la passe avant ne demande aucune somme.",
                ),
            ),
            Fault(
                lambda rank, size, seed: {OUTPUT: _column_inputs(seed)[0] @ _column_inputs(seed)[1].T
                                          + _column_inputs(seed)[2]},
                Said(
                    "Every rank holds the whole output: return this rank's features only, nothing has to be gathered.",
                    "Chaque rang détient la sortie entière : renvoyez seulement les neurones de ce rang, il n’y a rien "
                    "à rassembler.",
                ),
            ),
            Fault(
                _every_nth,
                Said(
                    "You take every N-th feature; a rank's part is one piece: weight.chunk(size)[rank].",
                    "Vous prenez un neurone sur N ; or la part d’un rang est d’un seul tenant : "
                    "weight.chunk(size)[rank].",
                ),
            ),
            Fault(
                lambda rank, size, seed: {
                    OUTPUT: _column(rank, size, seed)[OUTPUT] - _column_inputs(seed)[2].chunk(size)[rank]
                },
                NO_BIAS,
            ),
            Fault(
                lambda rank, size, seed: {
                    OUTPUT: _column(rank, size, seed)[OUTPUT], OF_X: _own_of_x(rank, size, seed)
                },
                NO_BACKWARD_SUM,
            ),
            Fault(
                _side_by_side,
                Said(
                    "You lay the ranks' gradients of x side by side; but each is a contribution to the whole gradient "
                    "of the same x: add them up (all-reduce, not all-gather).",
                    "Vous juxtaposez les gradients de x des rangs ; or chacun contribue au gradient entier du même x : "
                    "additionnez-les (all-reduce, et non all-gather).",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: nothing is sent in the forward pass, and one all-reduce of the gradient of x in the backward pass.",
        "Exact : rien n’est envoyé en passe avant, et un all-reduce du gradient de x en passe arrière.",
    ),
    hints=(
        Said(
            "torch keeps the weight as (outputs, inputs): the columns of W are rows of this tensor. Which rank has "
            "used x? What is the gradient of a tensor that several have used?",
            "torch range le poids sous la forme (sorties, entrées) : les colonnes de W sont des lignes de ce tenseur. "
            "Quels rangs ont utilisé x ? Que vaut le gradient d’un tenseur que plusieurs ont utilisé ?",
        ),
        Said(
            "own = weight.chunk(size)[rank], and the same for the bias; y = x @ own.T + own_bias. Then y_gradient @ "
            "own is this rank's contribution, which dist.all_reduce adds to the others', in place.",
            "own = weight.chunk(size)[rank], et de même pour le biais ; y = x @ own.T + own_bias. Ensuite, "
            "y_gradient @ own est la contribution de ce rang, que dist.all_reduce ajoute aux autres, en place.",
        ),
    ),
)  # fmt: skip


def _row_inputs(seed: int) -> Any:
    """x, the whole weight and bias, the coefficients of the loss."""
    return normal(seed, (SAMPLES, WIDE), (NARROW, WIDE), (NARROW,), (SAMPLES, NARROW))


def _row_trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    x, weight, bias, coefficients = _row_inputs(seed)
    x_own = x.chunk(size, dim=1)[rank].clone().requires_grad_()
    weight.requires_grad_()
    y = answer(x_own, weight, bias)
    if y is not None and y.shape == coefficients.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_X: x_own.grad, OF_WEIGHT: weight.grad}


def _row(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    import torch

    x, weight, bias, coefficients = _row_inputs(seed)
    of_weight = torch.zeros_like(weight)
    own = slice(rank * WIDE // size, (rank + 1) * WIDE // size)
    of_weight[:, own] = coefficients.T @ x[:, own]
    return {OUTPUT: x @ weight.T + bias, OF_X: (coefficients @ weight)[:, own], OF_WEIGHT: of_weight}


def _partial(rank: int, size: int, seed: int) -> Tensor:
    x, weight, _, _ = _row_inputs(seed)
    part: Tensor = x.chunk(size, dim=1)[rank] @ weight.chunk(size, dim=1)[rank].T
    return part


def _inspect_row(answers: list[RankAnswer], size: int) -> None:
    if gathers(answers[0]):
        raise Wrong(
            say(
                en="The output is right, but something is gathered on the way, and computed on every rank; one "
                "all-reduce of the partial products is enough.",
                fr="La sortie est juste, mais quelque chose est rassemblé en chemin, puis calculé sur chaque rang ; un "
                "seul all-reduce des produits partiels suffit.",
            )
        )


ROW_LINEAR = Exercise(
    id="row-linear",
    title=Said("a linear layer by rows", "une couche linéaire par ligne"),
    judge=by_shares(
        trial=_row_trial,
        expected=_row,
        labels=LABELS,
        faults=(
            Fault(lambda rank, size, seed: {OUTPUT: _partial(rank, size, seed) + _row_inputs(seed)[2]}, NO_FORWARD_SUM),
            Fault(lambda rank, size, seed: {OUTPUT: _partial(rank, size, seed)}, NO_FORWARD_SUM),
            Fault(
                lambda rank, size, seed: {
                    OUTPUT: _row(rank, size, seed)[OUTPUT] + (size - 1) * _row_inputs(seed)[2]
                },
                BIAS_EVERYWHERE,
            ),
            Fault(lambda rank, size, seed: {OUTPUT: _row(rank, size, seed)[OUTPUT] - _row_inputs(seed)[2]}, NO_BIAS),
            Fault(
                lambda rank, size, seed: {OUTPUT: _joined([_partial(other, size, seed) for other in range(size)])},
                Said(
                    "You lay the partial products side by side; but each rank has computed a part of the sum for all "
                    "outputs: add them up (all-reduce, not all-gather).",
                    "Vous juxtaposez les produits partiels ; or chaque rang a calculé, pour toutes les sorties, une "
                    "partie de la somme : additionnez-les (all-reduce, et non all-gather).",
                ),
            ),
            Fault(
                lambda rank, size, seed: {
                    OUTPUT: (_row(rank, size, seed)[OUTPUT] - _row_inputs(seed)[2]) / size + _row_inputs(seed)[2]
                },
                Said(
                    "You average the partial products; they are parts of one sum, not estimates of the same thing: do "
                    "not divide.",
                    "Vous faites la moyenne des produits partiels ; ce sont les morceaux d’une même somme, non des "
                    "estimations de la même chose : ne divisez pas.",
                ),
            ),
            Fault(
                lambda rank, size, seed: {
                    OUTPUT: _row(rank, size, seed)[OUTPUT], OF_X: size * _row(rank, size, seed)[OF_X]
                },
                COUNTED_AGAIN,
            ),
        ),
        inspect=_inspect_row,
    ),
    praise=Said(
        "Right: one all-reduce in the forward pass, nothing in the backward pass, and the bias once.",
        "Exact : un all-reduce en passe avant, rien en passe arrière, et le biais une seule fois.",
    ),
    hints=(
        Said(
            "This rank has some of the inputs: it needs the weights that multiply these, for all outputs. What does "
            "each rank's product lack?",
            "Ce rang détient une partie des entrées : il lui faut les poids qui les multiplient, pour toutes les "
            "sorties. Que manque-t-il au produit de chaque rang ?",
        ),
        Said(
            "y = x_own @ weight.chunk(size, dim=1)[rank].T, then dist.all_reduce(y) in place, and only then + bias.",
            "y = x_own @ weight.chunk(size, dim=1)[rank].T, puis dist.all_reduce(y) en place, et seulement ensuite "
            "+ bias.",
        ),
    ),
)  # fmt: skip


def _joined(parts: list[Tensor]) -> Tensor:
    import torch

    return torch.cat(parts, dim=1)
