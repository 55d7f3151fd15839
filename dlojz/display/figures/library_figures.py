"""Figures and tables of the libraries side by side: the catalogue, and what was measured.

Each cell of bytes is `predicted | measured`, as in `dlojz compare`. A library has one colour and one hatch in every
panel; one that was not run has its empty place.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dlojz.base.language import MEBIBYTE, decimal, format_bytes, say, yes_no
from dlojz.base.table import Table, visible
from dlojz.display.canvas import LabFigure, caption, finish, new_figure, note, phrase, plain, stack
from dlojz.display.style import BASELINE, BLUE, GREEN, GREY, NORMAL, ORANGE, PREDICTED_ALPHA, PURPLE, SKY, Style
from dlojz.libraries.library_catalogue import LIBRARIES, REFERENCE, Library, absence, bridge_lines, lines_changed
from dlojz.libraries.side_by_side import LibraryRow

DASH = "—"
OTHERWISE = " *"
"""Behind a ratio of two trainings that are not the same: the library has done something else than asked."""


def catalogue_table(hides: bool = True) -> Table:
    """List the libraries: version or what installs it, layouts, lines changed, and what each hides.

    Args:
        hides: whether there is room for the last column; `catalogue_sentences` says it otherwise.
    """
    titles = (
        say(en="library", fr="bibliothèque"),
        say(en="here", fr="ici"),
        say(en="its program runs", fr="son programme exécute"),
        say(en="lines", fr="lignes"),
        *([say(en="what its user no longer writes", fr="ce que l’on n’écrit plus")] if hides else []),
    )
    rows = tuple(
        (
            library.title,
            _here(library),
            library.runs(),
            all_lines_words(library.name),
            *([library.hides()] if hides else []),
        )
        for library in LIBRARIES.values()
    )
    return Table(titles, rows, align="l")


def catalogue_sentences() -> list[str]:
    """Say what each library hides."""
    return [_hides(library.title, library.hides()) for library in LIBRARIES.values()]


def _here(library: Library) -> str:
    if absence(library.name) is None:
        return library.version or say(en="in its own environment", fr="dans son environnement")
    return library.command or say(en="no", fr="non")


def lines_words(name: str) -> str:
    """Write the lines of code of a program, and how many differ from plain torch's: `33 (+4 −9)`."""
    change = lines_changed(name)
    # 33 (+4 −9): 33 lines of code; 4 of them are not in the program of plain torch, 9 of its lines are not here.
    return f"{change.lines}" + (f" (+{change.added} −{change.removed})" if change.changed else "")


def all_lines_words(name: str) -> str:
    """Write the lines of a program, and those of the modules that bridge the lab and the library."""
    bridge = bridge_lines(name)
    bridge_words = say(en=f" + {bridge} of bridge", fr=f" + {bridge} d’adaptation") if bridge else ""
    return lines_words(name) + bridge_words


def difference_words(row: LibraryRow) -> str:
    """Write the largest difference of a loss to plain torch's."""
    if row.difference is None:
        return DASH
    return "0" if row.difference == 0 else f"{row.difference:.0e}"


def ratio_words(row: LibraryRow) -> str:
    """Write the step time over plain torch's, with quartiles where there are several rounds; `*`: another training."""
    if row.step_ratio is None:
        return DASH
    words = f"×{decimal(row.step_ratio, 2)}"
    if row.rounds > 1 and row.step_ratio_low is not None and row.step_ratio_high is not None:
        words += f" ({decimal(row.step_ratio_low, 2)}–{decimal(row.step_ratio_high, 2)})"
    elif row.rounds == 1:
        words += say(en=" (1 round)", fr=" (1 tour)")
    return words + OTHERWISE * row.otherwise


def measured_table(rows: Sequence[LibraryRow]) -> Table:
    """List what was measured with each library on rank 0; `notes` names those that were not run."""
    ran = [row for row in rows if row.ran]
    lines = (
        (say(en="lines", fr="lignes"), [all_lines_words(row.name) for row in ran]),
        (say(en="loss: largest gap", fr="perte : plus grand écart"), [difference_words(row) for row in ran]),
        (say(en="final weights equal", fr="poids finals égaux"), [_equal(row.same_weights) for row in ran]),
        (say(en="last loss", fr="dernière perte"), [decimal(row.losses[-1], 4) if row.losses else DASH for row in ran]),
        (say(en="states", fr="états"), [_pair(row.states_bytes) for row in ran]),
        (say(en="peak", fr="pic"), [_pair(row.peak_bytes) for row in ran]),
        *_traffic_lines(ran),
        (say(en="bytes equal", fr="octets égaux"), [_equal(row.bytes_equal, "≠ ") for row in ran]),
        (say(en="steps timed", fr="pas chronométrés"), [f"{row.steps_timed} × {row.rounds}" for row in ran]),
        (say(en="step, ms", fr="pas, ms"), [decimal(row.step_s * 1e3, 0) if row.step_s else DASH for row in ran]),
        (say(en="over torch's", fr="par rapport à torch"), [ratio_words(row) for row in ran]),
    )
    head = ("", *(f"{row.title} {row.version}".strip() for row in ran))
    return Table(head, tuple((label, *cells) for label, cells in lines))


def _traffic_lines(ran: Sequence[LibraryRow]) -> list[tuple[str, list[str]]]:
    """Bytes of each collective; a sign marks what should be equal and is not."""
    row_traffic = [{name: (before, after) for name, before, after in row.traffic_bytes} for row in ran]
    names = dict.fromkeys(name for of_row in row_traffic for name in of_row)
    return [(name, [_pair(of_row[name], "≠") if name in of_row else DASH for of_row in row_traffic]) for name in names]


def _pair(pair: tuple[int | None, int | None], unequal: str = "|") -> str:
    before, after = (format_bytes(value) for value in pair)
    # Only two known numbers can be unequal.
    sign = unequal if None not in pair and pair[0] != pair[1] else "|"
    # Two figures that are written alike and not judged are written once.
    return f"{before} {sign} {after}" if before != after or unequal != "|" else after


def _equal(equal: bool | None, alarm: str = "") -> str:
    if equal is None:
        return DASH
    return ("" if equal else alarm) + yes_no(equal)


def hides_sentences(rows: Sequence[LibraryRow]) -> list[str]:
    """Say what the user of each library no longer writes."""
    return [_hides(row.title, row.hides) for row in rows]


def _hides(title: str, hides: str) -> str:
    return say(en=f"{title} hides: {hides}.", fr=f"{title} cache : {hides}.")


def notes(rows: Sequence[LibraryRow]) -> list[str]:
    """Say what was not run, with its reason, and what was done otherwise than asked."""
    sentences = []
    for row in rows:
        if not row.ran:
            sentences.append(say(en=f"{row.title}: not run. {row.note}", fr=f"{row.title} : pas exécuté. {row.note}"))
        elif row.note:
            sentences.append(f"{row.title}{OTHERWISE * row.otherwise}{say(en=':', fr=' :')} {row.note}")
    return sentences


LOOKS = {
    "torch": Style(GREY, ""),
    "deepspeed": Style(BLUE, "//"),
    "accelerate": Style(ORANGE, "\\\\"),
    "megatron": Style(GREEN, "xx"),
    "colossalai": Style(PURPLE, ".."),
}
OTHER = Style(SKY, "++")
HEIGHT = 0.36
Pair = tuple[int | None, int | None]
"""Bytes predicted and measured."""


def libraries_figure(rows: Sequence[LibraryRow], path: str | Path | None = None) -> LabFigure:
    """Draw the libraries side by side: four panels, a line of each for every library.

    Lines of code, those that are not plain torch's in full colour; the peak of memory of rank 0, predicted (light)
    above measured, in MiB; the bytes that a step communicates, likewise; the time of a step over plain torch's in the
    same round, a dot for the median, a bar for the quartiles. Beneath each name: the largest difference of a loss.
    """
    figure = new_figure(12.0, 1.3 + 0.75 * max(1, len(rows)), alt=description(rows))
    panels = figure.subplots(1, 4, sharey=True, squeeze=False)[0]
    for panel in panels:
        plain(panel, "x")
        panel.set_ylim(len(rows) - 0.5, -0.5)
        panel.xaxis.set_major_locator(MaxNLocator(4))
    panels[0].set_yticks(range(len(rows)), [_name(row) for row in rows], fontsize=NORMAL)
    _lines(panels[0], rows)
    _pairs(panels[1], rows, lambda row: row.peak_bytes)
    _pairs(panels[2], rows, _sent)
    _times(panels[3], rows)
    titles = (
        say(en="lines of code\n(full: not plain torch's)", fr="lignes de code\n(plein : pas celles de torch)"),
        say(en="peak of rank 0, MiB\npredicted (light), measured", fr="pic du rang 0, Mio\nprédit (clair), mesuré"),
        phrase("messages of libraries"),
        say(en="time of a step, over\nplain torch's", fr="durée d’un pas,\nrapportée à torch seul"),
    )
    for panel, title in zip(panels, titles, strict=True):
        caption(panel, title=title, size=NORMAL)
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
    before, after = (
        [num_bytes for _, num_bytes, _ in row.traffic_bytes],
        [num_bytes for _, _, num_bytes in row.traffic_bytes],
    )
    return _sum(before), _sum(after)


def _sum(values: Sequence[int | None]) -> int | None:
    present = [value for value in values if value is not None]
    # A sum with an unknown term is unknown.
    return sum(present) if len(present) == len(values) else None


def _bar(
    axes: Axes, row: LibraryRow, position: float, length: float, height: float = HEIGHT, **properties: Any
) -> None:
    style = LOOKS.get(row.name, OTHER)
    stack(axes, position, [(length, style)], height, edgecolor="white", linewidth=0.5, **properties)


def _beside(axes: Axes, text: str, right: float, position: float) -> None:
    note(axes, text, (right, position), (8, 0), bbox={"color": "white", "pad": 0.5})


def _lines(axes: Axes, rows: Sequence[LibraryRow]) -> None:
    for position, row in enumerate(rows):
        unchanged_lines = row.change.lines - row.change.added
        # Light: lines shared with plain torch; full: those added.
        _bar(axes, row, position, unchanged_lines, 2 * HEIGHT, alpha=PREDICTED_ALPHA)
        _bar(axes, row, position, row.change.added, 2 * HEIGHT, start=unchanged_lines)
        _beside(axes, lines_words(row.name), row.change.lines, position)
    axes.set_xlim(0, 1.75 * max(row.change.lines for row in rows))


def _pairs(axes: Axes, rows: Sequence[LibraryRow], pair_of: Callable[[LibraryRow], Pair]) -> None:
    longest_mib = 0.0
    for position, row in enumerate(rows):
        predicted, measured = pair_of(row)
        # Predicted above, measured below.
        for shift, value, alpha in ((-HEIGHT / 2, predicted, PREDICTED_ALPHA), (HEIGHT / 2, measured, 1.0)):
            if value is None:
                continue
            _bar(axes, row, position + shift, value / MEBIBYTE, alpha=alpha)
            longest_mib = max(longest_mib, value / MEBIBYTE)
        # Written apart only if they differ as written; else one number stands between the two bars.
        if predicted is not None and measured is not None and _mebibytes(predicted) != _mebibytes(measured):
            _beside(axes, _mebibytes(predicted), predicted / MEBIBYTE, position - HEIGHT / 2)
            _beside(axes, _mebibytes(measured), measured / MEBIBYTE, position + HEIGHT / 2)
        elif measured is not None:
            shift = HEIGHT / 2 if predicted is None else 0
            _beside(axes, _mebibytes(measured), max(measured, predicted or 0) / MEBIBYTE, position + shift)
    axes.set_xlim(0, 1.35 * longest_mib or 1)


def _mebibytes(num_bytes: int) -> str:
    return decimal(num_bytes / MEBIBYTE, 2 if num_bytes < 100 * MEBIBYTE else 0)


def _times(axes: Axes, rows: Sequence[LibraryRow]) -> None:
    axes.axvline(1, color=BASELINE, linewidth=0.8)
    largest_ratio = 1.0
    for position, row in enumerate(rows):
        if row.step_ratio is None:
            continue
        low, high = row.step_ratio_low or row.step_ratio, row.step_ratio_high or row.step_ratio
        color = LOOKS.get(row.name, OTHER).color
        # A bar from the first to the third quartile, a dot at the median.
        axes.plot([low, high], [position, position], color=color, linewidth=3, alpha=0.6)
        axes.plot([row.step_ratio], [position], color=color, marker="o", markersize=7, linestyle="")
        _beside(axes, ratio_words(row), high, position)
        largest_ratio = max(largest_ratio, high)
    axes.set_xlim(0, 1.75 * largest_ratio)


def description(rows: Sequence[LibraryRow]) -> str:
    """Describe the figure in words."""
    library_sentences = "; ".join(_described(row) for row in rows)
    return phrase("alt of libraries", libraries=library_sentences)


def _described(row: LibraryRow) -> str:
    title, lines = visible(row.title), lines_words(row.name)
    if not row.ran:
        return say(en=f"{title}: {lines} lines, not run", fr=f"{title} : {lines} lignes, pas exécuté")
    peak = _of(row.peak_bytes)
    messages, ratio, gap = _of(_sent(row)), ratio_words(row), difference_words(row)
    return phrase("library", title=title, lines=lines, gap=gap, peak=peak, messages=messages, ratio=ratio)


def _of(pair: tuple[int | None, int | None]) -> str:
    unit = say(en="MiB", fr="Mio")
    before, after = ("—" if value is None else f"{_mebibytes(value)} {unit}" for value in pair)
    return say(en=f"{after} (predicted {before})", fr=f"{after} (prédit : {before})")
