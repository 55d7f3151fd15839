"""What a pickle would import and call, read without running it.

Layer 6 (labs). Invariant: the instructions are read one by one with `pickletools`, as text is, and none is followed;
only `refused_by_weights_only` gives a file to torch, which then follows those of its own list and no other.

A pickle is a program for a small machine with a stack: it names functions (`GLOBAL`, `STACK_GLOBAL`), which whoever
loads it imports, and calls them (`REDUCE`, `NEWOBJ`). What is read here serves a lesson: it tells what an honest file
names, and is no scanner that would clear a hostile one.

Source: CPython, `Lib/pickletools.py` (the instructions), and "pickle — Python object serialization", the warning at its
head; the files of `torch.save` are zip archives whose entry `data.pkl` is a pickle (torch 2.13, `serialization.py`).
"""

from __future__ import annotations

import pickletools
import re
import struct
import warnings
from collections.abc import Iterator
from pathlib import Path

from dlojz.schema import LabError
from dlojz.text import say

_ENTRY = b"PK\x03\x04"
_ENTRY_HEADER = struct.Struct("<4s5H3I2H")  # .ZIP application note (APPNOTE.TXT), 4.3.7: local file header
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ", "BUILD"})
_NUMBERS = frozenset({"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4"})
_FETCHES = frozenset({"BINGET", "LONG_BINGET", "GET"})
_KEEPS = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})


def entries(content: bytes) -> list[int]:
    """Where the entries of the zip archives begin that a file strings up; none where it is no archive."""
    found = [content.find(_ENTRY)] if content.startswith(_ENTRY) else []
    while found and found[-1] >= 0:
        found.append(content.find(_ENTRY, found[-1] + len(_ENTRY)))
    return [place for place in found if 0 <= place <= len(content) - _ENTRY_HEADER.size]


def starts(content: bytes) -> list[int]:
    """Where the pickles of a file begin: at its start, or at each entry `data.pkl` of its archives."""
    if not (places := entries(content)):
        return [0]
    found: list[int] = []
    for place in places:
        *_, name_bytes, extra_bytes = _ENTRY_HEADER.unpack_from(content, place)
        name = place + _ENTRY_HEADER.size
        if content[name : name + name_bytes].endswith(b"/data.pkl"):
            found.append(name + name_bytes + extra_bytes)
    return found


def instructions(content: bytes, start: int = 0) -> Iterator[tuple[str, object]]:
    """The instructions of one pickle, as name and operand, up to its STOP.

    Raises:
        LabError: if it is no pickle.
    """
    try:
        for code, operand, _ in pickletools.genops(content[start:]):
            yield code.name, operand
    except (ValueError, IndexError, UnicodeDecodeError, struct.error) as error:
        raise LabError(f"what stands at byte {start} is no pickle: {error}.") from None


def imported(content: bytes) -> list[str]:
    """What loading the pickles of a file would import, as `module.name`, in alphabetical order.

    Args:
        content: of a file: a pickle, or archives as `torch.save` writes them, one or several in a row.

    Raises:
        LabError: if there is something else where a pickle should be.
    """
    return sorted({name for start in starts(content) for name in _globals(content, start)})


def calls(content: bytes) -> int:
    """How many calls the pickles of a file would make while they are loaded.

    Raises:
        LabError: as `imported`.
    """
    return sum(name in _CALLS for start in starts(content) for name, _ in instructions(content, start))


def numbers_after(content: bytes, key: str) -> list[int]:
    """The whole numbers that follow a text in the pickles of a file, up to the next text.

    Raises:
        LabError: as `imported`.
    """
    found: list[int] = []
    for start in starts(content):
        listening = False
        for name, operand in instructions(content, start):
            if isinstance(operand, str):
                listening = operand == key
            elif listening and name in _NUMBERS and isinstance(operand, int):
                found.append(operand)
    return found


def refused_by_weights_only(path: Path) -> str:
    """What `torch.load(…, weights_only=True)` says of a file of one's own: what it refuses, or that it reads it.

    Empty for a file that strings up archives: it is read in pieces.
    """
    import torch

    if path.suffix == ".distcp":
        return ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its own kind is pickle's, and any file may break a reader in any way
        told = re.search(r"Unsupported (?:global: GLOBAL [\w.]+|operand \d+|class [\w.]+)", str(error))
        return f"weights_only: {told[0] if told else type(error).__name__}"
    return say(en="weights_only: read", fr="weights_only : lu")


def read(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        LabError: if it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise LabError(f"{path.name} cannot be read: {error.strerror}.") from None


def _globals(content: bytes, start: int) -> Iterator[str]:
    """The names that one pickle imports; where they come from the stack, from the two texts last put there."""
    kept: dict[int, str] = {}
    texts: list[str] = []
    last = ""
    for name, operand in instructions(content, start):
        if name == "GLOBAL":
            yield str(operand).replace(" ", ".")
            last = ""
        elif name == "STACK_GLOBAL":
            yield ".".join(texts[-2:]) if len(texts) > 1 else "?"
            last = ""
        elif name == "MEMOIZE":
            kept[len(kept)] = last
        elif name in _KEEPS and isinstance(operand, int):
            kept[operand] = last
        else:
            last = kept.get(operand, "") if name in _FETCHES and isinstance(operand, int) else ""
            last = operand if isinstance(operand, str) else last
            if last:
                texts.append(last)
