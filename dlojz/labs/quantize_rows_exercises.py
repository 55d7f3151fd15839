"""Lab 11: a matrix of weights in whole numbers, with one scale per output.

Layer 6 (labs). Invariant: an answer is held to the numbers that a file would keep, int8 and scales, for several widths.

Shape suffixes: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import integers, normal, several, shaped
from dlojz.labs.exercise import Exercise
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.verdict import Said

if TYPE_CHECKING:
    from torch import Tensor

Quantized = tuple["Tensor", "Tensor"]
"""Whole numbers (O, I) in int8, scales (O, 1)."""


def quantize_rows(weight_OI: Tensor, bits: int) -> Quantized:
    """Symmetric quantization, per output channel: the largest magnitude of a row becomes 2^(bits − 1) − 1.

    Args:
        weight_OI: no row of which is zero.
        bits: from 2 to 8.

    Source: Gholami et al. 2021 (arXiv 2103.13630): symmetric quantization, restricted range, channelwise.
    """
    import torch

    scale_O1 = weight_OI.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1)
    return (weight_OI / scale_O1).round().to(torch.int8), scale_O1


def _cases() -> Iterator[tuple[Any, ...]]:
    """Rows of very different sizes, none of them centred."""
    import torch

    for seed, outputs, inputs, bits in ((1, 4, 9, 8), (2, 7, 5, 4), (3, 5, 12, 3)):
        sizes_O1 = 10 ** torch.linspace(-2, 1, outputs).unsqueeze(1)
        yield sizes_O1 * (normal(seed, outputs, inputs) - 0.4), bits


def _trial(answer: Callable[..., Any], weight_OI: Tensor, bits: int) -> Tensor:
    """The whole numbers, then the scales, each divided by the right one."""
    import torch

    q_OI, scale_O1 = several(answer(weight_OI.clone(), bits), "(q, scale)", 2)
    q_OI = integers(q_OI, "q", weight_OI.shape)
    wanted_O1 = quantize_rows(weight_OI, bits)[1]
    scale_O1 = shaped(scale_O1, "scale", wanted_O1.shape).double()
    return torch.cat([q_OI.flatten(), (scale_O1 / wanted_O1).flatten()])


def _by(scale: Callable[[Tensor, int], Tensor], *, clamped: bool) -> Callable[[Tensor, int], Quantized]:
    def way(weight_OI: Tensor, bits: int) -> Quantized:
        import torch

        scale_O1 = scale(weight_OI, bits)
        q_OI = (weight_OI / scale_O1).round()
        q_OI = q_OI.clamp(-(2 ** (bits - 1)), _high(bits)) if clamped else q_OI
        return q_OI.to(torch.int64).to(torch.int8), scale_O1

    return way


def _half_range(weight: Tensor, bits: int) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 2 ** (bits - 1)


def _whole_range(weight: Tensor, bits: int) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / (2**bits - 1)


def _always_127(weight: Tensor, bits: int) -> Tensor:
    return weight.abs().amax(1, keepdim=True) / 127


def _signed(weight: Tensor, bits: int) -> Tensor:
    return weight.amax(1, keepdim=True) / _high(bits)


def _high(bits: int) -> int:
    return 2 ** (bits - 1) - 1


def _per_tensor(weight: Tensor, bits: int) -> Quantized:
    import torch

    scale = weight.abs().max() / _high(bits)
    return (weight / scale).round().to(torch.int8), scale.expand(len(weight), 1)


def _truncated(weight: Tensor, bits: int) -> Quantized:
    import torch

    scale = weight.abs().amax(1, keepdim=True) / _high(bits)
    return (weight / scale).to(torch.int8), scale


def _floored(weight: Tensor, bits: int) -> Quantized:
    import torch

    scale = weight.abs().amax(1, keepdim=True) / _high(bits)
    return (weight / scale).floor().to(torch.int8), scale


def _inverse(weight: Tensor, bits: int) -> Quantized:
    q, scale = quantize_rows(weight, bits)
    return q, 1 / scale


_LARGEST = Said(
    "You take the largest weight of a row, not the largest magnitude: negative weights run over. weight.abs() first.",
    "Vous prenez le plus grand poids de la ligne, et non la plus grande valeur absolue : les poids négatifs débordent. "
    "weight.abs() d’abord.",
)
_HALF = Said(
    "You divide by 2^(bits − 1): the largest positive weight would become 128 in 8 bits, which int8 does not have. "
    "Divide by 2^(bits − 1) − 1.",
    "Vous divisez par 2^(bits − 1) : en 8 bits, le plus grand poids positif deviendrait 128, que int8 n’a pas. "
    "Divisez par 2^(bits − 1) − 1.",
)
_WHOLE = Said(
    "You divide by 2^bits − 1, the number of steps of the whole range: half of it is for negative weights, so "
    "2^(bits − 1) − 1.",
    "Vous divisez par 2^bits − 1, le nombre de pas de tout l’intervalle : la moitié sert aux poids négatifs, donc "
    "2^(bits − 1) − 1.",
)
_EIGHT = Said(
    "You divide by 127 whatever bits is: with 4 bits the largest whole number is 7.",
    "Vous divisez par 127 quel que soit bits : avec 4 bits, le plus grand entier est 7.",
)
_MISTAKES = (
    Mistake(
        _per_tensor,
        Said(
            "You use one scale for the whole matrix: a row of small weights is then rounded to zero. One scale per "
            "row: amax(1, keepdim=True).",
            "Vous utilisez une seule échelle pour toute la matrice : une ligne de petits poids s’arrondit alors à "
            "zéro. Une échelle par ligne : amax(1, keepdim=True).",
        ),
    ),
    *(Mistake(_by(_signed, clamped=clamped), _LARGEST) for clamped in (False, True)),
    *(Mistake(_by(_half_range, clamped=clamped), _HALF) for clamped in (False, True)),
    *(Mistake(_by(_whole_range, clamped=clamped), _WHOLE) for clamped in (False, True)),
    *(Mistake(_by(_always_127, clamped=clamped), _EIGHT) for clamped in (False, True)),
    Mistake(
        _truncated,
        Said(
            "You truncate towards zero, so every weight gets smaller: call round() before .to(torch.int8).",
            "Vous tronquez vers zéro, si bien que tous les poids diminuent : appelez round() avant .to(torch.int8).",
        ),
    ),
    Mistake(
        _floored,
        Said(
            "You round down, which shifts all weights the same way: round to the nearest.",
            "Vous arrondissez vers le bas, ce qui décale tous les poids du même côté : arrondissez au plus proche.",
        ),
    ),
    Mistake(
        _inverse,
        Said(
            "q is right; scale is upside down: it must satisfy weight ≈ scale × q.",
            "q est juste ; scale est inversée : on doit avoir weight ≈ scale × q.",
        ),
    ),
)

ROWS = Exercise(
    id="rows",
    title=Said("weights in whole numbers", "des poids entiers"),
    judge=by_trial(_trial, quantize_rows, cases=_cases, mistakes=_MISTAKES),
    praise=Said(
        "Right: a byte per weight, and a row of small weights is as precise as a row of large ones.",
        "Exact : un octet par poids, et une ligne de petits poids est aussi précise qu’une ligne de grands.",
    ),
    hints=(
        Said(
            "With 8 bits the largest magnitude of a row becomes 127: what is then one unit worth?",
            "Avec 8 bits, la plus grande valeur absolue d’une ligne devient 127 : que vaut alors une unité ?",
        ),
        Said(
            "scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1); q = (weight / scale).round(), in "
            "torch.int8.",
            "scale = weight.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) ; q = (weight / scale).round(), en "
            "torch.int8.",
        ),
    ),
)
