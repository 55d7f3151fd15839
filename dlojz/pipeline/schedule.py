"""Schedule of a pipeline: the ordered actions of each rank, their dependency graph, and their costs.

An action is a plain tuple, written as torch's pipeline runtime does (`2F0`, `3I1`, `0W2`, `(1F1;1B0)OVERLAP_F_B`) and
read back by `parse_action`. Three additions have no counterpart in torch: a leading `u` for the second pipe of a
bidirectional schedule, a trailing `.t` for a token slice, and the kinds `U`, `E` and `L`.

Each rank executes its list strictly in order. An action waits for the one before it on its rank; across ranks, a
forward waits for the forward of the previous stage, a backward for the backward of the next stage. Compiling the graph
is O(actions) and refuses a schedule that deadlocks, with the cycle. Start times and memory are derived from the
schedule and its costs by the simulator; costs may have any unit of time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, one_of
from dlojz.hardware.links import Link

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

FORWARD = "F"
BACKWARD = "B"
"""Whole backward: gradient of the input and gradient of the weights."""
BACKWARD_INPUT = "I"
"""Backward for the input alone: what the stage before waits for (Qi et al. 2024, arXiv 2401.10241, §2)."""
BACKWARD_WEIGHT = "W"
"""Backward for the weights alone: nobody waits for it but the optimizer."""
OVERLAPPED = "O"
"""A forward and a backward at once, so that each hides the other's communication (DualPipe)."""
UPDATE = "U"
"""Optimizer step of one stage, where a schedule has its own (asynchronous pipelines)."""
EVICT = "E"
"""Send the activations of a micro-batch to a partner rank (BPipe)."""
LOAD = "L"
"""Fetch them back before the backward that needs them."""

KINDS = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, OVERLAPPED, UPDATE, EVICT, LOAD)
COMPUTES = (FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT)

COST_OF = {
    FORWARD: "forward",
    BACKWARD: "backward",
    BACKWARD_INPUT: "backward_input",
    BACKWARD_WEIGHT: "backward_weight",
    OVERLAPPED: "overlapped",
    UPDATE: "update",
}
"""The field of `Costs` that holds the time of each kind of action."""

_PIPES = ("", "u")
_ONE = re.compile(r"(?P<pipe>u?)(?P<stage>\d+)(?P<kind>[FBIWUEL])(?P<micro_batch>\d+)(?:\.(?P<token_slice>\d+))?")
_OVERLAPPED = re.compile(r"\((?P<first>[^;()]+);(?P<second>[^;()]+)\)(?:OVERLAP_F_B)?")


class Action(NamedTuple):
    """Action of one rank; `stage` counts model stages from the input, over all chunks.

    `pipe` is the direction in a bidirectional schedule (0 down, 1 up), `token_slice` the slice of a sequence
    (TeraPipe); `parts` are the forward and the backward of an overlapped action, whose stage and micro-batch are those
    of its first part.
    """

    kind: str
    stage: int
    micro_batch: int
    pipe: int = 0
    token_slice: int = 0
    parts: tuple[Action, ...] = ()

    def __str__(self) -> str:
        if self.parts:
            return f"({';'.join(str(part) for part in self.parts)})OVERLAP_F_B"
        token_slice = f".{self.token_slice}" if self.token_slice else ""
        return f"{_PIPES[self.pipe]}{self.stage}{self.kind}{self.micro_batch}{token_slice}"

    @property
    def elements(self) -> tuple[Action, ...]:
        """Parts of an overlapped action, else the action itself."""
        return self.parts or (self,)


def overlapped(first_part: Action, second_part: Action) -> Action:
    """Build the action of a forward and a backward that run at once."""
    return Action(
        OVERLAPPED,
        first_part.stage,
        first_part.micro_batch,
        first_part.pipe,
        first_part.token_slice,
        (first_part, second_part),
    )


def parse_action(text: str) -> Action:
    """Read an action as `str` writes it.

    Raises:
        LabError: if the text is no action.
    """
    cell = text.strip()
    pair_match = _OVERLAPPED.fullmatch(cell)
    if pair_match:
        return overlapped(parse_action(pair_match["first"]), parse_action(pair_match["second"]))
    action_match = _ONE.fullmatch(cell)
    if action_match is None:
        raise phrase.refused("no action", cell=cell[:40])
    return Action(
        action_match["kind"],
        int(action_match["stage"]),
        int(action_match["micro_batch"]),
        _PIPES.index(action_match["pipe"]),
        int(action_match["token_slice"] or 0),
    )


Orders = tuple[tuple[Action, ...], ...]
Placement = tuple[tuple[int, ...], ...]
Integers = NDArray[np.int64]

_FORWARDS, _BACKWARDS, _WEIGHTS, _EVICTIONS, _LOADS, _UPDATES = range(6)
_TABLE = {
    FORWARD: _FORWARDS,
    BACKWARD: _BACKWARDS,
    BACKWARD_INPUT: _BACKWARDS,
    BACKWARD_WEIGHT: _WEIGHTS,
    EVICT: _EVICTIONS,
    LOAD: _LOADS,
    UPDATE: _UPDATES,
}
"""Table of each kind: B and I both produce the gradient that the stage before waits for."""


@dataclass(frozen=True)
class ActionGraph:
    """Compiled dependencies; actions are numbered rank after rank, and number `actions` stands for "nothing".

    Attributes:
        order: all actions, each after everything it waits for.
        previous: for each, the one before it on its rank.
        needs: for each, the one on another rank (or stage) whose output it reads.
        also: further (action, needed action) pairs: of overlapped actions, and loads that a backward waits for.
    """

    actions: int
    order: list[int]
    previous: list[int]
    needs: list[int]
    also: tuple[tuple[int, int], ...]
    rank: Integers

    def edges(self) -> list[tuple[int, int]]:
        """List (action, the one that reads its output), but not the next on the same rank; `also` comes last."""
        # `actions` itself is the number of "nothing".
        main = [(producer, index) for index, producer in enumerate(self.needs) if producer < self.actions]
        return main + [(producer, index) for index, producer in self.also]


def compile_graph(orders: Orders, placement: Placement, micro_batches: int, token_slices: int = 1) -> ActionGraph:
    """Find what each action waits for, and an order in which all can run.

    Raises:
        LabError: if an action waits for one that no rank has, or if actions wait for each other.
    """
    actions = [action for order in orders for action in order]
    count = len(actions)
    # `owner`: number of the action to which each element belongs; an overlapped action owns two.
    elements, owner = _elements(actions)
    stages, pipes, units = len(placement[0]), len(placement), micro_batches * token_slices
    # Whole columns at once: a schedule may have 100,000 actions.
    kind = np.array([_TABLE[element[0]] for element in elements], np.int64)
    numbers = np.array([element[1:5] for element in elements], np.int64).reshape(-1, 4)
    stage, micro_batch, pipe, token_slice = numbers.T
    # Micro-batch and token slice as one number.
    unit = micro_batch * token_slices + token_slice
    _refuse_out_of_range(elements, stage, unit, pipe, (stages, units, pipes))
    # [table, pipe, stage, unit] → number of the action that produces it; `count` where none does.
    action_table = np.full((6, pipes, stages, units), count, np.int64)
    action_table[kind, pipe, stage, unit] = owner

    needs = np.full(len(elements), count, np.int64)
    # A forward reads the output of the stage before.
    later = (kind == _FORWARDS) & (stage > 0)
    needs[later] = action_table[_FORWARDS, pipe[later], stage[later] - 1, unit[later]]
    # A backward reads the gradient of the stage behind; the last stage has its own loss.
    earlier = (kind == _BACKWARDS) & (stage < stages - 1)
    needs[earlier] = action_table[_BACKWARDS, pipe[earlier], stage[earlier] + 1, unit[earlier]]
    missing = np.flatnonzero((later | earlier) & (needs == count))
    if missing.size:
        raise LabError(_waits_for_nobody(elements[int(missing[0])]))

    _refuse_backward_first(elements, owner, action_table, kind, (pipe, stage, unit))
    rank = np.repeat(np.arange(len(orders)), [len(order) for order in orders])
    # The action before on the rank; a rank's first one has `count`, nothing.
    previous = np.arange(-1, count - 1)
    firsts = np.cumsum([0, *(len(order) for order in orders)])[:-1]
    # A last rank without actions has its first number beyond all.
    previous[firsts[firsts < count]] = count
    also: list[tuple[int, int]] = []
    main = needs
    # Overlapped actions read two inputs: the first in `needs`, the others in `also`.
    if len(elements) != count:
        main = np.full(count, count, np.int64)
        filled_actions: set[int] = set()
        for index, producer in zip(owner.tolist(), needs.tolist(), strict=True):
            if index in filled_actions:
                if producer != count:
                    also.append((index, producer))
            else:
                main[index] = producer
                filled_actions.add(index)
    if np.any(kind == _LOADS):
        # A backward of evicted activations also waits until they are back.
        backwards = kind == _BACKWARDS
        loads = action_table[_LOADS, pipe[backwards], stage[backwards], unit[backwards]]
        also += [(b, load) for b, load in zip(owner[backwards].tolist(), loads.tolist(), strict=True) if load != count]
    order = _run_order(orders, main.tolist(), also, rank)
    return ActionGraph(count, order, previous.tolist(), main.tolist(), tuple(also), rank)


def _elements(actions: list[Action]) -> tuple[list[Action], Integers]:
    """Split overlapped actions into their parts, and number the action of each part."""
    if not any(action[5] for action in actions):
        return actions, np.arange(len(actions))
    pairs = [(element, number) for number, action in enumerate(actions) for element in action.elements]
    return [element for element, _ in pairs], np.array([number for _, number in pairs], np.int64)


def _refuse_out_of_range(
    elements: list[Action], stage: Integers, unit: Integers, pipe: Integers, limits: tuple[int, int, int]
) -> None:
    stages, units, pipes = limits
    wrong = np.flatnonzero((stage >= stages) | (unit >= units) | (pipe >= pipes) | (stage < 0) | (unit < 0))
    if wrong.size:
        action = elements[int(wrong[0])]
        raise phrase.refused(
            "action out of range", action=action, last_stage=stages - 1, last_micro_batch=units - 1, pipes=pipes
        )


def _refuse_backward_first(
    elements: list[Action],
    owner: Integers,
    action_table: Integers,
    kind: Integers,
    coordinates: tuple[Integers, Integers, Integers],
) -> None:
    """Refuse a backward before its forward, or a backward for the weights before that for the input."""
    for late, early in ((_BACKWARDS, _FORWARDS), (_WEIGHTS, _BACKWARDS)):
        numbers = np.flatnonzero(kind == late)
        # Numbers grow along a rank, and `count` is larger than all.
        before = action_table[early][tuple(column[numbers] for column in coordinates)]
        wrong = np.flatnonzero(before >= owner[numbers])  # later on the rank, or nowhere
        if wrong.size:
            action = elements[int(numbers[wrong[0]])]
            source = action._replace(kind=FORWARD if late == _BACKWARDS else BACKWARD_INPUT)
            raise phrase.refused("backward first", action=action, source=source)


def _waits_for_nobody(action: Action) -> str:
    forward = action.kind == FORWARD
    source = action._replace(kind=FORWARD if forward else "B", stage=action.stage + (-1 if forward else 1))
    spelled = str(source) if forward else f"{source} (or {source._replace(kind='I')})"
    return phrase(
        "waits for nobody", action=action, spelled=spelled, source=source, spelled_fr=spelled.replace("or", "ou")
    )


def _run_order(orders: Orders, needs: list[int], also: list[tuple[int, int]], rank: Integers) -> list[int]:
    """Advance each rank until it must wait, and resume it when the needed action has run: O(actions)."""
    count = len(needs)
    has_run = bytearray(count + 1)
    has_run[count] = 1  # "nothing" has always run
    extra: dict[int, list[int]] = {}
    for index, producer in also:
        extra.setdefault(index, []).append(producer)
    firsts = [0, *accumulate(map(len, orders))]
    # Where each rank stands, and where its actions end.
    position, ends = firsts[:-1], firsts[1:]
    waiters: dict[int, list[int]] = {}
    order: list[int] = []
    add = order.append
    ready = list(range(len(orders)))[::-1]
    while ready:
        current = ready.pop()
        index, end = position[current], ends[current]
        while index < end:
            producer = needs[index]
            # The main input is there: the further ones may not be.
            if extra and has_run[producer] and index in extra:
                producer = next((number for number in extra[index] if not has_run[number]), count)
            if not has_run[producer]:
                # Parked until that action has run: no rank is looked at twice for one wait.
                if producer in waiters:
                    waiters[producer].append(current)
                else:
                    waiters[producer] = [current]
                break
            has_run[index] = 1
            add(index)
            if index in waiters:
                ready += waiters.pop(index)
            index += 1
        position[current] = index
    if len(order) < count:
        # Each rank that is not done, with the action that it cannot run and the one that this waits for.
        blocked = {
            current: (index, next(number for number in (needs[index], *extra.get(index, ())) if not has_run[number]))
            for current, (index, end) in enumerate(zip(position, ends, strict=True))
            if index < end
        }
        raise LabError(_deadlock(list(chain.from_iterable(orders)), blocked, rank.tolist()))
    return order


def _deadlock(actions: list[Action], blocked: dict[int, tuple[int, int]], rank_of: list[int]) -> str:
    """Describe the cycle; `blocked` holds each blocked rank's next action, and the one it waits for."""
    current, path = next(iter(blocked)), []
    # Every blocked rank waits for another blocked one: the walk comes back to where it was.
    while current not in path:
        path.append(current)
        current = rank_of[blocked[current][1]]
    parts_en, parts_fr = [], []
    for rank in path[path.index(current) :]:
        index, producer = blocked[rank]
        holder = rank_of[producer]
        before = blocked[holder][0]
        behind_en = "" if producer == before else f", which comes after {actions[before]}"
        behind_fr = "" if producer == before else f", placée après {actions[before]}"
        parts_en.append(f"rank {rank} at {actions[index]} waits for {actions[producer]} of rank {holder}{behind_en}")
        parts_fr.append(f"le rang {rank}, à {actions[index]}, attend {actions[producer]} du rang {holder}{behind_fr}")
    return phrase("deadlock", parts_en="; ".join(parts_en), parts_fr=" ; ".join(parts_fr))


MOST_ORDERS_SHOWN, MOST_ACTIONS_SHOWN = 8, 24
"""Ranks, and actions of each, in the text of a schedule."""


def _beginning(order: Sequence[Action]) -> str:
    """The first actions of an order in a line."""
    return " ".join([*map(str, order[:MOST_ACTIONS_SHOWN]), *(["…"] if len(order) > MOST_ACTIONS_SHOWN else [])])


@dataclass(frozen=True)
class Schedule:
    """Ordered actions per rank.

    Attributes:
        name: its name in the catalogue, or "custom".
        orders: actions of each rank, in the order in which it executes them.
        placement: rank of each stage, per pipe: `placement[pipe][stage]`. One pipe, but for bidirectional schedules,
            where each stage lives on two ranks.
        micro_batches: micro-batches of a step, over all pipes.
        token_slices: slices of each sequence (TeraPipe), 1 otherwise.
        barrier: the optimizer waits for every rank (True), or each rank steps on its own (False): tells whether an
            iteration lasts the makespan or the span.
        asynchronous: stages update their weights while micro-batches are in flight.
    """

    name: str
    orders: tuple[tuple[Action, ...], ...]
    placement: tuple[tuple[int, ...], ...]
    micro_batches: int
    token_slices: int = 1
    barrier: bool = True
    asynchronous: bool = False

    def __repr__(self) -> str:
        """Its name and size, then the beginning of each rank's order: ten lines at most."""
        head = f"{self.name}: {len(self.orders)} ranks, {self.micro_batches} micro-batches"
        lines = [f"{rank}: {_beginning(order)}" for rank, order in enumerate(self.orders[:MOST_ORDERS_SHOWN])]
        return "\n".join([head, *lines, *(["…"] if len(self.orders) > MOST_ORDERS_SHOWN else [])])

    @classmethod
    def of(
        cls,
        name: str,
        orders: Iterable[Iterable[Action]],
        placement: Sequence[int] | Sequence[Sequence[int]],
        micro_batches: int,
        *,
        token_slices: int = 1,
        barrier: bool = True,
        asynchronous: bool = False,
    ) -> Schedule:
        """Build a schedule from any iterables; `placement` may be one list (`rank of stage`) for one pipe."""
        # A flat list of ranks is one pipe.
        first_entry = placement[0] if placement else 0
        pipes = (placement,) if isinstance(first_entry, int) else placement
        return cls(
            name,
            tuple(tuple(order) for order in orders),
            tuple(tuple(pipe) for pipe in pipes),  # type: ignore[arg-type]
            micro_batches,
            token_slices,
            barrier,
            asynchronous,
        )

    def with_orders(self, orders: Iterable[Iterable[Action]]) -> Schedule:
        """Copy the schedule with other orders, as a student edits them."""
        return replace(self, orders=tuple(tuple(order) for order in orders))

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.orders)

    @property
    def stages(self) -> int:
        """Number of model stages, over all chunks."""
        return len(self.placement[0])

    @property
    def pipes(self) -> int:
        """Directions: 2 for bidirectional schedules, which keep each stage twice."""
        return len(self.placement)

    @property
    def chunks(self) -> int:
        """Largest number of stages on a rank, over all pipes."""
        stage_ranks = [rank for pipe in self.placement for rank in pipe]
        return max(stage_ranks.count(rank) for rank in range(self.ranks))

    @property
    def splits_backward(self) -> bool:
        """Whether some backward is split into input and weight parts."""
        return any(element.kind == BACKWARD_INPUT for action in self.actions for element in action.elements)

    @property
    def overlaps(self) -> bool:
        """Whether some forward and backward run at once."""
        return any(action.kind == OVERLAPPED for action in self.actions)

    @property
    def updates(self) -> bool:
        """Whether the schedule has updates of its stages."""
        return any(action.kind == UPDATE for action in self.actions)

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """All actions, rank after rank: the index into this tuple is the action's number everywhere."""
        return tuple(action for order in self.orders for action in order)

    @cached_property
    def first_of_rank(self) -> tuple[int, ...]:
        """Number of each rank's first action, and the total at the end."""
        return (0, *accumulate(map(len, self.orders)))

    @cached_property
    def graph(self) -> ActionGraph:
        """Dependency graph, compiled once for all costs.

        Raises:
            LabError: if the schedule cannot be executed.
        """
        return compile_graph(self.orders, self.placement, self.micro_batches, self.token_slices)

    def rank_of(self, action: Action) -> int:
        """The rank that holds the stage of an action."""
        return self.placement[action.pipe][action.stage]


PerStage = float | tuple[float, ...]
"""One value for every stage, or one per stage."""
PerLink = float | tuple[tuple[float, ...], ...]
"""One value for every link, or a matrix [from rank][to rank]."""
Sends = Literal["buffered", "paired", "rendezvous"]
SENDS: tuple[Sends, ...] = get_args(Sends)


@dataclass(frozen=True)
class Costs:
    """Times and memory of the actions.

    Attributes:
        forward, backward_input, backward_weight: time of one stage for one micro-batch.
        backward: time of a whole backward; by default the sum of its two parts.
        overlapped: time of a forward and a backward that run at once; by default the sum of both, so no gain.
        update: time of a stage's own optimizer step, in schedules that have one.
        overhead: time a rank needs between two of its actions, which is no work.
        latency: time a message is under way between two ranks, besides its bytes.
        bandwidth: bytes per unit of time; None: messages take their latency only.
        message_bytes: bytes of one message (one micro-batch's boundary activation, or its gradient).
        sends: "buffered" (the sender goes on at once; the literature's assumption), "paired" (the sender waits until
            the receiver has it; what a rank sends and receives between two actions is posted together), "rendezvous"
            (the same, but one after the other: where a careless runtime deadlocks).
        kept_for_input, kept_for_weight: activation memory of one micro-batch in one stage, in stage-micro-batches:
            from the start of its forward to the end of its backward for the input, and from there to the end of its
            backward for the weights (M_B and M_W of Qi et al. 2024, §2.3). A whole backward frees all at its end.
        slice_times: relative time of each token slice (TeraPipe); they are applied to forward and backward alike.
        evict, load: time that a rank spends on starting an eviction or a fetch (BPipe); `eviction_transfer` is how
            long the activations are under way, while both ranks compute.

    Raises:
        LabError: for a time that is negative or not finite.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    overlapped: PerStage | None = None
    update: PerStage = 0.0
    overhead: float = 0.0
    latency: PerLink = 0.0
    bandwidth: PerLink | None = None
    message_bytes: float = 0.0
    sends: Sends = "buffered"
    kept_for_input: PerStage = 1.0
    kept_for_weight: PerStage = 1.0
    slice_times: tuple[float, ...] = ()
    evict: float = 0.0
    load: float = 0.0
    eviction_transfer: float = 0.0

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise LabError(one_of("sends", self.sends, SENDS))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "sends" or value is None:
                continue
            if isinstance(value, list):
                # Tuples, so that costs can be compared and hashed.
                value = tuple(tuple(row) if isinstance(row, list) else row for row in value)
                object.__setattr__(self, field.name, value)
            for number in _numbers(value):
                # A bandwidth of 0 would make messages infinitely long.
                positive = field.name == "bandwidth"
                if not (
                    isinstance(number, int | float)
                    and math.isfinite(number)
                    and (number > 0 or (not positive and number == 0))
                ):
                    raise LabError(_refused(field.name, number, positive))

    def of_stage(self, name: str, stage: int) -> float:
        """Return the value of a per-stage field for one stage.

        Raises:
            LabError: if the field holds fewer values than there are stages.
        """
        value = getattr(self, name)
        if value is None:  # the sum of its parts
            parts = ("backward_input", "backward_weight") if name == "backward" else ("forward", "backward")
            return sum(self.of_stage(part, stage) for part in parts)
        if not isinstance(value, tuple):
            return float(value)
        if stage >= len(value):
            raise LabError(_not_per_stage(name, len(value), f"a stage {stage}", f"un étage {stage}"))
        return float(value[stage])

    def per_stage(self, name: str, stages: int) -> list[float]:
        """Return the values of a per-stage field for all stages; another number of values is refused."""
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != stages:
            raise LabError(_not_per_stage(name, len(value), f"{stages} stages", f"{stages} étages"))
        return [self.of_stage(name, stage) for stage in range(stages)]

    def delay(self, source: int, destination: int) -> float:
        """Time between the end of a producer and the moment its consumer on another rank may start."""
        if source == destination:
            return 0.0
        latency, bandwidth = _of_link("latency", self.latency, source, destination), math.inf
        # Without bytes the latency is all.
        if self.bandwidth is not None and self.message_bytes:
            bandwidth = _of_link("bandwidth", self.bandwidth, source, destination)
        delay: float = Link(latency, bandwidth).seconds(self.message_bytes)
        return delay

    def with_(self, **changes: object) -> Costs:
        """Copy the costs with some other fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _not_per_stage(name: str, values: int, stages_en: str, stages_fr: str) -> str:
    return phrase("other number of values", name=name, values=values, stages_en=stages_en, stages_fr=stages_fr)


def _numbers(value: object) -> Sequence[object]:
    if isinstance(value, tuple):
        return [number for row in value for number in (row if isinstance(row, tuple) else (row,))]
    return (value,)


def _refused(name: str, number: object, positive: bool) -> str:
    least_en, least_fr = ("above 0", "plus grand que 0") if positive else ("0 or more", "au moins égal à 0")
    return phrase("no finite number", name=name, least_en=least_en, number=number, least_fr=least_fr)


def _of_link(name: str, value: PerLink, source: int, destination: int) -> float:
    if not isinstance(value, tuple):
        return float(value)
    try:
        return float(value[source][destination])
    except IndexError:
        raise phrase.refused(
            "ragged matrix", name=name, value=len(value), source=source, destination=destination
        ) from None
