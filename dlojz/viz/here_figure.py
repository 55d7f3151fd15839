"""A plan for this machine, drawn and as a table: predicted parts of each step, the measured step beside them.

Layer 4. Invariant: draws what it is given and computes nothing but ratios; hatches say what colours say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter

from dlojz.plan.choice import seconds
from dlojz.plan.reasons import decimal, part_words
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK
from dlojz.viz.plan_figure import EDGE, TIME_STYLES
from dlojz.viz.plan_tables import list_html, pairs_html

if TYPE_CHECKING:
    from dlojz.plan.here import Here, LocalChoice

MOST_DRAWN = 16


def here_figure(
    rows: Sequence[LocalChoice], measured_s: Mapping[str, float], path: str | Path | None = None
) -> LabFigure:
    """A bar of each layout, stacked by part, with the measured step as a diamond; the planner's choice is the top one.

    Args:
        rows: layouts, fastest first.
        measured_s: measured seconds of a step by title; may be empty.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    shown = list(rows[:MOST_DRAWN])
    figure = new_figure(
        10.5, 1.6 + 0.42 * len(shown),
        alt="; ".join(f"{one.title}: {seconds(one.step_s)}" for one in shown),
    )  # fmt: skip
    axes = figure.subplots()
    starts = [0.0] * len(shown)
    for name, style in TIME_STYLES.items():
        widths = [1e3 * one.parts[name] for one in shown]
        if max(widths) <= 0:
            continue
        axes.barh(
            range(len(shown)), widths, left=starts, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.4,
            height=0.72, label=part_words(name),
        )  # fmt: skip
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    largest = max([*starts, *(1e3 * measured_s[one.title] for one in shown if one.title in measured_s)])
    for place, one in enumerate(shown):
        taken = measured_s.get(one.title)
        text = f" {seconds(one.step_s)}"
        if taken is not None:
            axes.plot([1e3 * taken], [place], marker="D", color=BLACK, markersize=6, linestyle="none",
                      label=say(en="measured", fr="mesuré") if one is shown[0] else None)  # fmt: skip
            text += say(en=f" predicted, {seconds(taken)} measured", fr=f" prédite, {seconds(taken)} mesurée")
        axes.text(max(starts[place], 1e3 * (taken or 0.0) + 0.008 * largest), place, text, va="center", fontsize=8)
    axes.set_yticks(range(len(shown)), [one.title for one in shown], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, (1.45 if measured_s else 1.15) * largest)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: decimal(value, 0)))
    axes.set_xlabel(say(en="milliseconds of a step", fr="millisecondes d’une itération"))
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.0, -0.6 / len(shown) - 0.08), ncols=4, frameon=False)
    plain(axes)
    return finish(figure, path)


def here_html(here: Here) -> str:
    """What there is to say, and the best layout of each kind."""
    columns = (
        say(en="layout", fr="configuration"),
        say(en="predicted step", fr="itération prédite"),
        say(en="to the best", fr="au meilleur"),
    )
    title = say(en="best layout of each kind", fr="la meilleure configuration de chaque sorte")
    return pairs_html(here.lines()) + list_html(title, columns, here.table())
