"""Figures and tables of lab 06 that need runs: memory and messages side by side, counted bytes, losses laid over.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what the package predicts; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from dlojz.labs.pipeline_figures import Sheet, pictured, plain_number
from dlojz.labs.run_bars import measured_footprint, memory_and_messages
from dlojz.predict import predict
from dlojz.runs import Run
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import (
    LINE_STYLES,
)


def _title(run: Run) -> str:
    layout = run.config.layout
    return layout.title if layout.world_size > 1 else say(en="one process", fr="un processus")


@pictured
def side_by_side(runs: Sequence[Run]) -> LabFigure:
    """Rank 0 of runs: memory by category, and bytes of the tensor axis by collective; predicted in pale above."""
    opening = say(
        en="Memory by category and bytes sent along the tensor axis, predicted and measured, of: ",
        fr="Mémoire par catégorie et octets échangés sur l’axe tensor, prédits et mesurés, pour : ",
    )
    titles = [_title(run) for run in runs]
    return memory_and_messages(runs, titles, opening=opening, shown=lambda one: one.group == "tp", ncols=5)


def counted(runs: Sequence[Run], group: str = "tp") -> Sheet:
    """What rank 0 communicates per step along one axis: calls and bytes of their messages, predicted and measured.

    The last column is what a ring sends for them.
    """
    rows: list[tuple[str, ...]] = []
    for run in runs:
        forecast = {one.collective: one for one in predict(run.config).communication if one.group == group}
        found = {one.collective: one for one in measured_footprint(run).communication if one.group == group}
        for name in sorted({*forecast, *found}):
            both = (forecast.get(name), found.get(name))
            calls = [str(one.count) if one else "0" for one in both]
            messages = [format_bytes(one.message_bytes) if one else "0" for one in both]
            sent = format_bytes(found[name].sent_bytes) if name in found else "0"
            rows.append((_title(run), name.replace("_", "-"), *calls, *messages, sent))
    head = (
        say(en="run", fr="exécution"),
        say(en="collective", fr="communication"),
        say(en="calls, predicted", fr="appels prédits"),
        say(en="counted", fr="comptés"),
        say(en="messages, predicted", fr="messages prédits"),
        say(en="counted", fr="comptés"),
        say(en="sent", fr="envoyé"),
    )
    return Sheet(head, tuple(rows))


@pictured
def losses(runs: Sequence[Run]) -> LabFigure:
    """Losses of runs laid over each other."""
    figure = new_figure(7.0, 3.0, alt=say(en="Loss by step: ", fr="Perte par pas : ")
                        + ", ".join(_title(run) for run in runs))  # fmt: skip
    axes = figure.subplots()
    for number, (run, (color, line, marker)) in enumerate(zip(runs, LINE_STYLES, strict=False)):
        axes.plot(run.losses, color=color, linestyle=line, marker=marker, markersize=11 - 3 * number,
                  markerfacecolor="none", label=_title(run))  # fmt: skip
    axes.set_xticks(range(len(runs[0].losses)))
    axes.yaxis.set_major_formatter(lambda value, position: plain_number(value))
    axes.set_xlabel(say(en="step", fr="pas"))
    axes.set_ylabel(say(en="loss", fr="perte"))
    axes.legend(frameon=False)
    plain(axes)
    return finish(figure)
