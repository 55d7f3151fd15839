"""Students of one size taught in several ways: each seed's accuracy over its teacher's, and the medians.

Layer 4. Invariant: nothing is computed here but medians of what was measured; every seed is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from dlojz.compress.distillation_trial import ARMS, StudentTrial, median_kept
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, BLUE, GREEN, GREY, ORANGE

GOAL = 0.97
"""What DistilBERT keeps of its teacher. Source: Sanh et al. 2019 (arXiv 1910.01108), abstract."""
HIDDEN_WITHIN = 0.0015
"""Half an image of 360, over an accuracy of nearly 1."""


def distillation_figure(trials: Sequence[StudentTrial], path: str | Path | None = None) -> LabFigure:
    """Draw one row per way to teach: a dot per seed, a bar for the median, and how much it kept in words.

    Args:
        trials: of any arms and seeds.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    arms = [arm for arm in ARMS if any(one.arm == arm.name for one in trials)]
    figure = new_figure(10.5, 1.6 + 0.42 * len(arms), alt=description(trials))
    axes = figure.subplots()
    least = min(GOAL, *(one.kept for one in trials))
    most = max(1.0, *(one.kept for one in trials))
    axes.axvline(1, color=BLACK, linewidth=1)
    axes.axvline(GOAL, color=GREY, linewidth=1, linestyle="--")
    for place, arm in enumerate(arms):
        _row(axes, place, arm.initialise == "teacher", [one.kept for one in trials if one.arm == arm.name],
             median_kept(trials, arm.name), most)  # fmt: skip
    first_few = next((place for place, arm in enumerate(arms) if arm.labels is not None), None)
    if first_few:
        axes.axhline(first_few - 0.5, color="#bbbbbb", linewidth=0.8)
    axes.set_yticks(range(len(arms)), [arm.title for arm in arms], fontsize=9)
    axes.set_ylim(len(arms) - 0.5, -0.9)
    axes.set_xlim(least - 0.06 * (most - least), most + 0.16 * (most - least))
    axes.annotate(say(en="teacher", fr="professeur"), (1, -0.62), xytext=(4, 0), textcoords="offset points",
                  fontsize=8, va="center")  # fmt: skip
    axes.annotate(_percent(GOAL), (GOAL, -0.62), xytext=(-4, 0), textcoords="offset points", fontsize=8, va="center",
                  ha="right", color="#666666")  # fmt: skip
    plain(axes)
    axes.grid(axis="y", visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value, 0)))
    axes.set_xlabel(
        say(
            en="accuracy over the teacher's of the same seed (held-out images)\n"
            "circle: begun with fresh weights; square: with the teacher's blocks",
            fr="exactitude rapportée à celle du professeur de même graine (images mises de côté)\n"
            "rond : parti de poids neufs ; carré : des blocs du professeur",
        ),
        fontsize=9,
    )
    axes.set_title(_title(trials), loc="left", fontsize=10)
    return finish(figure, path)


def description(trials: Sequence[StudentTrial]) -> str:
    """The figure in words: what each arm kept."""
    arms = [arm for arm in ARMS if any(one.arm == arm.name for one in trials)]
    colon = say(en=":", fr=" :")
    each = "; ".join(f"{arm.title}{colon} {_percent(median_kept(trials, arm.name))}" for arm in arms)
    return say(
        en=f"What a student keeps of its teacher's accuracy, median over the seeds. {each}.",
        fr=f"Ce qu’un étudiant garde de l’exactitude de son professeur, médiane des graines. {each}.",
    )


def _row(axes: Axes, place: int, begun: bool, kept: Sequence[float], middle: float, most: float) -> None:
    color, marker = (GREEN, "s") if begun else (BLUE, "o")
    axes.plot([middle, middle], [place - 0.3, place + 0.3], color=ORANGE, linewidth=4, solid_capstyle="butt", zorder=1)
    for same in _together(kept):
        for number, value in enumerate(same):
            axes.plot([value], [place + 0.15 * (number - (len(same) - 1) / 2)], color=color, marker=marker,
                      markersize=6, markeredgecolor="white", markeredgewidth=0.7, zorder=2)  # fmt: skip
    axes.annotate(_percent(middle), (1, place), xycoords=("axes fraction", "data"), xytext=(-4, 0),
                  textcoords="offset points", ha="right", va="center", fontsize=9)  # fmt: skip


def _together(kept: Sequence[float]) -> list[list[float]]:
    """Values by groups that one dot would hide: they are laid below one another."""
    groups: list[list[float]] = []
    for value in sorted(kept):
        if groups and value - groups[-1][0] < HIDDEN_WITHIN:
            groups[-1].append(value)
        else:
            groups.append([value])
    return groups


def _title(trials: Sequence[StudentTrial]) -> str:
    one = trials[0]
    share = one.parameters / one.teacher_parameters
    seeds, steps = len({trial.seed for trial in trials}), one.steps
    return say(
        en=f"{one.student}: {_percent(share)} of its teacher's parameters; {seeds} seed(s), {steps} steps each; "
        "orange: median",
        fr=f"{one.student} : {_percent(share)} des paramètres du professeur ; {seeds} graine(s), {steps} pas chacune ; "
        "orange : médiane",
    )


def _percent(share: float, digits: int = 1) -> str:
    return say(en=f"{100 * share:.{digits}f}%", fr=f"{100 * share:.{digits}f} %".replace(".", ","))
