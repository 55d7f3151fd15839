"""From a campaign to its points, in order; every impossible one is found before anything is run.

Layer 6. Invariant: pure: the same campaign gives the same points in the same order, whatever has been run; a plan that
exists holds only points that some engine runs, and no run twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from dlojz.campaign.contract import MACHINE, NAME, TITLE, Campaign, Exclusion, Table, Value
from dlojz.config import Layout, RunConfig
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train import check_runnable

MAX_POINTS = 1000
_DEFAULTS = {
    name: field.default
    for contract in (RunConfig, Layout)
    for name, field in contract.model_fields.items()
    if name not in ("layout", "schema_version")
}


@dataclass(frozen=True)
class Point:
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
        """The point in words: what the axes say of it, or its title where there is no axis."""
        again = [f"#{self.repeat}"] if self.repeat > 1 else []
        return ", ".join([*(self.labels.values() or [self.config.title]), *again])


@dataclass(frozen=True)
class Plan:
    """The points of a campaign, and those that it leaves out with the reason."""

    points: tuple[Point, ...]
    excluded: tuple[tuple[str, str], ...] = ()


def expand(campaign: Campaign, machine: str | None = None) -> Plan:
    """Every point of a campaign, the first axis varying slowest and the repeats fastest.

    Args:
        machine: name of a machine that takes the place of those of the campaign.

    Raises:
        LabError: listing every impossible point with its sentence; or if there is no point, too many, one twice, or an
            exclusion that matches none.
    """
    points: list[Point] = []
    excluded: list[tuple[str, str]] = []
    impossible: list[str] = []
    unused = list(campaign.exclude)
    for labels, fields in _combinations(campaign, machine):
        named = ", ".join(labels.values()) or campaign.title
        matching = [exclusion for exclusion in campaign.exclude if exclusion.matches({**_DEFAULTS, **fields})]
        unused = [exclusion for exclusion in unused if exclusion not in matching]
        if matching:
            excluded.append((named, matching[0].reason))
            continue
        try:
            points += _points(campaign, labels, fields, len(points))
        except LabError as error:
            impossible.append(named + say(en=": ", fr=" : ") + str(error))
    if impossible:
        raise LabError(_impossible(impossible))
    _check(campaign, points, unused if machine is None else [])
    return Plan(tuple(points), tuple(excluded))


def _combinations(campaign: Campaign, machine: str | None) -> Iterator[tuple[dict[str, str], Table]]:
    """The labels and the fields of every combination."""
    axes = {name: values for name, values in campaign.axes.items() if machine is None or name != MACHINE}
    if any(not NAME.fullmatch(str(name)) for name in _machines(campaign, machine)):
        raise LabError(
            say(
                en="a machine is named with at most 40 letters, digits, '-', '_' and '.', but "
                f"{_machines(campaign, machine)!r} was received.",
                fr="une machine se nomme par au plus 40 lettres, chiffres, « - », « _ » et « . », mais "
                f"{_machines(campaign, machine)!r} a été reçu.",
            )
        )
    count = len(list(itertools.islice(itertools.product(*axes.values()), MAX_POINTS + 1))) * campaign.repeats
    if count > MAX_POINTS:
        raise LabError(
            say(
                en=f"the campaign has more than the {MAX_POINTS} runs that one may have: shorten an axis.",
                fr=f"la campagne dépasse les {MAX_POINTS} exécutions permises : raccourcissez un axe.",
            )
        )
    for values in itertools.product(*axes.values()):
        labels: dict[str, str] = {}
        fields: Table = dict(campaign.base)
        for axis, value in zip(axes, values, strict=True):
            table = value if isinstance(value, dict) else {axis: value}
            labels[axis] = _in_words(axis, value)
            fields |= {key: own for key, own in table.items() if key != TITLE}
        if machine is not None:
            fields[MACHINE] = machine
        yield labels, fields


def _machines(campaign: Campaign, machine: str | None) -> list[Value]:
    """All machines that a campaign names."""
    if machine is not None:
        return [machine]
    found: list[Value] = [campaign.base[MACHINE]] if MACHINE in campaign.base else []
    for axis, values in campaign.axes.items():
        tables = [value if isinstance(value, dict) else {axis: value} for value in values]
        found += [table[MACHINE] for table in tables if MACHINE in table]
    return found


def _in_words(axis: str, value: Value | Table) -> str:
    """A value as figures name it: with its axis where it would say nothing alone."""
    if isinstance(value, dict):
        if TITLE not in value:
            return ", ".join(
                f"{key} {own if isinstance(own, str) else _number_in_words(own)}" for key, own in value.items()
            )
        value = value[TITLE]
    if isinstance(value, str):
        return f"{axis} {value.lower()}" if value.replace(".", "").isdigit() else value
    return f"{axis} {_number_in_words(value)}"


def _number_in_words(value: bool | int | float) -> str:
    """A number as the reader's language writes it, or `true` or `false`."""
    written = str(value).lower()
    return say(en=written, fr=written.replace(".", ","))


def _points(campaign: Campaign, labels: dict[str, str], fields: Table, before: int) -> list[Point]:
    machine = str(fields.get(MACHINE, ""))
    own = {key: value for key, value in fields.items() if key != MACHINE}
    first = RunConfig.of(**own)
    check_runnable(first)
    return [
        Point(before + repeat, labels, machine, RunConfig.of(**{**own, "seed": first.seed + repeat - 1}), repeat)
        for repeat in range(1, campaign.repeats + 1)
    ]


def _impossible(sentences: list[str]) -> str:
    """Every impossible point, one a line."""
    listed = "\n".join(f"  - {sentence}" for sentence in sentences)
    return say(
        en=f"nothing was submitted: {len(sentences)} of the campaign's points cannot be run. Change them, or leave "
        f"them out with [[exclude]]:\n{listed}",
        fr=f"rien n’a été soumis : {len(sentences)} points de la campagne ne peuvent pas être exécutés. Changez-les, "
        f"ou écartez-les avec [[exclude]] :\n{listed}",
    )


def _check(campaign: Campaign, points: list[Point], unused: list[Exclusion]) -> None:
    if unused:
        raise LabError(
            say(
                en=f"the exclusion {unused[0].match} matches no point of the campaign: correct it, or take it out.",
                fr=f"l’exclusion {unused[0].match} ne correspond à aucun point de la campagne : corrigez-la ou "
                "retirez-la.",
            )
        )
    if not points:
        raise LabError(
            say(
                en=f"the campaign {campaign.title!r} has no point: all are excluded.",
                fr=f"la campagne {campaign.title!r} n’a aucun point : tous sont exclus.",
            )
        )
    seen: dict[tuple[str, str], Point] = {}
    for point in points:
        twin = seen.setdefault((point.machine, point.config.hash), point)
        if twin is not point:
            raise LabError(
                say(
                    en=f"the points {twin.number} ({twin.label}) and {point.number} ({point.label}) are the same run: "
                    "exclude one of them.",
                    fr=f"les points {twin.number} ({twin.label}) et {point.number} ({point.label}) sont la même "
                    "exécution : excluez l’un des deux.",
                )
            )
