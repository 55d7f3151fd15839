"""Names of models from elsewhere, and when an own file may be executed; loads no torch.

`timm:NAME`, `torchvision:NAME` and `FILE.py:FUNCTION` are looked up, and an own file is executed, when a model is built
or something about it has to be found out. Where a record is read that somebody else may have written
(`executing_no_file`), a complete configuration is believed, and only a file that this user has executed before, with
the contents that it has now, is executed: its hash is in `$XDG_CACHE_HOME/dlojz/own_files`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, Self

from dlojz.base.files import cache_folder
from dlojz.base.language import refusal
from dlojz.models.catalogue import spec
from dlojz.models.foreign.names import is_elsewhere
from dlojz.models.sizes import Size

CHAIN = "chain:"
"""Before the name of a model from elsewhere: cut into a chain of blocks (`dlojz.models.foreign.chain`)."""
_ADAPTED = re.compile(r"#lora=(\d+);([\w.,-]*);(\w+)$")
_TARGET = re.compile(r"#target=(\d+)(?=#|$)")


ADAPTERS = (".lora_A", ".lora_B")
"""Ends of the paths of an adapter's two matrices, which stay in fp32 where a model is cast to 16 bits."""


class Adapters(NamedTuple):
    """Low-rank adapters of a model of transformers, which stand at the end of the name under which it is built.

    Attributes:
        rank: of the two matrices beside a layer.
        targets: ends of the paths of these layers; empty for the usual ones.
        base: quantization of the frozen weights: none, 8bit or 4bit.
    """

    rank: int
    targets: tuple[str, ...] = ()
    base: Any = "none"

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Read them off a name; None where it has none."""
        parts = _ADAPTED.search(name)
        return cls(int(parts[1]), tuple(filter(None, parts[2].split(","))), parts[3]) if parts else None

    @property
    def ending(self) -> str:
        """Write them as the end of a name."""
        return f"#lora={self.rank};{','.join(self.targets)};{self.base}"


def target_ending(target_length: int | None) -> str:
    """Write the tokens that a decoder reads beside an encoder as the end of a name, before adapters."""
    return f"#target={target_length}" if target_length else ""


def target_length_of(name: str) -> int | None:
    """Read the tokens of each target off a name; None where it has none."""
    parts = _TARGET.search(name)
    return int(parts[1]) if parts else None


def without_endings(name: str) -> str:
    """Return the name of a model without its adapters and the length of its targets."""
    return _TARGET.sub("", _ADAPTED.sub("", name))


_reading: ContextVar[bool] = ContextVar("reading", default=False)


@contextmanager
def executing_no_file() -> Iterator[None]:
    """Read what somebody else may have written: no own file is executed within that this user has not executed."""
    token = _reading.set(True)
    try:
        yield
    finally:
        _reading.reset(token)


def executes_files() -> bool:
    """Tell whether an own file may be executed here: not within `executing_no_file`."""
    return not _reading.get()


def is_own_file(name: str) -> bool:
    """Tell whether a name is that of a function in a file, whose contents may change from one process to the next."""
    return name.rpartition(":")[0].endswith(".py")


def is_taken_as_told(name: str) -> bool:
    """Tell whether a complete configuration is believed what it says of a model, which is looked up when it is built.

    So is an own file, and where records are read any model from elsewhere.
    """
    return is_own_file(name) or (is_elsewhere(name) and not executes_files())


def file_of(name: str) -> Path | None:
    """Return the file that a name points into: one's own, or a configuration; None for a model of a package."""
    name = name.removeprefix(CHAIN)
    package, _, location = without_endings(name).partition(":")
    if is_own_file(name):
        return Path(name.rpartition(":")[0]).expanduser().resolve()
    if package != "hf":
        return None
    path = Path(location).expanduser().resolve()
    return path / "config.json" if path.is_dir() else path  # the folder of a model of the Hub


def absolute_name(name: str) -> str:
    """Make the path of an own file, or of a configuration, absolute; other names stay as they are."""
    file = file_of(name)
    if file is None:
        return name
    start, ending = CHAIN if name.startswith(CHAIN) else "", name.removeprefix(without_endings(name))
    return start + (f"{file}:{name.rpartition(':')[2]}" if is_own_file(name) else f"hf:{file}{ending}")


def size_of(name: str) -> Size | None:
    """Look up the dimensions of a model of the catalogue; None for one from elsewhere, which is not looked up.

    Raises:
        LabError: no model has this name.
    """
    return None if is_elsewhere(name) else spec(name).size


def contents_hash(name: str) -> str:
    """Hash the file that a name points into, without what it imports; empty for a package or a file that is gone."""
    path = file_of(name)
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path and path.is_file() else ""


def check_execution(path: Path) -> None:
    """Refuse to execute an unknown file where a record is read; elsewhere note it as known, with its contents.

    Raises:
        LabError: if it may not be executed here.
    """
    folder = cache_folder("own_files")
    # Path and contents: a file that was changed or moved is unknown again.
    mark = hashlib.sha256(str(path.resolve()).encode() + b"\0" + path.read_bytes()).hexdigest()
    if executes_files():
        if folder is not None:
            # A cache that cannot be written costs a refusal later, and not this run.
            with suppress(OSError):
                (folder / mark).touch()
    elif folder is None or not (folder / mark).exists():
        raise refusal(
            en=f"predicting this model executes {path}, and reading a record executes no file that you have not "
            "executed as it is now: if you trust it, name it yourself, as in `dlojz predict --model FILE.py:FUNCTION`.",
            fr=f"prédire ce modèle exécute {path}, et la lecture d’un bilan n’exécute aucun fichier que vous n’avez "
            "pas exécuté tel qu’il est : si vous lui faites confiance, nommez-le vous-même, par exemple avec "
            "`dlojz predict --model FICHIER.py:FONCTION`.",
        )
