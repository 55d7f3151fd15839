"""What every rank does when: one line per rank, one bar per phase.

Layer 4. Invariant: one collection per phase, so that thousands of spans draw as fast as ten.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.patches import Patch

from dlojz.record import RunRecord, Span
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import phase_label, phase_style

FULL, INNER = 0.8, 0.36
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
            en=f"Phases of {len(chosen)} steps on {len(ranks)} ranks of {record.config.title}",
            fr=f"Phases de {len(chosen)} pas sur {len(ranks)} rangs de {record.config.title}",
        ),
    )
    axes = figure.subplots()
    names = list(dict.fromkeys(span.phase for span in sorted(spans, key=_inner_last)))
    for name in names:
        style, height = phase_style(name), INNER if name.startswith(WITHIN) else FULL
        for rank in ranks:
            bars = [
                ((span.start_s - origin_s) * 1e3, (span.end_s - span.start_s) * 1e3)
                for span in spans
                if (span.phase, span.rank) == (name, rank)
            ]
            axes.broken_barh(
                bars,
                (rank - height / 2, height),
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
    axes.set_xlabel(say(en="time, ms", fr="temps, ms"))
    axes.set_title(
        say(en="What each rank does: ", fr="Ce que fait chaque rang : ") + visible(record.config.title), loc="left"
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


def _inner_last(span: Span) -> tuple[bool, float]:
    """Communication is drawn over the phase it happens in."""
    return span.phase.startswith(WITHIN), span.start_s
