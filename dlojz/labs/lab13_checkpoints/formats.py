"""Reading with another number of ranks, an exercise of lab 13, and the pickles in the files of checkpoints.

Pickles are read instruction by instruction with `pickletools` and never run; only `refused_by_weights_only` gives a
file to torch. A pickle is a program for a machine with a stack: it names functions (`GLOBAL`, `STACK_GLOBAL`), which
loading imports, and calls them (`REDUCE`, `NEWOBJ`). What is read shows what an honest file names; it is no scanner
that would clear a hostile one.

Source: torch 2.13, `serialization.py` (zip archives whose entry `data.pkl` is a pickle),
`distributed/checkpoint/filesystem.py` (`__RANK_N.distcp`); CPython, `Lib/pickletools.py`.
"""

import pickletools
import re
import struct
import warnings
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch

from dlojz.base.errors import LabError
from dlojz.base.language import integer, say
from dlojz.base.table import Lines, Table, titles
from dlojz.labs.kit.exercise import Said
from dlojz.labs.kit.exercise_texts import Texts
from dlojz.labs.kit.judges import reader

TEXTS = Texts(__file__)

Pieces = list[tuple[int, int, int]]
CASES = ((12, 2, 3), (12, 3, 2), (10, 4, 3), (10, 3, 4), (7, 2, 2), (9, 1, 2), (9, 4, 1), (23, 5, 4), (5, 2, 4))
"""Elements, ranks that have written, ranks that read; each of these is asked for, also one with nothing to read."""


def shares_to_read(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """Pieces of the old shares that make up a rank's new share, in order.

    N ranks cut a flat vector in shares of ceil(elements / N), of which the last ones are shorter, or empty.

    Args:
        elements: of the vector.
        old_ranks: that have each written their share.
        new_ranks: among which it is cut anew.
        rank: 0 to new_ranks − 1.

    Returns:
        Old rank, first and last place (excluded) within that rank's share; nothing empty.

    Source: what DCP computes for each dimension of a tensor: torch 2.13,
    `distributed/checkpoint/resharding.py`, `_shards_get_overlap_region_wrt_saved_tensor`.
    """
    # Shares of ceil(elements / N) places; the vector's end cuts the last ones.
    old, new = -(-elements // old_ranks), -(-elements // new_ranks)
    return _overlaps(elements, old, old_ranks, rank * new, min((rank + 1) * new, elements))


def _overlaps(elements: int, old: int, old_ranks: int, new_start: int, new_stop: int) -> Pieces:
    pieces: Pieces = []
    for old_rank in range(old_ranks):
        # In the vector; the file of an old rank counts from the beginning of its share.
        start, stop = max(new_start, old_rank * old), min(new_stop, (old_rank + 1) * old, elements)
        if start < stop:
            pieces.append((old_rank, start - old_rank * old, stop - old_rank * old))
    return pieces


def _with_empty(elements: int, old_ranks: int, new_ranks: int, rank: int) -> Pieces:
    """A piece of every old rank, of no length where the two do not meet."""
    piece_by_rank = {piece[0]: piece for piece in shares_to_read(elements, old_ranks, new_ranks, rank)}
    return [piece_by_rank.get(old_rank, (old_rank, 0, 0)) for old_rank in range(old_ranks)]


def _pieces(value: Any) -> Pieces:
    pieces = [(old_rank, start, stop) for old_rank, start, stop in value]
    if not all(type(number) is int for piece in pieces for number in piece):
        raise TypeError
    return pieces


def _differs(case: Any, answer: Pieces, right: Pieces) -> Said:
    if sorted(answer) == right:
        return TEXTS.sentence("shares-to-read", "another order of the pieces")
    return TEXTS.sentence("shares-to-read", "other pieces", case=case, right=right, answer=answer)


SHARES_TO_READ = TEXTS.exercise(
    "shares-to-read",
    shares_to_read,
    cases=[(*case, rank) for case in CASES for rank in range(case[2])],
    source=(shares_to_read, _overlaps),
    mistakes={
        # A piece of every old rank: of no length where the two do not meet, or one that ends before it begins.
        "ranks of which there is nothing to read": (
            _with_empty,
            "if start < stop → if True; rank * new, min( → min(rank * new, elements), min(",
        ),
        "you exchange the two cuts": lambda elements, old_ranks, new_ranks, rank: shares_to_read(
            elements, new_ranks, old_ranks, rank
        ),
    },
    differs=_differs,
    read=reader(_pieces, TEXTS.sentence("shares-to-read", "triples")),
)


_ENTRY = b"PK\x03\x04"
_ENTRY_HEADER = struct.Struct("<4s5H3I2H")  # .ZIP application note (APPNOTE.TXT), 4.3.7: local file header
_CALLS = frozenset({"REDUCE", "NEWOBJ", "NEWOBJ_EX", "INST", "OBJ", "BUILD"})
_FETCHES = frozenset({"BINGET", "LONG_BINGET", "GET"})
_KEEPS = frozenset({"BINPUT", "LONG_BINPUT", "PUT"})


def entries(content: bytes) -> list[int]:
    """Where the entries of the zip archives begin that a file strings up; none where it is no archive."""
    offsets = [content.find(_ENTRY)] if content.startswith(_ENTRY) else []
    # find gives -1 after the last one, which goes below, as does a mark without room for a header.
    while offsets and offsets[-1] >= 0:
        offsets.append(content.find(_ENTRY, offsets[-1] + len(_ENTRY)))
    return [offset for offset in offsets if 0 <= offset <= len(content) - _ENTRY_HEADER.size]


def starts(content: bytes) -> list[int]:
    """Where the pickles of a file begin: at its start, or at each entry `data.pkl` of its archives."""
    if not (entry_offsets := entries(content)):
        return [0]
    pickle_offsets: list[int] = []
    for entry_offset in entry_offsets:
        *_, name_bytes, extra_bytes = _ENTRY_HEADER.unpack_from(content, entry_offset)
        name = entry_offset + _ENTRY_HEADER.size
        if content[name : name + name_bytes].endswith(b"/data.pkl"):
            # Name and extra field stand between header and contents.
            pickle_offsets.append(name + name_bytes + extra_bytes)
    return pickle_offsets


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


def refused_by_weights_only(path: Path) -> str:
    """What `torch.load(…, weights_only=True)` says of a file of one's own: what it refuses, or that it reads it.

    A file that strings up archives is read by DCP in pieces, as the places say that `.metadata` lists.
    """
    if path.suffix == ".distcp":
        return say(en="(read in pieces)", fr="(lu par morceaux)")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # its own kind is pickle's, and any file may break a reader in any way
        refusal = re.search(r"Unsupported (?:global: GLOBAL [\w.]+|operand \d+|class [\w.]+)", str(error))
        reason = refusal[0] if refusal else type(error).__name__
        return say(en=f"refused: “{reason}”", fr=f"refusé : « {reason} »")
    return say(en="read", fr="lu")


def _globals(content: bytes, start: int) -> Iterator[str]:
    """The names that one pickle imports; where they come from the stack, from the two texts last put there."""
    memo: dict[int, str] = {}
    texts: list[str] = []
    latest_text = ""
    for name, operand in instructions(content, start):
        if name == "GLOBAL":
            yield str(operand).replace(" ", ".")
            latest_text = ""
        elif name == "STACK_GLOBAL":
            yield ".".join(texts[-2:]) if len(texts) > 1 else "?"
            latest_text = ""
        elif name == "MEMOIZE":
            # MEMOIZE has no operand: it takes the next free number of the memo.
            memo[len(memo)] = latest_text
        elif name in _KEEPS and isinstance(operand, int):
            memo[operand] = latest_text
        else:
            # A fetch puts a text of the memo on the stack again; names that recur are written only once.
            latest_text = memo.get(operand, "") if name in _FETCHES and isinstance(operand, int) else ""
            latest_text = operand if isinstance(operand, str) else latest_text
            if latest_text:
                texts.append(latest_text)


WIDTH = 80
PICKLED = (".pt", ".distcp", ".metadata")


def pickle_table(folders: Mapping[str, Path]) -> Table:
    """Tabulate the pickles of some checkpoints: how many calls loading them would make, and what it would import.

    Args:
        folders: by the name of the format; of one's own, and nothing in them is loaded but under `weights_only`.
    """
    rows: list[tuple[str, ...]] = []
    for kind, folder in folders.items():
        contents = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.name.endswith(PICKLED)}
        rows.append((kind if contents else kind + say(en=": no pickle", fr=" : aucun pickle"),))
        rows += [
            (f"    {path.name}", integer(calls(content)), refused_by_weights_only(path))
            for path, content in contents.items()
        ]
        names = {name for content in contents.values() for name in imported(content)}
        rows += [(line, "", "") for line in _by_module(names)]
    return Table(titles(en="file; calls; weights_only", fr="fichier; appels; weights_only"), tuple(rows), align="lrl")


def _by_module(names: set[str]) -> list[Lines]:
    """Names as the lines of Python that would import them, those of one module side by side."""
    split = sorted(name.rpartition(".")[::2] for name in names)
    lines = []
    for module, module_names in groupby(split, key=lambda pair: pair[0]):
        statement = f"from {module} import {', '.join(name for _, name in module_names)}"
        lines.append(Lines("\n".join(wrap(statement, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8))))
    return lines
