"""Figures of smaller models: the board, quantization errors, pruning schedules, speed of sparse layers.

Predicted is hollow or light, measured is full; a family or a setting has one colour and one marker in every panel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator

from dlojz.base.language import byte_units, decimal, percent, refusal, say, significant, spaced_percent
from dlojz.base.table import visible
from dlojz.compress.board_record import TEACHER, Board, BoardLine, family_title
from dlojz.compress.masks import CubicSchedule
from dlojz.compress.method import LayerError
from dlojz.compress.two_to_four import Form, SparseSpeed, crossing
from dlojz.display.canvas import (
    LabFigure,
    Spot,
    caption,
    finish,
    key,
    logarithmic,
    new_figure,
    note,
    place_labels,
    plain,
)
from dlojz.display.style import (
    BASELINE,
    BLACK,
    BLUE,
    GREEN,
    GREY,
    HEADING,
    LINE_STYLES,
    NEUTRAL,
    NORMAL,
    ORANGE,
    PREDICTED_ALPHA,
    QUIET,
    SKY,
    SMALL,
    VERMILION,
)

FAMILY_LOOKS = {
    TEACHER: (BLACK, "*"),
    "distillation": (BLUE, "o"),
    "quantization": (VERMILION, "s"),
    "pruning": (GREEN, "^"),
}
"""Colour and marker of a family."""
OTHER = (ORANGE, "D")
RING: dict[str, Any] = {"marker": "o", "markerfacecolor": "none", "markeredgecolor": BLACK, "markeredgewidth": 1.1}
KIBIBYTE = 1024
HELD_OUT_HALF = 0.5 / 360
"""Half an image of the digits: where a model without any error is drawn, as its logarithm is not."""
TICKS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
FINE_TICKS = (0.93, 0.94, 0.95, 0.96, 0.965, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995)
"""Where fewer than `LEAST_TICKS` of the others would be shown, because accuracies are close to one another."""
LEAST_TICKS = 4


class Cost(NamedTuple):
    """Quantity of a board that accuracy is drawn against, measured and predicted."""

    measured: Callable[[BoardLine], float]
    predicted: Callable[[BoardLine], float | None]


SIZE = Cost(lambda line: line.file_bytes / KIBIBYTE, lambda line: line.predicted_bytes / KIBIBYTE)
TIME = Cost(lambda line: line.latency_ratio, lambda line: line.predicted_latency_ratio)


def compress_figure(board: Board, path: str | Path | None = None) -> LabFigure:
    """Draw a board: accuracy against the size of the file, and against the time of an answer.

    Full: measured, median over the seeds; thin bars: all seeds (upright) and half of the rounds (across). Hollow:
    predicted. The dashed line joins what nothing beats in the two quantities of the panel; a ring marks what nothing
    beats in accuracy, size and time together. A method has the same number everywhere.
    """
    lines = board.lines()
    high = max(4.9, 1.5 + 0.25 * (len(lines) + len(_families(lines))))
    figure = new_figure(12.0, high, compress_description(board))
    figure.suptitle(visible(board.title()), x=0.008, ha="left", fontsize=HEADING)
    size, time, names = figure.subplots(1, 3, width_ratios=(1, 1, 0.52))
    front = {line.method for line in board.front()}
    unit = byte_units()[1]
    label = say(en=f"file, {unit} (hollow: predicted)", fr=f"fichier, {unit} (creux : prédit)")
    size.set_xlabel(label, fontsize=NORMAL)
    label = say(
        en="time of an answer over the teacher's (hollow: predicted)",
        fr="temps d’une réponse / celui du professeur (creux : prédit)",
    )
    time.set_xlabel(label, fontsize=NORMAL)
    _panel(size, lines, front, SIZE)
    _panel(time, lines, front, TIME)
    _sizes(size, lines)
    for line in lines:
        # The first and third quartile of the ratios within a round.
        quartiles = [line.latency_ratio_low, line.latency_ratio_high]
        time.plot(quartiles, [_error(line)] * 2, color=_look(line)[0], linewidth=1, alpha=0.5, zorder=1)
    size.set_ylabel(say(en="accuracy (log of the errors)", fr="exactitude (log des erreurs)"), fontsize=NORMAL)
    caption(size, title=say(en="accuracy against size", fr="exactitude et taille"))
    caption(time, title=say(en="accuracy against time", fr="exactitude et temps"))
    _names(names, board, lines, front)
    figure.draw_without_rendering()  # arranges the panels, so that labels find their room
    for axes, cost in ((size, SIZE), (time, TIME)):
        spots = [Spot(cost.measured(line), _error(line), str(number)) for number, line in enumerate(lines)]
        # Labels keep clear of predicted marks, too.
        foreseen = [(cost.predicted(line), _error(line)) for line in lines]
        place_labels(axes, spots, [(x, y) for x, y in foreseen if x is not None])
    return finish(figure, path)


def compress_description(board: Board) -> str:
    """Say accuracy, size and time of each line, and the front."""
    unit = byte_units()[1]
    line_sentences = "; ".join(
        say(
            en=f"{visible(line.method)}: {percent(line.accuracy, None)}, {SIZE.measured(line):.0f} {unit}, "
            f"{decimal(line.latency_ratio, 2)} times the teacher's time",
            fr=f"{visible(line.method)} : {percent(line.accuracy, None)}, {SIZE.measured(line):.0f} {unit}, "
            f"{decimal(line.latency_ratio, 2)} fois le temps du professeur",
        )
        for line in board.lines()
    )
    front = ", ".join(visible(line.method) for line in board.front())
    return say(
        en=f"Accuracy against size and time: {visible(board.title())}. {line_sentences}. On the front: {front}.",
        fr=f"Exactitude, taille et temps : {visible(board.title())}. {line_sentences}. Sur le front : {front}.",
    )


def panel_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Find the (cost, error) pairs that no other one beats in both, from cheap to dear."""
    front: list[tuple[float, float]] = []
    # Sorted by cost: a point is on the front if its error is below all before it.
    for cost, error in sorted(points):
        if not front or error < front[-1][1]:
            front.append((cost, error))
    return front


def _panel(axes: Axes, lines: Sequence[BoardLine], front: set[str], cost: Cost) -> None:
    for line in lines:
        color, marker = _look(line)
        x, y, foreseen = cost.measured(line), _error(line), cost.predicted(line)
        seeds = [max(1 - share, HELD_OUT_HALF) for share in (line.accuracy_high, line.accuracy_low)]
        axes.plot([x, x], seeds, color=color, linewidth=1, alpha=0.5, zorder=1)
        if foreseen is not None and line.method != TEACHER:
            dotted: dict[str, Any] = {"linewidth": 0.8, "linestyle": ":", "zorder": 1}
            # A dotted line joins prediction and measurement of a line; only its start has a marker.
            axes.plot([foreseen, x], [y, y], color=color, marker=marker, markevery=[0], **dotted, **HOLLOW)
        axes.plot([x], [y], color=color, marker=marker, markersize=9 if marker == "*" else 6, linestyle="", zorder=3)
        if line.method in front:
            axes.plot([x], [y], markersize=14, linestyle="", zorder=2, **RING)
    best = panel_front([(cost.measured(line), _error(line)) for line in lines])
    axes.step(*zip(*best, strict=True), where="post", color=NEUTRAL, linewidth=1, linestyle="--", zorder=0)
    _accuracies(axes, lines)


def _accuracies(axes: Axes, lines: Sequence[BoardLine]) -> None:
    """Upright, the errors on a logarithmic axis, the fewest on top: what matters lies between 95 and 99%."""
    errors = [max(1 - share, HELD_OUT_HALF) for line in lines for share in (line.accuracy_low, line.accuracy_high)]
    fewest_errors, most_errors = min(errors) / 1.35, max(errors) * 1.35
    logarithmic(axes, "y", lambda error: percent(1 - error, None))
    # Upside down: the fewest errors on top.
    axes.set_ylim(most_errors, fewest_errors)
    inside = [[tick for tick in ticks if fewest_errors <= 1 - tick <= most_errors] for ticks in (TICKS, FINE_TICKS)]
    chosen_ticks = inside[0] if len(inside[0]) >= LEAST_TICKS else max(inside, key=len)
    axes.yaxis.set_major_locator(FixedLocator([1 - tick for tick in chosen_ticks]))
    axes.yaxis.set_minor_locator(NullLocator())
    plain(axes)


def _sizes(axes: Axes, lines: Sequence[BoardLine]) -> None:
    sizes = [SIZE.measured(line) for line in lines]
    logarithmic(axes, "x")
    axes.set_xlim(min(sizes) / 1.25, max(sizes) * 1.25)
    axes.xaxis.set_minor_locator(NullLocator())


def _names(axes: Axes, board: Board, lines: Sequence[BoardLine], front: set[str]) -> None:
    """Which number is which method; the ones on the front have their ring here too. Below, what the signs mean."""
    axes.set_axis_off()
    families = _families(lines)
    axes.set(xlim=(0, 1), ylim=(len(lines) + len(families) + 2.2, -0.6))

    def sign(y: float, text: str, quiet: bool = True, **properties: Any) -> None:
        axes.plot([0.16], [y], clip_on=False, **properties)
        axes.text(0.25, y, text, va="center", fontsize=SMALL if quiet else 8.5, color=QUIET if quiet else BLACK)

    for number, line in enumerate(lines):
        color, marker = _look(line)
        name = say(en=f"teacher ({visible(board.teacher)})", fr=f"professeur ({visible(board.teacher)})")
        name = name if line.method == TEACHER else visible(line.method)
        sign(number, name, quiet=False, color=color, marker=marker, markersize=7, linestyle="")
        if line.method in front:
            axes.plot([0.16], [number], markersize=14, linestyle="", clip_on=False, **RING)
        axes.text(0.07, number, str(number), ha="right", va="center", fontsize=SMALL)
    below = len(lines) + 0.3
    for number, family in enumerate(families):
        color, marker = FAMILY_LOOKS.get(family, OTHER)
        sign(below + number, visible(family_title(family)), color=color, marker=marker, markersize=6, linestyle="")
    # Below the families: the two signs of the fronts.
    below += len(families)
    sign(below, say(en="on the front of all three", fr="sur le front des trois"), markersize=11, linestyle="", **RING)
    sign(below + 1, say(en="front of the panel", fr="front du panneau"), linestyle="")
    axes.plot([0.08, 0.21], [below + 1] * 2, color=NEUTRAL, linewidth=1, linestyle="--", clip_on=False)


def _families(lines: Sequence[BoardLine]) -> list[str]:
    """Those that are there, the teacher's apart: its line names it."""
    return list(dict.fromkeys(line.family for line in lines if line.method != TEACHER))


def _look(line: BoardLine) -> tuple[str, str]:
    return FAMILY_LOOKS.get(line.family, OTHER)


def _error(line: BoardLine) -> float:
    return max(1 - line.accuracy, HELD_OUT_HALF)


MOST_LABELS = 30
"""Layers whose names are written along the axis; of more, every second or third."""
MOST_SETTINGS = len(LINE_STYLES)
HOLLOW: dict[str, Any] = {"markersize": 9, "markerfacecolor": "none"}


def sqnr_figure(errors: Mapping[str, Sequence[LayerError]], path: str | Path | None = None) -> LabFigure:
    """Draw the signal to quantization noise of each layer, and the measured against the foreseen one.

    Args:
        errors: by the name of a setting (`INT8`, `INT4, mse`…), its layers in the order of the model; up to 8 settings.

    Raises:
        LabError: without a setting, or one without layers; for more settings than there are markers.
    """
    if not errors or not all(errors.values()) or len(errors) > MOST_SETTINGS:
        raise refusal(
            en=f"a figure of signal to noise needs from 1 to {MOST_SETTINGS} settings with layers, but "
            f"{len(errors)} were received, {sum(not layers for layers in errors.values())} of them without.",
            fr=f"une figure du rapport signal sur bruit demande de 1 à {MOST_SETTINGS} réglages avec des couches, "
            f"mais {len(errors)} ont été reçus, dont {sum(not layers for layers in errors.values())} sans.",
        )
    figure = new_figure(12.0, 5.0, alt=quantization_description(errors))
    by_layer, against = figure.subplots(1, 2, width_ratios=(1.9, 1.0))
    _by_layer(by_layer, errors)
    _against(against, errors)
    handles = [
        key(visible(name), color=color, marker=marker)
        for name, (color, _, marker) in zip(errors, LINE_STYLES, strict=False)
    ]
    hollow = say(en="hollow: predicted, Δ²/12", fr="creux : prédit, Δ²/12")
    handles.append(key(hollow, color=BLACK, linestyle="none", **HOLLOW, marker="o"))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False)
    return finish(figure, path)


def quantization_description(errors: Mapping[str, Sequence[LayerError]]) -> str:
    """Say of each setting its worst layer, and how far the prediction is off at most."""
    sentences = []
    for name, layers in errors.items():
        worst = min(layers, key=lambda layer: layer.measured_sqnr_db)
        lowest, layer_name = _decibels(worst.measured_sqnr_db), visible(worst.name)
        sentences.append(
            say(en=f"{visible(name)}: {lowest} ({layer_name})", fr=f"{visible(name)} : {lowest} ({layer_name})")
        )
        if gaps := _gaps(layers):
            off = _decibels(max(gaps))
            sentences[-1] += say(en=f", predicted within {off}", fr=f", prédit à {off} près")
    return say(
        en="Signal to quantization noise by layer; the worst layer of each setting: ",
        fr="Rapport signal sur bruit de quantification par couche ; la pire couche de chaque réglage : ",
    ) + say(en="; ", fr=" ; ").join(sentences)


def _decibels(value: float) -> str:
    return f"{decimal(value)} dB"


def _gaps(layers: Sequence[LayerError]) -> list[float]:
    return [
        abs(layer.predicted_sqnr_db - layer.measured_sqnr_db)
        for layer in layers
        if layer.predicted_sqnr_db is not None and math.isfinite(layer.predicted_sqnr_db - layer.measured_sqnr_db)
    ]


def _finite(value: float | None) -> float:
    """What can be drawn: nothing for what was not foreseen, nor for a layer without any noise."""
    return value if value is not None and math.isfinite(value) else math.nan


def _by_layer(axes: Axes, errors: Mapping[str, Sequence[LayerError]]) -> None:
    names = [layer.name for layer in max(errors.values(), key=len)]
    position_of = {name: index for index, name in enumerate(names)}
    for layers, (color, dashes, marker) in zip(errors.values(), LINE_STYLES, strict=False):
        drawn = [layer for layer in layers if layer.name in position_of]
        x = [position_of[layer.name] for layer in drawn]
        measured = [_finite(layer.measured_sqnr_db) for layer in drawn]
        axes.plot(x, measured, color=color, linestyle=dashes, marker=marker, markersize=4, linewidth=1)
        axes.plot(x, [_finite(layer.predicted_sqnr_db) for layer in drawn], marker, color=color, **HOLLOW)
    # Rounded up, so that at most MOST_LABELS names are written.
    stride = -(-len(names) // MOST_LABELS)
    labels = [visible(name.removeprefix("blocks.")) for name in names[::stride]]  # the blocks are numbered
    axes.set_xticks(range(0, len(names), stride), labels, rotation=60, ha="right")
    axes.tick_params(axis="x", labelsize=SMALL)
    caption(axes, y=say(en="signal to noise (dB)", fr="signal sur bruit (dB)"))
    axes.set_title(say(en="Layer by layer, fed by the teacher", fr="Couche par couche, aux entrées du professeur"))
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    plain(axes)


def _against(axes: Axes, errors: Mapping[str, Sequence[LayerError]]) -> None:
    drawn: list[float] = []
    for layers, (color, _, marker) in zip(errors.values(), LINE_STYLES, strict=False):
        predicted_layers = [layer for layer in layers if _gaps([layer])]
        x = [_finite(layer.predicted_sqnr_db) for layer in predicted_layers]
        y = [_finite(layer.measured_sqnr_db) for layer in predicted_layers]
        axes.plot(x, y, color=color, linestyle="none", marker=marker, markersize=5)
        drawn += [*x, *y]
    if drawn:
        # From 0, or the lowest value below it, to a little above the highest.
        ends = (min(*drawn, 0.0), max(drawn) * 1.03)
        axes.plot(ends, ends, color=GREY, linestyle="--", linewidth=1, zorder=1)
        middle, text_properties = (ends[1] / 2, ends[1] / 2), {"ha": "right", "va": "bottom", "color": QUIET}
        note(axes, say(en="as predicted", fr="comme prédit"), middle, (-6, 6), **text_properties)
        clamped = say(
            en="below: clamped values,\nwhich Δ²/12 does not know",
            fr="en dessous : valeurs écrêtées,\nque Δ²/12 ne connaît pas",
        )
        note(axes, clamped, (0.97, 0.04), (0, 0), xycoords="axes fraction", **text_properties)
    caption(axes, x=say(en="predicted (dB)", fr="prédit (dB)"), y=say(en="measured (dB)", fr="mesuré (dB)"))
    axes.set_title(say(en="Measured against predicted", fr="Le mesuré face au prédit"))
    plain(axes)


def schedule_figure(
    schedule: CubicSchedule,
    measured: Sequence[tuple[int, float]],
    steps: int,
    losses: Sequence[float] = (),
    path: str | Path | None = None,
) -> LabFigure:
    """Draw a gradual pruning: the cubic, the steps in which the masks follow it, the zeros counted, the loss below.

    Args:
        measured: (step, share of zeros) after each renewal (see `GradualPruning.measured`).
        losses: of every step; none: no second panel.
    """
    figure = new_figure(9.0, 5.4 if losses else 3.8, alt=_schedule_description(schedule, measured))
    rows = figure.subplots(2 if losses else 1, 1, sharex=True, squeeze=False, height_ratios=(2, 1) if losses else None)
    axes = rows[0][0]
    times = range(steps + 1)
    cubic = [schedule.sparsity(step) for step in times]
    predicted = say(en="predicted: the cubic", fr="prédit : la cubique")
    axes.plot(times, cubic, color=SKY, linewidth=5, alpha=PREDICTED_ALPHA, label=predicted)
    sparsities = [0.0]
    # Between two renewals the masks, and with them the zeros, stay.
    for step in times:
        sparsities.append(dict(measured).get(step, sparsities[-1]))
    axes.step(times, sparsities[1:], where="post", color=BLUE, linewidth=1.2)
    counted = say(en="measured: zeros counted", fr="mesuré : zéros comptés")
    points = [step for step, _ in measured], [share for _, share in measured]
    axes.plot(*points, "o", color=BLUE, markersize=4, label=counted)
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(lambda value, position: spaced_percent(value, None))
    zeros = say(en="share of zeros", fr="part de zéros")
    caption(axes, y=zeros, title=_schedule_description(schedule, measured), size=NORMAL)
    axes.legend(frameon=False, fontsize=NORMAL, loc="lower right")
    plain(axes)
    if losses:
        below = rows[1][0]
        below.plot(range(1, len(losses) + 1), losses, color=ORANGE, linewidth=1.1)
        below.set_yscale("log")
        below.yaxis.set_major_formatter(lambda value, position: significant(value, 2))
        below.yaxis.set_minor_formatter(NullFormatter())
        caption(below, y=say(en="loss", fr="perte"))
        plain(below)
    caption(rows[-1][0], x=say(en="step", fr="pas"))
    return finish(figure, path)


def _schedule_description(schedule: CubicSchedule, measured: Sequence[tuple[int, float]]) -> str:
    furthest = max((abs(share - schedule.sparsity(step)) for step, share in measured), default=0.0)
    gap_points = significant(100 * furthest, 1)
    return say(
        en=f"Gradual pruning to {spaced_percent(schedule.final, None)}: masks renewed every {schedule.every} steps "
        f"from step 0 to {schedule.end}.\nMeasured after each of {len(measured)} renewals, at most "
        f"{gap_points} points from what was predicted.",
        fr=f"Élagage graduel jusqu’à {spaced_percent(schedule.final, None)} : masques renouvelés tous les "
        f"{schedule.every} pas, du pas 0 au pas {schedule.end}.\nMesuré après chacun des "
        f"{len(measured)} renouvellements, à {gap_points} point au plus du prédit.",
    )


FORM_LOOKS: dict[Form, tuple[str, str, str]] = {
    "masked": (BLUE, "-", "o"),
    "csr": (ORANGE, "--", "s"),
    "semi_structured": (GREEN, "", "D"),
}


def form_label(form: Form) -> str:
    """Translate a form of a sparse weight."""
    return {
        "masked": say(en="measured: dense layer with zeros", fr="mesuré : couche dense avec des zéros"),
        "csr": say(en="measured: sparse rows (CSR)", fr="mesuré : lignes creuses (CSR)"),
        "semi_structured": say(en="measured: 2:4, units of the GPU", fr="mesuré : 2:4, unités du GPU"),
    }[form]


def speed_figure(speeds: Sequence[SparseSpeed], layer_and_device: str, path: str | Path | None = None) -> LabFigure:
    """Draw the seconds of each form over those of the dense layer, by sparsity; beside them what one would expect.

    Args:
        speeds: see `sparse_speed`.
        layer_and_device: the layer and the device, in a few words.

    Raises:
        LabError: without a measure.
    """
    if not speeds:
        raise refusal(
            en="a figure of sparse layers needs at least one timing, but none was received.",
            fr="une figure de couches creuses demande au moins une mesure de durée, mais aucune n’a été reçue.",
        )
    figure = new_figure(9.0, 4.8, alt=pruning_speed_description(speeds))
    axes = figure.subplots()
    levels = sorted({speed.sparsity for speed in speeds})
    # The share of multiplications that a perfect sparse kernel would still do.
    positions, remaining_shares = [_place(level) for level in levels], [1 - level for level in levels]
    expected = say(en="expected: multiplications left", fr="attendu : multiplications restantes")
    axes.plot(positions, remaining_shares, color=SKY, linewidth=5, alpha=PREDICTED_ALPHA, label=expected)
    axes.axhline(1, color=BASELINE, linewidth=0.9)
    for form in FORM_LOOKS:
        _form(axes, form, [speed for speed in speeds if speed.form == form])
    logarithmic(axes, "y", lambda value: significant(value, 2))
    axes.set_xticks(positions, [f"{significant(100 * level)} %" for level in levels])
    plain(axes)
    caption(
        axes,
        x=say(en="share of zeros (the scale opens towards 100 %)", fr="part de zéros (l’échelle s’ouvre vers 100 %)"),
        y=say(en="duration ÷ that of the dense layer", fr="durée ÷ celle de la couche dense"),
        title=f"{visible(layer_and_device)}\n{_verdict(speeds)}",
        size=NORMAL,
    )
    axes.legend(frameon=False, fontsize=SMALL, loc="lower left", handlelength=3.5)
    return finish(figure, path)


def pruning_speed_description(speeds: Sequence[SparseSpeed]) -> str:
    """Say the ratio of every form at every sparsity, then where the sparse rows are as fast."""
    sentences = [
        say(
            en=f"{form_label(row.form)}, {significant(100 * row.sparsity)} % zeros: {significant(row.ratio, 2)} times "
            "the dense layer",
            fr=f"{form_label(row.form)}, {significant(100 * row.sparsity)} % de zéros : {significant(row.ratio, 2)} "
            "fois la couche dense",
        )
        for row in speeds
    ]
    return "; ".join(sentences) + ". " + _verdict(speeds)


def _verdict(speeds: Sequence[SparseSpeed]) -> str:
    level = crossing(speeds)
    if not [speed for speed in speeds if speed.form == "csr"]:
        return ""
    if level is None:
        return say(
            en="Sparse rows are never as fast as the dense layer here.",
            fr="Les lignes creuses n’égalent jamais la couche dense ici.",
        )
    return say(
        en=f"Sparse rows are as fast as the dense layer from about {significant(100 * round(level, 2))} % of zeros.",
        fr=f"Les lignes creuses égalent la couche dense à partir d’environ {significant(100 * round(level, 2))} % de "
        "zéros.",
    )


def _place(sparsity: float) -> float:
    """Where a sparsity stands on an axis that gives 0.9, 0.99 as much room as 0, 0.9: the cube root of what is left."""
    return 1 - math.cbrt(1 - sparsity)


def _form(axes: Axes, form: Form, speeds: Sequence[SparseSpeed]) -> None:
    if not speeds:
        return
    color, dashes, marker = FORM_LOOKS[form]
    ordered = sorted(speeds, key=lambda speed: speed.sparsity)
    positions = [_place(speed.sparsity) for speed in ordered]
    line_properties: dict[str, Any] = {"marker": marker, "markersize": 7, "linewidth": 2, "linestyle": dashes or "none"}
    axes.plot(positions, [speed.ratio for speed in ordered], color=color, label=form_label(form), **line_properties)
    low, high = [speed.ratio_low for speed in ordered], [speed.ratio_high for speed in ordered]
    # Quartiles of the ratios over the rounds.
    axes.vlines(positions, low, high, color=color, linewidth=3, alpha=0.35)
