"""Figures and tables of lab 07: grids and link traffic; losses, bytes and memory of runs, predicted and measured."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from dlojz.base.language import byte_units, format_bytes, gap_text, percent, say
from dlojz.base.table import Table, titles
from dlojz.config.layout import DEFAULT_ORDER, RankGrid
from dlojz.config.run_config import RunConfig
from dlojz.display.canvas import LabFigure, finish, new_figure, plain
from dlojz.display.grid_drawing import grid_figure
from dlojz.display.style import BLACK, CATEGORY_STYLES, EDGE, LINE_STYLES, NORMAL, category_label
from dlojz.labs.kit.exercise import Sentences, or_to_do
from dlojz.labs.kit.figures import labelled, measured_footprint, panel, pictured
from dlojz.labs.kit.judges import expect_groups, expect_triple
from dlojz.labs.lab07_hybrid.exercises import ROUNDS, BetweenNodes
from dlojz.prediction.communication import predict_communication
from dlojz.prediction.link_traffic import link_traffic
from dlojz.prediction.shapes import RankPart
from dlojz.prediction.states import predict_states
from dlojz.results.footprint import STATES, Category, Traffic
from dlojz.running.run import Run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

AXES = ("tp", "dp", "pp")


@pictured
def drawn(dp: int, pp: int, tp: int, gpus_per_node: int, axis: str | None = None) -> LabFigure:
    """Draw a grid of ranks on its nodes, coloured by the groups of each axis, or of one."""
    return grid_figure(RankGrid(dp=dp, pp=pp, tp=tp, gpus_per_node=gpus_per_node), axis=axis)


@pictured
def placed(config: RunConfig, gpus_per_node: int, order: str) -> LabFigure:
    """Draw a run on nodes in an order of the axes, with the bytes on each link."""
    grid = _grid(config, gpus_per_node, order)
    return grid_figure(grid, link_traffic(config, grid), axis="tp")


@or_to_do
def places(
    place_of: Callable[[int, int, int, int], Sequence[int]], dp: int, pp: int, tp: int, ranks: Iterable[int]
) -> Table:
    """Tabulate where the student's function puts some ranks, and which rank the formula gives there."""
    rows = []
    for rank in ranks:
        stage, replica, piece = expect_triple(place_of(rank, dp, pp, tp), "(pp_rank, dp_rank, tp_rank)")
        rows.append((*map(str, (rank, stage, replica, piece)), str((stage * dp + replica) * tp + piece)))
    head = titles(*TEXTS.sentence("places", "heads"))
    return Table(head, tuple(rows))


@or_to_do
def groups(groups_of: Callable[[str, int, int, int], Any], dp: int, pp: int, tp: int) -> Table:
    """Tabulate the groups that the student's function gives along each axis."""
    rows = []
    for axis in AXES:
        rank_groups = expect_groups(groups_of(axis, dp, pp, tp), dp * pp * tp)
        group_text = "  ".join("[" + " ".join(map(str, group)) + "]" for group in rank_groups)
        rows.append((axis, str(len(rank_groups)), group_text))
    return Table((say(en="axis", fr="axe"), say(en="groups", fr="groupes"), say(en="ranks", fr="rangs")), tuple(rows))


@or_to_do
def crossings(between_nodes: BetweenNodes, config: RunConfig, gpus_per_node: int, orders: Sequence[str]) -> Table:
    """Tabulate bytes per step between nodes along tp and dp, by the student's function and by the package."""
    rows = []
    for order in orders:
        grid = _grid(config, gpus_per_node, order)
        crossing = link_traffic(config, grid)
        for axis in AXES:
            theirs = crossing.bytes_of(axis, between=True)
            student_bytes = "" if axis == "pp" else format_bytes(_own(between_nodes, config, grid, axis))
            rows.append(
                (order, axis, student_bytes, format_bytes(theirs), format_bytes(crossing.bytes_of(axis, between=False)))
            )
    head = titles(*TEXTS.sentence("crossings", "heads"))
    return Table(head, tuple(rows))


def between_bytes(config: RunConfig, gpus_per_node: int, order: str) -> int:
    """Sum the bytes per step between nodes, over all axes, for one order of the axes."""
    crossing = link_traffic(config, _grid(config, gpus_per_node, order))
    return sum(crossing.bytes_of(axis, between=True) for axis in AXES)


def _grid(config: RunConfig, gpus_per_node: int, order: str) -> RankGrid:
    layout = config.layout
    return RankGrid(dp=layout.dp, pp=layout.pp, tp=layout.tp, gpus_per_node=gpus_per_node, order=order)


def _own(between_nodes: BetweenNodes, config: RunConfig, grid: RankGrid, axis: str) -> float:
    """The student's sum over the groups of an axis: ranks of a group hand the same messages to its collectives."""
    return sum(
        between_nodes(traffic.collective, traffic.message_bytes, group, grid.gpus_per_node)
        for group in grid.groups(axis)
        for traffic in _told(config, grid, group[0])
        if traffic.group == axis and traffic.collective in ROUNDS and grid.size(axis) > 1
    )


@lru_cache(maxsize=64)
def _told(config: RunConfig, grid: RankGrid, rank: int) -> tuple[Traffic, ...]:
    """Predicted traffic of a rank, wherever the order of the axes has put it."""
    coordinates, layout = grid.coordinates(rank), config.layout
    default_rank = RankGrid(dp=layout.dp, pp=layout.pp, tp=layout.tp).rank_of(pp=coordinates.pp, tp=coordinates.tp)
    return tuple(predict_communication(RankPart(config, default_rank)))


def degrees(
    fields: Mapping[str, Any], gpus_per_node: int, choices: Sequence[tuple[int, int, int]], samples: int
) -> Table:
    """Compare degrees (dp, pp, tp) of one model: states, bubble, bytes of a step per rank and link.

    Args:
        fields: of the run, without its degrees and micro-batches.
        gpus_per_node: of the cluster.
        choices: degrees that make the same number of ranks.
        samples: of a step, which the replicas divide into micro-batches of one.
    """
    rows = []
    for dp, pp, tp in choices:
        micro_batches = samples // dp
        config = RunConfig.of(**fields, dp=dp, pp=pp, tp=tp, micro_batch=1, micro_batches=micro_batches)
        crossing = link_traffic(config, _grid(config, gpus_per_node, DEFAULT_ORDER))
        inside, between = (sum(crossing.bytes_of(axis, between=far) for axis in AXES) for far in (False, True))
        # Replicas and slices hold about the same: the first rank of each stage is asked.
        stages = range(0, dp * pp * tp, dp * tp)
        parts = (RankPart(config, rank).shapes for rank in stages)
        states = max(predict_states(config, part).states_bytes for part in parts)
        rows.append(
            (
                f"{dp} × {pp} × {tp}",
                format_bytes(states),
                percent((pp - 1) / (micro_batches + pp - 1)),
                format_bytes(inside / (dp * pp * tp)),
                format_bytes(between / (dp * pp * tp)),
            )
        )
    head = titles(*TEXTS.sentence("degrees", "heads"))
    return Table(head, tuple(rows))


SHOWN: tuple[Category, ...] = (*STATES, "activations", "workspace")


def title_of(run: Run) -> str:
    """Name a run by its degrees."""
    layout = run.config.layout
    degrees = [f"{axis}={getattr(layout, axis)}" for axis in ("dp", "pp", "tp") if getattr(layout, axis) > 1]
    return " × ".join(degrees) or say(en="one process", fr="un processus")


@pictured
def losses(runs: Sequence[Run]) -> LabFigure:
    """Draw the losses of runs by step, and how far each is from the last run, one process."""
    figure = new_figure(
        9.0,
        3.4,
        alt=say(en="Loss by step, superimposed: ", fr="Perte à chaque pas, superposées : ")
        + ", ".join(map(title_of, runs))
        + say(en="; beside it the distance to one process.", fr=" ; à côté, l’écart avec un processus."),
    )
    loss_axes, gap_axes = figure.subplots(1, 2)
    reference = runs[-1].losses
    for number, (run, (colour, line, marker)) in enumerate(zip(runs, LINE_STYLES, strict=False)):
        steps = range(1, len(run.losses) + 1)
        # From the widest line to the narrowest, so that lines on one another are all seen.
        width = 7.5 - 1.5 * number
        loss_axes.plot(steps, run.losses, color=colour, linestyle="-", linewidth=width, label=title_of(run))
        if run is not runs[-1]:
            # The logarithmic axis has no zero: equal losses are drawn at its foot.
            gaps = [
                max(abs(loss - reference_loss), 1e-9)
                for loss, reference_loss in zip(run.losses, reference, strict=True)
            ]
            gap_axes.plot(steps, gaps, color=colour, linestyle=line, marker=marker, markersize=5, label=title_of(run))
    for axes in (loss_axes, gap_axes):
        axes.set_xlabel(say(en="step", fr="pas"))
        axes.set_xticks(range(1, len(reference) + 1))
    loss_axes.set_ylabel(say(en="loss (nats)", fr="perte (nats)"))
    loss_axes.legend(frameon=False, fontsize=NORMAL)
    gap_axes.set_yscale("log")
    gap_axes.set_ylim(1e-9, 1e-3)
    gap_axes.axhline(1e-5, color=BLACK, linewidth=0.8)
    gap_axes.set_ylabel(
        say(en="distance to one process\n(none: at the foot)", fr="écart avec un processus\n(nul : tout en bas)")
    )
    gap_axes.yaxis.set_major_formatter(lambda value, position: gap_text(value))
    for axes in (loss_axes, gap_axes):
        plain(axes)
    return finish(figure)


def furthest(runs: Sequence[Run]) -> float:
    """Return the largest difference of a loss from that of the last run, one process."""
    reference = runs[-1].losses
    return max(
        abs(loss - reference_loss) for run in runs for loss, reference_loss in zip(run.losses, reference, strict=True)
    )


def volumes(runs: Sequence[Run]) -> Table:
    """Tabulate rank 0's bytes per step by axis and collective, predicted and counted, and whether all ranks agree."""
    rows = []
    for run in runs:
        predicted = [_bytes(_of_rank(run.config, rank)) for rank in range(run.config.layout.world_size)]
        counted = [_bytes(measured_footprint(run, rank).communication) for rank in range(run.config.layout.world_size)]
        for key in sorted(predicted[0] | counted[0], key=lambda key: (AXES.index(key[0]), key[1])):
            ours, theirs = predicted[0].get(key, (0, 0)), counted[0].get(key, (0, 0))
            equal = all(
                prediction.get(key) == measurement.get(key)
                for prediction, measurement in zip(predicted, counted, strict=True)
            )
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
    head = titles(*TEXTS.sentence("volumes", "heads"))
    return Table(head, tuple(rows))


def _bytes(traffic: Iterable[Traffic]) -> dict[tuple[str, str], tuple[int, int]]:
    """Calls and bytes by axis and collective; without the lab's own bookkeeping."""
    return {
        (record.group, record.collective): (record.count or 0, record.message_bytes)
        for record in traffic
        if record.group in AXES
    }


@lru_cache(maxsize=64)
def _of_rank(config: RunConfig, rank: int) -> tuple[Traffic, ...]:
    return tuple(predict_communication(RankPart(config, rank)))


def dp_bytes(run: Run) -> int:
    """Sum the bytes that rank 0 of a run handed to the collectives of dp in one step."""
    return sum(record.message_bytes for record in measured_footprint(run).communication if record.group == "dp")


def weights_ratio(run: Run, single: Run) -> float:
    """Divide one process's bytes of weights by those of the fullest rank of a run."""
    ranks = range(run.config.layout.world_size)
    return (measured_footprint(single).memory.weights_bytes or 0) / max(
        measured_footprint(run, r).memory.weights_bytes or 0 for r in ranks
    )


@pictured
def memory(run: Run, single: Run) -> LabFigure:
    """Draw each rank's memory at its peak by category, beside one process; a diamond is the predicted peak."""
    from dlojz.prediction import predict

    layout = run.config.layout
    ranks = range(layout.world_size)
    bars = [measured_footprint(single), *(measured_footprint(run, rank) for rank in ranks)]
    # Replicas hold the same: one of them is predicted.
    grid = RankGrid(dp=layout.dp, pp=layout.pp, tp=layout.tp)
    firsts = {(grid.coordinates(rank).pp, grid.coordinates(rank).tp): rank for rank in reversed(ranks)}
    peaks = {coordinates: predict(run.config, rank).memory.peak_bytes for coordinates, rank in firsts.items()}
    expected = [predict(single.config).memory.peak_bytes]
    expected += [peaks[grid.coordinates(rank).pp, grid.coordinates(rank).tp] for rank in ranks]
    names = [say(en="one\nprocess", fr="un\nprocessus")]
    names += [f"{rank}\n({','.join(map(str, grid.coordinates(rank)))})" for rank in ranks]
    unit, scale = byte_units()[2], 1024**2
    texts = format_bytes(bars[0].memory.peak_bytes), format_bytes(max(bar.memory.peak_bytes or 0 for bar in bars[1:]))
    axes = panel(
        9.5,
        3.6,
        f"Memory of each rank at its peak by category: one process {texts[0]}, no rank of {title_of(run)} above "
        f"{texts[1]}.",
        f"Mémoire de chaque rang à son pic, par catégorie : un processus {texts[0]}, aucun rang de {title_of(run)} "
        f"au-delà de {texts[1]}.",
    )
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
            edgecolor=EDGE,
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
    return labelled(axes, say(en="rank (pp,dp,tp)", fr="rang (pp,dp,tp)"), unit, fontsize=NORMAL)
