"""torch's DDP with a hook: what it takes beside the buckets, when one leaves.

Layer 3. Invariant: see `base`; on a CPU a bucket of PowerSGD has arrived before the next one leaves.

Source: torch 2.13, `distributed/algorithms/ddp_comm_hooks`, line by line.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.predict.gradient_hooks import buckets, compressed, renewed_bytes
from dlojz.predict.overlays.base import Moments
from dlojz.predict.overlays.replicated import DDP
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES, HALF_BYTES


class HookedDDP(DDP):
    """DDP whose gradients leave in half the bytes, or as PowerSGD's matrices."""

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        members = buckets(config, shapes)
        self._bucket_of = {parameter.name: number for number, of in enumerate(members) for parameter in of}
        self._sizes = [len(of) for of in members]
        self._buckets = [compressed(of, config.layout.powersgd_rank) for of in members]
        self._missing: list[int] = []

    def renewed_bytes(self) -> int:
        """New errors of the largest bucket, beside the old."""
        return renewed_bytes(self.config, self.shapes)

    def begin_step(self, step: Moments) -> None:
        self._missing = list(self._sizes)

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        super().ready(step, parameter)
        if not step.last:
            return
        number = self._bucket_of[parameter.name]
        self._missing[number] -= 1
        if self._missing[number] == 0:
            self._leaves(step, number)

    def _leaves(self, step: Moments, number: int) -> None:
        bucket, ledger = self._buckets[number], step.ledger
        if self.config.layout.gradient_compression != "powersgd":
            ledger.hold("half", "workspace", HALF_BYTES * bucket.whole)  # the former bucket's has arrived
            return
        # A copy of the gradients with the errors added; what is not compressed, end to end; then the new errors.
        ledger.hold("copy", "workspace", FP32_BYTES * (bucket.whole + bucket.plain))
        ledger.hold("errors", "optimizer", FP32_BYTES * bucket.whole)
        ledger.drop("errors")
        ledger.drop("copy")

    def end_backward(self, step: Moments) -> None:
        step.ledger.drop("half")
