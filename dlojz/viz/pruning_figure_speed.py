"""What zeros gain in time: nothing in a dense layer, something in sparse rows once few weights are left.

Layer 4. Invariant: nothing is computed here but where a measured line crosses 1; every form has a colour and a marker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from dlojz.compress.dense_hardware import Form, SparseSpeed, crossing
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLUE, GREEN, ORANGE, PREDICTED_ALPHA, SKY

_LOOKS: dict[Form, tuple[str, str, str]] = {
    "masked": (BLUE, "-", "o"),
    "csr": (ORANGE, "--", "s"),
    "semi_structured": (GREEN, "", "D"),
}


def form_label(form: Form) -> str:
    """A form of a sparse weight in the reader's language."""
    return {
        "masked": say(en="measured: dense layer with zeros", fr="mesuré : couche dense avec des zéros"),
        "csr": say(en="measured: sparse rows (CSR)", fr="mesuré : lignes creuses (CSR)"),
        "semi_structured": say(en="measured: 2:4, units of the GPU", fr="mesuré : 2:4, unités du GPU"),
    }[form]


def speed_figure(speeds: Sequence[SparseSpeed], where: str, path: str | Path | None = None) -> LabFigure:
    """Draw the seconds of each form over those of the dense layer, by sparsity; beside them what one would expect.

    Args:
        speeds: see `sparse_speed`.
        where: the layer and the device, in a few words.
        path: picture to write, if any.

    Raises:
        LabError: without a measure; if the picture cannot be written.
    """
    if not speeds:
        raise LabError(
            say(
                en="a figure of sparse layers needs at least one timing, but none was received.",
                fr="une figure de couches creuses demande au moins une mesure de durée, mais aucune n’a été reçue.",
            )
        )
    figure = new_figure(9.0, 4.8, alt=description(speeds))
    axes = figure.subplots()
    levels = sorted({one.sparsity for one in speeds})
    axes.plot([_place(one) for one in levels], [1 - one for one in levels], color=SKY, linewidth=5,
              alpha=PREDICTED_ALPHA, label=say(en="expected: multiplications left",
                                               fr="attendu : multiplications restantes"))  # fmt: skip
    axes.axhline(1, color="#444444", linewidth=0.9)
    for form in _LOOKS:
        _form(axes, form, [one for one in speeds if one.form == form])
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(FixedLocator([_place(one) for one in levels]))
    axes.set_xticklabels([_percent(one) for one in levels])
    plain(axes)
    axes.set_xlabel(say(en="share of zeros (the scale opens towards 100 %)",
                        fr="part de zéros (l’échelle s’ouvre vers 100 %)"))  # fmt: skip
    axes.set_ylabel(say(en="duration ÷ that of the dense layer", fr="durée ÷ celle de la couche dense"))
    axes.set_title(f"{visible(where)}\n{_verdict(speeds)}", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower left", handlelength=3.5)
    return finish(figure, path)


def description(speeds: Sequence[SparseSpeed]) -> str:
    """The figure in words: every form at every sparsity, then where the sparse rows are as fast."""
    told = [
        say(
            en=f"{form_label(one.form)}, {_percent(one.sparsity)} zeros: {_number(one.ratio)} times the dense layer",
            fr=f"{form_label(one.form)}, {_percent(one.sparsity)} de zéros : {_number(one.ratio)} fois la couche dense",
        )
        for one in speeds
    ]
    return "; ".join(told) + ". " + _verdict(speeds)


def _verdict(speeds: Sequence[SparseSpeed]) -> str:
    where = crossing(speeds)
    if not [one for one in speeds if one.form == "csr"]:
        return ""
    if where is None:
        return say(
            en="Sparse rows are never as fast as the dense layer here.",
            fr="Les lignes creuses n’égalent jamais la couche dense ici.",
        )
    return say(
        en=f"Sparse rows are as fast as the dense layer from about {_percent(round(where, 2))} of zeros.",
        fr=f"Les lignes creuses égalent la couche dense à partir d’environ {_percent(round(where, 2))} de zéros.",
    )


def _place(sparsity: float) -> float:
    """Where a sparsity stands on an axis that gives 0.9, 0.99 as much room as 0, 0.9: the cube root of what is left."""
    return 1 - math.cbrt(1 - sparsity)


def _form(axes: Axes, form: Form, speeds: Sequence[SparseSpeed]) -> None:
    if not speeds:
        return
    color, dashes, marker = _LOOKS[form]
    ordered = sorted(speeds, key=lambda one: one.sparsity)
    places = [_place(one.sparsity) for one in ordered]
    axes.plot(places, [one.ratio for one in ordered], color=color, linestyle=dashes or "none", marker=marker,
              markersize=7, linewidth=2, label=form_label(form))  # fmt: skip
    axes.vlines(places, [one.ratio_low for one in ordered], [one.ratio_high for one in ordered], color=color,
                linewidth=3, alpha=0.35)  # fmt: skip


def _percent(share: float) -> str:
    number = f"{100 * share:.3g}"
    return say(en=f"{number} %", fr=f"{number.replace('.', ',')} %")


def _number(value: float) -> str:
    number = f"{value:.2g}"
    return say(en=number, fr=number.replace(".", ","))
