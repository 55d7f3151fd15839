"""Expert parallelism, by hand and by DeepSpeed: buckets of experts' gradients apart from those of the rest.

Layer 3. Invariant: see `base`; the all-to-alls' tensors are in the trace itself, which is of the rank's own experts.
What DeepSpeed's own layer keeps between its products is taken to be what the lab's keeps, which it is not to the byte.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.predict.experts import expert_buckets
from dlojz.predict.overlays.base import Moments
from dlojz.predict.overlays.deepspeed import DeepSpeed
from dlojz.predict.overlays.replicated import ByHand
from dlojz.predict.shapes import ModelShapes
from dlojz.predict.states import FP32_BYTES, deepspeed_sizes


class Experts(ByHand):
    """A bucket of experts that no other rank holds is never made: its gradients are divided where they are.

    Source: `dlojz.train.engines.experts`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        alone = config.layout.dp == config.layout.ep
        self.bucket_of, self.bucket_bytes = {}, []
        for experts, bucket in expert_buckets(config, shapes):
            self.bucket_of |= {parameter.name: len(self.bucket_bytes) for parameter in bucket}
            sent = not (experts and alone)
            self.bucket_bytes.append(FP32_BYTES * sum(parameter.numel for parameter in bucket) * sent)


class DeepSpeedExperts(DeepSpeed):
    """After backward the gradients of the rest go into one tensor, are reduced and come back; then those of experts.

    Source: DeepSpeed 0.19 `runtime/engine.py`, `buffered_allreduce_fallback`.
    """

    def end_backward(self, step: Moments) -> None:
        if not step.last:
            return
        for experts in (False, True):
            own = sum(parameter.numel for parameter in self.shapes.parameters if parameter.is_expert == experts)
            step.ledger.hold("reduce", "workspace", self.each * own)
            step.ledger.drop("reduce")

    def updated(self) -> list[int]:
        return deepspeed_sizes(self.config, self.shapes)
