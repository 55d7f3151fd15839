"""Store of traces on disk: gzipped JSON files in `$XDG_CACHE_HOME/dlojz/traces` (by default `~/.cache/dlojz/traces`).

A stored trace is read only if it was written by the same versions of this package's tracing code and of torch, under
the same key; anything else is traced anew. The store can be deleted at any time. Nothing is pickled. A damaged file, a
folder that cannot be written, or a file of another user is reported once per process.
A file that was not read for `UNREAD_DAYS` days, be it of this version or of another, is deleted at the next write.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, TypeVar

from dlojz.base.files import cache_folder
from dlojz.base.language import Sentences
from dlojz.prediction.trace import Allocation, MemoryTrace, TraceMark

phrase = Sentences(Path(__file__).parent / "data" / "refusals.md")

FORMAT: Final = 2
"""Version of the file's layout."""
PHASES: Final = ("data", "forward", "backward", "weights")
MAX_BYTES: Final = 64 * 2**20
"""Limit of a file: the largest model of the catalogue takes less than one MB."""
UNREAD_DAYS: Final = 30
SOURCES: Final = (
    "models",
    "by_hand/tensor",
    "by_hand/activation_offload.py",
    "by_hand/chunked_loss.py",
    "by_hand/context_parallel.py",
    "by_hand/ring_attention.py",
    "cost_model/launched_operators.py",
    "prediction",
    "train/engines/base.py",
)
"""Parts of the package that decide the contents of a trace."""
Parsed = TypeVar("Parsed")
_reported: set[str] = set()


def folder() -> Path | None:
    """Return the store's folder, made on first use; None where this user has none that can be written."""
    store = cache_folder("traces")
    if store is None:
        _report(phrase("no cache folder"))
    return store


@lru_cache(maxsize=1)
def code_version() -> str:
    """Hash the tracing code of this package and the versions of torch and of the file format."""
    digest = hashlib.sha256(str(FORMAT).encode())
    for name in ("torch", "torchvision", "timm", "transformers"):
        try:
            digest.update(f"{name} {version(name)}".encode())
        except PackageNotFoundError:
            digest.update(f"{name} none".encode())
    root = Path(__file__).resolve().parents[1]
    for source in SOURCES:  # an edit of one of them makes all stored traces void
        path = root / source
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(str(file.relative_to(root)).encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def kept(key: Hashable, make: Callable[[], MemoryTrace]) -> MemoryTrace:
    """Read a trace from the store, or make it and write it there; the key's `repr` names all that it depends on."""
    trace = read(key, from_data)
    if trace is None:
        trace = make()
        write(key, to_data(trace))
    return trace


def is_kept(key: Hashable) -> bool:
    """Tell whether the store holds a file for a key, of this version."""
    path = path_of(key)
    return path is not None and path.is_file()


def path_of(key: Hashable) -> Path | None:
    """Return the file of a key; None where there is no folder for it."""
    within = folder()
    name = hashlib.sha256(f"{code_version()} {key!r}".encode()).hexdigest()[:24]
    return None if within is None else within / f"{name}.json.gz"


def to_data(trace: MemoryTrace) -> dict[str, Any]:
    """Convert a trace to plain JSON data: events as lists of numbers, module names once each."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    events: list[list[Any]] = []
    for event in trace.events:
        if isinstance(event, TraceMark):
            events.append([event.what, number(event.name), event.storage])
        else:
            events.append([event.storage, event.delta_bytes, PHASES.index(event.phase), number(event.module)])
    return {
        "events": events,
        "kept": sorted(trace.kept),
        "on_host": sorted(trace.on_host),
        "products": sorted(trace.products),
        "bytes_of": list(trace.bytes_of.items()),
        "module_of": [[storage, number(name)] for storage, name in trace.module_of.items()],
        "output_of": [[number(name), storage] for name, storage in trace.output_of.items()],
        "gradient_of": [[number(name), storage] for name, storage in trace.gradient_of.items()],
        "names": list(names),
        "flops_of": trace.flops_of,
    }


def from_data(data: dict[str, Any]) -> MemoryTrace:
    """Convert the data of `to_data` to a trace.

    Raises:
        KeyError, IndexError, TypeError, ValueError: if the data are damaged.
    """
    names: list[str] = data["names"]
    events: list[Allocation | TraceMark] = []
    for event in data["events"]:
        if len(event) == 3:
            events.append(TraceMark(event[0], names[event[1]], int(event[2])))
        else:
            events.append(Allocation(int(event[0]), int(event[1]), PHASES[event[2]], names[event[3]]))
    return MemoryTrace(
        tuple(events),
        frozenset(data["kept"]),
        frozenset(data["on_host"]),
        {int(storage): int(size) for storage, size in data["bytes_of"]},
        {int(storage): names[name] for storage, name in data["module_of"]},
        {names[name]: int(storage) for name, storage in data["output_of"]},
        {str(block): int(flops) for block, flops in data["flops_of"].items()},
        {names[name]: int(storage) for name, storage in data["gradient_of"]},
        frozenset(data["products"]),
    )


def read(key: Hashable, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed | None:
    """Read the data under a key; None where there is none, or it is damaged.

    Args:
        key: what it depends on besides the code.
        parse: converts the data; a `ValueError`, `KeyError`, … means damage.
    """
    path = path_of(key)
    if path is None:
        return None
    try:
        status = path.stat()
        # Another user's file is not trusted; nor is one so large that no trace has written it.
        if status.st_uid != os.getuid() or status.st_size > MAX_BYTES:
            raise ValueError(path.name)
        with gzip.open(path, "rt", encoding="utf-8") as file:
            data = json.load(file)
        # The name is a hash cut to 24 digits: the whole key is compared.
        if data["format"] != FORMAT or data["code"] != code_version() or data["key"] != repr(key):
            raise ValueError(path.name)
        contents = parse(data["data"])
        with suppress(OSError):
            os.utime(path)  # the time of the last reading, by which `_prune` goes
        return contents
    except FileNotFoundError:
        return None
    except (OSError, EOFError, zlib.error, ValueError, KeyError, IndexError, TypeError, AttributeError):
        _report(phrase("damaged trace", path=path))
        return None


def write(key: Hashable, data: dict[str, Any]) -> None:
    """Write plain data atomically: under another name, then renamed."""
    path = path_of(key)
    if path is None:
        return
    record = {"format": FORMAT, "code": code_version(), "key": repr(key), "data": data}
    temporary = None
    try:
        # In the same folder: a rename is atomic within one file system only.
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as raw, gzip.open(raw, "wt", compresslevel=1, encoding="utf-8") as file:
            file.write(json.dumps(record, separators=(",", ":")))  # `json.dump` encodes in Python, ten times slower
        os.replace(temporary, path)
        _prune(path.parent)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        _report(phrase("trace not kept", path=path, error=error))


def _prune(within: Path) -> None:
    """Delete the files, unfinished ones included, that were not read for `UNREAD_DAYS` days."""
    oldest_s = time.time() - UNREAD_DAYS * 86_400
    for path in within.glob("*.json.gz*"):
        with suppress(OSError):  # another process may have deleted it
            if path.stat().st_mtime < oldest_s:
                path.unlink()


def _report(sentence: str) -> None:
    """Say it on standard error, once per process."""
    if sentence not in _reported:
        _reported.add(sentence)
        print(f"dlojz: {sentence}", file=sys.stderr)
