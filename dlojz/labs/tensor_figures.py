"""Figures and tables of lab 06: a layer shared out, a block with its f and g, time over links.

Layer 6 (labs), on `dlojz.viz`. Invariant: what is drawn is a split that `share_bounds` gives, or what the student's own
function gives; a rank has one colour and one hatch in every figure.
"""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullFormatter

from dlojz.labs.pipeline_figures import Sheet, or_to_do, pictured, plain_number
from dlojz.labs.tensor_volume_exercises import NETWORK, NVLINK, LayerBytes, compute_seconds
from dlojz.labs.zero_published import decimal
from dlojz.tensor.slicing import share_bounds
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import (
    BLACK,
    GREY,
    LINE_STYLES,
    ORANGE,
    PURPLE,
    SKY,
    YELLOW,
    Style,
)

RANKS = (Style(SKY, ""), Style(ORANGE, "//"), Style(YELLOW, ".."), Style(PURPLE, "\\\\"))
WHOLE = Style("#E5E5E5", "")


def _rank(number: int) -> str:
    return say(en=f"rank {number}", fr=f"rang {number}")


def _box(axes: Axes, at: tuple[float, float], size: tuple[float, float], style: Style, text: str = "") -> None:
    axes.add_patch(Rectangle(at, *size, facecolor=style.color, hatch=style.hatch, edgecolor="#333333", linewidth=0.8))
    if text:
        axes.text(
            at[0] + size[0] / 2, at[1] + size[1] / 2, text, ha="center", va="center", fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
        )  # fmt: skip


def _matrix(axes: Axes, left: float, shape: tuple[int, int], cut: str, ranks: int, name: str) -> float:
    """A matrix of rows × columns, in the colours of who holds what; the x where the next thing may stand."""
    rows, columns = shape
    bottom = -rows / 2
    if cut == "whole":
        _box(axes, (left, bottom), (columns, rows), WHOLE)
    for rank in range(ranks) if cut != "whole" else ():
        start, end = share_bounds(columns if cut == "columns" else rows, ranks, rank)
        if cut == "columns":
            _box(axes, (left + start, bottom), (end - start, rows), RANKS[rank])
        else:
            _box(axes, (left, bottom + rows - end), (columns, end - start), RANKS[rank])
    axes.text(left + columns / 2, bottom + rows + 0.4, name, ha="center", va="bottom", fontsize=10)
    return left + columns + 1.6


def _sign(axes: Axes, at: float, sign: str) -> None:
    axes.text(at - 0.8, 0, sign, ha="center", va="center", fontsize=12)


@pictured
def split_layer(ranks: int = 2) -> LabFigure:
    """Who holds what of Y = X W by columns and by rows, with what each rank computes.

    Args:
        ranks: 2 or 3.
    """
    samples, inputs, outputs = 3, 6, 8
    figure = new_figure(
        9.0,
        4.6,
        alt=say(
            en="Y = X W. By columns: X whole, the columns of W and of Y shared out. By rows: the columns of X and the "
            "rows of W shared out; each rank has a partial product of the shape of Y, and these are added up.",
            fr="Y = X W. Par colonne : X entier, les colonnes de W et de Y réparties. Par ligne : les colonnes de X et "
            "les lignes de W réparties ; chaque rang a un produit partiel de la forme de Y, et on les additionne.",
        ),
    )
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
        _box(lower, (after, -samples / 2), (outputs, samples), RANKS[rank], _rank(rank))
        after += outputs + 1.6
    _sign(lower, after, "=")
    _matrix(lower, after, (samples, outputs), "whole", ranks, "Y")
    titles = (
        say(en="by columns: nothing to send in forward", fr="par colonne : rien à envoyer en passe avant"),
        say(en="by rows: partial products, added up (all-reduce)",
            fr="par ligne : des produits partiels, additionnés (all-reduce)"),
    )  # fmt: skip
    for axes, title in zip((upper, lower), titles, strict=True):
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(-0.5, inputs + 1.6 + (outputs + 1.6) * (ranks + 2))
        axes.set_ylim(-inputs / 2 - 0.3, inputs / 2 + 1.6)
        axes.set_aspect("equal")
        axes.set_axis_off()
    handles = [Rectangle((0, 0), 1, 1, facecolor=WHOLE.color, edgecolor="#333333")]
    handles += [Rectangle((0, 0), 1, 1, facecolor=one.color, hatch=one.hatch, edgecolor="#333333")
                for one in RANKS[:ranks]]  # fmt: skip
    names = [say(en="every rank", fr="chaque rang"), *(_rank(rank) for rank in range(ranks))]
    figure.legend(handles, names, frameon=False, loc="outside lower center", ncols=ranks + 1)
    return finish(figure)


@pictured
def block_ends(sequence_parallel: bool = False, ranks: int = 2) -> LabFigure:
    """Half a transformer block with the two ends of its parallel region, and what each does in both directions."""
    region = say(en="in the region: heads, or hidden features", fr="dans la région : têtes, ou neurones cachés")
    figure = new_figure(
        9.0,
        2.9,
        alt=say(
            en="Half a block: norm, beginning of the region, layer by columns, attention or GELU, layer by rows, end "
            "of the region, dropout and shortcut; with what the two ends send in forward and in backward.",
            fr="Un demi-bloc : norme, début de la région, couche par colonne, attention ou GELU, couche par ligne, fin "
            "de la région, dropout et raccourci ; avec ce que les deux extrémités envoient dans chaque sens.",
        ),
    )
    axes = figure.subplots()
    height = 2.0 / ranks
    outside = (
        (0.0, say(en="norm", fr="norme")),
        (10.4, say(en="dropout, + x", fr="dropout, + x")),
    )
    for left, name in outside:
        if not sequence_parallel:
            _box(axes, (left, 0), (2.2, 2.0), WHOLE, name)
        for rank in range(ranks) if sequence_parallel else ():
            tokens = say(en=f"{name}\ntokens of rank {rank}", fr=f"{name}\ntokens du rang {rank}")
            _box(axes, (left, 2.0 - (rank + 1) * height), (2.2, height), RANKS[rank], tokens)
    inside = (
        say(en="by columns", fr="par colonne"),
        say(en="attention\nor GELU", fr="attention\nou GELU"),
        say(en="by rows", fr="par ligne"),
    )
    for number, name in enumerate(inside):
        for rank in range(ranks):
            at = (3.7 + 1.8 * number, 2.0 - (rank + 1) * height)
            _box(axes, at, (1.6, height - 0.08), RANKS[rank], f"{name}\n{_rank(rank)}")
    ends = (
        (2.95, "f" if not sequence_parallel else "g", *(("–", "all-reduce") if not sequence_parallel
                                                        else ("all-gather", "reduce-scatter"))),
        (9.65, "g" if not sequence_parallel else "g̅", *(("all-reduce", "–") if not sequence_parallel
                                                        else ("reduce-scatter", "all-gather"))),
    )  # fmt: skip
    for bar, name, forward, backward in ends:
        axes.plot([bar, bar], [-0.15, 2.15], color=BLACK, linewidth=3)
        axes.text(bar, 2.25, name, ha="center", va="bottom", fontsize=12, style="italic")
        said = say(en=f"forward: {forward}\nbackward: {backward}", fr=f"avant : {forward}\narrière : {backward}")
        axes.text(bar, -0.3, said, ha="center", va="top", fontsize=8)
    axes.text(6.3, 2.25, region, ha="center", va="bottom", fontsize=8)
    axes.set_xlim(-0.1, 12.8)
    axes.set_ylim(-1.1, 2.8)
    axes.set_axis_off()
    return finish(figure)


@pictured
def over_links(layer_bytes: LayerBytes, *, tokens: int, width: int, flops_per_s: float) -> LabFigure:
    """Time of one layer's products and of what it sends over two links, by number of ranks, by the student's bytes."""
    sizes = (2, 4, 8, 16, 32)
    sent = [layer_bytes(1, tokens, width, ranks, 2) for ranks in sizes]
    series: tuple[tuple[str, list[float]], ...] = (
        (say(en="computation", fr="calcul"), [compute_seconds(1, tokens, width, n, flops_per_s) for n in sizes]),
        (say(en="all-reduces, NVLink", fr="all-reduces, NVLink"), [one / NVLINK.bytes_per_s for one in sent]),
        (say(en="all-reduces, network", fr="all-reduces, réseau"), [one / NETWORK.bytes_per_s for one in sent]),
    )
    figure = new_figure(7.0, 3.4, alt=say(
        en="Milliseconds per layer by number of ranks: computation, all-reduces over NVLink and over the network.",
        fr="Millisecondes par couche selon le nombre de rangs : calcul, all-reduces par NVLink et par le réseau.",
    ))  # fmt: skip
    axes = figure.subplots()
    for (label, seconds), (color, line, marker) in zip(series, LINE_STYLES, strict=False):
        axes.plot(sizes, [1e3 * one for one in seconds], color=color, linestyle=line, marker=marker, label=label)
    axes.axvline(8.5, color=GREY, linestyle="--", linewidth=1)
    more = say(en="more than one node", fr="plus d’un nœud")
    axes.text(8.8, 0.03, more, va="bottom", fontsize=8, transform=axes.get_xaxis_transform())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(lambda value, position: decimal(f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(say(en="tensor-parallel ranks", fr="rangs de Tensor Parallelism"))
    axes.set_ylabel(say(en="ms per layer", fr="ms par couche"))
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, fontsize=8)
    plain(axes)
    return finish(figure)


@or_to_do
def links(layer_bytes: LayerBytes, *, samples: int, tokens: int, width: int, ranks: int, number_bytes: int) -> Sheet:
    """The two links: latency, bandwidth, and how long the student's bytes take."""
    sent = layer_bytes(samples, tokens, width, ranks, number_bytes)
    rows = []
    for name, link in (("NVLink", NVLINK), (say(en="network", fr="réseau"), NETWORK)):
        rate = plain_number(link.bytes_per_s / 1e9)
        seconds = sent / link.bytes_per_s
        rows.append(
            (
                name,
                f"{plain_number(1e6 * link.alpha_s)} µs",
                say(en=f"{rate} GB/s", fr=f"{rate} Go/s"),
                f"{plain_number(1e3 * seconds, 3)} ms",
            )
        )
    head = (say(en="link", fr="lien"), "α", say(en="bandwidth", fr="débit"), say(en="a layer", fr="une couche"))
    return Sheet(head, tuple(rows))
