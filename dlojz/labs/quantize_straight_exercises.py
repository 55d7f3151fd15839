"""Lab 11: rounding that a gradient can pass: the straight-through estimator.

Layer 6 (labs). Invariant: an answer is held to its value, then to the gradient of a random weighting of it. No weight
lies within half a step outside of the range, where the two usual conventions differ.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import gradient_of, normal, shaped
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor


def fake_quantize(weight_OI: Tensor, scale_O1: Tensor, bits: int) -> Tensor:
    """Weights that have been quantized and brought back, in floats; the gradient passes but where they are clamped.

    Source: Bengio et al. 2013 (arXiv 1308.3432) for the estimator; Jacob et al. 2018 (arXiv 1712.05877) for training.
    """
    steps_OI = weight_OI / scale_O1
    straight_OI = steps_OI + (steps_OI.round() - steps_OI).detach()
    return _clamped(straight_OI, bits) * scale_O1


def _clamped(q: Tensor, bits: int) -> Tensor:
    high = 2 ** (bits - 1) - 1
    return q.clamp(-high, high)


def _cases() -> Iterator[tuple[Any, ...]]:
    import torch

    for seed, outputs, inputs, bits in ((1, 4, 10, 4), (2, 5, 8, 3)):
        scale_O1 = 0.1 + 0.5 * torch.rand(outputs, 1, generator=torch.Generator().manual_seed(seed))
        high = 2 ** (bits - 1) - 1
        steps_OI = high * 0.8 * normal(seed + 10, outputs, inputs)
        between_OI = (steps_OI.abs() > high) & (steps_OI.abs() < high + 0.6)
        yield (steps_OI + steps_OI.sign() * between_OI) * scale_O1, scale_O1, bits, normal(seed + 20, outputs, inputs)


def _trial(answer: Callable[..., Any], weight_OI: Tensor, scale_O1: Tensor, bits: int, weighting_OI: Tensor) -> Tensor:
    """The values in steps, then the gradient of their weighted sum; what gets no gradient counts as zero."""
    import torch

    leaf_OI = weight_OI.clone().requires_grad_()
    value = shaped(answer(leaf_OI, scale_O1, bits), say(en="The result", fr="Le résultat"), weight_OI.shape)
    gradient = gradient_of((value * weighting_OI).sum(), leaf_OI)
    gradient = torch.zeros_like(leaf_OI) if gradient is None else gradient
    return torch.cat([(value.detach() / scale_O1).flatten(), gradient.flatten()]).double()


def _plain(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return _clamped((weight / scale).round(), bits) * scale


def _through_clamp(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return weight + (_plain(weight, scale, bits) - weight).detach()


def _unclamped(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return weight + ((weight / scale).round() * scale - weight).detach()


def _whole(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return fake_quantize(weight, scale, bits) / scale


def _scaled_gradient(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    straight = fake_quantize(weight, scale, bits)
    return (straight / scale) + (straight - straight / scale).detach()


def _no_rounding(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    return _clamped(weight / scale, bits) * scale


_BY_TRIAL = by_trial(
    _trial,
    fake_quantize,
    cases=_cases,
    mistakes=(
        Mistake(
            _plain,
            Said(
                "The values are right, but no gradient passes: round() is flat almost everywhere, so its derivative is "
                "0. Nothing would be learnt. backward must return the gradient as it came.",
                "Les valeurs sont justes, mais aucun gradient ne passe : round() est plat presque partout, sa dérivée "
                "est nulle. Rien ne serait appris. backward doit rendre le gradient tel qu’il est arrivé.",
            ),
        ),
        Mistake(
            _through_clamp,
            Said(
                "The values are right, but weights that are clamped get a gradient too: moving them changes nothing, "
                "and they could run away for ever. Only the rounding is to be passed through, the clamp is not.",
                "Les valeurs sont justes, mais les poids bornés reçoivent aussi un gradient : les déplacer ne change "
                "rien, et ils pourraient s’éloigner sans fin. On ne traverse que l’arrondi, pas le clamp.",
            ),
        ),
        Mistake(
            _unclamped,
            Said(
                "Nothing is clamped: with 4 bits the whole numbers go from −7 to 7.",
                "Rien n’est borné : avec 4 bits, les entiers vont de −7 à 7.",
            ),
        ),
        Mistake(
            _whole,
            Said(
                "You return the whole numbers: multiply them by the scale, so that they can take the place of the "
                "weights.",
                "Vous renvoyez les entiers : multipliez-les par l’échelle, pour qu’ils puissent remplacer les poids.",
            ),
        ),
        Mistake(
            _scaled_gradient,
            Said(
                "The values are right, but the gradient is divided by the scale: the scale divides, then multiplies, "
                "so it must cancel out.",
                "Les valeurs sont justes, mais le gradient est divisé par l’échelle : elle divise, puis multiplie, et "
                "doit donc se simplifier.",
            ),
        ),
        Mistake(
            _no_rounding,
            Said(
                "Nothing is rounded: the gradient is right, but the values are those of the weights.",
                "Rien n’est arrondi : le gradient est juste, mais les valeurs sont celles des poids.",
            ),
        ),
    ),
)


def _judge(answer: Callable[..., Any]) -> None:
    for weight_OI, scale_O1, bits, _ in _cases():
        leaf_OI = weight_OI.clone().requires_grad_()
        value = shaped(answer(leaf_OI, scale_O1, bits), say(en="The result", fr="Le résultat"), weight_OI.shape)
        if not value.requires_grad:
            raise Wrong(
                say(
                    en="The result is not linked to the weights, so no gradient passes: no detach, no no_grad around "
                    "the whole; the rounding alone is passed through.",
                    fr="Le résultat n’est pas lié aux poids, et aucun gradient ne passe : ni detach ni no_grad autour "
                    "de l’ensemble ; seul l’arrondi est traversé.",
                )
            )
    _BY_TRIAL(answer)


STRAIGHT_THROUGH = Exercise(
    id="straight-through",
    title=Said("a gradient through a rounding", "un gradient à travers un arrondi"),
    judge=_judge,
    praise=Said(
        "Right: forward sees what will be deployed, backward what can be learnt from.",
        "Exact : la passe avant voit ce qui sera déployé, la passe arrière ce dont on peut apprendre.",
    ),
    hints=(
        Said(
            "backward receives the gradient of what forward has returned, and returns that of what forward has "
            "received: as if forward had done nothing. The clamp is left to autograd.",
            "backward reçoit le gradient de ce que forward a renvoyé, et renvoie celui de ce que forward a reçu : "
            "comme si forward n’avait rien fait. Le clamp reste l’affaire d’autograd.",
        ),
        Said(
            "return gradient in backward; then high = 2 ** (bits - 1) - 1 and Round.apply(weight / scale).clamp(-high, "
            "high) * scale.",
            "return gradient dans backward ; puis high = 2 ** (bits - 1) - 1 et Round.apply(weight / "
            "scale).clamp(-high, high) * scale.",
        ),
    ),
)
