"""`torch.distributed.pipelining`: its own schedules, and any other that its runtime can execute.

Layer 3. Invariant: the order that is executed is the one that is simulated.

Source: torch 2.13, `torch/distributed/pipelining/schedules.py` and `stage.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from dlojz.models.blocks import BlockList
from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.train.engines.pipeline import PipelineEngine
from dlojz.train.engines.torch_schedules import torch_schedule


class Performer(Protocol):
    """Whoever runs the computation of an action: an engine."""

    def perform(self, action: Action, compute: Callable[[], None]) -> None:
        """Run it."""


class TorchPipelineEngine(PipelineEngine):
    """torch's pipeline runtime over the pipeline axis."""

    def build(self, blocks: BlockList) -> None:
        super().build(blocks)
        self._losses: list[Tensor] = []
        stages = [self._stage(stage) for _, stage in sorted(self.modules)]
        self._schedule = torch_schedule(self.schedule, stages, self._loss)

    def _stage(self, stage: int) -> PipelineStage:
        """A stage whose shapes are known beforehand, so that no rank has to ask another."""
        module = self.modules[0, stage]
        enters, leaves = (
            torch.empty(one.shape, dtype=one.dtype, device="meta") for one in self.boundaries[stage : stage + 2]
        )
        made = PipelineStage(
            module,
            stage,
            self.schedule.stages,
            self.device,
            input_args=(enters.requires_grad_(stage > 0),),
            output_args=(leaves.requires_grad_(),),
            group=self.pp_group,
        )
        observe(made, stage, self)
        return made

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(outputs, targets)
        self._losses.append(loss.detach())
        return loss

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        self._losses = []
        held = {stage for _, stage in self.modules}
        # torch splits a batch into its micro-batches again, in the same order.
        given = (torch.cat(list(inputs)),) if 0 in held else ()
        asked = {"target": torch.cat(list(targets))} if self.schedule.stages - 1 in held else {}
        self._schedule.step(*given, **asked, return_outputs=False)
        return self._losses


def observe(made: Any, stage: int, engine: Performer) -> None:
    """Let the engine perform what a stage computes: then probes time torch's actions as they time the lab's own."""

    def through(
        method: Callable[..., Any], kind_of: Callable[..., str], micro_batch: int, *args: Any, **kwargs: Any
    ) -> Any:
        answer: list[Any] = []
        action = Action(kind_of(**kwargs), stage, micro_batch)
        engine.perform(action, lambda: answer.append(method(micro_batch, *args, **kwargs)))
        return answer[0]

    for name, kind_of in (
        ("forward_one_chunk", lambda **_: FORWARD),
        ("backward_one_chunk", lambda full_backward=True, **_: BACKWARD if full_backward else BACKWARD_INPUT),
        ("backward_weight_one_chunk", lambda **_: BACKWARD_WEIGHT),
    ):
        setattr(made, name, partial(through, getattr(made, name), kind_of))
