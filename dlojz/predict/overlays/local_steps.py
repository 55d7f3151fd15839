"""Local SGD and DiLoCo: an inner optimizer's update, then, where the replicas meet, one message of Ψ numbers.

Layer 3. Invariant: see `base`; the moments follow the lines of `dlojz.optim.local_steps`.
"""

from __future__ import annotations

from dlojz.predict.overlays.base import Overlay
from dlojz.predict.states import FP32_BYTES

_INNER = {"local_sgd": "sgd", "diloco": "adamw"}


class LocalSteps(Overlay):
    """A step after which the replicas meet; in the others the message is not there."""

    def update_bytes(self, sizes: list[int]) -> int:
        """Temporaries of the inner update, or the message with which the replicas meet, whichever is more."""
        inner = Overlay(self.config.model_copy(update={"optimizer": _INNER[self.config.optimizer]}), self.shapes)
        inner.on_gpu = self.on_gpu
        meets = self.config.layout.dp > 1 or self.config.optimizer == "diloco"
        return max(inner.update_bytes(sizes), FP32_BYTES * sum(sizes) if meets else 0)
