"""`torch.distributed.pipelining`: its own schedules, and any other that its runtime can execute.

Layer 3. Invariant: the order that is executed is the one that is simulated.

Source: torch 2.13, `torch/distributed/pipelining/schedules.py` and `stage.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage

from dlojz.models.blocks import BlockList
from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.pipeline.runtime import Boundary
from dlojz.pipeline.runtime_stages import boundaries_of, stage_modules
from dlojz.predict.shapes import build_on_meta
from dlojz.tensor.axis import TensorAxis
from dlojz.tensor.split import split_model
from dlojz.train.engines.base import Inventory, local, locals_of
from dlojz.train.engines.fsdp2 import shard
from dlojz.train.engines.pipeline import PipelineEngine, average, sample
from dlojz.train.engines.torch_schedules import torch_schedule


class Performer(Protocol):
    """Whoever runs the computation of an action: an engine."""

    def perform(self, action: Action, compute: Callable[[], None]) -> None:
        """Run it."""


class TorchPipelineEngine(PipelineEngine):
    """torch's pipeline runtime over the pipeline axis."""

    def build(self, blocks: BlockList) -> None:
        if self.config.layout.zero and self.axes.mesh is not None:
            # torch's runtime knows FSDP2: a stage's weights are all-gathered once per step, kept for all micro-batches,
            # and their gradients reduce-scattered after the last one.
            for module in self.modules.values():
                shard(self.config, module, self.axes.mesh["dp"])
        super().build(blocks)
        self._losses: list[Tensor] = []
        stages = [self._stage(stage) for _, stage in sorted(self.modules)]
        self._schedule = torch_schedule(self.schedule, stages, self._loss)

    def _boundaries(self, stages: Sequence[BlockList]) -> list[Boundary]:
        first, *others = self._shapes_between(stages)
        if self.config.layout.zero and self._autocast_dtype is not None:  # FSDP2 casts weights and inputs alike
            others = [Boundary(one.shape, self._autocast_dtype) for one in others]
        return [first, *others]

    def _shapes_between(self, stages: Sequence[BlockList]) -> list[Boundary]:
        if self.config.layout.tp == 1:
            return super()._boundaries(stages)
        # DTensors cannot be asked for shapes without the other ranks; the lab's own split has the same ones.
        config, axis = self.config, self.share.axis
        pretended = TensorAxis(rank=axis.rank, size=axis.size, sequence_parallel=axis.sequence_parallel)
        built = build_on_meta(config.model, config.image_size, config.sequence_length, config.num_classes)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            split = split_model(built.to_empty(device="cpu"), pretended)
            one = fake.from_tensor(sample(config))
            return boundaries_of(stage_modules(split, self.bounds), one, compute=self._autocast_dtype)

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

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.config.layout.zero else super().autocast()  # FSDP2 casts what it gathers

    def reduce_gradients(self) -> None:
        if self.config.layout.zero:
            return  # FSDP2 has done so
        self.share.settle(self.module.parameters())
        if self.config.layout.dp > 1:
            for module in self.modules.values():
                gradients = (parameter.grad for parameter in module.parameters())
                average([local(gradient) for gradient in gradients if gradient is not None], self.dp_group)

    def inventory(self) -> Inventory:
        return locals_of(super().inventory())

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
