"""Measured times of a collective over the line that α and β draw, and what that line says of more ranks.

Layer 4. Invariant: dots are measurements, lines are the model; the model's numbers come from the calibration.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from dlojz.collectives.calibration import Calibration
from dlojz.collectives.cost import crossover_bytes
from dlojz.collectives.words import format_bandwidth, format_latency
from dlojz.text import say
from dlojz.units import format_bytes
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import visible
from dlojz.viz.palette import BLACK, BLUE, VERMILION

PREDICTED_SIZES = (2, 8, 512)
RING, TREE = "ring_all_reduce", "tree_all_reduce"
PREDICTED_FROM_BYTES, PREDICTED_TO_BYTES = 2**10, 2**30
_DASHES = ("-", "--", ":")


def calibration_figure(calibration: Calibration, path: str | Path | None = None) -> LabFigure:
    """Draw a calibration: on the left what was measured and fitted, on the right ring and tree on 2, 8 and 512 ranks.

    Args:
        calibration: of `collectives.fit`.
        path: picture to write, if any.

    Raises:
        LabError: if the picture cannot be written.
    """
    figure = new_figure(12.0, 4.6, alt=description(calibration))
    left, right = figure.subplots(1, 2)
    _measured(left, calibration)
    _predicted(right, calibration)
    return finish(figure, path)


def summary(calibration: Calibration) -> str:
    """α, the bandwidth and the residual in one line."""
    alpha, bandwidth = format_latency(calibration.alpha_s), format_bandwidth(calibration.bandwidth_bytes_per_s)
    percent = f"{100 * calibration.residual:.0f}"
    return say(
        en=f"α = {alpha} per message, bandwidth 1/β = {bandwidth}, residual {percent}%",
        fr=f"α = {alpha} par message, débit 1/β = {bandwidth}, résidu {percent} %",
    )


def dominance(calibration: Calibration) -> str:
    """Up to which size of message latency takes the larger part; empty where the fit has no bandwidth."""
    if calibration.half_bytes is None:
        return ""
    size = format_bytes(calibration.half_bytes)
    return say(
        en=f"below {size}, latency takes more than half of the time",
        fr=f"au-dessous de {size}, la latence prend plus de la moitié du temps",
    )


def crossing(calibration: Calibration, size: int) -> str:
    """Where ring and tree take as long on so many ranks; empty where one is never slower."""
    at = crossover_bytes(
        RING, TREE, size, alpha_s=calibration.alpha_s, beta_s_per_byte=calibration.beta_s_per_byte or 0.0
    )
    if at is None:
        return ""
    return say(
        en=f"{size} ranks: the tree is faster below {format_bytes(at)}",
        fr=f"{size} rangs : l’arbre est plus rapide au-dessous de {format_bytes(at)}",
    )


def description(calibration: Calibration) -> str:
    """The figure in words."""
    points = ", ".join(
        f"{format_bytes(point.message_bytes)} {format_latency(point.time_s)}" for point in calibration.points
    )
    what = visible(calibration.collective)
    crossings = "; ".join(filter(None, (crossing(calibration, size) for size in PREDICTED_SIZES)))
    return say(
        en=f"Time of {what} on {calibration.size} ranks by size of the message: {points}. {summary(calibration)}. "
        f"{crossings}.",
        fr=f"Durée de {what} sur {calibration.size} rangs selon la taille du message : {points}. "
        f"{summary(calibration)}. {crossings}.",
    )


def _measured(axes: Axes, calibration: Calibration) -> None:
    sizes = [point.message_bytes for point in calibration.points]
    ends = _spread(min(sizes), max(sizes))
    axes.loglog(
        ends,
        [calibration.fitted_s(size) for size in ends],
        color=BLUE,
        label=say(en="fitted: α and β", fr="ajusté : α et β"),
    )
    axes.loglog(
        sizes,
        [point.time_s for point in calibration.points],
        color=BLACK,
        marker="o",
        linestyle="",
        label=say(en="measured", fr="mesuré"),
    )
    _label(axes)
    axes.set_title(
        say(
            en=f"{visible(calibration.collective)} on {calibration.size} ranks, here",
            fr=f"{visible(calibration.collective)} sur {calibration.size} rangs, ici",
        )
        + "\n"
        + summary(calibration)
        + (f"\n{words}" if (words := dominance(calibration)) else ""),
        loc="left",
        fontsize=9,
    )
    axes.legend(frameon=False, loc="upper left")


def _predicted(axes: Axes, calibration: Calibration) -> None:
    sizes = _spread(PREDICTED_FROM_BYTES, PREDICTED_TO_BYTES)
    looks = ((RING, VERMILION, say(en="ring", fr="anneau")), (TREE, BLUE, say(en="tree", fr="arbre")))
    for name, colour, title in looks:
        for ranks, dashes in zip(PREDICTED_SIZES, _DASHES, strict=True):
            times_s = [calibration.predict_s(size, ranks, name) for size in sizes]
            if min(times_s) <= 0:  # α = β = 0 has no place on a logarithmic axis
                continue
            axes.loglog(
                sizes,
                times_s,
                color=colour,
                linestyle=dashes,
                linewidth=1.4 if name == RING else 2.4,
                alpha=1 if name == RING else 0.75,
                label=say(en=f"{title}, {ranks} ranks", fr=f"{title}, {ranks} rangs"),
            )
    _label(axes)
    crossings = [words for size in PREDICTED_SIZES if (words := crossing(calibration, size))]
    axes.set_title(
        say(
            en="all-reduce predicted with these links, if all ranks had them",
            fr="all-reduce prédit avec ces liens, si tous les rangs les avaient",
        )
        + "".join(f"\n{words}" for words in crossings),
        loc="left",
        fontsize=9,
    )
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _spread(low: float, high: float, number: int = 60) -> list[float]:
    """Sizes evenly spaced on a logarithmic axis."""
    return [low * (high / low) ** (index / (number - 1)) for index in range(number)]


def _label(axes: Axes) -> None:
    """Powers in the units people use, instead of 10ⁿ."""
    plain(axes)
    low, high = axes.get_xlim()
    ticks = [4**power for power in range(1, 17) if low <= 4**power <= high]
    ticks = ticks[:: -(-len(ticks) // 8)] if ticks else ticks
    axes.set_xticks(ticks, [_short(format_bytes(tick)) for tick in ticks])
    low, high = axes.get_ylim()
    digits = (1, 2, 5) if high < 500 * low else (1,)
    ticks_s = [
        tick for power in range(-9, 6) for digit in digits if low <= (tick := round(digit * 10.0**power, 9)) <= high
    ]
    axes.set_yticks(ticks_s, [_short(format_latency(tick)) for tick in ticks_s])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(say(en="size of the message", fr="taille du message"))
    axes.set_ylabel(say(en="time", fr="durée"))


def _short(quantity: str) -> str:
    """A round quantity without its zeros: 4.00 KiB is 4 KiB."""
    number, _, unit = quantity.partition(" ")
    mark = say(en=".", fr=",")
    return f"{number.rstrip('0').rstrip(mark) if mark in number else number} {unit}"
