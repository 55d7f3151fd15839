"""What every rank does when: one line per rank, one bar per phase; below it, what is under way between the ranks.

Layer 4. Invariant: one collection per phase, so that thousands of spans draw as fast as ten. Communication has a lane
of its own: what lies under a compute phase is hidden behind it, what lies under a wait is exposed.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.patches import Patch

from dlojz.record import RunRecord, Span
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_seconds
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import phase_label, phase_style

COMPUTE_LANE = (-0.4, 0.8)
"""Top and height, in ranks, where there is no communication to show; the two lanes share the same room otherwise."""
UPPER_LANE, LOWER_LANE = (-0.4, 0.48), (0.12, 0.28)
WITHIN = "communication"


def timeline_figure(record: RunRecord, path: str | Path | None = None, steps: int | None = 3) -> LabFigure:
    """Draw the spans of a run.

    Args:
        record: a run whose phases were kept.
        path: picture to write, if any.
        steps: how many of the last steps kept are drawn; None for all.

    Raises:
        LabError: if the run kept no spans, or the picture cannot be written.
    """
    kept = sorted({span.step for span in record.spans})
    if not kept:
        raise LabError(f"the run {record.run_id} kept no timeline (it ended before its first step): run it again.")
    chosen = set(kept if steps is None else kept[-steps:])
    spans = [span for span in record.spans if span.step in chosen]
    ranks = sorted({span.rank for span in spans})
    origin_s = min(span.start_s for span in spans)
    figure = new_figure(
        12.0,
        1.9 + 0.55 * len(ranks),
        alt=say(
            en=f"Phases of {len(chosen)} steps on {len(ranks)} ranks of {record.title}",
            fr=f"Phases de {len(chosen)} pas sur {len(ranks)} rangs de {record.title}",
        ),
    )
    axes = figure.subplots()
    names = list(dict.fromkeys(span.phase for span in sorted(spans, key=_drawing_order)))
    compute_lane = UPPER_LANE if any(name.startswith(WITHIN) for name in names) else COMPUTE_LANE
    for name in names:
        style = phase_style(name)
        top, height = LOWER_LANE if name.startswith(WITHIN) else compute_lane
        for rank in ranks:
            bars = [
                ((span.start_s - origin_s) * 1e3, (span.end_s - span.start_s) * 1e3)
                for span in spans
                if (span.phase, span.rank) == (name, rank)
            ]
            axes.broken_barh(
                bars,
                (rank + top, height),
                facecolor=style.color,
                hatch=style.hatch,
                edgecolor="#333333",
                linewidth=0.5,
            )
    for step in sorted(chosen):
        start_ms = (min(span.start_s for span in spans if span.step == step) - origin_s) * 1e3
        axes.axvline(start_ms, color="#333333", linewidth=1.0, linestyle="--")
        axes.annotate(
            say(en=f"step {step + 1}", fr=f"pas {step + 1}"),
            (start_ms, ranks[0] - 0.5),
            xytext=(4, 2),
            textcoords="offset points",
            va="bottom",
            fontsize=9,
        )
    axes.set_yticks(ranks, [say(en=f"rank {rank}", fr=f"rang {rank}") for rank in ranks])
    axes.set_ylim(ranks[-1] + 0.6, ranks[0] - 0.85)
    axes.set_xlim(left=0)
    axes.set_xlabel(say(en="time, ms", fr="temps (ms)"))
    axes.set_title(
        say(en="What each rank does: ", fr="Ce que fait chaque rang : ")
        + visible(record.title)
        + _overlap_words(record),
        loc="left",
    )
    plain(axes)
    axes.grid(visible=False, axis="y")
    axes.legend(
        handles=[
            Patch(
                facecolor=phase_style(name).color,
                hatch=phase_style(name).hatch,
                edgecolor="#333333",
                label=" " + phase_label(visible(name)),
            )
            for name in names
        ],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
        handleheight=1.2,
    )
    return finish(figure, path)


def _overlap_words(record: RunRecord) -> str:
    """How much of rank 0's communication is exposed and how much is hidden, where it was measured."""
    measured = record.footprint()
    exposed_s, hidden_s = (
        (measured.phases.communication_exposed_s, measured.phases.communication_hidden_s) if measured else (None, None)
    )
    if exposed_s is None or hidden_s is None:
        return ""
    exposed, hidden = format_seconds(exposed_s), format_seconds(hidden_s)
    return say(
        en=f"\ncommunication of rank 0 per step (median): {exposed} exposed, {hidden} hidden behind backward",
        fr=f"\ncommunication du rang 0 par pas (médiane) : {exposed} exposée, {hidden} cachée par la passe arrière",
    )


def _drawing_order(span: Span) -> tuple[bool, bool, float]:
    """The wait is drawn over the backward phase that it is the end of; communication comes last in the legend."""
    return span.phase.startswith(WITHIN), span.phase == "wait", span.start_s
