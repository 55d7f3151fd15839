"""A predicted step as a memory snapshot, which opens in torch's own viewer (pytorch.org/memory_viz).

Layer 3. Invariant: what the viewer shows is what the replay of the allocator did, each allocation under the name of the
block and phase that made it; no file is left half written.

Format: what `torch.cuda.memory._snapshot()` returns, `segments` as they are at the end and `device_traces` with every
action. The viewer reads pickles. Here one is written opcode by opcode, of dictionaries, lists, strings and numbers
alone, with opcodes that the viewer knows (torch, `utils/viz/MemoryViz.js`, `unpickle`); none is ever read.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from dlojz.predict.allocator import Event, Replay, replay
from dlojz.schema import LabError
from dlojz.text import say

Label = tuple[str, str]
"""Block (or module, or category) and phase that an event belongs to."""
SUFFIXES: Final = (".pickle", ".html")
_BATCH: Final = 1000
"""Items of a list that the viewer takes at once: it has them all on its stack."""


def snapshot(
    events: Iterable[Event],
    labels: Iterable[Label] | None = None,
    *,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
) -> dict[str, Any]:
    """The snapshot of a sequence of allocations and releases, in the format of `torch.cuda.memory._snapshot()`.

    Times are the numbers of the events, as a prediction has no clock.

    Args:
        events: storage and the bytes by which it grows or shrinks, in their order.
        labels: block and phase of each event, as many; they are what the viewer shows as stack of an allocation.
        limit_bytes, expandable_segments: as for `replay`. Where memory runs out, the trace ends with `oom`.

    Raises:
        LabError: if there are not as many labels as events, or if a storage shrinks by more than it holds.
    """
    events = list(events)
    named = [("", "")] * len(events) if labels is None else list(labels)
    if len(named) != len(events):
        raise LabError(
            say(
                en=f"each event needs one label, but {len(events)} events and {len(named)} labels were received.",
                fr=f"à chaque événement son étiquette, mais {len(events)} événements et {len(named)} étiquettes ont "
                "été reçus.",
            )
        )
    frames = {label: [{"filename": label[0], "line": 0, "name": label[1]}] for label in dict.fromkeys(named)}
    trace: list[dict[str, Any]] = []
    frames_at: dict[int, list[dict[str, Any]]] = {}

    def note(action: str, event: int, address: int, size_bytes: int) -> None:
        of_event = frames[named[event]]
        if action == "alloc":
            frames_at[address] = of_event
        # torch's trace knows two moments of a release: asked for, and done once no stream uses the block.
        for name in ("free_requested", "free_completed") if action == "free" else (action,):
            trace.append(_entry(name, event, address, size_bytes, of_event))

    done = replay(events, limit_bytes=limit_bytes, expandable_segments=expandable_segments, listener=note)
    failed = done.out_of_memory_event
    if failed is not None:
        free_bytes = (limit_bytes or 0) - done.reserved_bytes
        entry = _entry("oom", failed, 0, events[failed][1], frames[named[failed]])
        trace.append({**entry, "device_free": free_bytes})
    return {
        "segments": _segments(done, events if failed is None else events[:failed], frames_at),
        "device_traces": [trace],
        "allocator_settings": {"expandable_segments": expandable_segments},
        "external_annotations": [],
    }


def _entry(action: str, event: int, address: int, size_bytes: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size_bytes,
        "stream": 0,
        "time_us": event,
        "frames": frames,
    }


def _segments(
    done: Replay, events: Sequence[Event], frames_at: dict[int, list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    requested: dict[int, int] = {}
    for storage, delta_bytes in events:
        requested[storage] = requested.get(storage, 0) + delta_bytes
    found = []
    for segment in done.segments_after(len(done.events) - 1):
        blocks: list[dict[str, Any]] = []
        address = segment.address
        for size_bytes, user in segment.blocks:
            block: dict[str, Any] = {"address": address, "size": size_bytes, "requested_size": 0, "frames": []}
            block["state"] = "inactive" if user is None else "active_allocated"
            if user is not None:
                block |= {"requested_size": requested[user], "frames": frames_at[address]}
            blocks.append(block)
            address += size_bytes
        in_use_bytes = segment.size_bytes - segment.free_bytes
        found.append(
            {
                "device": 0,
                "address": segment.address,
                "total_size": segment.size_bytes,
                "allocated_size": in_use_bytes,
                "active_size": in_use_bytes,
                "requested_size": sum(block["requested_size"] for block in blocks),
                "stream": 0,
                "segment_type": "small" if segment.is_small else "large",
                "is_expandable": done.expandable_segments,
                "frames": [],
                "blocks": blocks,
            }
        )
    return found


def write_snapshot(
    path: str | os.PathLike[str],
    events: Iterable[Event],
    labels: Iterable[Label] | None = None,
    *,
    limit_bytes: int | None = None,
    expandable_segments: bool = False,
) -> Path:
    """Write the snapshot: `.pickle` for pytorch.org/memory_viz, `.html` as a page of its own.

    The page is what `torch.cuda._memory_viz.trace_plot` makes of it; it fetches the viewer from the network. A file
    that exists is replaced, at once and whole.

    Returns:
        The path.

    Raises:
        LabError: if the suffix is another one, if the file cannot be written, or as `snapshot`.
    """
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise LabError(
            say(
                en=f"a snapshot is written to a file named .pickle or .html, but {str(target)!r} was received.",
                fr=f"un instantané s’écrit dans un fichier .pickle ou .html, mais {str(target)!r} a été reçu.",
            )
        )
    taken = snapshot(events, labels, limit_bytes=limit_bytes, expandable_segments=expandable_segments)
    if target.suffix == ".html":
        from torch.cuda._memory_viz import trace_plot

        content: bytes = trace_plot(taken).encode()
    else:
        content = pickled(taken)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        reason = error.strerror or str(error)
        raise LabError(
            say(
                en=f"the snapshot cannot be written to {str(target)!r} ({reason}): choose a folder that exists and "
                "that you may write to.",
                fr=f"impossible d’écrire l’instantané dans {str(target)!r} ({reason}) : choisissez un dossier qui "
                "existe et où vous pouvez écrire.",
            )
        ) from None
    return target


def pickled(value: Any) -> bytes:
    """Plain data (dictionaries, lists, strings, integers, floats, booleans, None) as a pickle, protocol 2.

    Strings, lists and dictionaries that occur again are written once and referred to.

    Raises:
        TypeError: for data of another type.
    """
    writer = _Pickler()
    writer.put(value)
    return b"\x80\x02" + b"".join(writer.pieces) + b"."


class _Pickler:
    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.known: dict[str | int, int] = {}

    def put(self, value: Any) -> None:
        key = value if isinstance(value, str) else id(value)
        if isinstance(value, str | list | dict) and key in self.known:
            number = self.known[key]
            self.pieces.append(struct.pack("<cB", b"h", number) if number < 256 else struct.pack("<cI", b"j", number))
        elif isinstance(value, bool) or value is None:
            self.pieces.append({True: b"\x88", False: b"\x89", None: b"N"}[value])
        elif isinstance(value, int):
            self._integer(value)
        elif isinstance(value, float):
            self.pieces.append(struct.pack(">cd", b"G", value))
        elif isinstance(value, str):
            text = value.encode()
            self.pieces.append(struct.pack("<cI", b"X", len(text)) + text)
            self._remember(key)
        elif isinstance(value, list):
            self.pieces.append(b"]")
            self._remember(key)
            for start in range(0, len(value), _BATCH):
                self.pieces.append(b"(")
                for item in value[start : start + _BATCH]:
                    self.put(item)
                self.pieces.append(b"e")
        elif isinstance(value, dict):
            self.pieces.append(b"}")
            self._remember(key)
            self.pieces.append(b"(")
            for name, item in value.items():
                self.put(name)
                self.put(item)
            self.pieces.append(b"u")
        else:
            raise TypeError(f"a snapshot holds plain data, but {type(value).__name__} was received")

    def _integer(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self.pieces.append(struct.pack("<ci", b"J", value))
        else:
            size = value.bit_length() // 8 + 1
            self.pieces.append(struct.pack("<cB", b"\x8a", size) + value.to_bytes(size, "little", signed=True))

    def _remember(self, key: str | int) -> None:
        number = len(self.known)
        self.known[key] = number
        self.pieces.append(struct.pack("<cB", b"q", number) if number < 256 else struct.pack("<cI", b"r", number))


__all__ = ["SUFFIXES", "Label", "pickled", "snapshot", "write_snapshot"]
