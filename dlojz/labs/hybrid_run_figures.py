"""Figures and tables of lab 07 that need runs: losses laid over one process, bytes counted, memory of each rank.

Layer 6 (labs), on `dlojz.viz`. Invariant: what was measured stands beside what was predicted; nothing is fitted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from dlojz.config import RunConfig
from dlojz.footprint import STATES, Category, Traffic
from dlojz.grid import Grid
from dlojz.labs.pipeline_figures import Sheet, pictured, plain_number
from dlojz.labs.run_bars import measured_footprint
from dlojz.labs.zero_published import decimal
from dlojz.predict.communication import predict_communication
from dlojz.predict.shapes import model_shapes
from dlojz.runs import Run
from dlojz.text import say
from dlojz.units import byte_units, format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLACK, CATEGORY_STYLES, LINE_STYLES, category_label

AXES = ("tp", "dp", "pp")
SHOWN: tuple[Category, ...] = (*STATES, "activations", "workspace")


def title_of(run: Run) -> str:
    """A run by its degrees."""
    layout = run.config.layout
    degrees = [f"{axis}={getattr(layout, axis)}" for axis in ("dp", "pp", "tp") if getattr(layout, axis) > 1]
    return " × ".join(degrees) or say(en="one process", fr="un processus")


@pictured
def losses(runs: Sequence[Run]) -> LabFigure:
    """The loss of each run by step, laid over one another, and how far each is from the last, one process."""
    figure = new_figure(
        9.0,
        3.4,
        alt=say(en="Loss by step, laid over one another: ", fr="Perte à chaque pas, superposées : ")
        + ", ".join(map(title_of, runs))
        + say(en="; beside it the distance to one process.", fr=" ; à côté, l’écart avec un processus."),
    )
    left, right = figure.subplots(1, 2)
    alone = runs[-1].losses
    for number, (run, (colour, line, marker)) in enumerate(zip(runs, LINE_STYLES, strict=False)):
        steps = range(1, len(run.losses) + 1)
        # From the widest line to the narrowest, so that lines on one another are all seen.
        width = 7.5 - 1.5 * number
        left.plot(steps, run.losses, color=colour, linestyle="-", linewidth=width, label=title_of(run))
        if run is not runs[-1]:
            gaps = [max(abs(one - other), 1e-9) for one, other in zip(run.losses, alone, strict=True)]
            right.plot(steps, gaps, color=colour, linestyle=line, marker=marker, markersize=5, label=title_of(run))
    for axes in (left, right):
        axes.set_xlabel(say(en="step", fr="pas"))
        axes.set_xticks(range(1, len(alone) + 1))
    left.set_ylabel(say(en="loss (nats)", fr="perte (nats)"))
    left.legend(frameon=False, fontsize=9)
    right.set_yscale("log")
    right.set_ylim(1e-9, 1e-3)
    right.axhline(1e-5, color=BLACK, linewidth=0.8)
    right.set_ylabel(
        say(
            en="distance to one process\n(none: at the foot)",
            fr="écart avec un processus\n(nul : tout en bas)",
        )
    )
    right.yaxis.set_major_formatter(lambda value, position: f"{value:.0e}")
    left.yaxis.set_major_formatter(lambda value, position: decimal(f"{value:g}"))
    for axes in (left, right):
        plain(axes)
    return finish(figure)


def furthest(runs: Sequence[Run]) -> float:
    """The largest difference of a loss from that of the last run, one process."""
    alone = runs[-1].losses
    return max(abs(one - other) for run in runs for one, other in zip(run.losses, alone, strict=True))


def volumes(runs: Sequence[Run]) -> Sheet:
    """Bytes per step that rank 0 hands to each collective of each axis, predicted and counted, and whether all ranks'
    are equal."""
    rows = []
    for run in runs:
        predicted = [_bytes(_of_rank(run.config, rank)) for rank in range(run.config.layout.world_size)]
        counted = [_bytes(measured_footprint(run, rank).communication) for rank in range(run.config.layout.world_size)]
        for key in sorted(predicted[0] | counted[0], key=lambda key: (AXES.index(key[0]), key[1])):
            ours, theirs = predicted[0].get(key, (0, 0)), counted[0].get(key, (0, 0))
            equal = all(one.get(key) == other.get(key) for one, other in zip(predicted, counted, strict=True))
            rows.append(
                (
                    title_of(run),
                    key[0],
                    key[1],
                    str(theirs[0]),
                    format_bytes(ours[1]),
                    format_bytes(theirs[1]),
                    say(en="yes", fr="oui") if equal else say(en="NO", fr="NON"),
                )
            )
    head = (
        say(en="run", fr="exécution"),
        say(en="axis", fr="axe"),
        say(en="collective", fr="communication"),
        say(en="calls", fr="appels"),
        say(en="predicted", fr="prédit"),
        say(en="counted", fr="compté"),
        say(en="equal on all ranks", fr="égaux sur tous les rangs"),
    )
    return Sheet(head, tuple(rows))


def _bytes(traffic: Iterable[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by axis and collective; without the lab's own bookkeeping."""
    return {
        (each.group, each.collective): (each.count or 0, each.message_bytes) for each in traffic if each.group in AXES
    }


@lru_cache(maxsize=64)
def _of_rank(config: RunConfig, rank: int) -> tuple[Traffic, ...]:
    return tuple(predict_communication(config, model_shapes(config), rank))


def dp_bytes(run: Run) -> int:
    """Bytes that rank 0 of a run handed to the collectives of dp in one step."""
    return sum(each.message_bytes for each in measured_footprint(run).communication if each.group == "dp")


def weights_ratio(run: Run, alone: Run) -> float:
    """How many times fewer bytes of weights the fullest rank of a run holds than one process."""
    ranks = range(run.config.layout.world_size)
    return (measured_footprint(alone).memory.weights_bytes or 0) / max(
        measured_footprint(run, r).memory.weights_bytes or 0 for r in ranks
    )


@pictured
def memory(run: Run, alone: Run) -> LabFigure:
    """What each rank held at its peak, by category, beside one process; a diamond is the peak that was predicted."""
    from dlojz.predict import predict

    layout = run.config.layout
    ranks = range(layout.world_size)
    bars = [measured_footprint(alone), *(measured_footprint(run, rank) for rank in ranks)]
    # Replicas hold the same: one of them is predicted.
    grid = Grid(dp=layout.dp, pp=layout.pp, tp=layout.tp)
    firsts = {(grid.coordinates(rank).pp, grid.coordinates(rank).tp): rank for rank in reversed(ranks)}
    peaks = {place: predict(run.config, rank).memory.peak_bytes for place, rank in firsts.items()}
    expected = [predict(alone.config).memory.peak_bytes]
    expected += [peaks[grid.coordinates(rank).pp, grid.coordinates(rank).tp] for rank in ranks]
    names = [say(en="one\nprocess", fr="un\nprocessus")]
    names += [f"{rank}\n({','.join(map(str, grid.coordinates(rank)))})" for rank in ranks]
    unit, scale = byte_units()[2], 1024**2
    told = format_bytes(bars[0].memory.peak_bytes), format_bytes(max(bar.memory.peak_bytes or 0 for bar in bars[1:]))
    figure = new_figure(
        9.5,
        3.6,
        alt=say(
            en=f"Memory of each rank at its peak by category: one process {told[0]}, no rank of {title_of(run)} above "
            f"{told[1]}.",
            fr=f"Mémoire de chaque rang à son pic, par catégorie : un processus {told[0]}, aucun rang de "
            f"{title_of(run)} au-delà de {told[1]}.",
        ),
    )
    axes = figure.subplots()
    bottoms = [0.0] * len(bars)
    for name in SHOWN:
        heights = [(bar.memory.at_peak_bytes or {}).get(name, 0) / scale for bar in bars]
        if not any(heights):
            continue
        style = CATEGORY_STYLES[name]
        axes.bar(
            range(len(bars)),
            heights,
            bottom=bottoms,
            color=style.color,
            hatch=style.hatch,
            edgecolor="#333333",
            linewidth=0.5,
            label=category_label(name),
        )
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
    axes.plot(
        range(len(bars)),
        [(peak or 0) / scale for peak in expected],
        linestyle="",
        marker="D",
        color=BLACK,
        markerfacecolor="white",
        label=say(en="peak, predicted", fr="pic prédit"),
    )
    axes.set_xticks(range(len(bars)), names)
    axes.set_xlabel(say(en="rank (pp,dp,tp)", fr="rang (pp,dp,tp)"))
    axes.set_ylabel(unit)
    axes.yaxis.set_major_formatter(lambda value, position: plain_number(value))
    axes.legend(frameon=False, fontsize=9)
    plain(axes)
    return finish(figure)
