"""Table of cells as text, terminal table, HTML and Markdown, and the escaping that each of them needs.

The ONE function through which texts reach a notebook.

No value is shown in a notebook without going through `safe`.

One small table for all that shows one: text, a terminal's table, HTML and Markdown of the same rows.

Every cell is escaped for where it goes; the sizes of columns follow what they hold.
"""

from __future__ import annotations

import html
import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dlojz.base.language import say

if TYPE_CHECKING:
    import rich.table

MAX_CHARACTERS = 64 * 1024
_MARKDOWN_SIGNS = re.compile(r"([\\`*_{}\[\]()#!|~$])")


def visible(text: object) -> str:
    """Text without hidden characters: control and direction marks are written as their code, length is capped."""
    cut = str(text)[:MAX_CHARACTERS]
    return "".join(f"\\u{ord(sign):04x}" if unicodedata.category(sign) in ("Cc", "Cf", "Cs") else sign for sign in cut)


def safe(text: object) -> str:
    """Text that HTML shows letter by letter."""
    return html.escape(visible(text), quote=True)


def markdown_safe(text: object) -> str:
    """Text that Markdown shows letter by letter, inside a table too."""
    # First the signs, then HTML: the # of an entity such as &#x27; is no heading.
    return html.escape(_MARKDOWN_SIGNS.sub(r"\\\1", visible(text)), quote=True)


def titles(*, en: str, fr: str) -> tuple[str, ...]:
    """Titles of columns in the reader's language, written with `|` between them."""
    return tuple(title.strip() for title in say(en=en, fr=fr).split("|"))


@dataclass(frozen=True)
class Table:
    """Titles and rows of cells that are ready to show.

    Args:
        head: titles of the columns; two empty ones where the rows are names and their values.
        rows: cells, as many as there are titles.
        caption: a sentence above.
        align: `l` or `r` for each column, the last letter for all further ones: words stand left, numbers right.
        whole: how many columns, from the left, a terminal never folds; numbers it folds nowhere.
    """

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    align: str = "lr"
    whole: int = 0

    def _sides(self) -> str:
        return (self.align + self.align[-1] * len(self.head))[: len(self.head)]

    def _names_and_values(self) -> bool:
        """Whether it has two columns without titles."""
        return len(self.head) == 2 and not any(self.head)

    def __str__(self) -> str:
        lines = (self.head, *self.rows) if any(self.head) else self.rows
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        text = [
            "  ".join(
                cell.ljust(width) if side == "l" else cell.rjust(width)
                for cell, width, side in zip(line, widths, self._sides(), strict=True)
            ).rstrip()
            for line in lines
        ]
        return "\n".join([self.caption, "", *text] if self.caption else text)

    __repr__ = __str__

    def __rich__(self) -> rich.table.Table:
        from rich.table import Table as Terminal
        from rich.text import Text

        shown = Terminal(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=any(self.head))
        shown.title = self.caption or None
        for place, (title, side) in enumerate(zip(self.head, self._sides(), strict=True)):
            one_line = side == "r" or place < self.whole
            shown.add_column(
                Text(visible(title)),
                justify="right" if side == "r" else "left",
                overflow="ellipsis" if one_line else "fold",
                no_wrap=one_line,
                style="bold" if self._names_and_values() and not place else "",
            )
        for row in self.rows:
            shown.add_row(*(Text(visible(cell)) for cell in row))
        return shown

    def _repr_html_(self) -> str:
        # A notebook's own style sets cells right: only where all columns are words they are told to stand left.
        words = ' style="text-align:left"' if "r" not in self._sides() else ""
        heads = f'<th scope="col"{words}>' if words else "<th>"
        head = "".join(f"{heads}{safe(title)}</th>" for title in self.head)
        body = "".join(f"<tr>{''.join(f'<td{words}>{safe(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        caption = f"<caption>{safe(self.caption)}</caption>" if self.caption else ""
        if self._names_and_values():
            named = "".join(
                f'<tr><th scope="row" style="text-align:left">{safe(name)}</th>'
                f'<td style="text-align:left">{safe(value)}</td></tr>'
                for name, value in self.rows
            )
            return f"<table>{caption}<tbody>{named}</tbody></table>"
        return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def markdown(self) -> str:
        """The table in Markdown, without a line's end; a title stands above it where there is one."""
        rules = "".join("--:|" if side == "r" else "---|" for side in self._sides())
        lines = [_markdown_line(self.head), f"|{rules}", *map(_markdown_line, self.rows)]
        return "\n".join([markdown_safe(self.caption), "", *lines] if self.caption else lines)


def _markdown_line(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(map(markdown_safe, cells)) + " |"
