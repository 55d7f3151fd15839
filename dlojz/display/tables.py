"""Tables of runs: the comparison's grid, and the other tables of a terminal.

The comparison as text, cell by cell: what the terminal, the Markdown and the notebook table all show.

One unit per line of the table, chosen so that its largest figure reads well, and written in the line's label; a figure
that is not known is a dash.

The comparison in a terminal: quantities as lines, runs as columns, each cell `predicted | measured`.

No figure is ever cut; where the terminal is too narrow for all runs, the table goes on below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from dlojz.base.language import byte_units, decimal, format_bytes, format_count, gap_text, localized, say
from dlojz.base.table import markdown_safe, safe, visible
from dlojz.config.run_config import RunConfig
from dlojz.display.style import CATEGORY_STYLES, category_label, needed_label, phase_label
from dlojz.results.footprint import CATEGORIES, Footprint

if TYPE_CHECKING:
    from dlojz.compare import Comparison, PredictedMeasured, RunRow
    from dlojz.display.memory_tables import FootprintTable

DASH = "—"


@dataclass(frozen=True)
class ComparisonCell:
    """One quantity of one run, ready to show; `equal` is None where the two are not meant to be the same number."""

    predicted: str
    measured: str
    equal: bool | None = None


@dataclass(frozen=True)
class ComparisonLine:
    """One quantity over all runs."""

    label: str
    cells: tuple[ComparisonCell, ...]


@dataclass(frozen=True)
class Section:
    """Lines that belong together, under one heading."""

    heading: str
    lines: tuple[ComparisonLine, ...]


@dataclass(frozen=True)
class ComparisonGrid:
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


def grid(comparison: Comparison, compact: bool = False) -> ComparisonGrid:
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
    return ComparisonGrid(
        titles=tuple(row.title + (f" ×{row.world_size}" if row.world_size > 1 else "") for row in rows),
        sections=tuple(section for section in sections if section.lines),
        notes=tuple(_notes(rows)),
    )


def _notes(rows: Sequence[RunRow]) -> Iterable[str]:
    for row in rows:
        if row.status not in ("completed", "running", "queued"):
            yield f"{row.title} ({row.run_id}): {status_label(row.status)}" + (f" — {row.reason}" if row.reason else "")
    for note in dict.fromkeys(row.prediction_note for row in rows if row.prediction_note):
        yield say(en=f"not predicted: {note}", fr=f"non prédit : {note}")
    yield from dict.fromkeys(row.run_note for row in rows if row.run_note)


def _run_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    models = {row.model for row in rows}
    lines = [ComparisonLine(say(en="status", fr="état"),
        tuple(ComparisonCell("", status_label(row.status)) for row in rows))]
    if len(models) > 1:
        lines.insert(0, ComparisonLine(say(en="model", fr="modèle"),
            tuple(ComparisonCell("", row.model) for row in rows)))
    lines.append(
        ComparisonLine(
            say(en="global batch", fr="batch global"), tuple(ComparisonCell("", str(row.global_batch)) for row in rows)
        )
    )
    return tuple(lines)


def _loss_lines(rows: Sequence[RunRow], decimals: int) -> tuple[ComparisonLine, ...]:
    gaps = tuple(ComparisonCell("", gap_text(row.loss_gap)) for row in rows)
    written = partial(decimal, digits=decimals)
    return _known(
        _line(say(en="first", fr="première"), [row.first_loss for row in rows], written),
        _line(say(en="last", fr="dernière"), [row.last_loss for row in rows], written),
        ComparisonLine(say(en="largest gap", fr="écart maximal"), gaps),
    )


def _speed_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    steps = tuple(ComparisonCell("", DASH if row.step_s is None else _three_digits(row.step_s * 1e3)) for row in rows)
    return _known(
        _line(say(en="samples/s", fr="échantillons/s"), [row.samples_per_s for row in rows], _three_digits),
        ComparisonLine(say(en="step, ms", fr="pas, ms"), steps),
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


def _memory_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    return _known(
        *(
            _scaled(category_label(name) + ",", [row.memory_bytes[name] for row in rows])
            for name in (*CATEGORIES, "peak")
            if any(row.memory_bytes[name].measured or row.memory_bytes[name].predicted for row in rows)
        )
    )


def _communication_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    from dlojz.compare import PredictedMeasured

    keys = dict.fromkeys((traffic.collective, traffic.group) for row in rows for traffic in row.communication)
    found = [{(traffic.collective, traffic.group): traffic for traffic in row.communication} for row in rows]
    groups = {group for _, group in keys}
    lines = []
    for key in keys:
        name = key[0] if len(groups) == 1 else f"{key[0]} {key[1]}"
        traffic = [of_run.get(key) for of_run in found]
        lines.append(_scaled(f"{name},", [each.message_bytes if each else PredictedMeasured() for each in traffic],
            judged=True))
        lines.append(
            _line(
                say(en="    calls", fr="    appels"),
                [each.count if each else PredictedMeasured() for each in traffic],
                "{:.0f}".format,
            )
        )
    exposed, hidden = (
        tuple(ComparisonCell("", DASH if value is None else _three_digits(value * 1e3)) for value in values)
        for values in ([row.communication_exposed_s for row in rows], [row.communication_hidden_s for row in rows])
    )
    verdicts = tuple(
        ComparisonCell(
            "", {True: say(en="yes", fr="oui"), False: say(en="NO", fr="NON"), None: DASH}[row.exact], row.exact
        )
        for row in rows
    )
    return _known(
        *lines,
        ComparisonLine(say(en="bytes equal", fr="octets égaux"), verdicts),
        ComparisonLine(say(en="exposed, ms", fr="exposée, ms"), exposed),
        ComparisonLine(say(en="hidden, ms", fr="recouverte, ms"), hidden),
    )


def _line(
    label: str, pairs: Sequence[PredictedMeasured], write: Callable[[float], str], judged: bool = False
) -> ComparisonLine:
    def cell(pair: PredictedMeasured) -> ComparisonCell:
        if pair.predicted is None and pair.measured is None:
            return ComparisonCell("", DASH)
        predicted, measured = (DASH if value is None else write(value) for value in (pair.predicted, pair.measured))
        return ComparisonCell(predicted, measured, pair.equal if judged else None)

    return ComparisonLine(label, tuple(cell(pair) for pair in pairs))


def _scaled(
    label: str,
    pairs: Sequence[PredictedMeasured],
    base: int = 1024,
    prefixes: Sequence[str] = (),
    judged: bool = False,
) -> ComparisonLine:
    """A line in the largest unit in which its largest figure is at least 1."""
    prefixes = prefixes or byte_units()
    largest = max((abs(v) for pair in pairs for v in (pair.predicted, pair.measured) if v is not None), default=0)
    power = max((n for n in range(len(prefixes)) if largest >= base**n), default=0)
    joined = f"{label} {prefixes[power]}" if label.endswith(",") else f"{prefixes[power]}{label}"
    return _line(joined, pairs, lambda value: _three_digits(value / base**power), judged)


def _three_digits(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    digits = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.005 else "~0"
    return localized(digits)


def _known(*lines: ComparisonLine) -> tuple[ComparisonLine, ...]:
    return tuple(line for line in lines if any({cell.predicted, cell.measured} - {"", DASH} for cell in line.cells))


PREDICTED, MEASURED, WRONG = "cyan", "bold", "bold red"
BAR_WIDTH = 24
LONGEST_FIGURE = 18
"""Characters; a longer cell is words, which may be folded."""


class _Fitted:
    """Table that takes as many runs side by side as the console has room for."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        content = grid(self.comparison)
        if sum(_widths(content)) > options.max_width:
            content = grid(self.comparison, compact=True)
        label_width, *widths = _widths(content)
        start = 0
        while start < len(widths):
            stop = start + 1
            while stop < len(widths) and label_width + sum(widths[start : stop + 1]) <= options.max_width:
                stop += 1
            yield from _tables(content, range(start, stop))
            start = stop
        yield Text(say(en="each cell: predicted | measured", fr="chaque case : prédit | mesuré"), style="dim")
        for note in content.notes:
            yield Text(visible(note), style="yellow")


def _widths(content: ComparisonGrid) -> list[int]:
    """Characters of the column of labels and of each run's column, the space after it included."""
    lines = [line for section in content.sections for line in section.lines]
    columns = [
        max(*(len(word) for word in title.split()), *(len(_cell_text(line.cells[index]).plain) for line in lines)) + 1
        for index, title in enumerate(content.titles)
    ]
    return [max(len(line.label) for line in lines) + 1, *columns]


def _tables(content: ComparisonGrid, chosen: range) -> Iterator[Table | Text]:
    """One table per section, all with the same columns; the titles stand above the first."""
    label_width, *widths = _widths(content)
    for number, section in enumerate(content.sections):
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=number == 0, header_style="bold")
        table.add_column("", width=label_width - 1, no_wrap=True)
        for index in chosen:
            title = Text(visible(content.titles[index]), justify="right")
            table.add_column(title, justify="right", width=widths[index] - 1, vertical="bottom", no_wrap=False)
        for line in section.lines:
            table.add_row(Text(visible(line.label)), *(_cell_text(line.cells[index]) for index in chosen))
        if number:
            yield Text(section.heading, style="italic")
        yield table


def _cell_text(cell: ComparisonCell) -> Text:
    """Predicted and measured in one cell; unequal bytes are marked by a sign as well as by colour."""
    measured = WRONG if cell.equal is False else MEASURED
    if not cell.predicted:
        return Text(visible(cell.measured), style=measured)
    separator = "≠" if cell.equal is False else "|"
    return Text.assemble((cell.predicted, PREDICTED), (separator, "dim"), (cell.measured, measured))


def comparison_table(comparison: Comparison) -> _Fitted:
    """The table as something that rich prints."""
    return _Fitted(comparison)


def footprint_table(config: RunConfig, footprint: Footprint) -> Group:
    """One predicted footprint, quantity by quantity."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column("")
    table.add_column("", justify="right")
    memory = footprint.memory
    for name in CATEGORIES:
        table.add_row(category_label(name), format_bytes(memory.category(name)))
    table.add_row(
        say(en="model states together", fr="états du modèle, ensemble"),
        format_bytes(memory.states_bytes),
        style="bold",
    )
    moment = f" ({phase_label(visible(memory.peak_moment))})" if memory.peak_moment else ""
    table.add_row(category_label("peak") + moment, format_bytes(memory.peak_bytes), style="bold")
    for label, num_bytes in (
        (needed_label(), memory.needed_bytes if memory.device_bytes is not None else None),
        (say(en="reserved by the allocator", fr="réservé par l’allocateur"), memory.reserved_bytes),
        (say(en="as nvidia-smi shows it", fr="vu par nvidia-smi"), memory.device_bytes),
        (say(en="in host memory (RAM)", fr="en mémoire hôte (RAM)"), memory.host_bytes),
        (say(en="on NVMe", fr="sur NVMe"), memory.nvme_bytes),
    ):
        if num_bytes:
            table.add_row(label, format_bytes(num_bytes))
    for traffic in footprint.communication:
        calls = "" if traffic.count is None else say(en=f", calls: {traffic.count}", fr=f", appels : {traffic.count}")
        table.add_row(
            f"{traffic.collective} ({traffic.group} ×{traffic.group_size}{calls})",
            format_bytes(traffic.message_bytes) + _how_often(traffic.every_steps),
        )
    table.add_row(say(en="parameters of the model", fr="paramètres du modèle"), format_count(footprint.parameters))
    table.add_row(
        say(en="computation", fr="calcul"), format_count(footprint.step_flops, "FLOP") + say(en="/step", fr="/pas")
    )
    heading = say(
        en=f"{config.title}: predicted for rank {footprint.rank}",
        fr=f"{config.title} : prédit pour le rang {footprint.rank}",
    )
    return Group(Text(visible(heading), style="bold"), table)


def _how_often(every_steps: int) -> str:
    """After the bytes of a message: in which steps it is sent."""
    if every_steps == 1:
        return say(en="/step", fr="/pas")
    return say(en=f" every {every_steps} steps", fr=f" tous les {every_steps} pas")


def parts_table(parts: Iterable[FootprintTable]) -> Group:
    """The small tables of a sheet, one below the other; shares as bars of blocks, beside their figures."""
    shown: list[Table | Text] = []
    for part in parts:
        shown.append(Text(("\n" if shown else "") + part.heading, style="bold"))
        table = Table(box=None, padding=(0, 1, 0, 0), show_header=bool(part.columns), header_style="dim")
        width = max(map(len, part.rows), default=0)
        for number in range(width):
            title = part.columns[number] if number < len(part.columns) else ""
            words = number == 0 or any(len(row[number]) > LONGEST_FIGURE for row in part.rows)
            table.add_column(title, justify="left" if words else "right", no_wrap=not words)
            if number == 0 and part.shares:
                table.add_column("", width=BAR_WIDTH, no_wrap=True)
        for number, row in enumerate(part.rows):
            bar = [_bar(part.shares[number], part.styles[number] if part.styles else "")] if part.shares else []
            cells = [Text(cell) for cell in row]
            table.add_row(*cells[:1], *bar, *cells[1:])
        shown += [table, *(Text(note) for note in part.notes)]
    return Group(*shown)


def _bar(share: float, category: str) -> Text:
    """A bar of whole and half blocks; at least half a block for what is not nothing."""
    halves = max(round(2 * BAR_WIDTH * share), 1 if share > 0 else 0)
    style = CATEGORY_STYLES.get(category)  # type: ignore[call-overload]
    return Text("█" * (halves // 2) + "▌" * (halves % 2), style=style.color if style else "")


def _joined(cell: ComparisonCell, separator: str) -> str:
    if not cell.predicted:
        return cell.measured
    return f"{cell.predicted} {'≠' if cell.equal is False else separator} {cell.measured}"


def markdown(comparison: Comparison) -> str:
    """The comparison as a Markdown table."""
    content = grid(comparison)
    lines = [
        "| " + " | ".join(["", *map(markdown_safe, content.titles)]) + " |",
        "|" + "---|" + "--:|" * len(content.titles),
    ]
    for section in content.sections:
        lines.append("| **" + markdown_safe(section.heading) + "** |" + " |" * len(content.titles))
        for line in section.lines:
            cells = [markdown_safe(line.label), *(markdown_safe(_joined(cell, "|")) for cell in line.cells)]
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", markdown_safe(say(en="Each cell: predicted | measured.", fr="Chaque case : prédit | mesuré."))]
    lines += [f"- {markdown_safe(note)}" for note in content.notes]
    return "\n".join(lines) + "\n"


def html_table(comparison: Comparison) -> str:
    """The comparison as an HTML table."""
    content = grid(comparison)
    caption = say(en="Each cell: predicted | measured", fr="Chaque case : prédit | mesuré")
    parts = ["<table><caption>", safe(caption), "</caption><thead><tr><th></th>"]
    parts += [f'<th scope="col">{safe(title)}</th>' for title in content.titles]
    parts.append("</tr></thead><tbody>")
    for section in content.sections:
        parts.append(
            f'<tr><th colspan="{len(content.titles) + 1}" style="text-align:left">{safe(section.heading)}</th></tr>'
        )
        for line in section.lines:
            parts.append(f'<tr><th scope="row" style="text-align:left;font-weight:normal">{safe(line.label)}</th>')
            parts += [f"<td>{safe(_joined(cell, '|'))}</td>" for cell in line.cells]
            parts.append("</tr>")
    parts.append("</tbody></table>")
    if content.notes:
        parts += ["<ul>", *(f"<li>{safe(note)}</li>" for note in content.notes), "</ul>"]
    return "".join(parts)
