"""Tables of a campaign: for people as short texts, for a spreadsheet with every field.

Both hold all points, whatever became of them, and no cell can be taken for a formula.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from dlojz.base.language import format_bytes, format_count, format_seconds, rounded, say
from dlojz.base.table import visible
from dlojz.campaign.campaign import FIELDS
from dlojz.campaign.results import REFUSED, WAITING, Result
from dlojz.display.tables import DASH, status_label

FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r", "\n", "|", "%")
"""Signs by which a spreadsheet may take a text for a formula (OWASP, "CSV Injection")."""


def state_label(result: Result) -> str:
    """State of a point in the reader's language; of one that waits also the scheduler's reason."""
    label = {
        WAITING: say(en="not run yet", fr="pas encore exécuté"),
        REFUSED: say(en="refused", fr="refusé"),
        "oom": say(en="does not fit", fr="ne tient pas"),
    }.get(result.state, status_label(result.state))
    return f"{label} ({result.waits_for})" if result.waits_for else label


def foreseen(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Table of the predictions, as titles and rows: what a dry run shows."""
    titles = [
        "#",
        say(en="point", fr="point"),
        say(en="machine", fr="machine"),
        say(en="ranks", fr="rangs"),
        say(en="memory per rank", fr="mémoire par rang"),
        say(en="limit", fr="limite"),
        say(en="fits", fr="tient"),
        say(en="messages per step", fr="messages par pas"),
        say(en="GPU-h at most", fr="h GPU au plus"),
        say(en="state", fr="état"),
    ]
    rows = [
        [
            str(result.point.number),
            result.point.label,
            result.point.machine or say(en="here", fr="ici"),
            str(result.point.config.layout.world_size),
            format_bytes(result.outlook.taken_bytes),
            format_bytes(result.outlook.limit_bytes),
            {True: say(en="yes", fr="oui"), False: say(en="NO", fr="NON"), None: DASH}[result.outlook.fits],
            format_bytes(result.outlook.communication_bytes),
            hours(result.outlook.most_hours),
            state_label(result),
        ]
        for result in results
    ]
    return titles, rows


def measured(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Table of the measurements with their predictions, as titles and rows."""
    titles = [
        "#",
        say(en="point", fr="point"),
        say(en="state", fr="état"),
        say(en="ranks", fr="rangs"),
        say(en="memory, predicted", fr="mémoire prédite"),
        say(en="memory, measured", fr="mémoire mesurée"),
        say(en="limit", fr="limite"),
        say(en="samples/s", fr="échantillons/s"),
        say(en="step", fr="pas"),
        say(en="messages, predicted", fr="messages prédits"),
        say(en="messages, measured", fr="messages mesurés"),
        say(en="efficiency", fr="efficacité"),
    ]
    rows = []
    for result in results:
        predicted_bytes, measured_bytes = result.memory_bytes
        rows.append(
            [
                str(result.point.number),
                result.point.label,
                state_label(result),
                str(result.point.config.layout.world_size),
                format_bytes(predicted_bytes),
                format_bytes(measured_bytes),
                format_bytes(result.outlook.limit_bytes),
                format_count(result.samples_per_s),
                format_seconds(result.step_s),
                format_bytes(result.outlook.communication_bytes),
                format_bytes(result.communication_bytes),
                DASH if result.efficiency is None else f"{100 * result.efficiency:.0f} %",
            ]
        )
    return titles, rows


def brief(results: Sequence[Result]) -> tuple[list[str], list[list[str]]]:
    """Table of the measurements for a terminal: predicted and measured in one cell."""
    _, rows = measured(results)
    titles = [
        "#",
        say(en="point", fr="point"),
        say(en="state", fr="état"),
        say(en="memory: predicted | measured", fr="mémoire : prédite | mesurée"),
        say(en="limit", fr="limite"),
        say(en="samples/s", fr="échant./s"),
        say(en="step", fr="pas"),
        say(en="scaling", fr="échelle"),
    ]
    return titles, [[*row[:3], f"{row[4]} | {row[5]}", *row[6:9], row[11]] for row in rows]


def hours(value: float | None) -> str:
    """Format a number of hours, with three digits or all before the decimal mark; a missing one is a dash."""
    return DASH if value is None else rounded(value)


def colon() -> str:
    """Colon of the reader's language."""
    return say(en=": ", fr=" : ")


def row_of(result: Result) -> dict[str, Any]:
    """Export every figure of a point, with units in the names; None where it is not known."""
    config = result.point.config
    own = {**config.to_dict(), **config.layout.to_dict()}
    predicted_bytes, measured_bytes = result.memory_bytes
    return {
        "point": result.point.number,
        "label": result.point.label,
        "machine": result.point.machine,
        "repeat": result.point.repeat,
        **{name: own[name] for name in FIELDS},
        "global_batch": config.layout.global_batch,
        "ranks": config.layout.world_size,
        "config_hash": config.hash,
        "run_id": result.run_id,
        "state": result.state,
        "reason": result.reason,
        "predicted_memory_bytes": predicted_bytes,
        "measured_memory_bytes": measured_bytes,
        "memory_rank": result.outlook.rank,
        "memory_limit_bytes": result.outlook.limit_bytes,
        "predicted_to_fit": result.outlook.fits,
        "predicted_message_bytes": result.outlook.communication_bytes,
        "measured_message_bytes": result.communication_bytes,
        "predicted_samples_per_s": result.predicted_samples_per_s,
        "measured_samples_per_s": result.samples_per_s,
        "step_s": result.step_s,
        "scaling_efficiency": result.efficiency,
        "most_hours": result.outlook.most_hours,
        "measured_rank_hours": result.rank_hours if result.record else None,
    }


def csv_text(results: Sequence[Result]) -> str:
    """Write CSV, one line per point, with every field; a text that a spreadsheet would run is quoted by '."""
    text = io.StringIO()
    rows = [row_of(result) for result in results]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([harmless(value) for value in row.values()] for row in rows)
    return text.getvalue()


def harmless(value: object) -> object:
    """Quote a cell that a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    shown = visible(value)
    return f"'{shown}" if shown.lstrip().startswith(FORMULA_SIGNS) or value != value.lstrip("\t\r\n") else shown
