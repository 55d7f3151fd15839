"""Lab 09: the gradients that are there at once in a backward pass, counted as they come.

Layer 6 (labs), loads torch. Invariant: what is counted are the tensors in `.grad`, when each has just arrived and
before anybody has used it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Attach = Callable[[nn.Module], Any]


def watch_gradients(
    model: nn.Module, loss_of: Callable[[nn.Module], Tensor], attach: Attach | None = None
) -> list[int]:
    """Bytes of gradients that a model holds, after each has arrived in one backward pass, and at its end.

    Args:
        model: without gradients yet.
        loss_of: makes one forward pass and gives the loss.
        attach: called with the model before the pass: here an optimizer may put itself into it.

    Returns:
        one number for each parameter, in the order in which backward gives their gradients, and one for the end.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    held: list[int] = []

    def look(_: Tensor) -> None:
        held.append(sum(one.grad.nbytes for one in parameters if one.grad is not None))

    for parameter in parameters:  # before `attach`: hooks are called in the order in which they came
        parameter.register_post_accumulate_grad_hook(look)
    if attach is not None:
        attach(model)
    loss_of(model).backward()
    look(parameters[0])
    return held
