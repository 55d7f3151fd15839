"""Lab 11: what its judges share: reading what an answer gives, and inputs that depend on a seed alone.

Layer 6 (labs). Invariant: what cannot be read is refused in a sentence that says what is expected; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dlojz.labs.exercise import Wrong
from dlojz.text import say

if TYPE_CHECKING:
    from torch import Tensor


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
