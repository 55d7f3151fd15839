"""Megatron-core's `DistributedDataParallel`: one buffer of gradients, and one of attention scores.

Layer 3. Invariant: see `base`.
"""

from __future__ import annotations

from collections.abc import Mapping

from dlojz import models
from dlojz.footprint import Category
from dlojz.models.sizes import GPTSize
from dlojz.predict.overlays.base import Moments, Overlay
from dlojz.predict.shapes import ParameterShape
from dlojz.predict.states import FP32_BYTES


class Megatron(Overlay):
    """Gradients are added into a buffer that is there from the start; so is, from the first step, one for the scores.

    `GlobalMemoryBuffer` keeps a tensor of the size of all attention scores of a layer, 4·a·s²·b bytes (a heads of the
    rank, s tokens, b samples), which a product takes for what it adds to, times 0: nothing is ever written there.

    Source: megatron-core 0.16.1, `distributed/param_and_grad_buffer.py`, `transformer/dot_product_attention.py`.
    """

    keeps_gradients = False
    gradients_stay = True

    def standing(self) -> Mapping[str, tuple[Category, int]]:
        size, layout = models.spec(self.config.model).size, self.config.layout
        heads = size.num_heads // layout.tp if isinstance(size, GPTSize) else 0
        scores = heads * (self.config.sequence_length or 0) ** 2 * layout.micro_batch
        return {"scores": ("workspace", FP32_BYTES * scores)}

    def ready(self, step: Moments, parameter: ParameterShape) -> None:
        step.free_gradient(parameter.name)
