"""Lab 03: which gradients travel together.

Layer 6 (labs). Invariant: the reference fills buckets by the rule of torch's DDP and of `dlojz.data_parallel`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from dlojz.labs.exercise import Exercise, Wrong
from dlojz.labs.verdict import Said
from dlojz.text import say

Buckets = list[list[int]]


def fill_buckets(gradient_bytes: Sequence[int], limit_bytes: int) -> Buckets:
    """Parameters by bucket, in the order in which the buckets leave; a bucket is closed once it holds the limit.

    Source: Li et al. 2020, "PyTorch Distributed" (arXiv 2006.15704), §3.2.3 and §4.2: the reverse of
    `model.parameters()`; torch's `compute_bucket_assignment_by_size` closes a bucket when it reaches the limit.
    """
    buckets: Buckets = []
    filling: list[int] = []
    for index in reversed(range(len(gradient_bytes))):
        filling.append(index)
        if sum(gradient_bytes[each] for each in filling) >= limit_bytes:
            buckets.append(filling)
            filling = []
    return [*buckets, filling] if filling else buckets


def _filled(indices: Sequence[int], sizes: Sequence[int], closes: Callable[[int], bool], *, keep_rest: bool) -> Buckets:
    buckets: Buckets = []
    filling: list[int] = []
    for index in indices:
        filling.append(index)
        if closes(sum(sizes[each] for each in filling)):
            buckets.append(filling)
            filling = []
    return [*buckets, filling] if filling and keep_rest else buckets


def _never_beyond(sizes: Sequence[int], limit: int) -> Buckets:
    """Closes a bucket before it would exceed the limit, as DeepSpeed does."""
    buckets: Buckets = []
    filling: list[int] = []
    for index in reversed(range(len(sizes))):
        if filling and sum(sizes[each] for each in filling) + sizes[index] > limit:
            buckets.append(filling)
            filling = []
        filling.append(index)
    return [*buckets, filling] if filling else buckets


def _backwards(sizes: Sequence[int]) -> Sequence[int]:
    return range(len(sizes) - 1, -1, -1)


_MISTAKES: tuple[tuple[Callable[[Sequence[int], int], Buckets], Said], ...] = (
    (
        lambda sizes, limit: _filled(range(len(sizes)), sizes, lambda held: held >= limit, keep_rest=True),
        Said(
            "You begin with the first parameters, but backward reaches them last: no bucket could leave before its "
            "end. Go through the parameters in reverse.",
            "Vous commencez par les premiers paramètres, or la passe arrière ne les atteint qu’à la fin : aucun "
            "bucket ne pourrait partir avant. Parcourez les paramètres à rebours.",
        ),
    ),
    (
        lambda sizes, limit: _filled(range(len(sizes)), sizes, lambda held: held >= limit, keep_rest=True)[::-1],
        Said(
            "You fill forwards and reverse the list of buckets: that is not the same cut; the last bucket, which may "
            "be incomplete, would leave first. Fill in reverse order.",
            "Vous remplissez dans l’ordre, puis renversez la liste des buckets : ce n’est pas le même découpage ; le "
            "dernier bucket, souvent incomplet, partirait le premier. Remplissez à rebours.",
        ),
    ),
    (
        lambda sizes, limit: [sorted(bucket) for bucket in fill_buckets(sizes, limit)],
        Said(
            "The buckets are right, but within a bucket too the gradients become ready in reverse order: keep it.",
            "Les buckets sont justes, mais dans un bucket aussi les gradients sont prêts à rebours : gardez cet ordre.",
        ),
    ),
    (
        lambda sizes, limit: _filled(_backwards(sizes), sizes, lambda held: held >= limit, keep_rest=False),
        Said(
            "The last bucket, not quite full, never leaves: its gradients would stay those of one rank.",
            "Le dernier bucket, incomplet, ne part jamais : ses gradients resteraient ceux d’un seul rang.",
        ),
    ),
    (
        _never_beyond,
        Said(
            "You close a bucket before it exceeds the limit; the rule here is that of DDP: add the gradient, then "
            "close the bucket if it holds limit_bytes or more.",
            "Vous fermez un bucket avant qu’il ne dépasse la limite ; la règle est ici celle de DDP : ajouter le "
            "gradient, puis fermer le bucket s’il contient limit_bytes ou davantage.",
        ),
    ),
    (
        lambda sizes, limit: _filled(_backwards(sizes), sizes, lambda held: held > limit, keep_rest=True),
        Said(
            "A bucket that holds exactly limit_bytes is full: ≥, not >.",
            "Un bucket qui contient exactement limit_bytes est plein : ≥, et non >.",
        ),
    ),
    (
        lambda sizes, limit: [[index] for index in _backwards(sizes)],
        Said(
            "One bucket per gradient: then every small gradient pays a latency of its own.",
            "Un bucket par gradient : chaque petit gradient paie alors sa propre latence.",
        ),
    ),
    (
        lambda sizes, limit: [[sizes[index] for index in bucket] for bucket in fill_buckets(sizes, limit)],
        Said(
            "You return sizes; the indices of the parameters are asked for, so that one knows which gradients travel "
            "together.",
            "Vous renvoyez des tailles ; on demande les numéros des paramètres, pour savoir quels gradients voyagent "
            "ensemble.",
        ),
    ),
)


def _models() -> Iterator[tuple[list[int], int]]:
    yield [4, 40, 8, 12, 20, 6, 30, 2, 10], 30
    yield [100, 10, 10, 10, 10, 90, 5, 5, 10, 15], 20
    yield [7, 5, 3, 8, 1, 4, 12], 12
    yield [50, 60, 70, 3], 50


def _judge(answer: Callable[..., Any]) -> None:
    cases = list(_models())
    given = [_as_buckets(answer(list(sizes), limit)) for sizes, limit in cases]
    expected = [fill_buckets(*case) for case in cases]
    if given == expected:
        _judge_nothing(answer)
        return
    for way, says in _MISTAKES:
        if given == [way(*case) for case in cases]:
            raise Wrong(str(says))
    worst = next(index for index in range(len(cases)) if given[index] != expected[index])
    sizes, limit = cases[worst]
    raise Wrong(
        say(
            en=f"For gradients of {sizes} bytes and a limit of {limit}, {expected[worst]} is expected, but your "
            f"function returns {given[worst]}.",
            fr=f"Pour des gradients de {sizes} octets et une limite de {limit}, on attend {expected[worst]}, mais "
            f"votre fonction renvoie {given[worst]}.",
        )
    )


def _judge_nothing(answer: Callable[..., Any]) -> None:
    """Buckets that are filled exactly leave no empty one behind."""
    given = _as_buckets(answer([10, 10], 10))
    if given != [[1], [0]]:
        raise Wrong(
            say(
                en=f"For two gradients that fill a bucket each, your function returns {given}: an empty bucket is no "
                "bucket.",
                fr=f"Pour deux gradients qui remplissent chacun un bucket, votre fonction renvoie {given} : un bucket "
                "vide n’est pas un bucket.",
            )
        )


def _as_buckets(value: object) -> Buckets:
    if value is None:
        raise Wrong(
            say(
                en="Your function returns nothing: end it with return.",
                fr="Votre fonction ne renvoie rien : terminez-la par return.",
            )
        )
    try:
        return [[int(index) for index in bucket] for bucket in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        raise Wrong(
            say(
                en="A list of buckets is expected, each a list of parameter indices, such as [[3, 2], [1, 0]]; "
                f"your function returns {str(value)[:80]}.",
                fr="On attend une liste de buckets, chacun étant une liste de numéros de paramètres, par exemple "
                f"[[3, 2], [1, 0]] ; votre fonction renvoie {str(value)[:80]}.",
            )
        ) from None


BUCKETS = Exercise(
    id="buckets",
    title=Said("filling the buckets", "le remplissage des buckets"),
    judge=_judge,
    praise=Said(
        "Right: the last layers travel first, while backward goes on with the first ones.",
        "Exact : les dernières couches voyagent d’abord, pendant que la passe arrière remonte vers les premières.",
    ),
    hints=(
        Said(
            "Which gradients does backward finish first: those of the first or of the last parameters?",
            "Quels gradients la passe arrière termine-t-elle d’abord : ceux des premiers ou des derniers paramètres ?",
        ),
        Said(
            "Go through reversed(range(len(gradient_bytes))); append, add up, and close the bucket once its sum is "
            "≥ limit_bytes. Mind the last one.",
            "Parcourez reversed(range(len(gradient_bytes))) ; ajoutez, cumulez, et fermez le bucket dès que sa somme "
            "est ≥ limit_bytes. Pensez au dernier.",
        ),
    ),
)
