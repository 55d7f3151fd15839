"""Read constants from TOML files: each figure with its unit, source, date, and how far it is to be trusted.

A constant that was read has the unit that is due, is positive, and is measured, published, derived from such figures,
or unconfirmed; a missing one is refused.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeGuard

from dlojz.base.errors import LabError
from dlojz.base.files import config_folder, write_atomic
from dlojz.base.language import Sentences, colon, one_of, say

STANDINGS: Final = ("measured", "published", "derived", "unconfirmed")
"""How far a figure is to be trusted, the most first."""
_PARTS: Final = ("value", "unit", "source", "date", "standing")
_HEADER: Final = re.compile(r"\s*\[\[?([A-Za-z_][\w.-]*)\]\]?\s*(#.*)?")
_KEY: Final = re.compile(r'\s*"?([\w.-]+)"?\s*=.*')
_FILE: Final = Path(__file__).with_name("data") / "files.md"
file_sentence = Sentences(_FILE)
file_refused = file_sentence.refused
"""A sentence about a hardware file, by its key, and the error that says one."""
FOLDERS_VARIABLE: Final = "DLOJZ_HARDWARE"
"""Folders of hardware files of one's own, each with `gpus/` and `links/`; the user's configuration is the last one."""


class Constant(NamedTuple):
    """Figure with its unit and source; `standing` is one of `STANDINGS`, `date` is when it was looked up."""

    value: float
    unit: str
    source: str
    date: str
    standing: str


def title_words(title: str) -> str:
    """Write the title of a GPU or a cluster in the reader's language."""
    return say(en=title, fr=title.replace(" GB", " Go").replace("per node", "par nœud"))


def own_files(kind: str) -> dict[str, Path]:
    """Find the hardware files of one's own by name; of two of one name the first folder's counts.

    Args:
        kind: `gpus` or `links`.
    """
    folders = [Path(part).expanduser() for part in os.environ.get(FOLDERS_VARIABLE, "").split(os.pathsep) if part]
    files: dict[str, Path] = {}
    for folder in (*folders, config_folder()):
        for path in sorted((folder / kind).glob("*.toml")):
            files.setdefault(path.stem.lower(), path)
    return files


def file_of(kind: str, name: str | Path) -> Path | None:
    """Path that a name of one's own hardware leads to: that of a `.toml` file, or one that is searched for.

    Raises:
        LabError: if there is no file at a path.
    """
    if not str(name).endswith(".toml"):
        return own_files(kind).get(str(name).strip().lower())
    path = Path(name).expanduser()
    if not path.is_file():
        raise file_refused("no file", name=str(name), folder=config_folder() / kind)
    return path


def _are_counts(ranks: object) -> TypeGuard[list[int]]:
    """Whether this is a list of numbers of ranks that grow from 2 on."""
    # `type`, as True is an int for isinstance.
    if not isinstance(ranks, list) or not ranks or any(type(rank) is not int for rank in ranks):
        return False
    # Equal to its own sorted set: it grows strictly.
    return ranks[0] >= 2 and sorted(set(ranks)) == ranks


@dataclass(frozen=True)
class ConstantsFile:
    """Reader of the constants of one file; a fault names the file and the key."""

    path: Path
    content: Mapping[str, Any]
    lines: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> ConstantsFile:
        """Read the TOML file at this path.

        Raises:
            LabError: if it cannot be read or is no TOML.
        """
        try:
            text = path.read_text(encoding="utf-8")
            return cls(path, tomllib.loads(text), tuple(text.splitlines()))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
            raise file_refused("unreadable", name=path.name, error=error) from None

    def refuse(self, problem: str, name: str = "") -> LabError:
        """Make the error of this file, in one sentence, with the line of a constant such as `peak.bf16`."""
        line = self._line_of(name)
        location = self.path.name + ("" if line is None else say(en=f", line {line}", fr=f", ligne {line}"))
        return LabError(location + colon() + problem)

    def _line_of(self, name: str) -> int | None:
        """Line of a constant, or of the table around a part of one; None where the file has neither."""
        numbers: dict[str, int] = {}
        section = ""
        for number, line in enumerate(self.lines, start=1):
            if header := _HEADER.fullmatch(line):
                section = f"{header[1]}."
                numbers.setdefault(header[1], number)
            elif key := _KEY.fullmatch(line):
                numbers.setdefault(section + key[1], number)
        while name and name not in numbers:
            name = name.rpartition(".")[0]
        return numbers.get(name)

    def keys(self, legal: Iterable[str], table: Mapping[str, Any] | None = None, name: str = "") -> None:
        """Refuse unknown keys.

        Args:
            name: of the table, as it is called in a refusal; empty for the top of the file.

        Raises:
            LabError: naming the file and the keys there are.
        """
        legal = list(legal)
        for key in self.content if table is None else table:
            if key not in legal:
                raise self.refuse(one_of("key", key, legal), f"{name}.{key}".strip("."))

    def text(self, key: str, default: str | None = None) -> str:
        """Read a string.

        Raises:
            LabError: if it is missing and has no default, or is no string.
        """
        value = self.content.get(key, default)
        return str(self._fitting(key, value, isinstance(value, str), "text"))

    def named(self, key: str) -> str:
        """Read the name of other hardware, or the path of its file, which begins in this file's folder."""
        text = self.text(key)
        return str(self.path.parent / Path(text).expanduser()) if text.endswith(".toml") else text

    def count(self, key: str, within: Mapping[str, Any] | None = None, name: str = "") -> int:
        """Read a whole number of at least 1; `within` a table of this name, else at the top.

        Raises:
            LabError: if it is missing, or none.
        """
        value = (self.content if within is None else within).get(key)
        fits = type(value) is int and value >= 1
        return int(self._fitting(f"{name}.{key}".strip("."), value, fits, "count"))

    def table(self, key: str, within: Mapping[str, Any] | None = None, name: str = "") -> Mapping[str, Any]:
        """Read a table; `name` is what a refusal calls it.

        Raises:
            LabError: if it is missing, or none.
        """
        value = (self.content if within is None else within).get(key)
        section: Mapping[str, Any] = self._fitting(name or key, value, isinstance(value, Mapping), "table")
        return section

    def _fitting(self, key: str, value: Any, fits: bool, form: str) -> Any:
        """Return a value, or refuse one that is missing, or has not the form of this key."""
        if value is None:
            raise self.missing(key)
        if not fits:
            form = file_sentence(form)
            raise self.refuse(file_sentence("form", key=key, form=form, value=value), key)
        return value

    def missing(self, key: str) -> LabError:
        """Make the error of a missing constant."""
        return self.refuse(file_sentence("missing constant", key=key), key)

    def constant(
        self, key: str, unit: str, within: Mapping[str, Any] | None = None, name: str = "", optional: str = ""
    ) -> Constant:
        """Read a constant.

        Args:
            key: of the constant.
            unit: that it must have.
            within: the table it stands in; without it, the top of the file.
            name: as it is called in a refusal; the key without it.
            optional: a part that may stand beside the usual ones.

        Raises:
            LabError: if it or a part of it is missing, its unit is another, or its value is not positive.
        """
        name = name or key
        table = self.table(key, within, name)
        figure = self._described(table, name, (unit,), "value", optional)
        return Constant(self._positive(figure, name), *(str(table[part]) for part in _PARTS[1:]))

    def curve(self, key: str, unit: str, within: Mapping[str, Any], name: str) -> dict[int, Constant]:
        """Read a constant that is known for several numbers of ranks, as lists `ranks` and `values`.

        Raises:
            LabError: as `constant`, or if the two are not of one length, or the ranks do not grow from 2 on.
        """
        table = self.table(key, within, name)
        values = self._described(table, name, (unit,), "values", "ranks")
        ranks = table.get("ranks")
        if not _are_counts(ranks) or not isinstance(values, list) or len(ranks) != len(values):
            raise self.refuse(file_sentence("ranks", name=name, ranks=ranks, values=values), name)
        provenance = [str(table[part]) for part in _PARTS[1:]]
        return {
            rank: Constant(self._positive(value, name), *provenance) for rank, value in zip(ranks, values, strict=True)
        }

    def sized(
        self, key: str, units: Sequence[str], within: Mapping[str, Any], name: str
    ) -> dict[tuple[int, ...], Constant]:
        """Read a constant that is known for several sizes of three lengths, as lists `sizes` and `values`.

        Raises:
            LabError: as `constant`, or if the two are not of one length, or a size is none or stands there twice.
        """
        table = self.table(key, within, name)
        values = self._described(table, name, units, "values", "sizes")
        sizes = table.get("sizes")
        if not isinstance(sizes, list) or not isinstance(values, list) or not 0 < len(sizes) == len(values):
            raise self.refuse(file_sentence("sizes", name=name, sizes=sizes, values=values), name)
        provenance = [str(table[part]) for part in _PARTS[1:]]
        constants: dict[tuple[int, ...], Constant] = {}
        for size, value in zip(sizes, values, strict=True):
            fits = isinstance(size, list) and len(size) == 3 and all(type(part) is int and part > 0 for part in size)
            if not fits or tuple(size) in constants:
                raise self.refuse(file_sentence("size", name=name, size=size), f"{name}.sizes")
            constants[tuple(size)] = Constant(self._positive(value, name), *provenance)
        return constants

    def _described(
        self, table: Mapping[str, Any], name: str, units: Sequence[str], values: str, optional: str = ""
    ) -> Any:
        # A curve has `values` and `ranks`, a single figure a `value`.
        self.keys((*_PARTS[1:], values, *filter(None, (optional,))), table, name)
        for part in (values, *_PARTS[1:]):
            if part not in table:
                raise self.missing(f"{name}.{part}")
        if table["unit"] not in units:
            legal, unit = say(en=" or ", fr=" ou ").join(units), table["unit"]
            raise self.refuse(file_sentence("unit", name=name, legal=legal, unit=unit), f"{name}.unit")
        if table["standing"] not in STANDINGS:
            raise self.refuse(one_of(f"{name}.standing", table["standing"], STANDINGS), f"{name}.standing")
        return table[values]

    def _positive(self, value: object, name: str) -> float:
        # TOML knows inf and nan; 0 < nan is false.
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
        return float(self._fitting(name, value, fits, "positive"))


def toml_text(text: str) -> str:
    """Write a text as TOML does, which JSON's escapes are a part of."""
    return json.dumps(text, ensure_ascii=False)


def constant_line(key: str, constant: Constant, **further: float | None) -> str:
    """Write a constant as one line of a hardware file, with further parts that are not None."""
    parts = {"value": repr(constant.value)} | {name: repr(part) for name, part in further.items() if part is not None}
    parts |= {part: toml_text(getattr(constant, part)) for part in _PARTS[1:]}
    return f"{key} = {{ {', '.join(f'{name} = {part}' for name, part in parts.items())} }}"


def write_hardware(path: Path, lines: Iterable[str]) -> None:
    """Write a hardware file whole or not at all, and its folder.

    Raises:
        LabError: if that is not possible.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "\n".join(lines) + "\n")
    except OSError as error:
        raise file_refused("unwritten", path=path, reason=error.strerror) from None
