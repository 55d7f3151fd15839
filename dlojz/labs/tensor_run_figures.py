"""Figures and tables of lab 06 that need runs: memory and messages side by side, counted bytes, losses laid over.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what the package predicts; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes

from dlojz.footprint import CATEGORIES, Footprint
from dlojz.labs.pipeline_figures import Sheet, pictured, plain_number
from dlojz.labs.zero_published import decimal
from dlojz.predict import predict
from dlojz.runs import Run
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import MEBIBYTE, format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import (
    CATEGORY_STYLES,
    COLLECTIVE_STYLES,
    LINE_STYLES,
    PREDICTED_ALPHA,
    Style,
    category_label,
)


def _title(run: Run) -> str:
    layout = run.config.layout
    return layout.title if layout.world_size > 1 else say(en="one process", fr="un processus")


def _measured(run: Run, rank: int = 0) -> Footprint:
    footprint = run.record.footprint(rank) if run.record is not None else None
    if footprint is None:
        raise LabError(
            say(
                en=f"the run {run.config.title} was not measured to its end: look at its logs, then run it again.",
                fr=f"l’exécution {run.config.title} n’a pas été mesurée jusqu’au bout : consultez ses journaux, puis "
                "relancez-la.",
            )
        )
    return footprint


@pictured
def side_by_side(runs: Sequence[Run]) -> LabFigure:
    """Rank 0 of runs: memory by category, and bytes of the tensor axis by collective; predicted in pale above."""
    pairs = [(run, predict(run.config), _measured(run)) for run in runs]
    titles = [_title(run) for run in runs]
    figure = new_figure(
        10.0,
        1.5 + 0.62 * len(runs),
        alt=say(
            en="Memory by category and bytes sent along the tensor axis, predicted and measured, of: ",
            fr="Mémoire par catégorie et octets échangés sur l’axe tensor, prédits et mesurés, pour : ",
        )
        + ", ".join(titles),
    )
    memory, sent = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
    for place, (_, *both) in enumerate(pairs):
        for footprint, shift, alpha in zip(both, (-0.2, 0.2), (PREDICTED_ALPHA, 1.0), strict=True):
            categories = [(footprint.memory.category(name) or 0, CATEGORY_STYLES[name], category_label(name))
                          for name in CATEGORIES]  # fmt: skip
            messages = [(one.sent_bytes, COLLECTIVE_STYLES[one.collective], one.collective.replace("_", "-"))
                        for one in footprint.communication if one.group == "tp"]  # fmt: skip
            _stack(memory, categories, place + shift, alpha)
            _stack(sent, messages, place + shift, alpha)
    memory.set_yticks(range(len(runs)), [title.replace(" (", "\n(") for title in titles])
    memory.invert_yaxis()
    memory.set_xlabel(say(en="rank 0 (MiB)", fr="rang 0 (Mio)"))
    sent.set_xlabel(say(en="sent per step (MiB)", fr="envoyé par pas (Mio)"))
    for axes in (memory, sent):
        axes.xaxis.set_major_formatter(lambda value, position: decimal(f"{value:g}"))
        plain(axes)
        found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(found.values(), found.keys(), frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0),
                    ncols=5, fontsize=8)  # fmt: skip
    return finish(figure)


def _stack(axes: Axes, parts: Sequence[tuple[float, Style, str]], place: float, alpha: float) -> None:
    left = 0.0
    for num_bytes, style, label in parts:
        size = num_bytes / MEBIBYTE
        if size:
            axes.barh(place, size, left=left, height=0.36, color=style.color, hatch=style.hatch, alpha=alpha,
                      edgecolor="#333333", linewidth=0.4, label=label if alpha == 1.0 else None)  # fmt: skip
        left += size


def counted(runs: Sequence[Run], group: str = "tp") -> Sheet:
    """What rank 0 communicates per step along one axis: calls and bytes of their messages, predicted and measured.

    The last column is what a ring sends for them.
    """
    rows: list[tuple[str, ...]] = []
    for run in runs:
        forecast = {one.collective: one for one in predict(run.config).communication if one.group == group}
        found = {one.collective: one for one in _measured(run).communication if one.group == group}
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
