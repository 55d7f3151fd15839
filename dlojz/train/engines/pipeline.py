"""What all pipeline engines share: the model cut into stages, the groups, the losses, the weights.

Layer 3. Invariant: a rank holds the stages that the schedule's placement gives it and no other; the gradient of a step
is the mean over its global batch, whatever the schedule. Where the tensor axis has several ranks, each holds its part
of the stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.config import RunConfig
from dlojz.models.blocks import BlockList
from dlojz.pipeline.action import FORWARD, Action
from dlojz.pipeline.cuts import schedule_of, stage_bounds
from dlojz.pipeline.runtime import Boundary
from dlojz.pipeline.runtime_stages import boundaries_of, stage_modules
from dlojz.train.axes import Axes
from dlojz.train.engines.base import Engine, Inventory, make_optimizer, mean_loss, optimizer_states
from dlojz.train.engines.states import WEIGHTS
from dlojz.train.engines.tensor import TensorShare

StageKey = tuple[int, int]
"""A stage on a rank: (pipe, stage)."""


def bounds_of(config: RunConfig, model: BlockList, stages: int) -> tuple[int, ...]:
    """First block of each stage, and the number of blocks."""
    names = [type(block).__name__ for block in model.blocks]
    parameters = [sum(parameter.numel() for parameter in block.parameters()) for block in model.blocks]
    flops: Sequence[float] = ()
    if config.layout.partition == "flops":
        from dlojz.pipeline.block_weights import block_weights

        flops = [float(one) for one in block_weights(config, "flops").weights]
    return stage_bounds(config.layout, stages, names, parameters, flops)


class PipelineEngine(Engine):
    """One rank of a pipeline; subclasses run the schedule.

    Args:
        config: the run; its layout names the schedule and the cut.
        model: the whole model, with the same weights on every rank; only this rank's stages are kept.
        device: where to train.
    """

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        blocks = cast(BlockList, model)
        self.config, self.device = config, device
        layout = config.layout
        self.schedule = schedule_of(layout)
        self.bounds = bounds_of(config, blocks, self.schedule.stages)
        self.axes = Axes(layout, device)
        self.pp_rank = self.axes.pp_rank
        self.pp_group, self.dp_group = (cast(dist.ProcessGroup, self.axes.group(axis)) for axis in ("pp", "dp"))
        self._names = [name for name, _ in blocks.named_parameters()]
        self._shapes = [(tuple(one.shape), one.dtype) for one in blocks.parameters()]
        self.share = TensorShare(config, blocks, self.axes, mean_loss)
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
        self.build(blocks)

    def _boundaries(self, stages: Sequence[BlockList]) -> list[Boundary]:
        """What enters each stage, and last what leaves the model."""
        with self.share.pretending():
            return boundaries_of(stages, sample(self.config), compute=self._autocast_dtype)

    def build(self, blocks: BlockList) -> None:
        """Make what runs the schedule, and the optimizer; `blocks` is the whole model, of which no more is kept."""
        del blocks
        self.optimizer = make_optimizer(self.config, self.module.parameters())

    @property
    def _autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.config.precision == "bf16" else None

    @property
    def group_names(self) -> dict[str, str]:
        """Mesh axis of each process group of this rank, by the group's own name: for the probe of communication."""
        return self.axes.group_names

    def perform(self, action: Action, compute: Callable[[], None]) -> None:
        """Run the computation of one action; probes wrap this to time it."""
        with self.autocast() if action.kind == FORWARD else nullcontext():
            compute()

    def _perform(self, action: Action, compute: Callable[[], None]) -> None:
        """What a runtime is given: it looks `perform` up at each call, as a probe may have wrapped it since."""
        self.perform(action, compute)

    def take(self, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """What this rank needs of a micro-batch: inputs where it holds a first stage, targets where a last one."""
        held = {stage for _, stage in self.modules}
        nothing = inputs.new_empty(0)
        return inputs if 0 in held else nothing, targets if self.schedule.stages - 1 in held else nothing

    def run(self, samples: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Forward and backward of all micro-batches of this replica.

        Returns:
            A scalar; its mean over all ranks is the mean loss of the global batch. Ranks without a last stage give 0.
        """
        losses = self.run_schedule([inputs for inputs, _ in samples], [targets for _, targets in samples])
        self.reduce_gradients()
        layout = self.config.layout
        total = torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self.device)
        return total * layout.pp / layout.micro_batches

    def run_schedule(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Execute the schedule; the losses of the micro-batches whose last stage is here."""
        raise NotImplementedError

    def reduce_gradients(self) -> None:
        """Average the gradients of each stage over the replicas.

        Who: the dp ranks that hold the same stages. What: all gradients of one stage in one flat tensor, all-reduced
        (sum, then divided). How much: 4 bytes per parameter of the stage and step.
        """
        if self.config.layout.dp == 1:
            return
        for module in self.modules.values():
            average([parameter.grad for parameter in module.parameters()], self.dp_group)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of one micro-batch."""
        return self.share.loss(outputs, targets)

    def update(self) -> None:
        """One optimizer step on this rank's stages, then forget the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def inventory(self) -> Inventory:
        """What this rank holds of its stages."""
        parameters = list(self.module.parameters())
        return {
            "weights": [*parameters],
            "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
            "optimizer": optimizer_states(self.optimizer),
            "buffers": list(self.module.buffers()),
        }

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter of the model, broadcast by the rank that holds its stage; a collective call."""
        yield from self._from_owners(self.own_weights())

    def _from_owners(self, own: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """A tensor for every parameter of the model, broadcast by the rank that holds its stage; a collective call."""
        owners = {number: rank for rank, stage in self._stages() for number in range(*self.bounds[stage : stage + 2])}
        for name, (shape, dtype) in zip(self._names, self._shapes, strict=True):
            owner = owners[int(name.split(".")[1])]
            held = own.get(name)
            if held is None or (self.config.layout.tp > 1 and owner != self.pp_rank):
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
            else:
                tensor = self.share.whole(name, held).to(self.device).contiguous()
            # Who: all ranks, at the end of the run or for a checkpoint. What: one parameter. How much: its bytes.
            dist.broadcast(tensor, src=self.axes.world_rank(owner))
            yield name, tensor.cpu()

    def own_weights(self) -> dict[str, Tensor]:
        """This rank's parameters by their name in the whole model."""
        return {name: parameter.detach() for name, parameter, _ in self.named()}

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Parameters of this rank's stages by their name in the whole model; of a stage held twice, both copies."""
        for (_, stage), module in self.modules.items():
            for name, parameter in module.named_parameters():
                yield self._whole_name(name, stage), parameter, parameter

    def _whole_name(self, name: str, stage: int) -> str:
        _, number, rest = name.split(".", 2)
        return f"blocks.{int(number) + self.bounds[stage]}.{rest}"

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """As every engine; each tensor is broadcast by the rank that holds its stage."""
        yield from self._from_owners(self.own_weights() if kind == WEIGHTS else self.own_moments(kind))

    def own_moments(self, kind: str) -> dict[str, Tensor]:
        """One kind of the optimizer's states on this rank by their parameter's name in the whole model."""
        return {name: self.optimizer.state[updated][kind] for name, _, updated in self.named()}

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """As every engine; the two pipes of a bidirectional schedule count as two replicas."""
        for (pipe, stage), module in self.modules.items():
            for name, buffer in module.named_buffers():
                yield self.axes.dp_rank * self.schedule.pipes + pipe, self._whole_name(name, stage), buffer

    def _stages(self) -> Iterator[tuple[int, int]]:
        """(pipeline rank, stage) of the first pipe: where each stage's weights are asked for."""
        for stage, rank in enumerate(self.schedule.placement[0]):
            yield rank, stage


def average(gradients: Sequence[Tensor | None], group: dist.ProcessGroup, ranks: int | None = None) -> None:
    """Mean (or with `ranks=1` sum) of the gradients over a group, in place, as one flat all-reduce."""
    held = [gradient for gradient in gradients if gradient is not None]
    if not held:
        return
    flat = torch.cat([gradient.reshape(-1) for gradient in held])
    dist.all_reduce(flat, group=group)
    flat /= ranks or group.size()
    for gradient, part in zip(held, flat.split([gradient.numel() for gradient in held]), strict=True):
        gradient.copy_(part.view_as(gradient))


def sample(config: RunConfig) -> Tensor:
    """One micro-batch's input, of the right shape and type; its values do not matter."""
    from dlojz import models

    if models.spec(config.model).family == "text":
        return torch.zeros(config.layout.micro_batch, config.sequence_length or 1, dtype=torch.long)
    return torch.zeros(config.layout.micro_batch, 3, config.image_size or 1, config.image_size or 1)
