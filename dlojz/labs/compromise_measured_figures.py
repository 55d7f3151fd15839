"""Measured beside predicted on this machine: messages with their lines, layouts with their steps.

Layer 6 (labs), on `dlojz.viz`. Invariant: every measurement is drawn; a line or a bar that is no measurement says whose
it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes

from dlojz.labs.compromise_shown import EDGE, PLATE, given, illustrated, logarithmic, short
from dlojz.labs.pipeline_figures import Sheet, pictured
from dlojz.plan.choice import seconds
from dlojz.plan.reasons import decimal
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.footprint_words import percent
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, BLUE, GREY, LINE_STYLES, ORANGE, YELLOW

Line = tuple[float, float]
"""α in seconds and β in seconds per byte."""


class Layout(Protocol):
    """A layout of `dlojz.plan.here`: what it is called, and its predicted seconds."""

    @property
    def title(self) -> str:
        """In one line."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""


@pictured
def alpha_beta(
    points: Sequence[tuple[float, float]], *, factor: float = 1.0, **fits: Line | Callable[[], Line]
) -> LabFigure:
    """Messages measured, and the lines t = α + factor·n·β through them; below, each line's residuals.

    Args:
        points: bytes and seconds of each message, measured; what else they hold is not looked at.
        factor: bytes that the busiest link carries per byte of the message.
        **fits: name → (α in s, β in s per byte), or a function without arguments that gives them.

    Raises:
        LabError: without a point, or for a message or a duration that is not above 0.
    """
    measured = sorted((float(point[0]), float(point[1])) for point in points)
    if not measured or min(min(pair) for pair in measured) <= 0:
        raise LabError(
            say(
                en=f"points are pairs of bytes and seconds above 0, but {visible(measured[:1])} was received first.",
                fr=f"points contient des paires d’octets et de secondes positifs ; la première reçue : "
                f"{visible(measured[:1])}.",
            )
        )
    lines = {_named(name): _line(given(fit)) for name, fit in fits.items()}
    sizes, times = (np.array(column) for column in zip(*measured, strict=True))
    figure = new_figure(8.2, 5.4, alt=_alpha_beta_alt(len(measured), lines))
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2.1, 1.0))
    upper.plot(sizes, 1e3 * times, linestyle="none", marker="o", color=BLACK, markersize=5,
               label=say(en="measured", fr="mesuré"))  # fmt: skip
    along = np.geomspace(sizes.min(), sizes.max(), 200)
    for (name, (alpha, beta)), (color, dashes, marker) in zip(lines.items(), LINE_STYLES[1:], strict=False):
        drawn, there = alpha + factor * beta * along, alpha + factor * beta * sizes
        above = drawn > 0  # a line that goes below 0 has no place on a logarithmic axis
        label = say(
            en=f"{name}: α = {seconds(alpha)}, β = {short(1e9 * beta)} ns/B",
            fr=f"{name} : α = {seconds(alpha)}, β = {short(1e9 * beta)} ns/o",
        ).replace("= -", "= −")
        upper.plot(along[above], 1e3 * drawn[above], color=color, linestyle=dashes, linewidth=1.6, label=label)
        lower.plot(sizes, 100 * (there / times - 1), color=color, linestyle=dashes, marker=marker, markersize=5)
    upper.set_xscale("log")
    upper.set_yscale("log")
    upper.set_ylim(4e2 * times.min(), 2.5e3 * times.max())  # a line may go below 0, the measurements do not
    logarithmic(upper.yaxis, (1.0, 3.0))
    upper.set_ylabel(say(en="milliseconds (log.)", fr="millisecondes (log.)"))
    upper.legend(fontsize=8.5, frameon=False)
    lower.axhline(0, color=GREY, linewidth=1)
    lower.set_xlim(0.7 * sizes.min(), 1.4 * sizes.max())
    logarithmic(lower.xaxis)
    lower.xaxis.set_major_formatter(lambda value, _: _size(value))
    lower.set_xlabel(say(en="bytes of the message (log.)", fr="octets du message (log.)"))
    lower.set_ylabel(say(en="line over\nmeasured, %", fr="droite sur\nmesuré, %"))
    for axes in (upper, lower):
        plain(axes)
    return finish(figure)


def _named(name: str) -> str:
    """What a line is called: the usual names in the reader's language, any other as it is."""
    usual = {
        "yours": say(en="yours", fr="la vôtre"),
        "package": say(en="the package", fr="le paquet"),
        "lab_03": say(en="lab 03", fr="TP 03"),
    }
    return usual.get(name, visible(name).replace("_", " "))


def _line(value: Any) -> Line:
    try:
        alpha, beta = (float(one) for one in value)
    except (TypeError, ValueError):
        raise LabError(
            say(
                en=f"a fit is a pair (α, β) of numbers, but {visible(repr(value)[:80])} was received.",
                fr=f"un ajustement est une paire (α, β) de nombres, mais {visible(repr(value)[:80])} a été reçu.",
            )
        ) from None
    return alpha, beta


def _size(value: float) -> str:
    for factor, unit_en, unit_fr in ((1e9, "GB", "Go"), (1e6, "MB", "Mo"), (1e3, "kB", "ko")):
        if value >= factor:
            return f"{short(value / factor)} {say(en=unit_en, fr=unit_fr)}"
    return f"{short(value)} {say(en='B', fr='o')}"


def _alpha_beta_alt(number: int, lines: Mapping[str, Line]) -> str:
    each = "; ".join(
        f"{name} α = {seconds(alpha)}, β = {short(1e9 * beta)} ns" for name, (alpha, beta) in lines.items()
    )
    return say(
        en=f"{number} measured messages, seconds against bytes on logarithmic axes, and lines through them: {each}.",
        fr=f"{number} messages mesurés, durée selon la taille en échelle logarithmique, et des droites : {each}.",
    )


@illustrated
def neighbours(rows: Sequence[Layout], measured_s: Sequence[float]) -> tuple[LabFigure, Sheet]:
    """Layouts of this machine, predicted beside measured, by predicted step; the first choice and what it loses.

    Args:
        rows: of `plan_here`, in any order.
        measured_s: seconds of a step of each, in the same order.

    Raises:
        LabError: if there is none, or not one time for each.
    """
    if not rows or len(rows) != len(measured_s) or min(measured_s) <= 0:
        raise LabError(
            say(
                en=f"each of the {len(rows)} layouts needs its measured seconds, but {len(measured_s)} were received: "
                "give measure_steps the configurations of the same rows.",
                fr=f"à chacune des {len(rows)} configurations, il faut sa durée mesurée, mais {len(measured_s)} ont "
                "été reçues : donnez à measure_steps les configurations de ces mêmes lignes.",
            )
        )
    pairs = sorted(zip(rows, map(float, measured_s), strict=True), key=lambda pair: pair[0].step_s)
    loss = pairs[0][1] / min(value for _, value in pairs) - 1
    figure = new_figure(10.0, 0.5 * len(pairs) + 1.9, alt=_neighbours_alt(pairs, loss))
    axes = figure.subplots()
    _bars(axes, pairs)
    axes.set_title(_loss_words(pairs, loss), fontsize=9.5, loc="left")
    return finish(figure), _neighbours_sheet(pairs)


def _bars(axes: Axes, pairs: Sequence[tuple[Layout, float]]) -> None:
    places = np.arange(len(pairs))
    predicted, measured = [1e3 * row.step_s for row, _ in pairs], [1e3 * value for _, value in pairs]
    for shift, values, color, hatch, label in (
        (-0.19, predicted, ORANGE, "//", say(en="predicted", fr="prédit")),
        (0.19, measured, BLUE, "", say(en="measured (median)", fr="mesuré (médiane)")),
    ):
        bars = axes.barh(
            places + shift, values, 0.36, color=color, hatch=hatch, edgecolor=EDGE, linewidth=0.6, label=label
        )
        axes.bar_label(bars, [short(value) for value in values], padding=3, fontsize=8, bbox=PLATE)
    fastest = int(np.argmin(measured))
    reach = 1.12 * max(*predicted, *measured)
    axes.plot(
        [0.985 * reach], [0], marker="*", markersize=13, color=YELLOW, markeredgecolor=BLACK, linestyle="none",
        label=say(en="first choice", fr="premier choix"),
    )  # fmt: skip
    axes.plot(
        [0.955 * reach], [fastest], marker="P", markersize=9, color=BLUE, markeredgecolor=BLACK, linestyle="none",
        label=say(en="fastest measured", fr="la plus rapide mesurée"),
    )  # fmt: skip
    axes.set_xlim(0, reach)
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_yticks(places, [visible(row.title) for row, _ in pairs], fontsize=8.5)
    axes.set_xlabel(say(en="milliseconds of a step", fr="millisecondes d’une itération"))
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    plain(axes)
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8.5)


def _loss_words(pairs: Sequence[tuple[Layout, float]], loss: float) -> str:
    if loss <= 0:
        return say(
            en=f"first choice of {len(pairs)}: also the fastest measured",
            fr=f"premier choix sur {len(pairs)} : c’est aussi la plus rapide mesurée",
        )
    return say(
        en=f"first choice of {len(pairs)}: {percent(loss)} above the fastest measured",
        fr=f"premier choix sur {len(pairs)} : {percent(loss)} au-dessus de la plus rapide mesurée",
    )


def _neighbours_sheet(pairs: Sequence[tuple[Layout, float]]) -> Sheet:
    fastest = min(value for _, value in pairs)
    head = (
        say(en="layout", fr="configuration"),
        say(en="predicted", fr="prédit"),
        say(en="measured", fr="mesuré"),
        say(en="predicted over measured", fr="prédit sur mesuré"),
        say(en="over the fastest", fr="sur la plus rapide"),
    )
    rows = [
        (
            ("★ " if place == 0 else "") + row.title,
            seconds(row.step_s),
            seconds(value),
            percent(row.step_s / value - 1, signed=True),
            f"× {decimal(value / fastest, 2)}",
        )
        for place, (row, value) in enumerate(pairs)
    ]
    return Sheet(head, tuple(rows))


def _neighbours_alt(pairs: Sequence[tuple[Layout, float]], loss: float) -> str:
    each = ", ".join(f"{visible(row.title)}: {seconds(row.step_s)} / {seconds(value)}" for row, value in pairs)
    return f"{_loss_words(pairs, loss)}. " + say(
        en=f"Predicted / measured seconds of a step: {each}.", fr=f"Itération prédite / mesurée : {each}."
    )
