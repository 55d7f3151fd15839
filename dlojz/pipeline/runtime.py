"""Execute a pipeline schedule on real ranks, with nothing but sends and receives: the teaching runtime.

Layer 2, loads torch. Invariant: a rank executes its list action for action, in order; the gradients that it leaves in
`parameter.grad` are those of the mean loss over all micro-batches, whatever the schedule.

Three rules are all there is:

- A forward of stage s sends its output to the rank of stage s + 1; a backward (or a backward for the input) sends the
  gradient of its input to the rank of stage s − 1. Neighbours on one rank hand over in memory.
- Sends do not block: they are waited for at the end of the step. A receive blocks, just before the action that needs
  it.
- Messages between two ranks arrive in the order in which they were sent, and each rank knows that order, because it
  knows every rank's list: a receive takes messages from that sender until the one it needs has come. So no tags, and
  the same code for gloo and for NCCL.

Who: two ranks of the pipeline group. What: the boundary activation of one micro-batch, or its gradient. How much:
elements of the boundary × bytes of its type, 2 × micro-batches × (stages − 1) messages per step and pipe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action
from dlojz.pipeline.executable import check_executable
from dlojz.pipeline.runtime_backward import Deferred, backward_for_input, backward_for_weights
from dlojz.pipeline.schedule import Schedule
from dlojz.schema import LabError
from dlojz.text import say

StageKey = tuple[int, int]
"""A stage on a rank: (pipe, stage)."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Mean loss of one micro-batch, from the last stage's output and the targets."""
Perform = Callable[[Action, Callable[[], None]], None]
"""Runs the computation of one action; a probe may time it."""


_SENDING = (FORWARD, BACKWARD, BACKWARD_INPUT)


class Boundary(NamedTuple):
    """What passes between two stages for one micro-batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def message_bytes(self) -> int:
        """Bytes of one message."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Message(NamedTuple):
    """One message: the input of a forward, or the output's gradient of a backward, of this stage."""

    forward: bool
    pipe: int
    stage: int
    micro_batch: int


class Kept(NamedTuple):
    """What a stage keeps of a micro-batch between its forward and its backward."""

    input: Tensor
    output: Tensor


class PipelineRuntime:
    """One rank of a pipeline.

    Args:
        schedule: what every rank does; validated.
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
        self._sent = [self._messages_of(rank) for rank in range(schedule.ranks)]

    def _check_modules(self) -> None:
        held = {
            (pipe, stage)
            for pipe, ranks in enumerate(self.schedule.placement)
            for stage, rank in enumerate(ranks)
            if rank == self.rank
        }
        if held != set(self.modules):
            raise LabError(
                say(
                    en=f"rank {self.rank} holds the stages (pipe, stage) {sorted(held)}, but modules for "
                    f"{sorted(self.modules)} were received.",
                    fr=f"le rang {self.rank} porte les étages (pipeline, étage) {sorted(held)}, mais des modules pour "
                    f"{sorted(self.modules)} ont été reçus.",
                )
            )

    def step(self, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
        """Forward and backward of all micro-batches.

        Args:
            inputs: the micro-batches; read on ranks that hold a first stage.
            targets: theirs; read on ranks that hold a last stage.

        Returns:
            The mean losses of the micro-batches whose last stage is here (detached scalars); empty elsewhere.
        """
        self._inputs, self._targets = inputs, targets
        self._kept: dict[tuple[int, int, int], Kept] = {}
        self._deferred: dict[tuple[int, int, int], Deferred] = {}
        self._mail: dict[Message, Tensor] = {}
        self._expected = [deque(self._from(sender)) for sender in range(self.schedule.ranks)]
        self._under_way: list[tuple[dist.Work | None, Tensor]] = []
        self._losses: list[Tensor] = []
        for action in self.schedule.orders[self.rank]:
            for element in action.elements:
                self._execute(element)
        for work, _ in self._under_way:
            if work is not None:
                work.wait()
        self._mail.clear()
        return self._losses

    def _execute(self, action: Action) -> None:
        last = action.stage == self.schedule.stages - 1
        if action.kind == FORWARD:
            received = self._inputs[action.micro_batch] if action.stage == 0 else self._receive(action)
            self.perform(action, lambda: self._forward(action, received))
            if not last:
                self._send(action, self._kept[action[1:4]].output.detach())
            return
        if action.kind == BACKWARD_WEIGHT:
            self.perform(action, lambda: backward_for_weights(self._deferred.pop(action[1:4])))
            return
        gradient = None if last else self._receive(action)
        outcome: list[Tensor | None] = []
        self.perform(action, lambda: outcome.append(self._backward(action, gradient)))
        if action.stage and outcome[0] is not None:
            self._send(action, outcome[0])

    def _forward(self, action: Action, received: Tensor) -> None:
        entered = received.detach()
        if entered.is_floating_point() and action.stage:
            entered.requires_grad_()
        output = self.modules[action.pipe, action.stage](entered)
        if action.stage == self.schedule.stages - 1:
            output = self.loss(output, self._targets[action.micro_batch])
            self._losses.append(output.detach())
            output = output / self.schedule.micro_batches
        self._kept[action[1:4]] = Kept(entered, output)

    def _backward(self, action: Action, gradient: Tensor | None) -> Tensor | None:
        """Gradient of the stage's input; the weights' gradients now (B), or later (I)."""
        kept = self._kept.pop(action[1:4])
        if action.kind == BACKWARD:
            torch.autograd.backward(kept.output, gradient)
            return kept.input.grad
        module = self.modules[action.pipe, action.stage]
        deferred = backward_for_input(module, kept.input, kept.output, gradient)
        self._deferred[action[1:4]] = deferred
        return deferred.input_gradient

    def _send(self, action: Action, tensor: Tensor) -> None:
        message = _message_after(action)
        receiver = self.schedule.placement[action.pipe][message.stage]
        if receiver == self.rank:
            self._mail[message] = tensor
            return
        tensor = tensor.contiguous()
        self._under_way = [(work, sent) for work, sent in self._under_way if work is None or not work.is_completed()]
        # Who: this rank to `receiver`. What: one boundary, of one micro-batch. It is kept until it has left: the
        # receiver may take it late.
        work = dist.isend(tensor, group=self.group, group_dst=receiver)
        self._under_way.append((work, tensor))

    def _receive(self, action: Action) -> Tensor:
        """The message that an action needs; those that the same sender sent before it are kept for later."""
        message = Message(action.kind == FORWARD, action.pipe, action.stage, action.micro_batch)
        sender = self.schedule.placement[action.pipe][action.stage + (-1 if message.forward else 1)]
        while message not in self._mail:
            coming = self._expected[sender].popleft()
            boundary = self.boundaries[coming.stage if coming.forward else coming.stage + 1]
            buffer = torch.empty(boundary.shape, dtype=boundary.dtype, device=self._device)
            dist.recv(buffer, group=self.group, group_src=sender)
            self._mail[coming] = buffer
        return self._mail.pop(message)

    @property
    def _device(self) -> torch.device:
        return next((p.device for module in self.modules.values() for p in module.parameters()), torch.device("cpu"))

    def _messages_of(self, rank: int) -> list[tuple[int, Message]]:
        """All that a rank sends in a step, in order: (receiver, message)."""
        sent = []
        for action in self.schedule.orders[rank]:
            for element in action.elements:
                message = _message_after(element)
                if element.kind in _SENDING and 0 <= message.stage < self.schedule.stages:
                    sent.append((self.schedule.placement[element.pipe][message.stage], message))
        return sent

    def _from(self, sender: int) -> list[Message]:
        return [message for receiver, message in self._sent[sender] if receiver == self.rank != sender]


def _message_after(action: Action) -> Message:
    """What an action sends: a forward to the stage behind, a backward to the stage before."""
    forward = action.kind == FORWARD
    return Message(forward, action.pipe, action.stage + (1 if forward else -1), action.micro_batch)
