"""The figures of a campaign: memory and throughput against the batch, one against the other, prediction, scaling.

Layer 4. Invariant: nothing is computed here; what did not fit is drawn where it was predicted, crossed out; a machine's
limit is a line with its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlojz.text import say
from dlojz.viz.campaign_marks import (
    Mark,
    campaign_canvas,
    count_axis,
    decimals,
    from_zero,
    hidden_marks,
    legend,
    limits,
    memory_keys,
    memory_mark,
    or_nothing,
    pareto_front,
    series_of,
    style_of,
)
from dlojz.viz.canvas import LabFigure, finish, plain
from dlojz.viz.footprint_figure import scale_of
from dlojz.viz.palette import BLACK

FAMILY = attrgetter("family")


def batch_figure(marks: Sequence[Mark], batch_label: str, path: str | Path | None = None) -> LabFigure:
    """Throughput and memory against the batch, with the limit of the device.

    Args:
        marks: the points.
        batch_label: what the axis counts, in words.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = campaign_canvas(
        say(
            en="Throughput and memory of the heaviest rank against the batch, with the device's limit, of: ",
            fr="Débit et mémoire du rang le plus chargé selon le batch, avec la limite de l’appareil, de : ",
        ),
        list(series_of(marks)),
        width_in=12.5,
    )
    speed, memory = figure.subplots(1, 2)
    unit, scale = scale_of(max((mark.taken_bytes or 0 for mark in marks), default=0))
    hidden = hidden_marks(marks)
    for number, own in enumerate(series_of(marks).values()):
        color, dashes, marker = style_of(number)
        ordered = sorted(own, key=lambda mark: mark.batch)
        known = [mark for mark in ordered if mark.samples_per_s is not None]
        speed.plot([m.batch for m in known], [m.samples_per_s or 0 for m in known], dashes, color=color, marker=marker)
        held = [mark for mark in ordered if mark.taken_bytes is not None]
        values = [(mark.taken_bytes or 0) / scale for mark in held]
        memory.plot([mark.batch for mark in held], values, dashes, color=color, linewidth=1.2)
        for mark, value in zip(held, values, strict=True):
            memory_mark(memory, (mark.batch, value), mark, style_of(number), hidden[mark])
    far = limits(memory, marks, scale)
    for axes in (speed, memory):
        count_axis(axes, sorted({mark.batch for mark in marks}), batch_label)
    or_nothing(speed, any(mark.samples_per_s is not None for mark in marks))
    from_zero(speed, say(en="samples/s", fr="échantillons/s"), say(en="Throughput, measured", fr="Débit mesuré"))
    title = say(en="Memory of the heaviest rank", fr="Mémoire du rang le plus chargé")
    from_zero(memory, unit, title + (f"\n({far})" if far else ""))
    legend(figure, list(series_of(marks)), memory_keys(marks))
    return finish(figure, path)


def pareto_figure(marks: Sequence[Mark], path: str | Path | None = None) -> LabFigure:
    """Memory against throughput; the points that no other beats in both are joined.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = campaign_canvas(
        say(
            en="Throughput against memory; the best compromises joined, of: ",
            fr="Débit selon la mémoire ; les meilleurs compromis reliés, de : ",
        ),
        list(series_of(marks)),
    )
    axes = figure.subplots()
    known = [mark for mark in marks if mark.samples_per_s is not None and mark.measured_bytes is not None]
    unit, scale = scale_of(max((mark.measured_bytes or 0 for mark in known), default=0))
    for number, own in enumerate(series_of(marks).values()):
        color, _, marker = style_of(number)
        for mark in own:
            if mark in known:
                x, y = (mark.measured_bytes or 0) / scale, mark.samples_per_s or 0
                axes.plot(x, y, marker=marker, color=color, markersize=8, linestyle="none")
                axes.annotate(str(mark.batch), (x, y), xytext=(6, 4), textcoords="offset points", fontsize=8)
    front = pareto_front(known)
    axes.plot(
        [(mark.measured_bytes or 0) / scale for mark in front],
        [mark.samples_per_s or 0 for mark in front],
        linestyle="--",
        color=BLACK,
        linewidth=1.2,
        zorder=1,
    )
    far = limits(axes, known, scale, vertical=True)
    or_nothing(axes, bool(known))
    axes.set_xlabel(say(en=f"memory of the heaviest rank, {unit}", fr=f"mémoire du rang le plus chargé, {unit}"))
    axes.set_xlim(left=0)
    title = say(
        en="Best compromises: up and to the left (numbers: batch)",
        fr="Meilleurs compromis : en haut à gauche (nombres : batch)",
    )
    from_zero(axes, say(en="samples/s", fr="échantillons/s"), title + (f"\n({far})" if far else ""))
    joined = Line2D([], [], linestyle="--", color=BLACK, label=say(en="not beaten in both", fr="non dominés"))
    legend(figure, list(series_of(marks)), [joined])
    return finish(figure, path)


def truth_figure(marks: Sequence[Mark], path: str | Path | None = None) -> LabFigure:
    """Predicted against measured: memory, bytes of communication, throughput; on the diagonal they are equal.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = campaign_canvas(
        say(
            en="Predicted against measured memory, communication and throughput, of: ",
            fr="Mémoire, communication et débit, prédits et mesurés, de : ",
        ),
        list(series_of(marks)),
        width_in=13.0,
    )
    panels = figure.subplots(1, 3)
    titles = (
        say(en="Memory of the heaviest rank", fr="Mémoire du rang le plus chargé"),
        say(en="Messages of rank 0, per step", fr="Messages du rang 0, par pas"),
        say(en="Throughput (predicted: replicas × one process)", fr="Débit (prédit : répliques × un processus)"),
    )
    pairs: tuple[Callable[[Mark], tuple[float | None, float | None]], ...] = (
        lambda mark: (mark.predicted_bytes, mark.measured_bytes),
        lambda mark: (mark.predicted_message_bytes, mark.measured_message_bytes),
        lambda mark: (mark.predicted_samples_per_s, mark.samples_per_s),
    )
    for panel, title, pair, in_bytes in zip(panels, titles, pairs, (True, True, False), strict=True):
        _truth(panel, marks, pair, title, in_bytes)
    legend(
        figure, list(series_of(marks)), [Line2D([], [], color=BLACK, linestyle="--", label=say(en="equal", fr="égaux"))]
    )
    return finish(figure, path)


def _truth(
    axes: Axes,
    marks: Sequence[Mark],
    pair: Callable[[Mark], tuple[float | None, float | None]],
    title: str,
    in_bytes: bool,
) -> None:
    known = [(number, *pair(mark)) for number, own in enumerate(series_of(marks).values()) for mark in own]
    drawn = [(number, x, y) for number, x, y in known if x is not None and y is not None]
    most = max((max(x, y) for _, x, y in drawn), default=1.0) or 1.0
    unit, scale = scale_of(most) if in_bytes else (say(en="samples/s", fr="échantillons/s"), 1)
    for number, x, y in drawn:
        color, _, marker = style_of(number)
        axes.plot(x / scale, y / scale, marker=marker, color=color, linestyle="none", markersize=7, clip_on=False)
    end = most / scale * 1.08
    if drawn:
        axes.plot([0, end], [0, end], linestyle="--", color=BLACK, linewidth=1.0, zorder=1)
    axes.set(xlim=(0, end), ylim=(0, end), xlabel=say(en="predicted, ", fr="prédit, ") + unit)
    axes.set_ylabel(say(en="measured, ", fr="mesuré, ") + unit)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_aspect("equal")
    decimals(axes)
    plain(axes)
    if not drawn:
        axes.set(xticks=[], yticks=[])
    half = any(y is not None for _, _, y in known)
    unforeseen = say(en="measured, but nothing predicts it here", fr="mesuré, mais rien ne le prédit ici")
    or_nothing(axes, bool(drawn), unforeseen if half else "")


def scaling_figure(marks: Sequence[Mark], path: str | Path | None = None) -> LabFigure:
    """Scaling efficiency against the number of ranks.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = campaign_canvas(
        say(
            en="Scaling efficiency against the number of ranks, of: ",
            fr="Efficacité du passage à l’échelle selon le nombre de rangs, de : ",
        ),
        list(series_of(marks, FAMILY)),
    )
    axes = figure.subplots()
    known = [mark for mark in marks if mark.efficiency is not None]
    for number, own in enumerate(series_of(marks, FAMILY).values()):
        color, dashes, marker = style_of(number)
        drawn = sorted((mark for mark in own if mark.efficiency is not None), key=lambda mark: mark.ranks)
        values = [100 * (mark.efficiency or 0) for mark in drawn]
        axes.plot([mark.ranks for mark in drawn], values, dashes, color=color, marker=marker)
    axes.axhline(100, linestyle="--", color=BLACK, linewidth=1.0)
    count_axis(axes, sorted({mark.ranks for mark in marks}), say(en="ranks", fr="rangs"))
    or_nothing(axes, bool(known))
    from_zero(
        axes,
        "%",
        say(
            en="Throughput per rank, over that of the fewest ranks",
            fr="Débit par rang, rapporté à celui du plus petit nombre de rangs",
        ),
    )
    legend(
        figure,
        list(series_of(marks, FAMILY)),
        [Line2D([], [], color=BLACK, linestyle="--", label=say(en="perfect", fr="parfaite"))],
    )
    return finish(figure, path)
