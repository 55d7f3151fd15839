"""Memory of a pipeline's rank: the schedule's actions one after the other, each with what the rank keeps besides.

A trace of all blocks is cut into the passes of each stage. An action replays its stage's pass; what the rank keeps then
of other micro-batches and of other stages is counted from the schedule's own order. What that is depends on who runs
the schedule. A message has the bytes of its boundary:

    by hand             what has been received, until its backward; what was sent, until a message of the receiver shows
                        that it has been taken
    torch, all          a buffer for each message that is received, for good (`communication.receive_buffers_bytes`);
                        the logits, until their backward
    other libraries     what has been received, and what a stage gives, until its backward
    torch, its table    besides, all that a step has sent, until its end: the list of sends holds it
    torch, GPipe        the same
    torch, 1F1B         the last gradient that was sent, until the next one is; the output that was sent last before the
                        first backward, until all forwards are done

**Split backward.** Between its halves a stage keeps all that the paths below its topmost weights have saved, and the
gradients of the outputs of its layers. A first stage does nothing in its first half, and all in its second.

Source: torch 2.13, `torch/distributed/pipelining/schedules.py`, `stage.py` (`backward_one_chunk`) and `_backward.py`;
`dlojz.pipeline.runtime`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from dlojz.config.run_config import RunConfig
from dlojz.pipeline.messages import SENDING, StageMessage, message_after, message_for, messages_of, places_of_messages
from dlojz.pipeline.partition_baselines import schedule_of
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Action, Schedule
from dlojz.prediction.communication import boundary_bytes, samples_bytes
from dlojz.prediction.engine_memory import EngineMemory, Ledger
from dlojz.prediction.model_trace import block_number, block_of, trace_of
from dlojz.prediction.shapes import axes_of, bounds_of, model_shapes, rank_stages
from dlojz.prediction.step_replay import StepReplay
from dlojz.prediction.trace import Allocation, MemoryTrace, TraceMark
from dlojz.results.footprint import Category, Memory

Runner = Literal["by_hand", "table", "gpipe", "1f1b", "library"]
"""Who runs a schedule: the lab, torch (by its table, or by a class of its own), or another library."""
COMPUTED = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)
ENDS_BACKWARD = (BACKWARD, BACKWARD_WEIGHT)


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
    """Whether the schedule of a run's pipeline has backwards in two halves."""
    return config.layout.pp > 1 and schedule_of(config.layout).splits_backward


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
        schedule: of the pipeline.
        rank: of the pipeline, from 0.
        runner: who runs it.
        retaining: stages whose second half of a backward needs the gradient that the first half has received.
    """

    def __init__(self, schedule: Schedule, rank: int, runner: Runner, retaining: frozenset[int] = frozenset()) -> None:
        self.schedule, self.rank, self.runner, self.retaining = schedule, rank, runner, retaining
        self.last = schedule.stages - 1
        self.elements = [one for each in schedule.orders[rank] for one in each.elements if one.kind in COMPUTED]
        self.in_halves = {_unit(one) for one in self.elements if one.kind == BACKWARD_INPUT and one.stage}
        self._kept = _Holders()
        self._mail: set[StageMessage] = set()
        self._under_way: list[tuple[int, StageMessage]] = []
        self._former: Hashable = None
        self._ahead = min(schedule.micro_batches, schedule.stages - rank)
        """Forwards before the first backward, in 1F1B."""
        if runner == "by_hand":
            self._sent_at, self._taken_at = places_of_messages(schedule)
            self._expected = [
                deque(message for receiver, message in messages_of(schedule, sender) if receiver == rank != sender)
                for sender in range(schedule.ranks)
            ]

    def moments(self) -> Iterator[Moment]:
        """Yield each action of the step with what is kept then."""
        for action in self.elements:
            self._receive(action)
            own = self._own(action)
            others = {item: count for item, count in self._kept.counts.items() if count}
            if own is not None:
                others[own] -= 1
            yield Moment(action, others, own)
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
        entered = ("output", action.pipe, stage - 1, *_of_batch(action))
        received = ("gradient", action.pipe, stage + 1, *_of_batch(action))
        own_gradient = ("gradient", *unit)
        if action.kind == BACKWARD_INPUT:
            if stage == 0:
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
        for tensor in (("kept", unit), ("between", unit), ("logits", unit), ("output", *unit), entered, own_gradient):
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


@dataclass
class StagePasses:
    """Passes of one stage, cut from a trace of all blocks.

    Attributes:
        trace: the whole one.
        events: of each pass (`forward`, `backward`, `weights`), in order.
        kept: storages that forward leaves for backward, but for what the stage gives.
        between: storages that are there between two halves of a backward.
        retains: whether the second half needs the gradient that the first one has received.
        logits: storage of the model's output, where the stage has it and backward does not keep it.
    """

    trace: MemoryTrace
    events: dict[str, list[Allocation | TraceMark]] = field(default_factory=lambda: defaultdict(list))
    kept: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    retains: bool = False
    logits: int = -1

    def bytes_of(self, storages: Iterable[int]) -> int:
        """Bytes of storages on the device."""
        return sum(self.trace.bytes_of[one] for one in storages if one not in self.trace.on_host)


def cut_passes(trace: MemoryTrace, bounds: tuple[int, ...], stages: Iterable[int]) -> dict[int, StagePasses]:
    """Cut a trace of all blocks into the passes of some stages."""
    last = len(bounds) - 2
    found = {stage: StagePasses(trace) for stage in stages}

    def stage_at(module: str) -> int:
        number = block_number(module)
        return last if number is None else bisect_right(bounds, number) - 1

    owner: dict[int, int] = {}
    after_first_half: dict[int, int] = {}
    number_of_pass = "forward"
    for event in trace.events:
        if isinstance(event, TraceMark):
            if event.what in ("backward", "weights"):
                number_of_pass = event.what
            for stage in found if event.name == "" else {stage_at(event.name)} & found.keys():
                found[stage].events[number_of_pass].append(event)
            continue
        if event.phase == "data":
            continue
        number_of_pass = event.phase
        stage = stage_at(event.module)
        made_by = owner.setdefault(event.storage, stage)
        if event.phase != "weights":
            after_first_half[event.storage] = after_first_half.get(event.storage, 0) + event.delta_bytes
        told = event
        if not event.delta_bytes and made_by != stage:
            # A sum of gradients in the memory of one that another rank has made: here it is a tensor more.
            told = replace(event, delta_bytes=trace.bytes_of[event.storage])
        elif event.delta_bytes < 0:
            stage = made_by  # a release belongs to whose allocation it ends
        if stage in found:
            found[stage].events[event.phase].append(told)
    for stage, passes in found.items():
        given = trace.output_of.get(f"blocks.{bounds[stage + 1] - 1}", -1)
        own = [one for one in trace.bytes_of if owner.get(one, -1) == stage]
        passes.kept = tuple(one for one in own if one in trace.kept and (one != given or stage == last))
        passes.logits = given if stage == last and given in own and given not in trace.kept else -1
        entered = trace.gradient_of.get(f"blocks.{bounds[stage] - 1}", -1)
        passes.between = tuple(one for one in own if after_first_half.get(one) and one not in (given, entered))
        received = trace.gradient_of.get(f"blocks.{bounds[stage + 1] - 1}", -1)
        passes.retains = stage < last and bool(after_first_half.get(received))
    return found


@dataclass(frozen=True)
class RankPasses:
    """Passes of all stages of a rank, and the bytes of what it may keep of them.

    Attributes:
        whole: with a whole backward, by stage.
        halves: with one in two halves; of no stage where the schedule has none.
        item_bytes: bytes of one of each item.
    """

    whole: dict[int, StagePasses]
    halves: dict[int, StagePasses]
    item_bytes: Mapping[Item, int]

    def of(self, own: Item) -> tuple[StagePasses, tuple[int, ...]]:
        """Passes of a stage that keeps this of a micro-batch, and the storages that it keeps."""
        if own.kind == "activations":
            return self.whole[own.stage], self.whole[own.stage].kept
        passes = self.halves[own.stage]
        return passes, passes.kept if own.kind == "for halves" else passes.between

    @property
    def retaining(self) -> frozenset[int]:
        """Stages whose second half needs the gradient that the first one has received."""
        return frozenset(stage for stage, passes in self.halves.items() if passes.retains)


def passes_of(
    whole: MemoryTrace,
    halves: MemoryTrace | None,
    bounds: tuple[int, ...],
    stages: Iterable[int],
    at_block: tuple[int, ...],
) -> RankPasses:
    """Cut the traces of all blocks into the passes of a rank's stages.

    Args:
        whole, halves: with a whole backward, and with one in two halves where the schedule has such.
        bounds: first block of each stage, and the number of blocks.
        stages: of the rank.
        at_block: bytes of what enters each block.
    """
    own = sorted(set(stages))
    of_whole = cut_passes(whole, bounds, own)
    of_halves = {} if halves is None else cut_passes(halves, bounds, [stage for stage in own if stage])
    sizes: dict[Item, int] = {}
    for stage in own:
        sizes[Item("activations", stage)] = of_whole[stage].bytes_of(of_whole[stage].kept)
        logits = of_whole[stage].logits
        sizes[Item("logits", stage)] = of_whole[stage].bytes_of([logits]) if logits >= 0 else 0
        sizes |= {Item("boundary", one): at_block[bounds[one]] for one in (stage, stage + 1)}
        if stage in of_halves:
            sizes[Item("for halves", stage)] = of_halves[stage].bytes_of(of_halves[stage].kept)
            sizes[Item("between halves", stage)] = of_halves[stage].bytes_of(of_halves[stage].between)
    return RankPasses(of_whole, of_halves, sizes)


class PipelineReplay(StepReplay):
    """Replay of a pipeline rank's step, action by action.

    Of actions alike (the same pass of the same stage, as many gradients there already) only the first, the fullest and
    the last are replayed: the others allocate the same on top of less.

    Args:
        config, trace, states, overlay, samples_bytes, ledger: as for `StepReplay`.
        passes: of the rank's stages.
        moments: the rank's actions, with what it keeps at each.
    """

    def __init__(
        self,
        config: RunConfig,
        trace: MemoryTrace,
        states: Memory,
        overlay: EngineMemory,
        passes: RankPasses,
        moments: list[Moment],
        *,
        samples_bytes: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        super().__init__(config, trace, states, overlay, samples_bytes=samples_bytes, ledger=ledger)
        self._passes = passes
        self._moments = moments
        self._chosen = self._fullest()
        self._counts: dict[Item, int] = {}
        self._is_last = False
        self._former: list[Hashable] = []
        """Gradients of the weights that were computed last in a second half: `stage_backward_weight` names them still,
        while it computes the next ones."""
        self._in_turn: list[Hashable] | None = None

    @property
    def last(self) -> bool:
        """Whether no other backward of this stage follows in this step."""
        return self._is_last

    def _fullest(self) -> list[tuple[Moment, bool]]:
        """The actions to replay, in order, each with whether it ends the last backward of its stage."""
        begun: set[tuple[int, int]] = set()
        final = {
            (one.action.pipe, one.action.stage): number
            for number, one in enumerate(self._moments)
            if one.action.kind in ENDS_BACKWARD
        }
        groups: dict[Hashable, list[int]] = defaultdict(list)
        for number, (action, _, own) in enumerate(self._moments):
            place = (action.pipe, action.stage)
            is_last = final.get(place) == number
            groups[action.kind, place, own, len(begun), place in begun, is_last].append(number)
            if action.kind in ENDS_BACKWARD:
                begun.add(place)
        chosen: dict[int, bool] = {}
        for group, numbers in groups.items():
            is_last = bool(group[-1])  # type: ignore[index]
            fullest = max(numbers, key=lambda number: self._kept_bytes(self._moments[number].others))
            chosen |= dict.fromkeys((numbers[0], fullest, numbers[-1]), is_last)
        return [(self._moments[number], chosen[number]) for number in sorted(chosen)]

    def _kept_bytes(self, others: Mapping[Item, int]) -> int:
        return sum(count * self._passes.item_bytes[item] for item, count in others.items())

    def _micro_batches(self) -> None:
        of_rank = self.trace, self._is_gradient
        for moment, is_last in self._chosen:
            self._is_last = is_last
            self.micro_batch = moment.action.micro_batch
            self._act(moment)
        self._keep({})
        self.trace, self._is_gradient = of_rank

    def _keep(self, others: Mapping[Item, int]) -> None:
        """Hold what is kept of other micro-batches, piece by piece; of what was held before, the rest is dropped."""
        for item in {*self._counts, *others}:
            before, now = self._counts.get(item, 0), others.get(item, 0)
            for number in range(now, before):
                self.ledger.drop(("in flight", item, number))
            for number in range(before, now):
                self.ledger.hold(("in flight", item, number), "activations", self._passes.item_bytes[item])
        self._counts = dict(others)

    def _act(self, moment: Moment) -> None:
        action, others, own = moment
        self._at("forward" if action.kind == FORWARD else "backward")
        self._keep(others)
        in_halves = own is not None and own.kind != "activations"
        if action.kind == BACKWARD_INPUT and not in_halves:
            return  # a first stage leaves all to the second half
        if own is None:
            passes = self._passes.whole[action.stage]
            kept: tuple[int, ...] = ()
            part = "forward"
        else:
            passes, kept = self._passes.of(own)
            part = "weights" if action.kind == BACKWARD_WEIGHT and in_halves else "backward"
        self.trace = passes.trace
        self._is_gradient = _gradients_of(passes)
        number = self.micro_batch
        for storage in kept:
            self._hold_kept(storage)
        self._in_turn = [] if part == "weights" else None
        for event in passes.events[part]:
            if isinstance(event, TraceMark):
                self._mark(event)
                continue
            self._at("forward" if part == "forward" else "backward", event.module)
            if self._in_turn and event.delta_bytes > 0:
                self._former, self._in_turn = self._in_turn, []
            self._allocate(event, number)
        for key in (*self._former, *(self._in_turn or ())):
            self.ledger.drop(key)
        self._former, self._in_turn = [], None
        for storage in passes.trace.bytes_of:
            self.ledger.drop(("storage", number, storage))
        if action.kind in ENDS_BACKWARD:
            self.end_backward()

    def _mark(self, event: TraceMark) -> None:
        added = event.what == "ready" and event.name in self._accumulated and self.overlay.keeps_gradients
        if added and self._in_turn is not None:
            for key in self._former:
                self.ledger.drop(key)
            self._former = []
            former = ("gradient", event.name, "former")
            self.ledger.rename(("gradient", event.name, "new"), former)
            self._in_turn.append(former)
        super()._mark(event)

    def _hold_kept(self, storage: int) -> None:
        """Hold again what the forward of this micro-batch has kept."""
        trace, key = self.trace, ("storage", self.micro_batch, storage)
        if storage in trace.on_host:
            self.ledger.hold_on_host(key, trace.bytes_of[storage])
        else:
            category: Category = "activations"
            self.ledger.hold(key, category, trace.bytes_of[storage], block_of(trace.module_of[storage]))


def _gradients_of(passes: StagePasses) -> dict[int, str]:
    return {
        event.storage: event.name
        for events in passes.events.values()
        for event in events
        if isinstance(event, TraceMark) and event.what == "ready"
    }


def pipeline_replay(
    config: RunConfig,
    rank: int,
    trace: MemoryTrace,
    states: Memory,
    overlay: EngineMemory,
    *,
    retold: Callable[[MemoryTrace], MemoryTrace] = lambda trace: trace,
    on_gpu: bool = False,
    ledger: Ledger | None = None,
) -> PipelineReplay:
    """Prepare the replay of a pipeline rank's step, to be run.

    Args:
        config: the run.
        rank: one that it has.
        trace: of this rank.
        states: of this rank.
        overlay: of its engine.
        retold: changes the traces of all blocks beforehand.
        on_gpu: with the corrections for a GPU.
        ledger: to write in; by default a new one.
    """
    schedule, pipeline_rank = schedule_of(config.layout), axes_of(config, rank)[2]
    passes = passes_of(
        retold(trace_of(config, rank, on_gpu=on_gpu)),
        retold(trace_of(config, rank, on_gpu=on_gpu, in_halves=True)) if splits_backward(config) else None,
        bounds_of(config, model_shapes(config)),
        rank_stages(config, rank),
        boundary_bytes(config),
    )
    order = RankOrder(schedule, pipeline_rank, runner_of(config), passes.retaining)
    return PipelineReplay(
        config,
        trace,
        states,
        overlay,
        passes,
        list(order.moments()),
        samples_bytes=samples_bytes(config, rank),
        ledger=ledger,
    )
