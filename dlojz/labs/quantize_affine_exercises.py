"""Lab 11: activations in whole numbers: a range that is not centred, and what lies outside of it.

Layer 6 (labs). Invariant: an answer is held to the whole numbers, the scale and the zero-point; inputs lie on both
sides of the range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dlojz.labs.compress_judging import integers, normal, several
from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.judging import Mistake
from dlojz.labs.optimizer_trials import by_trial
from dlojz.labs.verdict import Said
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

Affine = tuple["Tensor", float, int]
"""Whole numbers in int8, of the shape of x; scale; zero-point."""


def quantize_affine(x: Tensor, low: float, high: float, bits: int) -> Affine:
    """Affine quantization: x ≈ scale × (q − zero_point), q from −2^(bits−1) to 2^(bits−1) − 1.

    Args:
        x: any shape; what lies outside of the range is clamped to it.
        low: lower end of the range, at most 0.
        high: upper end, at least 0.
        bits: from 2 to 8.

    Source: Jacob et al. 2018 (arXiv 1712.05877), section 2.1: r = S (q − Z), with Z a quantized value.
    """
    import torch

    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = (high - low) / (2**bits - 1)
    zero_point = lowest - round(low / scale)
    return ((x / scale).round() + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


def _cases() -> Iterator[tuple[Any, ...]]:
    for seed, low, high, bits in ((1, -0.37, 2.9, 8), (2, -1.9, 0.61, 4), (3, -0.2, 4.3, 5)):
        yield (high - low) * 0.6 * normal(seed, 6, 7) + (high + low) / 2, low, high, bits


def _trial(answer: Callable[..., Any], x: Tensor, low: float, high: float, bits: int) -> Tensor:
    """The whole numbers, the scale divided by the right one, the zero-point."""
    import torch

    q, scale, zero_point = several(answer(x.clone(), low, high, bits), "(q, scale, zero_point)", 3)
    q = integers(q, "q", x.shape)
    try:
        pair = [float(scale) / quantize_affine(x, low, high, bits)[1], float(zero_point)]
    except (TypeError, ValueError, RuntimeError):
        raise Wrong(
            say(
                en="scale and zero_point must be one number each: one scale serves the whole tensor here.",
                fr="scale et zero_point doivent être chacun un seul nombre : une échelle sert ici à tout le tenseur.",
            )
        ) from None
    return torch.cat([q.flatten(), torch.tensor(pair, dtype=torch.float64)])


def _parts(low: float, high: float, bits: int) -> tuple[int, int, float, int]:
    lowest, highest = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    scale = (high - low) / (2**bits - 1)
    return lowest, highest, scale, lowest - round(low / scale)


def _unclamped(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    _, _, scale, zero_point = _parts(low, high, bits)
    return ((x / scale).round() + zero_point).to(torch.int64).to(torch.int8), scale, zero_point


def _unsigned(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    _, _, scale, _ = _parts(low, high, bits)
    zero_point = -round(low / scale)
    return ((x / scale).round() + zero_point).clamp(0, 2**bits - 1).to(torch.int8), scale, zero_point


def _unsigned_clamped(x: Tensor, low: float, high: float, bits: int) -> Affine:
    """As if from 0 to 2^bits − 1, cut off at what int8 has."""
    import torch

    lowest, highest, scale, _ = _parts(low, high, bits)
    zero_point = -round(low / scale)
    return ((x / scale).round() + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


def _other_sign(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    lowest, highest, scale, _ = _parts(low, high, bits)
    zero_point = lowest + round(low / scale)
    return ((x / scale).round() + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


def _subtracted(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    lowest, highest, scale, zero_point = _parts(low, high, bits)
    return ((x / scale).round() - zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


def _one_more(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    lowest, highest, _, _ = _parts(low, high, bits)
    scale = (high - low) / 2**bits
    zero_point = lowest - round(low / scale)
    return ((x / scale).round() + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


def _symmetric(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    lowest, highest, _, _ = _parts(low, high, bits)
    scale = max(-low, high) / highest
    return (x / scale).round().clamp(lowest, highest).to(torch.int8), scale, 0


def _observed(x: Tensor, low: float, high: float, bits: int) -> Affine:
    return quantize_affine(x, min(float(x.min()), 0.0), max(float(x.max()), 0.0), bits)


def _not_whole(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    lowest, highest, scale, _ = _parts(low, high, bits)
    zero_point: Any = lowest - low / scale
    return (x / scale + zero_point).round().clamp(lowest, highest).to(torch.int8), scale, zero_point


def _truncated(x: Tensor, low: float, high: float, bits: int) -> Affine:
    import torch

    lowest, highest, scale, zero_point = _parts(low, high, bits)
    return (x / scale + zero_point).clamp(lowest, highest).to(torch.int8), scale, zero_point


_UNSIGNED = Said(
    "Your whole numbers begin at 0; with a sign they begin at −2^(bits − 1): shift the zero-point by as much.",
    "Vos entiers commencent à 0 ; signés, ils commencent à −2^(bits − 1) : décalez d’autant le point zéro.",
)
_MISTAKES = (
    Mistake(
        _unclamped,
        Said(
            "What lies outside of the range is not clamped: in int8, 128 becomes −128, so the largest activations "
            "turn into the smallest. clamp before .to(torch.int8).",
            "Ce qui sort de l’intervalle n’est pas borné : en int8, 128 devient −128, et les plus grandes activations "
            "deviennent les plus petites. Appelez clamp avant .to(torch.int8).",
        ),
    ),
    Mistake(_unsigned, _UNSIGNED),
    Mistake(_unsigned_clamped, _UNSIGNED),
    Mistake(
        _other_sign,
        Said(
            "The sign of the zero-point is wrong: low must become the smallest whole number, so zero_point = "
            "−2^(bits − 1) − round(low / scale).",
            "Le signe du point zéro est faux : low doit devenir le plus petit entier, donc zero_point = "
            "−2^(bits − 1) − round(low / scale).",
        ),
    ),
    Mistake(
        _subtracted,
        Said(
            "You subtract the zero-point from x / scale: q − zero_point is what is worth x / scale, so add it.",
            "Vous retranchez le point zéro de x / scale : c’est q − zero_point qui vaut x / scale, donc ajoutez-le.",
        ),
    ),
    Mistake(
        _one_more,
        Said(
            "You divide the range by 2^bits: between 2^bits values there are 2^bits − 1 steps.",
            "Vous divisez l’intervalle par 2^bits : entre 2^bits valeurs, il y a 2^bits − 1 pas.",
        ),
    ),
    Mistake(
        _symmetric,
        Said(
            "That is the symmetric scheme: for a range that is not centred it leaves a part of the whole numbers "
            "unused. scale = (high − low) / (2^bits − 1), with a zero-point.",
            "C’est le schéma symétrique : pour un intervalle qui n’est pas centré, il laisse inutilisée une partie des "
            "entiers. scale = (high − low) / (2^bits − 1), avec un point zéro.",
        ),
    ),
    Mistake(
        _observed,
        Said(
            "You take the range from x itself: it is given, low and high, because it was measured beforehand.",
            "Vous tirez l’intervalle de x lui-même : il est donné, low et high, car il a été mesuré auparavant.",
        ),
    ),
    Mistake(
        _not_whole,
        Said(
            "The zero-point is not whole: then 0 is no longer exact, and every zero of a padding becomes an error. "
            "Round it.",
            "Le point zéro n’est pas entier : 0 n’est alors plus exact, et chaque zéro d’un remplissage devient une "
            "erreur. Arrondissez-le.",
        ),
    ),
    Mistake(
        _truncated,
        Said(
            "The whole numbers are truncated: call round() before .to(torch.int8).",
            "Les entiers sont tronqués : appelez round() avant .to(torch.int8).",
        ),
    ),
)

AFFINE = Exercise(
    id="affine",
    title=Said("a range that is not centred", "un intervalle qui n’est pas centré"),
    judge=by_trial(_trial, quantize_affine, cases=_cases, mistakes=_MISTAKES),
    praise=Said(
        "Right: every whole number is of use, zero stays exactly zero, and what sticks out is clamped.",
        "Exact : tous les entiers servent, zéro reste exactement zéro, et ce qui dépasse est borné.",
    ),
    hints=(
        Said(
            "low must become −2^(bits − 1), high 2^(bits − 1) − 1: that gives the scale, then the zero-point, which is "
            "the whole number that stands for 0.",
            "low doit devenir −2^(bits − 1), et high 2^(bits − 1) − 1 : cela donne l’échelle, puis le point zéro, qui "
            "est l’entier qui représente 0.",
        ),
        Said(
            "scale = (high − low) / (2**bits − 1); zero_point = −2**(bits − 1) − round(low / scale); q = (x / "
            "scale).round() + zero_point, clamped, in torch.int8.",
            "scale = (high − low) / (2**bits − 1) ; zero_point = −2**(bits − 1) − round(low / scale) ; q = (x / "
            "scale).round() + zero_point, borné, en torch.int8.",
        ),
    ),
)
