"""What the wrong results of all cases have in common: one factor, one difference, another shape or order.

Judges ask for it where no mistake that they know explains an answer. It is said only if it holds in every case.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

from dlojz.base.language import LANGUAGES, in_full, significant
from dlojz.labs.kit.answer_numbers import is_number, is_tensor, same_number
from dlojz.labs.kit.exercise import Said, Sentences

TEXTS = Sentences(Path(__file__).with_name("data") / "common_gap.md")

NEAR = 1e-4
"""Distance up to which two tensors are the same, as a share of the largest element."""
SMALL = 10**4
"""Up to here a difference that is the same in all cases is a miscount."""
ROUNDED = 0.1
"""A factor nearer to 1 than this is no factor that is missing: a constant is not quite right."""
_ROUNDED_BY: tuple[Callable[[float], int], ...] = (math.floor, round, math.ceil)


def common_gap(
    results: Sequence[Any], expected: Sequence[Any], cases: Sequence[Sequence[Any]] = (), answer: object = None
) -> Said | None:
    """Say what holds between the given and the right results in every case.

    Args:
        results: by case, what the answer returned: numbers or tensors.
        expected: by case, what is right.
        cases: the arguments of each case, among which a factor is looked for.
        answer: the function, for the names of its arguments.

    Returns:
        A sentence; None where nothing holds in all cases, or other things than numbers and tensors are compared.
    """
    if all(map(is_tensor, results)) and all(map(is_tensor, expected)):
        return _tensors(list(results), list(expected))
    if not all(map(is_number, results)) or not all(isinstance(right, Real) for right in expected):
        return None
    values, right = [float(value) for value in results], [float(value) for value in expected]
    # Of one expected value, any answer is some factor or difference away.
    if len(set(right)) < 2:
        return None
    return (
        _constant(values)
        or _rounded(values, right)
        or _shifted(values, right)
        or _scaled(values, right)
        or _by_argument(values, right, cases, answer)
    )


def _constant(values: list[float]) -> Said | None:
    if len(set(values)) > 1:
        return None
    en, fr = _written(values[0])
    return TEXTS.sentence("gap", "one result in all cases", en=en, fr=fr)


def _rounded(values: list[float], right: list[float]) -> Said | None:
    if not all(map(math.isfinite, values + right)) or sum(not reference.is_integer() for reference in right) < 2:
        return None
    if not any(
        all(value == rounding(reference) for value, reference in zip(values, right, strict=True))
        for rounding in _ROUNDED_BY
    ):
        return None
    return TEXTS.sentence("gap", "another power")


def _shifted(values: list[float], right: list[float]) -> Said | None:
    shift = values[0] - right[0]
    is_shifted = all(
        same_number(value - shift, reference, 1e-12) for value, reference in zip(values, right, strict=True)
    )
    if not is_shifted or not shift.is_integer() or not 0 < abs(shift) <= SMALL:
        return None
    en, fr = _written(abs(shift))
    return TEXTS.sentence("gap", "too large by" if shift > 0 else "too small by", en=en, fr=fr)


def _scaled(values: list[float], right: list[float]) -> Said | None:
    pairs = [(value, reference) for value, reference in zip(values, right, strict=True) if reference or value]
    if len({reference for _, reference in pairs}) < 2 or not all(reference for _, reference in pairs):
        return None
    factor = pairs[0][0] / pairs[0][1]
    if factor in (0, 1) or not all(same_number(value, factor * reference, 1e-9) for value, reference in pairs):
        return None
    return _times(factor)


def _by_argument(
    values: list[float], right: list[float], cases: Sequence[Sequence[Any]], answer: object
) -> Said | None:
    """The factor is one of the arguments."""
    if len(cases) != len(values) or len({reference for reference in right if reference}) < 2:
        return None
    for index in range(min(map(len, cases))):
        # An argument that is the same in all cases is no better than a constant.
        factors = [case[index] for case in cases]
        if not all(is_number(factor) and factor >= 0 for factor in factors) or len(set(factors)) < 2:
            continue
        for large in (True, False):
            larger, smaller = (values, right) if large else (right, values)
            if all(same_number(a, factor * b, 1e-9) for a, factor, b in zip(larger, factors, smaller, strict=True)):
                key = "an argument times too large" if large else "an argument times too small"
                return TEXTS.sentence("gap", key, name=_name(answer, index))
    return None


def _name(answer: object, index: int) -> str:
    try:
        return list(inspect.signature(answer).parameters)[index] if callable(answer) else str(index + 1)
    except (ValueError, TypeError, IndexError):
        return str(index + 1)


def _times(factor: float) -> Said:
    if factor == -1:
        return TEXTS.sentence("gap", "the other sign")
    large = abs(factor) > 1
    if 0 < abs(factor - 1) < ROUNDED:
        gap = Said(*(significant(100 * abs(factor - 1), 2, into=language) for language in LANGUAGES))
        return TEXTS.sentence("gap", "some per cent too large" if large else "some per cent too small", gap=gap)
    en, fr = _written(factor if large else 1 / factor)
    return TEXTS.sentence("gap", "times too large" if large else "times too small", en=en, fr=fr)


def _written(value: float) -> tuple[str, str]:
    """A number in both languages."""
    return in_full(value, 3, into="en"), in_full(value, 3, into="fr")


def _tensors(results: list[Any], right: list[Any]) -> Said | None:
    """What holds between tensors; each sentence is tried on all of them."""
    for holds, sentence in _BETWEEN:
        if all(holds(result, reference) for result, reference in zip(results, right, strict=True)):
            return sentence
    if any(
        result.shape != reference.shape or not reference.numel()
        for result, reference in zip(results, right, strict=True)
    ):
        return None
    factors = {round(_factor(result, reference), 4) for result, reference in zip(results, right, strict=True)}
    if len(factors) != 1 or factors & {0.0, 1.0}:
        return None
    factor = factors.pop()
    divisor = round(1 / factor) if abs(factor) < 1 else factor
    factor = 1 / divisor if abs(factor) < 1 and abs(1 / factor - divisor) < 1e-2 else factor
    scaled = all(
        _same(result, _factor(result, reference) * reference) for result, reference in zip(results, right, strict=True)
    )
    return _times(factor) if scaled else None


def _factor(result: Any, reference: Any) -> float:
    # Least squares: the factor f for which result − f · reference is smallest.
    square = float((reference.double() ** 2).sum())
    return float((result.double() * reference.double()).sum()) / square if square else 0.0


def _same(result: Any, reference: Any) -> bool:
    if result.shape != reference.shape:
        return False
    scale = max(float(reference.abs().max()), 1e-12) if reference.numel() else 1.0
    return bool(((result.double() - reference.double()).abs() <= NEAR * scale).all())


def _all_zero(result: Any, reference: Any) -> bool:
    return result.numel() > 0 and not bool(result.any()) and bool(reference.any())


def _transposed(result: Any, reference: Any) -> bool:
    return result.dim() == 2 == reference.dim() and not _same(result, reference) and _same(result.T, reference)


def _other_shape(result: Any, reference: Any) -> bool:
    return (
        result.shape != reference.shape
        and result.numel() == reference.numel()
        and _same(result.reshape(reference.shape), reference)
    )


def _reversed(result: Any, reference: Any) -> bool:
    return reference.dim() > 0 and not _same(result, reference) and _same(result.flip(0), reference)


def _other_order(result: Any, reference: Any) -> bool:
    """The same rows, each once."""
    # Row by row against all others: not for long tensors.
    if result.shape != reference.shape or result.dim() != 2 or len(result) > 64 or _same(result, reference):
        return False
    unmatched = list(reference)
    for row in result:
        index = next((position for position, candidate in enumerate(unmatched) if _same(row, candidate)), None)
        if index is None:
            return False
        del unmatched[index]
    return True


def _rows_missing(result: Any, reference: Any) -> bool:
    return (
        result.dim() == reference.dim() > 0
        and 0 < len(result) < len(reference)
        and _same(result, reference[: len(result)])
    )


_BETWEEN: tuple[tuple[Callable[[Any, Any], bool], Said], ...] = (
    (_all_zero, TEXTS.sentence("gap", "every value is zero")),
    (_other_shape, TEXTS.sentence("gap", "another shape")),
    (_transposed, TEXTS.sentence("gap", "transposed")),
    (_reversed, TEXTS.sentence("gap", "rows in reverse order")),
    (_other_order, TEXTS.sentence("gap", "rows in another order")),
    (_rows_missing, TEXTS.sentence("gap", "last rows missing")),
)
