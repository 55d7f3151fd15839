"""Accuracy against size and against time: what every method gives for what it takes, predicted and measured.

Layer 4. Invariant: nothing is computed here but which points of a panel no other beats; a family has one colour and
one marker in every panel, and a method one number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dlojz.compress.board_record import TEACHER, Board, Line, family_title
from dlojz.text import say
from dlojz.units import byte_units
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.compress_figure_labels import Spot, place_labels
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, BLUE, GREEN, ORANGE, VERMILION

LOOKS = {
    TEACHER: (BLACK, "*"),
    "distillation": (BLUE, "o"),
    "quantization": (VERMILION, "s"),
    "pruning": (GREEN, "^"),
}
"""Colour and marker of a family."""
OTHER = (ORANGE, "D")
QUIET = "#555555"
"""Of what explains the signs."""
KIBIBYTE = 1024
HELD_OUT_HALF = 0.5 / 360
"""Half an image of the digits: where a model without any error is drawn, as its logarithm is not."""
TICKS = (0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
FINE_TICKS = (0.93, 0.94, 0.95, 0.96, 0.965, 0.97, 0.975, 0.98, 0.985, 0.99, 0.995)
"""Where fewer than `LEAST_TICKS` of the others would be shown, because accuracies are close to one another."""
LEAST_TICKS = 4


def compress_figure(board: Board, path: str | Path | None = None) -> LabFigure:
    """Draw a board: accuracy against the size of the file, and against the time of an answer.

    Full: measured, median over the seeds; thin bars: all seeds (upright) and half of the rounds (across). Hollow:
    predicted. The dashed line joins what nothing beats in the two quantities of the panel; a ring marks what nothing
    beats in accuracy, size and time together.

    Args:
        board: of any methods and seeds.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    lines = board.lines()
    figure = new_figure(12.0, max(4.9, 1.5 + 0.25 * (len(lines) + len(_families(lines)))), alt=description(board))
    figure.suptitle(visible(board.title()), x=0.008, ha="left", fontsize=10.5)
    size, time, names = figure.subplots(1, 3, width_ratios=(1, 1, 0.52))
    front = {line.method for line in board.front()}
    unit = byte_units()[1]
    for axes, measured, predicted, label in (
        (size, _size, _predicted_size, say(en=f"file, {unit} (hollow: predicted)",
                                           fr=f"fichier, {unit} (creux : prédit)")),
        (time, _time, _predicted_time, say(en="time of an answer over the teacher's (hollow: predicted)",
                                           fr="temps d’une réponse / celui du professeur (creux : prédit)")),
    ):  # fmt: skip
        _panel(axes, lines, front, measured, predicted)
        axes.set_xlabel(label, fontsize=9)
    size.set_xscale("log")
    _sizes(size, lines)
    for line in lines:
        time.plot([line.latency_ratio_low, line.latency_ratio_high], [_error(line)] * 2, color=_look(line)[0],
                  linewidth=1, alpha=0.5, zorder=1)  # fmt: skip
    size.set_ylabel(say(en="accuracy (log of the errors)", fr="exactitude (log des erreurs)"), fontsize=9)
    size.set_title(say(en="accuracy against size", fr="exactitude et taille"), loc="left", fontsize=10)
    time.set_title(say(en="accuracy against time", fr="exactitude et temps"), loc="left", fontsize=10)
    _names(names, board, lines, front)
    figure.draw_without_rendering()  # arranges the panels, so that labels find their room
    for axes, measured, predicted in ((size, _size, _predicted_size), (time, _time, _predicted_time)):
        spots = [Spot(measured(line), _error(line), str(number)) for number, line in enumerate(lines)]
        foreseen = [(predicted(line), _error(line)) for line in lines]
        place_labels(axes, spots, [(x, y) for x, y in foreseen if x is not None])
    return finish(figure, path)


def description(board: Board) -> str:
    """The figure in words: accuracy, size and time of each line, and the front."""
    unit = byte_units()[1]
    each = "; ".join(
        say(
            en=f"{visible(line.method)}: {_percent(line.accuracy)}, {_size(line):.0f} {unit}, "
            f"{_number(line.latency_ratio, 2)} times the teacher's time",
            fr=f"{visible(line.method)} : {_percent(line.accuracy)}, {_size(line):.0f} {unit}, "
            f"{_number(line.latency_ratio, 2)} fois le temps du professeur",
        )
        for line in board.lines()
    )
    front = ", ".join(visible(line.method) for line in board.front())
    return say(
        en=f"Accuracy against size and time: {visible(board.title())}. {each}. On the front: {front}.",
        fr=f"Exactitude, taille et temps : {visible(board.title())}. {each}. Sur le front : {front}.",
    )


def panel_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (cost, error) pairs that no other one beats in both, from cheap to dear."""
    found: list[tuple[float, float]] = []
    for cost, error in sorted(points):
        if not found or error < found[-1][1]:
            found.append((cost, error))
    return found


def _panel(
    axes: Axes,
    lines: Sequence[Line],
    front: set[str],
    measured: Callable[[Line], float],
    predicted: Callable[[Line], float | None],
) -> None:
    for line in lines:
        color, marker = _look(line)
        x, y, foreseen = measured(line), _error(line), predicted(line)
        low, high = (max(1 - share, HELD_OUT_HALF) for share in (line.accuracy_high, line.accuracy_low))
        axes.plot([x, x], [low, high], color=color, linewidth=1, alpha=0.5, zorder=1)
        if foreseen is not None and line.method != TEACHER:
            axes.plot([foreseen, x], [y, y], color=color, linewidth=0.8, linestyle=":", zorder=1)
            axes.plot([foreseen], [y], marker=marker, markersize=9, markerfacecolor="none", markeredgecolor=color,
                      linestyle="", zorder=2)  # fmt: skip
        axes.plot([x], [y], color=color, marker=marker, markersize=9 if marker == "*" else 6, linestyle="", zorder=3)
        if line.method in front:
            axes.plot([x], [y], marker="o", markersize=14, markerfacecolor="none", markeredgecolor=BLACK,
                      markeredgewidth=1.1, linestyle="", zorder=2)  # fmt: skip
    best = panel_front([(measured(line), _error(line)) for line in lines])
    axes.step(*zip(*best, strict=True), where="post", color="#777777", linewidth=1, linestyle="--", zorder=0)
    _accuracies(axes, lines)


def _accuracies(axes: Axes, lines: Sequence[Line]) -> None:
    """Upright, the errors on a logarithmic axis, the fewest on top: what matters lies between 95 and 99%."""
    axes.set_yscale("log")
    errors = [max(1 - share, HELD_OUT_HALF) for line in lines for share in (line.accuracy_low, line.accuracy_high)]
    axes.set_ylim(max(errors) * 1.35, min(errors) / 1.35)
    inside = [[tick for tick in ticks if min(errors) / 1.35 <= 1 - tick <= max(errors) * 1.35]
              for ticks in (TICKS, FINE_TICKS)]  # fmt: skip
    shown = inside[0] if len(inside[0]) >= LEAST_TICKS else max(inside, key=len)
    axes.yaxis.set_major_locator(FixedLocator([1 - tick for tick in shown]))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda error, _: _percent(1 - error)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace(".", say(en=".", fr=","))))
    plain(axes)


def _sizes(axes: Axes, lines: Sequence[Line]) -> None:
    sizes = [_size(line) for line in lines]
    least, most = min(sizes) / 1.25, max(sizes) * 1.25
    ticks = [factor * 10**power for power in range(-1, 8) for factor in (1, 2, 5)]
    axes.set_xlim(least, most)
    axes.xaxis.set_major_locator(FixedLocator([tick for tick in ticks if least <= tick <= most]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace(".", say(en=".", fr=","))))


def _names(axes: Axes, board: Board, lines: Sequence[Line], front: set[str]) -> None:
    """Which number is which method; the ones on the front have their ring here too. Below, what the signs mean."""
    axes.set_axis_off()
    axes.set_xlim(0, 1)
    families = _families(lines)
    axes.set_ylim(len(lines) + len(families) + 2.2, -0.6)
    for number, line in enumerate(lines):
        color, marker = _look(line)
        axes.plot([0.16], [number], color=color, marker=marker, markersize=7, linestyle="", clip_on=False)
        if line.method in front:
            axes.plot([0.16], [number], marker="o", markersize=14, markerfacecolor="none", markeredgecolor=BLACK,
                      markeredgewidth=1.1, linestyle="", clip_on=False)  # fmt: skip
        axes.text(0.07, number, str(number), ha="right", va="center", fontsize=8.5)
        axes.text(0.25, number, _title(board, line), va="center", fontsize=8.5)
    below = len(lines) + 0.3
    for number, family in enumerate(families):
        color, marker = LOOKS.get(family, OTHER)
        axes.plot([0.16], [below + number], color=color, marker=marker, markersize=6, linestyle="", clip_on=False)
        axes.text(0.25, below + number, visible(family_title(family)), va="center", fontsize=8, color=QUIET)
    below += len(families)
    axes.plot([0.16], [below], marker="o", markersize=11, markerfacecolor="none", markeredgecolor=BLACK,
              markeredgewidth=1.1, linestyle="", clip_on=False)  # fmt: skip
    axes.text(0.25, below, say(en="on the front of all three", fr="sur le front des trois"), va="center",
              fontsize=8, color=QUIET)  # fmt: skip
    axes.plot([0.08, 0.21], [below + 1] * 2, color="#777777", linewidth=1, linestyle="--", clip_on=False)
    axes.text(0.25, below + 1, say(en="front of the panel", fr="front du panneau"), va="center", fontsize=8,
              color=QUIET)  # fmt: skip


def _families(lines: Sequence[Line]) -> list[str]:
    """Those that are there, the teacher's apart: its line names it."""
    return list(dict.fromkeys(line.family for line in lines if line.method != TEACHER))


def _title(board: Board, line: Line) -> str:
    if line.method != TEACHER:
        return visible(line.method)
    return say(en=f"teacher ({visible(board.teacher)})", fr=f"professeur ({visible(board.teacher)})")


def _look(line: Line) -> tuple[str, str]:
    return LOOKS.get(line.family, OTHER)


def _error(line: Line) -> float:
    return max(1 - line.accuracy, HELD_OUT_HALF)


def _size(line: Line) -> float:
    return line.file_bytes / KIBIBYTE


def _predicted_size(line: Line) -> float | None:
    return line.predicted_bytes / KIBIBYTE


def _time(line: Line) -> float:
    return line.latency_ratio


def _predicted_time(line: Line) -> float | None:
    return line.predicted_latency_ratio


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}".replace(".", say(en=".", fr=","))


def _percent(share: float) -> str:
    digits = 1 if abs(1000 * share - round(1000 * share)) < 0.01 and round(1000 * share) % 10 else 0
    if abs(100 * share - round(100 * share)) > 0.05:
        digits = 1
    return _number(100 * share, digits) + say(en="%", fr=" %")
