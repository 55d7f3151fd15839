"""The whole model on every rank: torch's DDP, and DDP by hand.

Layer 3. Invariant: see `base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz.config import RunConfig
from dlojz.footprint import Category
from dlojz.predict.communication import DDP_BUCKET_BYTES
from dlojz.predict.overlays.base import Moments, Overlay
from dlojz.predict.shapes import ModelShapes, ParameterShape
from dlojz.predict.states import FP32_BYTES
from dlojz.units import MEBIBYTE


class DDP(Overlay):
    """torch DDP: buckets as large as the gradients, for good; or the gradients are views of them.

    Source: torch 2.13 `csrc/distributed/c10d/reducer.cpp`, `initialize_buckets`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        self.keeps_gradients = not config.layout.gradient_as_bucket_view

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        category: Category = "workspace" if self.keeps_gradients else "gradients"
        return {"buckets": (category, FP32_BYTES * self.shapes.num_parameters)}

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not self.keeps_gradients:  # added into the bucket, of which the parameter's gradient is a view
            step.free_gradient(parameter.name)


class ByHand(Overlay):
    """DDP by hand: a bucket is copied into one tensor once its gradients are ready; all stay until synchronised.

    Source: `dlojz.data_parallel`.
    """

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        given_mib = config.layout.bucket_mib
        limit_bytes = DDP_BUCKET_BYTES if given_mib is None else int(given_mib * MEBIBYTE)
        self.bucket_of: dict[str, int] = {}
        self.bucket_bytes: list[int] = []
        for parameter in reversed(shapes.parameters):
            if not self.bucket_bytes or self.bucket_bytes[-1] >= limit_bytes:
                self.bucket_bytes.append(0)
            self.bucket_of[parameter.name] = len(self.bucket_bytes) - 1
            self.bucket_bytes[-1] += FP32_BYTES * parameter.numel
        self.missing: list[int] = []

    def begin_step(self, step: Moments) -> None:
        self.missing = [list(self.bucket_of.values()).count(number) for number in range(len(self.bucket_bytes))]

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        if not step.last or self.config.layout.dp == 1:
            return
        number = self.bucket_of[parameter.name]
        self.missing[number] -= 1
        if self.missing[number] == 0:
            step.ledger.hold(("bucket", number), "workspace", self.bucket_bytes[number])

    def end_backward(self, step: Moments) -> None:
        for number in range(len(self.bucket_bytes)):
            step.ledger.drop(("bucket", number))
