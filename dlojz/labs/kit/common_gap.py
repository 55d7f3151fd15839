"""What the wrong results of all cases have in common: one factor, one difference, another shape or order.

Judges ask for it where no mistake that they know explains an answer. It is said only if it holds in every case.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

from dlojz.base.language import in_full, significant
from dlojz.labs.kit.answer_numbers import is_number, is_tensor, same_number
from dlojz.labs.kit.exercise import Said

NEAR = 1e-4
"""Distance up to which two tensors are the same, as a share of the largest element."""
SMALL = 10**4
"""Up to here a difference that is the same in all cases is a miscount."""
ROUNDED = 0.1
"""A factor nearer to 1 than this is no factor that is missing: a constant is not quite right."""
_ROUNDED_BY: tuple[Callable[[float], int], ...] = (math.floor, round, math.ceil)


def common_gap(
    given: Sequence[Any], expected: Sequence[Any], cases: Sequence[Sequence[Any]] = (), answer: object = None
) -> Said | None:
    """Say what holds between the given and the right results in every case.

    Args:
        given: by case, what the answer returned: numbers or tensors.
        expected: by case, what is right.
        cases: the arguments of each case, among which a factor is looked for.
        answer: the function, for the names of its arguments.

    Returns:
        A sentence; None where nothing holds in all cases, or other things than numbers and tensors are compared.
    """
    if all(map(is_tensor, given)) and all(map(is_tensor, expected)):
        return _tensors(list(given), list(expected))
    if not all(map(is_number, given)) or not all(isinstance(right, Real) for right in expected):
        return None
    own, right = [float(value) for value in given], [float(value) for value in expected]
    # Of one expected value, any answer is some factor or difference away.
    if len(set(right)) < 2:
        return None
    return (
        _constant(own)
        or _rounded(own, right)
        or _shifted(own, right)
        or _scaled(own, right)
        or _by_argument(own, right, cases, answer)
    )


def _constant(own: list[float]) -> Said | None:
    if len(set(own)) > 1:
        return None
    en, fr = _written(own[0])
    return Said(
        f"Your function returns {en} in every case of this check, though the right results differ: it must depend on "
        "its arguments.",
        f"Votre fonction renvoie {fr} dans tous les cas de cette vérification, alors que les bons résultats "
        "diffèrent : le vôtre doit dépendre des arguments.",
    )


def _rounded(own: list[float], right: list[float]) -> Said | None:
    if not all(map(math.isfinite, own + right)) or sum(not wanted.is_integer() for wanted in right) < 2:
        return None
    if not any(all(value == way(wanted) for value, wanted in zip(own, right, strict=True)) for way in _ROUNDED_BY):
        return None
    return Said(
        "In every case your result is the right one, rounded to a whole number (//, int or round): do not round.",
        "Dans tous les cas, votre résultat est le bon, arrondi à un entier (//, int ou round) : n’arrondissez pas.",
    )


def _shifted(own: list[float], right: list[float]) -> Said | None:
    by = own[0] - right[0]
    same = all(same_number(value - by, wanted, 1e-12) for value, wanted in zip(own, right, strict=True))
    if not same or not by.is_integer() or not 0 < abs(by) <= SMALL:
        return None
    en, fr = _written(abs(by))
    large = by > 0
    return Said(
        f"In every case your result is too {'large' if large else 'small'} by {en}: look at where the counting begins "
        "and ends.",
        f"Dans tous les cas, votre résultat est trop {'grand' if large else 'petit'} de {fr} : regardez où le compte "
        "commence et où il finit.",
    )


def _scaled(own: list[float], right: list[float]) -> Said | None:
    pairs = [(value, wanted) for value, wanted in zip(own, right, strict=True) if wanted or value]
    if len({wanted for _, wanted in pairs}) < 2 or not all(wanted for _, wanted in pairs):
        return None
    factor = pairs[0][0] / pairs[0][1]
    if factor in (0, 1) or not all(same_number(value, factor * wanted, 1e-9) for value, wanted in pairs):
        return None
    return _times(factor)


def _by_argument(
    own: list[float], right: list[float], cases: Sequence[Sequence[Any]], answer: object
) -> Said | None:
    """The factor is one of the arguments."""
    if len(cases) != len(own) or len({wanted for wanted in right if wanted}) < 2:
        return None
    for place in range(min(map(len, cases))):
        # An argument that is the same in all cases is no better than a constant.
        factors = [case[place] for case in cases]
        if not all(is_number(factor) and factor >= 0 for factor in factors) or len(set(factors)) < 2:
            continue
        for large in (True, False):
            one, other = (own, right) if large else (right, own)
            if all(same_number(a, by * b, 1e-9) for a, by, b in zip(one, factors, other, strict=True)):
                name = _name(answer, place)
                return Said(
                    f"In every case your result is `{name}` times too {'large' if large else 'small'}: {name} is "
                    f"{'multiplied by' if large else 'divided by'} once too often, or not "
                    f"{'divided by' if large else 'multiplied by'} where it should be.",
                    f"Dans tous les cas, votre résultat est `{name}` fois trop {'grand' if large else 'petit'} : il y "
                    f"a une {'multiplication' if large else 'division'} par {name} de trop, ou il manque une "
                    f"{'division' if large else 'multiplication'}.",
                )
    return None


def _name(answer: object, place: int) -> str:
    try:
        return list(inspect.signature(answer).parameters)[place] if callable(answer) else str(place + 1)
    except (ValueError, TypeError, IndexError):
        return str(place + 1)


def _times(factor: float) -> Said:
    if factor == -1:
        return Said("The sign is the other way round in every case.", "Le signe est inversé dans tous les cas.")
    large = abs(factor) > 1
    if 0 < abs(factor - 1) < ROUNDED:
        gap = 100 * abs(factor - 1)
        return Said(
            f"In every case your result is {significant(gap, 2, into='en')}% too {'large' if large else 'small'}: look "
            "for a constant that is rounded, or for 1,000 in the place of 1,024 (or the other way round).",
            f"Dans tous les cas, votre résultat est trop {'grand' if large else 'petit'} de "
            f"{significant(gap, 2, into='fr')} % : cherchez une constante arrondie, ou 1 000 à la place de 1 024 (ou "
            "l’inverse).",
        )
    en, fr = _written(factor if large else 1 / factor)
    return Said(
        f"In every case your result is {en} times too {'large' if large else 'small'}: look for a factor that is "
        f"{'one too many' if large else 'missing'}.",
        f"Dans tous les cas, votre résultat est {fr} fois trop {'grand' if large else 'petit'} : cherchez un facteur "
        f"{'de trop' if large else 'qui manque'}.",
    )


def _written(value: float) -> tuple[str, str]:
    """A number in both languages."""
    return in_full(value, 3, into="en"), in_full(value, 3, into="fr")


def _tensors(given: list[Any], right: list[Any]) -> Said | None:
    """What holds between tensors; each sentence is tried on all of them."""
    for holds, said in _BETWEEN:
        if all(holds(own, wanted) for own, wanted in zip(given, right, strict=True)):
            return said
    if any(own.shape != wanted.shape or not wanted.numel() for own, wanted in zip(given, right, strict=True)):
        return None
    factors = {round(_factor(own, wanted), 4) for own, wanted in zip(given, right, strict=True)}
    if len(factors) != 1 or factors & {0.0, 1.0}:
        return None
    factor = factors.pop()
    whole = round(1 / factor) if abs(factor) < 1 else factor
    factor = 1 / whole if abs(factor) < 1 and abs(1 / factor - whole) < 1e-2 else factor
    scaled = all(_same(own, _factor(own, wanted) * wanted) for own, wanted in zip(given, right, strict=True))
    return _times(factor) if scaled else None


def _factor(own: Any, wanted: Any) -> float:
    # Least squares: the factor f for which result − f · reference is smallest.
    square = float((wanted.double() ** 2).sum())
    return float((own.double() * wanted.double()).sum()) / square if square else 0.0


def _same(own: Any, wanted: Any) -> bool:
    if own.shape != wanted.shape:
        return False
    scale = max(float(wanted.abs().max()), 1e-12) if wanted.numel() else 1.0
    return bool(((own.double() - wanted.double()).abs() <= NEAR * scale).all())


def _all_zero(own: Any, wanted: Any) -> bool:
    return own.numel() > 0 and not bool(own.any()) and bool(wanted.any())


def _transposed(own: Any, wanted: Any) -> bool:
    return own.dim() == 2 == wanted.dim() and not _same(own, wanted) and _same(own.T, wanted)


def _other_shape(own: Any, wanted: Any) -> bool:
    return own.shape != wanted.shape and own.numel() == wanted.numel() and _same(own.reshape(wanted.shape), wanted)


def _reversed(own: Any, wanted: Any) -> bool:
    return wanted.dim() > 0 and not _same(own, wanted) and _same(own.flip(0), wanted)


def _other_order(own: Any, wanted: Any) -> bool:
    """The same rows, each once."""
    # Row by row against all others: not for long tensors.
    if own.shape != wanted.shape or own.dim() != 2 or len(own) > 64 or _same(own, wanted):
        return False
    left = list(wanted)
    for row in own:
        found = next((place for place, other in enumerate(left) if _same(row, other)), None)
        if found is None:
            return False
        del left[found]
    return True


def _rows_missing(own: Any, wanted: Any) -> bool:
    return own.dim() == wanted.dim() > 0 and 0 < len(own) < len(wanted) and _same(own, wanted[: len(own)])


_BETWEEN: tuple[tuple[Callable[[Any, Any], bool], Said], ...] = (
    (_all_zero, Said("Every value is zero.", "Toutes les valeurs sont nulles.")),
    (
        _other_shape,
        Said(
            "The values are right and in the right order, but the shape is another one: reshape the result.",
            "Les valeurs sont justes et dans le bon ordre, mais la forme n’est pas la bonne : changez-la avec reshape.",
        ),
    ),
    (
        _transposed,
        Said(
            "The result is transposed: rows and columns are swapped.",
            "Le résultat est transposé : lignes et colonnes sont échangées.",
        ),
    ),
    (_reversed, Said("The rows are right, but in reverse order.", "Les lignes sont justes, mais en ordre inverse.")),
    (
        _other_order,
        Said("The rows are right, but in another order.", "Les lignes sont justes, mais dans un autre ordre."),
    ),
    (
        _rows_missing,
        Said(
            "The rows are right, but the last ones are missing: look at where your loop or slice ends.",
            "Les lignes sont justes, mais les dernières manquent : regardez où finit votre boucle ou votre tranche.",
        ),
    ),
)
