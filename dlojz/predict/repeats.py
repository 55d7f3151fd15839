"""The trace of a model whose blocks repeat, from a trace in which each is run four times at most.

Layer 3. Invariant: the result is the trace of the whole model, up to the numbers of the storages and the order of
releases that follow one another; where that cannot be shown, the whole model is traced.

A model is a chain of blocks, each of which reads one tensor and gives one (`dlojz.models.blocks`). Of a stretch of
alike blocks the first, two and the last are traced: what the two in the middle do is compared event by event, counted
from each of them (its own storages, those of its neighbours). Where it is the same, it is what every block between the
first and the last does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from dlojz.models.blocks import BlockList
from dlojz.predict.following import Allocation, Mark, Trace

TRACED = 4
"""Of each stretch: the first block, two in the middle, the last."""
PLAIN = (bool, int, float, str, type(None), torch.Size, torch.dtype)


class Stretch(NamedTuple):
    """Alike blocks that follow one another, in the whole model."""

    first: int
    length: int


class _Place(NamedTuple):
    """Where a storage was first seen: in which pass over which block, as the how-manieth of its storages."""

    backward: bool
    block: int
    ordinal: int


class _View(NamedTuple):
    """A block of the shortened model, at a place in the whole one."""

    block: int
    at: int


class _UnlikeError(Exception):
    """The blocks do not repeat as they seem to."""


def trace_repeating(model: BlockList, trace: Callable[[nn.Module], Trace]) -> Trace:
    """Trace a model, running no more than four of any stretch of alike blocks.

    Args:
        model: on the meta device; afterwards it is as it was.
        trace: traces what it is given.
    """
    stretches = stretches_of(model)
    if not stretches:
        return trace(model)
    whole = model.blocks
    left_out = {number for s in stretches for number in range(s.first + TRACED - 1, s.first + s.length - 1)}
    model.blocks = nn.ModuleList(block for number, block in enumerate(whole) if number not in left_out)
    try:
        return _Expansion(trace(model), stretches, len(whole)).whole()
    except _UnlikeError:
        model.blocks = whole
        return trace(model)
    finally:
        model.blocks = whole


def stretches_of(model: BlockList) -> list[Stretch]:
    """The stretches of more than four alike blocks, in order."""
    owners = Counter(id(parameter) for block in model.blocks for parameter in set(block.parameters()))
    found, first = [], 0
    for _, alike in groupby(_signature(block, owners) for block in model.blocks):
        count = len(list(alike))
        if count > TRACED:
            found.append(Stretch(first, count))
        first += count
    return found


def _signature(block: nn.Module, owners: Counter[int]) -> Hashable:
    """What alike blocks have in common; a part of which nothing is known makes a block like no other."""
    if any(owners[id(parameter)] > 1 for parameter in block.parameters()):
        return object()
    parts: list[Hashable] = []
    for name, part in block.named_modules():
        if part._forward_hooks or part._forward_pre_hooks:
            return object()
        own = {key: value for key, value in vars(part).items() if not key.startswith("_")}
        settings = tuple((key, _setting(value)) for key, value in sorted(own.items()))
        held = [(key, one) for named in (part._parameters, part._buffers) for key, one in named.items()]
        shapes = tuple((key, one if one is None else (one.shape, one.dtype, one.requires_grad)) for key, one in held)
        parts.append((name, type(part), settings, shapes))
    return tuple(parts)


def _setting(value: Any) -> Hashable:
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, tuple | list):
        return tuple(_setting(each) for each in value)
    if isinstance(value, dict):
        return tuple((key, _setting(each)) for key, each in value.items())
    return id(value)


class _Expansion:
    """Writes the events of a shortened model out for the whole one.

    Args:
        short: trace of the shortened model.
        stretches: in the whole model.
        count: blocks of the whole model.
    """

    def __init__(self, short: Trace, stretches: list[Stretch], count: int) -> None:
        self.short, self.count = short, count
        self.middles: set[int] = set()
        """Numbers in the shortened model of the blocks that stand for others."""
        self.stands_for: list[int] = []
        """Block of the shortened model → its place in the whole one; behind the last one comes the loss."""
        self.model_of: list[int] = []
        """Block of the whole model → which of the shortened one tells what it does."""
        ends = {s.first: s for s in stretches}
        while len(self.model_of) <= count:
            at, number = len(self.model_of), len(self.stands_for)
            if at in ends:
                s = ends[at]
                self.middles |= {number + 1, number + 2}
                self.stands_for += [at, at + 1, at + 2, at + s.length - 1]
                self.model_of += [number, *[number + 1] * (s.length - 2), number + 3]
            else:
                self.stands_for.append(at)
                self.model_of.append(number)
        self.segments: dict[tuple[bool, int], list[Allocation | Mark]] = {}
        self.place_of: dict[int, _Place] = {}
        self.number_of: dict[_Place, int] = {}
        self._cut()
        for number in sorted(self.middles):
            if number + 1 in self.middles:
                for backward in (False, True):
                    if self._seen_from(number, backward) != self._seen_from(number + 1, backward):
                        raise _UnlikeError

    def _cut(self) -> None:
        """The events by pass and block, and where each storage was first seen."""
        backward, block, last = False, -1, len(self.stands_for) - 1
        births: Counter[tuple[bool, int]] = Counter()
        for event in self.short.events:
            if not backward and (event.phase if isinstance(event, Allocation) else event.what) == "backward":
                backward, block = True, last
            if isinstance(event, Mark) and event.what in ("forward", "backward"):
                at = _block_number(event.name)
                if at is not None and at != block:
                    if at != block + (-1 if backward else 1):
                        raise _UnlikeError
                    block = at
            self.segments.setdefault((backward, block), []).append(event)
            if isinstance(event, Allocation) and event.storage not in self.place_of:
                self.place_of[event.storage] = _Place(backward, block, births[backward, block])
                births[backward, block] += 1

    def _moved(self, block: int, seen_from: int, whole: int) -> int:
        """Where a block lies in the whole model, seen from one that is told of at a place there."""
        if abs(block - seen_from) <= 1:
            return whole + block - seen_from
        if block in self.middles:
            raise _UnlikeError
        return self.stands_for[block] if block >= 0 else block

    def _name(self, name: str, seen_from: int, whole: int) -> str:
        block = _block_number(name)
        if block is None:
            return name
        rest = name.split(".", 2)[2:]
        return ".".join(["blocks", str(self._moved(block, seen_from, whole)), *rest])

    def _place(self, storage: int, seen_from: int, whole: int) -> _Place | None:
        place = self.place_of.get(storage)
        return place and place._replace(block=self._moved(place.block, seen_from, whole))

    def _seen_from(self, block: int, backward: bool) -> list[Hashable]:
        """What is done in a block, as if it were block 0; releases that follow one another in a fixed order."""
        told: list[Hashable] = []
        for is_release, events in groupby(
            self.segments.get((backward, block), []), lambda e: isinstance(e, Allocation) and e.delta_bytes < 0
        ):
            run: list[tuple[Any, ...]] = []
            for event in events:
                place = self._near(event.storage, block)
                if isinstance(event, Mark):
                    run.append((event.what, self._name(event.name, block, 0), place))
                else:
                    run.append((event.phase, self._name(event.module, block, 0), place, event.delta_bytes))
            told += sorted(run, key=repr) if is_release else run
        return told

    def _near(self, storage: int, block: int) -> Hashable:
        """A storage of this block or a neighbour, counted from it; of another, by its place in the whole model."""
        place = self.place_of.get(storage)
        if place is None or abs(place.block - block) > 1:
            return self._place(storage, block, 0), "far"
        return place._replace(block=place.block - block), "near"

    def whole(self) -> Trace:
        """The trace of the whole model."""
        short = self.short
        events: list[Allocation | Mark] = []
        bytes_of: dict[int, int] = {}
        module_of: dict[int, str] = {}
        kept, on_host = set(), set()
        for event, told, seen in self._in_order():
            number = self._number(event.storage, *seen)
            if isinstance(event, Mark):
                events.append(Mark(event.what, self._name(event.name, *told), number))
                continue
            module = self._name(event.module, *told)
            events.append(Allocation(number, event.delta_bytes, event.phase, module))
            if number not in bytes_of:
                bytes_of[number] = short.bytes_of[event.storage]
                module_of[number] = self._name(short.module_of[event.storage], *told)
                kept |= {number} if event.storage in short.kept else set()
                on_host |= {number} if event.storage in short.on_host else set()
        output_of: dict[str, int] = {}
        named = {name: _block_number(name) for name in short.output_of}
        for at, model in enumerate(self.model_of):
            for name, storage in short.output_of.items():
                if named[name] == model or (named[name] is None and at == self.count):
                    output_of[self._name(name, model, at)] = self._number(storage, model, at)
        return Trace(tuple(events), frozenset(kept), frozenset(on_host), bytes_of, module_of, output_of)

    def _in_order(self) -> Iterator[tuple[Allocation | Mark, _View, _View]]:
        """Each event of the whole model, from where it is told there, and from where its storage is seen."""
        forward = [_View(-1, -1), *(_View(model, at) for at, model in enumerate(self.model_of))]
        for backward in (False, True):
            for view in reversed(forward) if backward else forward:
                swept: set[_Place] = set()
                for event in self.segments.get((backward, view.block), []):
                    place = self.place_of.get(event.storage)
                    if isinstance(event, Mark) or event.delta_bytes > 0:
                        _check_none_is_left(swept)
                    elif place is not None and place.block in self.middles and abs(place.block - view.block) > 1:
                        yield from ((event, view, where) for where in self._sweep(place, swept))
                        continue
                    yield event, view, view
                _check_none_is_left(swept)

    def _sweep(self, place: _Place, swept: set[_Place]) -> Iterator[_View]:
        """Where a storage lies that is released together with those of all blocks, also of those left out.

        That is so if what the two in the middle have is released together (`swept`: what one of them has released).
        """
        first = place.block if place.block + 1 in self.middles else place.block - 1
        twin = place._replace(block=2 * first + 1 - place.block)
        if twin in swept:
            swept.discard(twin)
            return
        swept.add(place)
        yield from (_View(place.block, at) for at, model in enumerate(self.model_of) if model == first)

    def _number(self, storage: int, model: int, at: int) -> int:
        place = self._place(storage, model, at)
        return -1 if place is None else self.number_of.setdefault(place, len(self.number_of))


def _check_none_is_left(swept: set[_Place]) -> None:
    if swept:
        raise _UnlikeError


def _block_number(name: str) -> int | None:
    parts = name.split(".", 2)
    return int(parts[1]) if parts[0] == "blocks" and len(parts) > 1 else None
