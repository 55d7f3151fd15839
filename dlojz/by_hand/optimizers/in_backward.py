"""Optimizer in the backward pass: each parameter is updated as soon as its gradient is there, which is then freed.

An optimizer that treats each parameter by itself gives the same weights, to the bit, as with `optimizer.step()`; of 4Ψ
bytes of gradients no more than those of one module exist at once.

Source: Jiang et al. 2021, "Optimizer Fusion: Efficient Training with Better Locality and Parallelism" (arXiv
2104.00237): backward-fusion, here, and forward-fusion, `when="forward"`, which updates a module's parameters just
before they are used again: gradients stay, and nothing that needs all of them (clipping by their norm) is lost.
PyTorch's tutorial "How to save memory by fusing the optimizer step into the backward pass" has the same hook.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dlojz.base.errors import LabError
from dlojz.base.language import one_of

MakeOptimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
FP32_BYTES = 4


def gradient_bytes_at_most(modules: Iterable[Iterable[int]]) -> int:
    """Count the bytes of gradients that exist at once where backward updates: those of the largest module.

    Args:
        modules: elements of each parameter of each module, in any order: a module's own, not its children's.
    """
    # The gradients of one module are there together; those of the others are freed, or not made yet.
    return FP32_BYTES * max((sum(sizes) for sizes in modules), default=0)


class InBackward:
    """Optimizers, one per parameter, that the passes themselves call; there is no `step()` to call.

    One backward pass makes one update; to accumulate micro-batches, `when` is `forward` and `accumulates` is set.

    Args:
        module: the model; parameters that need no gradient are left alone.
        make_optimizer: makes the optimizer of the parameters it is given: `lambda p: torch.optim.AdamW(p, lr=1e-3)`.
        when: `backward`, as soon as the gradient is there; `forward`, as the module is next called.
        accumulates: with `forward`: gradients add up until `step()` says that they are whole.

    Raises:
        LabError: if `when` is neither.
    """

    def __init__(
        self,
        module: nn.Module,
        make_optimizer: MakeOptimizer,
        when: Literal["backward", "forward"] = "backward",
        *,
        accumulates: bool = False,
    ) -> None:
        if when not in ("backward", "forward"):
            raise LabError(one_of("when", when, ("backward", "forward")))
        self.optimizers: dict[Tensor, torch.optim.Optimizer] = {}
        self._due: set[Tensor] | None = set() if accumulates else None
        self._handles: list[Any] = []
        # Per module only its own parameters: children come by themselves.
        for child in module.modules():
            parameters = [parameter for parameter in child.parameters(recurse=False) if parameter.requires_grad]
            for parameter in parameters:
                if parameter in self.optimizers:  # tied: updated once
                    continue
                # One optimizer each, so that it can step without the others.
                self.optimizers[parameter] = make_optimizer([parameter])
                if when == "backward":
                    # post-accumulate: `parameter.grad` is complete in this pass.
                    self._handles.append(parameter.register_post_accumulate_grad_hook(self.update))
            if when == "forward" and parameters:
                self._handles.append(child.register_forward_pre_hook(partial(self._before, parameters)))

    def update(self, parameter: Tensor) -> None:
        """Update one parameter with its gradient, if any, and free that."""
        if parameter.grad is None:  # not reached by backward, or updated already
            return
        self.optimizers[parameter].step()
        parameter.grad = None

    def _before(self, parameters: Sequence[Tensor], *_: Any) -> None:
        for parameter in parameters:
            # Without accumulation every gradient is whole; with it, those that `step()` has declared so.
            if self._due is None:
                self.update(parameter)
            elif parameter in self._due:
                self._due.discard(parameter)
                self.update(parameter)

    def step(self) -> None:
        """Declare the gradients whole, with `accumulates`: the next forward pass updates. Otherwise do nothing."""
        if self._due is not None:
            self.finish()  # what the last forward pass has not used
            # From here on the next forward pass that reaches one of these updates it.
            self._due = {parameter for parameter in self.optimizers if parameter.grad is not None}

    def finish(self) -> None:
        """Update what still has a gradient: after the last backward of a training, where `when` is `forward`.

        With `accumulates`, what still has one that `step()` has called whole.
        """
        self._before(list(self.optimizers))

    def release(self) -> None:
        """Remove the hooks from the module."""
        for handle in self._handles:
            handle.remove()

    def states(self) -> list[Tensor]:
        """List all tensors that the optimizers keep from step to step."""
        parameter_states = [state for optimizer in self.optimizers.values() for state in optimizer.state.values()]
        return [value for state in parameter_states for value in state.values() if isinstance(value, Tensor)]
