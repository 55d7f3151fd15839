"""Forms of one update beside each other: what a step takes, and the peak that was predicted and measured.

Layer 4. Invariant: nothing is computed here but ratios of what was measured; a form has one colour and one marker in
every panel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLUE, GREEN, GREY, ORANGE, PREDICTED_ALPHA, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    from dlojz.train.update_forms import FormMeasure

LOOKS = {
    "auto": (GREY, "*", ""),
    "for_loop": (BLUE, "o", ""),
    "foreach": (ORANGE, "s", "//"),
    "fused": (GREEN, "^", "\\\\"),
    "in_backward": (VERMILION, "D", ".."),
    "in_forward": (PURPLE, "v", "xx"),
}
"""Colour, marker and hatch of a form."""
OTHER = (SKY, "P", "++")
MEGABYTE = 1e6


def update_figure(measures: Sequence[FormMeasure], path: str | Path | None = None) -> LabFigure:
    """Draw what each form takes of each model: one row of two panels per model.

    Left, the seconds of a whole step over those of the model's first form: a dot for the median of the ratios within a
    round, a bar for their quartiles; beside it in words the update alone. Right, the peak of the step, in MB: predicted
    (light) above measured, and in words what is more or less than with the first form.

    Args:
        measures: forms of one model or of several; the first form of each model is what the others are compared with.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    models = list(dict.fromkeys(one.model for one in measures))
    figure = new_figure(12.0, 0.9 + 2.4 * max(1, len(models)), alt=description(measures))
    axes = figure.subplots(max(1, len(models)), 2, squeeze=False)
    for number, model in enumerate(models):
        rows = [one for one in measures if one.model == model]
        _times(axes[number][0], rows)
        _peaks(axes[number][1], rows)
    for panel, label in zip(axes[-1], (_step_label(measures), _peak_label()), strict=True):
        panel.set_xlabel(label, fontsize=9)
    return finish(figure, path)


def description(measures: Sequence[FormMeasure]) -> str:
    """The figure in words: each form's step and peak."""
    each = "; ".join(
        say(
            en=f"{visible(one.model)}, {one.form}: step {_number(one.step_ratio, 2)} times the first form's, peak "
            f"{_number(one.measured_peak_bytes / MEGABYTE, 1)} MB",
            fr=f"{visible(one.model)}, {one.form} : pas {_number(one.step_ratio, 2)} fois celui de la première "
            f"forme, pic {_number(one.measured_peak_bytes / MEGABYTE, 1)} Mo",
        )
        for one in measures
    )
    return say(en=f"Forms of an update beside each other. {each}.", fr=f"Formes d’une mise à jour, comparées. {each}.")


def _step_label(measures: Sequence[FormMeasure]) -> str:
    first = measures[0].form if measures else ""
    return say(
        en=f"seconds of a whole step, in those of {first} in the same round (median and quartiles)",
        fr=f"durée d’un pas entier, rapportée à celle de {first} au même tour (médiane et quartiles)",
    )


def _peak_label() -> str:
    return say(en="peak of the step, MB: predicted (light), measured", fr="pic du pas, Mo : prédit (clair), mesuré")


def _times(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.axvline(1, color="#444444", linewidth=0.8)
    right = max(1.1, *(one.step_ratio_high for one in rows))
    for place, one in enumerate(rows):
        color, marker, _ = LOOKS.get(one.form, OTHER)
        axes.plot([one.step_ratio_low, one.step_ratio_high], [place, place], color=color, linewidth=3, alpha=0.5)
        axes.plot([one.step_ratio], [place], color=color, marker=marker, markersize=8, linestyle="")
        axes.annotate(_update_words(one), (one.step_ratio_high, place), xytext=(8, 0), textcoords="offset points",
                      va="center", fontsize=8, bbox={"color": "white", "pad": 0.5})  # fmt: skip
    low = min(one.step_ratio_low for one in rows)
    axes.set_xlim(min(low, 1) - 0.05 * (right - low), right + 0.75 * (right - min(low, 1)))
    _forms(axes, rows)
    some = rows[0]
    axes.set_title(
        say(
            en=f"{visible(some.model)}: {_number(some.parameters / 1e6, 1)} M parameters in {some.tensors} tensors "
            f"({visible(some.device)}, {some.rounds} rounds)",
            fr=f"{visible(some.model)} : {_number(some.parameters / 1e6, 1)} M de paramètres en {some.tensors} "
            f"tenseurs ({visible(some.device)}, {some.rounds} tours)",
        ),
        loc="left",
        fontsize=9,
    )


def _update_words(one: FormMeasure) -> str:
    """The step's ratio, and the update alone where it is alone."""
    step = f"×{_number(one.step_ratio, 2)}"
    if one.update_ratio is None:
        return step + say(en=" (updated within the pass)", fr=" (mise à jour dans la passe)")
    return step + say(
        en=f" (the update alone ×{_number(one.update_ratio, 2)})",
        fr=f" (la mise à jour seule ×{_number(one.update_ratio, 2)})",
    )


def _peaks(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    first = rows[0]
    most = max(one.measured_peak_bytes for one in rows)
    for place, one in enumerate(rows):
        color, _, hatch = LOOKS.get(one.form, OTHER)
        looks: dict[str, Any] = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
        if one.predicted_peak_bytes is not None:
            axes.barh(place - 0.2, one.predicted_peak_bytes / MEGABYTE, 0.36, alpha=PREDICTED_ALPHA, **looks)
        axes.barh(place + 0.2, one.measured_peak_bytes / MEGABYTE, 0.36, **looks)
        saved = first.measured_peak_bytes - one.measured_peak_bytes
        words = f"{_number(one.measured_peak_bytes / MEGABYTE, 1)}" + (f" ({_signed(-saved)})" if one != first else "")
        axes.annotate(words, (most / MEGABYTE, place), xytext=(6, 0), textcoords="offset points", va="center",
                      fontsize=8)  # fmt: skip
    axes.set_xlim(0, 1.3 * most / MEGABYTE)
    _forms(axes, rows)


def _forms(axes: Axes, rows: Sequence[FormMeasure]) -> None:
    axes.set_yticks(range(len(rows)), [visible(one.form) for one in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    plain(axes)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace(".", say(en=".", fr=","))))


def _signed(num_bytes: float) -> str:
    """MB that are more or less, with their sign; one that rounds to nothing has none."""
    value = round(num_bytes / MEGABYTE, 1)
    return ("+" if value > 0 else "−" if value < 0 else "") + _number(abs(value), 1)


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace(".", say(en=".", fr=","))
