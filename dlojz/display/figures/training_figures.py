"""Figure of the loads of experts, step by step as recorded, and the names of optimizers as papers write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator

from dlojz.base.errors import LabError
from dlojz.base.language import percent, refusal, say
from dlojz.base.table import visible
from dlojz.config.optimizers import OPTIMIZERS
from dlojz.display.canvas import LabFigure, caption, finish, new_figure, phrase, plain
from dlojz.display.drawing import LETTER
from dlojz.display.style import BLACK, BLUE, EDGE, HEADING, LIGHT_ORANGE, ORANGE, TITLE, VERMILION, WHITE

if TYPE_CHECKING:
    from dlojz.results.record import ExpertLoad


def optimizer_label(name: str) -> str:
    """Write an optimizer's name as papers do."""
    return OPTIMIZERS[name].label if name in OPTIMIZERS else visible(name).replace("_", " ")


LAST_STEPS = 20
"""Steps over which the words under a title take their mean."""


WIDEST_IN = 13.0
"""Beyond, a notebook would shrink the figure to illegible curves: columns become narrower instead."""


def expert_load_figure(trainings: Mapping[str, Sequence[ExpertLoad]]) -> LabFigure:
    """Draw what the experts of the last mixture were given, step by step, one column for each training.

    Args:
        trainings: loads of each, under the words above its column.

    Raises:
        LabError: if a training has no loads.
    """
    columns = {name: _of_last_layer(name, loads) for name, loads in trainings.items()}
    if not columns:
        raise LabError(say(en="give the loads of at least one training.", fr="donnez les charges d’un entraînement."))
    column_in = min(5.2, (WIDEST_IN - 1.6) / len(columns))
    figure = new_figure(1.6 + column_in * len(columns), 7.4, alt=_expert_load_alt(columns))
    rows = figure.subplots(3, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2, 1.2))
    largest_share = max(max(_shares(load)) for loads in columns.values() for load in loads)
    for column, (name, loads) in enumerate(columns.items()):
        # Three panels of a column: heat map, extremes, dropped share.
        top, middle, bottom = (rows[row][column] for row in range(3))
        mesh = _heat_map(top, loads, largest_share)
        letters = max(8, int(72 * column_in / (HEADING * LETTER)))
        top.set_title(fill(visible(name), letters), loc="left", fontweight="bold", fontsize=HEADING)
        bar = figure.colorbar(mesh, ax=top, pad=0.02)
        bar.ax.axhline(_capacity(loads[-1]), color=BLACK, linestyle="--", linewidth=1.4)
        _extremes(middle, loads)
        _dropped(bottom, loads)
        if column == len(columns) - 1:
            bar.set_label(say(en="load, relative to the fair share", fr="charge, rapportée à la part équitable"))
            figure.legend(handles=middle.get_lines(), loc="outside lower center", ncols=3, frameon=False)
    capacities = (_capacity(load) for loads in columns.values() for load in loads)
    rows[1][0].set_ylim(0, 1.05 * max(largest_share, *capacities))
    caption(rows[0][0], y="expert")
    # Two lines: the panel is too low for one.
    caption(rows[1][0], y=say(en="load, relative\nto the fair share", fr="charge, rapportée\nà la part équitable"))
    caption(rows[2][0], y=say(en="dropped", fr="abandonnés"))
    mixture = visible(next(iter(columns.values()))[0].layer)
    title = phrase("title of experts", mixture=mixture)
    figure.suptitle(fill(title, int(72 * figure.get_figwidth() / (TITLE * LETTER))), fontsize=TITLE)
    return finish(figure)


def _of_last_layer(name: str, loads: Sequence[ExpertLoad]) -> list[ExpertLoad]:
    layers = list(dict.fromkeys(load.layer for load in loads))
    if not layers:
        raise refusal(
            en=f"{name} has no load of experts: train a model with a mixture of experts such as moe_tiny.",
            fr=f"{name} n’a aucune charge d’experts : entraînez un modèle à mélange d’experts comme moe_tiny.",
        )
    return [load for load in loads if load.layer == layers[-1]]


def _shares(load: ExpertLoad) -> list[float]:
    """Each expert's choices in units of the fair share, the mean over the experts."""
    # Mean choices per expert.
    fair = sum(load.tokens) / len(load.tokens)
    return [tokens / fair for tokens in load.tokens]


def _capacity(load: ExpertLoad) -> float:
    # Capacity in units of the fair share: choices an expert may take over the mean choices.
    return load.capacity * len(load.tokens) / sum(load.tokens)


def _heat_map(axes: Axes, loads: list[ExpertLoad], largest_share: float) -> QuadMesh:
    """An expert a line, a step a column: white idle, blue up to the capacity, orange to red beyond."""
    # Where on the colour scale the capacity lies: blue below, orange to red above.
    turn = min(_capacity(loads[-1]) / largest_share, 0.999)
    colours = LinearSegmentedColormap.from_list(
        "load", [(0, WHITE), (turn, BLUE), (min(turn + 0.001, 1), LIGHT_ORANGE), (1, VERMILION)], N=1024
    )
    # Edges of the cells, one more than there are steps or experts.
    steps = [load.step - 0.5 for load in loads] + [loads[-1].step + 0.5]
    experts = [expert - 0.5 for expert in range(len(loads[0].tokens) + 1)]
    # (experts, steps)
    shares = [list(column) for column in zip(*(_shares(load) for load in loads), strict=True)]
    mesh = axes.pcolormesh(steps, experts, shares, cmap=colours, vmin=0, vmax=largest_share, rasterized=True)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    return mesh


def _extremes(axes: Axes, loads: list[ExpertLoad]) -> None:
    steps = [load.step for load in loads]
    busiest, idlest = ([pick(_shares(load)) for load in loads] for pick in (max, min))
    axes.plot(steps, busiest, color=VERMILION, linestyle="-", label=say(en="busiest expert", fr="le plus chargé"))
    axes.plot(steps, idlest, color=BLUE, linestyle=":", label=say(en="idlest expert", fr="le moins chargé"))
    capacities, label = [_capacity(load) for load in loads], say(en="capacity", fr="capacité")
    axes.plot(steps, capacities, color=BLACK, linestyle="--", linewidth=1.4, label=label)
    plain(axes)


def _dropped(axes: Axes, loads: list[ExpertLoad]) -> None:
    steps, dropped = [load.step for load in loads], [load.dropped for load in loads]
    axes.fill_between(steps, dropped, color=ORANGE, alpha=0.6, hatch="//", edgecolor=EDGE, linewidth=0.4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(lambda value, position: percent(value, None))
    caption(axes, x=say(en="step", fr="pas"))
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    plain(axes)
    recent_shares = dropped[-LAST_STEPS:]
    mean = percent(sum(recent_shares) / len(recent_shares), 0)
    words = phrase("mean of the last steps", mean=mean, steps=len(recent_shares))
    axes.set_title(words, loc="right", fontsize=HEADING)


def _expert_load_alt(columns: Mapping[str, list[ExpertLoad]]) -> str:
    """What the figure shows, in words: of each training, the busiest expert and the dropped share at the end."""
    words = []
    for name, loads in columns.items():
        recent_loads = loads[-LAST_STEPS:]
        # Choices of each expert, summed over the last steps.
        totals = [sum(tokens) for tokens in zip(*(load.tokens for load in recent_loads), strict=True)]
        share = percent(max(totals) / sum(totals), 0)
        dropped = percent(sum(load.dropped for load in recent_loads) / len(recent_loads), 0)
        # Below a tenth of the fair share.
        idle = sum(total < 0.1 * sum(totals) / len(totals) for total in totals)
        words.append(phrase("alt of experts", name=name, experts=len(totals), share=share, idle=idle, dropped=dropped))
    opening = say(en="Load of the experts over the last steps. ", fr="Charge des experts sur les derniers pas. ")
    return opening + say(en="; ", fr=" ; ").join(words)
