"""One process, and what an overlay is: what an engine holds besides what one process would allocate, and when.

Layer 3. Invariant: an overlay only listens to the trace of one process (a unit begins, a gradient is ready, backward is
over) and answers with what the engine then takes or gives back; the bytes of its states come from `states`.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Protocol

from dlojz.config import RunConfig
from dlojz.footprint import Category
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES
from dlojz.predict.timeline import Ledger


class Moments(Protocol):
    """What an overlay may ask of the step that is being replayed."""

    ledger: Ledger
    micro_batch: int
    """Number of the micro-batch, from 0."""

    @property
    def last(self) -> bool:
        """Whether no other micro-batch follows in this step."""

    def free_gradient(self, name: str) -> None:
        """Give back the gradient that autograd has just made."""


class Overlay:
    """One process: gradients stay where autograd has put them.

    Args:
        config: the run.
        shapes: of the model, or of the rank's part of it.
        states: bytes by category that are there when the step begins, gradients only if they outlive the update.
    """

    keeps_gradients = True
    """Whether the gradients of a micro-batch stay as autograd has made them."""

    gradients_are_states = True
    """Whether these are the gradients that the engine's inventory shows, or on their way to those."""
    gradients_stay = False
    """Whether the engine's gradients are there when a step begins."""

    on_gpu = False
    dp_rank = 0

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        self.config, self.shapes = config, shapes
        self.by_name = {parameter.name: parameter for parameter in shapes.parameters}

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        """What the engine holds from step to step besides its states."""
        return {}

    def pieces(self, category: Category, num_bytes: int) -> list[int]:
        """A state as the tensors it is made of, where they are the parameters; else in one piece."""
        del category
        return [num_bytes]

    def begin_backward(self, step: Moments) -> None:
        """The backward pass of a micro-batch begins."""

    def gathered_bytes(self) -> int:
        """Weights among the states that are there only while the step runs."""
        return 0

    def renewed_bytes(self) -> int:
        """Optimizer states that are there only while the step runs: new ones beside the old, for a moment."""
        return 0

    def begin_step(self, step: Moments) -> None:
        """The step begins."""

    def forward(self, step: Moments, module: str) -> None:
        """A module's forward begins."""

    def forwarded(self, step: Moments, module: str) -> None:
        """A module's forward is over."""

    def backward(self, step: Moments, module: str) -> None:
        """A module's backward begins."""

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        """The gradient of a parameter is there, in a tensor of its own."""

    def end_backward(self, step: Moments) -> None:
        """The backward pass of a micro-batch is over."""

    def update(self, step: Moments) -> None:
        """The optimizer steps."""
        step.ledger.hold("update", "workspace", self.update_bytes([p.numel for p in self.shapes.parameters]))
        step.ledger.drop("update")

    def update_bytes(self, sizes: list[int]) -> int:
        """Temporaries of an update of tensors of these sizes; LAMB takes as much as AdamW, one after the other.

        AdamW one after the other (`for_loop`, the CPU's way): a square root and its quotient, besides the last tensor's
        quotient; all at once (`foreach`, the GPU's way): a square root of all. SGD with weight decay: a gradient with
        the decay added, of one tensor or of all. A fused kernel needs none of these. Source: torch 2.13
        `optim/adam.py`, `_single_tensor_adam` and `_multi_tensor_adam`; `optim/sgd.py`, likewise.
        """
        config = self.config
        if not sizes or config.update == "fused":
            return 0
        auto = "foreach" if self.on_gpu and config.optimizer != "lamb" else "for_loop"
        at_once = (auto if config.update == "auto" else config.update) == "foreach"
        if config.optimizer in ("sgd", "momentum"):
            return FP32_BYTES * (sum(sizes) if at_once else max(sizes)) if config.weight_decay else 0
        if not config.optimizer.startswith(("adamw", "lamb")):
            return 0
        if at_once:
            return FP32_BYTES * sum(sizes)
        return FP32_BYTES * max(2 * size + former for former, size in pairwise([0, *sizes]))

    def end_step(self, step: Moments) -> None:
        """The step is over: gradients that outlive it aside, nothing of it is left."""
