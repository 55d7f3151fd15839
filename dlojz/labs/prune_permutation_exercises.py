"""Lab 11: hidden units in another order, and an output that does not notice.

Layer 6 (labs). Invariant: an answer is held to the three tensors, and so to the output: any other order of the hidden
units would be right for the output, but is not the one that was asked for.

Shape suffixes: H hidden units, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import normal, several, shaped
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

Layers = tuple["Tensor", "Tensor", "Tensor"]


def reorder(expand_HI: Tensor, bias_H: Tensor, project_OH: Tensor, order_H: Tensor) -> Layers:
    """Two consecutive layers with their hidden units in another order; what they compute together is the same.

    Args:
        expand_HI: weights of the first layer.
        bias_H: of the first layer.
        project_OH: weights of the second.
        order_H: unit number `order_H[i]` comes to place i.

    Source: Pool and Yu 2021, "Channel Permutations for N:M Sparsity" (NeurIPS 2021).
    """
    return expand_HI[order_H], bias_H[order_H], project_OH[:, order_H]


def _cases() -> Iterator[tuple[Any, ...]]:
    import torch

    # As wide as it is deep once: there an exchange of rows and columns gives no error of shape.
    for seed, hidden, inputs, outputs in ((1, 8, 5, 3), (2, 6, 6, 6)):
        order_H = torch.randperm(hidden, generator=torch.Generator().manual_seed(seed + 30))
        yield normal(seed, hidden, inputs), normal(seed + 10, hidden), normal(seed + 20, outputs, hidden), order_H


def _trial(answer: Callable[..., Any], expand: Tensor, bias: Tensor, project: Tensor, order: Tensor) -> Tensor:
    import torch

    given = answer(expand.clone(), bias.clone(), project.clone(), order.clone())
    names = "(expand, bias, project)"
    read = [
        shaped(one, name, wanted.shape)
        for one, name, wanted in zip(
            several(given, names, 3), ("expand", "bias", "project"), (expand, bias, project), strict=True
        )
    ]
    return torch.cat([one.double().flatten() for one in read])


def _inverse(expand: Tensor, bias: Tensor, project: Tensor, order: Tensor) -> Layers:
    return reorder(expand, bias, project, order.argsort())


def _inverse_after(expand: Tensor, bias: Tensor, project: Tensor, order: Tensor) -> Layers:
    return expand[order], bias[order], project[:, order.argsort()]


def _first_only(expand: Tensor, bias: Tensor, project: Tensor, order: Tensor) -> Layers:
    return expand[order], bias[order], project


def _without_bias(expand: Tensor, bias: Tensor, project: Tensor, order: Tensor) -> Layers:
    return expand[order], bias, project[:, order]


def _second_only(expand: Tensor, bias: Tensor, project: Tensor, order: Tensor) -> Layers:
    return expand, bias, project[:, order]


PERMUTATION = Exercise(
    id="permutation",
    title=Said("another order, the same output", "un autre ordre, la même sortie"),
    judge=by_trial(
        _trial,
        reorder,
        cases=_cases,
        mistakes=(
            Mistake(
                _without_bias,
                Said(
                    "The bias stays where it was: each hidden unit must take its own along.",
                    "Le biais reste en place : chaque unité cachée doit emporter le sien.",
                ),
            ),
            Mistake(
                _first_only,
                Said(
                    "The second layer still reads the units in their old order: move its columns, project[:, order].",
                    "La seconde couche lit toujours les unités dans l’ancien ordre : déplacez ses colonnes, "
                    "project[:, order].",
                ),
            ),
            Mistake(
                _second_only,
                Said(
                    "Only the second layer is moved: the rows of the first one, and its bias, make the units.",
                    "Seule la seconde couche est déplacée : or ce sont les lignes de la première, et son biais, qui "
                    "font les unités.",
                ),
            ),
            Mistake(
                _inverse_after,
                Said(
                    "The second layer is moved by the inverse order: unit order[i] is now at place i, and it is there "
                    "that its column must be, so project[:, order] too.",
                    "La seconde couche est déplacée par l’ordre inverse : l’unité order[i] est maintenant à la place "
                    "i, et sa colonne doit y être aussi, donc encore project[:, order].",
                ),
            ),
            Mistake(
                _inverse,
                Said(
                    "The output is the same, but the order is the inverse one: order[i] says which unit comes to place "
                    "i, so index by order itself.",
                    "La sortie est la même, mais l’ordre est l’inverse : order[i] dit quelle unité vient à la place "
                    "i ; indexez donc par order lui-même.",
                ),
            ),
            Mistake(
                lambda expand, bias, project, order: (expand, bias, project),
                Said(
                    "Nothing is moved: the output is the same, of course.",
                    "Rien n’est déplacé : la sortie est la même, évidemment.",
                ),
            ),
        ),
    ),
    praise=Said(
        "Right: names of hidden units mean nothing, so one may choose those that suit the mask.",
        "Exact : le numéro d’une unité cachée ne veut rien dire ; on peut donc choisir ceux qui arrangent le masque.",
    ),
    hints=(
        Said(
            "A hidden unit is a row of expand, an element of bias, and a column of project: all three move together.",
            "Une unité cachée, c’est une ligne de expand, un élément de bias et une colonne de project : les trois se "
            "déplacent ensemble.",
        ),
        Said("expand[order], bias[order], project[:, order].", "Dans l’ordre : expand[order], bias[order], "
             "project[:, order]."),
    ),
)  # fmt: skip
