"""Figures and tables of lab 06: a sharded layer, a block with its f and g, time over links, measured runs side by side.

A shard is drawn as `share_bounds` gives it, with one colour and one hatch for a rank in every figure; what was measured
stands beside what the package predicts.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from dlojz.base.language import format_bytes, integer, percent, say, significant
from dlojz.base.table import Table, titles
from dlojz.by_hand.tensor.axis import share_bounds
from dlojz.compare import compare
from dlojz.display.canvas import LabFigure, finish
from dlojz.display.style import BLACK, EDGE, GREY, HEADING, SHADE, SMALL, TITLE, Style
from dlojz.hardware.links import NETWORK, NVLINK
from dlojz.labs.kit.exercise import Said, Sentences, or_to_do
from dlojz.labs.kit.figures import (
    SHEET_RANKS,
    answered,
    figure_of,
    labelled,
    measured_footprint,
    memory_and_messages,
    open_figure,
    panel,
    pictured,
    plot_lines,
)
from dlojz.labs.lab06_tensor.exercises_plan import LayerBytes, compute_seconds, layer_seconds
from dlojz.prediction import predict
from dlojz.results.footprint import Category
from dlojz.running.run import Run

TEXTS = Sentences(Path(__file__).with_suffix(".md"))

WHOLE = Style(SHADE, "")


def _rank(number: int) -> str:
    return say(en=f"rank {number}", fr=f"rang {number}")


def _box(axes: Axes, corner: tuple[float, float], size: tuple[float, float], style: Style, text: str = "") -> None:
    axes.add_patch(Rectangle(corner, *size, facecolor=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.8))
    if text:
        axes.text(
            corner[0] + size[0] / 2, corner[1] + size[1] / 2, text, ha="center", va="center", fontsize=SMALL,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
        )  # fmt: skip


def _matrix(axes: Axes, x: float, shape: tuple[int, int], cut: str, ranks: int, name: str) -> float:
    """A matrix of rows × columns, in the colours of who holds what; the x where the next thing may stand."""
    rows, columns = shape
    bottom = -rows / 2
    if cut == "whole":
        _box(axes, (x, bottom), (columns, rows), WHOLE)
    for rank in range(ranks) if cut != "whole" else ():
        start, end = share_bounds(columns if cut == "columns" else rows, ranks, rank)
        if cut == "columns":
            _box(axes, (x + start, bottom), (end - start, rows), SHEET_RANKS[rank])
        else:
            _box(axes, (x, bottom + rows - end), (columns, end - start), SHEET_RANKS[rank])
    axes.text(x + columns / 2, bottom + rows + 0.4, name, ha="center", va="bottom", fontsize=HEADING)
    return x + columns + 1.6


def _sign(axes: Axes, x: float, sign: str) -> None:
    axes.text(x - 0.8, 0, sign, ha="center", va="center", fontsize=TITLE)


@pictured
def split_layer(ranks: int = 2) -> LabFigure:
    """Who holds what of Y = X W by columns and by rows, with what each rank computes.

    Args:
        ranks: 2 or 3.
    """
    samples, inputs, outputs = 3, 6, 8
    figure = open_figure(9.0, 4.6, *TEXTS.sentence("split layer", "alt"))
    upper, lower = figure.subplots(2, 1)
    after = _matrix(upper, 0, (samples, inputs), "whole", ranks, "X")
    _sign(upper, after, "×")
    after = _matrix(upper, after, (inputs, outputs), "columns", ranks, "W")
    _sign(upper, after, "=")
    _matrix(upper, after, (samples, outputs), "columns", ranks, "Y")
    after = _matrix(lower, 0, (samples, inputs), "columns", ranks, "X")
    _sign(lower, after, "×")
    after = _matrix(lower, after, (inputs, outputs), "rows", ranks, "W")
    for rank in range(ranks):
        _sign(lower, after, "+" if rank else "=")
        _box(lower, (after, -samples / 2), (outputs, samples), SHEET_RANKS[rank], _rank(rank))
        after += outputs + 1.6
    _sign(lower, after, "=")
    _matrix(lower, after, (samples, outputs), "whole", ranks, "Y")
    titles = (
        say(en="by columns: nothing to send in forward", fr="par colonne : rien à envoyer en passe avant"),
        TEXTS.say("split layer", "by rows"),
    )  # fmt: skip
    for axes, title in zip((upper, lower), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=HEADING)
        axes.set_xlim(-0.5, inputs + 1.6 + (outputs + 1.6) * (ranks + 2))
        axes.set_ylim(-inputs / 2 - 0.3, inputs / 2 + 1.6)
        axes.set_aspect("equal")
        axes.set_axis_off()
    handles = [Rectangle((0, 0), 1, 1, facecolor=WHOLE.color, edgecolor=EDGE)]
    handles += [Rectangle((0, 0), 1, 1, facecolor=style.color, hatch=style.hatch, edgecolor=EDGE)
                for style in SHEET_RANKS[:ranks]]  # fmt: skip
    names = [say(en="every rank", fr="chaque rang"), *(_rank(rank) for rank in range(ranks))]
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=ranks + 1)
    return finish(figure)


@pictured
def block_ends(sequence_parallel: bool = False, ranks: int = 2) -> LabFigure:
    """Half a transformer block with the two ends of its parallel region, and what each does in both directions."""
    region = say(en="in the region: heads, or hidden features", fr="dans la région : têtes, ou neurones cachés")
    axes = panel(9.0, 2.9, *TEXTS.sentence("block ends", "alt"))
    height = 2.0 / ranks
    outside = ((0.0, say(en="norm", fr="normalisation")), (10.4, say(en="dropout, + x", fr="dropout, + x")))
    for x, name in outside:
        if not sequence_parallel:
            _box(axes, (x, 0), (2.2, 2.0), WHOLE, name)
        for rank in range(ranks) if sequence_parallel else ():
            tokens = say(en=f"{name}\ntokens of rank {rank}", fr=f"{name}\ntokens du rang {rank}")
            _box(axes, (x, 2.0 - (rank + 1) * height), (2.2, height), SHEET_RANKS[rank], tokens)
    inside = (
        say(en="by columns", fr="par colonne"),
        say(en="attention\nor GELU", fr="attention\nou GELU"),
        say(en="by rows", fr="par ligne"),
    )
    for number, name in enumerate(inside):
        for rank in range(ranks):
            corner = (3.7 + 1.8 * number, 2.0 - (rank + 1) * height)
            _box(axes, corner, (1.6, height - 0.08), SHEET_RANKS[rank], f"{name}\n{_rank(rank)}")
    ends = (
        (2.95, "f" if not sequence_parallel else "g", *(("–", "all-reduce") if not sequence_parallel
                                                        else ("all-gather", "reduce-scatter"))),
        (9.65, "g" if not sequence_parallel else "g̅", *(("all-reduce", "–") if not sequence_parallel
                                                        else ("reduce-scatter", "all-gather"))),
    )  # fmt: skip
    for bar, name, forward, backward in ends:
        axes.plot([bar, bar], [-0.15, 2.15], color=BLACK, linewidth=3)
        axes.text(bar, 2.25, name, ha="center", va="bottom", fontsize=TITLE, style="italic")
        directions = say(en=f"forward: {forward}\nbackward: {backward}", fr=f"avant : {forward}\narrière : {backward}")
        axes.text(bar, -0.3, directions, ha="center", va="top", fontsize=SMALL)
    axes.text(6.3, 2.25, region, ha="center", va="bottom", fontsize=SMALL)
    axes.set_xlim(-0.1, 12.8)
    axes.set_ylim(-1.1, 2.8)
    axes.set_axis_off()
    return figure_of(axes)


@pictured
def over_links(layer_bytes: LayerBytes, *, tokens: int, width: int, flops_per_s: float) -> LabFigure:
    """Time of one layer's products and of what it sends over two links, by number of ranks, by the student's bytes."""
    sizes = (2, 4, 8, 16, 32)
    # One sample of 2-byte numbers: bytes and operations grow alike with the samples.
    sent_bytes = [layer_bytes(1, tokens, width, ranks, 2) for ranks in sizes]
    series_ms = {
        say(en="computation", fr="calcul"): [1e3 * compute_seconds(1, tokens, width, n, flops_per_s) for n in sizes],
        say(en="all-reduces, NVLink", fr="all-reduces, NVLink"): [
            1e3 * num_bytes / NVLINK.bytes_per_s for num_bytes in sent_bytes
        ],
        say(en="all-reduces, network", fr="all-reduces, réseau"): [
            1e3 * num_bytes / NETWORK.bytes_per_s for num_bytes in sent_bytes
        ],
    }
    figure = open_figure(7.0, 3.4, *TEXTS.sentence("over links", "alt"))
    axes = figure.subplots()
    plot_lines(axes, sizes, series_ms)
    axes.axvline(8.5, color=GREY, linestyle="--", linewidth=1)
    node_label = say(en="more than one node", fr="plus d’un nœud")
    axes.text(8.8, 0.03, node_label, va="bottom", fontsize=SMALL, transform=axes.get_xaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    return labelled(
        axes,
        say(en="tensor-parallel ranks", fr="rangs de Tensor Parallelism"),
        say(en="ms per layer", fr="ms par couche"),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        fontsize=SMALL,
    )


@or_to_do
def share_of_time(sent_bytes: LayerBytes, widths: Sequence[int], *, flops_per_s: float, **sizes: int) -> Table:
    """Share of a layer's time that its messages take over each link, by width.

    Args:
        sizes: the other arguments of `sent_bytes`.
    """
    rows = []
    for width in widths:
        computing = compute_seconds(sizes["samples"], sizes["tokens"], width, sizes["ranks"], flops_per_s)
        sending = [layer_seconds(width=width, **sizes, link=link, sent_bytes=sent_bytes) for link in (NVLINK, NETWORK)]
        rows.append((integer(width), *(percent(sending_s / (sending_s + computing), 0) for sending_s in sending)))
    head = titles(*TEXTS.sentence("share of time", "heads"))
    return Table(head, tuple(rows))


def sequence_seen(single: Run, two: Run, sequence: Run) -> Table:
    """Answer what tensor parallelism divides, without and with sequence parallelism."""

    def divided(run: Run, category: Category) -> str:
        single_bytes, shared = (
            measured_footprint(candidate).memory.category(category) or 0 for candidate in (single, run)
        )
        return f"÷ {significant(single_bytes / shared, 2)}"

    return answered(
        [
            (say(en="the bytes predicted are those counted", fr="les octets prédits sont ceux qui ont été comptés"),
             bool(compare([two, sequence]).exact)),
            (say(en="weights, from one rank to two", fr="poids, de un à deux rangs"), divided(two, "weights")),
            (say(en="activations, without sequence parallelism", fr="activations, sans Sequence Parallelism"),
             divided(two, "activations")),
            (say(en="activations, with sequence parallelism", fr="activations, avec Sequence Parallelism"),
             divided(sequence, "activations")),
            (str(_SAME_LOSSES), _same_losses(single, sequence)),
        ]
    )  # fmt: skip


_SAME_LOSSES = Said(
    "the losses are those of one process, within 10⁻⁴", "les pertes sont celles d’un processus seul, à 10⁻⁴ près"
)


def torch_seen(single: Run, by_torch: Run, by_hand: Run) -> Table:
    """Answer whether torch's engine trains and weighs the same."""
    weights = [measured_footprint(run).memory.weights_bytes for run in (by_torch, by_hand)]
    return answered(
        [
            (str(_SAME_LOSSES), _same_losses(single, by_torch)),
            (TEXTS.say("torch seen", "as many bytes of weights"),
             weights[0] == weights[1]),
        ]
    )  # fmt: skip


def _same_losses(run: Run, reference: Run) -> bool:
    return all(abs(a - b) < 1e-4 for a, b in zip(run.losses, reference.losses, strict=True))


def _title(run: Run) -> str:
    layout = run.config.layout
    return layout.title if layout.world_size > 1 else say(en="one process", fr="un processus")


@pictured
def side_by_side(runs: Sequence[Run]) -> LabFigure:
    """Rank 0 of runs: memory by category, and bytes of the tensor axis by collective; predicted in pale above."""
    opening = say(
        en="Memory by category and bytes sent along the tensor axis, predicted and measured, of: ",
        fr="Mémoire par catégorie et octets échangés sur l’axe tensor, prédits et mesurés, pour : ",
    )
    titles = [_title(run) for run in runs]
    return memory_and_messages(runs, titles, opening=opening, is_drawn=lambda traffic: traffic.group == "tp", ncols=5)


def counted(runs: Sequence[Run], group: str = "tp") -> Table:
    """What rank 0 communicates per step along one axis: calls and bytes of their messages, predicted and measured.

    The last column is what a ring sends for them.
    """
    rows: list[tuple[str, ...]] = []
    for run in runs:
        forecast = {
            traffic.collective: traffic for traffic in predict(run.config).communication if traffic.group == group
        }
        measured = {
            traffic.collective: traffic for traffic in measured_footprint(run).communication if traffic.group == group
        }
        for name in sorted({*forecast, *measured}):
            pair = (forecast.get(name), measured.get(name))
            calls = [str(traffic.count) if traffic else "0" for traffic in pair]
            messages = [format_bytes(traffic.message_bytes) if traffic else "0" for traffic in pair]
            ring_bytes = format_bytes(measured[name].sent_bytes) if name in measured else "0"
            rows.append((_title(run), name.replace("_", "-"), *calls, *messages, ring_bytes))
    head = titles(*TEXTS.sentence("counted", "heads"))
    return Table(head, tuple(rows))
