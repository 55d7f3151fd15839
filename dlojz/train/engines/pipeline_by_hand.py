"""The lab's own pipeline: its teaching runtime, any synchronous schedule, bidirectional ones too.

Layer 3. Invariant: what is executed is the schedule's own list, action for action.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from dlojz.models.blocks import BlockList
from dlojz.pipeline.runtime import PipelineRuntime
from dlojz.train.engines.pipeline import PipelineEngine, average


class ByHandPipelineEngine(PipelineEngine):
    """`dlojz.pipeline.runtime` over the pipeline axis."""

    def build(self, blocks: BlockList) -> None:
        super().build(blocks)
        self._twins = self._twin_groups()
        self._runtime = PipelineRuntime(
            self.schedule,
            self.modules,
            self.boundaries,
            self.loss,
            group=self.pp_group,
            perform=self._perform,
        )

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        return self._runtime.step(inputs, targets)

    def reduce_gradients(self) -> None:
        """Add up the two copies of each stage of a bidirectional schedule, then average over the replicas.

        Who: the two ranks that hold a stage. What: its gradients in one flat tensor, all-reduced (sum). How much: 4
        bytes per parameter of the stage and step.
        """
        for stage, group in sorted(self._twins.items()):
            module = next(module for (_, held), module in self.modules.items() if held == stage)
            average([parameter.grad for parameter in module.parameters()], group, ranks=1)
        super().reduce_gradients()

    def _twin_groups(self) -> dict[int, dist.ProcessGroup]:
        """Per stage that this rank holds, the group of the two ranks that do; empty where there is one pipe."""
        if self.schedule.pipes == 1:
            return {}
        layout, own = self.config.layout, {}
        for stage in range(self.schedule.stages):
            for place in range(layout.dp * layout.tp):
                ranks = sorted({self.axes.world_rank(pipe[stage]) + place for pipe in self.schedule.placement})
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks and len(ranks) > 1:
                    own[stage] = group
        return own

    @property
    def group_names(self) -> dict[str, str]:
        return {**super().group_names, **{str(group.group_name): "twins" for group in self._twins.values()}}
