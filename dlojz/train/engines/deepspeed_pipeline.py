"""DeepSpeed's `PipelineModule`: 1F1B over the pipeline axis, data parallelism (ZeRO-0 or ZeRO-1) over the other.

Layer 3. Invariant: DeepSpeed executes its own instruction list, `TrainSchedule`; only its last instruction, the update,
is held back until the loss is known to be finite on every rank. DeepSpeed's `train_batch` would do both at once.

Source: DeepSpeed 0.19, `runtime/pipe/engine.py`, `module.py`, `schedule.py`; Narayanan et al. 2019, "PipeDream" (SOSP),
for 1F1B.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from functools import partial
from typing import Any, cast

from torch import Tensor

from dlojz.models.blocks import BlockList
from dlojz.pipeline.action import BACKWARD, FORWARD, Action
from dlojz.train.deepspeed_json import deepspeed_json
from dlojz.train.engines.base import Inventory, make_optimizer
from dlojz.train.engines.deepspeed import DeepSpeedEngine
from dlojz.train.engines.deepspeed_states import whole_state
from dlojz.train.engines.pipeline import PipelineEngine
from dlojz.train.engines.states import Source


class DeepSpeedPipelineEngine(PipelineEngine, DeepSpeedEngine):
    """DeepSpeed's pipeline, with the partition method of the layout."""

    def build(self, blocks: BlockList) -> None:
        os.environ.setdefault("DS_ACCELERATOR", self.device.type)
        os.environ.setdefault("LOCAL_RANK", str(self.device.index or 0))  # DeepSpeed insists on it
        import deepspeed
        from deepspeed.pipe import PipelineModule

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # inference only, compiles for 40 s
        deepspeed.init_distributed(dist_init_required=False)  # over the groups that there are already
        layout = self.config.layout
        with redirect_stdout(io.StringIO()):  # it prints its partition; `dlojz partition` shows it
            pipe: Any = PipelineModule(
                layers=list(blocks.blocks),
                num_stages=layout.pp,
                loss_fn=self.loss,
                partition_method=layout.partition,
                activation_checkpoint_interval=int(layout.checkpointing == "full"),
            )
        if tuple(pipe.parts) != self.bounds:
            raise RuntimeError(f"DeepSpeed has cut the model at {pipe.parts}, but {self.bounds} was predicted.")
        self.module = pipe
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=pipe,
            optimizer=make_optimizer(self.config, pipe.parameters()),
            config=deepspeed_json(self.config),
            dist_init_required=False,
        )
        self._observe(self.model)

    def _observe(self, engine: Any) -> None:
        """Let `perform` run DeepSpeed's forward and backward instructions, numbered as they come."""
        from deepspeed.runtime.pipe.schedule import BackwardPass, ForwardPass

        self._count = {FORWARD: 0, BACKWARD: 0}

        def through(kind: str, instruction: Callable[..., None], pipeline: Any, **operands: Any) -> None:
            action = Action(kind, self.pp_rank, self._count[kind])
            self._count[kind] += 1
            self.perform(action, lambda: instruction(pipeline, **operands))

        known = dict(engine._INSTRUCTION_MAP)
        known[ForwardPass] = _Unbound(partial(through, FORWARD, known[ForwardPass]))
        known[BackwardPass] = _Unbound(partial(through, BACKWARD, known[BackwardPass]))
        engine._INSTRUCTION_MAP = known

    @property
    def group_names(self) -> dict[str, str]:
        grid: Any = self.model.grid
        groups = {"pp": grid.get_pipe_parallel_group(), "dp": grid.get_data_parallel_group()}
        # DeepSpeed's "model parallel" ranks are all that share a replica: here, those of a pipeline.
        named = {str(group.group_name): axis for axis, group in groups.items()}
        return {**super().group_names, str(grid.get_model_parallel_group().group_name): "pp", **named}

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext()  # the weights themselves are bf16

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        # Who: neighbouring stages; dp ranks of a stage. What: one boundary activation or its gradient per micro-batch,
        # blocking; then the stage's gradients, all-reduced. How much: see dlojz.predict.communication.
        if self.config.precision == "bf16":
            inputs = [one.bfloat16() if one.is_floating_point() else one for one in inputs]
        engine: Any = self.model
        self._count.update({FORWARD: 0, BACKWARD: 0})
        engine.module.train()
        engine.set_dataiterator(iter(list(zip(inputs, targets, strict=True))))
        engine.total_loss = engine.total_additional_losses = None
        engine._compute_loss = True
        engine._exec_schedule(_WithoutUpdate(engine._train_schedule()))
        return [engine.total_loss] if engine.is_last_stage() else []

    def reduce_gradients(self) -> None:
        """Nothing: DeepSpeed's schedule ends with its own reduction."""

    def update(self) -> None:
        cast(Any, self.model)._exec_optimizer_step()

    def inventory(self) -> Inventory:
        return DeepSpeedEngine.inventory(self)

    def own_weights(self) -> dict[str, Tensor]:
        return {name: parameter.detach().float() for name, parameter, _ in self.named()}

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """As every engine: DeepSpeed numbers the blocks of a stage as the model does."""
        for name, parameter in self.module.named_parameters():
            yield f"blocks.{name}", parameter, parameter

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """As every pipeline; a stage's own ranks make each tensor whole first."""
        own = {name: whole_state(self.optimizer, parameter, kind) for name, parameter, _ in self.named()}
        yield from self._from_owners(own)

    def restore(self, source: Source) -> None:
        """As DeepSpeed's other engines."""
        DeepSpeedEngine.restore(self, source)

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """As every engine."""
        for name, buffer in self.module.named_buffers():
            yield self.axes.dp_rank, f"blocks.{name}", buffer

    def close(self) -> None:
        DeepSpeedEngine.close(self)


class _Unbound:
    """DeepSpeed binds an instruction to its engine with `MethodType`, which wants something callable."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._function(*args, **kwargs)


class _WithoutUpdate:
    """A schedule of DeepSpeed's but for its optimizer step."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule

    def num_pipe_buffers(self) -> int:
        """As many buffers as the schedule wants."""
        return int(self._schedule.num_pipe_buffers())

    def __iter__(self) -> Iterator[list[Any]]:
        from deepspeed.runtime.pipe.schedule import OptimizerStep

        for commands in self._schedule:
            yield [command for command in commands if not isinstance(command, OptimizerStep)]
