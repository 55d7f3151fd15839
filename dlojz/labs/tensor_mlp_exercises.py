"""Lab 06: two linear layers with one all-reduce: the MLP.

Layer 6 (labs). Invariant: an answer is held to the output and the gradients of one process, and then to what it has
sent for them: a second sum gives the same values.
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
    asked_for,
    by_shares,
    gathers,
    gradient,
    normal,
)
from dlojz.labs.verdict import Said
from dlojz.ranks.forks import RankAnswer
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

SAMPLES, WIDTH, HIDDEN = 5, 8, 24
OUTPUT, OF_X, OF_EXPAND, OF_PROJECT = "output", "gradient of x", "gradient of expand", "gradient of project"
_OF_BIAS = "gradient of project_bias"
LABELS = {
    OUTPUT: Said("the output", "la sortie"),
    OF_X: Said("the gradient of x", "le gradient de x"),
    OF_EXPAND: Said("the gradient of expand", "le gradient de expand"),
    OF_PROJECT: Said("the gradient of project", "le gradient de project"),
    _OF_BIAS: Said("the gradient of project_bias", "le gradient de project_bias"),
}


def _inputs(seed: int) -> Any:
    """x, the two layers with their biases, the coefficients of the loss."""
    shapes = ((SAMPLES, WIDTH), (HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,), (SAMPLES, WIDTH))
    return normal(seed, *shapes)


def _own(rank: int, size: int, seed: int) -> tuple[Tensor, ...]:
    """What the answer is given on a rank, ready for gradients."""
    x, expand, expand_bias, project, project_bias, _ = _inputs(seed)
    parts = (x, expand.chunk(size)[rank], expand_bias.chunk(size)[rank], project.chunk(size, dim=1)[rank], project_bias)
    return tuple(part.clone().requires_grad_() for part in parts)


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    given = _own(rank, size, seed)
    y = answer(*given)
    if y is not None and y.requires_grad:
        (y * _inputs(seed)[-1]).sum().backward()
    x, expand, _, project, project_bias = given
    return {OUTPUT: y, OF_X: x.grad, OF_EXPAND: expand.grad, OF_PROJECT: project.grad, _OF_BIAS: project_bias.grad}


def _shares(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    """The gradient of x is this rank's contribution; all else is right."""
    import torch.nn.functional as F

    shares = [_own(other, size, seed) for other in range(size)]
    partials = [F.gelu(x @ expand.T + bias) @ project.T for x, expand, bias, project, _ in shares]
    x, expand, _, project, project_bias = shares[rank]
    y = added(partials) + project_bias
    (y * _inputs(seed)[-1]).sum().backward()
    values = {
        OUTPUT: y, OF_X: gradient(x), OF_EXPAND: gradient(expand), OF_PROJECT: gradient(project),
        _OF_BIAS: gradient(project_bias), "partial": partials[rank], "bias": project_bias,
        "sum of x": added(gradient(share[0]) for share in shares),
    }  # fmt: skip
    return {name: value.detach() for name, value in values.items()}


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    values = _shares(rank, size, seed)
    return {**{name: values[name] for name in LABELS}, OF_X: values["sum of x"]}


def _with_bias(times: Callable[[int], int]) -> Callable[[int, int, int], dict[str, Tensor]]:
    """The bias counted another number of times."""

    def values(rank: int, size: int, seed: int) -> dict[str, Tensor]:
        found = _shares(rank, size, seed)
        return {OUTPUT: found[OUTPUT] + (times(size) - 1) * found["bias"]}

    return values


def _unsummed(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    found = _shares(rank, size, seed)
    return {OUTPUT: found["partial"] + found["bias"]}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    """The values are right; were there two sums, one each way, and nothing else?"""
    if gathers(answers[0]) or asked_for(answers[0], "reduce_scatter_tensor", "reduce_scatter"):
        raise Wrong(
            say(
                en="Output and gradients are right, but the hidden features are brought together between the two "
                "layers: that is not needed. GELU treats each feature alone, and the second layer takes exactly the "
                "features that this rank has.",
                fr="La sortie et les gradients sont justes, mais les neurones cachés sont rassemblés entre les deux "
                "couches : c’est inutile. GELU traite chaque neurone séparément, et la seconde couche prend exactement "
                "ceux de ce rang.",
            )
        )
    sums = len(asked_for(answers[0], "all_reduce"))
    if sums > 2:
        raise Wrong(
            say(
                en=f"Output and gradients are right, but {sums} all-reduces are made: two are enough, one in forward "
                "and one in backward.",
                fr=f"La sortie et les gradients sont justes, mais {sums} all-reduces sont faits : deux suffisent, l’un "
                "en passe avant, l’autre en passe arrière.",
            )
        )


ONE_ALL_REDUCE = Exercise(
    id="one-all-reduce",
    title=Said("the MLP with one all-reduce", "le MLP avec un seul all-reduce"),
    judge=by_shares(
        trial=_trial,
        expected=_expected,
        labels=LABELS,
        faults=(
            Fault(lambda *case: {name: _shares(*case)[name] for name in (OUTPUT, OF_X)}, NO_BACKWARD_SUM),
            Fault(_unsummed, NO_FORWARD_SUM),
            Fault(lambda *case: {OUTPUT: _shares(*case)["partial"]}, NO_FORWARD_SUM),
            Fault(_with_bias(lambda size: size), BIAS_EVERYWHERE),
            Fault(_with_bias(lambda size: 0), NO_BIAS),
            Fault(
                lambda rank, size, seed: {
                    OUTPUT: _expected(rank, size, seed)[OUTPUT],
                    OF_PROJECT: size * _expected(rank, size, seed)[OF_PROJECT],
                },
                COUNTED_AGAIN,
            ),
            Fault(
                lambda rank, size, seed: {
                    OUTPUT: _expected(rank, size, seed)[OUTPUT],
                    OF_X: _expected(rank, size, seed)[OF_X] / size,
                },
                Said(
                    "In backward you average the contributions to the gradient of x: they are parts of one sum. That "
                    "mean belongs to data parallelism, where ranks have read different data.",
                    "En passe arrière, vous faites la moyenne des contributions au gradient de x : ce sont les "
                    "morceaux d’une même somme. Cette moyenne-là est celle de Data Parallelism, où les rangs ont lu "
                    "des données différentes.",
                ),
            ),
        ),
        inspect=_inspect,
    ),
    praise=Said(
        "Right: two layers, one all-reduce in each direction, and the gradients of one process.",
        "Exact : deux couches, un all-reduce dans chaque sens, et les gradients d’un seul processus.",
    ),
    hints=(
        Said(
            "The first layer by columns, the second by rows: what one gives is what the other takes. Where is a sum "
            "missing in forward, and where in backward?",
            "La première couche par colonne, la seconde par ligne : ce que donne l’une est ce que prend l’autre. Où "
            "manque-t-il une somme en passe avant, et où en passe arrière ?",
        ),
        Said(
            "In backward of EnterRegion: gradient = gradient.clone(), dist.all_reduce(gradient), return it. Then: x = "
            "EnterRegion.apply(x); hidden = F.gelu(x @ expand.T + expand_bias); y = hidden @ project.T; all-reduce y; "
            "+ project_bias.",
            "Dans le backward d’EnterRegion : gradient = gradient.clone(), dist.all_reduce(gradient), puis renvoyez-"
            "le. Ensuite : x = EnterRegion.apply(x) ; hidden = F.gelu(x @ expand.T + expand_bias) ; y = hidden @ "
            "project.T ; all-reduce de y ; + project_bias.",
        ),
    ),
)
