"""Lab 06: CoAtNet's inverted bottleneck shared out by channels, with its squeeze-excite.

Layer 6 (labs). Invariant: an answer is held to the output and the gradients of one process, whose graph knows which
contribution is which rank's.

Shape suffixes: B batch, C channels, c hidden channels of one rank, H and W of the feature map.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.tensor_diagnosis import (
    COUNTED_AGAIN,
    NO_BACKWARD_SUM,
    NO_FORWARD_SUM,
    Fault,
    added,
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

BATCH, CHANNELS, HIDDEN, SQUEEZED, SIDE = 2, 4, 12, 3, 5
NAMES = ("expand", "depthwise", "squeeze", "squeeze_bias", "excite", "excite_bias", "project")
_CUT: dict[str, int | None] = {
    "expand": 0, "depthwise": 0, "squeeze": 1, "squeeze_bias": None, "excite": 0, "excite_bias": 0, "project": 1,
}  # fmt: skip
"""The dimension along which each weight is shared out; None: whole on every rank."""
OUTPUT, OF_X = "output", "gradient of x"
_JUDGED = ("depthwise", "squeeze", "squeeze_bias", "project")
LABELS = {
    OUTPUT: Said("the output", "la sortie"),
    OF_X: Said("the gradient of x", "le gradient de x"),
    **{f"gradient of {name}": Said(f"the gradient of {name}", f"le gradient de {name}") for name in _JUDGED},
}


def _inputs(seed: int) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """x, the coefficients of the loss, the whole weights."""
    image = (BATCH, CHANNELS, SIDE, SIDE)
    shapes = ((HIDDEN, CHANNELS, 1, 1), (HIDDEN, 1, 3, 3), (SQUEEZED, HIDDEN), (SQUEEZED,), (HIDDEN, SQUEEZED),
              (HIDDEN,), (CHANNELS, HIDDEN, 1, 1))  # fmt: skip
    x, coefficients, *weights = normal(seed, image, image, *shapes)
    return x, coefficients, dict(zip(NAMES, weights, strict=True))


def _own(rank: int, size: int, seed: int) -> SimpleNamespace:
    whole = _inputs(seed)[2]
    parts = {name: whole[name] if dim is None else whole[name].chunk(size, dim)[rank] for name, dim in _CUT.items()}
    return SimpleNamespace(**{name: part.clone().requires_grad_() for name, part in parts.items()})  # fmt: skip


def _gradients(own: SimpleNamespace) -> dict[str, Any]:
    return {f"gradient of {name}": getattr(own, name).grad for name in _JUDGED}


def _trial(answer: Callable[..., Any], rank: int, size: int, seed: int) -> dict[str, Any]:
    import torch.distributed as dist

    from dlojz.tensor.axis import TensorAxis

    x, coefficients, _ = _inputs(seed)
    x.requires_grad_()
    own = _own(rank, size, seed)
    y = answer(x, own, TensorAxis(dist.group.WORLD))
    if y is not None and y.shape == x.shape and y.requires_grad:
        (y * coefficients).sum().backward()
    return {OUTPUT: y, OF_X: x.grad, **_gradients(own)}


def _only(parts: list[Tensor], rank: int) -> Tensor:
    """The sum of all ranks' parts, through which the gradient reaches this rank's part only."""
    return added(part if one == rank else part.detach() for one, part in enumerate(parts))


def _shares(rank: int, size: int, seed: int, way: str = "right") -> dict[str, Tensor]:
    """What each rank holds, its contribution to the gradient of x by itself; `way` spoils the gate."""
    import torch
    import torch.nn.functional as F

    x, coefficients, _ = _inputs(seed)
    ranks, owns = range(size), [_own(one, size, seed) for one in range(size)]
    xs = [x.clone().requires_grad_() for _ in ranks]
    hidden = []
    for x_BCHW, own in zip(xs, owns, strict=True):
        expanded = F.gelu(F.conv2d(x_BCHW, own.expand))
        hidden.append(F.gelu(F.conv2d(expanded, own.depthwise, padding=1, groups=len(own.depthwise))))
    squeezed = [h.mean((2, 3)) @ own.squeeze.T for h, own in zip(hidden, owns, strict=True)]
    partials = []
    for one, own in enumerate(owns):
        if way == "gate alone":
            summed = squeezed[one]
        else:
            summed = _only(squeezed, one) if way == "gate not entered" else added(squeezed)
        times = size if way == "bias everywhere" else 1
        gate = torch.sigmoid(F.silu(summed + times * own.squeeze_bias) @ own.excite.T + own.excite_bias)
        partials.append(F.conv2d(hidden[one] * gate[:, :, None, None], own.project))
    y = x + added(partials)
    (y * coefficients).sum().backward()
    of_x = coefficients + added(gradient(one) for one in xs)
    values = {OUTPUT: y, OF_X: of_x, **_gradients(owns[rank])}
    if way != "gate not entered":  # the bias is whole on every rank, and so is its gradient
        values["gradient of squeeze_bias"] = added(gradient(one.squeeze_bias) for one in owns)
    values |= {"own x": coefficients + gradient(xs[rank]), "partial": x + partials[rank]}
    return {name: value.detach() for name, value in values.items()}


def _expected(rank: int, size: int, seed: int) -> dict[str, Tensor]:
    values = _shares(rank, size, seed)
    return {name: values[name] for name in LABELS}


def _inspect(answers: list[RankAnswer], size: int) -> None:
    if gathers(answers[0]):
        raise Wrong(
            say(
                en="All is right, but channels are gathered on the way: only the few squeezed numbers depend on all "
                "channels, and these are a sum.",
                fr="Tout est juste, mais des canaux sont rassemblés en chemin : seuls les quelques nombres comprimés "
                "dépendent de tous les canaux, et ce sont des sommes.",
            )
        )


MBCONV_CHANNELS = Exercise(
    id="mbconv-channels",
    title=Said("MBConv by channels", "MBConv par canaux"),
    judge=by_shares(
        trial=_trial,
        expected=_expected,
        labels=LABELS,
        faults=(
            Fault(
                lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed, "gate alone")[OUTPUT]},
                Said(
                    "The gate of squeeze-excite sees this rank's channels only: squeeze is a layer by rows, its "
                    "partial products are to be added up.",
                    "La porte de squeeze-excite ne voit que les canaux de ce rang : squeeze est une couche par ligne, "
                    "ses produits partiels sont à additionner.",
                ),
            ),
            Fault(
                lambda rank, size, seed: {OUTPUT: _shares(rank, size, seed, "bias everywhere")[OUTPUT]},
                Said(
                    "The bias of squeeze is added on every rank before the sum, so it counts as many times as there "
                    "are ranks: add it once, after.",
                    "Le biais de squeeze est ajouté sur chaque rang avant la somme, il compte donc autant de fois "
                    "qu’il y a de rangs : ajoutez-le une fois, après.",
                ),
            ),
            Fault(lambda *case: {OUTPUT: _shares(*case)["partial"]}, NO_FORWARD_SUM),
            Fault(
                lambda rank, size, seed: {
                    name: _shares(rank, size, seed, "gate not entered")[name]
                    for name in (OUTPUT, "gradient of squeeze")
                },
                Said(
                    "The forward pass is right, but the gradient that reaches squeeze comes from this rank's gates "
                    "only: excite is a layer by columns, with a beginning of its own (copy), whose backward adds up.",
                    "La passe avant est juste, mais le gradient qui parvient à squeeze ne vient que des portes de ce "
                    "rang : excite est une couche par colonne, avec sa propre entrée (copy), dont la passe arrière "
                    "additionne.",
                ),
            ),
            Fault(lambda *case: {OUTPUT: _shares(*case)[OUTPUT], OF_X: _shares(*case)["own x"]}, NO_BACKWARD_SUM),
            Fault(
                lambda *case: {
                    OUTPUT: _shares(*case)[OUTPUT],
                    "gradient of project": case[1] * _shares(*case)["gradient of project"],
                },
                COUNTED_AGAIN,
            ),
            Fault(
                lambda *case: {
                    OUTPUT: _shares(*case)[OUTPUT],
                    OF_X: _shares(*case)[OF_X] + (case[1] - 1) * _inputs(case[2])[1],
                },
                Said(
                    "The shortcut goes through the region's entry: backward adds its gradient up over the ranks, "
                    "though it is whole on each. Add the x that has not passed copy.",
                    "Le raccourci passe par l’entrée de la région : la passe arrière additionne son gradient sur les "
                    "rangs, alors qu’il est entier sur chacun. Ajoutez le x qui n’est pas passé par copy.",
                ),
            ),
        ),
        inspect=_inspect,
    ),
    praise=Said(
        "Right: the depthwise convolution asks nobody, the gate asks for a few numbers, the end for one all-reduce.",
        "Exact : la convolution depthwise ne demande rien, la porte quelques nombres, la fin un all-reduce.",
    ),
    hints=(
        Said(
            "A 1×1 convolution is a linear layer over the channels: expand by columns, project by rows. Which of the "
            "two is squeeze, and which is excite?",
            "Une convolution 1×1 est une couche linéaire sur les canaux : expand par colonne, project par ligne. Que "
            "sont alors squeeze et excite ?",
        ),
        Said(
            "Four operators: copy(x, axis) before expand; add_up(pooled @ squeeze.T, axis) before its bias; "
            "copy(…, axis) before excite; add_up of the output of project. The shortcut adds x itself.",
            "Quatre opérateurs : copy(x, axis) avant expand ; add_up(pooled @ squeeze.T, axis) avant son biais ; "
            "copy(…, axis) avant excite ; add_up de la sortie de project. Le raccourci ajoute x lui-même.",
        ),
    ),
)
