"""Judges: compare an answer with a reference on random inputs, and say what is wrong.

How most judges judge: the answer and a reference on the same inputs, then the usual mistakes, by name.

An answer is refused for a named mistake only if it makes that mistake on every input.

Lab 11: what its judges share: reading what an answer gives, and inputs that depend on a seed alone.

What cannot be read is refused in a sentence that says what is expected; nothing is guessed.

Lab 09: how its exercises of several steps are judged: the answer is used as a training would use it.

A trial makes its own inputs, calls what it is given, and gives back one tensor of all that came of it; the reference
and the usual mistakes go through the same trial.

Lab 07: what students' functions give back, read into plain numbers and groups, or refused by name.

What cannot be read is refused by a sentence that says what is expected.

Lab 08: numbers that students' functions give back, read, held against a reference part by part, and told apart.

An answer is refused for a named mistake only if it makes that mistake in every case.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

from dlojz.base.language import percent, say, shortest, significant
from dlojz.labs.kit.exercise import Said, Wrong

if TYPE_CHECKING:
    from torch import Tensor

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
            en=f"For the arguments ({arguments}), {shortest(float(right))} is expected, but your function returns "
            f"{shortest(float(value))}.",
            fr=f"Pour les arguments ({arguments}), on attend {shortest(float(right))}, mais votre fonction renvoie "
            f"{shortest(float(value))}.",
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
        en=f"The shape is right, but {percent(share, 0)} of the values differ from the reference, by up to "
        f"{significant(gap, 2)}.",
        fr=f"La forme est juste, mais {percent(share, 0)} des valeurs diffèrent de la référence, jusqu’à "
        f"{significant(gap, 2)} d’écart.",
    )


def _share_wrong(value: Any, right: Any) -> float:
    return float(((value - right).abs() > TOLERANCE * (1 + right.abs())).double().mean())


def nothing() -> Wrong:
    """The refusal of an answer without `return`."""
    return Wrong(
        say(
            en="Your function returns nothing: end it with return.",
            fr="Votre fonction ne renvoie rien : terminez-la par return.",
        )
    )


def several(returned: object, names: str, count: int) -> tuple[Any, ...]:
    """What a function that gives several things has returned.

    Args:
        returned: by the answer.
        names: of the things, as a sentence quotes them, e.g. `(q, scale)`.
        count: how many.

    Raises:
        Wrong: if they are not so many.
    """
    if returned is None:
        raise nothing()
    if not isinstance(returned, tuple | list) or len(returned) != count:
        raise Wrong(
            say(
                en=f"{count} results are expected, {names}, but your function returns a {type(returned).__name__}"
                + (f" of {len(returned)}." if isinstance(returned, tuple | list) else "."),
                fr=f"{count} résultats sont attendus, {names}, mais votre fonction renvoie un objet de type "
                f"{type(returned).__name__}" + (f" à {len(returned)} éléments." if isinstance(returned, tuple | list)
                else "."),
            )
        )  # fmt: skip
    return tuple(returned)


def shaped(value: object, name: str, shape: Sequence[int]) -> Tensor:
    """A tensor of one shape.

    Raises:
        Wrong: if it is none, or of another shape.
    """
    import torch

    if value is None:
        raise nothing()
    if not torch.is_tensor(value):
        raise Wrong(
            say(
                en=f"{name} is a {type(value).__name__}, but a torch tensor is expected.",
                fr=f"{name} est un objet de type {type(value).__name__}, mais un tenseur torch est attendu.",
            )
        )
    if tuple(value.shape) != tuple(shape):
        raise Wrong(
            say(
                en=f"{name} has the shape {tuple(value.shape)}, but {tuple(shape)} is expected.",
                fr=f"{name} est de forme {tuple(value.shape)}, mais on attend {tuple(shape)}.",
            )
        )
    return value


def integers(value: object, name: str, shape: Sequence[int]) -> Tensor:
    """A tensor of int8, as float64 for comparison.

    Raises:
        Wrong: if it is kept in another type: the bytes of a file depend on it.
    """
    import torch

    tensor = shaped(value, name, shape)
    if tensor.dtype != torch.int8:
        kind = str(tensor.dtype).removeprefix("torch.")
        raise Wrong(
            say(
                en=f"{name} is kept in {kind}, so it saves nothing, or less than it could: end with .to(torch.int8).",
                fr=f"{name} est en {kind}, et ne fait donc rien gagner, ou moins qu’il ne pourrait : terminez par "
                ".to(torch.int8).",
            )
        )
    return tensor.double()


def masks_of(value: object, name: str, shape: Sequence[int]) -> Tensor:
    """A mask of zeros and ones, or of booleans, as float64.

    Raises:
        Wrong: if there is anything else in it.
    """
    tensor = shaped(value, name, shape).double()
    if not bool(((tensor == 0) | (tensor == 1)).all()):
        raise Wrong(
            say(
                en=f"{name} holds other values than 0 and 1: a mask says which weights are kept, it does not hold "
                "them.",
                fr=f"{name} contient d’autres valeurs que 0 et 1 : un masque dit quels poids sont gardés, il ne les "
                "contient pas.",
            )
        )
    return tensor


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def gradient_of(value: Tensor, leaf: Tensor) -> Tensor | None:
    """The gradient of a scalar with respect to a leaf; None if there is none."""
    import torch

    if not value.requires_grad:
        return None
    return torch.autograd.grad(value, leaf, allow_unused=True)[0]


Way = Callable[..., Any]


Trial = Callable[..., "Tensor"]


def by_trial(
    trial: Trial,
    reference: Callable[..., Any],
    *,
    cases: Callable[[], Iterable[tuple[Any, ...]]],
    mistakes: Sequence[Mistake],
) -> Callable[[Callable[..., Any]], None]:
    """`by_reference` of what becomes of an answer in a trial.

    Args:
        trial: called as `trial(answer, *case)`; gives a tensor, or raises `Wrong` for what can be told at sight.
        reference: the right way.
        cases: gives the inputs of the trial.
        mistakes: wrong ways, tried in order on an answer that differs from the reference.
    """

    def tried(way: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *case: trial(way, *case)

    general = by_reference(
        tried(reference), cases=cases, mistakes=[Mistake(tried(mistake.way), mistake.says) for mistake in mistakes]
    )
    return lambda answer: general(tried(answer))


def pair_of(returned: object, names: str) -> tuple[Any, Any]:
    """What a function that gives two things has returned.

    Args:
        returned: by the answer.
        names: of the two, as a sentence quotes them, e.g. `(told, error)`.

    Raises:
        Wrong: if it is not a pair.
    """
    if returned is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    if not isinstance(returned, (tuple, list)) or len(returned) != 2:
        raise Wrong(
            say(
                en=f"Two results are expected, {names}, but your function returns a {type(returned).__name__}.",
                fr=f"Deux résultats sont attendus, {names}, mais votre fonction renvoie un objet de type "
                f"{type(returned).__name__}.",
            )
        )
    return returned[0], returned[1]


MAX_GROUPS = 4096
"""A list that grows beyond this is a loop gone wrong."""


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


def read_triple(given: Any, names: str) -> tuple[int, int, int]:
    """Three whole numbers.

    Args:
        given: what the student's function returned.
        names: what the three are, as a student reads it, e.g. `(pp, dp, tp)`.

    Raises:
        Wrong: for nothing, something that is no triple, or a number that is not whole.
    """
    refuse_nothing(given)
    three = tuple(given) if isinstance(given, tuple | list) else ()
    if len(three) != 3:
        raise Wrong(
            say(
                en=f"Three numbers are expected, {names}, but {_told(given)} was returned.",
                fr=f"On attend trois nombres, {names}, mais {_told(given)} a été renvoyé.",
            )
        )
    first, second, third = (_whole(number, names) for number in three)
    return first, second, third


def read_groups(given: Any, ranks: int) -> list[tuple[int, ...]]:
    """Groups of ranks, each sorted, in the order of their first ranks.

    Args:
        given: what the student's function returned.
        ranks: how many ranks there are.

    Raises:
        Wrong: for nothing, for something that is no list of lists of ranks, for a rank that does not exist, is in two
            groups or in none.
    """
    refuse_nothing(given)
    groups: list[tuple[int, ...]] = []
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise Wrong(_no_groups(given))
    for group in given:
        if isinstance(group, str) or not isinstance(group, Iterable):
            raise Wrong(_no_groups(given))
        groups.append(tuple(sorted(_whole(rank, say(en="ranks", fr="des rangs")) for rank in group)))
        if len(groups) > MAX_GROUPS:
            raise Wrong(
                say(
                    en=f"There are more than {MAX_GROUPS} groups: look for a loop that adds too many.",
                    fr=f"Il y a plus de {MAX_GROUPS} groupes : cherchez une boucle qui en ajoute trop.",
                )
            )
    _refuse_other_ranks(groups, ranks)
    return sorted(groups)


def _refuse_other_ranks(groups: list[tuple[int, ...]], ranks: int) -> None:
    """Each rank once."""
    listed = [rank for group in groups for rank in group]
    for rank in listed:
        if not 0 <= rank < ranks:
            raise Wrong(
                say(
                    en=f"There is no rank {rank} among {ranks}: they go from 0 to {ranks - 1}.",
                    fr=f"Il n’y a pas de rang {rank} parmi {ranks} : ils vont de 0 à {ranks - 1}.",
                )
            )
        if listed.count(rank) > 1:
            raise Wrong(
                say(
                    en=f"Rank {rank} stands in two groups of one axis (of {ranks} ranks); each rank has exactly one.",
                    fr=f"Le rang {rank} figure dans deux groupes d’un même axe (sur {ranks} rangs) ; chaque rang en a "
                    "un seul.",
                )
            )
    missing = sorted(set(range(ranks)) - set(listed))
    if missing:
        raise Wrong(
            say(
                en=f"Rank {missing[0]} stands in no group (of {ranks} ranks, {len(listed)} are listed): along each "
                "axis every rank has its group.",
                fr=f"Le rang {missing[0]} ne figure dans aucun groupe ({len(listed)} rangs sur {ranks} sont cités) : "
                "selon chaque axe, tout rang a le sien.",
            )
        )


def _no_groups(given: Any) -> str:
    return say(
        en=f"A list of groups such as [[0, 1], [2, 3]] is expected, but {_told(given)} was returned.",
        fr=f"On attend une liste de groupes comme [[0, 1], [2, 3]], mais {_told(given)} a été renvoyé.",
    )


def _told(given: Any) -> str:
    return repr(given)[:60]


def _whole(number: Any, names: str) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise Wrong(
            say(
                en=f"Whole numbers are expected ({names}), but {_told(number)} stands among them: divide with // and "
                "not with /.",
                fr=f"On attend des nombres entiers ({names}), mais {_told(number)} s’y trouve : divisez par //, et non "
                "par /.",
            )
        ) from None


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
                    en=f"{where}: {name.en} should be {significant(right, 5)}, but your function gives "
                    f"{significant(own, 5)}.",
                    fr=f"{where} : pour {name.fr}, on attend {significant(right, 5)}, mais votre fonction donne "
                    f"{significant(own, 5)}.",
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


def shown(given: Any) -> str:
    """What was returned, cut to a readable length."""
    text = repr(given)
    return text if len(text) <= 80 else text[:79] + "…"


def same(one: float, other: float, tolerance: float = 1e-6) -> bool:
    """Whether two numbers are equal but for rounding."""
    return math.isclose(one, other, rel_tol=tolerance, abs_tol=1e-12)


def _alike(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return all(same(left, right, tolerance) for left, right in zip(one, other, strict=True))
