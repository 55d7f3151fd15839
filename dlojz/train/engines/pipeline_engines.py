"""Pipeline engines: the lab's runtime, synchronous and asynchronous, and torch's.

A rank holds the stages that the schedule's placement gives it; the gradient of a step is the mean over its global
batch, whatever the schedule, whose own list is executed action for action. Where the tensor axis has several ranks,
each holds its part of the stages.

Asynchronous pipelines update each stage while micro-batches are in flight, by plain SGD. A step of the loop is one run
of the schedule over the step's micro-batches, filled at its start and drained at its end, with all its updates inside;
so a loss that is not finite is known only after updates with it.

torch executes a schedule by its own class where it ships one, else by its table runtime (`_PipelineScheduleRuntime
._load_csv`), a table of actions with one row per rank. What is private of torch's is used in this file and nowhere
else. Source: torch 2.13, `torch/distributed/pipelining/schedules.py` and `stage.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining import schedules as torchs_own
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, _PipelineScheduleRuntime

from dlojz.base.errors import LabError
from dlojz.by_hand.tensor.axis import TensorAxis
from dlojz.by_hand.tensor.split import split_model
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList, mean_loss, untie
from dlojz.models.foreign.names import is_elsewhere
from dlojz.models.meta import sample_inputs
from dlojz.pipeline.exchange_formats import to_csv, torch_refusal
from dlojz.pipeline.runtime import AsynchronousRuntime, Boundary, PipelineRuntime, boundaries_of, stage_modules
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, schedule_of
from dlojz.prediction.shapes import bounds_of, build_on_meta
from dlojz.train.axes import Axes
from dlojz.train.engines.base import WEIGHTS, Engine, Inventory, local, make_optimizer
from dlojz.train.engines.tensor_engines import TensorShare

StageKey = tuple[int, int]
"""A stage on a rank: (pipe, stage)."""


class PipelineEngine(Engine):
    """Engine of one rank of a pipeline; subclasses run the schedule.

    Args:
        config: the run; its layout names the schedule and the cut.
        model: the whole model, with the same weights on every rank; only this rank's stages stay.
    """

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        blocks = cast(BlockList, model)
        self.config, self.device = config, device
        layout = config.layout
        self.schedule = schedule_of(layout)
        self.bounds = bounds_of(config)
        self.axes = Axes(layout, device)
        self.pp_rank = self.axes.pp_rank
        self.pp_group, self.dp_group = (cast(dist.ProcessGroup, self.axes.group(axis)) for axis in ("pp", "dp"))
        self._names = [name for name, _ in blocks.named_parameters()]
        self._shapes = [(tuple(parameter.shape), parameter.dtype) for parameter in blocks.parameters()]
        self.share = TensorShare(config, blocks, self.axes, mean_loss)
        self._first_names = untie(blocks)
        if is_elsewhere(config.model):
            make_boundaries_contiguous(blocks, self.bounds)
        stages = stage_modules(blocks, self.bounds)
        self.boundaries = self._boundaries(stages)
        self.modules: dict[StageKey, BlockList] = {
            (pipe, stage): stages[stage].to(device)
            for pipe, ranks in enumerate(self.schedule.placement)
            for stage, rank in enumerate(ranks)
            if rank == self.pp_rank
        }
        self.module = nn.ModuleList(self.modules.values())
        self.model = self.module
        self.offload = None
        self._tied_group = self._make_tied_group()
        self.build(blocks)

    def _boundaries(self, stages: Sequence[BlockList]) -> list[Boundary]:
        """Shapes of what enters each stage, and last of what leaves the model."""
        with self.share.pretending():
            return boundaries_of(stages, sample(self.config), compute=self._autocast_dtype)

    def build(self, blocks: BlockList) -> None:
        """Make the runtime and the optimizer; `blocks` is the whole model, which is not kept."""
        del blocks
        self.optimizer = make_optimizer(self.config, self.module.parameters())

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.config.precision == "bf16" else None

    def perform(self, action: Action, compute: Callable[[], None]) -> None:
        """Run the computation of one action; probes wrap this to time it."""
        with self.autocast() if action.kind == FORWARD else nullcontext():
            compute()

    def _perform(self, action: Action, compute: Callable[[], None]) -> None:
        """Call `perform` through the instance, as a probe may have wrapped it since the runtime was made."""
        self.perform(action, compute)

    def take(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Select this rank's part of a micro-batch: inputs where it holds a first stage, targets where a last one."""
        stages = {stage for _, stage in self.modules}
        nothing = inputs.new_empty(0)
        return inputs if 0 in stages else nothing, targets if self.schedule.stages - 1 in stages else nothing

    def run(self, samples: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Run forward and backward of all micro-batches of this replica.

        Returns:
            A scalar; its mean over all ranks is the mean loss of the global batch. Ranks without a last stage give 0.
        """
        losses = self.run_schedule([inputs for inputs, _ in samples], [targets for _, targets in samples])
        self.reduce_gradients()
        layout = self.config.layout
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)
        # The mean over all ranks counts all pp ranks of a pipeline; only those with a last stage have losses.
        return total * layout.pp / layout.micro_batches

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Execute the schedule; return the losses of the micro-batches whose last stage is here."""
        raise NotImplementedError

    def reduce_gradients(self) -> None:
        """Average the gradients of each stage over the replicas.

        Who: the dp ranks that hold the same stages. What: all gradients of one stage in one flat tensor, all-reduced
        (sum, then divided). How much: 4 bytes per parameter of the stage and step.
        """
        self.add_tied_gradients()
        if self.config.layout.dp == 1:
            return
        for module in self.modules.values():
            average([parameter.grad for parameter in module.parameters()], self.dp_group)

    def add_tied_gradients(self) -> None:
        """Add the gradients of the two copies of a tied embedding, on the first stage and in the head of the last.

        Who: the ranks of these two stages, once per step. What: the gradient of the embedding, all-reduced (sum). How
        much: 4 bytes × V × D, or this rank's share of them; nothing is sent where one rank holds both.

        Source: Narayanan et al. 2021 (arXiv 2104.04473), §2.3, and Megatron-LM's embedding group.
        """
        copies: dict[str, list[Tensor]] = {}
        for name, parameter, _ in self.named():
            if name in self._first_names.values() and parameter.grad is not None:
                copies.setdefault(name, []).append(local(parameter.grad))
        for gradient, *twin_gradients in copies.values():
            for twin in twin_gradients:
                # Two copies on one rank: the sum is in both, and nothing is sent.
                twin.copy_(gradient.add_(twin))
            if self._tied_group is not None:
                dist.all_reduce(gradient, group=self._tied_group)

    def _make_tied_group(self) -> dist.ProcessGroup | None:
        """Make the group of the two ranks that hold a copy of a tied embedding each; None for all other ranks."""
        first_rank, last_rank = self.schedule.placement[0][0], self.schedule.placement[0][-1]
        if not self._first_names or first_rank == last_rank or self.schedule.pipes > 1:
            return None
        layout, tied_group = self.config.layout, None
        for offset in range(layout.dp * layout.tp):
            ranks = [self.axes.world_rank(pp_rank) + offset for pp_rank in (first_rank, last_rank)]
            # All ranks make every group, in the same order, though each is in one at most.
            group = dist.new_group(ranks)
            tied_group = group if dist.get_rank() in ranks else tied_group
        return tied_group

    @property
    def group_names(self) -> dict[str, str]:
        names = super().group_names
        return names if self._tied_group is None else {**names, str(self._tied_group.group_name): "tied"}

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter of the model, broadcast by the rank that holds its stage; a collective call."""
        yield from self._from_owners(self.own_weights())

    def _from_owners(self, local_tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """A tensor for every parameter of the model, broadcast by the rank that holds its stage; a collective call."""
        owners = {number: rank for rank, stage in self._stages() for number in range(*self.bounds[stage : stage + 2])}
        for name, (shape, dtype) in zip(self._names, self._shapes, strict=True):
            owner = owners[int(name.split(".")[1])]
            local_tensor = local_tensors.get(name)
            # A tied copy on another stage stays out of the gathering, which is the owner's tensor ranks' alone.
            if local_tensor is None or (self.config.layout.tp > 1 and owner != self.pp_rank):
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            else:
                tensor = self.share.whole(name, local_tensor).to(self.device).contiguous()
            # Who: all ranks, at the end of the run or for a checkpoint. What: one parameter. How much: its bytes.
            dist.broadcast(tensor, src=self.axes.world_rank(owner))
            yield name, tensor.cpu()

    def own_weights(self) -> dict[str, Tensor]:
        """Return this rank's parameters by their name in the whole model."""
        return {name: parameter.detach() for name, parameter, _ in self.named()}

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the parameters of this rank's stages by their name in the whole model; both copies of a twin stage.

        The copy of a tied embedding in the last stage has the embedding's name.
        """
        for (_, stage), module in self.modules.items():
            for name, parameter in module.named_parameters():
                yield self._whole_name(name, stage), parameter, parameter

    def _whole_name(self, name: str, stage: int) -> str:
        _, number, suffix = name.split(".", 2)
        full_name = f"blocks.{int(number) + self.bounds[stage]}.{suffix}"
        return self._first_names.get(full_name, full_name)

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield one kind of state; each tensor is broadcast by the rank that holds its stage."""
        yield from self._from_owners(self.own_weights() if kind == WEIGHTS else self.own_moments(kind))

    def own_moments(self, kind: str) -> dict[str, Tensor]:
        """Return one kind of the optimizer's states on this rank by their parameter's name in the whole model."""
        return {name: self.optimizer.state[updated][kind] for name, _, updated in self.named()}

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield this rank's buffers; the two pipes of a bidirectional schedule count as two replicas."""
        for (pipe, stage), module in self.modules.items():
            for name, buffer in module.named_buffers():
                yield self.axes.dp_rank * self.schedule.pipes + pipe, self._whole_name(name, stage), buffer

    def _stages(self) -> Iterator[tuple[int, int]]:
        """(pipeline rank, stage) of the first pipe, which provides each stage's weights."""
        for stage, rank in enumerate(self.schedule.placement[0]):
            yield rank, stage


class _ContiguousGradient(torch.autograd.Function):
    """Identity whose gradient is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def make_boundaries_contiguous(blocks: BlockList, bounds: Sequence[int]) -> None:
    """Make what passes between two stages contiguous, and its gradient; the blocks of the catalogue give nothing else.

    Only contiguous tensors can be sent: a convolution or a permutation may give others, channels last.
    """
    for bound in bounds[1:-1]:
        blocks.blocks[bound - 1].register_forward_hook(lambda _, __, output: output.contiguous())
        blocks.blocks[bound].register_forward_pre_hook(lambda _, inputs: (_ContiguousGradient.apply(inputs[0]),))


def average(gradients: Sequence[Tensor | None], group: dist.ProcessGroup, ranks: int | None = None) -> None:
    """Average (or with `ranks=1` sum) the gradients over a group, in place, as one flat all-reduce."""
    tensors = [gradient for gradient in gradients if gradient is not None]
    if not tensors:
        return
    # One message instead of one per parameter.
    flat = torch.cat([gradient.reshape(-1) for gradient in tensors])
    dist.all_reduce(flat, group=group)
    flat /= ranks or group.size()
    for gradient, part in zip(tensors, flat.split([gradient.numel() for gradient in tensors]), strict=True):
        gradient.copy_(part.view_as(gradient))


def sample(config: RunConfig) -> Tensor:
    """Make one micro-batch's input, of the right shape and type, without values."""
    return sample_inputs(
        config.built_model,
        config.layout.micro_batch,
        image_size=config.image_size,
        sequence_length=config.sequence_length,
        device="cpu",
    )


class ByHandPipelineEngine(PipelineEngine):
    """Engine of the lab's runtime over the pipeline axis."""

    def build(self, blocks: BlockList) -> None:
        super().build(blocks)
        self._twins = self._twin_groups()
        self._runtime = PipelineRuntime(
            self.schedule, self.modules, self.boundaries, self.loss, group=self.pp_group, perform=self._perform
        )

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        return self._runtime.step(inputs, targets)

    def reduce_gradients(self) -> None:
        """Add up the two copies of each stage of a bidirectional schedule, then average over the replicas.

        Who: the two ranks that hold a stage. What: its gradients in one flat tensor, all-reduced (sum). How much: 4
        bytes per parameter of the stage and step.
        """
        for stage, group in sorted(self._twins.items()):
            module = next(module for (_, number), module in self.modules.items() if number == stage)
            average([parameter.grad for parameter in module.parameters()], group, ranks=1)
        super().reduce_gradients()

    def _twin_groups(self) -> dict[int, dist.ProcessGroup]:
        """Per stage of this rank, the group of the two ranks that hold it; empty where there is one pipe."""
        if self.schedule.pipes == 1:
            return {}
        layout, twin_groups = self.config.layout, {}
        for stage in range(self.schedule.stages):
            for offset in range(layout.dp * layout.tp):
                ranks = sorted({self.axes.world_rank(pipe[stage]) + offset for pipe in self.schedule.placement})
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks and len(ranks) > 1:
                    twin_groups[stage] = group
        return twin_groups

    @property
    def group_names(self) -> dict[str, str]:
        return {**super().group_names, **{str(group.group_name): "twins" for group in self._twins.values()}}


class AsynchronousPipelineEngine(PipelineEngine):
    """Engine of the lab's asynchronous runtime over the pipeline axis."""

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
        """Nothing: the schedule has updated already."""

    def inventory(self) -> Inventory:
        inventory = super().inventory()
        versions = [version for stage in self._runtime.weights.values() for version in stage.kept.values()]
        return {
            **inventory,
            "weights": [*inventory["weights"], *(weight for version in versions for weight in version.values())],
        }


def torch_schedule(
    schedule: Schedule, stages: Sequence[PipelineStage], loss: Callable[[Tensor, Tensor], Tensor]
) -> Any:
    """Make torch's object whose `step()` executes the schedule.

    Args:
        schedule: any that torch can execute.
        loss: mean loss of one micro-batch.

    Raises:
        LabError: if torch's runtime cannot execute it, with the reason.
    """
    refusal = torch_refusal(schedule)
    if refusal is not None:
        raise LabError(refusal)
    entry = SCHEDULES.get(schedule.name)
    options: dict[str, Any] = {"n_microbatches": schedule.micro_batches, "loss_fn": loss, "scale_grads": True}
    if entry is not None and entry.torch_class is not None:
        shipped = getattr(torchs_own, entry.torch_class)
        # torch's own 1F1B refuses fewer micro-batches than stages, though their order is the same as any other's.
        if not (shipped is torchs_own.Schedule1F1B and schedule.micro_batches < schedule.stages):
            return shipped(stages[0] if issubclass(shipped, PipelineScheduleSingle) else list(stages), **options)
    runtime = _PipelineScheduleRuntime(list(stages), **options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "schedule.csv"
        path.write_text(to_csv(schedule), encoding="utf-8")
        # Only the computations: torch adds the messages between them.
        runtime._load_csv(str(path), format="compute_only")
    return runtime


class TorchPipelineEngine(PipelineEngine):
    """Engine of torch's pipeline runtime over the pipeline axis."""

    def build(self, blocks: BlockList) -> None:
        if self.config.layout.zero and self.axes.mesh is not None:
            from dlojz.train.engines.sharded import shard  # FSDP2, which the torch of Colossal-AI's environment lacks

            # torch's runtime knows FSDP2: a stage's weights are all-gathered once per step, kept for all micro-batches,
            # and their gradients reduce-scattered after the last one.
            for module in self.modules.values():
                shard(self.config, module, self.axes.mesh["dp"])
        super().build(blocks)
        self._losses: list[Tensor] = []
        stages = [self._stage(stage) for _, stage in sorted(self.modules)]
        self._schedule = torch_schedule(self.schedule, stages, self._loss)

    def _boundaries(self, stages: Sequence[BlockList]) -> list[Boundary]:
        if self.config.layout.tp > 1:
            input_boundary, *boundaries = self._split_boundaries()
        else:
            input_boundary, *boundaries = super()._boundaries(stages)
        if self.config.layout.zero and self._autocast_dtype is not None:  # FSDP2 casts weights and inputs alike
            boundaries = [Boundary(boundary.shape, self._autocast_dtype) for boundary in boundaries]
        return [input_boundary, *boundaries]

    def _split_boundaries(self) -> list[Boundary]:
        # DTensors cannot be asked for shapes without the other ranks; the lab's own split has the same ones.
        config, axis = self.config, self.share.axis
        pretended = TensorAxis(rank=axis.rank, size=axis.size, sequence_parallel=axis.sequence_parallel)
        built = build_on_meta(config.built_model, config.image_size, config.sequence_length, config.num_classes)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            split = split_model(built.to_empty(device="cpu"), pretended)
            micro_batch = fake.from_tensor(sample(config))
            return boundaries_of(stage_modules(split, self.bounds), micro_batch, compute=self._autocast_dtype)

    def _stage(self, stage: int) -> PipelineStage:
        """A stage with known shapes, so that no rank has to ask another."""
        module = self.modules[0, stage]
        enters, leaves = (
            torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
            for boundary in self.boundaries[stage : stage + 2]
        )
        pipeline_stage = PipelineStage(
            module,
            stage,
            self.schedule.stages,
            self.device,
            input_args=(enters.requires_grad_(stage > 0),),
            output_args=(leaves.requires_grad_(),),
            group=self.pp_group,
        )
        observe(pipeline_stage, stage, self)
        return pipeline_stage

    def _loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss = self.loss(outputs, targets)
        self._losses.append(loss.detach())
        return loss

    def autocast(self) -> AbstractContextManager[object]:
        return nullcontext() if self.config.layout.zero else super().autocast()  # FSDP2 casts what it gathers

    def reduce_gradients(self) -> None:
        if self.config.layout.zero:
            self.add_tied_gradients()
            return  # FSDP2 has averaged them
        self.share.settle(self.module.parameters())
        self.add_tied_gradients()
        if self.config.layout.dp > 1:
            for module in self.modules.values():
                gradients = (parameter.grad for parameter in module.parameters())
                average([local(gradient) for gradient in gradients if gradient is not None], self.dp_group)

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        self._losses = []
        stages = {stage for _, stage in self.modules}
        # torch splits a batch into its micro-batches again, in the same order.
        input_args = (torch.cat(list(inputs)),) if 0 in stages else ()
        target_args = {"target": torch.cat(list(targets))} if self.schedule.stages - 1 in stages else {}
        self._schedule.step(*input_args, **target_args, return_outputs=False)
        return self._losses


def observe(torch_stage: Any, stage: int, engine: Any) -> None:
    """Route the actions of torch’s stage through the engine’s `perform`, so that probes time them as the lab’s own."""

    def through(
        method: Callable[..., Any], kind_of: Callable[..., str], micro_batch: int, *args: Any, **kwargs: Any
    ) -> Any:
        # `perform` returns nothing: the method's result comes out through this list.
        answer: list[Any] = []
        action = Action(kind_of(**kwargs), stage, micro_batch)
        engine.perform(action, lambda: answer.append(method(micro_batch, *args, **kwargs)))
        return answer[0]

    for name, kind_of in (
        ("forward_one_chunk", lambda **_: FORWARD),
        ("backward_one_chunk", lambda full_backward=True, **_: BACKWARD if full_backward else BACKWARD_INPUT),
        ("backward_weight_one_chunk", lambda **_: BACKWARD_WEIGHT),
    ):
        setattr(torch_stage, name, partial(through, getattr(torch_stage, name), kind_of))
