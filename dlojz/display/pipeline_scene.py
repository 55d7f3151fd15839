"""Scene of a pipeline schedule: bars, bands and marks before anybody draws them; its facts, sentences and tables.

The matplotlib figure and the SVG of the panel draw the same scene. A bar's hatch is its kind, whatever its colour says.
Makespan and span, bubble fraction and overhead are never called by another's name; a simulated time is in time units
unless its costs were seconds, a measured one is in seconds; loads carry the unit of the blocks' weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Literal, NamedTuple, TypedDict

from dlojz.base.errors import LabError
from dlojz.base.language import decimal, format_seconds, integer, percent, say, significant, spaced_percent
from dlojz.base.table import Table, visible
from dlojz.display.style import Style, action_label
from dlojz.pipeline.analysis import critical_path, gaps, lower_bound
from dlojz.pipeline.optimum.shortest_schedule import optimum
from dlojz.pipeline.partition import Partition, total_time
from dlojz.pipeline.schedule import KINDS, Action, Schedule
from dlojz.pipeline.simulator import UNIT_COSTS, Timeline, memory_curves
from dlojz.pipeline.stale_weights import version_of_action

if TYPE_CHECKING:
    from dlojz.pipeline.partition_baselines import BlockWeights, HowOften

MOST_TEXTS = 1500
"""Texts are drawn one by one; beyond these they cost more than they tell."""


class Bar(NamedTuple):
    """Action: its number in `schedule.actions`, where it lies, what is written in it, how it looks."""

    number: int
    row: int
    start: float
    end: float
    label: str
    short: str
    style: Style


class Steps(NamedTuple):
    """Memory of a rank: corners of its curve, and its peak."""

    times: list[float]
    units: list[float]
    peak: float


class Band(NamedTuple):
    """Stretch of one rank's time with a name: a cause of idleness, or a weight version."""

    row: int
    start: float
    end: float
    name: str


class BoundMark(NamedTuple):
    """Moment of a bound, for all ranks."""

    time: float
    words: str
    dashes: Literal[":", "--"]


class Lanes(NamedTuple):
    """Lanes of a rank of height 1, from its top: bars, version strip, memory; (top, height) each."""

    bars: tuple[float, float]
    strip: tuple[float, float] | None
    memory: tuple[float, float] | None


@dataclass(frozen=True)
class Scene:
    """Drawing without its medium.

    Attributes:
        title, subtitle, alt: texts, in the reader's language.
        rows: name of each row, from the top; one per rank, or two where a measured one lies below.
        width: length of the time axis, at least the makespan, in the unit of `time_label`.
        time_label: the axis, with its unit.
        lanes: of a row.
        bars, critical, idle, strip, memory, marks: what is drawn; `critical` are positions in `bars`.
        memory_top: the value at the top of a memory lane; `memory_limit` is drawn as a line if there is one.
        legend: what looks how.
        actions, versions: what the bars' numbers stand for: the schedule's actions, and their weight versions if any.
    """

    title: str
    subtitle: str
    alt: str
    rows: tuple[str, ...]
    width: float
    time_label: str
    lanes: Lanes
    bars: tuple[Bar, ...]
    critical: tuple[int, ...]
    idle: tuple[Band, ...]
    strip: tuple[Band, ...]
    memory: tuple[Steps, ...]
    memory_top: float
    memory_limit: float | None
    marks: tuple[BoundMark, ...]
    legend: tuple[tuple[Style, str], ...]
    actions: tuple[Action, ...]
    versions: tuple[int | None, ...]


def readable(scene: Scene, letters: float) -> list[tuple[Bar, str]]:
    """Choose what is written into the bars: labels, or micro-batches alone, or nothing.

    Args:
        scene: what is drawn.
        letters: how many fit into the whole time axis.
    """
    if not scene.bars or len(scene.bars) > MOST_TEXTS:
        return []
    per_unit = letters / scene.width
    written = []
    for bar in scene.bars:
        room = (bar.end - bar.start) * per_unit
        text = next((text for text in (bar.label, bar.short) if text and len(text) + 0.3 <= room), "")
        if text:
            written.append((bar, text))
    return written if len(written) * 2 > len(scene.bars) else []  # a few numbers here and there only confuse


def framed(scene: Scene) -> list[Band]:
    """Frame the critical path: neighbouring actions of a rank share a frame, in order of time."""
    frames: list[Band] = []
    for bar in (scene.bars[number] for number in scene.critical):
        last = frames[-1] if frames else None
        if last and last.row == bar.row and bar.start - last.end <= 1e-9 * scene.width:
            frames[-1] = last._replace(end=bar.end)
        else:
            frames.append(Band(bar.row, bar.start, bar.end, ""))
    return frames


class Facts(TypedDict, total=False):
    """Keyword arguments of `scene_of`; what is left out is not drawn."""

    critical: tuple[int, ...]
    idle: tuple[Band, ...]
    versions: tuple[int | None, ...]
    lower_bound: float | None
    optimum: float | None


MOST_RANKS, MOST_MICRO_BATCHES = 4, 8
"""Up to here the proven optimum is looked up; beyond, a solver needs longer than a drawing may take."""


def facts_of(
    timeline: Timeline,
    *,
    critical: bool = True,
    idle: bool = False,
    bounds: bool = True,
    memory_limit: float | None = None,
) -> Facts:
    """Ask `dlojz.pipeline` for all that `scene_of` can draw besides the times.

    Args:
        timeline: simulated or measured.
        critical: find the critical path.
        idle: find the causes of idle time.
        bounds: the lower bound, and the optimum where it is stored; both need costs, so a measured timeline has none.
        memory_limit: that of the optimum, in stage-micro-batches.
    """
    facts = Facts()
    if critical:
        facts["critical"] = critical_path(timeline)
    if idle:
        facts["idle"] = tuple(Band(gap.rank, gap.start, gap.end, gap.cause) for gap in gaps(timeline))
    if timeline.schedule.asynchronous:
        facts["versions"] = version_of_action(timeline.schedule)
    if bounds and timeline.costs is not None:
        facts["lower_bound"] = lower_bound(timeline.schedule, timeline.costs)
        facts["optimum"] = known_optimum(timeline, memory_limit)
    return facts


def known_optimum(timeline: Timeline, memory_limit: float | None = None) -> float | None:
    """Look up the proven shortest makespan of the same stages and micro-batches in the stored table.

    Args:
        timeline: simulated; other costs than F = I = W = 1 have no entry.
        memory_limit: activations that a rank may keep, in stage-micro-batches.
    """
    schedule = timeline.schedule
    ordinary = (
        schedule.placement == (tuple(range(schedule.ranks)),)
        and schedule.token_slices == 1
        and not (schedule.asynchronous or schedule.overlaps)
    )
    small = schedule.ranks <= MOST_RANKS and schedule.micro_batches <= MOST_MICRO_BATCHES
    if not (ordinary and small and timeline.costs == UNIT_COSTS):
        return None
    try:
        found = optimum(
            schedule.ranks,
            schedule.micro_batches,
            split=schedule.splits_backward,
            memory_limit=memory_limit,
            time_limit_s=1.0,
        )
    except LabError:  # no schedule within the limit, or no solver: there is nothing to draw
        return None
    return found.value if found.proven else None


def in_seconds(timeline: Timeline, seconds: bool | None = None) -> bool:
    """Tell whether times are seconds: a measured timeline's are, a simulation's only on request."""
    return timeline.origin == "measured" if seconds is None else seconds


def amount(value: float, seconds: bool = False) -> str:
    """Write a time or a number of units with at most four digits."""
    if seconds:
        return format_seconds(value)
    return significant(value, 4) if abs(value) < 1e4 else f"{value:.0f}"


def title_of(schedule: Schedule) -> str:
    """Name a schedule and its size."""
    chunks = schedule.stages // schedule.ranks if schedule.pipes == 1 else 1
    more = say(en=f", {chunks} chunks per rank", fr=f", {chunks} étages par rang") if chunks > 1 else ""
    ranks, micro_batches = schedule.ranks, schedule.micro_batches
    many = f"micro-batch{'es' if micro_batches > 1 else ''}{more}"
    return say(
        en=f"{visible(schedule.name)}: {ranks} rank{'s' if ranks > 1 else ''}, {micro_batches} {many}",
        fr=f"{visible(schedule.name)} : {ranks} rang{'s' if ranks > 1 else ''}, {micro_batches} {many}",
    )


def unit_words(seconds: bool = False) -> str:
    """Write the unit of a simulated time; nothing where `amount` has written seconds."""
    return "" if seconds else say(en=" time units", fr=" unités de temps")


def figures_sentence(timeline: Timeline, seconds: bool | None = None) -> str:
    """Say makespan, bubble fraction and overhead; the span too where it differs."""
    inside = in_seconds(timeline, seconds)
    span = ""
    if timeline.span < timeline.makespan * (1 - 1e-9):
        span = say(en=f", span {amount(timeline.span, inside)}", fr=f", portée {amount(timeline.span, inside)}")
    return say(
        en=f"makespan {amount(timeline.makespan, inside)}{span}, bubble {spaced_percent(timeline.bubble_fraction)} of "
        f"the time (fraction) = {spaced_percent(timeline.bubble_overhead)} of the work (overhead)",
        fr=f"durée {amount(timeline.makespan, inside)}{span}, bulle {spaced_percent(timeline.bubble_fraction)} du "
        f"temps (fraction) = {spaced_percent(timeline.bubble_overhead)} du travail (surcoût)",
    )


def action_words(actions: Sequence[Action]) -> list[str]:
    """Say what each action does."""
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
    """List the figures of a schedule as (name, value and meaning)."""
    inside = in_seconds(timeline, seconds)
    unit = unit_words(inside)
    whole = say(en=", first start to last end", fr=", du début à la fin")
    yield say(en="makespan", fr="durée totale (makespan)"), amount(timeline.makespan, inside) + unit + whole
    longest = say(
        en=", longest of the ranks' own: an iteration without barrier",
        fr=", la plus longue d’un rang : une itération sans barrière",
    )
    yield say(en="span", fr="portée (span)"), amount(timeline.span, inside) + unit + longest
    spread = say(en=", work spread evenly, no idle time", fr=", sans inactivité")
    yield say(en="ideal", fr="durée idéale"), amount(timeline.ideal, inside) + unit + spread
    of_time = say(en=" (idle / all time)", fr=" (inactivité / temps total)")
    yield say(en="bubble fraction", fr="fraction de bulle"), spaced_percent(timeline.bubble_fraction) + of_time
    of_work = say(en=" (idle / work)", fr=" (inactivité / travail)")
    yield say(en="bubble overhead", fr="surcoût de bulle"), spaced_percent(timeline.bubble_overhead) + of_work
    peaks = ", ".join(amount(curve.peak) for curve in memory_curves(timeline))
    per_rank = say(en=" (per rank, in stage-micro-batches)", fr=" (par rang, en micro-batches d’étage)")
    yield say(en="peak activations", fr="pic d’activations"), peaks + per_rank
    least = say(en="no schedule with these stages is faster", fr="aucun ordonnancement de ces étages ne fait mieux")
    proven = say(en="the fastest there is, proven", fr="le plus rapide possible, prouvé")
    bounds = ((say(en="lower bound", fr="borne inférieure"), lower_bound, least), ("optimum", optimum, proven))
    for name, value, meaning in bounds:
        if value is not None:
            gap = timeline.makespan / value - 1 if value else 0.0
            here = say(en="reached", fr="atteint") if abs(gap) < 1e-9 else spaced_percent(gap, signed=True)
            if gap <= -1e-9:  # only what breaks the limit can be faster
                here = say(en="for the memory limit, broken here", fr="pour la limite mémoire, dépassée ici")
            yield name, f"{amount(value, inside)}{unit}, {meaning} ({here})"


def title(name: str) -> str:
    """Translate a method or a unit."""
    return {
        "deepspeed": "DeepSpeed",
        "uniform": say(en="uniform", fr="uniforme"),
        "parameters": say(en="parameters", fr="paramètres"),
        "flops": "FLOPs",
        "time": say(en="time", fr="temps"),
    }.get(name, name)


def headline(model: str, weighed: BlockWeights, stages: int) -> str:
    """Say what is cut, into how many stages, and what is balanced."""
    blocks, model = len(weighed.kinds), visible(model)
    return say(
        en=f"{model}: {blocks} blocks, number of stages: {stages}, balanced by: {weighed.title()}",
        fr=f"{model} : {blocks} blocs, nombre d’étages : {stages}, équilibrés selon : {weighed.title()}",
    )


def stages_table(cut: Partition, weighed: BlockWeights) -> Table:
    """List the stages: blocks, load, share of the mean, what the blocks are."""
    head = (
        say(en="stage", fr="étage"),
        say(en="blocks", fr="blocs"),
        say(en="load", fr="charge"),
        say(en="÷ mean", fr="÷ moyenne"),
        "",
        say(en="what they are", fr="ce qu’ils sont"),
    )
    rows = []
    mean = sum(cut.loads) / cut.num_stages
    for stage, (own, load) in enumerate(zip(cut.stages, cut.loads, strict=True)):
        kinds = ", ".join(
            kind if count == 1 else f"{count} × {kind}"
            for kind, count in ((kind, len(list(run))) for kind, run in groupby(weighed.kinds[own]))
        )
        heaviest = "◀" if load == cut.bottleneck else ""
        span = f"{own.start}" if own.stop == own.start + 1 else f"{own.start}–{own.stop - 1}"
        ratio = decimal(load / mean if mean else 1.0, 2)
        rows.append((str(stage), span, weighed.text(load), ratio, heaviest, kinds))
    return Table(head, tuple(rows), align="lrrrl", whole=1)


def methods_table(cuts: Mapping[str, Partition], weighed: BlockWeights, micro_batches: int) -> Table:
    """List each method's bottleneck and step over those of the first, which is the optimum."""
    best = next(iter(cuts.values()))
    head = (
        say(en="method", fr="méthode"),
        say(en="bottleneck", fr="goulot"),
        say(en="÷ optimum", fr="÷ optimum"),
        say(en="imbalance", fr="déséquilibre"),
        say(en=f"step, m={micro_batches}", fr=f"pas, m={micro_batches}"),
        say(en="blocks per stage", fr="blocs par étage"),
    )
    shortest = total_time(best.loads, micro_batches)
    rows = tuple(
        (
            title(name),
            weighed.text(cut.bottleneck),
            decimal(cut.bottleneck / best.bottleneck if best.bottleneck else 1.0, 2),
            decimal(cut.imbalance, 2),
            "× " + decimal(total_time(cut.loads, micro_batches) / shortest if shortest else 1.0, 2),
            " ".join(str(own.stop - own.start) for own in cut.stages),
        )
        for name, cut in cuts.items()
    )
    return Table(head, rows, align="lrrrrl", whole=1)


def legend(micro_batches: int) -> str:
    """Explain the signs of the two tables."""
    return say(
        en=f"◀ bottleneck; step: Σ tᵢ + (m − 1) max tᵢ for {micro_batches} micro-batches, against the exact cut's",
        fr=f"◀ goulot ; pas : Σ tᵢ + (m − 1) max tᵢ pour {micro_batches} micro-batches, rapporté au découpage exact",
    )


def units_table(imbalances: Mapping[str, Mapping[str, float]]) -> Table:
    """List the imbalance of the cut by each unit, in each unit."""
    units = next(iter(imbalances.values()))
    columns = (say(en=f"imbalance in {title(unit)}", fr=f"déséquilibre en {title(unit)}") for unit in units)
    rows = tuple((title(by), *(decimal(one, 2) for one in found.values())) for by, found in imbalances.items())
    return Table((say(en="cut by", fr="découpage selon"), *columns), rows, whole=1)


def counts_table(counts: Iterable[HowOften]) -> Table:
    """List how often each tool misses the optimum over random cases, and its worst one."""
    counts = list(counts)
    cases = counts[0].cases
    head = (
        say(en=f"over {integer(cases)} random cases", fr=f"sur {integer(cases)} cas aléatoires"),
        say(en="not optimal", fr="non optimal"),
        say(en="worst ÷ optimum", fr="pire ÷ optimum"),
        say(en="worst case", fr="pire cas"),
    )
    rows = []
    for each in counts:
        stages = say(en=f"{each.worst_stages} stages", fr=f"{each.worst_stages} étages")
        worst = f"[{','.join(map(str, each.worst_weights))}], {stages}" if each.missed else ""
        rows.append((title(each.peer), percent(each.missed_share), decimal(each.worst_ratio, 2), worst))
    return Table(head, tuple(rows), align="lrrl", whole=1)
