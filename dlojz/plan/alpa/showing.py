"""How the plans of this package show themselves: as a table in a terminal and in a notebook.

Layer 4. Invariant: both are made of the same rows, and every text reaches HTML through `dlojz.viz.markup.safe`.
"""

from __future__ import annotations

from dlojz.text import say


def number(value: float) -> str:
    """Six significant digits, thousands apart, with the marks of the reader's language.

    Example:
        >>> number(245765.05)
        '245,765'
    """
    written = f"{value:,.6g}"
    return say(en=written, fr=written.replace(",", "\u202f").replace(".", ","))


class ShownAsTable:
    """Base of a plan that has a title, columns and rows."""

    def title(self) -> str:
        """One sentence above the table."""
        raise NotImplementedError

    def columns(self) -> tuple[str, ...]:
        """Headings."""
        raise NotImplementedError

    def rows(self) -> list[tuple[str, ...]]:
        """Lines, as many cells as there are headings."""
        raise NotImplementedError

    def __str__(self) -> str:
        table = [self.columns(), *self.rows()]
        widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table
        ]
        return "\n".join([self.title(), "", *lines])

    def _repr_html_(self) -> str:
        from dlojz.viz.markup import safe

        head = "".join(f'<th scope="col" style="text-align:left">{safe(one)}</th>' for one in self.columns())
        body = "".join(
            "<tr>" + "".join(f'<td style="text-align:left">{safe(cell)}</td>' for cell in row) + "</tr>"
            for row in self.rows()
        )
        return (
            f"<table><caption>{safe(self.title())}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        )
