"""From the results of a campaign to its four figures.

Layer 6. Invariant: points are joined in a figure when they differ in nothing but what its axis counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dlojz.campaign.contract import MACHINE, TITLE, Campaign
from dlojz.campaign.plan import Point
from dlojz.campaign.results import Result
from dlojz.text import say
from dlojz.viz.campaign_figure import batch_figure, pareto_figure, scaling_figure, truth_figure
from dlojz.viz.campaign_marks import Mark
from dlojz.viz.canvas import LabFigure

BATCH = frozenset({"micro_batch", "micro_batches"})
RANKS = frozenset({"dp", "tp", "pp"})


def campaign_figures(campaign: Campaign, results: Sequence[Result], folder: Path) -> dict[str, LabFigure]:
    """Draw the figures into a folder.

    Returns:
        file name → figure, in the order of the report.

    Raises:
        LabError: if a picture cannot be written.
    """
    marks = marks_of(campaign, results)
    _, label = _batch_axis([result.point for result in results])
    return {
        "batch.png": batch_figure(marks, label, folder / "batch.png"),
        "pareto.png": pareto_figure(marks, folder / "pareto.png"),
        "truth.png": truth_figure(marks, folder / "truth.png"),
        "scaling.png": scaling_figure(marks, folder / "scaling.png"),
    }


def marks_of(campaign: Campaign, results: Sequence[Result]) -> list[Mark]:
    """The results as the figures draw them."""
    fields, _ = _batch_axis([result.point for result in results])
    batch_axes = _axes_that_set(campaign, BATCH)
    rank_axes = _axes_that_set(campaign, RANKS)
    return [_mark(result, fields, batch_axes, rank_axes) for result in results]


def _mark(result: Result, fields: Sequence[str], batch_axes: set[str], rank_axes: set[str]) -> Mark:
    layout = result.point.config.layout
    predicted, measured = result.memory_bytes
    batch = getattr(layout, fields[0]) if len(fields) == 1 else layout.global_batch
    return Mark(
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
        efficiency=result.efficiency,
    )


def _batch_axis(points: Sequence[Point]) -> tuple[list[str], str]:
    """What the axis of the batch counts: fields of the layout whose product it is, or `micro_batches` alone; in words.

    Where one global batch is cut differently, only the number of its micro-batches tells the points apart.
    """
    layouts = [point.config.layout for point in points]
    varying = [name for name in sorted(BATCH) if len({getattr(layout, name) for layout in layouts}) > 1]
    totals = {layout.global_batch for layout in layouts}
    if varying == ["micro_batches"] or (varying and len(totals) == 1):
        total = min(totals)
        whole = say(en=f" of {total} samples", fr=f" de {total} échantillons") if len(totals) == 1 else ""
        return ["micro_batches"], say(en="micro-batches per step", fr="micro-batches par pas") + whole
    if len(varying) > 1:
        return varying, say(en="samples per step (global batch)", fr="échantillons par pas (batch global)")
    return ["micro_batch"], say(en="micro-batch, samples", fr="micro-batch, échantillons")


def _axes_that_set(campaign: Campaign, fields: frozenset[str]) -> set[str]:
    """The axes that set only such fields."""
    found = set()
    for axis, values in campaign.axes.items():
        own = {key for value in values for key in (value if isinstance(value, dict) else {axis: 0}) if key != TITLE}
        if own <= fields and axis != MACHINE:
            found.add(axis)
    return found


def _named(point: Point, without: set[str]) -> str:
    """What a point shares with the others of its series."""
    return ", ".join(text for axis, text in point.labels.items() if axis not in without) or point.config.model
