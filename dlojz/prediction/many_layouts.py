"""Memory of many layouts at once: the forecast's own traces and engine models, summed by arrays.

The traces and the engine's memory model of the forecast are summarised once by *slot* (a pass over a block); a layout's
peak is the largest sum over the slots:

    peak = max over slots of (states and buffers of the engine + activations of this stage and micro-batch
           + what the rank keeps of other stages and micro-batches at an action of this kind)

Activations of a slot are linear in the micro-batch: two traces, of `SAMPLED` samples, give the line. The engine's part
comes from its memory model on the gradients and marks of the trace alone. The two maxima of a slot need not coincide,
so the sum is an upper bound; tests/prediction/test_many_layouts.py holds it within 5 % of the forecast. The backward of
the last block is a slot for each of its gradients: with a large vocabulary, the gradient of the logits and that of the
head are each larger than all else, and the one is released before the engine reduces the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import chain
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import language
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.models.foreign.elsewhere import contents_hash
from dlojz.models.foreign.sources import changes_its_model
from dlojz.pipeline.messages import ENDS_BACKWARD, Item, RankOrder, Runner, runner_of, splits_backward
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD, Schedule
from dlojz.pipeline.schedule_catalogue import build
from dlojz.prediction import forecast
from dlojz.prediction.communication import boundary_bytes, receive_buffers_bytes, samples_bytes
from dlojz.prediction.engine_memory import Ledger, StepReplay
from dlojz.prediction.forecast import CUBLAS_HANDLES
from dlojz.prediction.model_trace import TURN_OF, TraceKey, block_of, key_of, trace_of, trace_of_rank
from dlojz.prediction.shapes import ModelShapes, RankPart, bounds_of, model_shapes, num_blocks
from dlojz.prediction.trace import Allocation, MemoryTrace, TraceMark
from dlojz.prediction.trace_store import is_kept, read, write
from dlojz.results.footprint import CATEGORIES, Category

Reals = NDArray[np.float64]
Slot = tuple[str, str]
"""A phase of the step and a block; the block is empty in the loss and outside of the passes. In backward the last block
is followed by the number of its gradients that are ready (`blocks.12.@3`)."""

Held = tuple[tuple[Item, float], ...]
"""What a rank keeps besides, with the stages by their places among its own, and how many of each."""
Act = tuple[str, int]
"""Kind of an action, and the place of its stage among the rank's own."""

SAMPLED: Final = (2, 8)
"""Samples of the micro-batches that are traced."""
STEADY: Final = 3
"""A pipeline's schedule is built for at most so many micro-batches per rank; beyond, it repeats."""
FINENESS: Final = 64
"""Parts of the largest item in which the sizes of the others are counted, to find the fullest action."""
PLACES: Final = ("first", "last", "between")
"""Micro-batches of a step that an engine treats alike; a single one is the last."""
PASSES: Final = ("data", "forward", "backward")
HALVES: Final = {BACKWARD_INPUT: "backward", BACKWARD_WEIGHT: "weights"}
"""Passes of a backward in two halves."""


_REFUSED: dict[Hashable, str] = {}
"""Why traces were refused, by what they depend on; empty where they were made."""


class RankMemories(NamedTuple):
    """Bytes of one rank at the peak of its step, for several micro-batches.

    Attributes:
        by_category: rows as in `dlojz.results.footprint.CATEGORIES`, one column per micro-batch.
        host: in the host's memory.
        in_flight: micro-batches whose activations are held at once, this one included.
        blocks: held by the rank.
    """

    by_category: Reals
    host: Reals
    in_flight: int
    blocks: int

    @property
    def peak_bytes(self) -> Reals:
        """Bytes of the allocator at the peak."""
        total: Reals = self.by_category.sum(axis=0)
        return total


def needed_traces(configs: list[RunConfig]) -> list[RunConfig]:
    """Select one run for each trace that `rank_memories` needs and the store lacks."""
    run_of_key = {key: run for config in configs for run in _sampled(config) for key in _keys_of(run)}
    return [run for key, run in run_of_key.items() if not is_kept(key)]


def make_trace(config: RunConfig) -> None:
    """Trace a run's model and keep the trace."""
    for key in _keys_of(config):
        trace_of(RankPart(config), on_gpu=True, in_halves=key.in_halves)


def _keys_of(config: RunConfig) -> list[TraceKey]:
    """What the traces of a run depend on: of a whole backward, and of one in two halves."""
    key = key_of(RankPart(config), on_gpu=True)
    return [key, key._replace(in_halves=True)] if splits_backward(config) else [key]


def trace_refusal(config: RunConfig) -> str:
    """Say why a run cannot be traced, as with a kind of checkpointing that its model does not bear; empty if it can."""
    of_least = _sampled(config)[0]
    key = (key_of(RankPart(of_least), on_gpu=True), contents_hash(config.model), language())
    if key not in _REFUSED:
        try:
            make_trace(of_least)
            _REFUSED[key] = ""
        except LabError as error:
            _REFUSED[key] = str(error)
    return _REFUSED[key]


def rank_memories(config: RunConfig, micro_batches: list[tuple[int, int]], device: Device) -> Iterator[RankMemories]:
    """Compute the memory of the first rank of every pipeline stage, for several micro-batches of one layout.

    Args:
        config: the layout; its own micro-batch does not matter.
        micro_batches: samples of a micro-batch, and how many there are.
        device: the GPU.

    Raises:
        LabError: if the model cannot be cut so.
    """
    layout = config.layout
    samples = np.array([size for size, _ in micro_batches], float)
    numbers = np.array([number for _, number in micro_batches])
    for stage in range(layout.pp):
        rank = stage * layout.dp * layout.tp
        part = _part(config, rank)
        curve = _activations(config, part)
        flights = [_in_flight(config, stage, number, curve) for _, number in micro_batches]
        flight_bytes = curve.held_bytes(flights, samples)
        received = 0.0
        if layout.pp > 1:
            few = _with(config, 1, min(layout.micro_batches, _few(layout.pp)))
            sample_bytes, received = _bytes_per_sample(few, stage)
            flight_bytes = flight_bytes + sample_bytes * samples * numbers
        columns = np.zeros((len(CATEGORIES), samples.size))
        host = np.zeros(samples.size)
        # An engine treats the first, the last and all other micro-batches differently (`PLACES`).
        for chosen in (numbers == 1, numbers == 2, numbers > 2):
            if chosen.any():
                engine = _engine(_with(config, 1, min(int(numbers[chosen].min()), _few(layout.pp))), rank, part)
                columns[:, chosen] = _peaks(curve, engine, samples[chosen], flight_bytes[:, :, chosen])
                host[chosen] = engine.host_bytes
        columns[CATEGORIES.index("workspace")] += CUBLAS_HANDLES * device.cublas_workspace_bytes
        columns[CATEGORIES.index("workspace")] += received * samples * numbers
        yield RankMemories(columns, host, max(flight.most for flight in flights), part.blocks)


@contextmanager
def kept_summaries(config: RunConfig) -> Iterator[None]:
    """Load the stored summaries of a model's ranks, and on exit store those that are new; none of one's own file, whose
    contents may have changed.
    """
    if changes_its_model(config.model):
        yield
        return
    model = (config.built_model, config.image_size, config.sequence_length, config.num_classes)
    if model not in _READ:
        _READ.add(model)
        _SUMMARIES.update(read(("summaries", model), _parsed) or {})
    summary_count = len(_SUMMARIES)
    yield
    if len(_SUMMARIES) > summary_count:
        prefix = _prefix(config)
        write(("summaries", model), {k: row.to_data() for k, row in _SUMMARIES.items() if k.startswith(prefix)})


def _parsed(data: dict[str, Any]) -> dict[str, _Activations | _Engine]:
    kinds: dict[str, type[_Activations] | type[_Engine]] = {"activations": _Activations, "engine": _Engine}
    return {key: kinds[str(summary.pop("kind"))].from_data(summary) for key, summary in data.items()}


def _prefix(config: RunConfig) -> str:
    """Beginning of the keys of all summaries of a model."""
    return repr((config.built_model, config.image_size, config.sequence_length, config.num_classes))


def outside_bytes(device: Device, world_size: int) -> int:
    """Return the bytes of a process on a GPU outside the allocator: CUDA's context, and NCCL where it communicates."""
    return device.memory_bytes - device.allocatable_bytes(world_size)


@dataclass(frozen=True, eq=False)
class _Activations:
    """Activations of one micro-batch on a rank, by slot: a line in the samples.

    Attributes:
        slots: of each action in turn, in the order of its pass.
        acts: of each slot, the action.
        kept, other: constant and slope (columns) of what backward will read, and of the rest, at the peak of each slot
            (rows).
        items: constant and slope of the bytes of what a rank may keep of other micro-batches.
        retaining: places of the stages whose second half of a backward needs the gradient that the first has received.
    """

    slots: tuple[Slot, ...]
    acts: tuple[Act, ...]
    kept: Reals
    other: Reals
    items: dict[Item, tuple[float, float]]
    retaining: tuple[int, ...]

    def to_data(self) -> dict[str, Any]:
        """Plain JSON data."""
        arrays = {"kept": self.kept.tolist(), "other": self.other.tolist()}
        items = [[*item, *line] for item, line in self.items.items()]
        rows = {"slots": self.slots, "acts": self.acts, "retaining": self.retaining}
        return {"kind": "activations", "items": items, **rows, **arrays}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> _Activations:
        """What `to_data` has written."""
        return cls(
            tuple((str(phase), str(block)) for phase, block in data["slots"]),
            tuple((str(kind), int(position)) for kind, position in data["acts"]),
            np.array(data["kept"], float),
            np.array(data["other"], float),
            {Item(kind, int(stage)): (float(constant), float(slope)) for kind, stage, constant, slope in data["items"]},
            tuple(int(position) for position in data["retaining"]),
        )

    def held_bytes(self, flights: list[_Flight], samples: Reals) -> Reals:
        """Bytes that a rank keeps besides: places of the micro-batch × slots × samples; below 0 where no action is."""
        slot_bytes = np.full((len(PLACES), len(self.slots), samples.size), -1.0)
        for column, (flight, size) in enumerate(zip(flights, samples.tolist(), strict=True)):
            for place_index in range(len(PLACES)):
                of_act = {
                    act: self._bytes_of(item_counts, size) for act, item_counts in flight.others[place_index].items()
                }
                slot_bytes[place_index, :, column] = [of_act.get(act, -1.0) for act in self.acts]
        return slot_bytes

    @property
    def weights(self) -> tuple[tuple[Item, int], ...]:
        """Sizes of the items, up to `FINENESS`, for a micro-batch of the most samples that were traced.

        So coarse that runs alike share what is counted from the schedule; of one stage its activations are the largest.
        """
        sizes = {item: constant + slope * SAMPLED[-1] for item, (constant, slope) in self.items.items()}
        if sum(item.kind == "activations" for item in sizes) == 1:
            return tuple((item, 1 if item.kind in ("boundary", "logits") else FINENESS) for item in sizes)
        largest = max(*sizes.values(), 1.0)
        return tuple((item, round(FINENESS * size / largest)) for item, size in sizes.items())

    def _bytes_of(self, item_counts: Held, samples: float) -> float:
        return sum(count * (self.items[item][0] + self.items[item][1] * samples) for item, count in item_counts)


@dataclass(frozen=True, eq=False)
class _Engine:
    """States and buffers of an engine on a rank, by slot, at the fullest moment of each.

    Attributes:
        slots: in which it was seen, each with the place of the micro-batch in `PLACES`: in the first there are no
            gradients yet, in the last they are reduced.
        bytes_by_category: slots × categories.
        host_bytes: in the host's memory.
    """

    slots: dict[tuple[str, Slot], int]
    bytes_by_category: Reals
    host_bytes: int

    def to_data(self) -> dict[str, Any]:
        """Plain JSON data."""
        slots = [[batch_place, *slot] for batch_place, slot in self.slots]
        return {"kind": "engine", "slots": slots, "bytes": self.bytes_by_category.tolist(), "host": self.host_bytes}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> _Engine:
        """What `to_data` has written."""
        slot_keys = [(str(batch_place), (str(phase), str(block))) for batch_place, phase, block in data["slots"]]
        slots = {slot: row for row, slot in enumerate(slot_keys)}
        return cls(slots, np.array(data["bytes"], float), int(data["host"]))


class _Flight(NamedTuple):
    """Other micro-batches in flight on a rank.

    Attributes:
        others: kept besides at the fullest action of each kind and stage: of the first micro-batch, of the last, and of
            any between (`PLACES`).
        most: micro-batches in flight at most, the running one included.
    """

    others: tuple[dict[Act, Held], ...]
    most: int


def _peaks(curve: _Activations, engine: _Engine, samples: Reals, flight_bytes: Reals) -> Reals:
    """Bytes by category (rows) at the peak, for each number of samples (columns)."""
    # Where its last block is computed in halves, a slot has no number of gradients: the fullest one stands for it.
    fullest = _fullest_slots(engine)
    kept_bytes = curve.kept[:, :1] + curve.kept[:, 1:] * samples
    temporary_bytes = np.maximum(curve.other[:, :1] + curve.other[:, 1:] * samples, 0.0)
    indices = np.arange(samples.size)
    outside = [row for (_, (phase, _)), row in engine.slots.items() if phase not in PASSES]
    fullest_outside = max(outside, key=lambda row: float(engine.bytes_by_category[row].sum()))
    columns = np.repeat(engine.bytes_by_category[fullest_outside][:, None], samples.size, axis=1)
    for batch_place, in_flight_bytes in zip(PLACES, flight_bytes, strict=True):
        of_slot = np.array(
            [engine.slots.get((batch_place, slot), fullest.get((batch_place, slot), -1)) for slot in curve.slots]
        )
        is_present = of_slot >= 0
        if not is_present.any():
            continue
        fixed = np.where(is_present[:, None], engine.bytes_by_category[of_slot], 0.0)
        # (slots, 1) + (slots, columns) + (columns,): the engine's part does not depend on the samples.
        total = np.where(
            is_present[:, None] & (in_flight_bytes >= 0),
            fixed.sum(axis=1)[:, None] + kept_bytes + temporary_bytes + in_flight_bytes,
            0.0,
        )
        peak_rows = np.argmax(total, axis=0)
        peak_columns = np.where(total[peak_rows, indices] > 0, fixed[peak_rows].T, 0.0)
        peak_columns[CATEGORIES.index("activations")] += (
            kept_bytes[peak_rows, indices] + in_flight_bytes[peak_rows, indices]
        )
        peak_columns[CATEGORIES.index("workspace")] += temporary_bytes[peak_rows, indices]
        is_larger = peak_columns.sum(axis=0) > columns.sum(axis=0)
        columns[:, is_larger] = peak_columns[:, is_larger]
    return columns


def _fullest_slots(engine: _Engine) -> dict[tuple[str, Slot], int]:
    """The fullest of the slots of a block's backward, by the block alone (`6` for `6.@0`, `6.@1` …)."""
    fullest: dict[tuple[str, Slot], int] = {}
    slot_bytes = engine.bytes_by_category.sum(axis=1)
    for (batch_place, (phase, block)), row in engine.slots.items():
        block_slot = (batch_place, (phase, block.partition(".@")[0]))
        if block_slot not in fullest or slot_bytes[row] > slot_bytes[fullest[block_slot]]:
            fullest[block_slot] = row
    return fullest


@lru_cache(maxsize=4096)
def _bytes_per_sample(config: RunConfig, stage: int) -> tuple[float, float]:
    """Bytes that a pipeline rank keeps of each sample of a step until its end: its data, and receive buffers."""
    layout = config.layout
    part = RankPart(config, stage * layout.dp * layout.tp)
    samples = layout.micro_batch * layout.micro_batches
    return samples_bytes(part) / samples, receive_buffers_bytes(part) / samples


def _few(pp: int) -> int:
    """Micro-batches that stand for any larger number, and that every schedule of so many ranks can have."""
    return pp if pp > 2 else 4 if pp == 2 else 3


@lru_cache(maxsize=65536)
def _with(config: RunConfig, micro_batch: int, micro_batches: int) -> RunConfig:
    """The same layout with another micro-batch, and another number of them that its schedule can have."""
    layout = config.layout.model_copy(update={"micro_batch": micro_batch, "micro_batches": micro_batches})
    return config.model_copy(update={"layout": layout})


def _sampled(config: RunConfig) -> list[RunConfig]:
    """The runs whose traces give the line of activations."""
    return [_with(config, size, config.layout.micro_batches) for size in SAMPLED]


class _Part(NamedTuple):
    """Blocks of a rank, and what makes ranks alike.

    Attributes:
        own: blocks of each of its stages; none where it holds the whole model.
        kinds: of each stage, the kinds of its blocks and of the one before it.
        blocks: how many it holds.
    """

    own: tuple[tuple[int, ...], ...]
    kinds: Hashable
    blocks: int

    def slot_of(self, slot: Slot) -> Slot:
        """A slot by the place of its block among the rank's, so that alike ranks have equal ones."""
        phase, block = slot
        number, suffix = _number(block), block.split(".")[2:]
        if not self.own or number < 0:
            return slot
        return (phase, ".".join((str(self.places.get(number, block)), *suffix)))

    @property
    def places(self) -> dict[int, int]:
        """Place of each block among the rank's."""
        return {block: position for position, block in enumerate(chain.from_iterable(self.own))}


def _part(config: RunConfig, rank: int) -> _Part:
    layout = config.layout
    kinds = _kinds(config)
    if layout.pp == 1:
        return _Part((), (), len(kinds))
    few = _with(config, 1, min(layout.micro_batches, _few(layout.pp)))
    return _part_of_stage(few, RankPart(config, rank).pp_rank, kinds, layout.dp * layout.tp)


@lru_cache(maxsize=4096)
def _part_of_stage(config: RunConfig, stage: int, kinds: tuple[Hashable, ...], stride: int) -> _Part:
    bounds, stages = _bounds(config), RankPart(config, stage * stride).stages
    stage_blocks = tuple(tuple(range(bounds[stage_number], bounds[stage_number + 1])) for stage_number in stages)
    before = (kinds[blocks[0] - 1] if blocks[0] else None for blocks in stage_blocks)
    stage_kinds = tuple(zip(before, (tuple(kinds[block] for block in blocks) for blocks in stage_blocks), strict=True))
    return _Part(stage_blocks, stage_kinds, sum(len(blocks) for blocks in stage_blocks))


_BOUNDS: dict[Hashable, tuple[int, ...]] = {}


def _bounds(config: RunConfig) -> tuple[int, ...]:
    layout = config.layout
    key = (
        config.built_model, config.image_size, config.sequence_length, config.num_classes, layout.pp, layout.chunks,
        layout.engine == "deepspeed", layout.schedule, layout.partition, layout.micro_batch,
    )  # fmt: skip
    if key not in _BOUNDS:
        _BOUNDS[key] = bounds_of(config)
    return _BOUNDS[key]


_KINDS: dict[Hashable, tuple[Hashable, ...]] = {}


def _kinds(config: RunConfig) -> tuple[Hashable, ...]:
    """Kind of each block: equal for blocks whose parameters have the same names and shapes, but for the two ends."""
    key = (config.built_model, config.image_size, config.sequence_length, config.num_classes)
    if key not in _KINDS:
        _KINDS[key] = _kinds_of(model_shapes(config))
    return _KINDS[key]


def _kinds_of(shapes: ModelShapes) -> tuple[Hashable, ...]:
    signatures: list[Hashable] = [()] * num_blocks(shapes)
    for block in shapes.blocks():
        signatures[block[0].block] = tuple((parameter.name.split(".", 2)[2], parameter.shape) for parameter in block)
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(signature, len(numbers)) for signature in signatures]
    return tuple((kind, position in (0, len(kinds) - 1)) for position, kind in enumerate(kinds))


_SUMMARIES: dict[str, _Activations | _Engine] = {}
"""Summaries of ranks, by all that they depend on."""
_READ: set[Hashable] = set()
"""Models whose summaries were read from the store."""


def _activations(config: RunConfig, part: _Part) -> _Activations:
    trace = key_of(RankPart(_with(config, 1, config.layout.micro_batches)), on_gpu=True)
    key = f"{_prefix(config)} activations {trace!r} {part.kinds!r} {splits_backward(config)}"
    if key not in _SUMMARIES:
        _SUMMARIES[key] = _line_of(config, part)
    summary = _SUMMARIES[key]
    assert isinstance(summary, _Activations)
    return summary


def _line_of(config: RunConfig, part: _Part) -> _Activations:
    low, high = (_of_rank(run, part) for run in _sampled(config))
    span = SAMPLED[1] - SAMPLED[0]

    def line(low: Reals, high: Reals) -> Reals:
        # Bytes per sample; what is left at 0 samples is the constant.
        slope = (high - low) / span
        return np.stack([low - slope * SAMPLED[0], slope], axis=1)

    items = line(np.array([low.items[row] for row in low.items]), np.array([high.items[item] for item in low.items]))
    lines = {
        item: (coefficients[0], coefficients[1]) for item, coefficients in zip(low.items, items.tolist(), strict=True)
    }
    kept_line, temporary_line = (
        line(np.array(low.kept), np.array(high.kept)),
        line(np.array(low.other), np.array(high.other)),
    )
    return _Activations(tuple(low.slots), tuple(low.acts), kept_line, temporary_line, lines, tuple(low.retaining))


@dataclass
class _Rows:
    """Slots of a rank's actions, with the bytes at the peak of each, and the bytes of each item."""

    slots: list[Slot] = field(default_factory=list)
    acts: list[Act] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    other: list[float] = field(default_factory=list)
    items: dict[Item, float] = field(default_factory=dict)
    retaining: list[int] = field(default_factory=list)

    def add(self, act: Act, part: _Part, slot_peaks: list[tuple[Slot, float, float]]) -> None:
        """Add the slots of one action."""
        for (phase, block), kept_bytes, temporary_bytes in slot_peaks:
            slot_phase = "backward" if phase == "weights" else phase
            self.slots.append(part.slot_of((slot_phase, block)))
            self.acts.append(act)
            self.kept.append(kept_bytes)
            self.other.append(temporary_bytes)


def _of_rank(config: RunConfig, part: _Part) -> _Rows:
    """Slots and items of a rank, for one size of the micro-batch."""
    curve, rows = _curve_of(config, in_halves=False), _Rows()
    stages = part.own or (tuple(range(curve.num_blocks)),)
    at_block = boundary_bytes(config) if part.own else ()
    halves = _curve_of(config, in_halves=True) if splits_backward(config) else None
    for position, blocks in enumerate(stages):
        stage_curve = _StageOfCurve(curve, blocks)
        rows.add((FORWARD, position), part, stage_curve.peaks("forward", 0.0))
        rows.add((BACKWARD, position), part, stage_curve.peaks("backward", stage_curve.kept_bytes))
        rows.items[Item("activations", position)] = stage_curve.kept_bytes
        rows.items[Item("logits", position)] = stage_curve.logits_bytes
        if part.own:
            rows.items[Item("boundary", position)] = float(at_block[blocks[0]])
            rows.items[Item("boundary", position + len(stages))] = float(at_block[blocks[-1] + 1])
        if halves is not None and blocks[0]:
            split = _StageOfCurve(halves, blocks)
            rows.items[Item("for halves", position)] = split.kept_bytes
            rows.items[Item("between halves", position)] = split.between_bytes
            rows.add((BACKWARD_INPUT, position), part, split.peaks("backward", split.kept_bytes))
            rows.add((BACKWARD_WEIGHT, position), part, split.peaks("weights", split.between_bytes))
            rows.retaining += [position] * split.retains
        elif part.own:  # all is done in the second half
            rows.add((BACKWARD_WEIGHT, position), part, stage_curve.peaks("backward", stage_curve.kept_bytes))
    return rows


class _Curve:
    """A trace as arrays: bytes, slot and block of each allocation of an activation, in order."""

    def __init__(self, trace: MemoryTrace) -> None:
        gradients = {event.storage for event in trace.events if isinstance(event, TraceMark) and event.what == "ready"}
        left_out = gradients | trace.on_host | {-2}
        moves = [
            event
            for event in trace.events
            if isinstance(event, Allocation) and event.storage not in left_out and event.phase != "data"
        ]
        self.slots: dict[Slot, int] = {}
        self.trace = trace
        self.delta = np.array([move.delta_bytes for move in moves], float)
        slots = [(move.phase, _place_of(move.module)) for move in moves]
        self.slot = np.array([self.slots.setdefault(slot, len(self.slots)) for slot in slots])
        self.storage = np.array([move.storage for move in moves])
        self.is_kept = np.isin(self.storage, list(trace.kept))
        self.turn = np.array([TURN_OF.get(move.phase, 0) for move in moves])
        self.num_blocks = 1 + max(_number(block) for _, block in self.slots)
        self.at = self._numbered(move.module for move in moves)
        """Block that computes; the loss stands after the last."""
        self.block = self._numbered(trace.module_of[move.storage] for move in moves)
        """Block that has made the storage."""
        data = [event.storage for event in trace.events if isinstance(event, Allocation) and event.phase == "data"]
        self.is_data = np.isin(self.storage, data)
        size = 1 + int(self.storage.max())
        self.between = np.bincount(self.storage, np.where(self.turn < 2, self.delta, 0.0), minlength=size)
        """Of each storage, the bytes between the halves of a backward."""

    def _numbered(self, modules: Iterable[str]) -> NDArray[np.int64]:
        numbers = [_number(block_of(module)) for module in modules]
        return np.array([self.num_blocks if number < 0 else number for number in numbers])


class _StageOfCurve:
    """One stage's part of a trace; as in `model_trace.cut_passes`."""

    def __init__(self, curve: _Curve, blocks: tuple[int, ...]) -> None:
        self._curve = curve
        first_block, last_block = blocks[0], blocks[-1]
        self._reaches = curve.num_blocks if last_block == curve.num_blocks - 1 else last_block
        trace = curve.trace
        output_storage = trace.output_of.get(f"blocks.{last_block}", -1)
        is_whole = first_block == 0 and self._reaches == curve.num_blocks
        of_stage = (curve.block >= first_block) & (curve.block <= self._reaches) & ~curve.is_data
        self._here = (curve.at >= first_block) & (curve.at <= self._reaches)
        self._made = curve.is_data | of_stage if is_whole else of_stage
        self._passed = (curve.storage == output_storage) & (self._reaches == last_block)
        input_gradient = -1 if is_whole else trace.gradient_of.get(f"blocks.{first_block - 1}", -1)
        self._entered = (curve.storage == input_gradient) & (curve.turn > 0)
        born = self._made & ~self._passed & (curve.delta > 0)
        self.kept_bytes = float(curve.delta[born & curve.is_kept & (curve.turn == 0)].sum())
        """Kept for backward, but for what the stage gives."""
        if is_whole:
            self.kept_bytes += _data_bytes(trace)
        storages = np.unique(curve.storage[self._made & ~self._passed & (curve.storage != input_gradient)])
        self.between_bytes = float(curve.between[storages].sum())
        self.logits_bytes = 0.0
        if self._reaches > last_block and output_storage >= 0 and output_storage not in trace.kept:
            self.logits_bytes = float(trace.bytes_of[output_storage])
        received = trace.gradient_of.get(f"blocks.{last_block}", -1)
        self.retains = self._reaches == last_block and received >= 0 and bool(curve.between[received] > 0)

    def peaks(self, phase: str, before: float) -> list[tuple[Slot, float, float]]:
        """Largest bytes in each slot of a pass: what is kept for backward, and the rest.

        Args:
            phase: of the pass.
            before: bytes as it begins.
        """
        curve, turn = self._curve, TURN_OF.get(phase, 0)
        of_pass = curve.turn == turn
        stage_mask = self._made & of_pass
        if turn:
            stage_mask &= ~self._passed
        # A sum of gradients in the memory of one that another rank has made is a tensor more.
        # Once for each storage: later sums go into the tensor that the first one has made.
        foreign_sums = of_pass & self._here & ~self._made & (curve.delta == 0)
        summed = np.flatnonzero(foreign_sums)
        foreign_sums[np.delete(summed, np.unique(curve.storage[summed], return_index=True)[1])] = False
        positions = np.flatnonzero(stage_mask | foreign_sums)
        if not positions.size:
            return []
        sizes = curve.trace.bytes_of
        delta = np.where(foreign_sums, [float(sizes.get(storage, 0)) for storage in curve.storage], curve.delta)[
            positions
        ]
        total = before + np.cumsum(delta)
        kept_bytes = (before if turn else 0.0) + np.cumsum(np.where(curve.is_kept[positions], delta, 0.0))
        peak_of_slot: dict[int, tuple[float, float]] = {}
        for slot, in_stage, running_bytes, running_kept_bytes in zip(
            curve.slot[positions], self._here[positions], total, kept_bytes, strict=True
        ):
            if in_stage and running_bytes > peak_of_slot.get(int(slot), (-1.0, 0.0))[0]:
                peak_of_slot[int(slot)] = (float(running_bytes), float(running_kept_bytes))
        names = list(curve.slots)
        return [
            (names[slot], peak_kept_bytes, peak_bytes - peak_kept_bytes)
            for slot, (peak_bytes, peak_kept_bytes) in peak_of_slot.items()
        ]


def _data_bytes(trace: MemoryTrace) -> float:
    """Bytes of a micro-batch's samples."""
    data = {event.storage for event in trace.events if isinstance(event, Allocation) and event.phase == "data"}
    return float(sum(trace.bytes_of[storage] for storage in data))


def in_slots(trace: MemoryTrace) -> MemoryTrace:
    """The trace with the slots of the last block's backward as its modules, each begun by an allocation of nothing."""
    last_block = f"blocks.{max(_number(block_of(module)) for module in trace.module_of.values())}"
    events: list[Allocation | TraceMark] = []
    ready, phase, block = 0, "", ""
    for event in trace.events:
        if isinstance(event, Allocation):
            phase = event.phase
            # In no module: of the last block too, once its backward has begun (the gradient of its head, recomputed).
            block = block_of(event.module) or (block if phase == "backward" else "")
            is_in_last_block = phase == "backward" and block == last_block
            events.append(replace(event, module=f"{last_block}.@{ready}") if is_in_last_block else event)
            continue
        if phase == "backward" and block_of(event.name) == last_block:
            ready, block = ready + (event.what == "ready"), last_block
            events.append(Allocation(-2, 0, "backward", f"{last_block}.@{ready}"))
        events.append(event)
    return replace(trace, events=tuple(events))


def _place_of(module: str) -> str:
    """Block of a slot: that of a module, and the number of gradients that `in_slots` has written behind it."""
    parts = module.split(".")
    return ".".join(parts[: 3 if len(parts) > 2 and parts[2].startswith("@") else 2])


def _number(block: str) -> int:
    """Number of a block by its name; -1 for what is in none."""
    return int(block.split(".")[1]) if block.startswith("blocks.") else -1


def _curve_of(config: RunConfig, *, in_halves: bool) -> _Curve:
    part = RankPart(config)
    key = key_of(part, on_gpu=True)._replace(in_halves=in_halves)
    if key not in _CURVES:
        trace = trace_of(part, on_gpu=True, in_halves=in_halves)
        _CURVES[key] = _Curve(trace if in_halves else in_slots(trace))
    return _CURVES[key]


_CURVES: dict[Hashable, _Curve] = {}


class _SlotLedger(Ledger):
    """Ledger that remembers the fullest moment of every slot, in a step of so many micro-batches."""

    def __init__(self, micro_batches: int) -> None:
        super().__init__()
        self.last = micro_batches - 1
        self.most: dict[tuple[str, Slot], tuple[int, dict[Category, int]]] = {}

    def hold(self, key: Any, category: Category, num_bytes: int, block: str = "", stream: int = 0) -> None:
        """Hold as a ledger does; a slot without any allocation is noted too."""
        self._note()
        super().hold(key, category, num_bytes, block, stream)

    def _move(self, category: Category, block: str, delta_bytes: int) -> None:
        super()._move(category, block, delta_bytes)
        self._note()

    def _note(self) -> None:
        number = self.detail[0]
        batch_place = "last" if number == self.last else "first" if number == 0 else "between"
        slot = (batch_place, (self.moment, _place_of(self.detail[1])))
        if self._total_bytes > self.most.get(slot, (-1, {}))[0]:
            self.most[slot] = (self._total_bytes, dict(self._by_category))


def _engine(config: RunConfig, rank: int, part: _Part) -> _Engine:
    """The engine's part on a rank; what is computed again changes nothing in it."""
    if config.layout.checkpointing != "none":
        plain = config.layout.model_copy(update={"checkpointing": "none"})
        config = config.model_copy(update={"layout": plain})
    layout = config.layout
    trace = key_of(RankPart(config, rank), on_gpu=True)
    depends = (
        trace, part.kinds, layout.strategy, layout.zero, layout.offload, layout.dp, layout.pp > 1,
        min(layout.micro_batches, 3), config.precision, config.optimizer, config.update,
    )  # fmt: skip
    key = f"{_prefix(config)} engine {depends!r}"
    if key not in _SUMMARIES:
        _SUMMARIES[key] = _engine_of(config, rank, part)
    summary = _SUMMARIES[key]
    assert isinstance(summary, _Engine)
    return summary


def _engine_of(config: RunConfig, rank: int, part: _Part) -> _Engine:
    """Replay the gradients and marks of the trace through the engine's memory model."""
    rank_part = RankPart(config, rank)
    trace = trace_of_rank(rank_part, _skeleton_of(RankPart(_sampled(config)[0], rank)))
    states, overlay = forecast.states_and_overlay(rank_part, trace, on_gpu=True)
    ledger = _SlotLedger(config.layout.micro_batches)
    StepReplay(config, trace, states, overlay, ledger=ledger).run()
    slots = {(batch_place, part.slot_of(slot)): row for row, (batch_place, slot) in enumerate(ledger.most)}
    table = np.array(
        [
            [float(category_bytes.get(category, 0)) for category in CATEGORIES]
            for _, category_bytes in ledger.most.values()
        ]
    )
    return _Engine(slots, table, (states.host_bytes or 0) + ledger.most_host_bytes)


_SKELETONS: dict[Hashable, MemoryTrace] = {}


def _skeleton_of(part: RankPart) -> MemoryTrace:
    key = key_of(part, on_gpu=True)
    if key not in _SKELETONS:
        _SKELETONS[key] = _skeleton(in_slots(trace_of(part, on_gpu=True)))
    return _SKELETONS[key]


def _skeleton(trace: MemoryTrace) -> MemoryTrace:
    """The trace without activations: marks, gradients, and an allocation of nothing where a slot begins."""
    gradients = {event.storage for event in trace.events if isinstance(event, TraceMark) and event.what == "ready"}
    events: list[Allocation | TraceMark] = []
    slot: Slot | None = None
    for event in trace.events:
        if isinstance(event, TraceMark):
            events.append(event)
            continue
        event_slot = (event.phase, _place_of(event.module))
        if event.storage in gradients:
            events.append(event)
        elif event_slot != slot:
            events.append(Allocation(-2, 0, event.phase, event.module))
        slot = event_slot
    return replace(trace, events=tuple(events), kept=frozenset(), on_host=frozenset(), bytes_of={})


def _in_flight(config: RunConfig, stage: int, micro_batches: int, curve: _Activations) -> _Flight:
    """What a rank keeps besides; beyond `STEADY` micro-batches per rank each further one adds as much."""
    layout = config.layout
    if layout.pp == 1:
        empty_counts: dict[Act, Held] = {(FORWARD, 0): (), (BACKWARD, 0): ()}
        return _Flight((empty_counts, empty_counts, empty_counts), 1)
    runner = runner_of(_with(config, 1, micro_batches))
    steady = STEADY * layout.pp
    flight_arguments = (
        layout.schedule or "1f1b",
        layout.pp,
        layout.chunks,
        stage,
        runner,
        curve.retaining,
        curve.weights,
    )
    if micro_batches <= steady:
        return _flight(micro_batches, *flight_arguments)
    few = steady + micro_batches % layout.pp
    base, next_flight = _flight(few, *flight_arguments), _flight(few + layout.pp, *flight_arguments)
    periods = (micro_batches - few) / layout.pp
    counts_by_place = []
    for base_counts, next_counts in zip(base.others, next_flight.others, strict=True):
        grown = {
            act: _grown(item_counts, next_counts.get(act, item_counts), periods)
            for act, item_counts in base_counts.items()
        }
        counts_by_place.append(grown)
    return _Flight(tuple(counts_by_place), base.most + round(periods * (next_flight.most - base.most)))


def _grown(item_counts: Held, later: Held, periods: float) -> Held:
    """Counts that grow with the micro-batches as they do from one period of the schedule to the next."""
    before, after = dict(item_counts), dict(later)
    items = dict.fromkeys((*before, *after))
    return tuple(
        (item, max(0.0, before.get(item, 0.0) + periods * (after.get(item, 0.0) - before.get(item, 0.0))))
        for item in items
    )


@lru_cache(maxsize=16384)
def _flight(
    micro_batches: int,
    name: str,
    pp: int,
    chunks: int | None,
    rank: int,
    runner: Runner,
    retaining: tuple[int, ...],
    weights: tuple[tuple[Item, int], ...],
) -> _Flight:
    """What a pipeline rank keeps at the fullest action of each kind, from the schedule's own order."""
    bytes_of = dict(weights)
    schedule = _schedule(name, pp, micro_batches, chunks)
    stages = sorted(stage for ranks in schedule.placement for stage, holder in enumerate(ranks) if holder == rank)
    halves = any(item.kind == "for halves" for item in bytes_of)
    order = RankOrder(schedule, rank, runner, frozenset(stages[position] for position in retaining), halves=halves)
    fullest_by_place: tuple[dict[Act, tuple[int, Held]], ...] = tuple({} for _ in PLACES)
    max_activations = 0
    begun: set[int] = set()
    for action, item_counts, _ in order.moments():
        if action.kind == BACKWARD_INPUT and (action.stage == 0 or not halves):
            continue  # all is left to the second half
        act = (action.kind, stages.index(action.stage))
        number = action.micro_batch
        # Without a gradient of its stage (of any, in forward) an action is one of a first micro-batch.
        is_first = micro_batches > 1 and not (begun if action.kind == FORWARD else act[1] in begun)
        place_index = PLACES.index("first" if is_first else "last" if number == micro_batches - 1 else "between")
        if action.kind in ENDS_BACKWARD:
            begun.add(act[1])
        activation_count = sum(count for item, count in item_counts.items() if item.kind not in ("boundary", "logits"))
        max_activations = max(max_activations, activation_count)
        placed_counts = tuple((_placed(item, stages), float(count)) for item, count in item_counts.items() if count)
        weight = sum(int(count) * bytes_of[item] for item, count in placed_counts)
        if weight > fullest_by_place[place_index].get(act, (-1, ()))[0]:
            fullest_by_place[place_index][act] = (weight, placed_counts)
    return _Flight(
        tuple({act: counts for act, (_, counts) in fullest_of_act.items()} for fullest_of_act in fullest_by_place),
        1 + ceil(max_activations / len(stages)),
    )


@lru_cache(maxsize=256)
def _schedule(name: str, pp: int, micro_batches: int, chunks: int | None) -> Schedule:
    return build(name, pp, micro_batches, chunks=chunks)


def _placed(item: Item, stages: list[int]) -> Item:
    """An item by its stage's place; a boundary by the stage that it enters, or behind those by the one it leaves."""
    if item.stage in stages:
        return item._replace(stage=stages.index(item.stage))
    return item._replace(stage=stages.index(item.stage - 1) + len(stages))
