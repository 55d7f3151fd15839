"""Read memory snapshots of torch's CUDA allocator, of any program: what is alive at the peak, fragmentation, growth.

**Files.** What `torch.cuda.memory._dump_snapshot` writes is a pickle, and loading a pickle can run any program. None is
loaded here: `plain_value` walks its opcodes, builds dictionaries, lists, tuples, texts and numbers, and refuses
whatever would name or call something else. Torch's pages (`python -m torch.cuda._memory_viz trace_plot`, and those of
`dlojz memory --snapshot`) hold the same pickle; `json.dump` of `torch.cuda.memory._snapshot()` will do too.

**History.** As in torch's viewer, what is freed without having been allocated in the record, and what is in use at the
end without that, was there before the record began. Bytes are those that tensors asked for; a block that other streams
still use counts until its release is completed.

Sources: `torch/cuda/memory.py` (`_snapshot`: segments, blocks, trace entries), `torch/utils/viz/MemoryViz.js`
(`process_alloc_data`), `c10/cuda/CUDACachingAllocator.cpp`; opcodes: Python's `pickletools`.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlojz.base.errors import LabError
from dlojz.base.table import visible
from dlojz.results.profiler_trace import phrase

MOST_BYTES = 256 << 20
"""Of a file: about 90 million opcodes, two to three minutes."""
MOST_ENTRIES = 20_000_000
"""Blocks and entries of all devices; a pickle can name one list many times."""
NO_FRAME, AUTOGRAD, BEFORE = "<no frame>", "<autograd>", "<before>"
"""In place of a frame: none was recorded; autograd's C++ alone; allocated before the record began."""
GROW, SHRINK = ("segment_alloc", "segment_map"), ("segment_free", "segment_unmap")
_PAGE = re.compile(rb'"base64":\s*"([A-Za-z0-9+/=]*)"')
_JSON = re.compile(rb'\s*\{\s*"(segments|device_traces|allocator_settings|external_annotations)"')
_COMPILED = re.compile(r"\.(c|cc|cpp|cxx|h|hpp|cu|cuh|S|so)$|^\?\?$|^$")
_INTERNAL = re.compile(
    r"(site|dist)-packages/torch/|(^|/)torch/(nn|optim|autograd|distributed|utils|cuda|amp|fx|jit|func|_\w+|functional)\b"
    r"|^<frozen|/(runpy|contextlib|functools|threading)\.py$"
)


def is_snapshot(path: str | Path) -> bool:
    """Tell a memory snapshot from a trace by the name, else by the first bytes."""
    try:
        with Path(path).open("rb") as file:
            start = file.read(512)
    except OSError:
        return False
    page = start.lstrip()[:9].lower() in (b"<!doctype", b"<html")
    named = Path(path).suffix in (".pickle", ".pkl", ".pt", ".pth")
    # b"\x80": the first opcode of every pickle from protocol 2 on, which says the protocol.
    return named or start[:1] == b"\x80" or page or _JSON.match(start) is not None


_NUMBERS_AND_TEXTS = (
    *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
    *("UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"),
)
"""Opcodes that push what stands behind them."""
_MARK = object()


class _PlainStack:
    """Stack and memo of a pickle's opcodes, with those alone that build plain values."""

    def __init__(self) -> None:
        stack: list[Any] = []
        memo: dict[Any, Any] = {}
        self.stack = stack

        def since_mark() -> list[Any]:
            at = len(stack) - 1
            while stack[at] is not _MARK:
                at -= 1
            items = stack[at + 1 :]
            del stack[at:]
            return items

        def pairs(items: Sequence[Any]) -> dict[Any, Any]:
            # Key, value, key, value, …; a key that cannot be one raises TypeError.
            return dict(zip(items[::2], items[1::2], strict=True))

        def popped(count: int) -> tuple[Any, ...]:
            items = tuple(stack[-count:])
            del stack[-count:]
            return items

        def pushed(value: Callable[[], Any]) -> Callable[[Any], None]:
            return lambda _: stack.append(value())

        # Mutable ones are made anew for each opcode.
        make: dict[str, Callable[[], Any]] = {
            "NONE": lambda: None,
            "NEWTRUE": lambda: True,
            "NEWFALSE": lambda: False,
            "EMPTY_LIST": list,
            "EMPTY_DICT": dict,
            "EMPTY_TUPLE": tuple,
            "MARK": lambda: _MARK,
            "LIST": since_mark,
            "DICT": lambda: pairs(since_mark()),
            "TUPLE": lambda: tuple(since_mark()),
            "TUPLE1": lambda: popped(1),
            "TUPLE2": lambda: popped(2),
            "TUPLE3": lambda: popped(3),
        }
        self.actions: dict[str, Callable[[Any], Any]] = {
            **{code: pushed(value) for code, value in make.items()},
            **dict.fromkeys(_NUMBERS_AND_TEXTS, stack.append),
            **dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), lambda key: stack.append(memo[key])),
            **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), lambda key: memo.update({key: stack[-1]})),
            **dict.fromkeys(("PROTO", "FRAME"), lambda _: None),
            "MEMOIZE": lambda _: memo.update({len(memo): stack[-1]}),
            "SETITEM": lambda _: stack[-3].update(pairs([stack.pop(-2), stack.pop()])),
            "SETITEMS": lambda _: (items := pairs(since_mark()), stack[-1].update(items)),
            "APPEND": lambda _: stack[-2].append(stack.pop()),
            "APPENDS": lambda _: (items := since_mark(), stack[-1].extend(items)),
        }


def plain_value(data: bytes, name: str) -> Any:
    """Build the value of a pickle that has plain types only: nothing is imported, called or looked up.

    Raises:
        LabError: if it names or calls anything (GLOBAL, REDUCE, BUILD, …), or is cut off.
    """
    plain = _PlainStack()
    try:
        # The disassembler reads one opcode after the other, with the number or text behind it, and runs nothing.
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return plain.stack.pop()
            action = plain.actions.get(opcode.name)
            if action is None:
                raise phrase.refused("not plain", name=name, code=opcode.name)
            action(argument)
    except LabError:  # a ValueError, too
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError):
        # `genops` raises ValueError for an unknown opcode and for one that the end of the file cuts.
        pass
    raise _broken(name)


def _broken(name: str) -> LabError:
    return phrase.refused("no whole pickle", name=name)


class FrameBytes(NamedTuple):
    """Bytes in use that were allocated at one line of a program, and how many blocks they are."""

    frame: str
    size_bytes: int
    blocks: int


@dataclass(frozen=True)
class Occupancy:
    """Bytes of the device's segments when the snapshot was taken.

    Attributes:
        reserved_bytes: of all segments (cudaMalloc).
        allocated_bytes: blocks of tensors, rounded up by the allocator; `requested_bytes` without the rounding, None if
            the snapshot does not say.
        awaiting_bytes: freed, but a stream may still use them.
        free_bytes: of these segments and in no use; `largest_free_bytes` the largest block of them.
        whole_free_bytes: segments without a block in use, which `empty_cache` returns; the rest is in pieces.
    """

    segments: int
    expandable: bool
    reserved_bytes: int
    allocated_bytes: int
    requested_bytes: int | None
    awaiting_bytes: int
    free_bytes: int
    largest_free_bytes: int
    whole_free_bytes: int


@dataclass(frozen=True)
class MemorySnapshot:
    """What one device held, and when.

    Attributes:
        device: number of the device; `other_devices` those that the file has besides.
        in_use_bytes, reserved_bytes: after each entry of the record, the first before any of them; of one moment, the
            end, where there is no record. Exact up to 8 PiB.
        peak: index of the largest in-use bytes.
        at_peak: what is in use there by line, largest first; `at_end` when the snapshot was taken.
        out_of_memory: bytes asked for, and bytes that were free on the device (None: not said), of each failure.
    """

    name: str
    device: int
    other_devices: tuple[int, ...]
    in_use_bytes: NDArray[np.float64]
    reserved_bytes: NDArray[np.float64]
    peak: int
    at_peak: tuple[FrameBytes, ...]
    at_end: tuple[FrameBytes, ...]
    occupancy: Occupancy | None
    out_of_memory: tuple[tuple[int, int | None], ...]

    @property
    def recorded(self) -> bool:
        """Whether it has a record, so that the peak is known."""
        return len(self.in_use_bytes) > 1

    @property
    def peak_bytes(self) -> int:
        """Largest bytes in use at a time."""
        return int(self.in_use_bytes[self.peak])


def snapshot_of(path: str | Path) -> MemorySnapshot:
    """Read a snapshot: of its devices, the one with most memory.

    Raises:
        LabError: if it cannot be read, is too large, would run something, or holds no memory.
    """
    name = visible(Path(path).name)
    try:
        size_bytes = Path(path).stat().st_size
        if size_bytes > MOST_BYTES:
            raise phrase.refused("snapshot too large", name=name, size_bytes=size_bytes, most_bytes=MOST_BYTES)
        data = Path(path).read_bytes()
    except OSError as error:
        raise phrase.refused("snapshot cannot be read", name=name, reason=error.strerror or error) from None
    value = _value(data, name)
    # Older snapshots are the list of segments alone (`_read` in torch/cuda/_memory_viz.py).
    document = {"segments": value} if isinstance(value, list) else value
    if not isinstance(document, dict) or not document.keys() & {"segments", "device_traces"}:
        raise phrase.refused("no snapshot", name=name)
    segments = list(_dicts(document.get("segments")))
    traces = document.get("device_traces")
    traces = [list(_dicts(trace)) for trace in traces] if isinstance(traces, list | tuple) else []
    blocks = sum(len(one["blocks"]) for one in segments if isinstance(one.get("blocks"), list | tuple))
    if blocks + sum(map(len, traces)) > MOST_ENTRIES:
        raise phrase.refused("too many blocks", name=name, most=MOST_ENTRIES)
    used = {_natural(segment, "device") or 0 for segment in segments}
    used |= {number for number, trace in enumerate(traces) if trace}
    if not used:
        raise phrase.refused("no snapshot", name=name)
    frames = _Frames()
    devices = [
        _device(
            name,
            number,
            tuple(sorted(used - {number})),
            segments,
            traces[number] if number < len(traces) else [],
            frames,
        )
        for number in sorted(used)
    ]
    return max(devices, key=lambda snapshot: snapshot.peak_bytes)


def _value(data: bytes, name: str) -> Any:
    """Parse a pickle, a page with one in it, or JSON."""
    if page := _PAGE.search(data) if data.lstrip()[:1] == b"<" else None:
        try:
            return plain_value(base64.b64decode(page[1], validate=True), name)
        except binascii.Error:
            raise _broken(name) from None
    if _JSON.match(data[:512]):
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise _broken(name) from None
    return plain_value(data, name)


def _dicts(values: object) -> Iterator[dict[str, Any]]:
    if isinstance(values, list | tuple):
        yield from (value for value in values if isinstance(value, dict))


def _natural(values: Mapping[str, Any], *keys: str) -> int | None:
    """The first of these fields that is a natural number; None if none is."""
    for key in keys:
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63:
            return value
    return None


class _Frames:
    """Name the line of a program that allocated, once for each list of frames."""

    def __init__(self) -> None:
        self.labels: dict[int, str] = {}

    def label(self, frames: object) -> str:
        """The innermost frame that is not torch's: `folder/file.py:12 function`."""
        if id(frames) not in self.labels:
            # A list of the snapshot lives as long as it is read, so that its id stays its own.
            self.labels[id(frames)] = self._label(list(_dicts(frames)))
        return self.labels[id(frames)]

    @staticmethod
    def _label(frames: list[dict[str, Any]]) -> str:
        inside = ""
        for frame in frames:  # innermost first
            file, line, function = str(frame.get("filename", "")), _natural(frame, "line"), str(frame.get("name", ""))
            if _COMPILED.search(file):
                continue
            short = "/".join(file.replace("\\", "/").split("/")[-2:])
            label = visible(f"{short}:{line} {function}" if line else f"{short} {function}".strip())
            if not _INTERNAL.search(file):
                return label
            inside = inside or label
        if inside:
            return inside
        names = " ".join(str(frame.get("name", "")) for frame in frames[:200])
        return AUTOGRAD if "autograd" in names or "evaluate_function" in names else NO_FRAME


def _device(
    name: str,
    device: int,
    other_devices: tuple[int, ...],
    segments: Sequence[Mapping[str, Any]],
    trace: Sequence[Mapping[str, Any]],
    frames: _Frames,
) -> MemorySnapshot:
    """Follow the record of one device from its start to its end."""
    segments = [segment for segment in segments if (_natural(segment, "device") or 0) == device]
    at_end: dict[int, tuple[int, str]] = {}
    for segment in segments:
        for address, block in _addressed(segment):
            if block.get("state") == "active_allocated":
                size, stack = _requested(block)
                at_end[address] = (size, frames.label(stack))
    # Where only requests of releases were recorded (`skip_actions`), these end an allocation.
    completed = any(entry.get("action") == "free_completed" for entry in trace)
    release = "free_completed" if completed else "free_requested"
    entries = [
        (str(entry.get("action")), _natural(entry, "addr") or 0, _natural(entry, "size") or 0, entry.get("frames"))
        for entry in trace
    ]
    allocated: set[int] = set()
    start: dict[int, tuple[int, str]] = {}
    for action, address, size, _ in entries:
        if action == "alloc":
            allocated.add(address)
        elif action == release and address in allocated:
            allocated.discard(address)
        elif action == release:
            start[address] = (size, BEFORE)
    # In use at the end and not allocated in the record: its line is known.
    start |= {address: block for address, block in at_end.items() if address not in allocated}
    reserved = sum(_natural(segment, "total_size") or 0 for segment in segments)
    reserved -= sum(size * ((action in GROW) - (action in SHRINK)) for action, _, size, _ in entries)
    in_use_bytes = array("d", [sum(size for size, _ in start.values())])
    reserved_bytes = array("d", [max(0, reserved)])
    for in_use, mapped in _replayed(dict(start), entries, release, frames):
        in_use_bytes.append(in_use_bytes[-1] + in_use)
        reserved_bytes.append(max(0, reserved_bytes[-1] + mapped))
    peak = int(np.argmax(in_use_bytes))
    # Once more, up to the peak, to see what is in use there.
    in_use_blocks = dict(start)
    for _ in _replayed(in_use_blocks, entries[:peak], release, frames):
        pass
    return MemorySnapshot(
        name,
        device,
        other_devices,
        np.asarray(in_use_bytes),
        np.asarray(reserved_bytes),
        peak,
        _by_frame(in_use_blocks),
        _by_frame(at_end if segments else in_use_blocks),
        _occupancy(segments) if segments else None,
        tuple(
            (_natural(entry, "size") or 0, _natural(entry, "device_free"))
            for entry in trace
            if entry.get("action") == "oom"
        ),
    )


def _replayed(
    blocks: dict[int, tuple[int, str]], entries: Sequence[tuple[str, int, int, object]], release: str, frames: _Frames
) -> Iterator[tuple[int, int]]:
    """Yield by how many bytes each entry changes what is in use and what is reserved, and keep the blocks in use."""
    for action, address, size, stack in entries:
        if action == "alloc":
            # An address that is still in use: its release was not recorded.
            before, _ = blocks.get(address, (0, ""))
            blocks[address] = (size, frames.label(stack))
            yield size - before, 0
        elif action == release:
            before, _ = blocks.pop(address, (0, ""))
            yield -before, 0
        else:
            yield 0, size * ((action in GROW) - (action in SHRINK))


def _addressed(segment: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Blocks of a segment with their addresses, which older snapshots do not say."""
    address = _natural(segment, "address") or 0
    for block in _dicts(segment.get("blocks")):
        yield (_natural(block, "address", "addr") or address), block
        address += _natural(block, "size") or 0


def _requested(block: Mapping[str, Any]) -> tuple[int, object]:
    """Bytes that a tensor asked for, and the stack of its allocation; before torch 2.1 these stood in `history`."""
    history = next(_dicts(block.get("history")), {})
    size = _natural(block, "requested_size") or _natural(history, "real_size") or _natural(block, "size") or 0
    return size, block.get("frames") or history.get("frames")


def _occupancy(segments: Sequence[Mapping[str, Any]]) -> Occupancy:
    """Sum up segments by the states of their blocks."""
    sums: Counter[str] = Counter()
    largest, rounding_known = 0, True
    for segment in segments:
        blocks = list(_dicts(segment.get("blocks")))
        states: Counter[str] = Counter()
        for block in blocks:
            size, state = _natural(block, "size") or 0, str(block.get("state"))
            states[state] += size
            if state == "active_allocated":
                requested, _ = _requested(block)
                sums["requested"] += requested
                rounding_known &= "requested_size" in block or "history" in block
            elif state == "inactive":
                largest = max(largest, size)
        sums.update(states)
        sums["reserved"] += _natural(segment, "total_size") or sum(states.values())
        sums["whole"] += states["inactive"] if states.keys() <= {"inactive"} else 0
    # `active_pending_free` is the older name of `active_awaiting_free`.
    return Occupancy(
        len(segments),
        any(segment.get("is_expandable") is True for segment in segments),
        sums["reserved"],
        sums["active_allocated"],
        sums["requested"] if rounding_known else None,
        sums["active_awaiting_free"] + sums["active_pending_free"],
        sums["inactive"],
        largest,
        sums["whole"],
    )


def _by_frame(blocks: Mapping[int, tuple[int, str]]) -> tuple[FrameBytes, ...]:
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for size, frame in blocks.values():
        sums[frame][0] += size
        sums[frame][1] += 1
    rows = (FrameBytes(frame, size, count) for frame, (size, count) in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.frame)))


class FrameGrowth(NamedTuple):
    """Bytes and blocks of one line in two snapshots; 0 blocks: not in use there."""

    frame: str
    before_bytes: int
    after_bytes: int
    before_blocks: int
    after_blocks: int

    @property
    def difference_bytes(self) -> int:
        """Bytes that it has more in the second."""
        return self.after_bytes - self.before_bytes


def grown(before: MemorySnapshot, after: MemorySnapshot) -> tuple[FrameGrowth, ...]:
    """Lay what is in use at the peaks of two snapshots beside each other, by line, largest difference first.

    Where either has no record, what was in use when they were taken. A line that is in one of them only is matched by
    its file and function, as an edit above it moves it.
    """
    recorded = before.recorded and after.recorded
    sides = [side.at_peak if recorded else side.at_end for side in (before, after)]
    common = {row.frame for row in sides[0]} & {row.frame for row in sides[1]}
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for number, side in enumerate(sides):
        for row in side:
            frame = row.frame if row.frame in common else re.sub(r":\d+ ", " ", row.frame)
            sums[frame][number] += row.size_bytes
            sums[frame][2 + number] += row.blocks
    rows = (FrameGrowth(frame, *figures) for frame, figures in sums.items())
    return tuple(sorted(rows, key=lambda row: (-abs(row.difference_bytes), row.frame)))
