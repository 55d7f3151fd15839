"""A pipeline schedule in words: its figures, what each action is, what bounds it.

Layer 4. Invariant: makespan and span, bubble fraction and overhead are never called by another's name; a simulated time
has no unit ("time units") unless its costs were seconds, a measured one is in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dlojz.pipeline.action import KINDS, Action
from dlojz.pipeline.memory import memory_curves
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.timeline import Timeline
from dlojz.text import say
from dlojz.units import format_seconds
from dlojz.viz.markup import visible
from dlojz.viz.palette import action_label


def in_seconds(timeline: Timeline, seconds: bool | None = None) -> bool:
    """Whether the times are seconds: those of a measured timeline are, those of a simulation only if told so."""
    return timeline.origin == "measured" if seconds is None else seconds


def amount(value: float, seconds: bool = False) -> str:
    """A time or a number of units, at most four digits, with the decimal mark of the reader's language."""
    if seconds:
        return format_seconds(value)
    digits = f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return say(en=digits, fr=digits.replace(".", ","))


def share(part: float, signed: bool = False) -> str:
    """A share with one decimal, which bubbles are compared by."""
    digits = f"{100 * part:{'+' if signed else ''}.1f}".replace("-", "−")
    return say(en=digits, fr=digits.replace(".", ",")) + " %"


def title_of(schedule: Schedule) -> str:
    """Name and size of a schedule, on one line."""
    chunks = schedule.stages // schedule.ranks if schedule.pipes == 1 else 1
    more = say(en=f", {chunks} chunks per rank", fr=f", {chunks} étages par rang") if chunks > 1 else ""
    ranks, micro_batches = schedule.ranks, schedule.micro_batches
    many = f"micro-batch{'es' if micro_batches > 1 else ''}{more}"
    return say(
        en=f"{visible(schedule.name)}: {ranks} rank{'s' if ranks > 1 else ''}, {micro_batches} {many}",
        fr=f"{visible(schedule.name)} : {ranks} rang{'s' if ranks > 1 else ''}, {micro_batches} {many}",
    )


def unit_words(seconds: bool = False) -> str:
    """What follows a simulated time; nothing where `amount` has written seconds."""
    return "" if seconds else say(en=" time units", fr=" unités de temps")


def figures_sentence(timeline: Timeline, seconds: bool | None = None) -> str:
    """Makespan, bubble fraction and overhead, named; the span too where it differs."""
    inside = in_seconds(timeline, seconds)
    span = ""
    if timeline.span < timeline.makespan * (1 - 1e-9):
        span = say(en=f", span {amount(timeline.span, inside)}", fr=f", portée {amount(timeline.span, inside)}")
    return say(
        en=f"makespan {amount(timeline.makespan, inside)}{span}, bubble {share(timeline.bubble_fraction)} of the "
        f"time (fraction) = {share(timeline.bubble_overhead)} of the work (overhead)",
        fr=f"durée {amount(timeline.makespan, inside)}{span}, bulle {share(timeline.bubble_fraction)} du temps "
        f"(fraction) = {share(timeline.bubble_overhead)} du travail (surcoût)",
    )


def action_words(actions: Sequence[Action]) -> list[str]:
    """What each action does, in words; a drawing has many, so the language is asked for once."""
    stage, slice_word = say(en="stage", fr="étage"), say(en="slice", fr="tranche")
    upward = say(en=", second direction", fr=", second sens")
    kinds = {kind: action_label(kind) for kind in KINDS}

    def words(action: Action) -> str:
        if action.parts:
            return " + ".join(map(words, action.parts))
        part = f", {slice_word} {action.token_slice}" if action.token_slice else ""
        pipe = upward if action.pipe else ""
        return f"{kinds[action.kind]}, {stage} {action.stage}, micro-batch {action.micro_batch}{part}{pipe}"

    return [words(action) for action in actions]


def figure_lines(
    timeline: Timeline,
    lower_bound: float | None = None,
    optimum: float | None = None,
    seconds: bool | None = None,
) -> Iterator[tuple[str, str]]:
    """The figures of a schedule as (name, value), each under its own name, with what it means."""
    inside = in_seconds(timeline, seconds)
    unit = unit_words(inside)
    yield (
        say(en="makespan", fr="durée totale (makespan)"),
        amount(timeline.makespan, inside) + unit + say(en=", first start to last end", fr=", du début à la fin"),
    )
    yield (
        say(en="span", fr="portée (span)"),
        amount(timeline.span, inside)
        + unit
        + say(
            en=", longest of the ranks' own: an iteration without barrier",
            fr=", la plus longue d’un rang : une itération sans barrière",
        ),
    )
    yield (
        say(en="ideal", fr="durée idéale"),
        amount(timeline.ideal, inside) + unit + say(en=", all work shared out, no idle time", fr=", sans inactivité"),
    )
    yield (
        say(en="bubble fraction", fr="fraction de bulle"),
        share(timeline.bubble_fraction) + say(en=" (idle / all time)", fr=" (inactivité / temps total)"),
    )
    yield (
        say(en="bubble overhead", fr="surcoût de bulle"),
        share(timeline.bubble_overhead) + say(en=" (idle / work)", fr=" (inactivité / travail)"),
    )
    peaks = ", ".join(amount(curve.peak) for curve in memory_curves(timeline))
    yield (
        say(en="peak activations", fr="pic d’activations"),
        peaks + say(en=" (per rank, in stage-micro-batches)", fr=" (par rang, en micro-batches d’étage)"),
    )
    for name, value, meaning in (
        (
            say(en="lower bound", fr="borne inférieure"),
            lower_bound,
            say(en="no schedule with these stages is faster", fr="aucun ordonnancement de ces étages ne fait mieux"),
        ),
        (
            say(en="optimum", fr="optimum"),
            optimum,
            say(en="the fastest there is, proven", fr="le plus rapide possible, prouvé"),
        ),
    ):
        if value is not None:
            gap = timeline.makespan / value - 1 if value else 0.0
            here = say(en="reached", fr="atteint") if abs(gap) < 1e-9 else share(gap, signed=True)
            if gap <= -1e-9:  # only what breaks the limit can be faster
                here = say(en="for the memory limit, broken here", fr="pour la limite mémoire, dépassée ici")
            yield name, f"{amount(value, inside)}{unit}, {meaning} ({here})"
