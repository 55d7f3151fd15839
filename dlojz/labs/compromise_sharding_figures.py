"""Strategies of the layers of a perceptron: what each costs, what resharding costs, and the path that is chosen.

Layer 6 (labs), on `dlojz.viz`. Invariant: the costs drawn are those given; the totals are summed again from the choice.

Source: Zheng et al. 2022 (Alpa, OSDI 22), §4.2, equation 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from matplotlib.axes import Axes

from dlojz.labs.compromise_shown import HEAT, figure_of, given
from dlojz.labs.pipeline_figures import pictured
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure
from dlojz.viz.markup import visible
from dlojz.viz.palette import LINE_STYLES

Path = Sequence[int]


class Chain(Protocol):
    """Layers of which each takes one of several strategies (`dlojz.labs.compromise_programme.Chain`)."""

    strategies: tuple[str, ...]
    costs: list[list[float]]
    resharding: list[list[list[float]]]


@pictured
def mlp_sharding(costs: Chain, solution: Any = None, **others: Any) -> LabFigure:
    """Strategies (down) of every layer (across) with their cost, and the path that a solution takes through them.

    On the path stands what resharding costs between two layers; the legend has the sum. At the right, what resharding
    costs between two neighbours for every pair of strategies.

    Args:
        costs: names of the strategies, cost of each in every layer, and the matrices between layers.
        solution: number of the strategy of each layer, or what has it (`.strategies()`), or a function without
            arguments that gives either; none by default.
        **others: further solutions by name, to compare.

    Raises:
        LabError: for a solution that does not name a strategy for each layer.
    """
    solutions = others if solution is None else {"yours": solution, **others}
    paths = {_solution_name(name): _path(given(one), costs) for name, one in solutions.items()}
    totals = {name: chain_total(costs, path) for name, path in paths.items()}
    layers, rows = len(costs.costs), len(costs.strategies)
    told = [f"{name} {figure_of(total)}" for name, total in totals.items()]
    alt = say(
        en=f"Costs of {rows} strategies in {layers} layers. Totals: {', '.join(told) or 'none'}.",
        fr=f"Coûts de {rows} stratégies dans {layers} couches. Totaux : {', '.join(told) or 'aucun'}.",
    )
    figure = new_figure(min(5.2 + 0.95 * layers, 13.0), 0.85 * rows + 1.7, alt=alt)
    left, right = figure.subplots(1, 2, width_ratios=(max(layers, 3), rows + 0.8))
    names = [_strategy(one) for one in costs.strategies]
    table = np.array([[_cell(some, k) for some in costs.costs] for k in range(rows)])
    _heat(left, table, f"{say(en='layer', fr='couche')} {{}}", names)
    left.set_title(
        say(en="cost of each strategy, in each layer", fr="coût de chaque stratégie, par couche"), fontsize=9
    )
    for place, ((name, path), (color, dashes, marker)) in enumerate(zip(paths.items(), LINE_STYLES[4:], strict=False)):
        shift = 0.30 - 0.14 * place
        left.plot(
            range(layers), [k + shift for k in path], color=color, linestyle=dashes, marker=marker, linewidth=2,
            markersize=6, markeredgecolor="white", label=_sum(name, totals[name]),
        )  # fmt: skip
        for layer, (here, there) in enumerate(pairwise(path)):
            paid = costs.resharding[layer][here][there]
            if paid and not place:
                left.text(
                    layer + 0.5, (here + there) / 2 + shift, f"+{figure_of(paid)}", fontsize=7.5, color=color,
                    ha="center", va="center",
                    bbox={"facecolor": "white", "edgecolor": color, "linewidth": 0.5, "pad": 1.2},
                )  # fmt: skip
    if costs.resharding:
        _heat(right, np.array(costs.resharding[0]), "{}", names, names)
        right.set_xlabel(say(en="next layer", fr="couche suivante"))
        right.set_title(say(en="resharding, layers 1 → 2", fr="redécoupe, couches 1 → 2"), fontsize=9)
    else:
        right.set_axis_off()
    if paths:
        figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return finish(figure)


def _strategy(name: str) -> str:
    """A strategy in the reader's language; one that the lab does not name as it is."""
    usual = {
        "column": say(en="by columns", fr="par colonne"),
        "row": say(en="by rows", fr="par ligne"),
        "batch": say(en="along the batch", fr="selon le batch"),
    }
    return usual.get(name, visible(name))


def _sum(name: str, total: float) -> str:
    return say(en=f"{name}: {figure_of(total)}", fr=f"{name} : {figure_of(total)}")


def _solution_name(name: str) -> str:
    usual = {
        "yours": say(en="chosen", fr="choisi"),
        "alone": say(en="each layer alone", fr="chaque couche seule"),
        "greedy": say(en="greedy", fr="glouton"),
        "batch": say(en="data parallelism", fr="Data Parallelism"),
    }
    return usual.get(name, visible(name).replace("_", " "))


def _path(solution: Any, costs: Chain) -> list[int]:
    taken = solution.strategies() if hasattr(solution, "strategies") else solution
    path = list(taken) if isinstance(taken, Sequence | np.ndarray) else []
    legal = len(path) == len(costs.costs) and all(
        isinstance(k, int | np.integer) and 0 <= k < len(some) for k, some in zip(path, costs.costs, strict=False)
    )
    if not legal:
        raise LabError(
            say(
                en=f"a solution names one strategy, from 0, for each of the {len(costs.costs)} layers, but "
                f"{visible(repr(taken)[:80])} was received.",
                fr=f"une solution nomme une stratégie, à partir de 0, pour chacune des {len(costs.costs)} couches ; "
                f"reçu : {visible(repr(taken)[:80])}.",
            )
        )
    return [int(k) for k in path]


def chain_total(costs: Chain, path: Path) -> float:
    """What one strategy per layer costs: Σ s·c + Σ sᵀRs."""
    own = math.fsum(costs.costs[layer][k] for layer, k in enumerate(path))
    return own + math.fsum(costs.resharding[layer][here][there] for layer, (here, there) in enumerate(pairwise(path)))


def _cell(some: Sequence[float], place: int) -> float:
    return float(some[place]) if place < len(some) else math.nan


def _heat(axes: Axes, table: np.ndarray[Any, Any], across: str, down: Sequence[str], names: Sequence[str] = ()) -> None:
    """A table in colours with its numbers; the deeper the blue, the more it costs."""
    finite = table[np.isfinite(table)]
    top = float(finite.max(initial=0)) or 1.0
    axes.imshow(np.where(np.isfinite(table), table, np.nan), cmap=HEAT, vmin=0, vmax=1.9 * top, aspect="auto")
    for row, line in enumerate(table):
        for column, value in enumerate(line):
            if math.isfinite(value):
                axes.text(column, row - 0.28, figure_of(value), ha="center", va="center", fontsize=7.5)
    columns = names or [across.format(column + 1) for column in range(table.shape[1])]
    axes.set_xticks(range(table.shape[1]), [visible(one) for one in columns], fontsize=8)
    axes.set_yticks(range(len(down)), [visible(one) for one in down], fontsize=8)
    axes.set_xticks(np.arange(table.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(len(down) + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=2)
    axes.tick_params(which="both", length=0)
