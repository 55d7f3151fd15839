"""The comparison in a terminal: quantities as lines, runs as columns, each cell `predicted | measured`.

Layer 4. Invariant: no figure is ever cut; where the terminal is too narrow for all runs, the table goes on below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from dlojz.config import RunConfig
from dlojz.footprint import CATEGORIES, Footprint
from dlojz.text import say
from dlojz.units import format_bytes, format_count
from dlojz.viz.grid import Cell, Grid, grid
from dlojz.viz.markup import visible
from dlojz.viz.palette import CATEGORY_STYLES, category_label, phase_label

if TYPE_CHECKING:
    from dlojz.comparison import Comparison
    from dlojz.viz.footprint_sheet import Part

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


def _widths(content: Grid) -> list[int]:
    """Characters of the column of labels and of each run's column, the space after it included."""
    lines = [line for section in content.sections for line in section.lines]
    columns = [
        max(*(len(word) for word in title.split()), *(len(_cell_text(line.cells[index]).plain) for line in lines)) + 1
        for index, title in enumerate(content.titles)
    ]
    return [max(len(line.label) for line in lines) + 1, *columns]


def _tables(content: Grid, chosen: range) -> Iterator[Table | Text]:
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


def _cell_text(cell: Cell) -> Text:
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


def parts_table(parts: Iterable[Part]) -> Group:
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
