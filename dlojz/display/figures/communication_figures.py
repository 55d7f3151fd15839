"""Figures of collectives: their steps, bytes sent against loss, α and β of a machine; and the stepper.

Every number of a step comes from the simulation; that a chunk is partial or final is said by colour, hatch and the
count of contributions in it. Whatever a picture shows is also there as text.
"""

import math
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from dlojz.base.language import format_bytes, localized, percent, refusal, say, significant
from dlojz.base.table import Table, safe, tables_html, visible
from dlojz.by_hand.collectives.algorithm_catalogue import ADDING, ALGORITHMS, algorithm, check_size
from dlojz.by_hand.collectives.cost import AlphaBetaFit, crossover_bytes, terms
from dlojz.by_hand.collectives.simulation import Held, Simulation, Transfer, simulate
from dlojz.display.canvas import LabFigure, below, caption, finish, key, logarithmic, new_figure, phrase, plain
from dlojz.display.collective_text import format_bandwidth, format_latency, held_words, number_words, step_words
from dlojz.display.style import (
    BLACK,
    BLUE,
    FAINT_HATCH,
    GREEN,
    GREEN_TINT,
    GREY,
    HEADING,
    NEUTRAL,
    NORMAL,
    ORANGE,
    PURPLE,
    SKY,
    SKY_TINT,
    SMALL,
    TITLE,
    VERMILION,
    WHITE,
    YELLOW_TINT,
    Style,
    label,
    legible,
)
from dlojz.display.widgets.panel import import_widgets
from dlojz.prediction.link_traffic import Reduction, gaps_percent

MAX_RANKS = 16
WIDTH_IN = 12.0
CELL_WIDTH, CELL_HEIGHT = 0.62, 0.8
LETTER_EM = 0.72
"""Width of a bold figure, with the margins of its cell, in parts of its height."""
MAX_ALT_SENTENCES = 60

EMPTY, OWN, PARTIAL, FINAL = "empty", "own", "partial", "final"
STYLES = {  # light tints of the palette's colours, so that black figures stand out on them
    EMPTY: Style(WHITE, ""),
    OWN: Style(SKY_TINT, ""),
    PARTIAL: Style(YELLOW_TINT, "//"),
    FINAL: Style(GREEN_TINT, ".."),
}


def kind_of(simulation: Simulation, step: int, rank: int, chunk: int) -> str:
    """Tell whether a chunk is empty, the rank's own, a partial sum, or final."""
    contents = simulation.states[step][rank][chunk]
    if contents.value is None:
        return EMPTY
    if simulation.done(step, rank, chunk):
        return FINAL
    return PARTIAL if len(contents.ranks) > 1 else OWN


def heading(simulation: Simulation) -> str:
    """Say the algorithm, the ranks, the steps and what the busiest rank moves."""
    title, size = algorithm(simulation.name).title(), simulation.size
    title = title[0].upper() + title[1:]
    steps, ratio = len(simulation.transfers), significant(float(terms(simulation.name, size).moved))
    return say(
        en=f"{title}, {size} ranks: {steps} step{'' if steps == 1 else 's'}, {ratio} × the message moved by the "
        "busiest rank",
        fr=f"{title}, {size} rangs : {steps} étape{'s' if steps > 1 else ''}, {ratio} × le message déplacé par le rang "
        "le plus chargé",
    )


def collective_figure(
    name: str,
    size: int = 4,
    values: Sequence[Sequence[float | None]] | None = None,
    path: str | Path | None = None,
    *,
    per_node: int | None = None,
) -> LabFigure:
    """Draw an algorithm: one panel for the start and one per step, ranks as rows, chunks as columns.

    Args:
        name: an algorithm (`collectives.names()`).
        size: number of ranks, 1 to 16; without `values`.
        values: by rank, one number per chunk; by default numbers that tell their origin (23: rank 2's chunk 3).
        per_node: ranks of one node, for `hierarchical_all_reduce`.

    Raises:
        LabError: if the name or a number is not legal, or there are too many ranks.
    """
    check_drawable(size if values is None else len(values))
    simulation = simulate(name, size if values is None else values, per_node=per_node)
    panels = len(simulation.states)
    wide, high = panel_inches(simulation)
    # As many panels in a row as the page is wide.
    across = min(panels, max(1, int(WIDTH_IN / wide)))
    down = -(-panels // across)
    figure = new_figure(max(across * wide, 4.5), down * high + 1.1, alt=collective_description(simulation))
    grid = figure.subplots(down, across, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number < panels:
            draw_panel(axes, simulation, number, label_ranks=number % across == 0)
        else:
            axes.set_axis_off()
    width = max(30, int(figure.get_figwidth() * 10))
    figure.suptitle(textwrap.fill(heading(simulation), width), x=0.01, ha="left", fontsize=TITLE)
    below(figure, legend_handles(simulation), max(1, int(figure.get_figwidth() / 2.4)), "left", 1.3)
    return finish(figure, path)


def check_drawable(size: int) -> None:
    """Refuse a figure that could not be read.

    Raises:
        LabError: if the number of ranks is none, or more than can be drawn legibly.
    """
    if check_size(size) > MAX_RANKS:
        raise phrase.refused("too many ranks to read", size=size, max_ranks=MAX_RANKS)


def panel_inches(simulation: Simulation) -> tuple[float, float]:
    """Compute width and height of one panel in inches."""
    letters = max(len(number_words(chunk.value)) for state in simulation.states for row in state for chunk in row)
    needed_in = letters * LETTER_EM * legible(SMALL, 72 * WIDTH_IN) / 72 / CELL_WIDTH
    pitch_in = max(0.64 if simulation.size <= 4 else 0.45, needed_in)
    columns = len(simulation.states[0][0])
    return max(1.3, columns * pitch_in + 0.35), simulation.size * (0.48 if simulation.size <= 4 else 0.38) + 0.6


def collective_description(simulation: Simulation) -> str:
    """Describe the whole figure in words."""
    lines = [heading(simulation) + "."]
    for step in range(1, len(simulation.states)):
        sentences = "; ".join(step_words(simulation, step))
        lines.append(say(en=f"Step {step}: {sentences}.", fr=f"Étape {step} : {sentences}."))
    return "\n".join(lines[: MAX_ALT_SENTENCES + 1])


def draw_panel(axes: Axes, simulation: Simulation, step: int, *, label_ranks: bool = True) -> None:
    """Draw what the ranks hold after a step, with what was sent in it; step 0 is the start."""
    chunks, size = len(simulation.states[0][0]), simulation.size
    adding = algorithm(simulation.name).collective in ADDING
    large = size <= 4
    # (message, its chunk at the sender, where the receiver puts it); step k shows transfers k − 1.
    chunk_moves = [
        (transfer, chunk, target_chunk)
        for transfer in (simulation.transfers[step - 1] if step else ())
        for chunk, target_chunk in zip(transfer.chunks, transfer.places, strict=True)
    ]
    text_properties: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
    if algorithm(simulation.name).collective == "all_to_all":  # whose arrows pass behind figures
        text_properties["path_effects"] = [withStroke(linewidth=2, foreground="white", alpha=0.7)]
    for rank, row in enumerate(simulation.states[step]):
        for chunk, contents in enumerate(row):
            _cell(axes, rank, chunk, kind_of(simulation, step, rank, chunk))
            # Above, the number that the chunk holds; below, whose contributions are in it.
            upper, lower = number_words(contents.value), _origin(contents, size, adding)
            fits = min(1.0, 4 / len(upper)) * (HEADING if large else SMALL)
            axes.text(chunk, rank - (0.13 if lower else 0), upper, fontsize=fits, fontweight="bold", **text_properties)
            axes.text(chunk, rank + 0.22, lower, fontsize=SMALL, **text_properties)
    for transfer, chunk, target_chunk in chunk_moves:
        _arrow(axes, transfer, chunk, target_chunk)
    for artist in (*axes.texts, *axes.patches):
        artist.set_in_layout(False)  # all lie within the axes: asking each for its size takes seconds
    # 0.2 more on the right: arrows pass through the gap there.
    axes.set_xlim(-0.5, chunks - 0.5 + 0.2)
    axes.set_ylim(size - 0.5, -0.5)
    axes.set_yticks(range(size), [say(en=f"rank {rank}", fr=f"rang {rank}") for rank in range(size)])
    columns = [say(en="all", fr="tout")] if chunks == 1 else [str(chunk) for chunk in range(chunks)]
    axes.set_xticks(range(chunks), columns)
    axes.tick_params(length=0, labelsize=SMALL, labelleft=label_ranks, labeltop=True, labelbottom=False, pad=1)
    axes.spines[:].set_visible(False)
    title = say(en=f"after step {step}", fr=f"après l’étape {step}") if step else say(en="start", fr="départ")
    axes.set_title(title, fontsize=NORMAL, loc="left", pad=4)


def _origin(contents: Held, size: int, adding: bool) -> str:
    """How many ranks' contributions a chunk holds, or whose it is where nothing is added."""
    if contents.value is None:
        return ""
    return f"{len(contents.ranks)}/{size}" if adding else "r" + "".join(map(str, contents.ranks))


def _cell(axes: Axes, rank: int, chunk: int, kind: str) -> None:
    corner = (chunk - CELL_WIDTH / 2, rank - CELL_HEIGHT / 2)
    line: dict[str, Any] = {"linewidth": 1.6 if kind == FINAL else 0.8, "linestyle": ":" if kind == EMPTY else "-"}
    axes.add_artist(_shaded(Rectangle(corner, CELL_WIDTH, CELL_HEIGHT, **line), kind))


def _shaded(patch: Patch, kind: str) -> Patch:
    style = STYLES[kind]
    patch.set(facecolor=style.color, edgecolor=NEUTRAL, hatch=style.hatch, hatchcolor=FAINT_HATCH)
    return patch


def _arrow(axes: Axes, transfer: Transfer, chunk: int, target_chunk: int) -> None:
    """From the sender's cell to the receiver's, through the gap on the right of the column."""
    edge, straight = CELL_WIDTH / 2, chunk == target_chunk
    start, end, rad = (float(chunk), transfer.source), (float(target_chunk), transfer.to), 0.25
    if straight:
        start, end = (chunk + edge, transfer.source), (target_chunk + edge, transfer.to)
        # An arc bulges by rad · length / 2: as much for a long one as for a short one, so that it stays in its gap.
        rad = -0.44 / abs(transfer.to - transfer.source) * (1 if transfer.to > transfer.source else -1)
    arrow = FancyArrowPatch(
        start,
        end,
        connectionstyle=f"arc3,rad={rad}",
        arrowstyle="-|>",
        mutation_scale=9,
        color=VERMILION if transfer.add else BLUE,
        linestyle="-" if transfer.add else "--",
        linewidth=1.3,
        shrinkA=0 if straight else 9,
        shrinkB=0 if straight else 9,
        zorder=3,
    )
    axes.add_artist(arrow)


def legend_handles(simulation: Simulation) -> list[Artist]:
    """Explain the colours and arrows of this algorithm."""
    kinds = {
        kind_of(simulation, step, rank, chunk)
        for step, state in enumerate(simulation.states)
        for rank, row in enumerate(state)
        for chunk in range(len(row))
    }
    ordered_kinds = [kind for kind in (EMPTY, OWN, PARTIAL, FINAL) if kind in kinds]
    handles: list[Artist] = [_shaded(Patch(label=" " + label("chunk", kind)), kind) for kind in ordered_kinds]
    # Both kinds of messages may occur: added to what the rank holds, or kept in its place.
    acts = {transfer.add for step in simulation.transfers for transfer in step}
    if True in acts:
        handles.append(key(say(en="sent, then added", fr="envoyé, puis ajouté"), color=VERMILION))
    if False in acts:
        handles.append(key(say(en="sent, then kept", fr="envoyé, puis gardé"), color=BLUE, linestyle="--"))
    meanings = [say(en="r2: comes from rank 2", fr="r2 : vient du rang 2")]
    if algorithm(simulation.name).collective in ADDING:
        meanings = [say(en="k/p: parts of k of p ranks", fr="k/p : parts de k rangs sur p")]
    if len(simulation.states[0][0]) > 1:
        meanings.append(say(en="columns: chunks", fr="colonnes : morceaux"))
    return [*handles, *(key(words, linestyle="") for words in meanings)]


def stepper(name: str = "ring_all_reduce", size: int = 4) -> Any:
    """Show a widget: choose an algorithm and a number of ranks, then go through the steps.

    Args:
        size: the number of ranks shown first, 1 to 16.

    Returns:
        An ipywidgets box; its controls are the algorithm, the ranks, the step, back and forth.

    Raises:
        LabError: if the name or the number is not legal, or ipywidgets is not installed.
    """
    algorithm(name)
    check_drawable(check_size(size))
    return Stepper(name, size).box


class Stepper:
    """Controls of the stepper, and what each change does; `name` and `size` are shown first."""

    def __init__(self, name: str, size: int) -> None:
        widgets = import_widgets(en="the stepper", fr="le pas à pas", instead="collective_figure")
        algorithm_options = [(entry.title(), key) for key, entry in ALGORITHMS.items()]
        self.choice = widgets.Dropdown(
            options=algorithm_options, value=name, description=say(en="algorithm", fr="algorithme")
        )
        self.ranks = widgets.BoundedIntText(value=size, min=1, max=MAX_RANKS, description=say(en="ranks", fr="rangs"))
        self.step = widgets.IntSlider(value=0, min=0, max=1, description=say(en="step", fr="étape"))
        self.back = widgets.Button(description=say(en="◀ previous", fr="◀ précédente"))
        self.forth = widgets.Button(description=say(en="next ▶", fr="suivante ▶"))
        self.picture, self.sentences = widgets.HTML(), widgets.HTML()
        self.simulation: Simulation = simulate(name, size)
        self.choice.observe(self._restart, names="value")
        self.ranks.observe(self._restart, names="value")
        self.step.observe(self._show, names="value")
        self.back.on_click(lambda _: self._move(-1))
        self.forth.on_click(lambda _: self._move(+1))
        controls = [widgets.HBox([self.choice, self.ranks]), widgets.HBox([self.back, self.step, self.forth])]
        self.box = widgets.VBox([*controls, self.sentences, self.picture])
        self._restart()

    def _restart(self, change: Any = None) -> None:
        self.simulation = simulate(self.choice.value, self.ranks.value)
        num_steps = len(self.simulation.transfers)
        # Held back until both are set: `_show` never sees a value beyond the new end.
        with self.step.hold_trait_notifications():
            self.step.value = 0
            self.step.max = max(num_steps, 1)
        self.step.disabled = num_steps == 0
        self._show()

    def _move(self, step_change: int) -> None:
        self.step.value = min(max(self.step.value + step_change, 0), len(self.simulation.transfers))

    def _show(self, change: Any = None) -> None:
        step = min(self.step.value, len(self.simulation.transfers))
        self.back.disabled, self.forth.disabled = step == 0, step == len(self.simulation.transfers)
        self.sentences.value = sentences_html(self.simulation, step)
        self.picture.value = step_figure(self.simulation, step).html()


def sentences_html(simulation: Simulation, step: int) -> str:
    """Write one sentence per message, marked as a status for screen readers, and what is held, as a table."""
    list_items = "".join(f"<li>{safe(sentence)}</li>" for sentence in step_words(simulation, step))
    total = len(simulation.transfers)
    step_label = say(en=f"Step {step} of {total}", fr=f"Étape {step} sur {total}")
    state = simulation.states[step]
    chunks = [say(en=f"chunk {chunk}", fr=f"morceau {chunk}") for chunk in range(len(state[0]))]
    rows = tuple(
        (
            say(en=f"rank {rank}", fr=f"rang {rank}"),
            *(held_words(contents, simulation.done(step, rank, chunk)) for chunk, contents in enumerate(row)),
        )
        for rank, row in enumerate(state)
    )
    summary = say(en="what each rank holds, as text", fr="ce que chaque rang détient, en texte")
    return (
        f'<div role="status" aria-live="polite"><b>{safe(step_label)}</b><ul>{list_items}</ul></div>'
        f"<details><summary>{safe(summary)}</summary>{tables_html([Table(('', *chunks), rows)])}</details>"
    )


def step_figure(simulation: Simulation, step: int) -> LabFigure:
    """Draw one step alone."""
    wide, high = panel_inches(simulation)
    alt = heading(simulation) + ". " + "; ".join(step_words(simulation, step)) + "."
    figure = new_figure(max(wide + 3.6, 6.0), high + 0.4, alt=alt)
    draw_panel(figure.subplots(), simulation, step)
    figure.legend(handles=legend_handles(simulation), loc="outside right upper", frameon=False, fontsize=NORMAL)
    return finish(figure)


LATENCY_S = 30e-6
"""α of the links drawn: that of Ethernet through the kernel, tens of microseconds."""
LINKS_GBIT = (0.1, 100.0)
"""Bandwidths drawn, from and to, in Gbit/s per direction."""
_LINEAR_PERCENT = 5.0
"""Gaps beyond this are drawn on a logarithmic scale."""
_COLORS = (BLACK, ORANGE, SKY, GREEN, VERMILION, BLUE, PURPLE, GREY)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p", "h")
_DASHES = ("-", "--", "-.", ":")


def communication_figure(reductions: Sequence[Reduction], path: str | Path | None = None) -> LabFigure:
    """Draw the bytes that a rank sends per step against the final loss, and the step's time over slow and fast links.

    Left: a point per way, on a logarithmic axis of bytes: how far its loss is above that of `Way.against`, seed by seed
    (median, a bar from the best to the worst); a dotted line goes to what is sent after a first stage in full. Right,
    where steps were measured: the step as it was measured here plus `Way.link_s`, an upper bound, as nothing is
    computed meanwhile.

    Args:
        reductions: see `dlojz.prediction.link_traffic`; those without losses are not drawn on the left.

    Raises:
        LabError: without a way that has losses, or without what it is held against.
    """
    judged = {
        reduction.name: reduction
        for reduction in reductions
        if reduction.losses and all(map(math.isfinite, reduction.losses))
    }
    lonely = [
        reduction
        for reduction in judged.values()
        if len(reduction.losses) != len(getattr(judged.get(reduction.against), "losses", ()))
    ]
    if lonely:
        raise refusal(
            en=f"{lonely[0].name} is held against {lonely[0].against}, seed by seed, but that has no losses of the "
            "same seeds: train it beside.",
            fr=f"{lonely[0].name} se compare à {lonely[0].against}, graine par graine, mais celui-ci n’a pas de "
            "pertes pour les mêmes graines : entraînez-le à côté.",
        )
    if not judged:
        raise phrase.refused("board without losses")
    timed = [reduction for reduction in reductions if reduction.step_s is not None]
    names = ", ".join(visible(reduction.name) for reduction in reductions)
    alt = phrase("alt of the board", names=names)
    figure = new_figure(12.5 if timed else 8.0, 6.4, alt)
    columns = figure.subplots(1, 2) if timed else [figure.subplots()]
    _pareto(columns[0], reductions, judged)
    if timed:
        _links(columns[1], reductions, timed)
    handles, labels = columns[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=6 if timed else 4, frameon=False, fontsize=NORMAL)
    return finish(figure, path)


def _look(reductions: Sequence[Reduction], reduction: Reduction) -> tuple[str, str, str]:
    """Colour, marker and dashes of a way; colours recur with other dashes."""
    number = list(reductions).index(reduction)
    dashes = _DASHES[(number + number // len(_COLORS)) % len(_DASHES)]
    return _COLORS[number % len(_COLORS)], _MARKERS[number % len(_MARKERS)], dashes


def _pareto(axes: Axes, reductions: Sequence[Reduction], judged: Mapping[str, Reduction]) -> None:
    """The left panel."""
    points = {name: gaps_percent(reduction, judged[reduction.against]) for name, reduction in judged.items()}
    for name, reduction in judged.items():
        color, marker, _ = _look(reductions, reduction)
        # Bytes as counted where steps were run, else as predicted; the median over the seeds.
        x, y = reduction.counted_bytes or reduction.sent_bytes, statistics.median(points[name])
        # From the best to the worst seed.
        axes.plot([x, x], [min(points[name]), max(points[name])], color=color, linewidth=1.2)
        if reduction.steady_bytes < 0.99 * x:  # where a long run would lie
            axes.plot([reduction.steady_bytes, x], [y, y], color=color, linestyle=":", linewidth=1.2)
            axes.plot(reduction.steady_bytes, y, marker="|", color=color, markersize=9)
        face = "white" if reduction.plain else color
        axes.plot(x, y, marker=marker, color=color, markerfacecolor=face, markersize=9, linestyle="none", label=name)
    if (
        max(abs(gap) for seed_gaps in points.values() for gap in seed_gaps) > _LINEAR_PERCENT
    ):  # one far away would hide the others
        axes.set_yscale("symlog", linthresh=_LINEAR_PERCENT)
        axes.set_yticks((-20, -10, -5, -2, 0, 2, 5, 10, 20, 50, 100))
        low, high = (bound(gap for seed_gaps in points.values() for gap in seed_gaps) for bound in (min, max))
        axes.set_ylim(min(low * 1.2, -1), high * 1.2)
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: format_bytes(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    caption(
        axes,
        x=say(en="sent by each rank per step, mean of the run", fr="envoyé par rang et par pas, en moyenne"),
        y=say(en="final loss: gap to sending everything (%)", fr="perte finale : écart à l’envoi complet (%)"),
    )
    title = phrase("title of bytes and loss")
    axes.set_title(title, fontsize=TITLE)
    plain(axes)


def _links(axes: Axes, reductions: Sequence[Reduction], timed: Sequence[Reduction]) -> None:
    """The right panel."""
    gbits = _spread(*LINKS_GBIT)
    for index, reduction in enumerate(timed):
        color, marker, dashes = _look(reductions, reduction)
        # ms: the step as measured here, plus α · rounds + β · bytes of this link; 1 Gbit/s is 1e9 / 8 B/s.
        step_ms = [1e3 * ((reduction.step_s or 0) + reduction.link_s(LATENCY_S, gbit * 1e9 / 8)) for gbit in gbits]
        face = "white" if reduction.plain else color
        line_properties: dict[str, Any] = {"color": color, "marker": marker, "markersize": 5, "markerfacecolor": face}
        axes.plot(
            gbits, step_ms, dashes, markevery=(3 * index % 10, 10), **line_properties
        )  # no marker lies on another
    logarithmic(axes, "x", marks=(1.0,))
    logarithmic(axes, "y", marks=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0))
    axes.yaxis.set_minor_locator(NullLocator())
    bandwidth = say(en="bandwidth of the link (Gbit/s)", fr="débit du lien (Gbit/s)")
    caption(axes, x=bandwidth, y=say(en="step (ms)", fr="pas (ms)"))
    microseconds = f"{1e6 * LATENCY_S:g}"
    title = phrase("title of links", microseconds=microseconds)
    axes.set_title(title, fontsize=TITLE)
    plain(axes)


PREDICTED_SIZES = (2, 8, 512)
RING, TREE = "ring_all_reduce", "tree_all_reduce"
PREDICTED_FROM_BYTES, PREDICTED_TO_BYTES = 2**10, 2**30
_CALIBRATION_DASHES = ("-", "--", ":")


def calibration_figure(calibration: AlphaBetaFit, path: str | Path | None = None) -> LabFigure:
    """Draw a calibration: on the left what was measured and fitted, on the right ring and tree on 2, 8 and 512 ranks.

    Args:
        calibration: of `collectives.fit`.
    """
    figure = new_figure(12.0, 4.6, alt=calibration_description(calibration))
    left, right = figure.subplots(1, 2)
    _measured(left, calibration)
    _predicted(right, calibration)
    return finish(figure, path)


def summary(calibration: AlphaBetaFit) -> str:
    """Say α, the bandwidth and the residual in one line."""
    alpha, bandwidth = format_latency(calibration.alpha_s), format_bandwidth(calibration.bandwidth_bytes_per_s)
    residual = percent(calibration.residual, 0)
    return phrase("summary", alpha=alpha, bandwidth=bandwidth, residual=residual)


def dominance(calibration: AlphaBetaFit) -> str:
    """Say up to which size of message latency takes the larger part; empty where the fit has no bandwidth."""
    if calibration.half_bytes is None:
        return ""
    size = format_bytes(calibration.half_bytes)
    return phrase("latency dominates", size=size)


def crossing(calibration: AlphaBetaFit, size: int) -> str:
    """Say where ring and tree take as long on so many ranks; empty where one is never slower."""
    beta = calibration.beta_s_per_byte or 0.0
    threshold_bytes = crossover_bytes(RING, TREE, size, alpha_s=calibration.alpha_s, beta_s_per_byte=beta)
    if threshold_bytes is None:
        return ""
    return phrase("tree is faster", size=size, threshold_bytes=threshold_bytes)


def calibration_description(calibration: AlphaBetaFit) -> str:
    """Describe the figure in words."""
    points = ", ".join(
        f"{format_bytes(point.message_bytes)} {format_latency(point.time_s)}" for point in calibration.points
    )
    name = visible(calibration.collective)
    crossings = "; ".join(filter(None, (crossing(calibration, size) for size in PREDICTED_SIZES)))
    return phrase(
        "alt of a calibration",
        name=name,
        calibration=calibration,
        points=points,
        summary=summary(calibration),
        crossings=crossings,
    )


def _measured(axes: Axes, calibration: AlphaBetaFit) -> None:
    sizes = [point.message_bytes for point in calibration.points]
    ends = _spread(min(sizes), max(sizes))
    fitted = [calibration.fitted_s(size) for size in ends]
    axes.loglog(ends, fitted, color=BLUE, label=say(en="fitted: α and β", fr="ajusté : α et β"))
    times_s = [point.time_s for point in calibration.points]
    axes.loglog(sizes, times_s, "o", color=BLACK, label=say(en="measured", fr="mesuré"))
    _label(axes)
    name, ranks = visible(calibration.collective), calibration.size
    title = say(en=f"{name} on {ranks} ranks, here", fr=f"{name} sur {ranks} rangs, ici")
    caption(axes, title="\n".join(filter(None, (title, summary(calibration), dominance(calibration)))), size=NORMAL)
    axes.legend(frameon=False, loc="upper left")


def _predicted(axes: Axes, calibration: AlphaBetaFit) -> None:
    sizes = _spread(PREDICTED_FROM_BYTES, PREDICTED_TO_BYTES)
    for name, title, line_properties in (
        (RING, say(en="ring", fr="anneau"), {"color": VERMILION, "linewidth": 1.4}),
        (TREE, say(en="tree", fr="arbre"), {"color": BLUE, "linewidth": 2.4, "alpha": 0.75}),
    ):
        for ranks, dashes in zip(PREDICTED_SIZES, _CALIBRATION_DASHES, strict=True):
            times_s = [calibration.predict_s(size, ranks, name) for size in sizes]
            label = say(en=f"{title}, {ranks} ranks", fr=f"{title}, {ranks} rangs")
            if min(times_s) > 0:  # α = β = 0 has no place on a logarithmic axis
                axes.loglog(sizes, times_s, linestyle=dashes, label=label, **line_properties)
    _label(axes)
    title = phrase("title of the prediction")
    crossings = (crossing(calibration, size) for size in PREDICTED_SIZES)
    caption(axes, title="\n".join([title, *filter(None, crossings)]), size=NORMAL)
    axes.legend(frameon=False, fontsize=SMALL, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _spread(low: float, high: float, number: int = 60) -> list[float]:
    """Sizes evenly spaced on a logarithmic axis."""
    return [low * (high / low) ** (index / (number - 1)) for index in range(number)]


def _label(axes: Axes) -> None:
    """Powers in the units people use, instead of 10ⁿ."""
    plain(axes)
    low, high = axes.get_xlim()
    # Powers of 4 in bytes, thinned out to 8 at most.
    ticks = [4**power for power in range(1, 17) if low <= 4**power <= high]
    ticks = ticks[:: -(-len(ticks) // 8)] if ticks else ticks
    axes.set_xticks(ticks, [_short(format_bytes(tick)) for tick in ticks])
    low, high = axes.get_ylim()
    if high < 20 * low:  # few round numbers lie in between: without them the axis would look linear
        low /= 2
        axes.set_ylim(bottom=low)
    digits = (1, 2, 3, 5, 7) if high < 40 * low else (1, 2, 5) if high < 500 * low else (1,)
    ticks_s = [
        # In seconds; rounded, since 3 · 10⁻⁵ is not exact in binary.
        tick
        for power in range(-9, 6)
        for digit in digits
        if low <= (tick := round(digit * 10.0**power, 9)) <= high
    ]
    axes.set_yticks(ticks_s, [_short(format_latency(tick)) for tick in ticks_s])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    caption(axes, x=say(en="size of the message", fr="taille du message"), y=say(en="time", fr="durée"))


def _short(quantity: str) -> str:
    """A round quantity without its zeros: 4.00 KiB is 4 KiB."""
    number, _, unit = quantity.partition(" ")
    mark = localized(".")
    return f"{number.rstrip('0').rstrip(mark) if mark in number else number} {unit}"
