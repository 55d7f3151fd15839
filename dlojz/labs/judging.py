"""How most judges judge: the answer and a reference on the same inputs, then the usual mistakes, by name.

Layer 6 (labs). Invariant: an answer is refused for a named mistake only if it makes that mistake on every input.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from dlojz.labs.exercise import Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

TOLERANCE = 1e-4


@dataclass(frozen=True)
class Mistake:
    """A plausible wrong way: what it computes, and what to say to whoever took it."""

    way: Callable[..., Any]
    says: Said


def by_reference(
    reference: Callable[..., Any], *, cases: Callable[[], Iterable[tuple[Any, ...]]], mistakes: Sequence[Mistake]
) -> Callable[[Callable[..., Any]], None]:
    """A judge that compares an answer with a reference.

    Args:
        reference: The right way.
        cases: Gives the inputs, several and different, so that no constant passes; may load torch.
        mistakes: Tried in order on an answer that differs from the reference.
    """

    def judge(answer: Callable[..., Any]) -> None:
        inputs = list(cases())
        expected = [reference(*copy.deepcopy(case)) for case in inputs]
        given = [answer(*copy.deepcopy(case)) for case in inputs]
        for value, right in zip(given, expected, strict=True):
            _check_type(value, right)
        if all(map(_same, given, expected)):
            return
        for mistake in mistakes:
            if all(map(_same, given, (mistake.way(*copy.deepcopy(case)) for case in inputs))):
                raise Wrong(str(mistake.says))
        worst = next(index for index, pair in enumerate(zip(given, expected, strict=True)) if not _same(*pair))
        raise Wrong(_difference(inputs[worst], given[worst], expected[worst]))

    return judge


def _is_tensor(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "shape")


def _check_type(value: object, right: object) -> None:
    if value is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if _is_tensor(right) and not _is_tensor(value):
        raise Wrong(
            say(
                en=f"Your function returns a {type(value).__name__}, but a torch tensor is expected.",
                fr=f"Votre fonction renvoie un objet de type {type(value).__name__}, mais un tenseur torch est "
                "attendu.",
            )
        )
    if isinstance(right, Real) and (isinstance(value, bool) or not (isinstance(value, Real) or _is_tensor(value))):
        raise Wrong(
            say(
                en=f"Your function returns a {type(value).__name__}, but a number is expected.",
                fr=f"Votre fonction renvoie un objet de type {type(value).__name__}, mais un nombre est attendu.",
            )
        )


def _same(value: Any, right: Any) -> bool:
    if _is_tensor(right):
        return value.shape == right.shape and bool(((value - right).abs() <= TOLERANCE * (1 + right.abs())).all())
    return math.isclose(float(value), float(right), rel_tol=1e-9, abs_tol=1e-12)


def _difference(case: tuple[Any, ...], value: Any, right: Any) -> str:
    if not _is_tensor(right):
        arguments = ", ".join(repr(argument) for argument in case)
        return say(
            en=f"For the arguments ({arguments}), {right:g} is expected, but your function returns {value:g}.",
            fr=f"Pour les arguments ({arguments}), on attend {_comma(right)}, mais votre fonction renvoie "
            f"{_comma(value)}.",
        )
    if value.shape != right.shape:
        return say(
            en=f"The shape is {tuple(value.shape)}, but {tuple(right.shape)} is expected.",
            fr=f"La forme est {tuple(value.shape)}, mais {tuple(right.shape)} est attendue.",
        )
    if not bool(value.isfinite().all()):
        return say(
            en="The shape is right, but some values are infinite or NaN.",
            fr="La forme est juste, mais certaines valeurs sont infinies ou NaN.",
        )
    gap, share = (value - right).abs().max().item(), _share_wrong(value, right)
    return say(
        en=f"The shape is right, but {share:.0%} of the values differ from the reference, by up to {gap:.2g}.",
        fr=f"La forme est juste, mais {share * 100:.0f} % des valeurs diffèrent de la référence, jusqu’à "
        f"{_comma(gap, 2)} d’écart.",
    )


def _comma(number: Any, digits: int = 6) -> str:
    """A number as French writes it."""
    return f"{float(number):.{digits}g}".replace(".", ",")


def _share_wrong(value: Any, right: Any) -> float:
    return float(((value - right).abs() > TOLERANCE * (1 + right.abs())).double().mean())
