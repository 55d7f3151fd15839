"""Read and write schedules and timelines: torch's CSV, Chrome's trace format, plain text.

**CSV**, as torch's pipeline runtime writes schedules: one row per rank, one cell per action (`2F0`, `3I1`, `0W2`,
`(1F1;1B0)OVERLAP_F_B`); an empty cell is a pause. `from_csv(to_csv(schedule))` has the same orders and placement. Text
from a file is parsed, checked whole, and refused in one sentence. Source: `torch.distributed.pipelining.schedules`
(2.13), `_dump_csv` and `_load_csv`, "compute_only".

**Trace** for Perfetto or chrome://tracing: slices, messages as flows, activation memory as counters, at the timeline's
own scale. Source: "Trace Event Format" (Chromium project): "X" complete events with `ts` and `dur` in microseconds,
"s"/"f" flow events that bind to the slice around them, "C" counters, "M" metadata.

**Text** for terminals and test reports: one row per rank, one column per quantum of time. Where there is no common
quantum, or too many columns, each column shows what the rank does in its middle, and the text says so. An action is
written as kind and micro-batch (`F3`, `B0`), `-` for as long as it lasts, `.` for idle time; before them the chunk
(`a`, `b` …) where a rank holds several, and `d` or `u` for the direction where there are two; behind them the token
slice. An overlapped forward and backward is written `F4&B0`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, say, significant
from dlojz.pipeline.schedule import COMPUTES, OVERLAPPED, UPDATE, Action, Schedule, parse_action
from dlojz.pipeline.simulator import Timeline, memory_curves
from dlojz.pipeline.validity import check

TEXTS = Sentences(Path(__file__).parent / "data" / "exchange_formats.md")

MAX_CHARACTERS = 4 * 1024 * 1024
MAX_RANKS = 1024
MAX_ACTIONS = 200_000
MAX_CELL = 64
_DERIVED = re.compile(r"\d{1,9}(SEND_F|RECV_F|SEND_B|RECV_B|UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}")
"""Communication cells of torch's own dump, which are skipped: they follow from the computations."""


def to_csv(schedule: Schedule) -> str:
    """Write a schedule as text, one row per rank; `torch_refusal` says whether torch can execute it."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for order in schedule.orders:
        writer.writerow(map(str, order))
    return text.getvalue()


def write_csv(schedule: Schedule, path: str | Path) -> Path:
    """Write `to_csv` to a file.

    Raises:
        LabError: if the file cannot be written.
    """
    return _write(path, to_csv(schedule), "the schedule", "l’ordonnancement")


def _write(path: str | Path, text: str, what_en: str, what_fr: str) -> Path:
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise TEXTS.refusal(
            "refusals", "not written", what_en=what_en, target=target, error=error, what_fr=what_fr
        ) from None
    return target


def from_csv(text: str, name: str = "custom") -> Schedule:
    """Parse a schedule; the rows in which a stage's actions stand tell the rank that holds it.

    Args:
        text: rows and cells as `to_csv` writes them; empty cells and torch's communication cells are read over.

    Returns:
        A schedule that can be executed: `validity.check` has passed it.

    Raises:
        LabError: for a cell that is no action (with its row and column), a stage on two ranks, a stage or a micro-batch
            left out, an empty or a too big text, or an order that cannot be executed.
    """
    schedule = read_csv(text, name)
    check(schedule)
    return schedule


def read_csv(text: str, name: str = "custom") -> Schedule:
    """Parse a schedule as `from_csv`, without checking its order: for an editor that shows `validity.problems`.

    Raises:
        LabError: as `from_csv`, but not for the order.
    """
    if len(text) > MAX_CHARACTERS:
        raise TEXTS.refusal("csv", "too long", characters=len(text), limit=MAX_CHARACTERS)
    orders = list(_orders(text))
    while orders and not orders[-1]:  # blank lines at the end of a file are no ranks
        orders.pop()
    if not orders:
        raise TEXTS.refusal("csv", "empty")
    for rank, order in enumerate(orders):
        if not order:
            raise TEXTS.refusal("csv", "empty row", row=rank + 1)
    placement = _placement(orders)
    elements = [element for order in orders for action in order for element in action.elements]
    return Schedule.of(
        name,
        orders,
        placement,
        _without_gap({e.micro_batch for e in elements}, "micro-batch", "micro-batch"),
        token_slices=_without_gap({e.token_slice for e in elements}, "token slice", "tranche de tokens"),
        # Updates of its own: then no optimizer waits at the end.
        barrier=not any(e.kind == UPDATE for e in elements),
        asynchronous=any(e.kind == UPDATE for e in elements),
    )


def load_csv(path: str | Path) -> Schedule:
    """Read a schedule from a CSV file, as `from_csv`; its name is that of the file.

    Raises:
        LabError: as `from_csv`, and if the file cannot be read as text.
    """
    target = Path(path)
    try:
        with target.open("rb") as file:
            # At most 4 bytes per character: enough to see that a text is too long. -sig: a spreadsheet's leading mark.
            text = file.read(4 * MAX_CHARACTERS + 1).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        cause = getattr(error, "strerror", None) or TEXTS.say("csv", "no text")
        raise TEXTS.refusal("csv", "cannot be read", path=str(target), cause=cause) from None
    return from_csv(text, target.stem or "custom")


def torch_refusal(schedule: Schedule) -> str | None:
    """Return why torch's pipeline runtime cannot execute a schedule, in one sentence; None where it can."""
    kinds = {element.kind for action in schedule.actions for element in action.elements}
    reasons = {
        "bidirectional": schedule.pipes > 1,
        "token slices": schedule.token_slices > 1,
        "asynchronous": schedule.asynchronous or UPDATE in kinds,
        "evictions": not kinds <= set(COMPUTES) | {OVERLAPPED},
    }
    return next((TEXTS.say("torch", key) for key, applies in reasons.items() if applies), None)


def _orders(text: str) -> Iterator[list[Action]]:
    total = 0
    try:
        for row, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
            # Refused while it is read: a huge file never lies in memory as actions.
            if row > MAX_RANKS:
                raise TEXTS.refusal("csv", "too large", limit=MAX_RANKS, noun=say(en="rows", fr="lignes"))
            order = [action for column, cell in enumerate(cells, start=1) if (action := _cell(cell, row, column))]
            total += len(order)
            if total > MAX_ACTIONS:
                raise TEXTS.refusal("csv", "too large", limit=MAX_ACTIONS, noun="actions")
            yield order
    except csv.Error as error:
        raise TEXTS.refusal("csv", "no csv", error=error) from None


def _cell(cell: str, row: int, column: int) -> Action | None:
    """The action of a cell; None for a pause, or for a communication, which follows from the computations."""
    cell = cell.strip()
    if not cell or _DERIVED.fullmatch(cell):
        return None
    try:
        # `\d` and int() also take digits of other scripts.
        if len(cell) > MAX_CELL or not cell.isascii():
            cell = cell[:MAX_CELL].encode("ascii", "backslashreplace").decode()
            return parse_action("…" + cell)  # which refuses it
        action = parse_action(cell)
    except LabError as error:
        raise LabError(
            say(en=f"row {row}, column {column}: {error}", fr=f"ligne {row}, colonne {column} : {error}")
        ) from None
    return action


def _placement(orders: list[list[Action]]) -> list[list[int]]:
    """Rank of each stage, per pipe."""
    rank_of_stage: dict[tuple[int, int], int] = {}
    for rank, order in enumerate(orders):
        for element in (element for action in order for element in action.elements):
            # The first row in which a stage appears is its rank.
            owner = rank_of_stage.setdefault((element.pipe, element.stage), rank)
            if owner != rank:
                ranks = {"owner": owner, "rank": rank}
                raise TEXTS.refusal("csv", "stage on two ranks", stage=element.stage, element=element, **ranks)
    stages = _without_gap({stage for _, stage in rank_of_stage}, "stage", "étage")
    pipes = 1 + max(pipe for pipe, _ in rank_of_stage)
    for pipe in range(pipes):
        for stage in range(stages):
            if (pipe, stage) not in rank_of_stage:
                raise LabError(_left_out("stage", "étage", f"{'u' if pipe else ''}{stage}"))
    return [[rank_of_stage[pipe, stage] for stage in range(stages)] for pipe in range(pipes)]


def _without_gap(numbers: Iterable[int], what_en: str, what_fr: str) -> int:
    """Count numbers after checking that they are 0, 1, 2 … without a gap."""
    present = set(numbers)
    for number in range(len(present)):
        if number not in present:
            raise LabError(_left_out(what_en, what_fr, str(number)))
    return len(present)


def _left_out(what_en: str, what_fr: str, number: str) -> str:
    return TEXTS.say("refusals", "action left out", what_en=what_en, number=number, what_fr=what_fr)


COMPUTE_THREAD = 0
SIMULATED_UNIT_US, MEASURED_UNIT_US = 1000.0, 1e6
"""Viewers show no time without a unit: a simulated time unit is shown as a millisecond; measured times are seconds."""
_INSIDE = 1e-3
"""How far before its end, in parts of a slice, a flow begins: at the very end it would bind to the next slice."""

Event = dict[str, Any]


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """Convert a timeline to JSON data: one process per rank, computations on thread 0, activations as a counter.

    One unit of time is a millisecond where it was simulated; measured times are seconds.
    """
    unit_us = MEASURED_UNIT_US if timeline.origin == "measured" else SIMULATED_UNIT_US
    events = [*_names(timeline), *_slices(timeline, unit_us), *_flows(timeline, unit_us), *_counters(timeline, unit_us)]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "schedule": timeline.schedule.name,
            "origin": timeline.origin,
            "micro_batches": timeline.schedule.micro_batches,
            "unit_us": unit_us,
        },
    }


def write_chrome_trace(timeline: Timeline, path: str | Path) -> Path:
    """Write the trace as JSON, to be opened at https://ui.perfetto.dev.

    Raises:
        LabError: if the file cannot be written.
    """
    return _write(path, json.dumps(chrome_trace(timeline), allow_nan=False), "the trace", "la trace")


def _names(timeline: Timeline) -> Iterator[Event]:
    for rank in range(timeline.schedule.ranks):
        name = say(en=f"rank {rank}", fr=f"rang {rank}")
        yield _event("M", rank, name="process_name", args={"name": name})
        yield _event("M", rank, name="process_sort_index", args={"sort_index": rank})
        yield _event("M", rank, name="thread_name", args={"name": "compute"})


def _slices(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    rank_of = timeline.schedule.graph.rank.tolist()
    versions = _versions(timeline)
    for number, action in enumerate(timeline.schedule.actions):
        args: dict[str, Any] = {
            "stage": action.stage,
            "kind": action.kind,
            "micro_batch": action.micro_batch,
            "version": versions.get(number),
        }
        if timeline.schedule.pipes > 1:
            args["pipe"] = action.pipe
        if timeline.schedule.token_slices > 1:
            args["token_slice"] = action.token_slice
        yield _event(
            "X",
            rank_of[number],
            name=str(action),
            cat=action.kind,
            ts=_us(timeline, float(timeline.starts[number]), unit_us),
            dur=round(float(timeline.durations[number]) * unit_us, 3),
            args=args,
        )


def _flows(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    """One arrow per message between ranks, from the action that makes it to the one that needs it."""
    graph, actions = timeline.schedule.graph, timeline.schedule.actions
    rank_of = graph.rank.tolist()
    # Neighbours on one rank hand over in memory: no arrow.
    crossing = ((producer, consumer) for producer, consumer in graph.edges() if rank_of[producer] != rank_of[consumer])
    for flow, (producer, consumer) in enumerate(crossing):
        send_time = float(timeline.ends[producer]) - _INSIDE * float(timeline.durations[producer])
        name = f"{actions[producer]} → {actions[consumer]}"
        common = {"name": name, "cat": "message", "id": flow}
        yield _event("s", rank_of[producer], ts=_us(timeline, send_time, unit_us), **common)
        # bp = e: bound to the slice around the point, not to the next one.
        yield _event(
            "f", rank_of[consumer], ts=_us(timeline, float(timeline.starts[consumer]), unit_us), bp="e", **common
        )


def _counters(timeline: Timeline, unit_us: float) -> Iterator[Event]:
    for rank, curve in enumerate(memory_curves(timeline)):
        for time, units in zip(curve.times.tolist(), curve.units.tolist(), strict=True):
            yield _event(
                "C",
                rank,
                name="activations (stage-micro-batches)",
                ts=_us(timeline, time, unit_us),
                args={"kept": round(units, 9)},
            )


def _event(phase: str, rank: int, **fields: Any) -> Event:
    return {"ph": phase, "pid": rank, "tid": COMPUTE_THREAD, **fields}


def _us(timeline: Timeline, time: float, unit_us: float) -> float:
    return round((time - timeline.start) * unit_us, 3)


def _versions(timeline: Timeline) -> dict[int, int]:
    """Weight version of each action of an asynchronous schedule; empty for others."""
    if not timeline.schedule.asynchronous:
        return {}
    from dlojz.pipeline.orders.asynchronous import version_audit

    versions = enumerate(version_audit(timeline.schedule).versions)
    return {number: version for number, version in versions if version is not None}


DEFAULT_WIDTH = 110
LEAST_WIDTH = 40
MOST_BLOCKS = 8
"""A drawing of more blocks is made coarser instead."""
_FINEST = 1000
"""Largest denominator of a common quantum, in parts of a time unit."""


def text_table(timeline: Timeline, width: int = DEFAULT_WIDTH) -> str:
    """Draw a timeline in plain text.

    Args:
        width: characters of a line, at least 40; a longer drawing goes on in a further block of lines below.

    Returns:
        Lines, without colours; empty for a schedule without actions.

    Raises:
        LabError: for a width in which nothing could be read.
    """
    if width < LEAST_WIDTH:
        raise TEXTS.refusal("refusals", "too narrow", least_width=LEAST_WIDTH, width=width)
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
    """Label each action for a drawing, as short as it stays clear, in the order of `schedule.actions`."""
    chunk: dict[tuple[int, int], int] = {}
    for pipe, stages in enumerate(schedule.placement):
        chunk_counts: dict[int, int] = {}
        for stage, rank in enumerate(stages):
            # Chunks of a rank are counted in the order of their stages.
            chunk[pipe, stage] = chunk_counts.get(rank, 0)
            chunk_counts[rank] = chunk[pipe, stage] + 1
    several = any(chunk.values())
    return [
        "&".join(_label(element, schedule, chunk if several else None) for element in action.elements)
        for action in schedule.actions
    ]


def _label(action: Action, schedule: Schedule, chunk: dict[tuple[int, int], int] | None) -> str:
    direction = "du"[action.pipe] if schedule.pipes > 1 else ""
    number = chunk[action.pipe, action.stage] if chunk else 0
    # Beyond z a number in brackets.
    letter = "" if chunk is None else chr(ord("a") + number) if number < 26 else f"[{number}]"
    slice_suffix = f".{action.token_slice}" if schedule.token_slices > 1 else ""
    return f"{direction}{letter}{action.kind}{action.micro_batch}{slice_suffix}"


def common_quantum(timeline: Timeline) -> float | None:
    """Return the longest time of which all starts and ends are whole multiples; None where there is none."""
    marks: set[Fraction] = set()
    for times in (timeline.starts, timeline.ends):
        # Rounded: equal moments may differ in their last bits.
        for time in set((times - timeline.start).round(9).tolist()):
            exact = Fraction(time).limit_denominator(_FINEST)
            # No denominator up to `_FINEST` comes close: there is no common quantum.
            if abs(float(exact) - time) > 1e-7 * max(timeline.makespan, 1.0):
                return None
            marks.add(exact)
    common = math.lcm(*(mark.denominator for mark in marks))
    # Of all times as fractions of the common denominator; 0 where all are 0.
    return math.gcd(*(int(mark * common) for mark in marks)) / common or None


def _cell_width(timeline: Timeline, labels: Sequence[str], quantum: float) -> int:
    """Characters of a column: every label and a blank (or the next `-`) fit into the columns of its action."""
    width = 2
    for label, length in zip(labels, timeline.durations.tolist(), strict=True):
        columns = round(length / quantum)
        if columns:
            width = max(width, -(-(len(label) + 1) // columns))
    return width


def _blocks(timeline: Timeline, labels: Sequence[str], quantum: float, cell: int, per_block: int) -> Iterator[str]:
    """The rows, cut into blocks that fit the width, each under a scale of time."""
    columns = round(timeline.makespan / quantum)
    rows = [_row(timeline, labels, quantum, cell, rank, columns) for rank in range(timeline.schedule.ranks)]
    blank = " " * len(_margin(timeline.schedule.ranks - 1))
    for start in range(0, columns, per_block):
        if start:
            yield ""
        stop = min(start + per_block, columns)
        yield (blank + _scale(timeline, quantum, cell, start, stop)).rstrip()
        for rank, row in enumerate(rows):
            yield (_margin(rank, len(blank)) + row[start * cell : stop * cell]).rstrip()


def _row(timeline: Timeline, labels: Sequence[str], quantum: float, cell: int, rank: int, columns: int) -> str:
    row = [("." + " " * (cell - 1))] * columns
    text = list("".join(row))
    part = timeline.of_rank(rank)
    for number in range(part.start, part.stop):
        start = round((float(timeline.starts[number]) - timeline.start) / quantum)
        stop = round((float(timeline.ends[number]) - timeline.start) / quantum)
        if stop == start:  # an action without duration has no column
            continue
        length = (stop - start) * cell
        # Label, dashes up to the end, and a blank before the next action.
        lasting = "-" * (length - len(labels[number]) - 1) + " "
        text[start * cell : stop * cell] = list((labels[number] + lasting)[:length])
    return "".join(text)


def _scale(timeline: Timeline, quantum: float, cell: int, start: int, stop: int) -> str:
    """Times above the columns, as many as there is room for."""
    step = max(1, -(-8 // cell))
    return "".join(
        f"{column * quantum:g}".ljust(cell * min(step, stop - column)) for column in range(start, stop, step)
    )


def _coarse(timeline: Timeline, room: int) -> Iterator[str]:
    """One letter per column: the kind of what the rank does in the column's middle."""
    quantum = timeline.makespan / room
    yield TEXTS.say("refusals", "coarse columns", quantum=significant(quantum))
    widest = len(_margin(timeline.schedule.ranks - 1))
    for rank in range(timeline.schedule.ranks):
        part = timeline.of_rank(rank)
        starts, ends = timeline.starts[part], timeline.ends[part]
        middles = [timeline.start + (column + 0.5) * quantum for column in range(room)]
        # The last action that starts before each middle; −1: none has started.
        indices = (starts.searchsorted(middles, side="right") - 1).tolist()
        kinds = [action.kind for action in timeline.schedule.orders[rank]]
        yield _margin(rank, widest) + "".join(
            kinds[number] if number >= 0 and middle < ends[number] else "."
            for number, middle in zip(indices, middles, strict=True)
        )


def _margin(rank: int, width: int = 0) -> str:
    return f"{say(en='rank', fr='rang')} {rank} ".ljust(width)
