"""List the messages between the stages of a schedule, and what a rank keeps at each action.

A forward of stage s sends its output to stage s + 1, a backward (or a backward for the input) the gradient of its input
to stage s − 1. The lab's runtime sends by these lists, and the forecast of its memory counts by them. What a rank keeps
besides the tensors of the running action depends on who runs the schedule. A message has the bytes of its boundary:

    by hand             what has been received, until its backward; what was sent, until a message of the receiver shows
                        that it has been taken
    other libraries     what has been received, and what a stage gives, until its backward
    torch, all          a buffer for each message that is received, for good (it is counted apart); the logits, until
                        their backward
    torch, its table    besides, all that a step has sent, until its end: the list of sends holds it
    torch, GPipe        the same
    torch, 1F1B         the last gradient that was sent, until the next one is; the output that was sent last before the
                        first backward, until all forwards are done

Between the halves of a backward a stage keeps more (`dlojz.prediction.model_trace`). A first stage does nothing in its
first half, and all in its second.

Source: torch 2.13, `torch/distributed/pipelining/schedules.py` and `stage.py` (`backward_one_chunk`);
`dlojz.pipeline.runtime`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Literal, NamedTuple

from dlojz.config.run_config import RunConfig
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from dlojz.pipeline.schedule_catalogue import schedule_of

SENDING = (FORWARD, BACKWARD, BACKWARD_INPUT)
"""Kinds of actions that take a message and send one."""
Runner = Literal["by_hand", "table", "gpipe", "1f1b", "library"]
"""Who runs a schedule: the lab, torch (by its table, or by a class of its own), or another library."""
COMPUTED = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
ENDS_BACKWARD = (BACKWARD, BACKWARD_WEIGHT)


class StageMessage(NamedTuple):
    """Message to a stage: the input of a forward, or the output's gradient of a backward."""

    forward: bool
    pipe: int
    stage: int
    micro_batch: int


def message_for(action: Action) -> StageMessage:
    """Return the message that an action takes."""
    return StageMessage(action.kind == FORWARD, action.pipe, action.stage, action.micro_batch)


def message_after(action: Action) -> StageMessage:
    """Return the message that an action sends: a forward to the stage behind, a backward to the stage before."""
    forward = action.kind == FORWARD
    return StageMessage(forward, action.pipe, action.stage + (1 if forward else -1), action.micro_batch)


def messages_of(schedule: Schedule, rank: int) -> list[tuple[int, StageMessage]]:
    """List all that a rank sends in a step, in order: (receiver, message)."""
    messages = []
    for action in schedule.orders[rank]:
        for element in action.elements:
            message = message_after(element)
            if element.kind in SENDING and 0 <= message.stage < schedule.stages:
                messages.append((schedule.placement[element.pipe][message.stage], message))
    return messages


def places_of_messages(
    schedule: Schedule, ranks: Iterable[int] | None = None
) -> tuple[dict[StageMessage, int], dict[StageMessage, int]]:
    """Number the action in its sender's, and in its receiver's order, at which each message is sent and taken.

    Args:
        ranks: whose orders are read; by default all.
    """
    sent_at: dict[StageMessage, int] = {}
    taken_at: dict[StageMessage, int] = {}
    for rank in range(schedule.ranks) if ranks is None else ranks:
        elements = (element for action in schedule.orders[rank] for element in action.elements)
        for position, action in enumerate(elements):
            if action.kind in SENDING:
                sent_at[message_after(action)] = position
                taken_at[message_for(action)] = position
    return sent_at, taken_at


def runner_of(config: RunConfig) -> Runner:
    """Find out who runs the schedule of a run's pipeline."""
    layout = config.layout
    if layout.engine == "deepspeed" or config.library not in ("none", "torch"):
        return "library"
    if layout.engine != "torch":
        return "by_hand"
    name = layout.schedule or "1f1b"
    if name == "gpipe":
        return "gpipe"
    # torch's own 1F1B refuses fewer micro-batches than stages: its table runs them.
    return "1f1b" if name == "1f1b" and layout.micro_batches >= layout.pp else "table"


def splits_backward(config: RunConfig) -> bool:
    """Whether a run's pipeline has backwards in two halves that are predicted as such: with nothing recomputed."""
    layout = config.layout
    return layout.pp > 1 and schedule_of(layout).splits_backward and layout.checkpointing == "none"


class Item(NamedTuple):
    """Tensors of one size, of which a rank keeps some of each micro-batch.

    Attributes:
        kind: what a stage keeps from forward for a whole backward, or for one in two halves; what it keeps between the
            halves; a tensor that passes a boundary; logits.
        stage: which; of a boundary, the one that it enters.
    """

    kind: Literal["activations", "for halves", "between halves", "boundary", "logits"]
    stage: int


class Moment(NamedTuple):
    """Action of a rank, and what the rank keeps besides the tensors of the action's own stage and micro-batch."""

    action: Action
    others: dict[Item, int]
    own: Item | None
    """What the stage keeps of this micro-batch as the action begins."""


class _Holders:
    """Tensors with those that hold them: a tensor is kept while anybody does."""

    def __init__(self) -> None:
        self.counts: Counter[Item] = Counter()
        self._held: dict[Hashable, tuple[Item, set[str]]] = {}

    def hold(self, tensor: Hashable, item: Item, holder: str) -> None:
        """Add a holder of a tensor."""
        if tensor not in self._held:
            self._held[tensor] = (item, set())
            self.counts[item] += 1
        self._held[tensor][1].add(holder)

    def release(self, tensor: Hashable, *holders: str) -> None:
        """Remove holders of a tensor, if it is held."""
        if tensor not in self._held:
            return
        item, held_by = self._held[tensor]
        held_by.difference_update(holders)
        if not held_by:
            del self._held[tensor]
            self.counts[item] -= 1


class RankOrder:
    """Walk through a rank's actions that counts what the rank keeps at each.

    Args:
        runner: who runs it.
        retaining: stages whose second half of a backward needs the gradient that the first half has received.
        halves: whether a split backward is counted in two halves; else as a whole one in its second half.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        runner: Runner,
        retaining: frozenset[int] = frozenset(),
        *,
        halves: bool = True,
    ) -> None:
        self.schedule, self.rank, self.runner, self.retaining = schedule, rank, runner, retaining
        self.last = schedule.stages - 1
        self.elements = [
            element for action in schedule.orders[rank] for element in action.elements if element.kind in COMPUTED
        ]
        self.in_halves = {
            _unit(element) for element in self.elements if halves and element.kind == BACKWARD_INPUT and element.stage
        }
        self._kept = _Holders()
        self._mail: set[StageMessage] = set()
        self._under_way: list[tuple[int, StageMessage]] = []
        self._former: Hashable = None
        self._ahead = min(schedule.micro_batches, schedule.stages - rank)
        """Forwards before the first backward, in 1F1B."""
        if runner == "by_hand":
            neighbours = {
                holders[neighbour_stage]
                for holders in schedule.placement
                for stage, holder in enumerate(holders)
                for neighbour_stage in (stage - 1, stage + 1)
                if holder == rank and 0 <= neighbour_stage <= self.last
            }
            self._sent_at, self._taken_at = places_of_messages(schedule, neighbours)
            self._expected = {
                sender: deque(message for receiver, message in messages_of(schedule, sender) if receiver == rank)
                for sender in neighbours - {rank}
            }

    def moments(self) -> Iterator[Moment]:
        """Yield each action of the step with what is kept then."""
        for action in self.elements:
            self._receive(action)
            batch_item = self._own(action)
            item_counts = {item: count for item, count in self._kept.counts.items() if count}
            if batch_item is not None:
                item_counts[batch_item] -= 1
            yield Moment(action, item_counts, batch_item)
            if action.kind == FORWARD:
                self._forwarded(action)
            else:
                self._backwarded(action)

    def _own(self, action: Action) -> Item | None:
        if action.kind == FORWARD:
            return None
        if _unit(action) not in self.in_halves:
            return Item("activations", action.stage)
        return Item("between halves" if action.kind == BACKWARD_WEIGHT else "for halves", action.stage)

    def _is_local(self, action: Action, stage: int) -> bool:
        """Whether a stage of the same pipe is on this rank."""
        return self.schedule.placement[action.pipe][stage] == self.rank

    def _receive(self, action: Action) -> None:
        """Take the message that an action needs."""
        stage = action.stage
        before = stage - 1 if action.kind == FORWARD else stage + 1
        if action.kind not in SENDING or not 0 <= before <= self.last:
            return
        if self.runner == "library" and action.kind == FORWARD:
            self._kept.hold(("output", action.pipe, before, *_of_batch(action)), Item("boundary", stage), "stage")
        if self.runner != "by_hand":
            return
        message = message_for(action)
        sender = self.schedule.placement[action.pipe][before]
        while message not in self._mail:
            coming = self._expected[sender].popleft()
            self._let_go(sender, coming)
            self._mail.add(coming)
            self._kept.hold(*_tensor_of(coming), "mail")
        self._mail.discard(message)
        tensor, item = _tensor_of(message)
        self._kept.hold(tensor, item, "stage" if action.kind == FORWARD else "backward")
        self._kept.release(tensor, "mail")

    def _let_go(self, sender: int, coming: StageMessage) -> None:
        """Free what the sender of a message had taken before it sent it, as the lab's runtime does."""
        still_under_way = []
        for receiver, message in self._under_way:
            if receiver == sender and self._taken_at[message] <= self._sent_at[coming]:
                self._kept.release(_tensor_of(message)[0], "sent")
            else:
                still_under_way.append((receiver, message))
        self._under_way = still_under_way

    def _send(self, action: Action) -> None:
        """Hand over an output, or the gradient of an input."""
        message = message_after(action)
        if not 0 <= message.stage <= self.last or self.runner == "library":
            return
        tensor, item = _tensor_of(message)
        local = self._is_local(action, message.stage)
        if self.runner == "by_hand":
            self._kept.hold(tensor, item, "mail" if local else "sent")
            if local:
                self._mail.add(message)
            else:
                self._under_way.append((self.schedule.placement[action.pipe][message.stage], message))
        elif not local and self.runner != "1f1b":
            self._kept.hold(tensor, item, "sent")
        elif not local and action.kind != FORWARD:
            self._kept.hold(tensor, item, "sent")
            self._kept.release(self._former, "sent")
            self._former = tensor
        elif not local and action.micro_batch == self._ahead - 2:
            self._kept.hold(tensor, item, "sent")  # by `send_work`, which its next sends replace

    def _forwarded(self, action: Action) -> None:
        unit, stage = _unit(action), action.stage
        kind: Literal["activations", "for halves"] = "for halves" if unit in self.in_halves else "activations"
        self._kept.hold(("kept", unit), Item(kind, stage), "stage")
        torchs = self.runner in ("table", "gpipe", "1f1b")
        if stage == self.last:
            if torchs:
                self._kept.hold(("logits", unit), Item("logits", stage), "stage")
        elif not (torchs and self._is_local(action, stage + 1)):  # there it is the buffer of the next stage
            self._kept.hold(("output", *unit), Item("boundary", stage + 1), "stage")
        self._send(action)

    def _backwarded(self, action: Action) -> None:
        unit, stage = _unit(action), action.stage
        stage_input = ("output", action.pipe, stage - 1, *_of_batch(action))
        received = ("gradient", action.pipe, stage + 1, *_of_batch(action))
        own_gradient = ("gradient", *unit)
        if action.kind == BACKWARD_INPUT:
            if unit not in self.in_halves:
                self._send(action)
                return  # all is left to the second half
            between = Item("between halves", stage)
            self._kept.hold(("between", unit), between, "stage")
            self._kept.release(("kept", unit), "stage")
            self._kept.release(("logits", unit), "stage")
            if self.runner == "by_hand":
                self._kept.release(("output", *unit), "stage")
                self._kept.hold(own_gradient, Item("boundary", stage), "stage")
            if stage not in self.retaining:
                self._kept.release(received, "backward")
            self._send(action)
            return
        for tensor in (
            ("kept", unit),
            ("between", unit),
            ("logits", unit),
            ("output", *unit),
            stage_input,
            own_gradient,
        ):
            self._kept.release(tensor, "stage")
        self._kept.release(received, "backward")
        if action.kind == BACKWARD:
            self._send(action)
        if self.runner == "1f1b" and action.micro_batch == self.schedule.micro_batches - self._ahead:
            self._kept.release(("output", action.pipe, stage, self._ahead - 2, 0), "sent")


def _of_batch(action: Action) -> tuple[int, int]:
    return action.micro_batch, action.token_slice


def _unit(action: Action) -> tuple[int, int, int, int]:
    """Stage and micro-batch of an action."""
    return action.pipe, action.stage, *_of_batch(action)


def _tensor_of(message: StageMessage) -> tuple[Hashable, Item]:
    """A message's tensor, by the stage that has made it, and its size."""
    maker = message.stage + (-1 if message.forward else 1)
    name = "output" if message.forward else "gradient"
    return (name, message.pipe, maker, message.micro_batch, 0), Item("boundary", max(message.stage, maker))
