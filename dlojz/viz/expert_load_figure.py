"""The load of each expert over the steps of a training, what its capacity cuts, and how two trainings differ.

Layer 4. Invariant: each step is drawn as it was recorded; nothing is smoothed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.ticker import MaxNLocator, PercentFormatter

from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, BLUE, ORANGE, VERMILION

LAST_STEPS = 20
"""Steps over which the words under a title take their mean."""


class Load(Protocol):
    """One mixture in one step: of a run's record (`dlojz.record.ExpertLoad`), or of `dlojz.moe.watch.watch_loads`."""

    @property
    def step(self) -> int:
        """From 0."""

    @property
    def layer(self) -> str:
        """Name of the mixture."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """Choices that each expert has got, before its capacity cuts them."""

    @property
    def capacity(self) -> int:
        """Choices that each expert could take."""

    @property
    def dropped(self) -> float:
        """Share of all choices that found their expert full."""


def expert_load_figure(
    trainings: Mapping[str, Sequence[Load]], path: str | Path | None = None, layer: str | None = None
) -> LabFigure:
    """Draw what the experts of one mixture were given, step by step, one column for each training.

    Args:
        trainings: loads of each, under the words above its column.
        path: picture to write, if any.
        layer: which mixture; by default the last one.

    Raises:
        LabError: if a training has no loads, no mixture has this name, or the picture cannot be written.
    """
    columns = {name: _of_layer(name, loads, layer) for name, loads in trainings.items()}
    if not columns:
        raise LabError(say(en="give the loads of at least one training.", fr="donnez les charges d’un entraînement."))
    figure = new_figure(1.6 + 5.2 * len(columns), 7.4, alt=_alt(columns))
    rows = figure.subplots(3, len(columns), sharex="col", sharey="row", squeeze=False, height_ratios=(3, 2, 1.2))
    most = max(max(_shares(load)) for loads in columns.values() for load in loads)
    for column, (name, loads) in enumerate(columns.items()):
        top, middle, bottom = (rows[row][column] for row in range(3))
        mesh = _heat_map(top, loads, most)
        top.set_title(visible(name), loc="left", fontweight="bold")
        bar = figure.colorbar(mesh, ax=top, pad=0.02)
        bar.ax.axhline(_capacity(loads[-1]), color=BLACK, linestyle="--", linewidth=1.4)
        _extremes(middle, loads)
        _dropped(bottom, loads)
        if column == len(columns) - 1:
            bar.set_label(say(en="load, in fair shares", fr="charge, en justes parts"))
            figure.legend(handles=middle.get_lines(), loc="outside lower center", ncols=3, frameon=False)
    rows[0][0].set_ylabel("expert")
    rows[1][0].set_ylabel(say(en="load, in fair shares", fr="charge, en justes parts"))
    rows[2][0].set_ylabel(say(en="dropped", fr="abandonnés"))
    mixture = next(iter(columns.values()))[0].layer
    figure.suptitle(
        say(en="Load of the experts of ", fr="Charge des experts de ")
        + visible(mixture)
        + say(
            en=": beyond the capacity (dashed), tokens are dropped",
            fr=" : au-delà de la capacité (tirets), les tokens sont abandonnés",
        ),
        fontsize=12,
    )
    return finish(figure, path)


def _of_layer(name: str, loads: Sequence[Load], layer: str | None) -> list[Load]:
    layers = list(dict.fromkeys(load.layer for load in loads))
    if not layers:
        raise LabError(
            say(
                en=f"{name} has no load of experts: train a model with a mixture of experts such as moe_tiny.",
                fr=f"{name} n’a aucune charge d’experts : entraînez un modèle à mélange d’experts comme moe_tiny.",
            )
        )
    if layer is not None and layer not in layers:
        raise LabError(one_of("layer", layer, layers))
    return [load for load in loads if load.layer == (layer or layers[-1])]


def _shares(load: Load) -> list[float]:
    """Each expert's choices in units of the fair share, the mean over the experts."""
    fair = sum(load.tokens) / len(load.tokens)
    return [tokens / fair for tokens in load.tokens]


def _capacity(load: Load) -> float:
    return load.capacity * len(load.tokens) / sum(load.tokens)


def _heat_map(axes: Axes, loads: list[Load], most: float) -> QuadMesh:
    """An expert a line, a step a column: white idle, blue up to the capacity, orange to red beyond."""
    turn = min(_capacity(loads[-1]) / most, 0.999)
    colours = LinearSegmentedColormap.from_list(
        "load", [(0, "#FFFFFF"), (turn, BLUE), (min(turn + 0.001, 1), "#FBD9A5"), (1, VERMILION)], N=1024
    )
    experts = len(loads[0].tokens)
    mesh = axes.pcolormesh(
        [load.step - 0.5 for load in loads] + [loads[-1].step + 0.5],
        [expert - 0.5 for expert in range(experts + 1)],
        [list(column) for column in zip(*(_shares(load) for load in loads), strict=True)],
        cmap=colours,
        vmin=0,
        vmax=most,
        rasterized=True,
    )
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    return mesh


def _extremes(axes: Axes, loads: list[Load]) -> None:
    steps = [load.step for load in loads]
    busiest, idlest = ([pick(_shares(load)) for load in loads] for pick in (max, min))
    axes.plot(steps, busiest, color=VERMILION, linestyle="-", label=say(en="busiest expert", fr="le plus chargé"))
    axes.plot(steps, idlest, color=BLUE, linestyle=":", label=say(en="idlest expert", fr="le moins chargé"))
    axes.plot(
        steps,
        [_capacity(load) for load in loads],
        color=BLACK,
        linestyle="--",
        linewidth=1.4,
        label=say(en="capacity", fr="capacité"),
    )
    axes.set_ylim(bottom=0)
    plain(axes)


def _dropped(axes: Axes, loads: list[Load]) -> None:
    steps, dropped = [load.step for load in loads], [load.dropped for load in loads]
    axes.fill_between(steps, dropped, color=ORANGE, alpha=0.6, hatch="//", edgecolor="#333333", linewidth=0.4)
    axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=say(en="%", fr=" %")))
    axes.set_xlabel(say(en="step", fr="pas"))
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    plain(axes)
    mean = sum(dropped[-LAST_STEPS:]) / len(dropped[-LAST_STEPS:])
    axes.set_title(
        say(
            en=f"{100 * mean:.0f}% over the last {len(dropped[-LAST_STEPS:])} steps",
            fr=f"{100 * mean:.0f} % sur les {len(dropped[-LAST_STEPS:])} derniers pas",
        ),
        loc="right",
        fontsize=10,
    )


def _alt(columns: Mapping[str, list[Load]]) -> str:
    """What the figure shows, in words: of each training, the busiest expert and the dropped share at the end."""
    words = []
    for name, loads in columns.items():
        last = loads[-LAST_STEPS:]
        totals = [sum(tokens) for tokens in zip(*(load.tokens for load in last), strict=True)]
        share, dropped = 100 * max(totals) / sum(totals), 100 * sum(load.dropped for load in last) / len(last)
        idle = sum(total < 0.1 * sum(totals) / len(totals) for total in totals)
        words.append(
            say(
                en=f"{visible(name)}: the busiest of {len(totals)} experts takes {share:.0f}% of the choices, {idle} "
                f"are all but idle, {dropped:.0f}% of the choices are dropped",
                fr=f"{visible(name)} : le plus chargé des {len(totals)} experts prend {share:.0f} % des choix, {idle} "
                f"ne font presque rien, {dropped:.0f} % des choix sont abandonnés",
            )
        )
    opening = say(en="Load of the experts over the last steps. ", fr="Charge des experts sur les derniers pas. ")
    return opening + say(en="; ", fr=" ; ").join(words)
