"""Memory of many layouts at once: the forecast's own traces and engine models, summed by arrays.

The traces and the engine's memory model of the forecast are summarised once by *slot* (a pass over a block); a layout's
peak is the largest sum over the slots:

    peak = max over slots of (states and buffers of the engine + activations of this micro-batch)
           + activations of other micro-batches in flight

Activations of a slot are linear in the micro-batch: two traces, of `SAMPLED` samples, give the line. The engine's part
comes from its memory model on the gradients and marks of the trace alone. The two maxima of a slot need not coincide,
so the sum is an upper bound; tests/prediction/test_many_layouts.py holds it within 5 % of the forecast. The backward of
the last block is a slot for each of its gradients: with a large vocabulary, the gradient of the logits and that of the
head are each larger than all else, and the one is released before the engine reduces the other.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.language import language
from dlojz.config.run_config import RunConfig
from dlojz.hardware import Device
from dlojz.models.foreign.elsewhere import contents_hash
from dlojz.models.foreign.given_module import changes_its_model
from dlojz.pipeline.schedule import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from dlojz.pipeline.schedule_catalogue import build
from dlojz.prediction import forecast
from dlojz.prediction.communication import receive_buffers_bytes, samples_bytes
from dlojz.prediction.engine_memory import Ledger
from dlojz.prediction.forecast import CUBLAS_HANDLES, StepReplay
from dlojz.prediction.model_trace import block_of, key_of, reached_names, trace_of, trace_of_rank
from dlojz.prediction.shapes import ModelShapes, axes_of, bounds_of, model_shapes, num_blocks, part_of, rank_stages
from dlojz.prediction.states import offload_states, predict_states
from dlojz.prediction.trace import Allocation, MemoryTrace, TraceMark
from dlojz.prediction.trace_store import is_kept, read, write
from dlojz.results.footprint import CATEGORIES, Category

Reals = NDArray[np.float64]
Slot = tuple[str, str]
"""A phase of the step and a block; the block is empty in the loss and outside of the passes. In backward the last block
is followed by the number of its gradients that are ready (`blocks.12.@3`)."""

Held = tuple[tuple[int, float], ...]
"""Stages of a rank (their places among its own), and the micro-batches whose activations each holds."""

SAMPLED: Final = (2, 8)
"""Samples of the micro-batches that are traced."""
STEADY: Final = 3
"""A pipeline's schedule is built for at most so many micro-batches per rank; beyond, it repeats."""
PLACES: Final = ("first", "last", "between")
"""Micro-batches of a step that an engine treats alike; a single one is the last."""
PASSES: Final = ("data", "forward", "backward")


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
    wanted = {key_of(one, 0, on_gpu=True): one for config in configs for one in _sampled(config)}
    return [one for key, one in wanted.items() if not is_kept(key)]


def make_trace(config: RunConfig) -> None:
    """Trace a run's model and keep the trace."""
    trace_of(config, 0, on_gpu=True)


def trace_refusal(config: RunConfig) -> str:
    """Say why a run cannot be traced, as with a kind of checkpointing that its model does not bear; empty if it can."""
    of_least = _sampled(config)[0]
    key = (key_of(of_least, 0, on_gpu=True), contents_hash(config.model), language())
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
        flights = [_in_flight(config, stage, number) for _, number in micro_batches]
        sizes = [size for size, _ in micro_batches]
        pairs = zip(flights, sizes, strict=True)
        held = np.array([[curve.kept_bytes(one, size) for one in flight.others] for flight, size in pairs]).T
        received = 0.0
        if layout.pp > 1:
            few = _with(config, 1, min(layout.micro_batches, _few(layout.pp)))
            held = held + _sample_bytes(few, stage) * samples * numbers
            received = _received_bytes(few, stage)
        columns = np.zeros((len(CATEGORIES), samples.size))
        host = np.zeros(samples.size)
        # An engine treats the first, the last and all other micro-batches differently (`PLACES`).
        for chosen in (numbers == 1, numbers == 2, numbers > 2):
            if chosen.any():
                engine = _engine(_with(config, 1, min(int(numbers[chosen].min()), _few(layout.pp))), rank, part)
                columns[:, chosen] = _peaks(curve, engine, samples[chosen], held[:, chosen])
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
    known = len(_SUMMARIES)
    yield
    if len(_SUMMARIES) > known:
        own = {key: one.to_data() for key, one in _SUMMARIES.items() if key.startswith(_prefix(config))}
        write(("summaries", model), own)


def _parsed(data: dict[str, Any]) -> dict[str, _Activations | _Engine]:
    kinds: dict[str, type[_Activations] | type[_Engine]] = {"activations": _Activations, "engine": _Engine}
    return {key: kinds[str(one.pop("kind"))].from_data(one) for key, one in data.items()}


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
        slots: in the order of the step.
        kept, other: constant and slope (columns) of what backward will read, and of the rest, at the peak of each slot
            (rows).
        by_stage: constant and slope of what each stage of the rank keeps for backward.
    """

    slots: tuple[Slot, ...]
    kept: Reals
    other: Reals
    by_stage: tuple[tuple[float, float], ...]

    def to_data(self) -> dict[str, Any]:
        """Plain JSON data."""
        arrays = {"kept": self.kept.tolist(), "other": self.other.tolist()}
        return {"kind": "activations", "slots": self.slots, "by_stage": self.by_stage, **arrays}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> _Activations:
        """What `to_data` has written."""
        slots = tuple((str(phase), str(block)) for phase, block in data["slots"])
        stages = tuple((float(one), float(other)) for one, other in data["by_stage"])
        return cls(slots, np.array(data["kept"], float), np.array(data["other"], float), stages)

    def kept_bytes(self, held: Held, samples: int) -> float:
        """Bytes that the rank's stages keep of so many micro-batches each, of so many samples."""
        return sum(count * (self.by_stage[stage][0] + self.by_stage[stage][1] * samples) for stage, count in held)


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
        slots = [[where, *slot] for where, slot in self.slots]
        return {"kind": "engine", "slots": slots, "bytes": self.bytes_by_category.tolist(), "host": self.host_bytes}

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> _Engine:
        """What `to_data` has written."""
        read = [(str(where), (str(phase), str(block))) for where, phase, block in data["slots"]]
        slots = {slot: place for place, slot in enumerate(read)}
        return cls(slots, np.array(data["bytes"], float), int(data["host"]))


class _Flight(NamedTuple):
    """Other micro-batches in flight on a rank.

    Attributes:
        others: held besides the first micro-batch while its backward runs, besides the last, and the most besides
            any of those between (`PLACES`).
        most: micro-batches in flight at most, the running one included.
    """

    others: tuple[Held, Held, Held]
    most: int


def _peaks(curve: _Activations, engine: _Engine, samples: Reals, held: Reals) -> Reals:
    """Bytes by category (rows) at the peak, for each number of samples (columns)."""
    kept = curve.kept[:, :1] + curve.kept[:, 1:] * samples
    other = np.maximum(curve.other[:, :1] + curve.other[:, 1:] * samples, 0.0)
    places = np.arange(samples.size)
    outside = [place for (_, (phase, _)), place in engine.slots.items() if phase not in PASSES]
    fullest_outside = max(outside, key=lambda place: float(engine.bytes_by_category[place].sum()))
    columns = np.repeat(engine.bytes_by_category[fullest_outside][:, None], samples.size, axis=1)
    for where, others in zip(PLACES, held, strict=True):
        of_slot = np.array([engine.slots.get((where, slot), -1) for slot in curve.slots])
        seen = of_slot >= 0
        if not seen.any():
            continue
        fixed = np.where(seen[:, None], engine.bytes_by_category[of_slot], 0.0)
        # (slots, 1) + (slots, columns) + (columns,): the engine's part does not depend on the samples.
        total = np.where(seen[:, None], fixed.sum(axis=1)[:, None] + kept + other + others, 0.0)
        at = np.argmax(total, axis=0)
        found = fixed[at].T.copy()
        found[CATEGORIES.index("activations")] += kept[at, places] + others
        found[CATEGORIES.index("workspace")] += other[at, places]
        more = found.sum(axis=0) > columns.sum(axis=0)
        columns[:, more] = found[:, more]
    return columns


@lru_cache(maxsize=4096)
def _sample_bytes(config: RunConfig, stage: int) -> float:
    """Bytes that a pipeline rank keeps of each sample of a step until its end."""
    layout = config.layout
    return samples_bytes(config, stage * layout.dp * layout.tp) / (layout.micro_batch * layout.micro_batches)


@lru_cache(maxsize=4096)
def _received_bytes(config: RunConfig, stage: int) -> float:
    """Bytes of a pipeline rank's receive buffers for each sample of a step."""
    layout = config.layout
    return receive_buffers_bytes(config, stage * layout.dp * layout.tp) / (layout.micro_batch * layout.micro_batches)


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
        number, more = _number(block), block.split(".")[2:]
        if not self.own or number < 0:
            return slot
        return (phase, ".".join((str(self.places.get(number, block)), *more)))

    @property
    def places(self) -> dict[int, int]:
        """Place of each block among the rank's."""
        return {block: place for place, block in enumerate(block for one in self.own for block in one)}


def _part(config: RunConfig, rank: int) -> _Part:
    layout = config.layout
    kinds = _kinds(config)
    if layout.pp == 1:
        return _Part((), (), len(kinds))
    return _part_of_stage(
        _with(config, 1, min(layout.micro_batches, _few(layout.pp))),
        axes_of(config, rank)[2],
        kinds,
        layout.dp * layout.tp,
    )


@lru_cache(maxsize=4096)
def _part_of_stage(config: RunConfig, stage: int, kinds: tuple[Hashable, ...], stride: int) -> _Part:
    bounds = _bounds(config)
    stages = rank_stages(config, stage * stride)
    own = tuple(tuple(range(bounds[one], bounds[one + 1])) for one in stages)
    alike = tuple((kinds[one[0] - 1] if one[0] else None, tuple(kinds[block] for block in one)) for one in own)
    return _Part(own, alike, sum(len(one) for one in own))


_BOUNDS: dict[Hashable, tuple[int, ...]] = {}


def _bounds(config: RunConfig) -> tuple[int, ...]:
    layout = config.layout
    key = (
        config.built_model, config.image_size, config.sequence_length, config.num_classes, layout.pp, layout.chunks,
        layout.engine == "deepspeed", layout.schedule, layout.partition, layout.micro_batch,
    )  # fmt: skip
    if key not in _BOUNDS:
        _BOUNDS[key] = bounds_of(config, model_shapes(config))
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
        signatures[block[0].block] = tuple((one.name.split(".", 2)[2], one.shape) for one in block)
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(one, len(numbers)) for one in signatures]
    return tuple((kind, place in (0, len(kinds) - 1)) for place, kind in enumerate(kinds))


_SUMMARIES: dict[str, _Activations | _Engine] = {}
"""Summaries of ranks, by all that they depend on."""
_READ: set[Hashable] = set()
"""Models whose summaries were read from the store."""


def _activations(config: RunConfig, part: _Part) -> _Activations:
    trace = key_of(_with(config, 1, config.layout.micro_batches), 0, on_gpu=True)
    key = f"{_prefix(config)} activations {trace!r} {part.kinds!r}"
    if key not in _SUMMARIES:
        _SUMMARIES[key] = _line_of(config, part)
    found = _SUMMARIES[key]
    assert isinstance(found, _Activations)
    return found


def _line_of(config: RunConfig, part: _Part) -> _Activations:
    found = [_curve_of(one).of_rank(part) for one in _sampled(config)]
    (slots, low_kept, low_other, low_stages), (_, high_kept, high_other, high_stages) = found
    span = SAMPLED[1] - SAMPLED[0]

    def line(low: Reals, high: Reals) -> Reals:
        # Bytes per sample; what is left at 0 samples is the constant.
        slope = (high - low) / span
        return np.stack([low - slope * SAMPLED[0], slope], axis=1)

    stages = line(np.array(low_stages), np.array(high_stages))
    by_stage = tuple((one[0], one[1]) for one in stages.tolist())
    return _Activations(slots, line(low_kept, high_kept), line(low_other, high_other), by_stage)


class _Curve:
    """A trace as arrays: bytes, slot and block of each allocation of an activation, in order."""

    def __init__(self, trace: MemoryTrace) -> None:
        gradients = {event.storage for event in trace.events if isinstance(event, TraceMark) and event.what == "ready"}
        left_out = gradients | trace.on_host
        moves = [one for one in trace.events if isinstance(one, Allocation) and one.storage not in left_out]
        self.slots: dict[Slot, int] = {}
        self.trace = trace
        self.delta = np.array([one.delta_bytes for one in moves], float)
        slots = [(one.phase, _place_of(one.module)) for one in moves]
        self.slot = np.array([self.slots.setdefault(one, len(self.slots)) for one in slots])
        self.storage = np.array([one.storage for one in moves])
        kept = trace.kept
        self.is_kept = np.array([one.storage in kept for one in moves])
        block_of_storage = {one: _number(block_of(name)) for one, name in trace.module_of.items()}
        self.num_blocks = 1 + max(_number(block) for _, block in self.slots)
        last = self.num_blocks  # the loss stands after the last block
        numbers = [block_of_storage.get(one.storage, -1) for one in moves]
        self.block = np.array([last if number < 0 else number for number in numbers])
        data = {one.storage for one in moves if one.phase == "data"}
        self.is_data = np.array([one.storage in data for one in moves])
        self.order = np.argsort(self.slot, kind="stable")
        self.starts = np.searchsorted(self.slot[self.order], np.arange(len(self.slots)))
        self.lengths = np.bincount(self.slot)

    def of_rank(self, part: _Part) -> tuple[tuple[Slot, ...], Reals, Reals, list[float]]:
        """Largest bytes by slot, kept and others, and what each stage keeps, on a rank."""
        names = tuple(self.slots)
        born = np.where(self.is_kept & (self.delta > 0), self.delta, 0.0)
        if not part.own:
            most, at = self._fullest(np.ones(self.delta.size, bool))
            return names, at, most - at, [float(born.sum())]
        mine, stages = np.zeros(self.delta.size, bool), []
        for one in part.own:
            belongs = (self.block >= one[0]) & (self.block <= one[-1])
            if one[-1] == self.num_blocks - 1:
                belongs |= self.block == self.num_blocks
            belongs &= ~self.is_data
            # The stage's input was allocated by the block before, but is held here.
            received = self.trace.output_of.get(f"blocks.{one[0] - 1}", -1) if one[0] else -1
            if received >= 0:
                belongs |= self.storage == received
            stages.append(float(born[belongs].sum()))
            mine |= belongs
        most, at = self._fullest(mine)
        places, last = part.places, self.num_blocks - 1
        chosen = [
            place for place, (_, block) in enumerate(names)
            if (_number(block) in places if block else last in places)
        ]  # fmt: skip
        return tuple(part.slot_of(names[place]) for place in chosen), at[chosen], (most - at)[chosen], stages

    def _fullest(self, mine: NDArray[np.bool_]) -> tuple[Reals, Reals]:
        """By slot, the peak of some storages, and how many bytes of it are kept for backward."""
        delta = np.where(mine, self.delta, 0.0)
        total = np.cumsum(delta)[self.order]
        kept = np.cumsum(np.where(self.is_kept, delta, 0.0))[self.order]
        most = np.maximum.reduceat(total, self.starts)
        # Of several equal peaks of a slot the one that keeps most for backward.
        fullest = np.where(total == np.repeat(most, self.lengths), kept, -1.0)
        return most, np.maximum.reduceat(fullest, self.starts)


def in_slots(trace: MemoryTrace) -> MemoryTrace:
    """The trace with the slots of the last block's backward as its modules, each begun by an allocation of nothing."""
    last = f"blocks.{max(_number(block_of(module)) for module in trace.module_of.values())}"
    events: list[Allocation | TraceMark] = []
    ready, phase, here = 0, "", ""
    for event in trace.events:
        if isinstance(event, Allocation):
            phase = event.phase
            # In no module: of the last block too, once its backward has begun (the gradient of its head, recomputed).
            here = block_of(event.module) or (here if phase == "backward" else "")
            own = phase == "backward" and here == last
            events.append(replace(event, module=f"{last}.@{ready}") if own else event)
            continue
        if phase == "backward" and block_of(event.name) == last:
            ready, here = ready + (event.what == "ready"), last
            events.append(Allocation(-2, 0, "backward", f"{last}.@{ready}"))
        events.append(event)
    return replace(trace, events=tuple(events))


def _place_of(module: str) -> str:
    """Block of a slot: that of a module, and the number of gradients that `in_slots` has written behind it."""
    parts = module.split(".")
    return ".".join(parts[: 3 if len(parts) > 2 and parts[2].startswith("@") else 2])


def _number(block: str) -> int:
    """Number of a block by its name; -1 for what is in none."""
    return int(block.split(".")[1]) if block.startswith("blocks.") else -1


def _curve_of(config: RunConfig) -> _Curve:
    key = key_of(config, 0, on_gpu=True)
    if key not in _CURVES:
        _CURVES[key] = _Curve(in_slots(trace_of(config, 0, on_gpu=True)))
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
        place = "last" if number == self.last else "first" if number == 0 else "between"
        slot = (place, (self.moment, _place_of(self.detail[1])))
        if self._total_bytes > self.most.get(slot, (-1, {}))[0]:
            self.most[slot] = (self._total_bytes, dict(self._by_category))


def _engine(config: RunConfig, rank: int, part: _Part) -> _Engine:
    """The engine's part on a rank; what is computed again changes nothing in it."""
    if config.layout.checkpointing != "none":
        plain = config.layout.model_copy(update={"checkpointing": "none"})
        config = config.model_copy(update={"layout": plain})
    layout = config.layout
    depends = (
        key_of(config, rank, on_gpu=True), part.kinds, layout.strategy, layout.zero, layout.offload, layout.dp,
        layout.pp > 1, min(layout.micro_batches, 3), config.precision, config.optimizer, config.update,
    )  # fmt: skip
    key = f"{_prefix(config)} engine {depends!r}"
    if key not in _SUMMARIES:
        _SUMMARIES[key] = _engine_of(config, rank, part)
    found = _SUMMARIES[key]
    assert isinstance(found, _Engine)
    return found


def _engine_of(config: RunConfig, rank: int, part: _Part) -> _Engine:
    """Replay the gradients and marks of the trace through the engine's memory model."""
    whole = model_shapes(config)
    dp_rank = axes_of(config, rank)[0]
    shapes = part_of(config, whole, rank)
    trace = trace_of_rank(config, _skeleton_of(_sampled(config)[0], rank), whole, rank)
    if config.engine_spec.skips_unreached:
        shapes = shapes.trained_only(reached_names(trace.events))
    states = offload_states(config, shapes, predict_states(config, shapes, dp_rank), dp_rank)
    ledger = _SlotLedger(config.layout.micro_batches)
    overlay = forecast.overlay_of(config, shapes, dp_rank=dp_rank, on_gpu=True)
    StepReplay(config, trace, states, overlay, ledger=ledger).run()
    slots = {(first, part.slot_of(slot)): place for place, (first, slot) in enumerate(ledger.most)}
    table = np.array([[float(held.get(one, 0)) for one in CATEGORIES] for _, held in ledger.most.values()])
    return _Engine(slots, table, (states.host_bytes or 0) + ledger.most_host_bytes)


_SKELETONS: dict[Hashable, MemoryTrace] = {}


def _skeleton_of(config: RunConfig, rank: int) -> MemoryTrace:
    key = key_of(config, rank, on_gpu=True)
    if key not in _SKELETONS:
        _SKELETONS[key] = _skeleton(in_slots(trace_of(config, rank, on_gpu=True)))
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
        here = (event.phase, _place_of(event.module))
        if event.storage in gradients:
            events.append(event)
        elif here != slot:
            events.append(Allocation(-2, 0, event.phase, event.module))
        slot = here
    return replace(trace, events=tuple(events), kept=frozenset(), on_host=frozenset(), bytes_of={})


def _in_flight(config: RunConfig, stage: int, micro_batches: int) -> _Flight:
    layout = config.layout
    name = layout.schedule or "1f1b"
    if layout.pp == 1:
        return _Flight(((), (), ()), 1)
    if name == "gpipe":
        return _Flight((((0, micro_batches - 1.0),), (), ((0, max(0.0, micro_batches - 2.0)),)), micro_batches)
    steady = STEADY * layout.pp
    number = micro_batches if micro_batches <= steady else steady + micro_batches % layout.pp
    return _flights(name, layout.pp, number, layout.chunks)[stage]


@lru_cache(maxsize=4096)
def _flights(name: str, pp: int, micro_batches: int, chunks: int | None) -> tuple[_Flight, ...]:
    """What each pipeline rank holds, from the schedule's own order; stages of a rank count alike."""
    schedule = build(name, pp, micro_batches, chunks=chunks)
    found = []
    for rank, order in enumerate(schedule.orders):
        own = sorted(stage for ranks in schedule.placement for stage, holder in enumerate(ranks) if holder == rank)
        held = np.zeros((micro_batches, len(own)))
        most = {place: np.zeros(len(own)) for place in PLACES}
        for action in order:
            for element in action.elements:
                number, at = element.micro_batch, own.index(element.stage)
                if element.kind == FORWARD:
                    held[number, at] += 1
                elif element.kind in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
                    besides = held.sum(axis=0) - held[number]
                    place = "last" if number == micro_batches - 1 else "first" if number == 0 else "between"
                    if besides.sum() > most[place].sum():
                        most[place] = besides
                    if element.kind != BACKWARD_INPUT:
                        held[number, at] -= 1
        first, last, between = (tuple(enumerate(most[place].tolist())) for place in PLACES)
        total = max(float(one.sum()) for one in most.values())
        found.append(_Flight((first, last, between), 1 + ceil(total / len(own))))
    return tuple(found)
