"""Table of cells as text, terminal table, HTML and Markdown, and the escaping that each of them needs."""

from __future__ import annotations

import html
import re
import textwrap
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from dlojz.base.language import colon, say

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.padding import Padding

MAX_CHARACTERS = 64 * 1024
BAR_CHARACTERS = 24
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
# An underscore within a word begins no emphasis (CommonMark, rule 2).
_MARKDOWN_SIGNS = re.compile(r"([\\`*{}\[\]()#!|~$]|(?<![^\W_])_|_(?![^\W_]))")

_BEFORE_UNIT = re.compile(r"(?<=\d) (?=(?:[kKMGTPE]i?[Bo]?|[Bo]|min|m?s|%)(?!\w))")
"""Space between a number and its unit, where a browser must not break the line."""


def without_escapes(text: str) -> str:
    """Take a terminal's colours and cursor marks out of a text.

    >>> without_escapes("only \x1b[1mthis\x1b[0m")
    'only this'
    """
    return _ESCAPES.sub("", text)


def visible(text: object) -> str:
    """Write control and direction marks of a text as their codes, and cap its length."""
    cut = str(text)[:MAX_CHARACTERS]
    return "".join(f"\\u{ord(sign):04x}" if unicodedata.category(sign) in ("Cc", "Cf", "Cs") else sign for sign in cut)


def safe(text: object) -> str:
    """Escape a text for HTML; no value is shown in a notebook without it."""
    return html.escape(visible(text), quote=True)


def markdown_safe(text: object) -> str:
    """Escape a text for Markdown, inside a table too."""
    # First the signs, then HTML, whose quotes mean nothing outside of a tag.
    return html.escape(_MARKDOWN_SIGNS.sub(r"\\\1", visible(text)), quote=False)


def titles(en: str, fr: str) -> tuple[str, ...]:
    """Titles of columns in the reader's language, written with `;` between them."""
    return tuple(title.strip() for title in say(en=en, fr=fr).split(";"))


class Lines(str):
    """Cell of several lines; in another cell a line break is written as its code."""

    __slots__ = ()


def _lines(cell: str) -> list[str]:
    return cell.split("\n") if isinstance(cell, Lines) else [cell]


def _html(cell: str) -> str:
    return "<br>".join(safe(_BEFORE_UNIT.sub("\u00a0", line)) for line in _lines(cell))


def _style(side: str) -> str:
    return ' style="text-align:left"' if side == "l" else ""


@dataclass(frozen=True)
class Table:
    """Titles and rows of cells that are ready to show.

    Args:
        head: column titles; all empty where there is nothing to say.
        rows: cells, as many as there are titles (`Lines`: of several lines); a single cell is a heading of the rows
            below it.
        caption: a sentence above.
        align: `l` or `r` for each column, the last letter for all further ones: words stand left, numbers right.
        whole: number of columns, from the left, that a terminal never folds; of a column of numbers it folds the title
            alone.
        shares: bars, one for each row, from 0 to 1, after the first column; HTML and terminals show them.
        colors: CSS colour of each bar, grey by default; without bars, of each row's first cell in a terminal.
        notes: sentences below.
        links: address behind the first cell of each row; HTML alone leads there.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    align: str = "lr"
    whole: int = 0
    shares: tuple[float, ...] = ()
    colors: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def _sides(self) -> str:
        return (self.align + self.align[-1] * len(self.head))[: len(self.head)]

    def _names_and_values(self) -> bool:
        """Whether it has two columns without titles."""
        return len(self.head) == 2 and not any(self.head)

    def _is_heading(self, row: tuple[str, ...]) -> bool:
        return len(row) == 1 < len(self.head)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [self.head] if any(self.head) else []
        for row in self.rows:
            # A row whose cells have several lines becomes several rows of text.
            rows += zip_longest(*(map(visible, _lines(cell)) for cell in row), fillvalue="")
        cells = [row for row in rows if not self._is_heading(row)]
        widths = [max((len(row[column]) for row in cells), default=0) for column in range(len(self.head))]
        text = [
            "  ".join(
                cell.ljust(width) if side == "l" else cell.rjust(width)
                for cell, width, side in zip(row, widths, self._sides(), strict=False)
            ).rstrip()
            for row in rows
        ]
        above = [self.caption, ""][: 2 if text else 1] if self.caption else []
        return "\n".join([*above, *text, *self.notes])

    __repr__ = __str__

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        from rich.table import Table as Terminal
        from rich.text import Text

        if self.caption:
            yield Text(visible(self.caption), style="bold")
        # A bar takes its characters and two blanks.
        width = options.max_width - (BAR_CHARACTERS + 2 if self.shares else 0)
        titles, between, minimum_width = self._fitted(width)
        if minimum_width > width and len(self.head) > 2 and any(self.head):
            yield from self._blocks()
            yield from (Text(visible(note)) for note in self.notes)
            return
        terminal_table = Terminal(box=None, padding=(0, between, 0, 0), header_style="bold", show_header=any(self.head))
        for index, (title, side) in enumerate(zip(titles, self._sides(), strict=True)):
            one_line = side == "r" or index < self.whole
            terminal_table.add_column(
                Text(title),
                justify="right" if side == "r" else "left",
                overflow="ellipsis" if one_line else "fold",
                no_wrap=one_line,
                style="bold" if self._names_and_values() and not index else "",
            )
            if self.shares and not index:
                terminal_table.add_column("", width=BAR_CHARACTERS, no_wrap=True)
        for number, row in enumerate(self.rows):
            texts = ("\n".join(map(visible, _lines(cell))) for cell in row)
            cells = [Text(text, style="italic" if self._is_heading(row) else "") for text in texts]
            color = self.colors[number] if self.colors else ""
            if self.shares:
                # Half characters; any share above 0 shows one.
                halves = max(round(2 * BAR_CHARACTERS * self.shares[number]), 1 if self.shares[number] > 0 else 0)
                cells.insert(1, Text("█" * (halves // 2) + "▌" * (halves % 2), style=color))
            elif color:
                cells[0].stylize(color)
            terminal_table.add_row(*cells)
        yield terminal_table
        yield from (Text(visible(note)) for note in self.notes)

    def _blocks(self) -> Iterator[Padding]:
        """Write one block per row, a line per cell, for a terminal in which columns would break words."""
        from rich.padding import Padding
        from rich.text import Text

        for number, row in enumerate(self.rows):
            texts = ["\n".join(map(visible, _lines(cell))) for cell in row]
            style = "italic" if self._is_heading(row) else "bold"
            yield Padding(Text(texts[0], style=style), (1 if number else 0, 0, 0, 0), expand=False)
            for title, text in zip(self.head[1:], texts[1:], strict=False):
                line = f"{visible(title)}{colon()}{text}" if title else text
                if text:
                    yield Padding(Text(line), (0, 0, 0, 2), expand=False)

    def _fitted(self, width: int) -> tuple[list[str], int, int]:
        """Write the titles, and choose the spaces between columns: 2, or 1 where a terminal is very narrow.

        The third is the width that the table needs, so that no word is broken. Where the table is wider than the
        terminal, a title of numbers is folded to the width of its column.
        """
        from rich.cells import cell_len

        titles = [visible(title) for title in self.head]
        rows = [row for row in self.rows if not self._is_heading(row)]
        columns = [[visible(line) for row in rows for line in _lines(row[index])] for index in range(len(titles))]
        widths = [max(map(cell_len, [title, *column])) for title, column in zip(titles, columns, strict=True)]
        if sum(widths) + 2 * len(widths) <= width:
            return titles, 2, width
        for index, (column, side) in enumerate(zip(columns, self._sides(), strict=True)):
            if side == "r":
                title = titles[index].replace(" / ", "\u00a0/ ")  # a unit's stroke stays at its word
                # As wide as its widest number, or word of its title.
                widths[index] = max(1, *map(cell_len, [*column, *title.split(" ")]))
                titles[index] = textwrap.fill(title, widths[index], break_on_hyphens=False)
            elif index >= self.whole:
                # Folded down to its longest word.
                widths[index] = max(map(cell_len, " ".join([titles[index], *column]).split()), default=0)
        between = 2 if sum(widths) + 2 * len(widths) <= width else 1
        return titles, between, sum(widths) + between * (len(widths) - 1)

    def _repr_html_(self) -> str:
        # A notebook's own style sets cells right: words and names are told to stand left.
        left_css = "text-align:left"
        names = self._names_and_values()
        sides = "ll" if names else self._sides()
        opening, closing = f'<th scope="row" style="{left_css}{"" if names else ";font-weight:normal"}">', "</th>"
        # The first cell is a row's header only where it is a word with numbers beside it.
        if not names and ("r" not in sides or sides[0] == "r"):
            opening, closing = f"<td{_style(sides[:1])}>", "</td>"
        titles = [
            f'<th scope="col"{_style(side)}>{safe(title)}</th>' for title, side in zip(self.head, sides, strict=True)
        ]
        if self.shares:
            titles.insert(1, "<td></td>")
        rows = []
        around = (opening, closing)
        for number, (label, *cells) in enumerate(self.rows):
            opening, closing = around
            if self.links:
                opening, closing = f'{opening}<a href="{safe(self.links[number])}">', f"</a>{closing}"
            if self._is_heading((label, *cells)):
                rows.append(f'<th colspan="{len(titles)}" style="{left_css}">{safe(label)}</th>')
                continue
            bar = ""
            if self.shares:
                color = (self.colors[number] if self.colors else "") or "grey"
                bar = (
                    f'<td aria-hidden="true" style="width:8em"><div style="background:{safe(color)};height:.7em;'
                    f'width:{100 * self.shares[number]:.1f}%"></div></td>'
                )
            aligned_cells = zip_longest(cells, sides[1:], fillvalue="")
            cells_html = "".join(f"<td{_style(side)}>{_html(cell)}</td>" for cell, side in aligned_cells)
            rows.append(f"{opening}{_html(label)}{closing}{bar}{cells_html}")
        caption = f'<caption style="{left_css};font-weight:bold">{safe(self.caption)}</caption>' if self.caption else ""
        head = f"<thead><tr>{''.join(titles)}</tr></thead>" if any(self.head) else ""
        body = "".join(f"<tr>{row}</tr>" for row in rows)
        notes = "".join(f"<p>{safe(note)}</p>" for note in self.notes)
        return f"<table>{caption}{head}<tbody>{body}</tbody></table>{notes}"

    def markdown(self) -> str:
        """Write the table in Markdown, its caption above and its notes below, without a final line break."""
        rules = "".join("--:|" if side == "r" else "---|" for side in self._sides())
        blank = " |" * (len(self.head) - 1)
        lines = [
            f"| **{markdown_safe(row[0])}** |{blank}" if self._is_heading(row) else _markdown_line(row)
            for row in self.rows
        ]
        caption = [markdown_safe(self.caption), ""] if self.caption else []
        notes = ["", *(f"- {markdown_safe(note)}" for note in self.notes)] if self.notes else []
        return "\n".join([*caption, _markdown_line(self.head), f"|{rules}", *lines, *notes])


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join("<br>".join(map(markdown_safe, _lines(cell))) for cell in cells) + " |"


def facts(*pairs: tuple[str, str], caption: str = "") -> Table:
    """Make a table of names and values; what has no value is left out."""
    return Table(("", ""), tuple(pair for pair in pairs if pair[1]), caption, align="l", whole=1)


class Tabular:
    """Base of an object that is shown as a table, in text, in a terminal and in a notebook."""

    def table(self) -> Table:
        """Lay it out."""
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self.table())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self.table()._repr_html_()


def tables_html(tables: Iterable[Table]) -> str:
    """Write tables below one another as HTML."""
    return "".join(f'<div style="margin-top:1em">{table._repr_html_()}</div>' for table in tables)
