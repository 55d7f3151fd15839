"""Pruning as it goes: the sparsity that a schedule predicts beside the one that is counted, and what an order keeps.

Layer 4. Invariant: nothing is computed here but means; predicted is light, measured is full, as everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from dlojz.compress.gradual import CubicSchedule
from dlojz.compress.permutations import Kept, Kind, by_block, together
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLUE, GREEN, ORANGE, PREDICTED_ALPHA, PURPLE, SKY

_KINDS = {"stream": (BLUE, ""), "hidden": (ORANGE, "//"), "value_output": (GREEN, "\\\\"), "query_key": (PURPLE, "..")}


def kind_label(kind: Kind) -> str:
    """A kind of permutation in the reader's language."""
    return {
        "stream": say(en="residual stream", fr="flux résiduel"),
        "hidden": say(en="hidden units of the MLP", fr="unités cachées du MLP"),
        "value_output": say(en="values of the heads", fr="valeurs des têtes"),
        "query_key": say(
            en="queries and keys of the heads (transposed)", fr="requêtes et clés des têtes (transposées)"
        ),
    }[kind]


def schedule_figure(
    schedule: CubicSchedule,
    measured: Sequence[tuple[int, float]],
    steps: int,
    losses: Sequence[float] = (),
    path: str | Path | None = None,
) -> LabFigure:
    """Draw a gradual pruning: the cubic, the steps in which the masks follow it, the zeros counted, the loss below.

    Args:
        schedule: what is predicted.
        measured: (step, share of zeros) after each renewal (see `GradualPruning.measured`).
        steps: of the whole training.
        losses: of every step; none: no second panel.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = new_figure(9.0, 5.4 if losses else 3.8, alt=_schedule_description(schedule, measured))
    rows = figure.subplots(2 if losses else 1, 1, sharex=True, squeeze=False, height_ratios=(2, 1) if losses else None)
    axes = rows[0][0]
    times = range(steps + 1)
    axes.plot(times, [schedule.sparsity(step) for step in times], color=SKY, linewidth=5, alpha=PREDICTED_ALPHA,
              label=say(en="predicted: the cubic", fr="prédit : la cubique"))  # fmt: skip
    held, value = [], 0.0
    for step in times:
        value = dict(measured).get(step, value)
        held.append(value)
    axes.step(times, held, where="post", color=BLUE, linewidth=1.2)
    axes.plot([step for step, _ in measured], [share for _, share in measured], color=BLUE, marker="o", markersize=4,
              linestyle="", label=say(en="measured: zeros counted", fr="mesuré : zéros comptés"))  # fmt: skip
    _percents(axes)
    axes.set_ylabel(say(en="share of zeros", fr="part de zéros"))
    axes.set_title(_schedule_description(schedule, measured), loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    plain(axes)
    if losses:
        below = rows[1][0]
        below.plot(range(1, len(losses) + 1), losses, color=ORANGE, linewidth=1.1)
        below.set_yscale("log")
        below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _number(value)))
        below.yaxis.set_minor_formatter(NullFormatter())
        below.set_ylabel(say(en="loss", fr="perte"))
        plain(below)
    rows[-1][0].set_xlabel(say(en="step", fr="pas"))
    return finish(figure, path)


def _schedule_description(schedule: CubicSchedule, measured: Sequence[tuple[int, float]]) -> str:
    furthest = max((abs(share - schedule.sparsity(step)) for step, share in measured), default=0.0)
    apart = f"{100 * furthest:.1g}"
    return say(
        en=f"Gradual pruning to {_percent(schedule.final)}: masks renewed every {schedule.every} steps from step "
        f"{schedule.begin} to {schedule.end}.\nMeasured after each of {len(measured)} renewals, at most {apart} points "
        "from what was predicted.",
        fr=f"Élagage graduel jusqu’à {_percent(schedule.final)} : masques renouvelés tous les {schedule.every} pas, du "
        f"pas {schedule.begin} au pas {schedule.end}.\nMesuré après chacun des {len(measured)} renouvellements, à "
        f"{apart.replace('.', ',')} point au plus du prédit.",
    )


def permutation_figure(kept: Sequence[Kept], path: str | Path | None = None) -> LabFigure:
    """Draw, block by block, what 2:4 keeps of the magnitude before (light) and after an order was chosen.

    Args:
        kept: see `permuted_for_2_of_4`.
        path: picture to write, if any.

    Raises:
        LabError: without a group; if the picture cannot be written.
    """
    if not kept:
        raise LabError(
            say(
                en="a figure of permutations needs at least one group of weights, but none was received.",
                fr="une figure de permutations demande au moins un groupe de poids, mais aucun n’a été reçu.",
            )
        )
    rows = by_block(kept)
    figure = new_figure(9.5, 1.6 + 0.29 * len(rows), alt=_permutation_description(kept))
    axes = figure.subplots()
    for place, one in enumerate(rows):
        color, hatch = _KINDS[one.kind]
        label = kind_label(one.kind) if one.kind not in [earlier.kind for earlier in rows[:place]] else None
        axes.barh(place, one.before, 0.72, color=color, alpha=PREDICTED_ALPHA)
        axes.barh(place, one.after - one.before, 0.72, left=one.before, color=color, hatch=hatch, edgecolor="white",
                  linewidth=0.4, label=label)  # fmt: skip
        axes.annotate(f"{_percent(one.before)} → {_percent(one.after)}", (one.after, place), xytext=(4, 0),
                      textcoords="offset points", va="center", fontsize=8)  # fmt: skip
    low, high = min(one.before for one in rows), max(one.after for one in rows)
    axes.set_xlim(low - 0.6 * (high - low) - 0.005, high + 0.3 * (high - low) + 0.005)
    whole = say(en="whole model", fr="tout le modèle")
    axes.set_yticks(range(len(rows)), [visible(one.block) or whole for one in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    plain(axes)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(
        say(
            en="magnitude that 2:4 keeps (light: before; full: gained by the order; the axis does not begin at 0)",
            fr="magnitude que 2:4 garde (clair : avant ; plein : gagné par l’ordre ; l’axe ne commence pas à 0)",
        )
    )
    axes.set_title(_permutation_description(kept), loc="left", fontsize=9)
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return finish(figure, path)


def _permutation_description(kept: Sequence[Kept]) -> str:
    # Queries and keys are counted in the stream already: there along the inputs, here transposed.
    whole = together([one for one in kept if one.kind != "query_key"] or kept)
    return say(
        en=f"The order of the dimensions: in all, 2:4 keeps {_percent(whole.after)} of the magnitude instead "
        f"of {_percent(whole.before)}; the output is the same.",
        fr=f"L’ordre des dimensions : en tout, 2:4 garde {_percent(whole.after)} de la magnitude au lieu "
        f"de {_percent(whole.before)} ; la sortie est la même.",
    )


def _percents(axes: Axes) -> None:
    axes.set_ylim(-0.02, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))


def _percent(share: float) -> str:
    number = f"{100 * share:.1f}".removesuffix(".0")
    return say(en=f"{number} %", fr=f"{number.replace('.', ',')} %")


def _number(value: float) -> str:
    return f"{value:.2g}".replace(".", say(en=".", fr=","))
