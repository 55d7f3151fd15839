"""A campaign as it is written down: a TOML file of base fields, axes and exclusions.

Layer 6. Invariant: a campaign that exists names only fields that a run has, so that a slip of the keyboard is refused
before any point is made. Nothing here asks whether a point is possible: `dlojz.campaign.plan` does.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

import dlojz
from dlojz.config import Layout, RunConfig
from dlojz.schema import Contract, LabError, one_of
from dlojz.text import say

MACHINE, TITLE, REASON = "machine", "name", "reason"
FIELDS = tuple(
    name for name in (*RunConfig.model_fields, *Layout.model_fields) if name not in ("layout", "schema_version")
)
"""What a point may set: the fields of `RunConfig` and `Layout`; `machine` besides."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,39}")
MAX_FILE_BYTES = 256 * 1024
MAX_REPEATS, MAX_TIME_LIMIT_S = 20, 7 * 86_400

Value = bool | int | float | str
Table = dict[str, Value]


class Exclusion(Contract):
    """Points that are left out, and why.

    Args:
        match: field → value, or a list of values any of which matches; a point must match all of them.
        reason: shown in the report.
    """

    match: dict[str, Value | list[Value]] = Field(min_length=1)
    reason: str = Field(min_length=1)

    def matches(self, fields: Mapping[str, object]) -> bool:
        """Whether a point with these fields, defaults included, is left out."""
        return all(
            name in fields
            and any(_same(fields[name], value) for value in (wanted if isinstance(wanted, list) else [wanted]))
            for name, wanted in self.match.items()
        )


def _same(value: object, wanted: object) -> bool:
    """Equality in which `true` is no 1."""
    return value == wanted and isinstance(value, bool) == isinstance(wanted, bool)


class Campaign(Contract):
    """What is to be measured: every combination of the axes' values, over the base fields.

    An axis is a list of values of the field of its name, or a list of tables of fields; then its name is free, and a
    table's own `name` is how it is called in figures. The first axis varies slowest.

    Raises:
        LabError: for an unknown field, an axis without values, or one that sets what another sets.
    """

    schema_version: Literal[1] = 1
    title: str = Field(min_length=1, max_length=200)
    description: str = Field("", max_length=10_000)
    base: Table = Field(default_factory=dict, description="fields that all points share")
    axes: dict[str, list[Value | Table]] = Field(default_factory=dict, description="what varies")
    exclude: list[Exclusion] = Field(default_factory=list)
    repeats: int = Field(
        1, ge=1, le=MAX_REPEATS, description="runs of each point; the n-th has the seed of the base + n - 1"
    )
    time_limit_s: float | None = Field(None, gt=0, le=MAX_TIME_LIMIT_S, description="of one run")

    @field_validator("exclude", mode="before")
    @classmethod
    def _flat_exclusions(cls, given: Any) -> Any:
        """`[[exclude]]` is written flat: the fields and `reason` in one table."""
        if not isinstance(given, list) or not all(isinstance(table, dict) for table in given):
            return given
        flat = [table for table in given if "match" not in table]
        return [
            *(table for table in given if "match" in table),
            *(
                {"match": {key: value for key, value in table.items() if key != REASON}, REASON: table.get(REASON, "")}
                for table in flat
            ),
        ]

    @model_validator(mode="after")
    def _known(self) -> Self:
        for key in self.base:
            _check_field(key, "[base]")
        for exclusion in self.exclude:
            for key in exclusion.match:
                _check_field(key, "[[exclude]]")
        taken: dict[str, str] = {}
        for axis, values in self.axes.items():
            for key in self._fields_of(axis, values):
                _check_field(key, f"[axes] {axis}")
                if key in taken:
                    raise LabError(
                        say(
                            en=f"the axes {taken[key]!r} and {axis!r} both set {key!r}: let one of them do it.",
                            fr=f"les axes {taken[key]!r} et {axis!r} fixent tous deux {key!r} : laissez-le à "
                            "l’un d’eux.",
                        )
                    )
                taken[key] = axis
        return self

    @staticmethod
    def _fields_of(axis: str, values: list[Value | Table]) -> list[str]:
        """The fields that an axis sets."""
        tables = [value for value in values if isinstance(value, dict)]
        if not values or (tables and len(tables) < len(values)) or any(not set(table) - {TITLE} for table in tables):
            raise LabError(
                say(
                    en=f"the axis {axis!r} must be a list of values, or a list of tables with a field in each, but "
                    f"{str(values)[:200]} was received.",
                    fr=f"l’axe {axis!r} doit être une liste de valeurs, ou une liste de tables contenant chacune un "
                    f"champ, mais {str(values)[:200]} a été reçu.",
                )
            )
        return list(dict.fromkeys(key for table in tables for key in table if key != TITLE)) if tables else [axis]


def _check_field(key: str, place: str) -> None:
    if key not in (*FIELDS, MACHINE):
        raise LabError(one_of(say(en=f"field in {place}", fr=f"champ de {place}"), key, (*FIELDS, MACHINE)))


def campaigns_folder() -> Path:
    """Where the campaigns of the course are: `slurm/campaigns` beside the package."""
    return Path(dlojz.__file__ or "").resolve().parent.parent / "slurm" / "campaigns"


def find_campaign(word: str) -> Path:
    """The file of a campaign: a path to a TOML file, or the name of one of the course's.

    Raises:
        LabError: if there is none; the campaigns of the course are listed.
    """
    path = Path(word).expanduser()
    if path.suffix == ".toml":
        return path
    known = {file.stem: file for file in sorted(campaigns_folder().glob("*.toml"))}
    if word not in known:
        raise LabError(
            one_of(say(en="campaign", fr="campagne"), word, known)
            + say(en=" A file is named with its ending .toml.", fr=" Un fichier se nomme avec sa terminaison .toml.")
        )
    return known[word]


def read_campaign(path: Path) -> Campaign:
    """A campaign from its file.

    Raises:
        LabError: if the file cannot be read, is no TOML, has an unfit name, or holds no legal campaign; one sentence
            that names the file.
    """
    if not NAME.fullmatch(path.stem):
        raise LabError(
            say(
                en=f"the campaign file {path.name[:100]!r} names the folder of the report, so its name is made of at "
                "most 40 letters, digits, '-', '_' and '.': rename it.",
                fr=f"le fichier de campagne {path.name[:100]!r} nomme le dossier du rapport : son nom se compose d’au "
                "plus 40 lettres, chiffres, « - », « _ » et « . » ; renommez-le.",
            )
        )
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise LabError(
                say(
                    en=f"it is larger than the {MAX_FILE_BYTES} bytes that a campaign may have.",
                    fr=f"il dépasse les {MAX_FILE_BYTES} octets qu’une campagne peut avoir.",
                )
            )
        return Campaign.from_dict(tomllib.loads(text.decode("utf-8")))
    except OSError as error:
        reason = f"{error.strerror}."
    except (LabError, ValueError, RecursionError) as error:  # what TOML refuses is a ValueError
        reason = str(error)
    raise LabError(
        say(
            en=f"the campaign {path.name} cannot be used: {reason}",
            fr=f"la campagne {path.name} est inutilisable : {reason}",
        )
    )
