"""torch's FSDP2: blocks that are gathered before use and freed after it.

Layer 3. Invariant: see `base`.
"""

from __future__ import annotations

from dlojz.config import RunConfig
from dlojz.footprint import Category
from dlojz.predict.overlays.base import Moments, Overlay
from dlojz.predict.shapes import ModelShapes
from dlojz.predict.states import FP32_BYTES, compute_bytes


class FSDP2(Overlay):
    """FSDP2: a block's weights are gathered, copied out, and freed; its gradients are reduce-scattered in fp32.

    Source: torch 2.13 `distributed/fsdp/_fully_shard/_fsdp_param_group.py` and `_fsdp_collectives.py`.
    """

    keeps_gradients = False

    def __init__(self, config: RunConfig, shapes: ModelShapes) -> None:
        super().__init__(config, shapes)
        dp = config.layout.dp
        self.units = {f"blocks.{block[0].block}": block for block in shapes.blocks()}
        self.order = list(self.units)
        self.padded = {
            name: dp * sum(parameter.padded_rows_numel(dp) for parameter in block) for name, block in self.units.items()
        }
        self.each = compute_bytes(config)
        self.current: str | None = None

    def gathered_bytes(self) -> int:
        return self.each * sum(self.padded.values()) if self.config.layout.zero == 2 else 0

    def gather(self, step: Moments, unit: str) -> None:
        """All-gather into one buffer: all shards of the unit."""
        if step.ledger.holds(("weights", unit)) or step.ledger.holds(("gather", unit)):
            return
        step.ledger.hold(("gather", unit), "workspace", self.each * self.padded[unit] * (self.config.layout.dp > 1))

    def copy_out(self, step: Moments, unit: str) -> None:
        """From the buffer into the unit's weights, as its modules read them."""
        category: Category = "weights" if self.config.layout.zero == 2 else "workspace"
        if not step.ledger.holds(("weights", unit)):
            step.ledger.hold(("weights", unit), category, self.each * self.padded[unit], unit)

    def forward(self, step: Moments, module: str) -> None:
        if module not in self.units or self.current is not None:
            return
        self.gather(step, module)
        self.copy_out(step, module)
        for former in self.order:  # a buffer waits for the next unit's, so that copy and gathering may overlap
            if former != module:
                step.ledger.drop(("gather", former))

    def forwarded(self, step: Moments, module: str) -> None:
        if module in self.units and self.current is None and self.config.layout.zero == 3:
            step.ledger.drop(("weights", module))

    def backward(self, step: Moments, module: str) -> None:
        if module not in self.units or module == self.current:
            return
        self.finish(step)
        self.current = module
        for former in self.order:
            if former != module:
                step.ledger.drop(("gather", former))
        if not step.ledger.holds(("weights", module)):
            self.gather(step, module)
            self.copy_out(step, module)
        step.ledger.drop(("gather", module))
        number = self.order.index(module)
        if number > 0 and self.config.layout.zero == 3:
            self.gather(step, self.order[number - 1])  # prefetch

    def finish(self, step: Moments) -> None:
        """The unit whose backward is over: its weights go, its gradients are reduced, each rank keeps its shard."""
        unit = self.current
        if unit is None:
            return
        step.ledger.drop(("weights", unit))
        step.ledger.drop("reduce")
        step.ledger.hold("reduce", "workspace", FP32_BYTES * self.padded[unit], unit)
        if self.each < FP32_BYTES and not self.on_gpu:  # no CPU kernel joins and casts in one go
            step.ledger.hold("joined", "workspace", self.each * self.padded[unit], unit)
        # The shard is there before the gradients go: autograd still holds these when the unit's last hook runs.
        shard_bytes = FP32_BYTES * self.padded[unit] // self.config.layout.dp
        if step.ledger.holds(("shard", unit)):  # accumulated into the shard of the former micro-batch
            step.ledger.hold("reduced", "workspace", shard_bytes, unit)
            step.ledger.drop("reduced")
        else:
            step.ledger.hold(("shard", unit), "gradients", shard_bytes, unit)
        step.ledger.drop("joined")
        for parameter in self.units[unit]:
            step.free_gradient(parameter.name)

    def end_backward(self, step: Moments) -> None:
        self.finish(step)
        self.current = None
        step.ledger.drop("reduce")
        for unit in self.order:
            step.ledger.drop(("gather", unit))

    def update(self, step: Moments) -> None:
        dp = self.config.layout.dp
        step.ledger.hold(
            "update", "workspace", self.update_bytes([p.rows_numel(dp, 0) for p in self.shapes.parameters])
        )
        step.ledger.drop("update")
