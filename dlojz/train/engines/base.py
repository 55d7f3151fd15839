"""Engine: the interface, which is also the plainest engine; states by name; `build`, which opens the right engine.

A step is forward and backward of every micro-batch, then one update; the gradient of a step is the mean over its global
batch. For the same global batch every engine gives the losses and weights of one process, and no engine knows of the
probes.

A checkpoint keeps whole tensors in fp32, by the names that one process uses, so that any layout can take its share of
them. AdamW's count of updates is kept once: it is the number of steps, but for DeepSpeed's stage 0 in bf16, which makes
an update of zeros at its start.

Updates within the passes (`update="in_backward"`, `"in_forward"`) give the losses and weights of an update after
backward, bit for bit. Source: Jiang et al. 2021, "Optimizer Fusion" (arXiv 2104.00237); see
`dlojz.by_hand.optimizers.in_backward`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from importlib import import_module
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from dlojz.by_hand.activation_offload import offload_of
from dlojz.by_hand.chunked_loss import knowing_targets
from dlojz.by_hand.context_parallel import RingShare, share_sequences
from dlojz.by_hand.optimizers.in_backward import InBackward, MakeOptimizer
from dlojz.by_hand.optimizers.lamb import Lamb
from dlojz.by_hand.optimizers.muon import Muon, hidden_matrices
from dlojz.by_hand.ring_attention import Ring
from dlojz.by_hand.zero.flat import FlatWeights
from dlojz.config.fields import ASYNCHRONOUS
from dlojz.config.optimizers import OPTIMIZERS, STATE_NUMBERS
from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import IN_PASSES
from dlojz.models.blocks import loss_of
from dlojz.models.foreign.elsewhere import ADAPTERS
from dlojz.results.footprint import Category, Overlap
from dlojz.train.axes import Axes
from dlojz.train.checkpoint_tensors import COUNT, CheckpointTensors
from dlojz.train.engines.tensor_engines import TensorShare, as_dtensor

WEIGHTS: Final = "weights"


_MEANS: Final = {"row_var": -1, "col_var": -2}
"""Dimension of which Adafactor keeps a mean."""


def begun(optimizer: Any, updated: Tensor, kinds: tuple[str, ...], updates: int) -> dict[str, Tensor]:
    """Make the states that an optimizer makes for a tensor in its first step, as zeros, with the count of a later one.

    Source: torch 2.13, `optim/adam.py`, `_init_group`; `optim/sgd.py`; `optim/_adafactor.py`.
    """
    state: dict[str, Tensor] = optimizer.state[updated]
    for kind in kinds:
        if kind not in state:
            like = updated.new_zeros(()) if kind in STATE_NUMBERS else updated
            if kind in _MEANS:
                like = updated.detach().narrow(_MEANS[kind], 0, 1)
            state[kind] = torch.zeros_like(like, memory_format=torch.preserve_format).detach()
    if not {"exp_avg", "variance", "row_var"}.isdisjoint(kinds):
        fused = getattr(optimizer, "defaults", {}).get("fused")  # its kernel reads the count where it computes
        # In fp32, as torch's own count.
        state["step"] = torch.tensor(float(updates), device=updated.device if fused else "cpu")
    return state


def counted(optimizer: Any) -> Tensor | None:
    """Return how many updates Adam has counted, of any tensor as of all; None where nothing is counted."""
    states = getattr(optimizer, "optimizer", optimizer).state.values()
    return next((torch.tensor(int(state["step"])) for state in states if "step" in state), None)


def as_laid(value: Tensor, like: Tensor) -> Tensor:
    """Wrap a rank's part of a state as a DTensor, where its parameter is one."""
    return as_dtensor(value, like) if isinstance(like, DTensor) and not isinstance(value, DTensor) else value


def local_part(full_tensor: Tensor, like: Tensor) -> Tensor:
    """Cut this rank's part out of a whole tensor that is distributed as `like`; nothing is sent.

    A dimension that is split by both axes (FSDP2 over tensor parallelism) is split by the last axis first.
    """
    if not isinstance(like, DTensor):
        return full_tensor
    coordinate = like.device_mesh.get_coordinate()
    assert coordinate is not None
    for axis in reversed(range(like.device_mesh.ndim)):
        dim = getattr(like.placements[axis], "dim", None)
        if dim is None:
            continue  # whole on each rank of the axis
        length, ranks = full_tensor.shape[dim], like.device_mesh.size(axis)
        # As `torch.chunk`: equal shares, the last ones shorter or empty.
        share = -(-length // ranks)
        start = min(coordinate[axis] * share, length)
        full_tensor = full_tensor.narrow(dim, start, min(share, length - start))
    return full_tensor


def put(local_tensor: Tensor, full_tensor: Tensor) -> None:
    """Copy this rank's part of a whole tensor into its own."""
    target = local_tensor.detach()
    target = target.to_local() if isinstance(target, DTensor) else target
    target.copy_(local_part(full_tensor, local_tensor))


def overlap(flat: FlatWeights, number: int, rank: int) -> tuple[slice, slice]:
    """Intersect a parameter of a flat tensor with a rank's share: slices of the parameter, flat, and of the share."""
    start = sum(shape.numel() for shape in flat.shapes[:number])
    share_start = rank * flat.share_numel
    low = max(start, share_start)
    # Without an overlap both slices are empty.
    high = max(low, min(start + flat.shapes[number].numel(), share_start + flat.share_numel))
    return slice(low - start, high - start), slice(low - share_start, high - share_start)


def gather_piece(flat: FlatWeights, number: int, share: Tensor) -> Tensor:
    """Gather one parameter's part of a flat tensor on every rank from the ranks' shares; a collective call.

    Args:
        share: this rank's share of a tensor laid out as the weights: weights or a moment.
    """
    shape = flat.shapes[number]
    piece = share.new_empty(shape.numel())
    for rank in range(flat.size):
        of_piece, of_share = overlap(flat, number, rank)
        # None of the parameter is in that rank's share: all ranks know, and none waits for a message.
        if of_piece.start == of_piece.stop:
            continue
        if rank == flat.rank:
            piece[of_piece] = share.detach()[of_share]
        if flat.size > 1:
            source = rank if flat.group is None else dist.get_global_rank(flat.group, rank)
            # Who: all ranks that share. What: the part of one parameter that one of them holds. How much: its bytes;
            # a sum over the ranks, of zeros but for one, would do as well, but turns -0 into 0.
            dist.broadcast(piece[of_piece], src=source, group=flat.group)
    return piece.view(shape)


def put_piece(flat: FlatWeights, number: int, share: Tensor, full_tensor: Tensor) -> None:
    """Copy this rank's part of one parameter into its share; nothing is sent."""
    of_piece, of_share = overlap(flat, number, flat.rank)
    share.detach()[of_share].copy_(full_tensor.reshape(-1)[of_piece])


class PassOptimizer(torch.optim.Optimizer):
    """Optimizer whose states are by parameter, while the passes themselves update and free gradients.

    Args:
        module: the model.
        config: the run; its `update` says which pass updates.
        hooked: whether backward itself calls the update; otherwise whoever averages gradients does.
    """

    def __init__(
        self, module: nn.Module, config: RunConfig, make_optimizer: MakeOptimizer, *, hooked: bool = True
    ) -> None:
        forward = config.update == "in_forward"
        self.passes = InBackward(module, make_optimizer, "forward" if forward else "backward", accumulates=forward)
        super().__init__(list(self.passes.optimizers), {})
        for optimizer in self.passes.optimizers.values():
            optimizer.state = self.state  # each touches its own parameter's alone
        if not hooked:
            self.passes.release()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Mark the gradients as whole: the next forward pass may update; in backward it is done already."""
        self.passes.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: a gradient is freed once it is used."""

    def finish(self) -> None:
        """Make the updates left to the next forward pass: before weights or states are read."""
        self.passes.finish()


Inventory = dict[Category, list[Tensor]]
FORMS: dict[str, dict[str, Any]] = {
    "auto": {},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    # One after the other; within the passes, one parameter at a time.
    **{form: {"foreach": False, "fused": False} for form in ("for_loop", *IN_PASSES)},
}
"""Options of torch's optimizers for each form of an update."""


def make_optimizer(
    config: RunConfig, parameters: Iterable[Tensor], module: nn.Module | None = None
) -> torch.optim.Optimizer:
    """Make the optimizer of a run, for every engine but those whose optimizers communicate.

    Args:
        module: whose parameters they are; Muon asks which of them are hidden matrices.
    """
    rate, decay, form = config.learning_rate, config.weight_decay, FORMS[config.update]
    param_groups = by_mesh(parameters)
    if config.optimizer == "adamw":
        return torch.optim.AdamW(param_groups, lr=rate, weight_decay=decay, **form)
    if config.optimizer == "lamb":
        return Lamb(param_groups, lr=rate, weight_decay=decay)
    if config.optimizer == "adafactor":
        return torch.optim.Adafactor(param_groups, lr=rate, weight_decay=decay)
    if config.optimizer == "muon":
        assert module is not None
        named = dict(module.named_parameters())
        matrices = [named.pop(name) for name in hidden_matrices(module)]
        return Muon(matrices, by_mesh(named.values()), lr=rate, weight_decay=decay)
    momentum = 0.9 if config.optimizer == "momentum" else 0.0
    return torch.optim.SGD(param_groups, lr=rate, momentum=momentum, weight_decay=decay, **form)


def by_mesh(parameters: Iterable[Tensor]) -> list[Any]:
    """Group parameters for an optimizer by their DTensors' meshes.

    On a GPU an optimizer updates a whole group at once, and DTensors of different meshes, or DTensors and plain
    tensors, cannot be mixed.
    """
    groups: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    param_groups = list(groups.values())
    return param_groups[0] if len(param_groups) == 1 else [{"params": group} for group in param_groups]


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def locals_of(inventory: Inventory) -> Inventory:
    """Replace the tensors of an inventory by this rank's shards."""
    with torch.no_grad():  # as they are: autograd would make a view of each, several times in every traced step
        return {category: [local(tensor) for tensor in tensors] for category, tensors in inventory.items()}


def optimizer_states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """List all tensors that an optimizer keeps from step to step, those in lists (L-BFGS's history) included."""
    return [value for value in tree_leaves([dict(optimizer.state)]) if isinstance(value, Tensor)]


class Engine:
    """Engine of one replica: forward, backward and update, without communication.

    Args:
        config: the run; its layout gives the number of micro-batches.
        model: the whole model, with the same weights on every rank.
    """

    left_out = ""
    """Sentence on what this engine could not restore from its checkpoint; empty if nothing."""

    def __init__(self, config: RunConfig, model: nn.Module, device: torch.device) -> None:
        self.config = config
        self.device = device
        if config.precision == "bf16-true":
            model.to(torch.bfloat16)
            for path, part in model.named_modules():
                if path.endswith(ADAPTERS):
                    part.float()  # as peft leaves them, unlike DeepSpeed
        if config.layout.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.axes = Axes(config.layout, device)
        self.share = TensorShare(config, model, self.axes, loss_of(model))
        if config.layout.cp > 1:
            share_sequences(model, RingShare(Ring(self.axes.group("cp"))))
        self.module = model
        self.model = self.wrap(model)
        self.optimizer = self.make_optimizer()
        self.offload = offload_of(config.layout, model)

    def wrap(self, module: nn.Module) -> nn.Module:
        """Distribute the model over the ranks, on the device; here it stays whole."""
        return module.to(self.device)

    def make_optimizer(self) -> torch.optim.Optimizer:
        """Make the optimizer of the distributed model."""
        if self.config.update in IN_PASSES:
            return PassOptimizer(self.module, self.config, partial(make_optimizer, self.config))
        return make_optimizer(self.config, self.model.parameters(), self.module)

    def finish(self) -> None:
        """Make the updates left to the next forward pass: before weights or states are read."""
        if isinstance(self.optimizer, PassOptimizer):
            self.optimizer.finish()

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which forward computes in bf16 where the weights are fp32."""
        if self.config.precision == "bf16":
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def forward(self, inputs: Tensor, targets: Tensor, *, is_last: bool) -> Tensor:
        """Compute the mean loss of one micro-batch; `is_last`: no other follows in this step."""
        del is_last  # only engines that communicate need to know
        if self.config.precision == "bf16-true":
            inputs = tree_map(lambda tensor: tensor.bfloat16() if tensor.is_floating_point() else tensor, inputs)
        if self.config.layout.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)  # a copy beside what was read
        with self.autocast(), self.activations(), knowing_targets(self.module, targets):
            logits = self.model(inputs)
        return self.loss(logits, targets)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss of one micro-batch from the model's output on this rank."""
        return self.share.loss(logits, targets)

    @property
    def group_names(self) -> dict[str, str]:
        """Mesh axis of each process group of this rank, by the group's own name: for the probe of communication."""
        return self.axes.group_names

    def activations(self) -> AbstractContextManager[object]:
        """Return the context of the forward pass, which offloads activations where the layout says so."""
        return self.offload or nullcontext()

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add this micro-batch's share to the gradients."""
        del is_last
        # Gradients add up over micro-batches: each gives its share of the mean.
        (loss / self.config.layout.micro_batches).backward()

    def update(self) -> None:
        """Step the optimizer once, then free the gradients."""
        self.share.settle(self.model.parameters())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def inventory(self) -> Inventory:
        """List the tensors this rank holds from step to step, by category; a probe turns them into bytes."""
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
        """Return the overlap of the last step's communication with its backward pass; None where it is not timed.

        To be called between backward and the next step's first forward.
        """
        return None

    def offloaded(self) -> list[Tensor]:
        """List the tensors that are in host memory at this moment; a probe counts them apart."""
        return self.offload.host_copies() if self.offload else []

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield whole parameters by name, on the CPU, the same on every rank; a collective call where sharded."""
        self.finish()
        for name, parameter in self.module.named_parameters():
            yield name, self.share.whole(name, parameter.detach()).cpu()

    def named(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the parameters of this rank: name in the whole model, parameter, and the tensor that is updated.

        The two tensors are one, unless the optimizer updates the model in another form.
        """
        for name, parameter in self.module.named_parameters():
            yield name, parameter, parameter

    def gathered(self, kind: str) -> Iterator[tuple[str, Tensor]]:
        """Yield one kind of state of every parameter, whole and in fp32, by name; a collective call where sharded.

        `kind` is `weights`, or a key of the optimizer's states.
        """
        for name, parameter, updated in self.named():
            local_tensor = parameter.detach() if kind == WEIGHTS else self.optimizer.state[updated].get(kind)
            if local_tensor is not None:  # a parameter that has had no gradient yet has no moments
                yield name, self.share.whole(name, as_laid(local_tensor, parameter)).cpu()

    def states(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all states of the parameters for a checkpoint, one whole tensor after the other; a collective call.

        Named `KIND/NAME`, in the same order on all ranks; each is on the CPU, and needed on rank 0 alone.

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
        spec = OPTIMIZERS[self.config.optimizer]
        return (*spec.state_tensors, *spec.matrix_states, *spec.state_numbers)

    @torch.no_grad()
    def restore(self, source: CheckpointTensors) -> None:
        """Restore this rank's share of the states of any layout; nothing is sent.

        Raises:
            LabError: if it is another model's.
        """
        for name, parameter, updated in self.named():
            # First cut as the lab splits it (`part`), then as a DTensor is placed (`put`).
            put(parameter, self.share.part(name, source.tensor(f"{WEIGHTS}/{name}")))
            kinds = tuple(kind for kind in self.moments if source.has(f"{kind}/{name}"))
            state = begun(self.optimizer, updated, kinds, source.updates) if kinds else {}
            for kind in kinds:
                put(as_laid(state[kind], parameter), self.share.part(name, source.tensor(f"{kind}/{name}")))

    def buffers(self) -> Iterator[tuple[int, str, Tensor]]:
        """Yield this rank's buffers: number of the replica whose batches they saw, name in the whole model, buffer."""
        for name, buffer in self.module.named_buffers():
            yield self.axes.dp_rank, name, buffer

    def whole_buffers(self) -> dict[str, Tensor]:
        """Return the buffers, whole along the tensor axis, by `buffers.REPLICA/NAME`; collective along that axis."""
        buffers: dict[str, Tensor] = {}
        for replica, name, buffer in self.buffers():
            split = self.share.beside(name, buffer)
            buffers[f"buffers.{replica}/{name}"] = buffer if split is None else self.share.whole(split, buffer)
        return buffers

    @torch.no_grad()
    def restore_buffers(self, source: CheckpointTensors) -> None:
        """Restore the buffers of the replica of the same number; if there were fewer, they are assigned in turn.

        Raises:
            LabError: if they are another model's.
        """
        for replica, name, buffer in self.buffers():
            full_buffer = source.tensor(f"buffers.{replica % source.replicas()}/{name}")
            split = self.share.beside(name, buffer)
            buffer.copy_(full_buffer if split is None else self.share.part(split, full_buffer))

    def close(self) -> None:
        """Free what the engine holds."""


PIPELINES = {
    "torch": "pipeline_engines.TorchPipelineEngine",
    "by_hand": "pipeline_engines.ByHandPipelineEngine",
    "deepspeed": "deepspeed.DeepSpeedPipelineEngine",
}


def build(config: RunConfig, model: nn.Module, device: torch.device) -> Engine:
    """Build the engine of the layout of `config`, around a model that every rank has built with the same weights."""
    layout = config.layout
    if layout.pp == 1:
        name = config.engine_spec.trainer
    elif layout.engine == "by_hand" and layout.schedule in ASYNCHRONOUS:
        name = "pipeline_engines.AsynchronousPipelineEngine"
    else:
        name = PIPELINES[layout.engine]
    return _engine(name)(config, model, device)


def _engine(name: str) -> type[Engine]:
    """An engine's class; only its own libraries are loaded."""
    module, engine = name.split(".")
    engine_class: type[Engine] = getattr(import_module(f"dlojz.train.engines.{module}"), engine)
    return engine_class
