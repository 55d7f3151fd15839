"""A collective, step by step: what every rank holds in every chunk, and what is sent.

Layer 4. Invariant: every number drawn comes from the simulation; that a chunk is partial or final is said by its
colour, by its hatch, and by the count of contributions written in it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import FancyArrowPatch, Patch, Rectangle
from matplotlib.patheffects import withStroke

from dlojz.collectives.catalogue import ADDING, algorithm, check_size
from dlojz.collectives.cost import terms
from dlojz.collectives.simulation import Held, Simulation, Transfer, simulate
from dlojz.collectives.words import number_words, step_words
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure
from dlojz.viz.palette import BLACK, BLUE, VERMILION, Style

MAX_RANKS = 16
WIDTH_IN = 12.0
CELL_WIDTH, CELL_HEIGHT = 0.62, 0.8
MAX_ALT_SENTENCES = 60

EMPTY, OWN, PARTIAL, FINAL = "empty", "own", "partial", "final"
STYLES = {  # light tints of the palette's colours, so that black figures stand out on them
    EMPTY: Style("#FFFFFF", ""),
    OWN: Style("#CFE6F5", ""),
    PARTIAL: Style("#FBF3B5", "//"),
    FINAL: Style("#B5E3D3", ".."),
}
HATCH_COLOR = "#C4B98A"


def kind_of(simulation: Simulation, step: int, rank: int, chunk: int) -> str:
    """Whether a chunk is empty, the rank's own, a partial sum, or final."""
    held = simulation.states[step][rank][chunk]
    if held.value is None:
        return EMPTY
    if simulation.done(step, rank, chunk):
        return FINAL
    return PARTIAL if len(held.ranks) > 1 else OWN


def kind_label(kind: str) -> str:
    """A kind of chunk in the reader's language."""
    return {
        EMPTY: say(en="nothing yet", fr="encore rien"),
        OWN: say(en="one rank’s part", fr="la part d’un rang"),
        PARTIAL: say(en="partial sum", fr="somme partielle"),
        FINAL: say(en="final", fr="définitif"),
    }[kind]


def heading(simulation: Simulation) -> str:
    """What is shown: the algorithm, the ranks, the steps and what the busiest rank moves."""
    title = algorithm(simulation.name).title()
    steps, moved = len(simulation.transfers), float(terms(simulation.name, simulation.size).moved)
    written = f"{moved:.3g}"
    return say(
        en=f"{title[0].upper()}{title[1:]}, {simulation.size} ranks: {steps} step{'' if steps == 1 else 's'}, "
        f"{written} × the message moved by the busiest rank",
        fr=f"{title[0].upper()}{title[1:]}, {simulation.size} rangs : {steps} étape{'s' if steps > 1 else ''}, "
        f"{written.replace('.', ',')} × le message déplacé par le rang le plus chargé",
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
        path: picture to write, if any.
        per_node: ranks of one node, for `hierarchical_all_reduce`.

    Raises:
        LabError: if the name or a number is not legal, there are too many ranks, or the picture cannot be written.
    """
    check_drawable(size if values is None else len(values))
    simulation = simulate(name, size if values is None else values, per_node=per_node)
    panels = len(simulation.states)
    wide, high = panel_inches(simulation)
    across = min(panels, max(1, int(WIDTH_IN / wide)))
    down = -(-panels // across)
    figure = new_figure(max(across * wide, 4.5), down * high + 1.1, alt=description(simulation))
    grid = figure.subplots(down, across, squeeze=False)
    for number, axes in enumerate(grid.flat):
        if number < panels:
            draw_panel(axes, simulation, number, label_ranks=number % across == 0)
        else:
            axes.set_axis_off()
    width = max(30, int(figure.get_figwidth() * 10))
    figure.suptitle(textwrap.fill(heading(simulation), width), x=0.01, ha="left", fontsize=11)
    figure.legend(
        handles=legend_handles(simulation),
        loc="outside lower left",
        ncols=max(1, int(figure.get_figwidth() / 2.4)),
        frameon=False,
        fontsize=9,
        handleheight=1.3,
    )
    return finish(figure, path)


def check_drawable(size: int) -> None:
    """Refuse what could not be read.

    Raises:
        LabError: if the number of ranks is none, or more than can be drawn legibly.
    """
    if check_size(size) > MAX_RANKS:
        raise LabError(
            say(
                en=f"a figure of {size} ranks could not be read: draw at most {MAX_RANKS}.",
                fr=f"une figure de {size} rangs serait illisible : dessinez-en {MAX_RANKS} au plus.",
            )
        )


def panel_inches(simulation: Simulation) -> tuple[float, float]:
    """Width and height of one panel."""
    pitch_in = 0.64 if simulation.size <= 4 else 0.45
    columns = len(simulation.states[0][0])
    return max(1.3, columns * pitch_in + 0.35), simulation.size * (0.48 if simulation.size <= 4 else 0.38) + 0.6


def description(simulation: Simulation) -> str:
    """The whole figure in words."""
    lines = [heading(simulation) + "."]
    for step in range(1, len(simulation.states)):
        said = "; ".join(step_words(simulation, step))
        lines.append(say(en=f"Step {step}: {said}.", fr=f"Étape {step} : {said}."))
    return "\n".join(lines[: MAX_ALT_SENTENCES + 1])


def draw_panel(axes: Axes, simulation: Simulation, step: int, *, label_ranks: bool = True) -> None:
    """What the ranks hold after a step, with what was sent in it; step 0 is the start."""
    chunks, size = len(simulation.states[0][0]), simulation.size
    adding = algorithm(simulation.name).collective in ADDING
    large = size <= 4
    moved = [
        (transfer, chunk, place)
        for transfer in (simulation.transfers[step - 1] if step else ())
        for chunk, place in zip(transfer.chunks, transfer.places, strict=True)
    ]
    look: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 4}
    if algorithm(simulation.name).collective == "all_to_all":  # whose arrows pass behind figures
        look["path_effects"] = [withStroke(linewidth=2, foreground="white", alpha=0.7)]
    for rank, row in enumerate(simulation.states[step]):
        for chunk, held in enumerate(row):
            _cell(axes, rank, chunk, kind_of(simulation, step, rank, chunk))
            upper, lower = number_words(held.value), _origin(held, size, adding)
            fits = min(1.0, 4 / len(upper)) * (10 if large else 8)
            axes.text(chunk, rank - (0.13 if lower else 0), upper, fontsize=fits, fontweight="bold", **look)
            axes.text(chunk, rank + 0.22, lower, fontsize=7 if large else 6, **look)
    for transfer, chunk, place in moved:
        _arrow(axes, transfer, chunk, place)
    for artist in (*axes.texts, *axes.patches):
        artist.set_in_layout(False)  # all lie within the axes: asking each for its size takes seconds
    axes.set_xlim(-0.5, chunks - 0.5 + 0.2)
    axes.set_ylim(size - 0.5, -0.5)
    axes.set_yticks(range(size), [say(en=f"rank {rank}", fr=f"rang {rank}") for rank in range(size)])
    columns = [say(en="all", fr="tout")] if chunks == 1 else [str(chunk) for chunk in range(chunks)]
    axes.set_xticks(range(chunks), columns)
    axes.tick_params(length=0, labelsize=8, labelleft=label_ranks, labeltop=True, labelbottom=False, pad=1)
    axes.spines[:].set_visible(False)
    axes.set_title(
        say(en=f"after step {step}", fr=f"après l’étape {step}") if step else say(en="start", fr="départ"),
        fontsize=9,
        loc="left",
        pad=4,
    )


def _origin(held: Held, size: int, adding: bool) -> str:
    """How many ranks' contributions a chunk holds, or whose it is where nothing is added."""
    if held.value is None:
        return ""
    return f"{len(held.ranks)}/{size}" if adding else "r" + "".join(map(str, held.ranks))


def _cell(axes: Axes, rank: int, chunk: int, kind: str) -> None:
    corner = (chunk - CELL_WIDTH / 2, rank - CELL_HEIGHT / 2)
    style = STYLES[kind]
    box = Rectangle(
        corner,
        CELL_WIDTH,
        CELL_HEIGHT,
        facecolor=style.color,
        edgecolor="#888888",
        linewidth=1.6 if kind == FINAL else 0.8,
        linestyle=":" if kind == EMPTY else "-",
        hatch=style.hatch,
    )
    box.set_hatchcolor(HATCH_COLOR)
    axes.add_artist(box)


def _arrow(axes: Axes, transfer: Transfer, chunk: int, place: int) -> None:
    """From the sender's cell to the receiver's, through the gap on the right of the column."""
    edge = CELL_WIDTH / 2
    if chunk == place:
        start, end = (chunk + edge, transfer.source), (place + edge, transfer.to)
        # An arc bulges by rad · length / 2: as much for a long one as for a short one, so that it stays in its gap.
        rad = 0.44 / abs(transfer.to - transfer.source) * (1 if transfer.to > transfer.source else -1)
    else:
        start, end, rad = (chunk, transfer.source), (place, transfer.to), 0.25
    axes.add_artist(
        FancyArrowPatch(
            start,
            end,
            connectionstyle=f"arc3,rad={-rad if chunk == place else rad}",
            arrowstyle="-|>",
            mutation_scale=9,
            color=VERMILION if transfer.add else BLUE,
            linestyle="-" if transfer.add else "--",
            linewidth=1.3,
            shrinkA=0 if chunk == place else 9,
            shrinkB=0 if chunk == place else 9,
            zorder=3,
        )
    )


def legend_handles(simulation: Simulation) -> list[Patch | Line2D]:
    """What the colours and arrows of this algorithm mean."""
    kinds = {
        kind_of(simulation, step, rank, chunk)
        for step, state in enumerate(simulation.states)
        for rank, row in enumerate(state)
        for chunk in range(len(row))
    }
    handles: list[Patch | Line2D] = []
    for kind in (EMPTY, OWN, PARTIAL, FINAL):
        if kind in kinds:
            style = STYLES[kind]
            patch = Patch(facecolor=style.color, edgecolor="#888888", hatch=style.hatch, label=" " + kind_label(kind))
            patch.set_hatchcolor(HATCH_COLOR)
            handles.append(patch)
    acts = {transfer.add for step in simulation.transfers for transfer in step}
    if True in acts:
        handles.append(Line2D([], [], color=VERMILION, label=say(en="sent, then added", fr="envoyé, puis ajouté")))
    if False in acts:
        handles.append(
            Line2D([], [], color=BLUE, linestyle="--", label=say(en="sent, then kept", fr="envoyé, puis gardé"))
        )
    if algorithm(simulation.name).collective in ADDING:
        meaning = say(en="k/p: parts of k of p ranks", fr="k/p : parts de k rangs sur p")
    else:
        meaning = say(en="r2: comes from rank 2", fr="r2 : vient du rang 2")
    meanings = [meaning]
    if len(simulation.states[0][0]) > 1:
        meanings.append(say(en="columns: chunks", fr="colonnes : morceaux"))
    handles += [Line2D([], [], color=BLACK, linestyle="", label=words) for words in meanings]
    return handles
