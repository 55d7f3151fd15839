"""What the ranks say, side by side: one column per rank, and the same as text.

Layer 5, pure. Invariant: every text is escaped; of what a cell displays only its text and its PNG are shown, never its
HTML; box and text say the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dlojz.ranks.diagnosis import listed
from dlojz.ranks.outcome import Answer
from dlojz.ranks.streams import TEXT_BYTES
from dlojz.text import language, say
from dlojz.units import format_bytes
from dlojz.viz.markup import safe

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07]*\x07")
_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")
_SHOWN_LINES = 500

Column = tuple[str, Sequence[Mapping[str, Any]], bool]


class Columns:
    """What a cell said on the ranks.

    Args:
        answers: of all ranks.
    """

    def __init__(self, answers: Iterable[Answer]) -> None:
        self._columns = list(_merged(answers))

    def __bool__(self) -> bool:
        return bool(self._columns)

    def __str__(self) -> str:
        return "\n".join(line for column in self._columns for line in _as_text(column))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns = "".join(_as_html(column) for column in self._columns)
        return f'<div style="display:flex;flex-wrap:wrap;gap:0.2em 1.5em;align-items:flex-start">{columns}</div>'


def _merged(answers: Iterable[Answer]) -> Iterable[Column]:
    """Columns with their headings; ranks that said the same share one."""
    said: list[tuple[Answer, list[int]]] = []
    for answer in answers:
        if not answer.parts:
            continue
        for first, ranks in said:
            if (first.parts, first.cut) == (answer.parts, answer.cut):
                ranks.append(answer.rank)
                break
        else:
            said.append((answer, [answer.rank]))
    for first, ranks in said:
        yield listed(ranks, french=language() == "fr"), first.parts, first.cut


def lines_of(text: str) -> list[str]:
    """Printed text as lines one can show: no colours, no bell, and of a progress bar its last state."""
    lines = _ESCAPES.sub("", text).split("\n")
    last_states = [line.rstrip("\r").rpartition("\r")[2].expandtabs(8) for line in lines]
    if last_states and not last_states[-1]:
        last_states.pop()
    if len(last_states) > _SHOWN_LINES:
        left_out = len(last_states) - _SHOWN_LINES
        note = say(en=f"… ({left_out} lines left out)", fr=f"… (lignes omises : {left_out})")
        last_states = [*last_states[: _SHOWN_LINES // 2], note, *last_states[-_SHOWN_LINES // 2 :]]
    return last_states


def _cut_note() -> str:
    kib = TEXT_BYTES // 2**10
    return say(
        en=f"… (cut: more than {kib} KiB in one cell)", fr=f"… (coupé : plus de {kib} Kio dans une seule cellule)"
    )


def _as_text(column: Column) -> list[str]:
    heading, parts, cut = column
    colon = say(en=":", fr=" :")
    lines = [line for part in parts for line in lines_of(part["text"])]
    if cut:
        lines.append(_cut_note())
    if len(lines) == 1:
        return [f"{heading}{colon} {lines[0]}"]
    return [f"{heading}{colon}", *(f"    {line}".rstrip() for line in lines)]


def _as_html(column: Column) -> str:
    heading, parts, cut = column
    pieces = []
    for part in parts:
        if part["kind"] == "image" and _BASE64.fullmatch(part["png"]):
            pieces.append(f'<img alt="{safe(part["text"])}" src="data:image/png;base64,{part["png"]}">')
        else:
            pieces.append(_preformatted(lines_of(part["text"])))
    if cut:
        pieces.append(_preformatted([_cut_note()]))
    style = "border-top:2px solid #0072B2;padding-top:0.2em;min-width:10em;max-width:100%;overflow-x:auto"
    return f'<div style="{style}"><div><b>{safe(heading)}</b></div>{"".join(pieces)}</div>'


def _preformatted(lines: Iterable[str]) -> str:
    text = "\n".join(safe(line) for line in lines)
    return f'<pre style="margin:0;text-align:left">{text}</pre>'


class Status:
    """The ranks as a table.

    Args:
        rows: by rank: `pid`, `device`, `memory_bytes` and `variables`.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = list(rows)

    def _table(self) -> list[list[str]]:
        heading = say(
            en="rank|process|device|own memory|variables", fr="rang|processus|périphérique|mémoire propre|variables"
        )
        return [
            heading.split("|"),
            *(
                [str(rank), str(row["pid"]), row["device"], format_bytes(row["memory_bytes"]), str(row["variables"])]
                for rank, row in enumerate(self.rows)
            ),
        ]

    def __str__(self) -> str:
        if not self.rows:
            return say(en="no ranks are running", fr="aucun rang n’est en cours")
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self.rows:
            return f"<p>{safe(str(self))}</p>"
        heading, *rows = self._table()
        head = "".join(f'<th scope="col">{safe(text)}</th>' for text in heading)
        body = "".join("<tr>" + "".join(f"<td>{safe(text)}</td>" for text in row) + "</tr>" for row in rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
