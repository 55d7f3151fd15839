"""Campaign: a TOML file of base fields, axes and exclusions, and the runs that follow from it.

A campaign names only fields that a run has. `expand` gives its points in order and refuses those that no engine runs,
before anything is started; the same campaign gives the same points in the same order.
"""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from dlojz.base.contract import Contract
from dlojz.base.errors import LabError
from dlojz.base.files import COURSE
from dlojz.base.language import Sentences, localized, one_of, say
from dlojz.config.layout import Layout
from dlojz.config.run_config import HIDDEN, RunConfig
from dlojz.runnable import check_runnable

MACHINE, TITLE, REASON = "machine", "name", "reason"
FIELDS = tuple(name for name in (*RunConfig.model_fields, *Layout.model_fields) if name not in HIDDEN)
"""What a point may set: the fields of `RunConfig` and `Layout`; `machine` besides."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,39}")
MAX_FILE_BYTES = 256 * 1024
MAX_REPEATS, MAX_TIME_LIMIT_S = 20, 7 * 86_400

_refused = Sentences(Path(__file__).with_name("data") / "campaign.md").refused
"""The error that refuses a campaign, by the key of its sentence."""
Value = bool | int | float | str
Table = dict[str, Value]


class Exclusion(Contract):
    """Exclusion of points from a campaign, with the reason.

    Args:
        match: field → value, or a list of values any of which matches; a point must match all of them.
    """

    match: dict[str, Value | list[Value]] = Field(min_length=1)
    reason: str = Field(min_length=1)

    def matches(self, fields: Mapping[str, object]) -> bool:
        """Whether a point with these fields, defaults included, is left out."""
        # The defaults are in `fields` too, so the one name that may be missing is `machine`.
        return all(
            name in fields
            and any(_same(fields[name], value) for value in (criterion if isinstance(criterion, list) else [criterion]))
            for name, criterion in self.match.items()
        )


def _same(value: object, reference: object) -> bool:
    """Equality in which `true` is no 1."""
    return value == reference and isinstance(value, bool) == isinstance(reference, bool)


class Campaign(Contract):
    """Campaign: every combination of the axes' values, over the base fields.

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
    def _flat_exclusions(cls, raw_exclusions: Any) -> Any:
        """`[[exclude]]` is written flat: the fields and `reason` in one table."""
        if not isinstance(raw_exclusions, list) or not all(isinstance(table, dict) for table in raw_exclusions):
            return raw_exclusions
        flat = [table for table in raw_exclusions if "match" not in table]
        # The long form, `match = {…}` beside `reason`, is legal too; it comes first, whatever the file says.
        return [
            *(table for table in raw_exclusions if "match" in table),
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
        owners: dict[str, str] = {}
        for axis, values in self.axes.items():
            for key in self._fields_of(axis, values):
                _check_field(key, f"[axes] {axis}")
                if key in owners:
                    raise _refused("two axes", owner=owners[key], axis=axis, key=key)
                owners[key] = axis
        return self

    @staticmethod
    def _fields_of(axis: str, values: list[Value | Table]) -> list[str]:
        """The fields that an axis sets."""
        tables = [value for value in values if isinstance(value, dict)]
        # Refused: an empty axis, tables mixed with plain values, a table with no field but `name`.
        if not values or (tables and len(tables) < len(values)) or any(not set(table) - {TITLE} for table in tables):
            raise _refused("axis", axis=axis, values=str(values)[:200])
        return list(dict.fromkeys(key for table in tables for key in table if key != TITLE)) if tables else [axis]


def _check_field(key: str, section: str) -> None:
    if key not in (*FIELDS, MACHINE):
        raise LabError(one_of(say(en=f"field in {section}", fr=f"champ de {section}"), key, (*FIELDS, MACHINE)))


def campaigns_folder() -> Path:
    """Folder of the course's campaigns: `slurm/campaigns` beside the package."""
    return COURSE / "slurm" / "campaigns"


def find_campaign(word: str) -> Path:
    """Find the file of a campaign: a path to a TOML file, or the name of one of the course's.

    Raises:
        LabError: if there is none; the campaigns of the course are listed.
    """
    path = Path(word).expanduser()
    if path.suffix == ".toml":
        return path
    campaign_files = {file.stem: file for file in sorted(campaigns_folder().glob("*.toml"))}
    if word not in campaign_files:
        raise LabError(
            one_of(say(en="campaign", fr="campagne"), word, campaign_files)
            + say(en=" A file is named with its ending .toml.", fr=" Un fichier se nomme avec sa terminaison .toml.")
        )
    return campaign_files[word]


def read_campaign(path: Path) -> Campaign:
    """Read a campaign from its file.

    Raises:
        LabError: if the file cannot be read, is no TOML, has an unfit name, or holds no legal campaign; one sentence
            that names the file.
    """
    if not NAME.fullmatch(path.stem):
        raise _refused("name", name=path.name[:100])
    try:
        with path.open("rb") as file:
            # One byte more than is legal: a huge file is not read whole to find out that it is too large.
            text = file.read(MAX_FILE_BYTES + 1)
        if len(text) > MAX_FILE_BYTES:
            raise _refused("large file", most=MAX_FILE_BYTES)
        return Campaign.from_dict(tomllib.loads(text.decode("utf-8")))
    except OSError as error:
        reason = f"{error.strerror}."
    except (LabError, ValueError, RecursionError) as error:  # what TOML refuses is a ValueError
        reason = str(error)
    raise _refused("unusable", name=path.name, reason=reason)


MAX_POINTS = 1000
_DEFAULTS = {
    name: field.default
    for contract in (RunConfig, Layout)
    for name, field in contract.model_fields.items()
    if name not in HIDDEN
}


@dataclass(frozen=True)
class CampaignPoint:
    """One run of a campaign.

    Args:
        number: from 1, in the order of the campaign.
        labels: axis → what this point has on it, in words.
        machine: name of a machine file; empty for this machine.
        config: the run; repeats differ by their seed.
        repeat: from 1.
    """

    number: int
    labels: dict[str, str]
    machine: str
    config: RunConfig
    repeat: int = 1

    @property
    def label(self) -> str:
        """Point in words: its values on the axes, or its title where there is no axis."""
        repeat_suffix = [f"#{self.repeat}"] if self.repeat > 1 else []
        return ", ".join([*(self.labels.values() or [self.config.title]), *repeat_suffix])


@dataclass(frozen=True)
class CampaignPlan:
    """The points of a campaign, and those that it leaves out with the reason."""

    points: tuple[CampaignPoint, ...]
    excluded: tuple[tuple[str, str], ...] = ()


def expand(campaign: Campaign, machine: str | None = None) -> CampaignPlan:
    """Expand a campaign to its points, the first axis varying slowest and the repeats fastest.

    Args:
        machine: name of a machine that takes the place of those of the campaign.

    Raises:
        LabError: listing every impossible point with its sentence; or if there is no point, too many, one twice, or an
            exclusion that matches none.
    """
    points: list[CampaignPoint] = []
    excluded: list[tuple[str, str]] = []
    impossible: list[str] = []
    # Exclusions that have matched no point so far.
    unused = list(campaign.exclude)
    for labels, fields in _combinations(campaign, machine):
        label = ", ".join(labels.values()) or campaign.title
        matching = [exclusion for exclusion in campaign.exclude if exclusion.matches({**_DEFAULTS, **fields})]
        unused = [exclusion for exclusion in unused if exclusion not in matching]
        if matching:
            excluded.append((label, matching[0].reason))
            continue
        try:
            points += _points(campaign, labels, fields, len(points))
        except LabError as error:
            impossible.append(label + say(en=": ", fr=" : ") + str(error))
    if impossible:
        bullets = "".join(f"\n  - {problem}" for problem in impossible)
        raise _refused("impossible points", count=len(impossible), bullets=bullets)
    # Another machine takes the place of the campaign's: an exclusion by machine may then match nothing.
    _check(campaign, points, unused if machine is None else [])
    return CampaignPlan(tuple(points), tuple(excluded))


def _combinations(campaign: Campaign, machine: str | None) -> Iterator[tuple[dict[str, str], Table]]:
    """The labels and the fields of every combination."""
    axes = {name: values for name, values in campaign.axes.items() if machine is None or name != MACHINE}
    machines = _machines(campaign, machine)
    if any(not NAME.fullmatch(str(name)) for name in machines):
        raise _refused("machine name", machines=machines)
    # islice: a product of long axes is not walked to its end to find out that it is too large.
    count = len(list(itertools.islice(itertools.product(*axes.values()), MAX_POINTS + 1))) * campaign.repeats
    if count > MAX_POINTS:
        raise _refused("runs", most=MAX_POINTS)
    for values in itertools.product(*axes.values()):
        labels: dict[str, str] = {}
        fields: Table = dict(campaign.base)
        for axis, value in zip(axes, values, strict=True):
            table = value if isinstance(value, dict) else {axis: value}
            labels[axis] = _in_words(axis, value)
            # An axis overrides the base; that no two axes set one field was checked when the file was read.
            fields |= {key: setting for key, setting in table.items() if key != TITLE}
        if machine is not None:
            fields[MACHINE] = machine
        yield labels, fields


def _machines(campaign: Campaign, machine: str | None) -> list[Value]:
    """All machines that a campaign names."""
    if machine is not None:
        return [machine]
    machines: list[Value] = [campaign.base[MACHINE]] if MACHINE in campaign.base else []
    for axis, values in campaign.axes.items():
        tables = [value if isinstance(value, dict) else {axis: value} for value in values]
        machines += [table[MACHINE] for table in tables if MACHINE in table]
    return machines


def _in_words(axis: str, value: Value | Table) -> str:
    """A value as figures name it: with its axis where it would say nothing alone."""
    if isinstance(value, dict):
        if TITLE not in value:
            return ", ".join(
                f"{key} {setting if isinstance(setting, str) else localized(str(setting).lower())}"
                for key, setting in value.items()
            )
        value = value[TITLE]
    if isinstance(value, str):
        # A text that reads as a number, such as "1.5", says nothing without its axis.
        return f"{axis} {value.lower()}" if value.replace(".", "").isdigit() else value
    return f"{axis} {localized(str(value).lower())}"


def _points(campaign: Campaign, labels: dict[str, str], fields: Table, before: int) -> list[CampaignPoint]:
    machine = str(fields.get(MACHINE, ""))
    config_fields = {key: value for key, value in fields.items() if key != MACHINE}
    first_config = RunConfig.of(**config_fields)
    # Once for all repeats: they differ by their seed alone.
    check_runnable(first_config)
    return [
        CampaignPoint(
            before + repeat,
            labels,
            machine,
            RunConfig.of(**{**config_fields, "seed": first_config.seed + repeat - 1}),
            repeat,
        )
        for repeat in range(1, campaign.repeats + 1)
    ]


def _check(campaign: Campaign, points: list[CampaignPoint], unused: list[Exclusion]) -> None:
    if unused:
        raise _refused("unused exclusion", match=unused[0].match)
    if not points:
        raise _refused("no point", campaign=campaign)
    points_by_run: dict[tuple[str, str], CampaignPoint] = {}
    for point in points:
        # The hash covers the seed, so that repeats are no twins.
        twin = points_by_run.setdefault((point.machine, point.config.hash), point)
        if twin is not point:
            raise _refused("twins", twin=twin, point=point)
