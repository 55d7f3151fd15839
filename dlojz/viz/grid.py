"""The comparison as text, cell by cell: what the terminal, the Markdown and the notebook table all show.

Layer 4. Invariant: one unit per line of the table, chosen so that its largest figure reads well, and written in the
line's label; a figure that is not known is a dash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlojz.footprint import CATEGORIES
from dlojz.text import say
from dlojz.units import byte_units
from dlojz.viz.palette import category_label

if TYPE_CHECKING:
    from dlojz.comparison import Comparison, Pair, Row

DASH = "—"


@dataclass(frozen=True)
class Cell:
    """One quantity of one run, ready to show; `equal` is None where the two are not meant to be the same number."""

    predicted: str
    measured: str
    equal: bool | None = None


@dataclass(frozen=True)
class Line:
    """One quantity over all runs."""

    label: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Section:
    """Lines that belong together, under one heading."""

    heading: str
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Grid:
    """The whole table: a title per run, the sections, and what has to be said about runs that did not go well."""

    titles: tuple[str, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]


def status_label(status: str) -> str:
    """How a run stands, in the reader's language."""
    return {
        "completed": say(en="completed", fr="terminé"),
        "oom": say(en="oom", fr="mémoire épuisée"),
        "timeout": say(en="timeout", fr="hors délai"),
        "cancelled": say(en="cancelled", fr="annulé"),
        "failed": say(en="failed", fr="échec"),
        "diverged": say(en="diverged", fr="divergé"),
        "running": say(en="running", fr="en cours"),
        "queued": say(en="queued", fr="en attente"),
    }.get(status, status)


def gap_text(gap: float | None) -> str:
    """A relative difference, to its order of magnitude."""
    return DASH if gap is None else "0" if gap == 0 else f"{gap:.0e}"


def grid(comparison: Comparison, compact: bool = False) -> Grid:
    """Lay a comparison out as text; lines that no run has a figure for are left out.

    Args:
        comparison: what to lay out.
        compact: fewer digits, for narrow terminals.
    """
    rows = comparison.rows
    sections = (
        Section(say(en="Run", fr="Exécution"), _run_lines(rows)),
        Section(
            say(
                en="Loss (predicted: the same training on one process)",
                fr="Perte (prédite : le même entraînement sur un seul processus)",
            ),
            _loss_lines(rows, 2 if compact else 4),
        ),
        Section(
            say(en="Speed (predicted: dp × one process)", fr="Vitesse (prédite : dp × un processus)")
            if all(row.pipeline_s.measured is None for row in rows)
            else say(
                en="Speed (predicted: dp × one process × the schedule's speed-up)",
                fr="Vitesse (prédite : dp × un processus × gain de l’ordonnancement)",
            ),
            _speed_lines(rows),
        ),
        Section(
            say(en="Memory of rank 0, largest of each", fr="Mémoire du rang 0, maximum de chacune"), _memory_lines(rows)
        ),
        Section(
            say(en="Communication of rank 0, per step", fr="Communication du rang 0, par pas"),
            _communication_lines(rows),
        ),
    )
    return Grid(
        titles=tuple(row.title + (f" ×{row.world_size}" if row.world_size > 1 else "") for row in rows),
        sections=tuple(section for section in sections if section.lines),
        notes=tuple(_notes(rows)),
    )


def _notes(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        if row.status not in ("completed", "running", "queued"):
            yield f"{row.title} ({row.run_id}): {status_label(row.status)}" + (f" — {row.reason}" if row.reason else "")
    for note in dict.fromkeys(row.prediction_note for row in rows if row.prediction_note):
        yield say(en=f"not predicted: {note}", fr=f"non prédit : {note}")
    yield from dict.fromkeys(row.run_note for row in rows if row.run_note)


def _run_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    models = {row.model for row in rows}
    lines = [Line(say(en="status", fr="état"), tuple(Cell("", status_label(row.status)) for row in rows))]
    if len(models) > 1:
        lines.insert(0, Line(say(en="model", fr="modèle"), tuple(Cell("", row.model) for row in rows)))
    lines.append(
        Line(say(en="global batch", fr="batch global"), tuple(Cell("", str(row.global_batch)) for row in rows))
    )
    return tuple(lines)


def _loss_lines(rows: Sequence[Row], decimals: int) -> tuple[Line, ...]:
    gaps = tuple(Cell("", gap_text(row.loss_gap)) for row in rows)
    return _known(
        _line(say(en="first", fr="première"), [row.first_loss for row in rows], f"{{:.{decimals}f}}".format),
        _line(say(en="last", fr="dernière"), [row.last_loss for row in rows], f"{{:.{decimals}f}}".format),
        Line(say(en="largest gap", fr="écart maximal"), gaps),
    )


def _speed_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    steps = tuple(Cell("", DASH if row.step_s is None else _three_digits(row.step_s * 1e3)) for row in rows)
    return _known(
        _line(say(en="samples/s", fr="échantillons/s"), [row.samples_per_s for row in rows], _three_digits),
        Line(say(en="step, ms", fr="pas, ms"), steps),
        _line(
            say(en="pipeline, ms", fr="pipeline, ms"),
            [row.pipeline_s for row in rows],
            lambda seconds: _three_digits(seconds * 1e3),
        ),
        _line(
            say(en="bubble, %", fr="bulle, %"),
            [row.bubble_fraction for row in rows],
            lambda fraction: _three_digits(fraction * 100),
        ),
        _scaled("FLOP", [row.step_flops for row in rows], 1000, ("", "k", "M", "G", "T", "P")),
    )


def _memory_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    return _known(
        *(
            _scaled(category_label(name) + ",", [row.memory_bytes[name] for row in rows])
            for name in (*CATEGORIES, "peak")
            if any(row.memory_bytes[name].measured or row.memory_bytes[name].predicted for row in rows)
        )
    )


def _communication_lines(rows: Sequence[Row]) -> tuple[Line, ...]:
    from dlojz.comparison import Pair

    keys = dict.fromkeys((traffic.collective, traffic.group) for row in rows for traffic in row.communication)
    found = [{(traffic.collective, traffic.group): traffic for traffic in row.communication} for row in rows]
    groups = {group for _, group in keys}
    lines = []
    for key in keys:
        name = key[0] if len(groups) == 1 else f"{key[0]} {key[1]}"
        traffic = [of_run.get(key) for of_run in found]
        lines.append(_scaled(f"{name},", [each.message_bytes if each else Pair() for each in traffic], judged=True))
        lines.append(
            _line(
                say(en="    calls", fr="    appels"),
                [each.count if each else Pair() for each in traffic],
                "{:.0f}".format,
            )
        )
    exposed, hidden = (
        tuple(Cell("", DASH if value is None else _three_digits(value * 1e3)) for value in values)
        for values in ([row.communication_exposed_s for row in rows], [row.communication_hidden_s for row in rows])
    )
    verdicts = tuple(
        Cell("", {True: say(en="yes", fr="oui"), False: say(en="NO", fr="NON"), None: DASH}[row.exact], row.exact)
        for row in rows
    )
    return _known(
        *lines,
        Line(say(en="bytes equal", fr="octets égaux"), verdicts),
        Line(say(en="exposed, ms", fr="exposée, ms"), exposed),
        Line(say(en="hidden, ms", fr="recouverte, ms"), hidden),
    )


def _line(label: str, pairs: Sequence[Pair], write: Callable[[float], str], judged: bool = False) -> Line:
    def cell(pair: Pair) -> Cell:
        if pair.predicted is None and pair.measured is None:
            return Cell("", DASH)
        predicted, measured = (DASH if value is None else write(value) for value in (pair.predicted, pair.measured))
        return Cell(predicted, measured, pair.equal if judged else None)

    return Line(label, tuple(cell(pair) for pair in pairs))


def _scaled(
    label: str,
    pairs: Sequence[Pair],
    base: int = 1024,
    prefixes: Sequence[str] = (),
    judged: bool = False,
) -> Line:
    """A line in the largest unit in which its largest figure is at least 1."""
    prefixes = prefixes or byte_units()
    largest = max((abs(v) for pair in pairs for v in (pair.predicted, pair.measured) if v is not None), default=0)
    power = max((n for n in range(len(prefixes)) if largest >= base**n), default=0)
    joined = f"{label} {prefixes[power]}" if label.endswith(",") else f"{prefixes[power]}{label}"
    return _line(joined, pairs, lambda value: _three_digits(value / base**power), judged)


def _three_digits(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.005 else "~0"


def _known(*lines: Line) -> tuple[Line, ...]:
    return tuple(line for line in lines if any({cell.predicted, cell.measured} - {"", DASH} for cell in line.cells))
