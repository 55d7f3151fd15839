"""Why BLOOM took dp 8 · tp 4 · pp 12: all layouts that were measured for it on Jean Zay, beside the cost model.

Layer 6 (labs), on `dlojz.viz`. Invariant: every usable row of the sweep is drawn, those that ran out of memory too;
seconds and bytes beside them are the cost model's for the same layout.

Source: bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md, lines 775 to 848.
"""

from __future__ import annotations

import statistics
from functools import cache
from typing import Final, NamedTuple

import numpy as np
from matplotlib.axes import Axes

from dlojz.evidence import Measurement, table
from dlojz.hardware import cluster
from dlojz.labs.compromise_shown import EDGE, illustrated, thousands
from dlojz.labs.pipeline_figures import Sheet
from dlojz.plan.choice import seconds
from dlojz.plan.interval import held_out
from dlojz.plan.ranks import PARTS
from dlojz.plan.reasons import decimal, gigabytes, part_words
from dlojz.plan.validation import PROFILE_OF
from dlojz.predict.time import Layouts, calibration, estimate
from dlojz.predict.time.workload import decoder_workload
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, BLUE, VERMILION, YELLOW
from dlojz.viz.plan_figure import MEMORY_STYLES

TABLE: Final = "jean-zay-a100"
CHOSEN: Final = (8, 4, 12, 2)
"""dp, tp, pp and micro-batch of BLOOM as it was trained (row `final` of the table)."""
BATCH: Final = 2048
"""Sequences of its step; rows of 2016 are scaled to it."""


class Neighbour(NamedTuple):
    """One layout of the sweep.

    Attributes:
        layout: dp, tp, pp, micro-batch.
        measured_s: seconds of a step of 2048 sequences, one of each time it was measured; empty where it ran out.
        predicted_s: of the cost model.
        interval_s: between which four held-out rows in five lay.
        measured_bytes: on the fullest GPU, where it was read.
        parts: bytes of the fullest GPU by category, by the cost model.
    """

    layout: tuple[int, int, int, int]
    measured_s: tuple[float, ...]
    predicted_s: float
    interval_s: tuple[float, float]
    measured_bytes: tuple[float, ...]
    parts: dict[str, float]

    @property
    def is_chosen(self) -> bool:
        """Whether BLOOM was trained so."""
        return self.layout == CHOSEN

    @property
    def title(self) -> str:
        """In a few signs."""
        dp, tp, pp, size = self.layout
        return f"dp {dp} · tp {tp} · pp {pp}, micro-batch {size}"


def sweep() -> list[Measurement]:
    """The rows of one model of 72 layers on 384 GPUs after the repair of PCIe, with the whole batch."""
    return [
        row
        for row in table(TABLE)
        if row.usable
        and row.series == "after the PCIe fix"
        and (row.size.hidden, row.size.layers, row.size.heads, row.gpus) == (14336, 72, 64, 384)
        and row.global_batch > 2000
    ]


@cache
def neighbours_of_bloom() -> tuple[Neighbour, ...]:
    """The layouts of the sweep, by what they took; those that ran out of memory last."""
    rows: dict[tuple[int, int, int, int], list[Measurement]] = {}
    for row in sweep():
        rows.setdefault((row.dp, row.tp, row.pp, row.micro_batch or 1), []).append(row)
    first = [some[0] for some in rows.values()]
    site, profile = cluster(TABLE.replace("-", "_")), PROFILE_OF[TABLE]
    made = estimate(decoder_workload(first[0].size), site, Layouts.from_measurements(first), calibration(profile))
    known = held_out(profile)
    low, high = (known.low, known.high) if known else (1.0, 1.0)
    found = []
    for place, (layout, some) in enumerate(rows.items()):
        scale = BATCH / some[0].global_batch
        predicted_s = float(made.step_s[place]) * scale
        found.append(
            Neighbour(
                layout,
                tuple(row.seconds * scale for row in some if row.seconds),
                predicted_s,
                (predicted_s * low, predicted_s * high),
                tuple(row.memory_bytes for row in some if row.memory_bytes),
                {name: float(getattr(made.memory, name)[place]) for name in PARTS},
            )
        )
    return tuple(sorted(found, key=lambda one: (not one.measured_s, _took(one))))


def _took(one: Neighbour) -> float:
    return statistics.median(one.measured_s) if one.measured_s else one.predicted_s


@illustrated
def bloom() -> tuple[LabFigure, Sheet]:
    """Seconds and bytes of every layout that was measured for BLOOM's 72-layer forerunner, beside the cost model.

    Left: readings as dots, the prediction with its interval. Right: the fullest GPU stacked by category, the reading of
    `nvidia-smi` as a dot, the GPU's memory as a line; "OOM" where the run ended so.
    """
    found = neighbours_of_bloom()
    figure = new_figure(12.4, 0.27 * len(found) + 2.0, alt=_alt(found))
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=(1.0, 1.15))
    _times(left, found)
    _memories(right, found)
    left.set_yticks(range(len(found)), [one.title for one in found], fontsize=8)
    for label, one in zip(left.get_yticklabels(), found, strict=True):
        label.set_fontweight("bold" if one.is_chosen else "normal")
    left.set_ylim(len(found) - 0.4, -0.6)
    for axes in (left, right):
        plain(axes)
        thousands(axes.xaxis)
    figure.legend(loc="outside lower center", ncols=6, frameon=False, fontsize=8)
    return finish(figure), _sheet(found)


def _times(axes: Axes, found: tuple[Neighbour, ...]) -> None:
    places = range(len(found))
    predicted = [one.predicted_s for one in found]
    axes.errorbar(
        predicted, places,
        xerr=[[abs(one.interval_s[side] - one.predicted_s) for one in found] for side in (0, 1)],
        linestyle="none", marker="D", markersize=4.5, markerfacecolor="white", color=BLUE, capsize=3, elinewidth=1,
        label=say(en="cost model", fr="modèle de coût"),
    )  # fmt: skip
    dots = [(value, place) for place, one in enumerate(found) for value in one.measured_s]
    axes.plot(
        *zip(*dots, strict=True), linestyle="none", marker="o", markersize=5, color=BLACK,
        label=say(en="measured", fr="mesuré"),
    )  # fmt: skip
    for place, one in enumerate(found):
        if not one.measured_s:
            axes.text(one.interval_s[1] + 2, place, "OOM", color=VERMILION, fontsize=8, va="center", fontweight="bold")
        if one.is_chosen:
            axes.axhspan(place - 0.45, place + 0.45, color=YELLOW, alpha=0.35, zorder=0)
    axes.set_xlim(right=1.06 * max(one.interval_s[1] for one in found))
    axes.set_xlabel(say(en="seconds of a step of 2048 sequences", fr="secondes d’une itération de 2048 séquences"))
    axes.set_title(
        say(
            en="time (highlighted: BLOOM’s layout; bar: 4 held-out rows in 5)",
            fr="durée (surlignée : la configuration de BLOOM ; barre : 4 lignes mises de côté sur 5)",
        ),
        fontsize=9,
    )


def _memories(axes: Axes, found: tuple[Neighbour, ...]) -> None:
    places, lefts = np.arange(len(found)), np.zeros(len(found))
    for name, style in MEMORY_STYLES.items():
        widths = np.array([one.parts[name] for one in found]) / 1e9
        if widths.max(initial=0) <= 0:
            continue
        axes.barh(
            places, widths, left=lefts, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.4,
            height=0.72, label=part_words(name),
        )  # fmt: skip
        lefts += widths
    dots = [(value / 1e9, place) for place, one in enumerate(found) for value in one.measured_bytes]
    axes.plot(
        *zip(*dots, strict=True), linestyle="none", marker="o", markersize=6, color=BLACK, markeredgecolor="white",
        label=say(en="read by nvidia-smi", fr="lu par nvidia-smi"),
    )  # fmt: skip
    gpu = cluster(TABLE.replace("-", "_")).gpu
    limit = gpu.device.memory_bytes / 1e9
    axes.axvline(limit, color=VERMILION, linestyle="--", linewidth=1.4, label=gpu.title)
    for place, one in enumerate(found):
        if not one.measured_s:
            axes.text(lefts[place] + 1.5, place, "OOM", color=VERMILION, fontsize=8, va="center", fontweight="bold")
    axes.set_xlim(0, 1.1 * float(lefts.max()))
    axes.set_xlabel(say(en="memory of the fullest GPU (GB)", fr="mémoire du GPU le plus rempli (Go)"))
    axes.set_title(say(en="memory: bars predicted, dots read", fr="mémoire : barres prédites, points lus"), fontsize=9)
    axes.tick_params(labelleft=False)


def _sheet(found: tuple[Neighbour, ...]) -> Sheet:
    head = (
        say(en="layout", fr="configuration"),
        say(en="measured", fr="mesuré"),
        say(en="predicted", fr="prédit"),
        say(en="interval", fr="intervalle"),
        say(en="memory read", fr="mémoire lue"),
        say(en="memory predicted", fr="mémoire prédite"),
    )
    rows = [
        (
            ("★ " if one.is_chosen else "") + one.title,
            " / ".join(decimal(value) for value in one.measured_s) + " s" if one.measured_s else "OOM",
            seconds(one.predicted_s),
            f"{seconds(one.interval_s[0])} – {seconds(one.interval_s[1])}",
            " / ".join(gigabytes(value) for value in one.measured_bytes) or "—",
            gigabytes(sum(one.parts.values())),
        )
        for one in found
    ]
    return Sheet(head, tuple(rows))


def _alt(found: tuple[Neighbour, ...]) -> str:
    each = ", ".join(
        f"{one.title}: {seconds(_took(one)) if one.measured_s else 'OOM'} / {seconds(one.predicted_s)}" for one in found
    )
    return say(
        en=f"Layouts measured for BLOOM on 384 A100, measured / predicted: {each}.",
        fr=f"Configurations mesurées pour BLOOM sur 384 A100, mesuré / prédit : {each}.",
    )
