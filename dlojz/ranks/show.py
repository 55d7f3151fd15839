"""Show the answers of the ranks under a cell: their output side by side, and one error for all of them.

While the cell runs, the output so far stands in its place. At the end ranks with the same output or error share it; an
error that only follows from another rank's is left out. Every text is escaped; of what a cell displays, its text and
its PNG are shown, never its HTML.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Any

from dlojz.base.language import Sentences, format_bytes, language, say, shortest
from dlojz.base.table import Table, Tabular, safe, without_escapes
from dlojz.display.style import BLUE
from dlojz.processes.hang_diagnosis import listed
from dlojz.ranks.rank_setup import TEXT_BYTES

phrase = Sentences(Path(__file__).parent / "data" / "show.md")

NOT_DONE = "NotDone"
"""Class name of the exception of an exercise still to do; the class itself belongs to a room above."""
_CONSEQUENCES = ("peer", "lost")
_FIRST_LINE = 1  # the ranks get the cell without its first line, `%%ranks`


@dataclass(frozen=True)
class CellFailure:
    """Exception, end of process or interrupt that ended a cell on one rank.

    Args:
        name: class of the exception; empty where the process ended.
        kind: for a fault between ranks its kind; `exit` where the process ended, `limit` or `stopped` where it was
            interrupted by the time limit or by the student; else empty.
        lines: line number (0: not of this cell), text and function of the student's own lines that led to it.
        exit_code: of a process that ended; negative for a signal, None where it is not known.
    """

    name: str
    message: str = ""
    kind: str = ""
    lines: tuple[tuple[int, str, str], ...] = ()
    exit_code: int | None = 0
    limit_s: float = 0


@dataclass(frozen=True)
class CellAnswer:
    """Answer of one rank to a cell.

    Args:
        parts: what it printed and displayed, in order (see `Streams`).
        cut: whether output beyond the limit was dropped.
        trouble: what ended the cell, or None.
        last: the collective it called last, e.g. `all_reduce #3 [4] float32`.
        torn: whether the process group must be made anew.
        counts: collectives called, by group.
        kept: whether its variables are still there.
    """

    rank: int
    parts: tuple[Mapping[str, Any], ...] = ()
    cut: bool = False
    trouble: CellFailure | None = None
    last: str = ""
    torn: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    kept: bool = True


class RanksError(RuntimeError):
    """Error of a cell that failed on some ranks; the message names them.

    Args:
        hint: a sentence that may help.
    """

    def __init__(self, answers: Sequence[CellAnswer], hint: str = "") -> None:
        self.answers = tuple(answers)
        super().__init__("\n".join([*_sentences(answers), *([hint] if hint else [])]))

    def _render_traceback_(self) -> list[str]:
        # IPython shows this in place of a stack of frames, none of which is the student's.
        return str(self).splitlines()


def still_to_do(answers: Iterable[CellAnswer]) -> str:
    """Return the message of an exercise still to do, if nothing else was raised; else an empty text."""
    causes = _causes([answer.trouble for answer in answers if answer.trouble])
    if causes and all(trouble.name == NOT_DONE for trouble in causes):
        return causes[0].message
    return ""


def unknown_names(answers: Iterable[CellAnswer]) -> set[str]:
    """Return the names of which ranks raised a NameError."""
    troubles = [answer.trouble for answer in answers if answer.trouble and answer.trouble.name == "NameError"]
    return {trouble.message.split("'")[1] for trouble in troubles if trouble.message.count("'") >= 2}


def must_rejoin(answers: Sequence[CellAnswer]) -> bool:
    """Return whether the process group must be made anew before the next cell."""
    counts: dict[str, int] = {}
    for answer in answers:
        kind = answer.trouble.kind if answer.trouble else ""
        if answer.torn or kind in ("exit", "limit", "stopped"):
            return True
        # Members of a group have called it equally often; who is no member knows nothing of it.
        if any(counts.setdefault(group, count) != count for group, count in answer.counts.items()):
            return True
    return False


def _causes(troubles: Sequence[CellFailure]) -> list[CellFailure]:
    causes = [trouble for trouble in troubles if trouble.kind not in _CONSEQUENCES]
    return causes or list(troubles)


def _ranks(ranks: Iterable[int]) -> str:
    words = listed(ranks, french=language() == "fr")
    return words[0].upper() + words[1:]


def _sentences(answers: Sequence[CellAnswer]) -> list[str]:
    causes = _causes([answer.trouble for answer in answers if answer.trouble])
    groups: dict[object, list[CellAnswer]] = {}
    for answer in answers:
        if answer.trouble in causes:
            # A fault between ranks has one message for all of them: they share a sentence, whatever their lines.
            key = answer.trouble.message if _between_ranks(answer.trouble) else answer.trouble
            groups.setdefault(key, []).append(answer)
    sentences = []
    for group in groups.values():
        troubles = [answer.trouble for answer in group if answer.trouble]
        sentences.append(_sentence(troubles[0], [answer.rank for answer in group]))
        sentences += dict.fromkeys(line for trouble in troubles for line in _own_lines(trouble))
    if any(_between_ranks(answer.trouble) for answer in answers):
        sentences += _last_calls(answers)
    return [*sentences, *_what_now(answers)]


def _between_ranks(trouble: CellFailure | None) -> bool:
    """Whether it is a fault between ranks, which each of them reports."""
    return trouble is not None and trouble.kind not in ("", "exit", "limit", "stopped")


def _sentence(trouble: CellFailure, ranks: list[int]) -> str:
    who = _ranks(ranks)
    plural = len(ranks) > 1
    if trouble.kind == "exit":
        return _ended(trouble, who, plural)
    if trouble.kind == "limit":
        return phrase("over the limit", who=who, seconds=_seconds(trouble))
    if trouble.kind == "stopped":
        return say(en=f"{who}: interrupted.", fr=f"{who} : exécution interrompue.")
    if _between_ranks(trouble):
        return trouble.message
    if trouble.name == "SystemExit":
        return say(en=f"{who} called", fr=f"{who} : appel de") + f" sys.exit({trouble.message})."
    return f"{who}{_colon()} " + ": ".join(part for part in (trouble.name, trouble.message) if part)


def _colon() -> str:
    return say(en=":", fr=" :")


def _seconds(trouble: CellFailure) -> str:
    return f"{shortest(trouble.limit_s)} s"


def _ended(trouble: CellFailure, who: str, plural: bool) -> str:
    code = trouble.exit_code
    stopped = phrase("processes ended") if plural else phrase("process ended")
    if trouble.limit_s:
        return phrase("deaf to the limit", who=who, seconds=_seconds(trouble), stopped=stopped)
    if trouble.name == "KeyboardInterrupt":
        return phrase("deaf to the interrupt", who=who, stopped=stopped)
    if code is None:
        return phrase("ended in the cell", who=who)
    if code >= 0:
        return phrase("exit code", who=who, code=code)
    try:
        name = Signals(-code).name
    except ValueError:
        name = str(-code)
    return phrase("killed" if name == "SIGKILL" else "signal", who=who, name=name)


def _own_lines(trouble: CellFailure) -> list[str]:
    word = say(en="line", fr="ligne")
    lines = []
    for number, text, function in trouble.lines:
        location = f"{word} {number + _FIRST_LINE}" if number else ""
        location += (", " if location and function else "") + (f"{function}()" if function else "")
        lines.append(f"    {location or '·'}{_colon()} {text}")
    return lines


def _last_calls(answers: Sequence[CellAnswer]) -> list[str]:
    none = say(en="no collective", fr="aucune communication collective")
    groups: dict[str, list[int]] = {}
    for answer in answers:
        groups.setdefault(answer.last or none, []).append(answer.rank)
    heading = say(en="Last call in this cell:", fr="Dernier appel dans cette cellule :")
    return [heading, *(f"    {_ranks(ranks).lower()}{_colon()} {call}" for call, ranks in groups.items())]


def _what_now(answers: Sequence[CellAnswer]) -> Iterator[str]:
    lost = [answer.rank for answer in answers if not answer.kept]
    survivors = [answer.rank for answer in answers if answer.kept]
    if lost:
        en = f"{_ranks(lost)} {'start' if len(lost) > 1 else 'starts'} anew, without any variables"
        fr = f"{_ranks(lost)} : nouveau départ, sans aucune variable"
        if survivors:
            en += f"; {listed(survivors, french=False)} {'keep theirs' if len(survivors) > 1 else 'keeps its own'}"
            fr += f" ; {listed(survivors, french=True)} : variables conservées"
        yield say(en=f"{en}.", fr=f"{fr}.")
    if must_rejoin(answers):
        yield phrase("process group anew")


_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")
_SHOWN_LINES = 500

Column = tuple[str, Sequence[Mapping[str, Any]], bool]


class CellOutput:
    """Output of a cell, one column per rank.

    Args:
        merged: whether ranks with the same output share a column.
    """

    def __init__(self, answers: Iterable[CellAnswer], *, merged: bool = True) -> None:
        groups: list[Iterable[CellAnswer]] = [answers] if merged else [[answer] for answer in answers]
        self._columns = [column for group in groups for column in _merged(group)]

    def __bool__(self) -> bool:
        return bool(self._columns)

    def __str__(self) -> str:
        return "\n".join(line for column in self._columns for line in _as_text(column))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        columns = "".join(_as_html(column) for column in self._columns)
        return f'<div style="display:flex;flex-wrap:wrap;gap:0.2em 1.5em;align-items:flex-start">{columns}</div>'


def _merged(answers: Iterable[CellAnswer]) -> Iterable[Column]:
    """Return columns with their headings; ranks with the same output share one."""
    columns: dict[str, tuple[CellAnswer, list[int]]] = {}
    for answer in answers:
        # A rank that printed nothing gets no column.
        if answer.parts:
            columns.setdefault(repr((answer.parts, answer.cut)), (answer, []))[1].append(answer.rank)
    for representative, ranks in columns.values():
        yield listed(ranks, french=language() == "fr"), representative.parts, representative.cut


_LIVE_BYTES_PER_S = 250_000
"""Of the output shown while a cell runs; a Jupyter server drops messages beyond 1 MB/s (`iopub_data_rate_limit`)."""


class LiveOutput:
    """Display of a cell's output while it runs, updated in place and at the end replaced by the final output.

    Each rank keeps a column of its own meanwhile: columns that part and join again as ranks print would jump.
    """

    def __init__(self) -> None:
        self._display_id = self._text = ""
        self._not_before_s = 0.0

    def __call__(self, answers: Sequence[CellAnswer]) -> None:
        """Show the output so far, if it has changed."""
        output = CellOutput(answers, merged=False)
        if output and time.monotonic() >= self._not_before_s and (text := output._repr_html_()) != self._text:
            # The longer the text, the longer the pause: at most _LIVE_BYTES_PER_S go out.
            self._not_before_s = time.monotonic() + len(text) / _LIVE_BYTES_PER_S
            self._text = text
            self._display(output)

    def settle(self, answers: Sequence[CellAnswer]) -> bool:
        """Replace what was shown by the final output; return False if nothing was shown."""
        if self._display_id:
            self._display(CellOutput(answers))
        return bool(self._display_id)

    def _display(self, output: CellOutput) -> None:
        from IPython.display import display

        update = bool(self._display_id)
        self._display_id = self._display_id or uuid.uuid4().hex
        display(output, display_id=self._display_id, update=update)


def lines_of(text: str) -> list[str]:
    """Split printed text into lines to show: no colours, no bell, and only the last state of a progress bar."""
    lines = without_escapes(text).split("\n")
    # A progress bar goes back with \r: what follows the last \r is what a terminal would show.
    last_states = [line.rstrip("\r").rpartition("\r")[2].expandtabs(8) for line in lines]
    if last_states and not last_states[-1]:
        last_states.pop()
    if len(last_states) > _SHOWN_LINES:
        left_out = len(last_states) - _SHOWN_LINES
        note = say(en=f"… ({left_out} lines left out)", fr=f"… (lignes omises : {left_out})")
        # The beginning and the end, half of the room each.
        last_states = [*last_states[: _SHOWN_LINES // 2], note, *last_states[-_SHOWN_LINES // 2 :]]
    return last_states


def _cut_note() -> str:
    kib = TEXT_BYTES // 2**10
    return phrase("output cut", kib=kib)


def _as_text(column: Column) -> list[str]:
    heading, parts, cut = column
    lines = [line for part in parts for line in lines_of(part["text"])]
    if cut:
        lines.append(_cut_note())
    if len(lines) == 1:
        return [f"{heading}{_colon()} {lines[0]}"]
    return [f"{heading}{_colon()}", *(f"    {line}".rstrip() for line in lines)]


def _as_html(column: Column) -> str:
    heading, parts, cut = column
    pieces = []
    for part in parts:
        # Nothing but base64 gets into the page unescaped.
        if part["kind"] == "image" and _BASE64.fullmatch(part["png"]):
            pieces.append(f'<img alt="{safe(part["text"])}" src="data:image/png;base64,{part["png"]}">')
        else:
            pieces.append(_preformatted(lines_of(part["text"])))
    if cut:
        pieces.append(_preformatted([_cut_note()]))
    style = f"border-top:2px solid {BLUE};padding-top:0.2em;min-width:10em;max-width:100%;overflow-x:auto"
    return f'<div style="{style}"><div><b>{safe(heading)}</b></div>{"".join(pieces)}</div>'


def _preformatted(lines: Iterable[str]) -> str:
    text = "\n".join(safe(line) for line in lines)
    return f'<pre style="margin:0;text-align:left">{text}</pre>'


class RankStatus(Tabular):
    """Table of the ranks' processes.

    Args:
        rows: by rank: `pid`, `device`, `memory_bytes` of the process and `variables`; threads of a process share a row.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = list(rows)

    def table(self) -> Table:
        """Lay it out, or say that no ranks are running."""
        if not self.rows:
            return Table((), (), say(en="no ranks are running", fr="aucun rang n’est en cours"))
        head = phrase.titles("columns of ranks")
        by_process: dict[int, list[int]] = {}
        for rank, row in enumerate(self.rows):
            by_process.setdefault(row["pid"], []).append(rank)
        rows = []
        for pid, ranks in by_process.items():
            row, counts = self.rows[ranks[0]], sorted({self.rows[rank]["variables"] for rank in ranks})
            names = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
            variables = "–".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
            rows.append((names, str(pid), row["device"], format_bytes(row["memory_bytes"]), variables))
        return Table(head, tuple(rows), align="r")
