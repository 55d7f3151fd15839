"""An asynchronous pipeline: each stage updates on its own, while micro-batches are in flight.

Layer 3. Invariant: what the loop calls a step is one run of the schedule over the step's micro-batches, filled at its
start and drained at its end, with all its updates inside: as many as the schedule has, each by plain SGD. So a loss
that is not finite is known after updates have been made with it.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from dlojz.models.blocks import BlockList
from dlojz.pipeline.runtime_asynchronous import AsynchronousRuntime
from dlojz.train.engines.base import Inventory
from dlojz.train.engines.pipeline import PipelineEngine


class AsynchronousPipelineEngine(PipelineEngine):
    """`dlojz.pipeline.runtime_asynchronous` over the pipeline axis."""

    def build(self, blocks: BlockList) -> None:
        super().build(blocks)
        self._runtime = AsynchronousRuntime(
            self.schedule,
            self.modules,
            self.boundaries,
            self.loss,
            learning_rate=self.config.learning_rate,
            weight_decay=self.config.weight_decay,
            group=self.pp_group,
            perform=self._perform,
        )

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        return self._runtime.step(inputs, targets)

    def update(self) -> None:
        """Nothing: the schedule has updated."""

    def inventory(self) -> Inventory:
        held = super().inventory()
        versions = [one for stage in self._runtime.weights.values() for one in stage.kept.values()]
        return {**held, "weights": [*held["weights"], *(weight for one in versions for weight in one.values())]}
