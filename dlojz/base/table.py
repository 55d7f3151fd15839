"""Table of cells as text, terminal table, HTML and Markdown, and the escaping that each of them needs."""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlojz.base.language import say

if TYPE_CHECKING:
    from rich.console import RenderableType

MAX_CHARACTERS = 64 * 1024
BAR_CHARACTERS = 24
_MARKDOWN_SIGNS = re.compile(r"([\\`*_{}\[\]()#!|~$])")


def visible(text: object) -> str:
    """Write control and direction marks of a text as their codes, and cap its length."""
    cut = str(text)[:MAX_CHARACTERS]
    return "".join(f"\\u{ord(sign):04x}" if unicodedata.category(sign) in ("Cc", "Cf", "Cs") else sign for sign in cut)


def safe(text: object) -> str:
    """Escape a text for HTML; no value is shown in a notebook without it."""
    return html.escape(visible(text), quote=True)


def markdown_safe(text: object) -> str:
    """Escape a text for Markdown, inside a table too."""
    # First the signs, then HTML: the # of an entity such as &#x27; is no heading.
    return html.escape(_MARKDOWN_SIGNS.sub(r"\\\1", visible(text)), quote=True)


def titles(*, en: str, fr: str) -> tuple[str, ...]:
    """Titles of columns in the reader's language, written with `|` between them."""
    return tuple(title.strip() for title in say(en=en, fr=fr).split("|"))


@dataclass(frozen=True)
class Table:
    """Titles and rows of cells that are ready to show.

    Args:
        head: column titles; all empty where there is nothing to say.
        rows: cells, as many as there are titles; a single cell is a heading of the rows below it.
        caption: a sentence above.
        align: `l` or `r` for each column, the last letter for all further ones: words stand left, numbers right.
        whole: number of columns, from the left, that a terminal never folds; it folds no column of numbers.
        shares: bars, one for each row, from 0 to 1, after the first column; HTML and terminals show them.
        colors: CSS colour of each bar; grey by default.
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
        lines = (self.head, *self.rows) if any(self.head) else self.rows
        cells = [line for line in lines if not self._is_heading(line)]
        widths = [max((len(line[column]) for line in cells), default=0) for column in range(len(self.head))]
        text = [
            "  ".join(
                cell.ljust(width) if side == "l" else cell.rjust(width)
                for cell, width, side in zip(line, widths, self._sides(), strict=False)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([*([self.caption, ""] if self.caption else []), *text, *self.notes])

    __repr__ = __str__

    def __rich__(self) -> RenderableType:
        from rich.console import Group
        from rich.table import Table as Terminal
        from rich.text import Text

        shown = Terminal(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=any(self.head))
        for place, (title, side) in enumerate(zip(self.head, self._sides(), strict=True)):
            one_line = side == "r" or place < self.whole
            shown.add_column(
                Text(visible(title)),
                justify="right" if side == "r" else "left",
                overflow="ellipsis" if one_line else "fold",
                no_wrap=one_line,
                style="bold" if self._names_and_values() and not place else "",
            )
            if self.shares and not place:
                shown.add_column("", width=BAR_CHARACTERS, no_wrap=True)
        for number, row in enumerate(self.rows):
            cells = [Text(visible(cell), style="italic" if self._is_heading(row) else "") for cell in row]
            if self.shares:
                halves = max(round(2 * BAR_CHARACTERS * self.shares[number]), 1 if self.shares[number] > 0 else 0)
                color = self.colors[number] if self.colors else ""
                cells.insert(1, Text("█" * (halves // 2) + "▌" * (halves % 2), style=color))
            shown.add_row(*cells)
        if not (self.caption or self.notes):
            return shown
        caption = [Text(visible(self.caption), style="bold")] if self.caption else []
        return Group(*caption, shown, *(Text(visible(note)) for note in self.notes))

    def _repr_html_(self) -> str:
        # A notebook's own style sets cells right: words and names are told to stand left.
        left = "text-align:left"
        names = self._names_and_values()
        style = f' style="{left}"' if names or "r" not in self._sides() else ""
        first, end = f'<th scope="row" style="{left}{"" if names else ";font-weight:normal"}">', "</th>"
        if (style and not names) or self._sides().startswith("r"):
            first, end = f"<td{style}>", "</td>"
        titles = [f'<th scope="col"{style}>{safe(title)}</th>' for title in self.head]
        if self.shares:
            titles.insert(1, "<td></td>")
        rows = []
        around = (first, end)
        for number, (label, *cells) in enumerate(self.rows):
            first, end = around
            if self.links:
                first, end = f'{first}<a href="{safe(self.links[number])}">', f"</a>{end}"
            if self._is_heading((label, *cells)):
                rows.append(f'<th colspan="{len(titles)}" style="{left}">{safe(label)}</th>')
                continue
            bar = ""
            if self.shares:
                color = (self.colors[number] if self.colors else "") or "grey"
                bar = (
                    f'<td aria-hidden="true" style="width:8em"><div style="background:{safe(color)};height:.7em;'
                    f'width:{100 * self.shares[number]:.1f}%"></div></td>'
                )
            rows.append(f"{first}{safe(label)}{end}" + bar + "".join(f"<td{style}>{safe(cell)}</td>" for cell in cells))
        caption = f'<caption style="{left};font-weight:bold">{safe(self.caption)}</caption>' if self.caption else ""
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
    return "| " + " | ".join(map(markdown_safe, cells)) + " |"


def tables_html(tables: Iterable[Table]) -> str:
    """Write tables below one another as HTML."""
    return "".join(f'<div style="margin-top:1em">{table._repr_html_()}</div>' for table in tables)
