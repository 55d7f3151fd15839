"""Tables and report of a campaign: Markdown, HTML with its figures in it, CSV, in one folder.

Written from the run folders at any time, also of a campaign that is not finished; every text is escaped; each file is
written whole; the HTML refers to nothing outside itself. All points are in each table, whatever became of them, and no
cell of the CSV can be taken for a formula.
"""

from __future__ import annotations

import base64
import csv
import io
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlojz.base.files import write_atomic
from dlojz.base.language import (
    Sentences,
    colon,
    format_bytes,
    format_count,
    format_seconds,
    language,
    percent,
    refusal,
    rounded,
    say,
)
from dlojz.base.table import Table, markdown_safe, safe, titles, visible
from dlojz.campaign.campaign import FIELDS, MACHINE, TITLE, Campaign, CampaignPlan, CampaignPoint
from dlojz.campaign.results import REFUSED, WAITING, Result
from dlojz.config.schedules import SETTLING_STEPS
from dlojz.display.style import FRAME, INK
from dlojz.display.tables import DASH, status_label

if TYPE_CHECKING:
    from dlojz.display.canvas import LabFigure
    from dlojz.display.figures.campaign_figures import CampaignMark

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


def foreseen(results: Sequence[Result]) -> Table:
    """Lay out the predictions: what a dry run shows."""
    head = titles(
        en="#; point; machine; ranks; memory per rank; limit; fits; messages per step; GPU-h at most; state",
        fr="#; point; machine; rangs; mémoire par rang; limite; tient; messages par pas; h GPU au plus; état",
    )
    rows = tuple(
        (
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
        )
        for result in results
    )
    return Table(head, rows, align="lllrrrrrrl")


def measured(results: Sequence[Result]) -> Table:
    """Lay out the measurements with their predictions."""
    head = titles(
        en="#; point; state; ranks; memory, predicted; memory, measured; limit; samples/s; step; messages, predicted; "
        "messages, measured; strong scaling; weak scaling",
        fr="#; point; état; rangs; mémoire prédite; mémoire mesurée; limite; échantillons/s; pas; messages prédits; "
        "messages mesurés; scalabilité forte; scalabilité faible",
    )
    rows = tuple(
        (
            str(result.point.number),
            result.point.label,
            state_label(result),
            str(result.point.config.layout.world_size),
            # In the order of the columns: predicted, measured, limit.
            *map(format_bytes, (*result.memory_bytes, result.outlook.limit_bytes)),
            format_count(result.samples_per_s),
            format_seconds(result.step_s),
            *map(format_bytes, (result.outlook.communication_bytes, result.communication_bytes)),
            *(
                DASH if efficiency is None else percent(efficiency, 0)
                for efficiency in (result.strong_efficiency, result.weak_efficiency)
            ),
        )
        for result in results
    )
    return Table(head, rows, align="lllr")


def brief(results: Sequence[Result]) -> Table:
    """Lay out the measurements for a terminal: predicted and measured in one cell."""
    head = titles(
        en="#; point; state; memory: predicted | measured; limit; samples/s; step; scaling: strong | weak",
        fr="#; point; état; mémoire : prédite | mesurée; limite; échant./s; pas; scalabilité : forte | faible",
    )
    # Columns of `measured`: 4, 5 memory predicted and measured; 6 to 8 limit, samples/s, step;
    # 11, 12 strong and weak scaling. 3, 9 and 10 (ranks, messages) are left out for room.
    rows = ((*row[:3], f"{row[4]} | {row[5]}", *row[6:9], f"{row[11]} | {row[12]}") for row in measured(results).rows)
    return Table(head, tuple(rows), align="lllr")


def hours(value: float | None) -> str:
    """Format a number of hours, with three digits or all before the decimal mark; a missing one is a dash."""
    return DASH if value is None else rounded(value)


def row_of(result: Result) -> dict[str, Any]:
    """Export every figure of a point, with units in the names; None where it is not known."""
    config = result.point.config
    config_fields = {**config.to_dict(), **config.layout.to_dict()}
    predicted_bytes, measured_bytes = result.memory_bytes
    return {
        "point": result.point.number,
        "label": result.point.label,
        "machine": result.point.machine,
        "repeat": result.point.repeat,
        **{name: config_fields[name] for name in FIELDS},
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
        "strong_scaling_efficiency": result.strong_efficiency,
        "weak_scaling_efficiency": result.weak_efficiency,
        "most_hours": result.outlook.most_hours,
        "measured_rank_hours": result.rank_hours if result.record else None,
    }


def csv_text(results: Sequence[Result]) -> str:
    """Write CSV, one line per point, with every field; a text that a spreadsheet would run is quoted by '."""
    text = io.StringIO()
    rows = [row_of(result) for result in results]
    # All rows have the same keys: those of the first are the header.
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0] if rows else [])
    writer.writerows([harmless(value) for value in row.values()] for row in rows)
    return text.getvalue()


def harmless(value: object) -> object:
    """Quote a cell that a spreadsheet would run as a formula."""
    if not isinstance(value, str):
        return value
    visible_text = visible(value)
    # `visible` may have changed a leading tab or line end, so those are looked for in the value as it came.
    return (
        f"'{visible_text}"
        if visible_text.lstrip().startswith(FORMULA_SIGNS) or value != value.lstrip("\t\r\n")
        else visible_text
    )


BATCH = frozenset({"micro_batch", "micro_batches"})
RANKS = frozenset({"dp", "tp", "pp", "cp"})


def campaign_figures(campaign: Campaign, results: Sequence[Result], folder: Path) -> dict[str, LabFigure]:
    """Draw the figures into a folder.

    Returns:
        file name → figure, in the order of the report.

    Raises:
        LabError: if a picture cannot be written.
    """
    from dlojz.display.figures.campaign_figures import batch_figure, pareto_figure, scaling_figure, truth_figure

    marks = marks_of(campaign, results)
    _, label = _batch_axis([result.point for result in results])
    return {
        "batch.png": batch_figure(marks, label, folder / "batch.png"),
        "pareto.png": pareto_figure(marks, folder / "pareto.png"),
        "truth.png": truth_figure(marks, folder / "truth.png"),
        "scaling.png": scaling_figure(marks, folder / "scaling.png"),
    }


def marks_of(campaign: Campaign, results: Sequence[Result]) -> list[CampaignMark]:
    """Convert results to marks of the figures."""
    fields, _ = _batch_axis([result.point for result in results])
    batch_axes = _axes_that_set(campaign, BATCH)
    rank_axes = _axes_that_set(campaign, RANKS)
    return [_mark(result, fields, batch_axes, rank_axes) for result in results]


def _mark(result: Result, fields: Sequence[str], batch_axes: set[str], rank_axes: set[str]) -> CampaignMark:
    from dlojz.display.figures.campaign_figures import CampaignMark

    layout = result.point.config.layout
    predicted, measured = result.memory_bytes
    # Where one field varies, the axis counts that field; else samples per step.
    batch = getattr(layout, fields[0]) if len(fields) == 1 else layout.global_batch
    return CampaignMark(
        series=_named(result.point, batch_axes),
        family=_named(result.point, rank_axes),
        batch=batch,
        ranks=layout.world_size,
        state=result.state,
        predicted_bytes=predicted,
        measured_bytes=measured,
        limit_bytes=result.outlook.limit_bytes,
        limit_name=result.outlook.limit_name,
        samples_per_s=result.samples_per_s,
        predicted_samples_per_s=result.predicted_samples_per_s,
        predicted_message_bytes=result.outlook.communication_bytes,
        measured_message_bytes=result.communication_bytes,
        strong_efficiency=result.strong_efficiency,
        weak_efficiency=result.weak_efficiency,
    )


def _batch_axis(points: Sequence[CampaignPoint]) -> tuple[list[str], str]:
    """What the axis of the batch counts: fields of the layout whose product it is, or `micro_batches` alone; in words.

    Where one global batch is cut differently, only the number of its micro-batches tells the points apart.
    """
    layouts = [point.config.layout for point in points]
    # What varies over the points, of micro_batch (samples) and micro_batches (number per step).
    varying = [name for name in sorted(BATCH) if len({getattr(layout, name) for layout in layouts}) > 1]
    totals = {layout.global_batch for layout in layouts}
    if varying == ["micro_batches"] or (varying and len(totals) == 1):
        total = min(totals)
        batch_suffix = say(en=f" of {total} samples", fr=f" de {total} échantillons") if len(totals) == 1 else ""
        return ["micro_batches"], say(en="micro-batches per step", fr="micro-batches par pas") + batch_suffix
    if len(varying) > 1:
        return varying, say(en="samples per step (global batch)", fr="échantillons par pas (batch global)")
    return ["micro_batch"], say(en="micro-batch, samples", fr="micro-batch, échantillons")


def _axes_that_set(campaign: Campaign, fields: frozenset[str]) -> set[str]:
    """The axes that set only such fields."""
    axes = set()
    for axis, values in campaign.axes.items():
        # A plain list sets the field of the axis's own name; tables set their own fields.
        axis_fields = {
            key for value in values for key in (value if isinstance(value, dict) else {axis: 0}) if key != TITLE
        }
        if axis_fields <= fields and axis != MACHINE:
            axes.add(axis)
    return axes


def _named(point: CampaignPoint, without: set[str]) -> str:
    """What a point shares with the others of its series."""
    return ", ".join(text for axis, text in point.labels.items() if axis not in without) or point.config.model


CAMPAIGNS = "campaigns"
STYLE = (
    f"body{{font-family:sans-serif;max-width:75em;margin:2em auto;padding:0 1em;color:{INK}}}"
    f"table{{border-collapse:collapse;font-size:90%}}th,td{{padding:.25em .6em;border-bottom:1px solid {FRAME};"
    "text-align:right}th:nth-child(-n+3),td:nth-child(-n+3){text-align:left}img{max-width:100%}"
    "pre{white-space:pre-wrap;font-family:inherit}"
)


def report_folder(root: Path, name: str) -> Path:
    """Folder of a campaign's report."""
    return root / CAMPAIGNS / name


def write_report(campaign: Campaign, plan: CampaignPlan, results: Sequence[Result], folder: Path) -> list[Path]:
    """Write `report.html`, `report.md`, `points.csv` and the figures.

    Args:
        folder: made where it does not exist.

    Returns:
        the files.

    Raises:
        LabError: if they cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / "points.csv", csv_text(results))
        # The pictures are written first: `html` reads them back to embed them.
        figures = campaign_figures(campaign, results, folder)
        write_atomic(folder / "report.md", markdown(campaign, plan, results, figures))
        write_atomic(folder / "report.html", html(campaign, plan, results, folder, figures))
    except OSError as error:
        raise refusal(
            en=f"the report cannot be written in {folder}: {error.strerror}; what was measured is kept.",
            fr=f"le rapport ne peut pas être écrit dans {folder} : {error.strerror} ; les mesures sont conservées.",
        ) from None
    return [folder / name for name in ("report.html", "report.md", "points.csv", *figures)]


def _used_hours(results: Sequence[Result]) -> str:
    """Write the rank-hours of all points, and of how many of them they are not known."""
    # 0.0 for a point that never started, None for a run of unknown length.
    measured_hours = [result.rank_hours for result in results if result.rank_hours is not None]
    unknown = len(results) - len(measured_hours)
    if not measured_hours:
        return DASH
    left_out = say(en=f" (without {unknown} of unknown length)", fr=f" (sans {unknown} de durée inconnue)")
    return hours(sum(measured_hours)) + (left_out if unknown else "")


_finding = Sentences(Path(__file__).with_name("data") / "findings.md")
"""Conclude by the key of a sentence."""


def findings(results: Sequence[Result]) -> Iterator[str]:
    """Conclude from the results, in sentences computed from its results."""
    runs = [result for result in results if result.state == "completed"]
    over = [result for result in results if result.state == "oom"]
    counts = {"completed": len(runs), "points": len(results), "over": len(over)}
    yield _finding("points", **counts, hours=_used_hours(results))
    rated = [(result.samples_per_s, result) for result in runs if result.samples_per_s]
    if rated:
        rate, best = max(rated, key=lambda pair: pair[0])
        yield _finding("throughput", label=best.point.label, rate=format_count(rate))
    pairs = [(pair, result) for result in runs if None not in (pair := result.memory_bytes)]
    if pairs:
        # Relative to the measurement; max(…, 1) only guards against a division by 0.
        gap, worst = max(
            ((abs((pair[1] or 0) - (pair[0] or 0)) / max(pair[1] or 1, 1), result) for pair, result in pairs),
            key=lambda entry: entry[0],
        )
        yield _finding("memory", gap=_at_most(gap), label=worst.point.label) if gap else _finding("memory to the byte")
    short = [result for result in runs if result.point.config.steps <= SETTLING_STEPS]
    if short:
        steps = {"settling": SETTLING_STEPS, "steps": SETTLING_STEPS + 2}
        yield _finding("short runs", short=len(short), completed=len(runs), **steps)
    exact = [
        result.communication_bytes == result.outlook.communication_bytes
        for result in runs
        if result.point.config.steps > SETTLING_STEPS
        and result.communication_bytes is not None
        and result.outlook.communication_bytes is not None
    ]
    if exact:
        yield _finding("messages", exact=sum(exact), completed=len(exact))
    for result in results:
        # Wrong: predicted to fit and out of memory, or predicted not to fit and completed.
        fits, wrong = result.outlook.fits, result.outlook.fits is (result.state == "oom")
        if fits is not None and wrong and result.state in ("oom", "completed"):
            yield _finding("fits against" if fits else "unfit against", label=result.point.label)


def _at_most(share: float) -> str:
    """Format an error as a person writes it: in percent, rounded up to a tenth."""
    # Rounded first: 1000 × share may lie a hair above a whole number, which ceil would take one up.
    return percent(math.ceil(round(1000 * share, 9)) / 1000, None)


def _sections(plan: CampaignPlan, results: Sequence[Result]) -> list[tuple[str, Sequence[tuple[str, str]]]]:
    """Headings, each with points and what is said of them; only those with any."""
    # What waits in the queue has a reason, too, but nothing has gone wrong there.
    reasons = [
        (f"{result.point.number}. {result.point.label} ({state_label(result)})", result.reason or result.outlook.note)
        for result in results
        if (result.reason and not result.waits_for) or result.outlook.note
    ]
    failures = say(en="What did not go well, and what is not predicted", fr="Échecs et absences de prédiction")
    left_out = say(en="Left out", fr="Points écartés")
    return [(heading, points) for heading, points in ((failures, reasons), (left_out, plan.excluded)) if points]


def markdown(campaign: Campaign, plan: CampaignPlan, results: Sequence[Result], figures: dict[str, LabFigure]) -> str:
    """Write the report as Markdown, with the figures as files."""
    lines = [f"# {markdown_safe(campaign.title)}", ""]
    lines += [markdown_safe(line) for line in campaign.description.strip().splitlines()]
    lines += ["", *(f"- {markdown_safe(text)}" for text in findings(results)), "", measured(results).markdown()]
    for name, figure in figures.items():
        lines += ["", f"![{markdown_safe(figure.alt)}]({name})"]
    for heading, points in _sections(plan, results):
        lines += ["", f"## {markdown_safe(heading)}", ""]
        lines += [f"- {markdown_safe(point)}{colon()}{markdown_safe(reason)}" for point, reason in points]
    return "\n".join(lines) + "\n"


def html(
    campaign: Campaign, plan: CampaignPlan, results: Sequence[Result], folder: Path, figures: dict[str, LabFigure]
) -> str:
    """Write the report as one HTML page, with its figures in it."""
    description = "\n".join(safe(line) for line in campaign.description.strip().splitlines())
    parts = [
        f'<!DOCTYPE html><html lang="{language()}"><head><meta charset="utf-8">',
        # The page loads nothing: images only from data: URLs, styles only inline, no script at all.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">",
        f"<title>{safe(campaign.title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{safe(campaign.title)}</h1><pre>{description}</pre><ul>",
        *(f"<li>{safe(text)}</li>" for text in findings(results)),
        "</ul>",
        measured(results)._repr_html_(),
    ]
    for name, figure in figures.items():
        picture = base64.b64encode((folder / name).read_bytes()).decode("ascii")
        parts.append(f'<p><img alt="{safe(figure.alt)}" src="data:image/png;base64,{picture}"></p>')
    for heading, points in _sections(plan, results):
        items = "".join(f"<li>{safe(point)}{colon()}{safe(reason)}</li>" for point, reason in points)
        parts.append(f"<h2>{safe(heading)}</h2><ul>{items}</ul>")
    return "".join(parts) + "</body></html>\n"
