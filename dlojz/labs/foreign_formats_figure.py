"""Who writes what: the bytes of each rank's files in each format, over the tensors that were predicted.

Layer 6 (labs), on `dlojz.viz`. Invariant: what is drawn is what the table of files says, in the same order.
"""

from __future__ import annotations

from dlojz.footprint import CATEGORIES
from dlojz.labs.foreign_formats import FORMATS, FileTable, predicted_bytes
from dlojz.labs.zero_published import decimal
from dlojz.text import say
from dlojz.units import MEBIBYTE, format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import CATEGORY_STYLES, PREDICTED_ALPHA, category_label

_EDGE = "#333333"


def who_writes_what(table: FileTable) -> LabFigure:
    """Bytes that each rank writes: above, in pale, the tensors predicted, by category; below, the files, end to end."""
    rows = [(kind, rank) for kind in table.formats for rank in range(table.config.layout.dp)]
    named = say(en="rank", fr="rang")
    told = [f"{FORMATS[kind]} {named} {rank} {format_bytes(table.written_bytes(kind, rank))}" for kind, rank in rows]
    figure = new_figure(
        9.0,
        1.2 + 0.5 * len(rows),
        alt=say(en="Bytes written: ", fr="Octets écrits : ") + ", ".join(told),
    )
    axes = figure.subplots()
    labelled: set[str] = set()
    for place, (kind, rank) in enumerate(rows):
        left = 0.0
        expected = predicted_bytes(table.config, kind, rank)
        for category in (name for name in CATEGORIES if expected.get(name)):
            size, style = expected[category] / MEBIBYTE, CATEGORY_STYLES[category]
            label = category_label(category)
            axes.barh(
                place - 0.2,
                size,
                left=left,
                height=0.36,
                color=style.color,
                hatch=style.hatch,
                alpha=PREDICTED_ALPHA,
                edgecolor=_EDGE,
                linewidth=0.4,
                label=None if label in labelled else label,
            )
            labelled.add(label)
            left += size
        left = 0.0
        for file in table.files:
            if (file.format, file.rank) == (kind, rank):
                size = file.bytes / MEBIBYTE
                axes.barh(place + 0.2, size, left=left, height=0.36, color="#DDDDDD", edgecolor=_EDGE, linewidth=0.8)
                left += size
        axes.text(left + 0.05, place + 0.2, format_bytes(table.written_bytes(kind, rank)), va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{FORMATS[kind]}\n{named} {rank}" for kind, rank in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.12)
    axes.set_xlabel(say(en="written (MiB)", fr="écrit (Mio)"))
    axes.xaxis.set_major_formatter(lambda value, position: decimal(f"{value:g}"))
    axes.set_title(
        say(en="pale: tensors predicted; grey: files", fr="en pâle : tenseurs prédits ; en gris : fichiers"),
        loc="left",
        fontsize=10,
    )
    axes.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.08), ncols=4, fontsize=8)
    plain(axes)
    return finish(figure)
