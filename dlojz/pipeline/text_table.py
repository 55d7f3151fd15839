"""A timeline as plain text: one row per rank, one column per quantum of time, for terminals and for test reports.

Layer 2. Invariant: a column is the same length of time everywhere; where that cannot be kept exactly (times without a
common quantum, or too many of them), each column tells what the rank does in its middle, and the text says so.

How an action is written: its kind and its micro-batch (`F3`, `B0`), `-` for as long as it lasts, `.` for idle time;
before them the chunk (`a`, `b` …) where a rank holds several, and `d` or `u` for the direction where there are two;
behind them the token slice. An overlapped forward and backward is written `F4&B0`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

from dlojz.pipeline.action import Action
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.timeline import Timeline
from dlojz.schema import LabError
from dlojz.text import say

DEFAULT_WIDTH = 110
LEAST_WIDTH = 40
MOST_BLOCKS = 8
"""A drawing of more blocks than these is no longer read: it is made coarser instead."""
_FINEST = 1000
"""Quanta that one time unit is cut into at most, when a common one is looked for."""


def text_table(timeline: Timeline, width: int = DEFAULT_WIDTH) -> str:
    """Draw a timeline in plain text.

    Args:
        timeline: simulated or measured.
        width: characters of a line, at least 40; a longer drawing goes on in a further block of lines below.

    Returns:
        Lines, without colours; empty for a schedule without actions.

    Raises:
        LabError: for a width in which nothing could be read.
    """
    if width < LEAST_WIDTH:
        raise LabError(
            say(
                en=f"the drawing needs at least {LEAST_WIDTH} columns, but {width} were given.",
                fr=f"le dessin demande au moins {LEAST_WIDTH} colonnes, mais {width} ont été données.",
            )
        )
    if not timeline.schedule.actions or timeline.makespan <= 0:
        return ""
    margin = len(_margin(timeline.schedule.ranks - 1))
    room = width - margin
    quantum = common_quantum(timeline)
    if quantum is not None:
        columns = round(timeline.makespan / quantum)
        labels = labels_of(timeline.schedule)
        cell = _cell_width(timeline, labels, quantum)
        per_block = max(room // cell, 1)
        if columns <= per_block * MOST_BLOCKS and cell <= room:
            per_block = -(-columns // -(-columns // per_block))  # as many in each block, rather than a stub at the end
            return "\n".join(_blocks(timeline, labels, quantum, cell, per_block))
    return "\n".join(_coarse(timeline, room))


def labels_of(schedule: Schedule) -> list[str]:
    """How each action is written in a drawing, in the order of `schedule.actions`; as short as it stays clear."""
    chunk: dict[tuple[int, int], int] = {}
    for pipe, stages in enumerate(schedule.placement):
        seen: dict[int, int] = {}
        for stage, rank in enumerate(stages):
            chunk[pipe, stage] = seen.get(rank, 0)
            seen[rank] = chunk[pipe, stage] + 1
    several = any(chunk.values())
    return [
        "&".join(_label(element, schedule, chunk if several else None) for element in action.elements)
        for action in schedule.actions
    ]


def _label(action: Action, schedule: Schedule, chunk: dict[tuple[int, int], int] | None) -> str:
    direction = "du"[action.pipe] if schedule.pipes > 1 else ""
    letter = _letter(chunk[action.pipe, action.stage]) if chunk else ""
    behind = f".{action.token_slice}" if schedule.token_slices > 1 else ""
    return f"{direction}{letter}{action.kind}{action.micro_batch}{behind}"


def _letter(chunk: int) -> str:
    return chr(ord("a") + chunk) if chunk < 26 else f"[{chunk}]"


def common_quantum(timeline: Timeline) -> float | None:
    """The longest time of which all starts and ends are whole multiples; None where there is none to speak of."""
    marks: set[Fraction] = set()
    for times in (timeline.starts, timeline.ends):
        for time in set((times - timeline.start).round(9).tolist()):
            exact = Fraction(time).limit_denominator(_FINEST)
            if abs(float(exact) - time) > 1e-7 * max(timeline.makespan, 1.0):
                return None
            marks.add(exact)
    quantum = Fraction(0)
    for mark in marks:
        quantum = _common(quantum, mark)
    return float(quantum) if quantum else None


def _common(one: Fraction, other: Fraction) -> Fraction:
    while other:
        one, other = other, one % other
    return one


def _cell_width(timeline: Timeline, labels: Sequence[str], quantum: float) -> int:
    """Characters of a column: every label and a blank (or the next `-`) fit into the columns of its action."""
    most = 2
    for label, length in zip(labels, timeline.durations.tolist(), strict=True):
        columns = round(length / quantum)
        if columns:
            most = max(most, -(-(len(label) + 1) // columns))
    return most


def _blocks(timeline: Timeline, labels: Sequence[str], quantum: float, cell: int, per_block: int) -> Iterator[str]:
    """The rows, cut into blocks that fit the width, each under a scale of time."""
    columns = round(timeline.makespan / quantum)
    rows = [_row(timeline, labels, quantum, cell, rank, columns) for rank in range(timeline.schedule.ranks)]
    blank = " " * len(_margin(timeline.schedule.ranks - 1))
    for first in range(0, columns, per_block):
        if first:
            yield ""
        last = min(first + per_block, columns)
        yield (blank + _scale(timeline, quantum, cell, first, last)).rstrip()
        for rank, row in enumerate(rows):
            yield (_margin(rank, len(blank)) + row[first * cell : last * cell]).rstrip()


def _row(timeline: Timeline, labels: Sequence[str], quantum: float, cell: int, rank: int, columns: int) -> str:
    row = [("." + " " * (cell - 1))] * columns
    text = list("".join(row))
    part = timeline.of_rank(rank)
    for number in range(part.start, part.stop):
        first = round((float(timeline.starts[number]) - timeline.start) / quantum)
        last = round((float(timeline.ends[number]) - timeline.start) / quantum)
        if last == first:  # an action without duration has no column
            continue
        length = (last - first) * cell
        lasting = "-" * (length - len(labels[number]) - 1) + " "
        text[first * cell : last * cell] = list((labels[number] + lasting)[:length])
    return "".join(text)


def _scale(timeline: Timeline, quantum: float, cell: int, first: int, last: int) -> str:
    """Times above the columns, as many as there is room for."""
    step = max(1, -(-8 // cell))
    return "".join(
        f"{column * quantum:g}".ljust(cell * min(step, last - column)) for column in range(first, last, step)
    )


def _coarse(timeline: Timeline, room: int) -> Iterator[str]:
    """One letter per column: the kind of what the rank does in the column's middle."""
    quantum = timeline.makespan / room
    yield say(
        en=f"one column = {quantum:.3g} (what the rank does in its middle; narrower actions may not show)",
        fr=f"une colonne = {quantum:.3g} (ce que fait le rang en son milieu ; des actions courtes peuvent manquer)",
    )
    widest = len(_margin(timeline.schedule.ranks - 1))
    for rank in range(timeline.schedule.ranks):
        part = timeline.of_rank(rank)
        starts, ends = timeline.starts[part], timeline.ends[part]
        middles = [timeline.start + (column + 0.5) * quantum for column in range(room)]
        at = (starts.searchsorted(middles, side="right") - 1).tolist()
        kinds = [action.kind for action in timeline.schedule.orders[rank]]
        yield _margin(rank, widest) + "".join(
            kinds[number] if number >= 0 and middle < ends[number] else "."
            for number, middle in zip(at, middles, strict=True)
        )


def _margin(rank: int, width: int = 0) -> str:
    return f"{say(en='rank', fr='rang')} {rank} ".ljust(width)
