"""Read torch.profiler's Chrome traces, one file per rank, plain or gzip, in little memory.

A file is parsed as it is read, event by event: what is kept is what `rank_activities` keeps, never the whole text. A
file that unpacks to far more than a profiler writes is refused before it fills the memory.

Source: "Trace Event Format" (Chromium project); `libkineto/src/output_json.cpp` for `distributedInfo` and
`baseTimeNanoseconds`.
"""

from __future__ import annotations

import codecs
import json
import re
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences
from dlojz.base.table import visible

phrase = Sentences(Path(__file__).parent / "data" / "traces.md", visible=visible)

CHUNK_BYTES = 1 << 20
MOST_TEXT_BYTES = 8 << 30
"""Text of one trace; profilers write some hundred bytes per event, and a few million events at most."""
MOST_VALUE_CHARACTERS = 16 << 20
"""One event, or one value beside the events."""
MOST_RATIO, FREE_BYTES = 200, 64 << 20
"""A profiler's text shrinks 10 to 40 times; beyond the first 64 MiB, more than 200 times is an archive bomb."""
MOST_FILES = 4096
MOST_RANKS = 1 << 20
RANK_IN_NAME = re.compile(r"rank[-_. ]?(\d{1,6})", re.IGNORECASE)
NUMBER_IN_NAME = re.compile(r"(?<!\d)(\d{1,5})(?!\d)")
ENDINGS = (".json", ".json.gz")
_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


class TraceFile:
    """Trace of one rank; `head` fills while its events are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.head: dict[str, Any] = {}
        self.count = 0

    @property
    def name(self) -> str:
        """Its file name, safe to show."""
        return visible(self.path.name)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events in the order of the file.

        Raises:
            LabError: if the file cannot be read, is cut off, is no Chrome trace, or unpacks to too much.
        """
        self.head, self.count = {}, 0
        try:
            with self.path.open("rb") as file:
                yield from self._parsed(_Text(self, file))
        except OSError as error:
            raise phrase.refused("trace cannot be read", name=self.name, reason=error.strerror or error) from None

    def _parsed(self, text: _Text) -> Iterator[dict[str, Any]]:
        opening = text.next_mark("{[")
        if opening == "[":  # the format allows the bare list too
            yield from self._list(text)
            return
        has_events = False
        while text.sign() != "}":
            key = text.value()
            text.next_mark(":")
            if key == "traceEvents":
                has_events = True
                text.next_mark("[")
                yield from self._list(text)
            else:
                self.head[str(key)] = text.value()
            if text.sign() != "}":
                text.next_mark(",")
        if not has_events:
            raise self.no_trace()

    def _list(self, text: _Text) -> Iterator[dict[str, Any]]:
        while text.sign() != "]":
            event = text.value()
            self.count += 1
            if isinstance(event, dict):
                yield event
            if text.sign() != "]":  # a comma may stand behind the last event too: Kineto has written one
                text.next_mark(",")
        text.next_mark("]")

    def cut_off(self) -> LabError:
        """The refusal of a file that ends too early."""
        return phrase.refused("cut off", name=self.name, count=self.count)

    def no_trace(self) -> LabError:
        """The refusal of a file that is something else."""
        return phrase.refused("no Chrome trace", name=self.name)

    def too_much(self, read_bytes: int) -> LabError:
        """The refusal of a file that unpacks without end."""
        return phrase.refused("unpacks to too much", name=self.name, read_bytes=read_bytes)


class _Text:
    """The characters of a trace, from a position on; more are read as they are needed."""

    def __init__(self, trace: TraceFile, file: IO[bytes]) -> None:
        self.trace, self.file = trace, file
        self.packed_bytes = trace.path.stat().st_size
        magic = file.read(4)
        file.seek(0)
        # wbits=31: with gzip's header and checksum.
        self.unpack = zlib.decompressobj(wbits=31) if magic[:2] == b"\x1f\x8b" else None
        if magic[:4] == b"PK\x03\x04":
            raise phrase.refused("zip archive", trace=trace)
        self.bytes = iter(self._unpacked())
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.buffer, self.at, self.read_bytes, self.ended = "", 0, 0, False

    def _unpacked(self) -> Iterator[bytes]:
        """Yield the text in chunks of at most 1 MiB, however much a packed chunk holds."""
        while packed := self.file.read(CHUNK_BYTES):
            if self.unpack is None:
                yield packed
                continue
            while packed:
                try:
                    # At most 1 MiB comes out; the packed bytes that were not needed for it are in `unconsumed_tail`.
                    yield self.unpack.decompress(packed, CHUNK_BYTES)
                except zlib.error:
                    raise self.trace.cut_off() from None
                packed = self.unpack.unconsumed_tail
                if self.unpack.eof and self.unpack.unused_data:  # a file of several gzip members
                    packed = self.unpack.unused_data
                    self.unpack = zlib.decompressobj(wbits=31)
        # The file has ended, gzip's stream has not.
        if self.unpack is not None and not self.unpack.eof:
            raise self.trace.cut_off()

    def more(self) -> bool:
        """Read a further chunk, and drop what was parsed; False at the end of the file."""
        if self.ended:
            return False
        chunk = next(self.bytes, None)
        if chunk is None:
            self.ended = True
            return False
        self.read_bytes += len(chunk)
        max_bytes = max(FREE_BYTES, MOST_RATIO * self.packed_bytes) if self.unpack is not None else MOST_TEXT_BYTES
        if self.read_bytes > min(max_bytes, MOST_TEXT_BYTES):
            raise self.trace.too_much(self.read_bytes)
        # A character that the end of the chunk cuts in two waits in the decoder.
        self.buffer = self.buffer[self.at :] + self.characters.decode(chunk)
        self.at = 0
        return True

    def sign(self) -> str:
        """Step over blanks and return the sign that follows, which stays."""
        while True:
            blank = _SPACE.match(self.buffer, self.at)
            self.at = blank.end() if blank else self.at
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                # If nothing at all was parsed, it was no trace in the first place.
                raise self.trace.cut_off() if self.trace.count or self.trace.head else self.trace.no_trace()

    def next_mark(self, marks: str) -> str:
        """Step over the sign that follows and return it; it must be one of `marks`."""
        mark = self.sign()
        if mark not in marks:
            raise self.trace.no_trace()
        self.at += 1
        return mark

    def value(self) -> Any:
        """Parse the value at the position."""
        target_length = 0
        while True:
            blank = _SPACE.match(self.buffer, self.at)
            self.at = blank.end() if blank else self.at
            try:
                value, end = _DECODER.raw_decode(self.buffer, self.at)
            except (json.JSONDecodeError, RecursionError) as error:
                # Cut by the end of the chunk, or no JSON: more text decides.
                if isinstance(error, RecursionError) or len(self.buffer) - self.at > MOST_VALUE_CHARACTERS:
                    raise self.trace.no_trace() from None
                # A long value is parsed again only when twice as much of it is there.
                target_length = max(2 * (len(self.buffer) - self.at), CHUNK_BYTES)
                grown = False
                while len(self.buffer) - self.at < target_length and self.more():
                    grown = True
                if not grown:
                    # An error before the end of the text is none that more text would have mended.
                    stands_alone = error.pos < len(self.buffer.rstrip()) and self.trace.count == 0
                    raise self.trace.no_trace() if stands_alone else self.trace.cut_off() from None
                continue
            if end == len(self.buffer) and self.more():  # a number may go on
                continue
            self.at = end
            return value


def rank_of(trace: TraceFile, *, by_any_number: bool = True) -> int | None:
    """Return the rank of a trace that has been read: by its `distributedInfo`, else by its file name.

    Args:
        by_any_number: whether a number in the name will do without the word rank; `resnet50.json` has one, too.
    """
    info = trace.head.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    if isinstance(rank, int) and not isinstance(rank, bool) and 0 <= rank < MOST_RANKS:
        return rank
    numbers = RANK_IN_NAME.findall(trace.path.name)
    if not numbers and by_any_number:
        numbers = NUMBER_IN_NAME.findall(trace.path.name)
    return int(numbers[0]) if numbers else None


def trace_files(paths: Sequence[str | Path]) -> list[TraceFile]:
    """List the traces that files and folders name; in a folder, those that end in .json or .json.gz.

    Raises:
        LabError: if one is missing, a folder has none, or there are too many.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = sorted(entry for entry in path.iterdir() if entry.name.endswith(ENDINGS) and entry.is_file())
            if not inside:
                raise phrase.refused("folder without traces", path=path)
            files += inside
        elif path.is_file():
            files.append(path)
        elif path.exists():  # a pipe may never end
            raise phrase.refused("no regular file", path=path)
        else:
            raise phrase.refused("no such file", path=path)
    if len(files) > MOST_FILES:
        raise phrase.refused("too many traces", traces=len(files), most=MOST_FILES)
    return [TraceFile(path) for path in files]
