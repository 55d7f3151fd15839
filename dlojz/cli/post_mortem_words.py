"""What `dlojz doctor RUN` says of a run that ran out of memory, or did not.

Layer 6. Invariant: every figure is read from the diagnosis; which were measured and which predicted is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.text import Text

from dlojz.runs.memory_words import in_one_line, memory_lines
from dlojz.text import say
from dlojz.viz.grid import status_label
from dlojz.viz.markup import visible

if TYPE_CHECKING:
    from dlojz.cli.post_mortem import Diagnosis
    from dlojz.record import RunRecord


def told(diagnosis: Diagnosis) -> list[Any]:
    """The diagnosis as texts to print, one after the other."""
    record = diagnosis.record
    if not diagnosis.out_of_memory:
        return [_ended_otherwise(record), in_one_line(diagnosis)]
    lines: list[Any] = [
        Text(
            say(
                en=f"{record.run_id} ({visible(record.title)}) ran out of memory: {visible(record.reason)}",
                fr=f"{record.run_id} ({visible(record.title)}) a épuisé la mémoire : {visible(record.reason)}",
            ),
            style="bold",
        ),
        "",
        *memory_lines(diagnosis),
    ]
    return lines


def _ended_otherwise(record: RunRecord) -> str:
    why = f" ({visible(record.reason)})" if record.reason else ""
    return say(
        en=f"{record.run_id} ({visible(record.title)}) did not run out of memory: {status_label(record.status)}{why}.",
        fr=f"{record.run_id} ({visible(record.title)}) n’a pas manqué de mémoire : {status_label(record.status)}{why}.",
    )
