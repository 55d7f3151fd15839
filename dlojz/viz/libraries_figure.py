"""The libraries side by side in a picture: lines, memory predicted and measured, bytes, time of a step.

Layer 4. Invariant: nothing is computed here; a library has one colour and one hatch in every panel, and one that was
not run has its place, empty, with the words "not run".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from dlojz.libraries import REFERENCE
from dlojz.libraries.side_by_side import LibraryRow
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.library_tables import difference_words, lines_words, number, ratio_words
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLUE, GREEN, GREY, ORANGE, PREDICTED_ALPHA, PURPLE, SKY

LOOKS = {
    "torch": (GREY, ""),
    "deepspeed": (BLUE, "//"),
    "accelerate": (ORANGE, "\\\\"),
    "megatron": (GREEN, "xx"),
    "colossalai": (PURPLE, ".."),
}
"""Colour and hatch of a library."""
OTHER = (SKY, "++")
MEBIBYTE = 2**20
HEIGHT = 0.36
Pair = tuple[int | None, int | None]
"""Bytes predicted and measured."""


def libraries_figure(rows: Sequence[LibraryRow], path: str | Path | None = None) -> LabFigure:
    """Draw the libraries side by side: four panels, a line of each for every library.

    Lines of code, those that are not plain torch's in full colour; the peak of memory of rank 0, predicted (light)
    above measured, in MiB; the bytes that a step communicates, likewise; the time of a step over plain torch's in the
    same round, a dot for the median, a bar for the quartiles. Beneath each name: the largest difference of a loss.

    Args:
        rows: the libraries, in order.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = new_figure(12.0, 1.3 + 0.75 * max(1, len(rows)), alt=description(rows))
    panels = figure.subplots(1, 4, sharey=True, squeeze=False)[0]
    for panel in panels:
        plain(panel)
        panel.grid(axis="y", visible=False)
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.xaxis.set_major_locator(MaxNLocator(4))
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace(".", say(en=".", fr=","))))
    panels[0].set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=9)
    _lines(panels[0], rows)
    _pairs(panels[1], rows, lambda row: row.peak_bytes)
    _pairs(panels[2], rows, _sent)
    _times(panels[3], rows)
    titles = (
        say(en="lines of code\n(full: not plain torch's)", fr="lignes de code\n(plein : pas celles de torch)"),
        say(en="peak of rank 0, MiB\npredicted (light), measured", fr="pic du rang 0, Mio\nprédit (clair), mesuré"),
        say(
            en="messages of a step, MiB\npredicted (light), measured",
            fr="messages par pas, Mio\nprédits (clair), mesurés",
        ),
        say(en="time of a step, over\nplain torch's", fr="durée d’un pas,\nrapportée à torch seul"),
    )
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title, loc="left", fontsize=9)
    return finish(figure, path)


def _name(row: LibraryRow) -> str:
    title = visible(f"{row.title} {row.version.split('+')[0]}".strip())
    if not row.ran:
        return f"{title}\n" + say(en="not run", fr="pas exécuté")
    if row.difference is None or row.name == REFERENCE:
        return title
    return f"{title}\n" + say(en=f"losses ± {difference_words(row)}", fr=f"pertes ± {difference_words(row)}")


def _sent(row: LibraryRow) -> Pair:
    """Bytes of all messages of a step, predicted and measured; None where one is not known."""
    if not row.ran:
        return None, None
    before, after = [one for _, one, _ in row.traffic_bytes], [one for _, _, one in row.traffic_bytes]
    return _sum(before), _sum(after)


def _sum(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _looks(row: LibraryRow) -> dict[str, Any]:
    color, hatch = LOOKS.get(row.name, OTHER)
    return {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}


def _beside(axes: Axes, text: str, right: float, place: float) -> None:
    axes.annotate(text, (right, place), xytext=(8, 0), textcoords="offset points", va="center", fontsize=8,
                  bbox={"color": "white", "pad": 0.5})  # fmt: skip


def _lines(axes: Axes, rows: Sequence[LibraryRow]) -> None:
    for place, row in enumerate(rows):
        same = row.change.lines - row.change.added
        axes.barh(place, same, 2 * HEIGHT, alpha=PREDICTED_ALPHA, **_looks(row))
        axes.barh(place, row.change.added, 2 * HEIGHT, left=same, **_looks(row))
        _beside(axes, lines_words(row.name), row.change.lines, place)
    axes.set_xlim(0, 1.75 * max(row.change.lines for row in rows))


def _pairs(axes: Axes, rows: Sequence[LibraryRow], pair_of: Callable[[LibraryRow], Pair]) -> None:
    most = 0.0
    for place, row in enumerate(rows):
        predicted, measured = pair_of(row)
        for shift, value, alpha in ((-HEIGHT / 2, predicted, PREDICTED_ALPHA), (HEIGHT / 2, measured, 1.0)):
            if value is None:
                continue
            axes.barh(place + shift, value / MEBIBYTE, HEIGHT, alpha=alpha, **_looks(row))
            most = max(most, value / MEBIBYTE)
        if predicted is not None and measured is not None and _mebibytes(predicted) != _mebibytes(measured):
            _beside(axes, _mebibytes(predicted), predicted / MEBIBYTE, place - HEIGHT / 2)
            _beside(axes, _mebibytes(measured), measured / MEBIBYTE, place + HEIGHT / 2)
        elif measured is not None:
            shift = HEIGHT / 2 if predicted is None else 0
            _beside(axes, _mebibytes(measured), max(measured, predicted or 0) / MEBIBYTE, place + shift)
    axes.set_xlim(0, 1.35 * most or 1)


def _mebibytes(num_bytes: int) -> str:
    return number(num_bytes / MEBIBYTE, 2 if num_bytes < 100 * MEBIBYTE else 0)


def _times(axes: Axes, rows: Sequence[LibraryRow]) -> None:
    axes.axvline(1, color="#444444", linewidth=0.8)
    most = 1.0
    for place, row in enumerate(rows):
        if row.step_ratio is None:
            continue
        low, high = row.step_ratio_low or row.step_ratio, row.step_ratio_high or row.step_ratio
        color = LOOKS.get(row.name, OTHER)[0]
        axes.plot([low, high], [place, place], color=color, linewidth=3, alpha=0.6)
        axes.plot([row.step_ratio], [place], color=color, marker="o", markersize=7, linestyle="")
        _beside(axes, ratio_words(row), high, place)
        most = max(most, high)
    axes.set_xlim(0, 1.75 * most)


def description(rows: Sequence[LibraryRow]) -> str:
    """The figure in words: each library's lines, peak, messages and step."""
    each = "; ".join(_described(row) for row in rows)
    return say(en=f"The libraries side by side. {each}.", fr=f"Les bibliothèques côte à côte. {each}.")


def _described(row: LibraryRow) -> str:
    title, lines = visible(row.title), lines_words(row.name)
    if not row.ran:
        return say(en=f"{title}: {lines} lines, not run", fr=f"{title} : {lines} lignes, pas exécuté")
    peak = _of(row.peak_bytes)
    sent, ratio, gap = _of(_sent(row)), ratio_words(row), difference_words(row)
    return say(
        en=f"{title}: {lines} lines, losses within {gap} of torch's, peak {peak}, messages {sent}, step {ratio}",
        fr=f"{title} : {lines} lignes, pertes à {gap} près de celles de torch, pic {peak}, messages {sent}, "
        f"pas {ratio}",
    )


def _of(pair: tuple[int | None, int | None]) -> str:
    unit = say(en="MiB", fr="Mio")
    before, after = ("—" if value is None else f"{_mebibytes(value)} {unit}" for value in pair)
    return say(en=f"{after} (predicted {before})", fr=f"{after} (prédit : {before})")
