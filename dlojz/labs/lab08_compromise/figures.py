"""Figures of lab 08 about searches: shardings, pipeline stages, measured layouts.

Its notebook finds those about published trainings here too (`figures_published`).

Totals are summed again from the choice that is drawn.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1, and §5.2, equation 2.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from dlojz.base.language import brief_percent, decimal, rounded, say
from dlojz.base.table import Table, titles, visible
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.style import BLACK, BLUE, EDGE, LINE_STYLES, NORMAL, ORANGE, SMALL, YELLOW
from dlojz.labs.kit.exercise import Said, Sentences
from dlojz.labs.kit.figures import HEAT, PLATE, given, illustrated, pictured, short
from dlojz.labs.lab08_compromise.exercises_alpa import Chain, chain_cost
from dlojz.labs.lab08_compromise.figures_published import bloom as bloom  # noqa: PLC0414
from dlojz.labs.lab08_compromise.figures_published import bubble_or_all_reduce as bubble_or_all_reduce  # noqa: PLC0414
from dlojz.labs.lab08_compromise.figures_published import giants as giants  # noqa: PLC0414
from dlojz.planner.answer import seconds
from dlojz.planner.this_machine import LocalChoice

TEXTS = Sentences(Path(__file__).with_suffix(".md"))


@pictured
def mlp_sharding(costs: Chain, solution: Any = None, **more_solutions: Any) -> LabFigure:
    """Draw the strategies of every layer with their cost, and the path of a solution through them.

    Frames show the path; between two layers stands what resharding costs; the legend has the sum. At the right, what
    resharding costs between two neighbours for every pair of strategies.

    Args:
        costs: names of the strategies, cost of each in every layer, and the matrices between layers.
        solution: number of the strategy of each layer, or what has it (`.strategies()`), or a function without
            arguments that gives either; none by default.
        **more_solutions: further solutions by name, to compare.

    Raises:
        LabError: for a solution that does not name a strategy for each layer.
    """
    solutions = more_solutions if solution is None else {"yours": solution, **more_solutions}
    paths = {
        _usual(
            name, yours=say(en="chosen", fr="choisi"), batch=say(en="data parallelism", fr="Data Parallelism")
        ): _path(given(answer), costs)
        for name, answer in solutions.items()
    }
    totals = {name: chain_cost(costs.costs, costs.resharding, path) for name, path in paths.items()}
    layers, rows = len(costs.costs), len(costs.strategies)
    labels = [f"{name} {rounded(total, 4)}" for name, total in totals.items()]
    alt = say(
        en=f"Costs of {rows} strategies in {layers} layers. Totals: {', '.join(labels) or 'none'}.",
        fr=f"Coûts de {rows} stratégies dans {layers} couches. Totaux : {', '.join(labels) or 'aucun'}.",
    )
    figure = new_figure(min(5.2 + 0.95 * layers, 11.0), 0.6 * rows + 1.7, alt=alt)
    cost_axes, resharding_axes = figure.subplots(1, 2, width_ratios=(max(layers, 3), rows + 0.8))
    names = [_usual(strategy) for strategy in costs.strategies]
    table = np.array([[_cell(layer_costs, k) for layer_costs in costs.costs] for k in range(rows)])
    _heat(cost_axes, table, f"{say(en='layer', fr='couche')} {{}}", names)
    cost_axes.set_title(
        say(en="cost of each strategy, in each layer", fr="coût de chaque stratégie, par couche"), fontsize=NORMAL
    )
    for number, ((name, path), (color, dashes, _)) in enumerate(zip(paths.items(), LINE_STYLES[4:], strict=False)):
        half = 0.45 - 0.05 * number  # of the frame around a cell's number, so that several solutions are told apart
        label = say(en=f"{name}: {rounded(totals[name], 4)}", fr=f"{name} : {rounded(totals[name], 4)}")
        line_style: dict[str, Any] = {"linestyle": dashes, "linewidth": 2}
        for layer, k in enumerate(path):
            frame = Rectangle((layer - half, k - half), 2 * half, 2 * half, fill=False, edgecolor=color, **line_style)
            # one entry in the legend for each path
            frame.set_label(label if layer == 0 else "")
            cost_axes.add_patch(frame)
        for layer, (strategy, next_strategy) in enumerate(pairwise(path)):
            cost_axes.plot([layer + half, layer + 1 - half], [strategy, next_strategy], color=color, **line_style)
            paid = costs.resharding[layer][strategy][next_strategy]
            # of the first path only: prices of several would cover one another
            if paid and not number:
                cost_axes.text(
                    layer + 0.5, (strategy + next_strategy) // 2 + 0.5, f"+{rounded(paid, 4)}", fontsize=SMALL,
                    color=color, ha="center", va="center",
                    bbox={"facecolor": "white", "edgecolor": color, "linewidth": 0.5, "pad": 1.2},
                )  # fmt: skip
    if costs.resharding:
        _heat(resharding_axes, np.array(costs.resharding[0]), "{}", names, names)
        resharding_axes.set_xlabel(say(en="next layer", fr="couche suivante"))
        resharding_axes.set_title(say(en="resharding, layers 1 → 2", fr="redécoupage, couches 1 → 2"), fontsize=NORMAL)
    else:
        resharding_axes.set_axis_off()
    if paths:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=NORMAL)
    return finish(figure)


_NAMES = {
    "column": Said("by columns", "par colonne"),
    "row": Said("by rows", "par ligne"),
    "batch": Said("along the batch", "selon le batch"),
    "alone": Said("each layer alone", "chaque couche seule"),
    "greedy": Said("greedy", "glouton"),
    "package": Said("the package", "le paquet"),
    "lab_03": Said("lab 03", "TP 03"),
}


def _usual(name: str, **overrides: str) -> str:
    """A usual name in the reader's language; another one as it is."""
    return overrides.get(name) or str(_NAMES.get(name, visible(name).replace("_", " ")))


def _path(solution: Any, costs: Chain) -> list[int]:
    strategies = solution.strategies() if hasattr(solution, "strategies") else solution
    path = list(strategies) if isinstance(strategies, Sequence | np.ndarray) else []
    legal = len(path) == len(costs.costs) and all(
        isinstance(k, int | np.integer) and 0 <= k < len(layer_costs)
        for k, layer_costs in zip(path, costs.costs, strict=False)
    )
    if not legal:
        raise TEXTS.refusal(
            "solution", "one strategy for each layer", count=len(costs.costs), strategies=visible(repr(strategies)[:80])
        )
    return [int(k) for k in path]


def _cell(layer_costs: Sequence[float], strategy: int) -> float:
    return float(layer_costs[strategy]) if strategy < len(layer_costs) else math.nan


def _heat(axes: Axes, table: np.ndarray[Any, Any], across: str, down: Sequence[str], names: Sequence[str] = ()) -> None:
    """A table in colours with its numbers; the deeper the blue, the more it costs."""
    finite = table[np.isfinite(table)]
    top = float(finite.max(initial=0)) or 1.0
    # 1.9 × the largest number: the darkest blue stays light enough for black digits
    axes.imshow(np.where(np.isfinite(table), table, np.nan), cmap=HEAT, vmin=0, vmax=1.9 * top, aspect="auto")
    for row, line in enumerate(table):
        for column, value in enumerate(line):
            if math.isfinite(value):
                axes.text(column, row, rounded(value, 4), ha="center", va="center", fontsize=SMALL)
    columns = names or [across.format(column + 1) for column in range(table.shape[1])]
    axes.set_xticks(range(table.shape[1]), [visible(label) for label in columns], fontsize=SMALL)
    axes.set_yticks(range(len(down)), [visible(label) for label in down], fontsize=SMALL)
    axes.set_xticks(np.arange(table.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(down) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)


@illustrated
def neighbours(rows: Sequence[LocalChoice], measured_s: Sequence[float]) -> tuple[LabFigure, Table]:
    """Draw layouts of this machine, predicted beside measured, and what the first choice loses.

    Args:
        rows: of `plan_here`, in any order.
        measured_s: seconds of a step of each, in the same order.

    Raises:
        LabError: if there is none, or not one time for each.
    """
    if not rows or len(rows) != len(measured_s) or min(measured_s) <= 0:
        raise TEXTS.refusal("measured", "seconds of each layout", count=len(rows), received_count=len(measured_s))
    pairs = sorted(zip(rows, map(float, measured_s), strict=True), key=lambda pair: pair[0].step_s)
    loss = pairs[0][1] / min(value for _, value in pairs) - 1
    figure = new_figure(10.0, 0.5 * len(pairs) + 1.9, alt=_neighbours_alt(pairs, loss))
    axes = figure.subplots()
    _bars(axes, pairs)
    axes.set_title(_loss_words(pairs, loss), fontsize=NORMAL, loc="left")
    return finish(figure), _neighbours_sheet(pairs)


def _bars(axes: Axes, pairs: Sequence[tuple[LocalChoice, float]]) -> None:
    positions = np.arange(len(pairs))
    predicted, measured = [1e3 * row.step_s for row, _ in pairs], [1e3 * value for _, value in pairs]
    for shift, values, color, hatch, label in (
        (-0.19, predicted, ORANGE, "//", say(en="predicted", fr="prédit")),
        (0.19, measured, BLUE, "", say(en="measured (median)", fr="mesuré (médiane)")),
    ):
        bars = axes.barh(
            positions + shift, values, 0.36, color=color, hatch=hatch, edgecolor=EDGE, linewidth=0.6, label=label
        )
        axes.bar_label(bars, [short(value) for value in values], padding=3, fontsize=SMALL, bbox=PLATE)
    fastest = int(np.argmin(measured))
    reach = 1.12 * max(*predicted, *measured)
    # x as a share of the axes, above 1 to the right of them; y in rows
    marker_style: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "clip_on": False, "markeredgecolor": BLACK}
    first_label, best_label = (
        say(en="first choice", fr="premier choix"),
        say(en="fastest measured", fr="la plus rapide mesurée"),
    )
    axes.plot(
        [1.015], [0], marker="*", markersize=13, color=YELLOW, label=first_label, linestyle="none", **marker_style
    )
    axes.plot(
        [1.04], [fastest], marker="P", markersize=9, color=BLUE, label=best_label, linestyle="none", **marker_style
    )
    axes.set_xlim(0, reach)
    # upside down: the first choice is on top
    axes.set_ylim(len(pairs) - 0.4, -0.6)
    axes.set_yticks(positions, [visible(row.title) for row, _ in pairs], fontsize=SMALL)
    axes.set_xlabel(say(en="milliseconds of a step", fr="millisecondes d’un pas"))
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    plain(axes)
    axes.figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=SMALL)


def _loss_words(pairs: Sequence[tuple[LocalChoice, float]], loss: float) -> str:
    if loss <= 0:
        return TEXTS.say("loss words", "first choice is the fastest", pairs_count=len(pairs))
    return TEXTS.say("measured", "first choice", count=len(pairs), loss=brief_percent(loss))


def _neighbours_sheet(pairs: Sequence[tuple[LocalChoice, float]]) -> Table:
    fastest = min(value for _, value in pairs)
    head = titles(*TEXTS.sentence("neighbours sheet", "heads"))
    rows = [
        (
            ("★ " if position == 0 else "") + row.title,
            seconds(row.step_s),
            seconds(value),
            brief_percent(row.step_s / value - 1, signed=True),
            f"× {decimal(value / fastest, 2)}",
        )
        for position, (row, value) in enumerate(pairs)
    ]
    return Table(head, tuple(rows))


def _neighbours_alt(pairs: Sequence[tuple[LocalChoice, float]], loss: float) -> str:
    steps_text = ", ".join(f"{visible(row.title)}: {seconds(row.step_s)} / {seconds(value)}" for row, value in pairs)
    return f"{_loss_words(pairs, loss)}. " + TEXTS.say("neighbours", "alt", steps_text=steps_text)
