"""The board of all ways to send less: bytes against loss, and the step over links from slow to fast.

Layer 4. Invariant: nothing is trained or counted here; every way has one colour and one marker in both panels, and what
sends everything is hollow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dlojz.predict.sending import Way, gaps_percent
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

LATENCY_S = 30e-6
"""α of the links drawn: that of Ethernet through the kernel, tens of microseconds."""
LINKS_GBIT = (0.1, 100.0)
"""Bandwidths drawn, from and to, in Gbit/s per direction."""
_POINTS = 60
_LINEAR_PERCENT = 5.0
"""Gaps beyond this are drawn on a logarithmic scale."""
_COLORS = (BLACK, ORANGE, SKY, GREEN, VERMILION, BLUE, PURPLE, GREY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
_DASHES = ("-", "--", "-.", ":")


def communication_figure(
    ways: Sequence[Way], path: str | Path | None = None, *, latency_s: float = LATENCY_S
) -> LabFigure:
    """Draw the bytes that a rank sends per step against the final loss, and the step's time over slow and fast links.

    Left: a point per way, on a logarithmic axis of bytes: how far its loss is above that of `Way.against`, seed by seed
    (median, a bar from the best to the worst); a dotted line goes to what is sent after a first stage in full. Right,
    where steps were measured: the step as it was measured here plus `Way.link_s`, an upper bound, as nothing is
    computed meanwhile.

    Args:
        ways: see `dlojz.predict.sending`; those without losses are not drawn on the left.
        path: picture to write, if any.
        latency_s: α of the links.

    Raises:
        LabError: without a way that has losses, or without what it is held against; if the picture cannot be written.
    """
    judged = {way.name: way for way in ways if way.losses and all(map(math.isfinite, way.losses))}
    lonely = [way for way in judged.values() if len(way.losses) != len(getattr(judged.get(way.against), "losses", ()))]
    if lonely:
        raise LabError(
            say(
                en=f"{lonely[0].name} is held against {lonely[0].against}, seed by seed, but that has no losses of the "
                "same seeds: train it beside.",
                fr=f"{lonely[0].name} se compare à {lonely[0].against}, graine par graine, mais celui-ci n’a pas de "
                "pertes pour les mêmes graines : entraînez-le à côté.",
            )
        )
    if not judged:
        raise LabError(
            say(
                en="the board needs at least one way with the losses of a run, but none was received: train first.",
                fr="le tableau demande au moins une méthode avec les pertes d’un entraînement, mais aucune n’a été "
                "reçue : entraînez d’abord.",
            )
        )
    timed = [way for way in ways if way.step_s is not None]
    names = ", ".join(visible(way.name) for way in ways)
    figure = new_figure(
        12.5 if timed else 8.0,
        6.4,
        say(
            en=f"Bytes sent per step against the gap of the final loss, and the step's time over links, of: {names}",
            fr=f"Octets envoyés par pas et écart de la perte finale, durée du pas selon le lien, de : {names}",
        ),
    )
    columns = figure.subplots(1, 2) if timed else [figure.subplots()]
    _pareto(columns[0], ways, judged)
    if timed:
        _links(columns[1], ways, timed, latency_s)
    handles, labels = columns[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6 if timed else 4, frameon=False, fontsize=9)
    return finish(figure, path)


def _look(ways: Sequence[Way], way: Way) -> tuple[str, str, str]:
    """Colour, marker and dashes of a way."""
    number = list(ways).index(way)
    return (
        _COLORS[number % len(_COLORS)],
        _MARKERS[number % len(_MARKERS)],
        _DASHES[number % len(_DASHES) if number < len(_COLORS) else (number + 1) % len(_DASHES)],
    )


def _pareto(axes: Axes, ways: Sequence[Way], judged: Mapping[str, Way]) -> None:
    """The left panel."""
    points = {name: gaps_percent(way, judged[way.against]) for name, way in judged.items()}
    for name, way in judged.items():
        color, marker, _ = _look(ways, way)
        x, y = way.counted_bytes or way.sent_bytes, statistics.median(points[name])
        axes.plot([x, x], [min(points[name]), max(points[name])], color=color, linewidth=1.2)
        if way.steady_bytes < 0.99 * x:  # where a long run would lie
            axes.plot([way.steady_bytes, x], [y, y], color=color, linestyle=":", linewidth=1.2)
            axes.plot(way.steady_bytes, y, marker="|", color=color, markersize=9)
        face = "white" if way.plain else color
        axes.plot(x, y, marker=marker, color=color, markerfacecolor=face, markersize=9, linestyle="none", label=name)
    if max(abs(gap) for own in points.values() for gap in own) > _LINEAR_PERCENT:  # one far away would hide the others
        axes.set_yscale("symlog", linthresh=_LINEAR_PERCENT)
        axes.set_yticks((-20, -10, -5, -2, 0, 2, 5, 10, 20, 50, 100))
        low, high = (bound(gap for own in points.values() for gap in own) for bound in (min, max))
        axes.set_ylim(min(low * 1.2, -1), high * 1.2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(say(en="sent by each rank per step, mean of the run", fr="envoyé par rang et par pas, en moyenne"))
    axes.set_ylabel(
        say(en="final loss: gap to sending everything (%)", fr="perte finale : écart à l’envoi complet (%)")
    )
    axes.set_title(
        say(
            en="Less sent, and what it costs\n(hollow: everything sent; dotted: after the first stage)",
            fr="Envoyer moins, et ce que cela coûte\n(creux : tout est envoyé ; pointillé : après la première phase)",
        ),
        fontsize=11,
    )
    plain(axes)


def _number(value: float) -> str:
    """A number of an axis as the reader's language writes it."""
    return f"{value:g}".replace(".", say(en=".", fr=","))


def _links(axes: Axes, ways: Sequence[Way], timed: Sequence[Way], latency_s: float) -> None:
    """The right panel."""
    low, high = (math.log10(gbit) for gbit in LINKS_GBIT)
    gbits = [10 ** (low + (high - low) * number / (_POINTS - 1)) for number in range(_POINTS)]
    for way in timed:
        color, marker, dashes = _look(ways, way)
        taken = [1e3 * ((way.step_s or 0) + way.link_s(latency_s, gbit * 1e9 / 8)) for gbit in gbits]
        face = "white" if way.plain else color
        axes.plot(gbits, taken, dashes, color=color, marker=marker, markevery=10, markersize=5, markerfacecolor=face)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(say(en="bandwidth of the link (Gbit/s)", fr="débit du lien (Gbit/s)"))
    axes.set_ylabel(say(en="step (ms)", fr="pas (ms)"))
    microseconds = f"{1e6 * latency_s:g}"
    axes.set_title(
        say(
            en=f"The step over slower links, predicted\n(measured here, plus α–β with α = {microseconds} µs)",
            fr=f"Le pas sur des liens plus lents, prédit\n(mesuré ici, plus α–β avec α = {microseconds} µs)",
        ),
        fontsize=11,
    )
    plain(axes)
