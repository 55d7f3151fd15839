"""Lab 09: how its exercises of several steps are judged: the answer is used as a training would use it.

Layer 6 (labs). Invariant: a trial makes its own inputs, calls what it is given, and gives back one tensor of all that
came of it; the reference and the usual mistakes go through the same trial.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Wrong
from dlojz.labs.judging import Mistake, by_reference
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor

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


def normal(seed: int, *shape: int) -> Tensor:
    """Normal numbers that depend on the seed alone."""
    import torch

    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
