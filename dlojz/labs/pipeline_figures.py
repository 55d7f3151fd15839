"""Figures and tables of lab 05: schedules drawn, compared, capped, and laid out in one table.

Layer 6 (labs), on `dlojz.viz`. Invariant: what is drawn is what the student's own function gives or what the simulator
finds; an exercise that is still to do is answered by its sentence, not by an error.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from dlojz.labs.pipeline_answers import read_order, read_schedule, schedule_from
from dlojz.labs.verdict import NotDone, Verdict
from dlojz.pipeline.catalogue import build, entry
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.memory import peak_activations
from dlojz.pipeline.optimum import optimum
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.torch_csv import to_csv
from dlojz.pipeline.validity import check
from dlojz.schema import LabError
from dlojz.text import language, say
from dlojz.viz.canvas import LabFigure, finish, new_figure, plain
from dlojz.viz.markup import safe
from dlojz.viz.palette import BLACK, LINE_STYLES
from dlojz.viz.pipeline_figure import compare_figure, schedule_figure

COLOURS = 255
"""So many that no difference is seen, and a third of the bytes of true colours."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


def or_to_do(make: Callable[_P, _T]) -> Callable[_P, _T | Verdict]:
    """What a student's function gives, or the sentence of the exercise, as long as that is to do."""

    @wraps(make)
    def made(*args: _P.args, **kwargs: _P.kwargs) -> _T | Verdict:
        try:
            return make(*args, **kwargs)
        except NotDone as error:
            return Verdict("todo", str(error))

    return made


@dataclass(frozen=True, eq=False)
class Picture:
    """A figure in a notebook, in few colours: this lab shows many, and its file must stay small."""

    figure: LabFigure

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        from PIL import Image

        shown = self.figure._repr_mimebundle_()
        full, small = Image.open(io.BytesIO(shown["image/png"])).convert("RGB"), io.BytesIO()
        # Maximum coverage keeps colours that are rare, such as those of a small patch in a legend.
        few = full.quantize(COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        few.save(small, "png", optimize=True)
        return {**shown, "image/png": small.getvalue()}


def pictured(draw: Callable[_P, LabFigure]) -> Callable[_P, Picture | Verdict]:
    """`or_to_do` of a function that draws."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Picture:
        return Picture(draw(*args, **kwargs))

    return or_to_do(drawn)


@dataclass(frozen=True)
class Sheet:
    """A small table: text in a terminal, a table in a notebook; all of it is escaped there."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def __str__(self) -> str:
        lines = (self.head, *self.rows)
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.head))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )

    __repr__ = __str__

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{safe(cell)}</th>" for cell in self.head)
        rows = "".join(f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def plain_number(value: float, digits: int = 4) -> str:
    """A number as the reader's language writes it."""
    text = f"{value:.{digits}g}"
    return text.replace(".", ",") if language() == "fr" else text


def percent(value: float) -> str:
    """A share in per cent, with one decimal."""
    return say(en=f"{value:.1%}", fr=f"{value * 100:.1f} %".replace(".", ","))


def chunk_costs(schedule: Schedule, **changes: Any) -> Costs:
    """Costs with which a whole rank takes F = I = W = 1 for a micro-batch, over how many chunks its layers may be."""
    share = schedule.ranks * schedule.pipes / sum(len(pipe) for pipe in schedule.placement)
    times = {"forward": share, "backward_input": share, "backward_weight": share, "kept_for_input": share,
             "kept_for_weight": share}  # fmt: skip
    return Costs(**{**times, **changes})


@or_to_do
def bubbles(
    step: Callable[..., tuple[float, float, float]], names: Sequence[str], sizes: Sequence[tuple[int, int]]
) -> Sheet:
    """Length, fraction and overhead of the student's formulas, and those of the same schedules simulated."""
    rows = []
    for name in names:
        for ranks, micro_batches in sizes:
            timeline = simulate(build(name, ranks, micro_batches))
            found = timeline.makespan, timeline.bubble_fraction, timeline.bubble_overhead
            pairs = zip(step(ranks, micro_batches, 1, 2), found, (plain_number, percent, percent), strict=True)
            cells = (f"{write(mine)} | {write(simulated)}" for mine, simulated, write in pairs)
            rows.append((name, str(ranks), str(micro_batches), *cells))
    head = (
        say(en="formula | simulated", fr="formule | simulé"),
        "p",
        "m",
        say(en="step", fr="pas"),
        say(en="fraction", fr="fraction"),
        say(en="overhead", fr="surcoût"),
    )
    return Sheet(head, tuple(rows))


@pictured
def beside_gpipe(order: Callable[[int, int, int], Any], ranks: int, micro_batches: int) -> LabFigure:
    """GPipe above the student's order: the same length, another memory."""
    orders = [read_order(order(rank, ranks, micro_batches), rank) for rank in range(ranks)]
    return compare_figure(
        simulate(build("gpipe", ranks, micro_batches)),
        simulate(replace(schedule_from(orders, micro_batches), name="1f1b")),
    )


def deadlock_of(orders: Sequence[Sequence[str]], micro_batches: int, sends: str = "buffered") -> str:
    """What happens to an order: the cycle of actions that wait for each other, or how long the step takes.

    Args:
        orders: one list of actions per rank, one stage each.
        micro_batches: of the step.
        sends: as in `Costs`.
    """
    schedule = read_schedule(orders, len(orders), micro_batches)
    try:
        check(schedule)
        timeline = simulate(schedule, Costs(sends=sends))  # type: ignore[arg-type]
    except LabError as error:
        return str(error)
    return say(
        en=f"runs to its end in {timeline.makespan:g} time units; kept: ",
        fr=f"va jusqu’au bout en {plain_number(timeline.makespan)} unités de temps ; gardés : ",
    ) + ", ".join(plain_number(peak) for peak in peak_activations(schedule))


@pictured
def repaired(unblocked: Callable[[], Any], ranks: int, micro_batches: int) -> LabFigure:
    """The student's repair with blocking sends, under 1F1B whose sends and receives are posted together."""
    mine = _yours(unblocked(), ranks, micro_batches)
    return compare_figure(
        simulate(build("1f1b", ranks, micro_batches), Costs(sends="paired")),
        simulate(mine, Costs(sends="rendezvous")),
    )


@pictured
def capped(
    under_cap: Callable[[int, int, int], Any], ranks: int, micro_batches: int, limits: Sequence[int]
) -> LabFigure:
    """Length of the step by memory limit: the student's schedule, 1F1B cut short, GPipe's priority, the optimum."""
    mine = [simulate(read_schedule(under_cap(ranks, micro_batches, n), ranks, micro_batches)).makespan for n in limits]
    best = [optimum(ranks, micro_batches, memory_limit=n).value for n in limits]
    told = ", ".join(f"{n}: {plain_number(length)}" for n, length in zip(limits, mine, strict=True))
    figure = new_figure(
        7.0,
        3.4,
        alt=say(
            en=f"Length of the step by the micro-batches that a rank may keep: {told}.",
            fr=f"Durée du pas selon le nombre de micro-batches qu’un rang peut garder : {told}.",
        ),
    )
    axes = figure.subplots()
    lines = (
        (say(en="your schedule", fr="votre ordonnancement"), mine, LINE_STYLES[0]),
        (say(en="proven optimum", fr="optimum prouvé"), best, LINE_STYLES[1]),
    )
    for label, lengths, (color, line, marker) in lines:
        axes.plot(limits, lengths, color=color, linestyle=line, marker=marker, markersize=6, label=label)
    ideal = 3 * micro_batches
    axes.axhline(ideal, color=BLACK, linestyle=":", linewidth=1.2, label=say(en="work alone", fr="travail seul"))
    axes.set_ylim(0, None)
    axes.set_xticks(list(limits))
    axes.set_xlabel(say(en="micro-batches that a rank may keep", fr="micro-batches qu’un rang peut garder"))
    axes.set_ylabel(say(en="step (time units)", fr="pas (unités de temps)"))
    axes.legend(frameon=False)
    plain(axes)
    return finish(figure)


def all_schedules(names: Sequence[str], ranks: int, micro_batches: int, **options: dict[str, Any]) -> Sheet:
    """Schedules in one table, in units of one rank's forward of a micro-batch, whatever its chunks.

    Args:
        names: of the catalogue.
        ranks, micro_batches: their size.
        options: further options of `catalogue.build`, by name of the schedule (hyphens as underscores).
    """
    rows = []
    for name in names:
        schedule = build(name, ranks, micro_batches, **options.get(name.replace("-", "_"), {}))
        costs = chunk_costs(schedule)
        timeline = simulate(schedule, costs)
        graph = schedule.graph
        hops = sum(n < graph.actions and graph.rank[n] != graph.rank[i] for i, n in enumerate(graph.needs))
        hops += sum(bool(graph.rank[n] != graph.rank[i]) for i, n in graph.also)
        peaks = peak_activations(schedule, costs)
        rows.append(
            (
                name,
                plain_number(timeline.makespan),
                plain_number(timeline.span),
                percent(timeline.bubble_fraction),
                f"{plain_number(min(peaks))} – {plain_number(max(peaks))}" if len(set(peaks)) > 1
                else plain_number(peaks[0]),
                f"× {schedule.pipes}",
                str(int(hops)),
                entry(name).limits(),
            )
        )  # fmt: skip
    head = (
        say(en="schedule", fr="ordonnancement"),
        say(en="makespan", fr="durée"),
        say(en="span", fr="portée"),
        say(en="bubble", fr="bulle"),
        say(en="kept", fr="gardés"),
        say(en="weights", fr="poids"),
        "messages",
        say(en="price", fr="prix"),
    )
    return Sheet(head, tuple(rows))


def csv_of(orders: Callable[[], Any], ranks: int, micro_batches: int) -> str:
    """The student's schedule as torch's CSV; 1F1B's as long as the exercise is to do."""
    try:
        return to_csv(read_schedule(orders(), ranks, micro_batches))
    except NotDone:
        return to_csv(build("1f1b", ranks, micro_batches))


@pictured
def own(orders: Callable[[], Any], ranks: int, micro_batches: int) -> LabFigure:
    """1F1B above the student's schedule."""
    mine = _yours(orders(), ranks, micro_batches)
    return compare_figure(simulate(build("1f1b", ranks, micro_batches)), simulate(mine))


def _yours(given: Any, ranks: int, micro_batches: int) -> Schedule:
    schedule = read_schedule(given, ranks, micro_batches)
    return replace(schedule, name=say(en="your schedule", fr="votre ordonnancement"))


@pictured
def drawn(name: str, ranks: int, micro_batches: int, **look: Any) -> LabFigure:
    """One schedule of the catalogue, a rank taking F = I = W = 1 for a micro-batch."""
    schedule = build(name, ranks, micro_batches)
    return schedule_figure(simulate(schedule, chunk_costs(schedule)), **look)
