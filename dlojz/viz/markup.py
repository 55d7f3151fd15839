"""The comparison as HTML and as Markdown, and the ONE function through which texts reach a notebook.

Layer 4. Invariant: no value is shown in a notebook without going through `safe`.
"""

from __future__ import annotations

import html
import re
import unicodedata
from typing import TYPE_CHECKING

from dlojz.text import say
from dlojz.viz.grid import Cell, grid

if TYPE_CHECKING:
    from dlojz.comparison import Comparison

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


def _joined(cell: Cell, separator: str) -> str:
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
