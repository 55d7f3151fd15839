"""Trace a run's model: repeated blocks once, a pipeline rank's share, the order in which gradients become ready.

A trace depends on model, loss, casts and micro-batch alone, so it serves all layouts that compute alike. A model is a
chain of blocks, each of which reads one tensor and gives one (`dlojz.models.blocks`). Of a stretch of alike blocks the
first, two in the middle and the last are traced. If the two in the middle have the same events, counted from each of
them, every block between the first and the last has them; else the whole model is traced. The result is the trace of
the whole model, up to the numbers of the storages and the order of consecutive releases. A model from elsewhere, one
block of which calls the others (`NestedBlocks`), is traced whole.

For a pipeline a trace is cut into the passes of each stage. Between the halves of a split backward a stage keeps all
that the paths below its topmost weights have saved, and the gradients of the outputs of its layers. Source: torch 2.13,
`torch/distributed/pipelining/_backward.py`.

The order of gradients decides what goes into which of DDP's buckets: near the reverse of the parameters' order, but a
layer's bias and weight may be swapped. Source: torch `csrc/distributed/c10d/reducer.cpp`, `push_rebuilt_params` and
`rebuild_buckets`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import nn

from dlojz.base.errors import LabError
from dlojz.base.language import refusal, refusing_overflow
from dlojz.by_hand.activation_offload import ActivationOffload, planned_offload
from dlojz.by_hand.chunked_loss import chunk_loss
from dlojz.by_hand.context_parallel import RingShare, share_sequences
from dlojz.by_hand.ring_attention import PretendedRing
from dlojz.by_hand.tensor.split import LinearShare, parallel_loss
from dlojz.config.compatibility import has_tied_head
from dlojz.config.fields import block_choices
from dlojz.config.run_config import RunConfig
from dlojz.models.blocks import BlockList, loss_of, untie
from dlojz.models.checkpointing import Checkpointing
from dlojz.models.experts.routing import Routing
from dlojz.models.foreign.elsewhere import CHAIN, contents_hash
from dlojz.models.foreign.meta_checks import error_with_line, said_when_slow
from dlojz.models.foreign.names import is_elsewhere, shown_name
from dlojz.models.foreign.sources import changes_its_model
from dlojz.models.meta import sample_inputs, targets_shape
from dlojz.pipeline.messages import Item
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.pipeline.simulator import peak_activations
from dlojz.prediction.shapes import (
    AUTOCAST,
    WHOLE,
    Context,
    RankPart,
    Split,
    build_on_meta,
    model_shapes,
    switches_hash,
)
from dlojz.prediction.trace import Allocation, Compute, MemoryTrace, TraceMark, trace
from dlojz.prediction.trace_store import kept

TRACED = 4
"""Blocks of a stretch: the first, two in the middle, the last."""
PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)


class RepeatedBlocks(NamedTuple):
    """Stretch of alike blocks in the whole model."""

    first: int
    length: int


TURN_OF = {"backward": 1, "weights": 2}
"""Number of each pass after forward, by the phase of an allocation or the name of a mark."""
TURNS = (1, -1, 1)
"""In which direction each pass goes through the blocks."""


class _Place(NamedTuple):
    """Birth of a storage: in which pass over which block, and its number there."""

    turn: int
    block: int
    ordinal: int


class _View(NamedTuple):
    """A block of the shortened model, at a place in the whole one."""

    block: int
    at: int


class _UnlikeError(Exception):
    """The blocks only seem to repeat."""


def trace_repeating(model: BlockList, trace: Callable[[nn.Module], MemoryTrace]) -> MemoryTrace:
    """Trace a model (on the meta device, left as it was), running at most four of any stretch of alike blocks."""
    stretches = stretches_of(model)
    if not stretches:
        return trace(model)
    all_blocks = model.blocks
    # Of a stretch the first three blocks stay, and the last.
    left_out = {number for s in stretches for number in range(s.first + TRACED - 1, s.first + s.length - 1)}
    model.blocks = nn.ModuleList(block for number, block in enumerate(all_blocks) if number not in left_out)
    try:
        return _Expansion(trace(model), stretches, len(all_blocks)).whole()
    except _UnlikeError:
        model.blocks = all_blocks
        return trace(model)
    finally:
        model.blocks = all_blocks


def stretches_of(model: BlockList) -> list[RepeatedBlocks]:
    """Find the stretches of more than four alike blocks, in order; none where the blocks form no chain."""
    if not model.is_chain:
        return []
    owners = Counter(id(parameter) for block in model.blocks for parameter in set(block.parameters()))
    stretches, start = [], 0
    for _, group in groupby(_signature(block, owners) for block in model.blocks):
        count = len(list(group))
        if count > TRACED:
            stretches.append(RepeatedBlocks(start, count))
        start += count
    return stretches


def _signature(block: nn.Module, owners: Counter[int]) -> Hashable:
    """Signature of a block, equal for alike blocks; one with an unknown part equals no other."""
    if any(owners[id(parameter)] > 1 for parameter in block.parameters()):
        return object()
    parts: list[Hashable] = []
    for name, part in block.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return object()
        attributes = {key: value for key, value in vars(part).items() if not key.startswith("_")}
        settings = tuple((key, _setting(value)) for key, value in sorted(attributes.items()))
        tensors = [(key, tensor) for table in (part._parameters, part._buffers) for key, tensor in table.items()]
        shapes = tuple(
            (key, tensor if tensor is None else (tensor.shape, tensor.dtype, tensor.requires_grad))
            for key, tensor in tensors
        )
        parts.append((name, type(part), settings, shapes))
    return tuple(parts)


def _setting(value: Any) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return tuple(_setting(element) for element in value)
    if isinstance(value, dict):
        return tuple((key, _setting(element)) for key, element in value.items())
    return id(value)


class _Expansion:
    """Expansion of the trace of a shortened model to that of the whole one, of `count` blocks."""

    def __init__(self, short: MemoryTrace, stretches: list[RepeatedBlocks], count: int) -> None:
        self.short, self.count = short, count
        self.middles: set[int] = set()
        """Numbers in the shortened model of the blocks that stand for others."""
        self.stands_for: list[int] = []
        """Block of the shortened model → its place in the whole one; after the last one comes the loss."""
        self.model_of: list[int] = []
        """Block of the whole model → the one of the shortened model with its events."""
        ends = {s.first: s for s in stretches}
        while len(self.model_of) <= count:
            position, number = len(self.model_of), len(self.stands_for)
            if position in ends:
                s = ends[position]
                self.middles |= {number + 1, number + 2}
                self.stands_for += [position, position + 1, position + 2, position + s.length - 1]
                # The second of the four stands for all that are left out; the third shows that it may.
                self.model_of += [number, *[number + 1] * (s.length - 2), number + 3]
            else:
                self.stands_for.append(position)
                self.model_of.append(number)
        self.segments: dict[tuple[int, int], list[Allocation | TraceMark]] = {}
        self.place_of: dict[int, _Place] = {}
        self.number_of: dict[_Place, int] = {}
        self._cut()
        for number in sorted(self.middles):
            if number + 1 in self.middles:
                for turn in range(len(TURNS)):
                    if self._seen_from(number, turn) != self._seen_from(number + 1, turn):
                        raise _UnlikeError

    def _cut(self) -> None:
        """The events by pass and block, and where each storage was first seen."""
        turn, block, last_block = 0, -1, len(self.stands_for) - 1
        births: Counter[tuple[int, int]] = Counter()
        for event in self.short.events:
            event_turn = TURN_OF.get(event.phase if isinstance(event, Allocation) else event.what, 0)
            if event_turn > turn:
                turn, block = event_turn, last_block if TURNS[event_turn] < 0 else 0
            if isinstance(event, TraceMark) and event.what in ("forward", *TURN_OF):
                event_block = block_number(event.name)
                if event_block is not None and event_block != block:
                    if event_block != block + TURNS[turn]:
                        raise _UnlikeError
                    block = event_block
            self.segments.setdefault((turn, block), []).append(event)
            if isinstance(event, Allocation) and event.storage not in self.place_of:
                self.place_of[event.storage] = _Place(turn, block, births[turn, block])
                births[turn, block] += 1

    def _moved(self, block: int, seen_from: int, position: int) -> int:
        """Place of a block in the whole model, relative to another block and its place there."""
        if abs(block - seen_from) <= 1:
            return position + block - seen_from
        if block in self.middles:
            raise _UnlikeError
        return self.stands_for[block] if block >= 0 else block

    def _name(self, name: str, seen_from: int, position: int) -> str:
        block = block_number(name)
        if block is None:
            return name
        suffix = name.split(".", 2)[2:]
        return ".".join(["blocks", str(self._moved(block, seen_from, position)), *suffix])

    def _place(self, storage: int, seen_from: int, position: int) -> _Place | None:
        birth = self.place_of.get(storage)
        return birth and birth._replace(block=self._moved(birth.block, seen_from, position))

    def _seen_from(self, block: int, turn: int) -> list[Hashable]:
        """Events in a block, as if it were block 0; consecutive releases in a fixed order."""
        signature: list[Hashable] = []
        for is_release, events in groupby(
            self.segments.get((turn, block), []), lambda e: isinstance(e, Allocation) and e.delta_bytes < 0
        ):
            run: list[tuple[Any, ...]] = []
            for event in events:
                birth = self._near(event.storage, block)
                if isinstance(event, TraceMark):
                    run.append((event.what, self._name(event.name, block, 0), birth))
                else:
                    run.append((event.phase, self._name(event.module, block, 0), birth, event.delta_bytes))
            signature += sorted(run, key=repr) if is_release else run
        return signature

    def _near(self, storage: int, block: int) -> Hashable:
        """A storage of this block or a neighbour, relative to it; of another, by its place in the whole model."""
        birth = self.place_of.get(storage)
        if birth is None or abs(birth.block - block) > 1:
            return self._place(storage, block, 0), "far"
        return birth._replace(block=birth.block - block), "near"

    def whole(self) -> MemoryTrace:
        """Expand the trace to the whole model."""
        short = self.short
        events: list[Allocation | TraceMark] = []
        bytes_of: dict[int, int] = {}
        module_of: dict[int, str] = {}
        kept_storages, on_host, products = set(), set(), set()
        for event, module_view, storage_view in self._in_order():
            number = self._number(event.storage, *storage_view)
            if isinstance(event, TraceMark):
                events.append(TraceMark(event.what, self._name(event.name, *module_view), number))
                continue
            module = self._name(event.module, *module_view)
            events.append(Allocation(number, event.delta_bytes, event.phase, module))
            if number not in bytes_of:
                bytes_of[number] = short.bytes_of[event.storage]
                module_of[number] = self._name(short.module_of[event.storage], *module_view)
                kept_storages |= {number} if event.storage in short.kept else set()
                on_host |= {number} if event.storage in short.on_host else set()
                products |= {number} if event.storage in short.products else set()
        output_of, gradient_of = self._by_name(short.output_of), self._by_name(short.gradient_of)
        blocks = enumerate(self.model_of[: self.count])
        flops_of = {f"blocks.{position}": short.flops_of.get(f"blocks.{model}", 0) for position, model in blocks}
        flops_of[""] = short.flops_of.get("", 0)
        return MemoryTrace(
            tuple(events),
            frozenset(kept_storages),
            frozenset(on_host),
            bytes_of,
            module_of,
            output_of,
            flops_of,
            gradient_of,
            frozenset(products),
        )

    def _by_name(self, short: dict[str, int]) -> dict[str, int]:
        """A storage of each module of the whole model, from those of the shortened one."""
        storage_of: dict[str, int] = {}
        block_of_name = {name: block_number(name) for name in short}
        for position, model in enumerate(self.model_of):
            for name, storage in short.items():
                if block_of_name[name] == model or (block_of_name[name] is None and position == self.count):
                    storage_of[self._name(name, model, position)] = self._number(storage, model, position)
        return storage_of

    def _in_order(self) -> Iterator[tuple[Allocation | TraceMark, _View, _View]]:
        """Each event of the whole model, with the views of its module and of its storage."""
        forward = [_View(-1, -1), *(_View(model, position) for position, model in enumerate(self.model_of))]
        for turn, direction in enumerate(TURNS):
            for view in forward[::direction]:
                swept: set[_Place] = set()
                for event in self.segments.get((turn, view.block), []):
                    birth = self.place_of.get(event.storage)
                    if isinstance(event, TraceMark) or event.delta_bytes > 0:
                        _check_none_is_left(swept)
                    elif birth is not None and birth.block in self.middles and abs(birth.block - view.block) > 1:
                        yield from ((event, view, sweep_view) for sweep_view in self._sweep(birth, swept))
                        continue
                    yield event, view, view
                _check_none_is_left(swept)

    def _sweep(self, birth: _Place, swept: set[_Place]) -> Iterator[_View]:
        """Views of a storage that is released together with those of all blocks, also of those left out.

        That is so if the two in the middle release theirs together (`swept`: what one of them has released).
        """
        first_middle = birth.block if birth.block + 1 in self.middles else birth.block - 1
        twin = birth._replace(block=2 * first_middle + 1 - birth.block)
        if twin in swept:
            swept.discard(twin)
            return
        swept.add(birth)
        yield from (
            _View(birth.block, position) for position, model in enumerate(self.model_of) if model == first_middle
        )

    def _number(self, storage: int, model: int, position: int) -> int:
        birth = self._place(storage, model, position)
        return -1 if birth is None else self.number_of.setdefault(birth, len(self.number_of))


def _check_none_is_left(swept: set[_Place]) -> None:
    if swept:
        raise _UnlikeError


def block_number(name: str) -> int | None:
    """Number of the block in which a module is, by its path; None for one in no block."""
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "blocks" and len(parts) > 1 else None


class TraceKey(NamedTuple):
    """All that a trace depends on besides the code."""

    model: str
    image_size: int | None
    sequence_length: int | None
    num_classes: int
    checkpointing: Checkpointing
    micro_batch: int
    compute: Compute
    activation_plan: str
    offloaded: bool
    split: Split
    on_gpu: bool
    routing: Routing | None
    ep: int
    in_megatron: bool
    untied: bool
    context: Context
    switches: str
    """Hash of the switches of torch and the packages of models (`shapes.switches_hash`)."""
    settings: str
    """Hash of a model from elsewhere as it was built; empty for a model of the catalogue."""
    loss_chunks: int = 1
    channels_last: bool = False
    in_halves: bool = False
    """Whether backward comes in two halves, as in a zero-bubble pipeline."""


def compute_of(config: RunConfig) -> Compute:
    """Return the compute precision of a run's engine: DeepSpeed and FSDP2 cast the weights, the others autocast."""
    if config.precision == "fp32":
        return "fp32"
    if config.precision == "bf16-true":
        return "bf16-true" if config.lora else "bf16"
    return "autocast" if config.layout.strategy in AUTOCAST else "bf16"


def trace_of(part: RankPart, *, on_gpu: bool = False, in_halves: bool = False) -> MemoryTrace:
    """Trace one micro-batch of a run on the ranks that share the model's layers, all blocks of it.

    Args:
        part: of a rank, whose part of each layer is traced.
        on_gpu: with the corrections for a GPU.
        in_halves: backward first for the input, then for the weights.
    """
    return _kept(key_of(part, on_gpu=on_gpu)._replace(in_halves=in_halves))


def key_of(part: RankPart, *, on_gpu: bool = False) -> TraceKey:
    """Return what the trace of a run depends on; arguments as for `trace_of`."""
    config = part.config
    return TraceKey(
        config.built_model,
        config.image_size,
        config.sequence_length,
        config.num_classes,
        config.layout.checkpointing,
        config.layout.micro_batch,
        compute_of(config),
        config.layout.activation_plan,
        config.layout.offload == "activations",
        part.split,
        on_gpu,
        config.routing,
        config.layout.ep,
        config.library == "megatron",
        config.layout.pp > 1 and has_tied_head(config),
        part.context,
        switches_hash(),
        model_shapes(config).settings if is_elsewhere(config.model) else "",
        config.layout.loss_chunks,
        config.layout.channels_last,
    )


@lru_cache(maxsize=64)
def _kept(key: TraceKey) -> MemoryTrace:
    if changes_its_model(key.model):  # what an own file imports may have changed too
        return _traced(key)
    contents = contents_hash(key.model) if is_elsewhere(key.model) else ""
    return kept((key, contents) if contents else key, lambda: _traced(key))


def _traced(key: TraceKey) -> MemoryTrace:
    model, traced = tracer_of(key)
    try:
        return trace_repeating(model, traced)
    except LabError as error:
        if key.checkpointing == "none" or error.__cause__ is None:
            raise
        _kept(key._replace(checkpointing="none"))  # refused with its own sentence if the model itself does not run
        cause, name = error_with_line(error.__cause__), shown_name(key.model.removeprefix(CHAIN))
        raise refusal(
            en=f"checkpointing={key.checkpointing!r} cannot run with {name}, which runs without it ({cause}): use "
            "another kind, or checkpointing='none'.",
            fr=f"checkpointing={key.checkpointing!r} ne peut pas s’exécuter avec {name}, qui s’exécute sans "
            f"({cause}) : prenez-en un autre, ou checkpointing='none'.",
        ) from error


def pretended_sums(config: RunConfig) -> tuple[int, ...]:
    """List the bytes of each sum that a tensor-parallel rank makes in a micro-batch of a model from elsewhere."""
    return _sums(key_of(RankPart(config)))


@lru_cache(maxsize=64)
def _sums(key: TraceKey) -> tuple[int, ...]:
    model, traced = tracer_of(key)
    traced(model)
    return tuple(next(module.axis.pretended for module in model.modules() if isinstance(module, LinearShare)))


@refusing_overflow()
def tracer_of(key: TraceKey) -> tuple[BlockList, Callable[[nn.Module], MemoryTrace]]:
    """Build a rank's part of a model, and what traces it."""
    model = build_on_meta(
        key.model,
        key.image_size,
        key.sequence_length,
        key.num_classes,
        key.split,
        key.checkpointing,
        routing=key.routing,
        ep=key.ep,
    )
    if key.untied:
        untie(model)
    if key.context.size > 1:
        share_sequences(model, RingShare(PretendedRing(key.context.rank, key.context.size)))
    if key.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if key.loss_chunks > 1:
        chunk_loss(model, key.loss_chunks)
    if key.activation_plan:
        model.plan_activations(block_choices(key.activation_plan))
    tokens = key.sequence_length and key.sequence_length // key.context.size
    inputs = sample_inputs(key.model, key.micro_batch, image_size=key.image_size, sequence_length=tokens)
    targets = torch.empty(targets_shape(key.model, key.micro_batch, tokens), dtype=torch.long, device="meta")
    how = partial(
        trace,
        compute=key.compute,
        targets=targets,
        loss=loss_of(model) if key.split == WHOLE else parallel_loss(model),
        around_forward=ActivationOffload if key.offloaded else planned_offload if key.activation_plan else None,
        on_gpu=key.on_gpu,
        in_megatron=key.in_megatron,
        in_halves=key.in_halves,
    )

    def traced(shortened: nn.Module) -> MemoryTrace:
        with said_when_slow(key.model, tokens):
            return how(shortened, inputs)

    return model, traced


def block_of(module: str) -> str:
    """Return the name of a module's block: the first two parts of its path."""
    return ".".join(module.split(".")[:2])


def trace_of_rank(part: RankPart, trace: MemoryTrace) -> MemoryTrace:
    """Select one pipeline rank's share of a trace of all blocks."""
    if part.config.layout.pp == 1:
        return trace
    rank_blocks = {f"blocks.{number}" for number in part.blocks}
    if part.computes_loss:
        rank_blocks.add("")  # the loss
    received = {trace.output_of.get(f"blocks.{blocks.start - 1}", -1) for blocks in part.stage_blocks} - {-1}

    events: list[Allocation | TraceMark] = []
    bytes_of: dict[int, int] = {}

    def is_own(event: Allocation) -> bool:
        if event.storage in received:
            return True
        if event.phase == "data":
            return False  # a pipeline reads all micro-batches before its first forward: see `Step`
        # A release belongs to whose allocation it ends: autocast gives its casts back after the last block's forward.
        return event.storage in bytes_of or (event.delta_bytes >= 0 and block_of(event.module) in rank_blocks)

    for event in trace.events:
        if isinstance(event, TraceMark):
            if event.name == "" or block_of(event.name) in rank_blocks:
                events.append(event)
        elif is_own(event):
            events.append(event)
            bytes_of[event.storage] = max(bytes_of.get(event.storage, 0), event.delta_bytes)
    kept_storages = frozenset(storage for storage in trace.kept if storage in bytes_of)
    return replace(trace, events=tuple(events), kept=kept_storages, bytes_of=bytes_of)


def micro_batches_in_flight(part: RankPart) -> int:
    """Count the micro-batches whose activations a rank holds at once, rounded up where its stages differ."""
    if part.config.layout.pp == 1:
        return 1
    peaks = peak_activations(schedule_of(part.config.layout))
    return max(1, ceil(peaks[part.pp_rank] / len(part.stages)))


def ready_order(config: RunConfig) -> tuple[int, ...]:
    """Order the parameters' numbers, as in `model.parameters()`, by when their gradients become ready."""
    number_of = {parameter.name: number for number, parameter in enumerate(model_shapes(config).parameters)}
    return tuple(number_of[mark.name] for mark in _marks_of_few(config) if mark.what == "ready")


def reached_names(events: Iterable[Allocation | TraceMark]) -> frozenset[str]:
    """Name the parameters that the backward pass of a trace reaches."""
    return frozenset(event.name for event in events if isinstance(event, TraceMark) and event.what == "ready")


def reached_in_few(config: RunConfig) -> frozenset[str]:
    """Name the parameters that backward reaches, without a trace of the whole micro-batch."""
    return reached_names(_marks_of_few(config))


def units_in_backward(config: RunConfig) -> frozenset[str]:
    """Name the modules, such as `blocks.3`, that backward enters: none below the first that needs a gradient."""
    return frozenset(mark.name for mark in _marks_of_few(config) if mark.what == "backward")


def gathered_modules(events: Iterable[Allocation | TraceMark], modules: Container[str]) -> list[str]:
    """List the modules whose weights stage 3 gathers in a traced micro-batch, each as often as it does.

    Weights are there from a module's forward to its end, and from its backward on. Torch ends the recomputation of a
    block where all that backward reads is there again: the modules that it is in then have not ended, and their weights
    stay for their backward. Where that is depends on the order in which a model computes, so the trace is asked.
    """
    gathered: list[str] = []
    present: set[str] = set()
    for event in events:
        if not isinstance(event, TraceMark) or event.name not in modules:
            continue
        if event.what in ("forward", "backward") and event.name not in present:
            gathered.append(event.name)
            present.add(event.name)
        elif event.what == "forwarded":
            present.discard(event.name)
    return gathered


def _marks_of_few(config: RunConfig) -> Iterator[TraceMark]:
    # Of one sample autograd's graph may lack a copy or a sum; from two on it is the same, and the order with it.
    few = config.layout.model_copy(update={"micro_batch": min(config.layout.micro_batch, 2)})
    events = trace_of(RankPart(config.model_copy(update={"layout": few}))).events
    return (event for event in events if isinstance(event, TraceMark))


@dataclass
class StagePasses:
    """Passes of one stage, cut from a trace of all blocks.

    Attributes:
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
        return sum(self.trace.bytes_of[storage] for storage in storages if storage not in self.trace.on_host)


def cut_passes(trace: MemoryTrace, bounds: tuple[int, ...], stages: Iterable[int]) -> dict[int, StagePasses]:
    """Cut a trace of all blocks into the passes of some stages."""
    last_stage = len(bounds) - 2
    passes_of_stage = {stage: StagePasses(trace) for stage in stages}

    def stage_at(module: str) -> int:
        number = block_number(module)
        return last_stage if number is None else bisect_right(bounds, number) - 1

    owner: dict[int, int] = {}
    after_first_half: dict[int, int] = {}
    number_of_pass = "forward"
    for event in trace.events:
        if isinstance(event, TraceMark):
            if event.what in ("backward", "weights"):
                number_of_pass = event.what
            for stage in passes_of_stage if event.name == "" else {stage_at(event.name)} & passes_of_stage.keys():
                passes_of_stage[stage].events[number_of_pass].append(event)
            continue
        if event.phase == "data":
            continue
        number_of_pass = event.phase
        stage = stage_at(event.module)
        made_by = owner.setdefault(event.storage, stage)
        if event.phase != "weights":
            after_first_half[event.storage] = after_first_half.get(event.storage, 0) + event.delta_bytes
        stage_event = event
        if not event.delta_bytes and made_by != stage:
            # A sum of gradients in the memory of one that another rank has made: here it is a tensor more.
            stage_event = replace(event, delta_bytes=trace.bytes_of[event.storage])
        elif event.delta_bytes < 0:
            stage = made_by  # a release belongs to whose allocation it ends
        if stage in passes_of_stage:
            passes_of_stage[stage].events[event.phase].append(stage_event)
    for stage, passes in passes_of_stage.items():
        output_storage = trace.output_of.get(f"blocks.{bounds[stage + 1] - 1}", -1)
        stage_storages = [storage for storage in trace.bytes_of if owner.get(storage, -1) == stage]
        passes.kept = tuple(
            storage
            for storage in stage_storages
            if storage in trace.kept and (storage != output_storage or stage == last_stage)
        )
        passes.logits = (
            output_storage
            if stage == last_stage and output_storage in stage_storages and output_storage not in trace.kept
            else -1
        )
        input_gradient = trace.gradient_of.get(f"blocks.{bounds[stage] - 1}", -1)
        passes.between = tuple(
            storage
            for storage in stage_storages
            if after_first_half.get(storage) and storage not in (output_storage, input_gradient)
        )
        received = trace.gradient_of.get(f"blocks.{bounds[stage + 1] - 1}", -1)
        passes.retains = stage < last_stage and bool(after_first_half.get(received))
    return passes_of_stage


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

    def of(self, item: Item) -> tuple[StagePasses, tuple[int, ...]]:
        """Passes of a stage that keeps this of a micro-batch, and the storages that it keeps."""
        if item.kind == "activations":
            return self.whole[item.stage], self.whole[item.stage].kept
        passes = self.halves[item.stage]
        return passes, passes.kept if item.kind == "for halves" else passes.between

    @property
    def retaining(self) -> frozenset[int]:
        """Stages whose second half needs the gradient that the first one has received."""
        return frozenset(stage for stage, passes in self.halves.items() if passes.retains)


def passes_of(
    whole_trace: MemoryTrace,
    halves: MemoryTrace | None,
    bounds: tuple[int, ...],
    stages: Iterable[int],
    at_block: tuple[int, ...],
) -> RankPasses:
    """Cut the traces of all blocks into the passes of a rank's stages.

    Args:
        whole_trace, halves: with a whole backward, and with one in two halves where the schedule has such.
        bounds: first block of each stage, and the number of blocks.
        at_block: bytes of what enters each block.
    """
    stage_numbers = sorted(set(stages))
    of_whole = cut_passes(whole_trace, bounds, stage_numbers)
    of_halves = {} if halves is None else cut_passes(halves, bounds, [stage for stage in stage_numbers if stage])
    sizes: dict[Item, int] = {}
    for stage in stage_numbers:
        sizes[Item("activations", stage)] = of_whole[stage].bytes_of(of_whole[stage].kept)
        logits = of_whole[stage].logits
        sizes[Item("logits", stage)] = of_whole[stage].bytes_of([logits]) if logits >= 0 else 0
        sizes |= {Item("boundary", boundary): at_block[bounds[boundary]] for boundary in (stage, stage + 1)}
        if stage in of_halves:
            sizes[Item("for halves", stage)] = of_halves[stage].bytes_of(of_halves[stage].kept)
            sizes[Item("between halves", stage)] = of_halves[stage].bytes_of(of_halves[stage].between)
    return RankPasses(of_whole, of_halves, sizes)
