"""Numbers as answers give them: Python's, NumPy's or torch's, alone or in any container; and how verdicts write two.

A number is compared up to the rounding of the precision that it was computed in. That precision is read from its value:
what float32 holds exactly, and is no whole number, may come from float32, whatever type has carried it since.
"""

import math
import struct
from numbers import Real
from typing import Any

from dlojz.base.language import in_full

FLOAT32_ROUNDING = 2e-6
"""Relative; some sixteen roundings of float32, of 2⁻²³ each."""
FLOAT32_WHOLE = 2.0**24
"""Up to here float32 holds every whole number: one that differs is another number, not a rounded one."""
MOST_DIGITS = 17
"""Significant digits that tell any two float64 apart."""


def is_number(value: object) -> bool:
    """Whether this is a real number of Python or NumPy, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_tensor(value: object) -> bool:
    """Whether this is a tensor of torch, without loading torch."""
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "shape")


def plain(value: Any) -> Any:
    """Turn numbers, arrays and tensors of NumPy and torch into Python's numbers and lists.

    Tuples and lists keep their type; all else is left as it is.
    """
    # Not isinstance: a named tuple cannot be made of one iterable.
    if type(value) in (tuple, list):
        return type(value)(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


def single(value: Any) -> Any:
    """Turn a number of NumPy or torch, or an array or tensor with one element, into Python's number.

    All else is left as it is.
    """
    is_single = hasattr(value, "tolist") and math.prod(getattr(value, "shape", ())) == 1
    return value.item() if is_single else value


def plain_like(value: Any, right: Any) -> Any:
    """Turn what an answer gave into Python's numbers and lists wherever the right answer has some.

    Args:
        value: what an answer returned.
        right: what is expected; where it is a tensor, or holds one, `value` is left as it is.
    """
    if isinstance(right, Real):
        return single(value)
    if not isinstance(right, tuple | list) or any(map(is_tensor, right)):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if type(value) in (tuple, list) and len(value) == len(right):
        # One value of the answer for each expected one; of another number, nothing is assumed.
        return type(value)(map(plain_like, value, right))
    return plain(value)


def same_number(number: float, right: float, tolerance: float = 1e-6) -> bool:
    """Whether a number is the expected one, up to a relative distance and up to its own rounding."""
    return math.isclose(number, right, rel_tol=max(tolerance, _own_rounding(float(number))), abs_tol=1e-12)


def _own_rounding(value: float) -> float:
    """The relative error that computing in the precision of this value explains; 0 for whole numbers and float64."""
    if not math.isfinite(value) or (value.is_integer() and abs(value) <= FLOAT32_WHOLE):
        return 0.0
    try:
        [nearest] = struct.unpack("f", struct.pack("f", value))
    except OverflowError:
        return 0.0
    # Unchanged by the way through float32: it may have been computed there.
    return FLOAT32_ROUNDING if nearest == value else 0.0


def told_apart(left: float, right: float, digits: int) -> tuple[str, str]:
    """Write two numbers with so many significant digits, and with as many more as it takes to see a difference.

    Whole parts are written in full, so that a student can compare them with those that his code prints.
    """
    for many in range(digits, MOST_DIGITS):
        written = in_full(float(left), many), in_full(float(right), many)
        if written[0] != written[1]:
            return written
    return in_full(float(left), MOST_DIGITS), in_full(float(right), MOST_DIGITS)
