"""Updates within the passes: in backward, where gradients are temporaries, or in the next forward, which finds them.

Layer 3. Invariant: see `base`. What the probe measures shows the gradients of `in_backward` as workspace: they are gone
before the engine can show them in an inventory, and what autograd keeps of them at once is all that there ever is.

Source: `dlojz.optim.in_backward`; DDP by hand: `dlojz.train.engines.in_backward`.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.footprint import Category
from dlojz.predict.overlays.base import Moments, Overlay
from dlojz.predict.overlays.replicated import DDP, ByHand
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES


def _updates(overlay: Overlay, step: Moments, parameter: ParameterShape) -> None:
    """One parameter is updated by itself: its temporaries come and go."""
    step.ledger.hold("update", "workspace", overlay.update_bytes([parameter.numel]))
    step.ledger.drop("update")


class InBackward(Overlay):
    """One process: a parameter is updated, and its gradient freed, once that is there."""

    gradients_are_states = False

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        _updates(self, step, parameter)
        step.free_gradient(parameter.name)

    def update(self, step: Moments) -> None:
        """It is done."""


class ByHandInBackward(ByHand):
    """DDP by hand: two buckets are under way at most; a bucket is used and freed once the next one has left."""

    gradients_are_states = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.in_bucket: list[list[ParameterShape]] = [[] for _ in self.bucket_bytes]
        for parameter in reversed(shapes.parameters):
            self.in_bucket[self.bucket_of[parameter.name]].append(parameter)
        self.next = 0

    def begin_step(self, step: Moments) -> None:
        super().begin_step(step)
        self.next = 0

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        self.missing[self.bucket_of[parameter.name]] -= 1
        while self.next < len(self.missing) and not self.missing[self.next]:
            self._leave(step)

    def _leave(self, step: Moments) -> None:
        """The next bucket is sent, and the one before it has arrived."""
        number = self.next
        self.next += 1
        step.ledger.hold(("bucket", number), "workspace", self.bucket_bytes[number])
        for parameter in self.in_bucket[number]:
            step.free_gradient(parameter.name)
        if number:
            self._arrive(step, number - 1)

    def _arrive(self, step: Moments, number: int) -> None:
        for parameter in self.in_bucket[number]:
            _updates(self, step, parameter)
        step.ledger.drop(("bucket", number))

    def end_backward(self, step: Moments) -> None:
        while self.next < len(self.missing):
            self._leave(step)
        self._arrive(step, len(self.missing) - 1)

    def update(self, step: Moments) -> None:
        """It is done."""


class InForward(Overlay):
    """Gradients stay over the end of the step; the next forward frees a module's before it computes."""

    gradients_stay = True

    def pieces(self, category: Category, num_bytes: int) -> list[int]:
        """Gradients parameter by parameter, since they go so."""
        if category == "gradients":
            return [FP32_BYTES * parameter.numel for parameter in self.shapes.parameters]
        return super().pieces(category, num_bytes)

    def forward(self, step: Moments, module: str) -> None:
        super().forward(step, module)
        for number, parameter in enumerate(self.shapes.parameters):
            key = ("state", "gradients", number)
            if parameter.module == module and step.ledger.holds(key):
                _updates(self, step, parameter)
                step.ledger.drop(key)

    def update(self, step: Moments) -> None:
        """It is put off: what backward has made is what the next step finds."""
        for number, parameter in enumerate(self.shapes.parameters):
            step.ledger.rename(("gradient", parameter.name), ("state", "gradients", number))


class DDPInForward(InForward, DDP):
    """The same under torch's DDP."""


class ByHandInForward(InForward, ByHand):
    """The same under DDP by hand."""


def kind_of(config: RunConfig) -> type[Overlay]:
    """The overlay of a run that updates within its passes; by hand, one process sends nothing."""
    in_forward: dict[str, type[Overlay]] = {"single": InForward, "ddp": DDPInForward, "by_hand": ByHandInForward}
    if config.update == "in_forward":
        return in_forward[config.layout.strategy]
    return ByHandInBackward if config.layout.dp > 1 else InBackward
