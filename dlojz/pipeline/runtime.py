"""Run a pipeline schedule on real ranks: stages, their messages, split backward passes, asynchronous updates.

A rank executes its list action for action; the gradients that it leaves in `parameter.grad` are those of the mean loss
over all micro-batches, whatever the schedule. Three rules suffice:

- A forward of stage s sends its output to the rank of stage s + 1; a backward (or a backward for the input) sends the
  gradient of its input to the rank of stage s − 1. Neighbours on one rank hand over in memory.
- Sends do not block: they are waited for at the end of the step. A receive blocks, just before the action that needs
  it.
- Messages between two ranks arrive in the order in which they were sent. Each rank knows every rank's list, so a
  receive takes messages from that sender until the one it needs has come: no tags, and the same code for gloo and NCCL.

Who: two ranks of the pipeline group. What: the boundary activation of one micro-batch, or its gradient. How much:
elements of the boundary × bytes of its type, 2 × micro-batches × (stages − 1) messages per step and pipe.

**Split backward**: first for the input, later for the weights; together they leave the gradients of one whole backward.
The autograd graph is cut where the paths to the input and to the weights part; the first half keeps what arrives at the
cuts, the second goes on from there. torch does this in a module of `torch.distributed.pipelining` that is not public
and imported only here. Source: Qi et al. 2024, "Zero Bubble Pipeline Parallelism" (arXiv 2401.10241), §2.

**Asynchronous schedules**: PipeDream with stashed weights, PipeDream-2BW with two versions. A micro-batch's backward
uses the weights that its forward used: each version is its own set of tensors, dropped after its last use, as counted
by `asynchronous.version_audit` (p − r sets on PipeDream's rank r, 2 for 2BW). Communication is that of the synchronous
runtime. Source: Narayanan et al. 2019, "PipeDream" (SOSP), §3.3: w(t+1) = w(t) − ν ∇f(w1(t−n+1), …, wn(t)); Narayanan
et al. 2021, "Memory-Efficient Pipeline-Parallel DNN Training" (arXiv 2006.09503), §3.1: W(t+1) = W(t) − ν ∇f(W(t−1)).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.func import functional_call

from dlojz.base.language import refusal
from dlojz.models.blocks import BlockList
from dlojz.pipeline.messages import StageMessage, message_after, message_for, messages_of, places_of_messages
from dlojz.pipeline.orders.asynchronous import version_audit
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_WEIGHT, FORWARD, UPDATE, Action, Schedule
from dlojz.pipeline.validity import check_executable


class Deferred(NamedTuple):
    """State between the two halves of a split backward.

    Attributes:
        input_gradient: result of the first half; None for a first stage.
        cuts: where the second half goes on; None where it is the whole backward.
        output, gradient: start of the backward, where it is still to be done as a whole.
    """

    module: nn.Module
    input_gradient: Tensor | None
    cuts: list[dict[str, Any]] | None
    output: Tensor | None
    gradient: Tensor | None


def backward_for_input(module: nn.Module, stage_input: Tensor, output: Tensor, gradient: Tensor | None) -> Deferred:
    """Compute the gradient of the stage's input: the first half.

    Args:
        stage_input: its input; that of a first stage needs no gradient, and nothing is computed yet.
        output: its output, or the loss.
        gradient: gradient of the output; None for a loss.
    """
    if not stage_input.requires_grad:
        return Deferred(module, None, None, output, gradient)
    gradients = None if gradient is None else [gradient]
    # The gradient at the input, and the cuts from which the paths to the weights go on.
    input_gradients, cuts = stage_backward_input([output], gradients, [stage_input], module.parameters())
    return Deferred(module, input_gradients[0], cuts, None, None)


def backward_for_weights(deferred: Deferred) -> None:
    """Add to the gradients of the stage's weights: the second half."""
    if deferred.cuts is not None:
        stage_backward_weight(deferred.module.parameters(), deferred.cuts)
    elif deferred.output is not None:
        torch.autograd.backward(deferred.output, deferred.gradient)


StageKey = tuple[int, int]
"""A stage on a rank: (pipe, stage)."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of one micro-batch, from the last stage's output and the targets."""
Perform = Callable[[Action, Callable[[], None]], None]
"""Runs the computation of one action; a probe may time it."""


class Boundary(NamedTuple):
    """Tensor that passes between two stages for one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SentMessage(NamedTuple):
    """Message on its way: its tensor must stay until the receiver has taken it."""

    work: dist.Work | None
    tensor: Tensor
    receiver: int
    message: StageMessage


class KeptActivations(NamedTuple):
    """Tensors that a stage keeps of a micro-batch between its forward and its backward."""

    input: Tensor
    output: Tensor


class PipelineRuntime:
    """Runtime of one rank of a synchronous pipeline.

    Args:
        modules: the stages that this rank holds, by (pipe, stage).
        boundaries: what enters each stage, in order; the first is the sample itself and is never sent.
        loss: mean loss of one micro-batch; called on the ranks that hold the last stage.
        group: the ranks of the pipeline, in the order of the schedule's ranks; by default all.
        perform: what runs each action's computation; receives and sends are outside of it.

    Raises:
        LabError: if the schedule cannot be executed here, or the modules are not those of this rank.
    """

    asynchronous = False

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[StageKey, nn.Module],
        boundaries: Sequence[Boundary],
        loss: Loss,
        *,
        group: dist.ProcessGroup | None = None,
        perform: Perform | None = None,
    ) -> None:
        check_executable(schedule, asynchronous=self.asynchronous)
        self.schedule, self.modules, self.loss = schedule, dict(modules), loss
        self.boundaries = tuple(boundaries)
        self.group = group
        self.rank = dist.get_rank(group) if dist.is_initialized() else 0
        self.perform = perform or (lambda action, compute: compute())
        self._check_modules()
        self._sent = [messages_of(schedule, rank) for rank in range(schedule.ranks)]
        self._sent_at, self._taken_at = places_of_messages(schedule)

    def _check_modules(self) -> None:
        keys = {
            (pipe, stage)
            for pipe, ranks in enumerate(self.schedule.placement)
            for stage, rank in enumerate(ranks)
            if rank == self.rank
        }
        if keys != set(self.modules):
            raise refusal(
                en=f"rank {self.rank} holds the stages (pipe, stage) {sorted(keys)}, but modules for "
                f"{sorted(self.modules)} were received.",
                fr=f"le rang {self.rank} porte les étages (pipeline, étage) {sorted(keys)}, mais des modules pour "
                f"{sorted(self.modules)} ont été reçus.",
            )

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Run forward and backward of all micro-batches.

        Args:
            inputs: the micro-batches; read on ranks that hold a first stage.
            targets: theirs; read on ranks that hold a last stage.

        Returns:
            The mean losses of the micro-batches whose last stage is here (detached scalars); empty elsewhere.
        """
        self._inputs, self._targets = inputs, targets
        self._kept: dict[tuple[int, int, int], KeptActivations] = {}
        self._deferred: dict[tuple[int, int, int], Deferred] = {}
        self._mail: dict[StageMessage, Tensor] = {}
        # What each other rank sends to this one, in order.
        self._expected = [
            # Messages to itself go through `_mail`, never through c10d.
            deque(message for receiver, message in sender_messages if receiver == self.rank != sender)
            for sender, sender_messages in enumerate(self._sent)
        ]
        self._under_way: list[SentMessage] = []
        self._losses: list[Tensor] = []
        for action in self.schedule.orders[self.rank]:
            for element in action.elements:
                self._execute(element)
        for outgoing in self._under_way:
            if outgoing.work is not None:
                outgoing.work.wait()
        self._under_way.clear()
        self._mail.clear()
        return self._losses

    def _execute(self, action: Action) -> None:
        is_last = action.stage == self.schedule.stages - 1
        if action.kind == FORWARD:
            received = self._inputs[action.micro_batch] if action.stage == 0 else self._receive(action)
            self.perform(action, lambda: self._forward(action, received))
            if not is_last:
                # action[1:4] is (stage, micro-batch, pipe). Detached: the receiver begins a graph of its own.
                self._send(action, self._kept[action[1:4]].output.detach())
            return
        if action.kind == BACKWARD_WEIGHT:
            self.perform(action, lambda: backward_for_weights(self._deferred.pop(action[1:4])))
            return
        gradient = None if is_last else self._receive(action)
        # A list, as `perform` returns nothing.
        outcome: list[Tensor | None] = []
        self.perform(action, lambda: outcome.append(self._backward(action, gradient)))
        if action.stage and outcome[0] is not None:
            self._send(action, outcome[0])

    def _forward(self, action: Action, received: Tensor) -> None:
        stage_input = received.detach()
        # Tokens are integers; the sample itself needs no gradient either.
        if stage_input.is_floating_point() and action.stage:
            stage_input.requires_grad_()
        output = self._output(action, stage_input)
        if action.stage == self.schedule.stages - 1:
            output = self.loss(output, self._targets[action.micro_batch])
            self._losses.append(output.detach())
            # Mean of the step: gradients of the micro-batches add up. An asynchronous update divides by itself.
            if not self.asynchronous:
                output = output / self.schedule.micro_batches
        self._kept[action[1:4]] = KeptActivations(stage_input, output)

    def _output(self, action: Action, stage_input: Tensor) -> Tensor:
        output: Tensor = self.modules[action.pipe, action.stage](stage_input)
        return output

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Gradient of the stage's input; the weights' gradients now (B), or later (I)."""
        activations = self._kept.pop(action[1:4])
        if action.kind == BACKWARD:
            # Also adds the weights' gradients to `parameter.grad`.
            torch.autograd.backward(activations.output, gradient)
            return activations.input.grad
        module = self.modules[action.pipe, action.stage]
        deferred = backward_for_input(module, activations.input, activations.output, gradient)
        self._deferred[action[1:4]] = deferred
        return deferred.input_gradient

    def _send(self, action: Action, tensor: Tensor) -> None:
        message = message_after(action)
        receiver = self.schedule.placement[action.pipe][message.stage]
        if receiver == self.rank:
            self._mail[message] = tensor
            return
        tensor = tensor.contiguous()
        # Who: this rank to `receiver`. What: one boundary, of one micro-batch. It is kept until a message of the
        # receiver shows that it has been taken (see `_let_go`).
        work = dist.isend(tensor, group=self.group, group_dst=receiver)
        self._under_way.append(SentMessage(work, tensor, receiver, message))

    def _receive(self, action: Action) -> Tensor:
        """The message that an action needs; those that the same sender sent before it are kept for later."""
        message = message_for(action)
        sender = self.schedule.placement[action.pipe][action.stage + (-1 if message.forward else 1)]
        while message not in self._mail:
            # In the order of the sender: messages between two ranks arrive so.
            coming = self._expected[sender].popleft()
            # Boundary s enters stage s; a gradient for stage s has the shape of what leaves it, boundary s + 1.
            boundary = self.boundaries[coming.stage if coming.forward else coming.stage + 1]
            buffer = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._device)
            dist.recv(buffer, group=self.group, group_src=sender)
            self._let_go(sender, coming)
            self._mail[coming] = buffer
        return self._mail.pop(message)

    def _let_go(self, sender: int, coming: StageMessage) -> None:
        """Free what the sender of a message had taken before it sent it: waiting for it takes no time.

        gloo's `is_completed` stays False until somebody waits, so all messages of a step would be kept to its end.
        """
        still_under_way = []
        for outgoing in self._under_way:
            # Taken by an action no later than the one that sent `coming`: it has arrived.
            is_taken = outgoing.receiver == sender and self._taken_at[outgoing.message] <= self._sent_at[coming]
            if is_taken and outgoing.work is not None:
                outgoing.work.wait()
            elif not is_taken:
                still_under_way.append(outgoing)
        self._under_way = still_under_way

    @property
    def _device(self) -> torch.device:
        return next((p.device for module in self.modules.values() for p in module.parameters()), torch.device("cpu"))


class Stage(BlockList):
    """Stage of a model: consecutive blocks, with boundary tensors that can be cut off and sent.

    torch cuts the autograd graph at a stage's output once its first half of a backward is done, and cannot do so with a
    view; where a block ends with one (CoAtNet's attention does), it is copied: the boundary's bytes, once per
    micro-batch. And torch sends the gradient of a stage's input as it is, but gloo takes contiguous tensors only.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Run the blocks."""
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)
        output = super().forward(x)
        return output.clone() if output._is_view() else output


def stage_modules(model: BlockList, bounds: Sequence[int]) -> list[BlockList]:
    """The stages of a model, as lists of its blocks.

    Args:
        bounds: number of the first block of each stage, and the number of blocks at the end.
    """
    return [Stage(model.blocks[start:end], checkpointing=model.checkpointing) for start, end in pairwise(bounds)]


def boundaries_of(stages: Sequence[nn.Module], sample: Tensor, *, compute: torch.dtype | None = None) -> list[Boundary]:
    """What enters each stage for a micro-batch like `sample`, and last what leaves the model.

    Args:
        compute: the type of an autocast around the stages; None: there is none.
    """
    boundaries = []
    fake_sample = sample if isinstance(sample, FakeTensor) else None
    with (
        fake_sample.fake_mode if fake_sample is not None else FakeTensorMode(allow_non_fake_inputs=True) as fake,
        torch.no_grad(),
    ):
        # A real sample gets a fake twin: shapes without memory.
        x = sample if fake_sample is not None else fake.from_tensor(sample)
        for stage in stages:
            boundaries.append(Boundary(tuple(x.shape), x.dtype))
            was_training = stage.training
            stage.eval()  # no running statistic may move
            with torch.autocast(sample.device.type, compute, enabled=compute is not None):
                x = stage(x)
            stage.train(was_training)
        boundaries.append(Boundary(tuple(x.shape), x.dtype))
    return boundaries


Weights = dict[str, Tensor]


class WeightVersions:
    """The versions of one stage's weights.

    Args:
        module: the stage; its parameters are always the newest version.
        learning_rate, weight_decay: of plain SGD.
    """

    def __init__(self, module: nn.Module, learning_rate: float, weight_decay: float) -> None:
        self._module, self._rate, self._decay = module, learning_rate, weight_decay
        self.newest = 0
        self.kept: dict[int, Weights] = {0: self._of_module()}
        self._sum: Weights = {}
        self._count = 0

    def _of_module(self) -> Weights:
        # Shares the module's memory; an update gives the module other tensors, so that these stay.
        return {name: value.detach().requires_grad_() for name, value in self._module.named_parameters()}

    def add_gradient(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradient to those of the next update."""
        for name, gradient in zip(self.kept[self.newest], gradients, strict=True):
            if gradient is not None:
                self._sum[name] = self._sum[name] + gradient if name in self._sum else gradient
        self._count += 1

    def update(self) -> None:
        """Make a new version from the newest and the mean of the gradients since the last update."""
        new: Weights = {}
        with torch.no_grad():
            for name, weight in self.kept[self.newest].items():
                # At least 1: an update without gradients changes nothing but by the decay.
                gradient = self._sum.get(name, torch.zeros_like(weight)) / max(self._count, 1)
                new[name] = (weight - self._rate * (gradient + self._decay * weight)).requires_grad_()
            for name, parameter in self._module.named_parameters():
                parameter.data = new[name].data
        self.newest += 1
        self.kept[self.newest] = new
        self._sum, self._count = {}, 0

    def drop_before(self, oldest: int) -> None:
        """Forget the versions that no action to come uses."""
        # Never the newest, even if no action to come uses it.
        for version in [number for number in self.kept if number < min(oldest, self.newest)]:
            del self.kept[version]

    def restart(self) -> None:
        """Count the versions from 0 again: the newest is the only one left."""
        self.kept, self.newest = {0: self.kept[self.newest]}, 0


class AsynchronousRuntime(PipelineRuntime):
    """One rank of an asynchronous pipeline; `step` runs the schedule once, updates included.

    Args:
        schedule: pipedream or pipedream-2bw.
        modules, boundaries, loss, group, perform: as for `PipelineRuntime`.
        learning_rate, weight_decay: of plain SGD, which each stage does on its own.
    """

    asynchronous = True

    def __init__(
        self,
        schedule: Schedule,
        modules: Mapping[StageKey, nn.Module],
        boundaries: Sequence[Boundary],
        loss: Loss,
        *,
        learning_rate: float,
        weight_decay: float = 0.0,
        group: dist.ProcessGroup | None = None,
        perform: Perform | None = None,
    ) -> None:
        super().__init__(schedule, modules, boundaries, loss, group=group, perform=perform)
        audit = version_audit(schedule)
        begin, end = schedule.first_of_rank[self.rank : self.rank + 2]
        # Each action stands once in a rank's order, so it is a key.
        self._version_of = dict(zip(schedule.orders[self.rank], audit.versions[begin:end], strict=True))
        self.weights = {key: WeightVersions(module, learning_rate, weight_decay) for key, module in modules.items()}
        self.versions_kept = 0
        """The most versions that a stage of this rank kept at a time in the last step."""

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Run the schedule once, updates included; the losses of the micro-batches whose last stage is here."""
        for versions in self.weights.values():
            versions.restart()
        self._needed = self._oldest_needed()
        self._done = self.versions_kept = 0
        return super().step(inputs, targets)

    def _oldest_needed(self) -> list[int]:
        """After each action of this rank: the oldest version that one to come uses."""
        # Larger than any version: after the last action none is needed.
        oldest, oldest_versions = 2**31, []
        for action in reversed(self.schedule.orders[self.rank]):
            oldest_versions.append(oldest)
            version = self._version_of[action]
            if version is not None and action.kind != UPDATE:
                oldest = min(oldest, version)
        return oldest_versions[::-1]

    def _execute(self, action: Action) -> None:
        # An asynchronous schedule updates stage by stage: each has its own versions.
        versions = self.weights[action.pipe, action.stage]
        if action.kind == UPDATE:
            self.perform(action, versions.update)
        else:
            super()._execute(action)
        versions.drop_before(self._needed[self._done])
        self.versions_kept = max(self.versions_kept, len(versions.kept))
        self._done += 1

    def _output(self, action: Action, stage_input: Tensor) -> Tensor:
        # Runs the module with tensors of that version in place of its parameters.
        output: Tensor = functional_call(self.modules[action.pipe, action.stage], self._used(action), (stage_input,))
        return output

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        activations = self._kept.pop(action[1:4])
        # The forward's own tensors: only for these has its graph gradients.
        weights = list(self._used(action._replace(kind=FORWARD)).values())
        grad_inputs = [activations.input, *weights] if activations.input.requires_grad else weights
        gradients = torch.autograd.grad(activations.output, grad_inputs, gradient, allow_unused=True)
        # Without the input's gradient, which stands first where there is one.
        self.weights[action.pipe, action.stage].add_gradient(gradients[len(grad_inputs) - len(weights) :])
        return gradients[0] if activations.input.requires_grad else None

    def _used(self, action: Action) -> Weights:
        version = self._version_of[action]
        return self.weights[action.pipe, action.stage].kept[version or 0]
