"""The interface of an engine, which is also the plainest engine: one process, no communication.

Layer 3. Invariant: a step is forward and backward of every micro-batch, then one update; the gradient of a step is the
mean over its global batch, whatever the number of micro-batches and replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlojz.checkpoint.reading import COUNT
from dlojz.config import RunConfig
from dlojz.footprint import Category, Overlap
from dlojz.optim.lamb import Lamb
from dlojz.optimizer_update import IN_PASSES
from dlojz.train.axes import Axes
from dlojz.train.engines.passes import PassOptimizer
from dlojz.train.engines.states import MOMENTS, WEIGHTS, Source, as_laid, begun, counted, put
from dlojz.train.engines.tensor import TensorShare
from dlojz.train.offload import ActivationOffload

Inventory = dict[Category, list[Tensor]]
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    # One after the other; within the passes, one parameter at a time.
    **{form: {"foreach": False, "fused": False} for form in ("for_loop", *IN_PASSES)},
}
"""How torch's optimizers are told the form of an update."""


def make_optimizer(config: RunConfig, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of a run; every engine takes its update rule from here, but for those that communicate."""
    rate, decay, form = config.learning_rate, config.weight_decay, FORMS[config.update]
    held = by_mesh(parameters)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(held, lr=rate, weight_decay=decay, **form)
    if config.optimizer == "lamb":
        return Lamb(held, lr=rate, weight_decay=decay)
    momentum = 0.9 if config.optimizer == "momentum" else 0.0
    return torch.optim.SGD(held, lr=rate, momentum=momentum, weight_decay=decay, **form)


def by_mesh(parameters: Iterable[Tensor]) -> list[Any]:
    """Parameters as an optimizer takes them: in groups where some are DTensors of other meshes than others.

    On a GPU an optimizer updates a group at a stroke, and DTensors cannot be mixed so, among themselves or with plain
    tensors.
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    held = list(groups.values())
    return held[0] if len(held) == 1 else [{"params": group} for group in held]


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(held: Inventory) -> Inventory:
    """An inventory of this rank's shards."""
    return {category: [local(tensor) for tensor in tensors] for category, tensors in held.items()}


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in fp32, averaged over samples (and over positions of a text)."""
    return F.cross_entropy(logits.float().reshape(-1, logits.shape[-1]), targets.reshape(-1))


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors an optimizer keeps from step to step."""
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def make_offload(config: RunConfig, module: nn.Module) -> ActivationOffload | None:
    """What moves the activations of a model to host memory; None where they stay.

    Args:
        config: the run.
        module: the model, once the engine has put its own hooks on it.
    """
    return ActivationOffload(module) if config.layout.offload == "activations" else None


class Engine:
    """One replica of the model: forward, backward and update, with nothing between replicas.

    Args:
        config: the run; its layout gives the number of micro-batches.
        model: the whole model, with the same weights on every rank.
        device: where to train.
    """

    left_out = ""
    """What this engine could not take up from the checkpoint that it went on from, in words."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.axes = Axes(config.layout, device)
        self.share = TensorShare(config, model, self.axes, mean_loss)
        self.module = model
        self.model = self.wrap(model)
        self.optimizer = self.make_optimizer()
        self.offload = make_offload(config, model)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Lay the model over the ranks, on the device; here it stays whole."""
        return module.to(self.device)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """What updates the model once it is laid over the ranks."""
        if self.config.update in IN_PASSES:
            return PassOptimizer(self.module, self.config, partial(make_optimizer, self.config))
        return make_optimizer(self.config, self.model.parameters())

    def finish(self) -> None:
        """Make the updates that are left to the next forward pass: before weights or states are read."""
        if isinstance(self.optimizer, PassOptimizer):
            self.optimizer.finish()

    def autocast(self) -> AbstractContextManager[object]:
        """How forward computes in bf16 where the weights are fp32."""
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def forward(self, inputs: Tensor, targets: Tensor, *, last: bool) -> Tensor:
        """Mean loss of one micro-batch; `last` says that no other follows in this step."""
        del last  # only engines that communicate need to know
        with self.autocast(), self.activations():
            logits = self.model(inputs)
        return self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of one micro-batch, from what the model gives on this rank."""
        return self.share.loss(logits, targets)

    @property
    def group_names(self) -> dict[str, str]:
        """Mesh axis of each process group of this rank, by the group's own name: for the probe of communication."""
        return self.axes.group_names

    def activations(self) -> AbstractContextManager[object]:
        """What is around the forward pass of the model: its activations leave the device where the layout says so."""
        return self.offload or nullcontext()

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add this micro-batch's share of the gradient."""
        del last
        (loss / self.config.layout.micro_batches).backward()

    def update(self) -> None:
        """One optimizer step, then forget the gradients."""
        self.share.settle(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def inventory(self) -> Inventory:
        """The tensors this rank holds from step to step, by category; a probe turns them into bytes."""
        parameters = list(self.model.parameters())
        return locals_of(
            {
                "weights": [*parameters],
                "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
                "optimizer": optimizer_states(self.optimizer),
                "buffers": list(self.module.buffers()),
            }
        )

    def communications(self) -> Overlap | None:
        """How the last step's communication lay beside its backward pass; None where an engine cannot tell.

        To be asked between backward and the next step's first forward.
        """
        return None

    def offloaded(self) -> list[Tensor]:
        """Tensors that were moved to host memory and are there at this moment; a probe counts them apart."""
        return self.offload.host_copies() if self.offload else []

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters by name, on the CPU, the same on every rank; a collective call where they are sharded."""
        self.finish()
        for name, parameter in self.module.named_parameters():
            yield name, self.share.whole(name, parameter.detach()).cpu()

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Parameters of which this rank holds a part: name in the whole model, itself, and what the optimizer updates.

        The two are one tensor but where the model is given to the optimizer in another form.
        """
        for name, parameter in self.module.named_parameters():
            yield name, parameter, parameter

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """One kind of state of every parameter, whole and in fp32, by name; a collective call where it is sharded.

        Args:
            kind: `weights`, or a key of the optimizer's states.
        """
        for name, parameter, updated in self.named():
            own = parameter.detach() if kind == WEIGHTS else self.optimizer.state[updated].get(kind)
            if own is not None:  # a parameter that has had no gradient yet has no moments
                yield name, self.share.whole(name, as_laid(own, parameter)).cpu()

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """All that a checkpoint keeps of the parameters, one whole tensor after the other; a collective call.

        Named `KIND/NAME`, in the same order on all ranks; each is on the CPU, and wanted on rank 0 alone.

        Raises:
            LabError: if this layout cannot be kept; on all ranks, before anything is sent.
        """
        self.finish()
        for kind in (WEIGHTS, *self.moments):
            for name, tensor in self.gathered(kind):
                yield f"{kind}/{name}", tensor
        count = counted(self.optimizer)
        if count is not None:
            yield COUNT, count

    @property
    def moments(self) -> tuple[str, ...]:
        """Keys of the states that the optimizer keeps for each parameter."""
        return MOMENTS[self.config.optimizer]

    @torch.no_grad()
    def restore(self, source: Source) -> None:
        """Take this rank's share of a state that any layout has kept; nothing is sent.

        Raises:
            LabError: if it is another model's.
        """
        for name, parameter, updated in self.named():
            put(parameter, self.share.part(name, source.tensor(f"{WEIGHTS}/{name}")))
            kept = tuple(kind for kind in self.moments if source.has(f"{kind}/{name}"))
            state = begun(self.optimizer, updated, kept, source.updates) if kept else {}
            for kind in kept:
                put(as_laid(state[kind], parameter), self.share.part(name, source.tensor(f"{kind}/{name}")))

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """This rank's buffers, with the number of the replica whose batches they tell of and their whole-model name."""
        for name, buffer in self.module.named_buffers():
            yield self.axes.dp_rank, name, buffer

    def whole_buffers(self) -> dict[str, Tensor]:
        """The same, whole along the tensor axis, named `buffers.REPLICA/NAME`; a collective call along that axis."""
        found: dict[str, Tensor] = {}
        for replica, name, buffer in self.buffers():
            split = self.share.beside(name, buffer)
            found[f"buffers.{replica}/{name}"] = buffer if split is None else self.share.whole(split, buffer)
        return found

    @torch.no_grad()
    def restore_buffers(self, source: Source) -> None:
        """Take the buffers of the replica of the same number; where there were fewer, they are dealt out in turn.

        Raises:
            LabError: if they are another model's.
        """
        for replica, name, buffer in self.buffers():
            whole = source.tensor(f"buffers.{replica % source.replicas()}/{name}")
            split = self.share.beside(name, buffer)
            buffer.copy_(whole if split is None else self.share.part(split, whole))

    def close(self) -> None:
        """Give back what the engine holds."""
