"""Lottery tickets beside each other: accuracy by the weights that are left, every seed drawn.

Layer 4. Invariant: nothing is computed here but medians over the seeds; a kind of ticket has one colour and one marker.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from dlojz.compress.lottery import KINDS, Kind, Ticket
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.palette import BLUE, GREEN, ORANGE, PURPLE

_LOOKS = {
    "iterative": (BLUE, "-", "o"),
    "one_shot": (GREEN, "-.", "^"),
    "new_weights": (ORANGE, "--", "s"),
    "new_mask": (PURPLE, ":", "D"),
}


def ticket_label(kind: Kind) -> str:
    """A kind of ticket in the reader's language."""
    return {
        "iterative": say(en="winning ticket (rounds, rewound)", fr="ticket gagnant (en plusieurs tours, rembobiné)"),
        "one_shot": say(en="pruned at once, rewound", fr="élagué d’un coup, rembobiné"),
        "new_weights": say(en="the winner’s mask, other weights", fr="masque du gagnant, autres poids"),
        "new_mask": say(en="the winner’s weights, random mask", fr="poids du gagnant, masque au hasard"),
    }[kind]


def lottery_figure(tickets: Sequence[Ticket], path: str | Path | None = None) -> LabFigure:
    """Draw accuracy against the share of the weights that are left: a mark for each seed, a line for the medians.

    Args:
        tickets: of one seed or of several, the dense network among them (see `dlojz.compress.lottery.run_race`).
        path: picture to write, if any.

    Raises:
        LabError: without a ticket; if the picture cannot be written.
    """
    if not tickets:
        raise LabError(
            say(
                en="a figure of lottery tickets needs at least one, but none was received.",
                fr="une figure de tickets de loterie en demande au moins un, mais aucun n’a été reçu.",
            )
        )
    figure = new_figure(9.0, 4.6, alt=description(tickets))
    axes = figure.subplots()
    seeds = len({one.seed for one in tickets})
    for place, kind in enumerate(KINDS):
        _kind(axes, kind, place, [one for one in tickets if one.kind == kind])
    _dense(axes, tickets)
    levels = sorted({_left(one) for one in tickets})
    axes.set_xscale("log")
    axes.set_xlim(1.25 * levels[-1], levels[0] / 1.25)
    axes.xaxis.set_major_locator(FixedLocator(levels))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _percent(value)))
    plain(axes)
    axes.set_xlabel(say(en="weights left, of those that are pruned", fr="poids restants, parmi ceux qu’on élague"))
    axes.set_ylabel(say(en="accuracy, held-out images", fr="exactitude, images de test"))
    axes.set_title(
        say(en=f"Lottery tickets: {seeds} seed(s), medians", fr=f"Tickets de loterie : {seeds} graine(s), médianes"),
        loc="left",
        fontsize=10,
        fontweight="bold",
    )
    axes.legend(frameon=False, fontsize=8, loc="lower left", handlelength=3.5)
    return finish(figure, path)


def description(tickets: Sequence[Ticket]) -> str:
    """The figure in words: the median of each kind at each sparsity."""
    told = [
        f"{ticket_label(kind)}, {_percent(left)} : {_percent(median)}".replace(" :", say(en=":", fr=" :"))
        for kind in KINDS
        for left, median in _medians([one for one in tickets if one.kind == kind])
    ]
    return say(en="Accuracy by weights left. ", fr="Exactitude selon les poids restants. ") + "; ".join(told) + "."


def _left(one: Ticket) -> float:
    return round(1 - one.sparsity, 4)


def _medians(tickets: Sequence[Ticket]) -> list[tuple[float, float]]:
    return [
        (left, statistics.median(one.accuracy for one in tickets if _left(one) == left))
        for left in sorted({_left(one) for one in tickets}, reverse=True)
    ]


def _kind(axes: Axes, kind: Kind, place: int, tickets: Sequence[Ticket]) -> None:
    if not tickets:
        return
    color, dashes, marker = _LOOKS[kind]
    beside = 1.0 + 0.03 * (place - 1.5)  # side by side: marks of several kinds would hide each other
    axes.plot([_left(one) * beside for one in tickets], [one.accuracy for one in tickets], color=color, marker=marker,
              linestyle="", markersize=4, alpha=0.5, markerfacecolor="none")  # fmt: skip
    lefts, medians = zip(*_medians(tickets), strict=True)
    axes.plot([left * beside for left in lefts], medians, color=color, linestyle=dashes, marker=marker, markersize=7,
              linewidth=2, label=ticket_label(kind))  # fmt: skip


def _dense(axes: Axes, tickets: Sequence[Ticket]) -> None:
    dense = [one.accuracy for one in tickets if one.sparsity == 0]
    if dense:
        axes.axhline(statistics.median(dense), color="#444444", linewidth=0.9)
        axes.annotate(say(en="dense", fr="dense"), (1.0, statistics.median(dense)), xycoords=("axes fraction", "data"),
                      xytext=(-4, 3), textcoords="offset points", ha="right", fontsize=8, color="#444444")  # fmt: skip


def _percent(share: float) -> str:
    number = f"{100 * share:.3g}"
    return say(en=f"{number} %", fr=f"{number.replace('.', ',')} %")
