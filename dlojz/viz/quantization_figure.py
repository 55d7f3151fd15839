"""Signal to noise of quantized layers, foreseen beside measured: layer by layer, and one against the other.

Layer 4. Invariant: what is measured is filled and joined by a line, what was foreseen is hollow; a colour comes with a
marker of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from dlojz.compress.method import LayerError
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, GREY, LINE_STYLES

MOST_LABELS = 30
"""Layers whose names are written along the axis; of more, every second or third."""
MOST_SETTINGS = len(LINE_STYLES)


def sqnr_figure(errors: Mapping[str, Sequence[LayerError]], path: str | Path | None = None) -> LabFigure:
    """Draw the signal to quantization noise of each layer, and the measured against the foreseen one.

    Args:
        errors: by the name of a setting (`INT8`, `INT4, mse`…), its layers in the order of the model; up to 8 settings.
        path: picture to write, if any.

    Raises:
        LabError: without a setting, or one without layers; for more settings than there are markers; if the picture
            cannot be written.
    """
    if not errors or not all(errors.values()) or len(errors) > MOST_SETTINGS:
        raise LabError(
            say(
                en=f"a figure of signal to noise needs from 1 to {MOST_SETTINGS} settings with layers, but "
                f"{len(errors)} were received, {sum(not layers for layers in errors.values())} of them without.",
                fr=f"une figure du rapport signal sur bruit demande de 1 à {MOST_SETTINGS} réglages avec des couches, "
                f"mais {len(errors)} ont été reçus, dont {sum(not layers for layers in errors.values())} sans.",
            )
        )
    figure = new_figure(12.0, 5.0, alt=description(errors))
    by_layer, against = figure.subplots(1, 2, width_ratios=(1.9, 1.0))
    _by_layer(by_layer, errors)
    _against(against, errors)
    handles = [
        Line2D([], [], color=color, marker=marker, linestyle="-", label=visible(name))
        for name, (color, _, marker) in zip(errors, LINE_STYLES, strict=False)
    ]
    handles.append(
        Line2D(
            [],
            [],
            color=BLACK,
            marker="o",
            markersize=9,
            markerfacecolor="none",
            linestyle="none",
            label=say(en="hollow: predicted, Δ²/12", fr="creux : prédit, Δ²/12"),
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False)
    return finish(figure, path)


def description(errors: Mapping[str, Sequence[LayerError]]) -> str:
    """The figure in words: for each setting its worst layer, and how far the prediction is off at most."""
    told = []
    for name, layers in errors.items():
        worst = min(layers, key=lambda one: one.measured_sqnr_db)
        lowest, where = _decibels(worst.measured_sqnr_db), visible(worst.name)
        told.append(say(en=f"{visible(name)}: {lowest} ({where})", fr=f"{visible(name)} : {lowest} ({where})"))
        if gaps := _gaps(layers):
            off = _decibels(max(gaps))
            told[-1] += say(en=f", predicted within {off}", fr=f", prédit à {off} près")
    return say(
        en="Signal to quantization noise by layer; the worst layer of each setting: ",
        fr="Rapport signal sur bruit de quantification par couche ; la pire couche de chaque réglage : ",
    ) + say(en="; ", fr=" ; ").join(told)


def _decibels(value: float) -> str:
    return say(en=f"{value:.1f} dB", fr=f"{value:.1f} dB".replace(".", ","))


def _gaps(layers: Sequence[LayerError]) -> list[float]:
    return [
        abs(one.predicted_sqnr_db - one.measured_sqnr_db)
        for one in layers
        if one.predicted_sqnr_db is not None and math.isfinite(one.predicted_sqnr_db - one.measured_sqnr_db)
    ]


def _finite(value: float | None) -> float:
    """What can be drawn: nothing for what was not foreseen, nor for a layer without any noise."""
    return value if value is not None and math.isfinite(value) else math.nan


def _by_layer(axes: Axes, errors: Mapping[str, Sequence[LayerError]]) -> None:
    names = [one.name for one in max(errors.values(), key=len)]
    place = {name: index for index, name in enumerate(names)}
    for layers, (color, dashes, marker) in zip(errors.values(), LINE_STYLES, strict=False):
        drawn = [one for one in layers if one.name in place]
        x = [place[one.name] for one in drawn]
        axes.plot(
            x,
            [_finite(one.measured_sqnr_db) for one in drawn],
            color=color,
            linestyle=dashes,
            marker=marker,
            markersize=4,
            linewidth=1,
        )
        axes.plot(
            x,
            [_finite(one.predicted_sqnr_db) for one in drawn],
            color=color,
            linestyle="none",
            marker=marker,
            markersize=9,
            markerfacecolor="none",
        )
    every = -(-len(names) // MOST_LABELS)
    axes.set_xticks(range(0, len(names), every), [_short(name) for name in names[::every]], rotation=60, ha="right")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylabel(say(en="signal to noise (dB)", fr="signal sur bruit (dB)"))
    axes.set_title(say(en="Layer by layer, fed by the teacher", fr="Couche par couche, aux entrées du professeur"))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    plain(axes)


def _short(name: str) -> str:
    """`blocks.3.qkv` as `3.qkv`: the blocks are numbered, and say so by it."""
    return visible(name.removeprefix("blocks."))


def _against(axes: Axes, errors: Mapping[str, Sequence[LayerError]]) -> None:
    drawn: list[float] = []
    for layers, (color, _, marker) in zip(errors.values(), LINE_STYLES, strict=False):
        known = [one for one in layers if _gaps([one])]
        x = [_finite(one.predicted_sqnr_db) for one in known]
        y = [_finite(one.measured_sqnr_db) for one in known]
        axes.plot(x, y, color=color, linestyle="none", marker=marker, markersize=5)
        drawn += [*x, *y]
    if drawn:
        ends = (min(*drawn, 0.0), max(drawn) * 1.03)
        axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=1, zorder=1)
        axes.annotate(
            say(en="as predicted", fr="comme prédit"),
            xy=(ends[1] / 2, ends[1] / 2),
            xytext=(-6, 6),
            textcoords="offset points",
            ha="right",
            va="bottom",
            color="#555555",
            fontsize=8,
        )
        axes.annotate(
            say(
                en="below: clamped values,\nwhich Δ²/12 does not know",
                fr="en dessous : valeurs écrêtées,\nque Δ²/12 ne connaît pas",
            ),
            xy=(0.97, 0.04),
            xycoords="axes fraction",
            ha="right",
            va="bottom",
            color="#555555",
            fontsize=8,
        )
    axes.set_xlabel(say(en="predicted (dB)", fr="prédit (dB)"))
    axes.set_ylabel(say(en="measured (dB)", fr="mesuré (dB)"))
    axes.set_title(say(en="Measured against predicted", fr="Le mesuré face au prédit"))
    plain(axes)
