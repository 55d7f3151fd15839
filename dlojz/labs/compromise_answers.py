"""Lab 08: numbers that students' functions give back, read, held against a reference part by part, and told apart.

Layer 6 (labs). Invariant: an answer is refused for a named mistake only if it makes that mistake in every case.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from dlojz.labs.exercise import Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

Numbers = tuple[float, ...]
Case = tuple[Any, ...]


@dataclass(frozen=True)
class PartMistake:
    """A plausible wrong way to one of several numbers.

    Args:
        part: which number, from 0.
        way: what it computes, from the arguments of the exercise.
        says: what to tell whoever took it.
    """

    part: int
    way: Callable[..., float]
    says: Said


def by_parts(
    reference: Callable[..., Numbers],
    *,
    cases: Callable[[], Iterable[Case]],
    names: Sequence[Said],
    told: Callable[[Case], str],
    mistakes: Sequence[PartMistake],
    ways: Sequence[tuple[Callable[..., Numbers], Said]] = (),
    tolerance: float = 1e-6,
) -> Callable[[Callable[..., Any]], None]:
    """A judge of functions that return several numbers.

    Args:
        reference: the right way.
        cases: gives the arguments, several and different.
        names: of the numbers, in order.
        told: a case in words, for the sentence about an answer that nothing explains.
        mistakes: tried in order on the first number that is wrong in some case.
        ways: plausible wrong ways to all numbers together, and what to say; tried before.
        tolerance: relative distance up to which two numbers are the same.
    """

    def judge(answer: Callable[..., Any]) -> None:
        inputs = list(cases())
        expected = [reference(*case) for case in inputs]
        given = [read_numbers(answer(*case), names) for case in inputs]
        if all(_alike(own, right, tolerance) for own, right in zip(given, expected, strict=True)):
            return
        if all(_alike(sorted(own), sorted(right), tolerance) for own, right in zip(given, expected, strict=True)):
            raise Wrong(_other_order(names))
        for way, says in ways:
            if all(_alike(own, way(*case), tolerance) for own, case in zip(given, inputs, strict=True)):
                raise Wrong(str(says))
        for part, name in enumerate(names):
            pairs = [(own[part], right[part]) for own, right in zip(given, expected, strict=True)]
            wrong = next((index for index, pair in enumerate(pairs) if not same(*pair, tolerance)), None)
            if wrong is None:
                continue
            for mistake in mistakes:
                if mistake.part == part and all(
                    same(own, mistake.way(*case), tolerance) for (own, _), case in zip(pairs, inputs, strict=True)
                ):
                    raise Wrong(str(mistake.says))
            own, right = pairs[wrong]
            where = told(inputs[wrong])
            raise Wrong(
                say(
                    en=f"{where}: {name.en} should be {written(right)}, but your function gives {written(own)}.",
                    fr=f"{where} : pour {name.fr}, on attend {written(right)}, mais votre fonction donne "
                    f"{written(own)}.",
                )
            )

    return judge


def _other_order(names: Sequence[Said]) -> str:
    order_en, order_fr = (", ".join(getattr(name, language) for name in names) for language in ("en", "fr"))
    return say(
        en=f"The numbers are right, but in another order: return {order_en}.",
        fr=f"Les nombres sont justes, mais dans un autre ordre : renvoyez {order_fr}.",
    )


def read_numbers(given: Any, names: Sequence[Said]) -> Numbers:
    """As many numbers as there are names, whatever holds them: a tuple, a list, an array, a tensor.

    Raises:
        Wrong: for nothing, for another number of them, for something that is no finite number.
    """
    refuse_nothing(given)
    parts = given.tolist() if hasattr(given, "tolist") else given
    parts = list(parts) if isinstance(parts, tuple | list) else [parts]
    parts = [part.item() if hasattr(part, "item") else part for part in parts]
    legal = all(isinstance(part, Real) and not isinstance(part, bool) for part in parts)
    if len(parts) != len(names) or not legal:
        listed_en, listed_fr = (", ".join(getattr(name, language) for name in names) for language in ("en", "fr"))
        raise Wrong(
            say(
                en=f"Your function should return {len(names)} number(s), {listed_en}, but it returns {shown(given)}.",
                fr=f"Votre fonction doit renvoyer {len(names)} nombre(s), {listed_fr}, mais elle renvoie "
                f"{shown(given)}.",
            )
        )
    values = tuple(float(part) for part in parts)
    for value, name in zip(values, names, strict=True):
        if not math.isfinite(value):
            raise Wrong(
                say(
                    en=f"Your function gives {value} for {name.en}: look for a division by zero, or a minimum over "
                    "nothing.",
                    fr=f"Votre fonction donne {value} pour {name.fr} : cherchez une division par zéro, ou un minimum "
                    "sur une liste vide.",
                )
            )
    return values


def refuse_nothing(given: Any) -> None:
    """Refuse None, which is what a function without return gives.

    Raises:
        Wrong: for None.
    """
    if given is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )


def shown(given: Any) -> str:
    """What was returned, cut to a readable length."""
    text = repr(given)
    return text if len(text) <= 80 else text[:79] + "…"


def written(value: float) -> str:
    """A number with five significant digits, as the reader's language writes it."""
    text = f"{value:.5g}"
    return say(en=text, fr=text.replace(".", ","))


def same(one: float, other: float, tolerance: float = 1e-6) -> bool:
    """Whether two numbers are equal but for rounding."""
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)


def _alike(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return all(same(left, right, tolerance) for left, right in zip(one, other, strict=True))
