"""What `dlojz pipeline` answers: words, tables, JSON documents.

Layer 6. Invariant: every figure is asked of `dlojz.pipeline`; makespan and span, fraction and overhead stand under
their own names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rich.table import Table
from rich.text import Text

from dlojz.cli.flags import number
from dlojz.cli.pipeline_costs import costs_of, times_of
from dlojz.pipeline.bounds import lower_bound
from dlojz.pipeline.catalogue import SCHEDULES, build
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.memory import memory_curves
from dlojz.pipeline.simulator import UNIT_COSTS, simulate
from dlojz.pipeline.text_table import text_table
from dlojz.pipeline.timeline import Timeline
from dlojz.pipeline.torch_csv import torch_refusal
from dlojz.schema import LabError
from dlojz.text import say


class Row(NamedTuple):
    """One schedule of a comparison."""

    name: str
    timeline: Timeline
    lower_bound: float
    over_limit: bool


def words(timeline: Timeline, memory_limit: float | None, width: int) -> str:
    """Drawing and figures of one schedule as text."""
    from dlojz.viz.pipeline_facts import known_optimum
    from dlojz.viz.pipeline_words import amount, figure_lines, title_of

    costs = timeline.costs or UNIT_COSTS
    bound = lower_bound(timeline.schedule, costs)
    lines = [*figure_lines(timeline, bound, known_optimum(timeline, memory_limit))]
    idle = {cause: share for cause, share in _idle(timeline).items() if share > 1e-12}
    if idle:
        from dlojz.pipeline.idle import title_of as cause_title

        told = ", ".join(f"{cause_title(cause)} {amount(share)}" for cause, share in idle.items())
        lines.append((say(en="idle time", fr="inactivité"), told + say(en=" (all ranks)", fr=" (tous les rangs)")))
    refusal = torch_refusal(timeline.schedule)
    lines.append(("torch", refusal or say(en="executes it (--csv)", fr="sait l’exécuter (--csv)")))
    longest = max(len(name) for name, _ in lines)
    figures = "\n".join(f"{name.ljust(longest)}  {value}" for name, value in lines)
    return f"{title_of(timeline.schedule)}\n\n{text_table(timeline, width)}\n\n{figures}"


def document(timeline: Timeline, memory_limit: float | None = None) -> dict[str, Any]:
    """Everything about one schedule as plain JSON data; memory in stage-micro-batches, times in the costs' unit."""
    from dlojz.pipeline.critical_path import critical_path
    from dlojz.viz.pipeline_facts import known_optimum

    schedule, costs = timeline.schedule, timeline.costs or UNIT_COSTS
    return {
        "schedule": schedule.name,
        "stages": schedule.ranks,
        "chunks": schedule.chunks,
        "model_stages": schedule.stages,
        "micro_batches": schedule.micro_batches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "ideal": timeline.ideal,
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_overhead": timeline.bubble_overhead,
        "speedup": timeline.speedup,
        "peak_activations": [curve.peak for curve in memory_curves(timeline)],
        "lower_bound": lower_bound(schedule, costs),
        "optimum": known_optimum(timeline, memory_limit),
        "idle": _idle(timeline),
        "idle_per_rank": list(timeline.idle),
        "critical_path": [str(schedule.actions[index]) for index in critical_path(timeline)],
        "torch_refusal": torch_refusal(schedule),
    }


def row_document(row: Row) -> dict[str, Any]:
    """One row of a comparison as plain JSON data."""
    return {**document(row.timeline), "over_memory_limit": row.over_limit}


def _idle(timeline: Timeline) -> dict[str, float]:
    """Idle time by cause, over all ranks."""
    from dlojz.pipeline.idle import CAUSES, idle_by_cause

    of_rank = idle_by_cause(timeline)
    return {cause: sum(causes[cause] for causes in of_rank) for cause in CAUSES}


def compare_rows(names: Sequence[str], size: tuple[int, int], given: dict[str, Any]) -> tuple[list[Row], list[str]]:
    """Simulate schedules at one size, in the order named.

    Args:
        names: schedules; none for all of the catalogue, the smallest bubble first, but those that the size excludes.
        size: ranks, micro-batches.
        given: options that tell the costs.

    Returns:
        The rows, and the names left out.

    Raises:
        LabError: if a schedule that was named does not exist for this size.
    """
    limit = number(given, "memory_limit", float)
    rows, excluded = [], []
    for name in names or SCHEDULES:
        try:
            rows.append(_row(name, size, given, limit))
        except LabError:
            if names:
                raise
            excluded.append(name)
    if not rows:
        raise LabError(
            say(
                en=f"no schedule exists for {size[0]} stages, {size[1]} micro-batches and these times: try 4 and 8.",
                fr=f"aucun ordonnancement n’existe pour {size[0]} étages, {size[1]} micro-batches et ces durées : "
                "essayez 4 et 8.",
            )
        )
    return rows if names else sorted(rows, key=lambda row: row.timeline.bubble_fraction), excluded


def _row(name: str, size: tuple[int, int], given: dict[str, Any], limit: float | None) -> Row:
    schedule = build(name, *size, costs=times_of(given))
    costs = costs_of(given, schedule.stages)
    timeline = simulate(schedule, costs)
    peak = max(curve.peak for curve in memory_curves(timeline))
    return Row(name, timeline, lower_bound(schedule, costs), limit is not None and peak > limit + 1e-9)


def compare_table(rows: Sequence[Row]) -> Table:
    """Schedules side by side; times of different numbers of chunks are not comparable, shares are."""
    from dlojz.viz.pipeline_words import amount, share

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(say(en="schedule", fr="ordonnancement"), no_wrap=True)
    for title in (
        say(en="chunks", fr="étages/rang"),
        "makespan",
        "span",
        say(en="bound", fr="borne"),
        "fraction",
        say(en="overhead", fr="surcoût"),
        say(en="peak", fr="pic"),
        "torch",
    ):
        table.add_column(title, justify="right", no_wrap=True)
    for name, timeline, bound, over in rows:
        schedule = timeline.schedule
        held = max(schedule.stages / schedule.ranks, 1.0)  # a micro-batch of a rank is that many stage-micro-batches
        peak = max(curve.peak for curve in memory_curves(timeline)) / held
        table.add_row(
            name,
            str(schedule.chunks),
            amount(timeline.makespan),
            amount(timeline.span),
            amount(bound),
            share(timeline.bubble_fraction),
            share(timeline.bubble_overhead),
            Text(amount(peak) + (" !" if over else ""), style="red" if over else ""),
            "—" if torch_refusal(schedule) else say(en="yes", fr="oui"),
        )
    return table


def draw_comparison(rows: Sequence[Row], size: tuple[int, int], path: str, costs: Costs) -> None:
    """Two schedules under one another, or the bubble of several against the number of micro-batches."""
    if len(rows) == 2:
        from dlojz.viz.pipeline_figure import compare_figure

        compare_figure(rows[0].timeline, rows[1].timeline, path)
        return
    from dlojz.viz.pipeline_bubble import bubble_figure

    counts = sorted({size[0] * factor for factor in (1, 2, 3, 4, 6, 8)} | {size[1]})
    bubble_figure([row.name for row in rows], size[0], counts, path, costs)


def listing(as_json: bool) -> Any:
    """All schedules: name, title, what limits them, source."""
    if as_json:
        return [
            {
                "name": name,
                "title": one.title(),
                "family": one.family,
                "chunks": one.chunks,
                "limits": one.limits(),
                "torch": one.torch_class,
                "source": one.source,
            }
            for name, one in SCHEDULES.items()
        ]
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for title in (
        say(en="name", fr="nom"),
        "",
        say(en="what limits it", fr="ce qui le limite"),
        "source",
    ):
        table.add_column(title)
    for name, one in SCHEDULES.items():
        table.add_row(Text(name, no_wrap=True), one.title(), one.limits(), one.source)
    return table
