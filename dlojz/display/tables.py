"""Tables of runs and of cuts: a comparison in a terminal, HTML and Markdown, a footprint, stages of a partition.

A line of a comparison has one unit, in which its largest figure reads well; a figure that is not known is a dash. In a
terminal no figure is cut: where it is too narrow for all runs, the table goes on below.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import rich.table
from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from dlojz.base.language import Sentences, byte_units, decimal, format_bytes, format_count, gap_text, localized, say
from dlojz.base.table import Table, visible
from dlojz.display.style import category_label, label, needed_label, phase_label
from dlojz.results.footprint import CATEGORIES, Footprint, Memory

if TYPE_CHECKING:
    from dlojz.compare import Comparison, PredictedMeasured, RunRow, TrafficPair
    from dlojz.config.run_config import RunConfig
    from dlojz.pipeline.partition import BlockWeights, Partition

phrase = Sentences(Path(__file__).parent / "data" / "tables.md")

DASH = "—"
PREDICTED, MEASURED, WRONG = "cyan", "bold", "bold red"


class ComparisonCell(NamedTuple):
    """One quantity of one run as text; `equal` is None where predicted and measured need not be the same number."""

    measured: str
    predicted: str = ""
    equal: bool | None = None

    def text(self) -> str:
        """Write both figures; a sign marks unequal bytes."""
        if not self.predicted:
            return self.measured
        return f"{self.predicted} {'≠' if self.equal is False else '|'} {self.measured}"

    def styled(self) -> Text:
        """Write both figures for a terminal, narrower and coloured."""
        measured = (visible(self.measured), WRONG if self.equal is False else MEASURED)
        if not self.predicted:
            return Text.assemble(measured)
        return Text.assemble((self.predicted, PREDICTED), ("≠" if self.equal is False else "|", "dim"), measured)


class ComparisonLine(NamedTuple):
    """One quantity over all runs."""

    label: str
    cells: tuple[ComparisonCell, ...]


class Section(NamedTuple):
    """Lines under one heading."""

    heading: str
    lines: tuple[ComparisonLine, ...]


class ComparisonGrid(NamedTuple):
    """A comparison as text: a title per run, the sections, and notes on runs that did not go well."""

    titles: tuple[str, ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...]


def status_label(status: str) -> str:
    """Translate the status of a run."""
    return label("status", status)


def grid(comparison: Comparison, compact: bool = False) -> ComparisonGrid:
    """Lay a comparison out as text; lines that no run has a figure for are left out.

    Args:
        compact: fewer digits, for narrow terminals.
    """
    rows = comparison.rows
    speed = say(en="Speed (predicted: dp × one process)", fr="Vitesse (prédite : dp × un processus)")
    if any(row.model_ranks > 1 for row in rows):
        speed = phrase("speed of one process")
    if words := next((row.calibration for row in rows if row.calibration), ""):
        speed = say(en=f"Speed (predicted: this machine, {words})", fr=f"Vitesse (prédite : cette machine, {words})")
    loss = phrase("loss of one process")
    scripts = all(row.recognised for row in rows)
    if scripts:
        loss, speed = say(en="Loss", fr="Perte"), say(en="Speed", fr="Vitesse")
    memory = say(en="Memory of rank 0, largest of each", fr="Mémoire du rang 0, maximum de chacune")
    communication = say(en="Communication of rank 0, per step", fr="Communication du rang 0, par pas")
    sections = (
        Section(say(en="Run", fr="Exécution"), _run_lines(rows)),
        Section(loss, _loss_lines(rows, 2 if compact else 4)),
        Section(speed, _speed_lines(rows)),
        Section(memory, _memory_lines(rows)),
        Section(communication, _communication_lines(rows)),
        Section(
            say(en="Messages of the script’s own calls, counted", fr="Messages des appels propres au script, comptés"),
            tuple(_traffic_lines(rows, wrapper=False)),
        ),
    )
    return ComparisonGrid(
        titles=tuple(row.title + (f" ×{row.world_size}" if row.world_size > 1 else "") for row in rows),
        sections=tuple(_measured_alone(section) if scripts else section for section in sections if section.lines),
        notes=tuple(_notes(rows)),
    )


def _measured_alone(section: Section) -> Section:
    """Leave the dash of a prediction out that a script has never had."""

    def alone(cell: ComparisonCell) -> ComparisonCell:
        return cell._replace(predicted="") if cell.predicted == DASH else cell

    return Section(
        section.heading, tuple(ComparisonLine(line.label, tuple(map(alone, line.cells))) for line in section.lines)
    )


def _notes(rows: Sequence[RunRow]) -> Iterable[str]:
    for row in rows:
        if row.status not in ("completed", "running", "queued"):
            yield f"{row.title} ({row.run_id}): {status_label(row.status)}" + (f" — {row.reason}" if row.reason else "")
    for row in rows:
        if row.prediction_note and row.recognised:
            yield say(en=f"{row.title}: {row.prediction_note}", fr=f"{row.title} : {row.prediction_note}")
    for note in dict.fromkeys(row.prediction_note for row in rows if row.prediction_note and not row.recognised):
        yield say(en=f"not predicted: {note}", fr=f"non prédit : {note}")
    yield from dict.fromkeys(row.run_note for row in rows if row.run_note)
    for row in rows:
        for note in row.script_notes:
            yield say(en=f"{row.title}: {note}", fr=f"{row.title} : {note}")
    if len(rows) == 2 and all(row.recognised for row in rows):
        yield from _what_differs(*rows)


def _what_differs(first: RunRow, second: RunRow) -> Iterator[str]:
    """Write how far the peaks and the steps of two scripts lie apart, with the categories and phases that differ."""
    peaks = [row.memory_bytes["peak"].measured for row in (first, second)]
    # Bytes of each category in the two runs, 0 where nothing was measured.
    category_bytes = [{name: row.memory_bytes[name].measured or 0 for name in CATEGORIES} for row in (first, second)]
    changes = {
        name: category_bytes[1][name] - category_bytes[0][name]
        for name in CATEGORIES
        if category_bytes[1][name] != category_bytes[0][name]
    }
    if None not in peaks and changes:
        largest = sorted(changes.items(), key=lambda pair: -abs(pair[1]))
        parts = ", ".join(f"{category_label(name)} {_signed(change, format_bytes)}" for name, change in largest)
        before, after = map(format_bytes, peaks)
        yield phrase("peaks of two scripts", before=before, first=first, after=after, second=second, parts=parts)
    if first.step_s and second.step_s:
        # In the order of the first run; phases that only one run has cannot be compared.
        common = [name for name in first.phases_s if name in second.phases_s]
        parts = ", ".join(
            f"{phase_label(name)} {_signed(second.phases_s[name] - first.phases_s[name], _milliseconds)} ms"
            for name in common
        )
        before, after = _milliseconds(first.step_s), _milliseconds(second.step_s)
        yield phrase("steps of two scripts", before=before, first=first, after=after, second=second, parts=parts)


def _signed(change: float, write: Callable[[Any], str]) -> str:
    return ("+" if change > 0 else "−") + write(abs(change))


def _words(label: str, texts: Iterable[str]) -> ComparisonLine:
    return ComparisonLine(label, tuple(map(ComparisonCell, texts)))


def _run_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    lines = [
        _words(say(en="model", fr="modèle"), (row.model for row in rows)),
        _words(say(en="status", fr="état"), (status_label(row.status) for row in rows)),
        _words(say(en="steps", fr="pas"), map(_steps_text, rows)),
        _words("threads", (row.threads for row in rows)),
        _words(say(en="global batch", fr="batch global"), (str(row.global_batch or DASH) for row in rows)),
    ]
    lines = [line for line in lines if any(cell.measured for cell in line.cells)]
    # The model is said only where it differs.
    distinct_lines = lines if len({row.model for row in rows}) > 1 else lines[1:]
    return (*distinct_lines, *_recognised_lines(rows))


def _steps_text(row: RunRow) -> str:
    """Steps of a script, and whose they are; nothing of other runs, whose steps are asked for."""
    if row.steps is None:
        return ""
    parts = ", ".join(f"{name} {count}" for name, count in row.steps_of.items())
    return f"{row.steps} ({parts})" if parts else str(row.steps)


def _recognised_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    """What was recognised of scripts, where it differs; the wrapper in any case."""
    labels = {
        "wrapper": say(en="wrapped in", fr="enveloppé dans"),
        "optimizer": say(en="optimizer", fr="optimiseur"),
        "batch": say(en="batch of a rank", fr="batch d’un rang"),
        "autocast": "autocast",
        "backward passes": say(en="backward passes", fr="passes arrière"),
    }
    plain = say(en="nothing", fr="rien")
    texts_by_name = {name: [row.recognised.get(name, "") for row in rows] for name in labels}
    return _known(
        *(
            _words(label, (plain if text == "none" else text or DASH for text in texts_by_name[name]))
            for name, label in labels.items()
            if name == "wrapper" or len({*texts_by_name[name]}) > 1
        )
    )


def _loss_lines(rows: Sequence[RunRow], decimals: int) -> tuple[ComparisonLine, ...]:
    write = partial(decimal, digits=decimals)
    names = list(dict.fromkeys(name for row in rows for name in row.named_losses))
    if names:
        return tuple(
            _words(f"{name}, {when}" if name else when, (_named_loss(row, name, index, write) for row in rows))
            for name in names
            # 0 and −1: the first and the last loss of each name.
            for index, when in ((0, say(en="first", fr="première")), (-1, say(en="last", fr="dernière")))
        )
    return _known(
        _line(say(en="first", fr="première"), [row.first_loss for row in rows], write),
        _line(say(en="last", fr="dernière"), [row.last_loss for row in rows], write),
        _words(say(en="largest gap", fr="écart maximal"), (gap_text(row.loss_gap) for row in rows)),
    )


def _named_loss(row: RunRow, name: str, index: int, write: Callable[[float], str]) -> str:
    losses = row.named_losses.get(name)
    return write(losses[index]) if losses else DASH


def _speed_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    return _known(
        _line(say(en="samples/s", fr="échantillons/s"), [row.samples_per_s for row in rows], _three_digits),
        _words("tokens/s", (DASH if row.tokens_per_s is None else _three_digits(row.tokens_per_s) for row in rows)),
        _words(say(en="step, ms", fr="pas, ms"), (_milliseconds(row.step_s) for row in rows)),
        *_phase_lines(rows),
        _line(say(en="pipeline, ms", fr="pipeline, ms"), [row.pipeline_s for row in rows], _milliseconds),
        _line(
            say(en="bubble, %", fr="bulle, %"),
            [row.bubble_fraction for row in rows],
            lambda fraction: _three_digits(100 * fraction),
        ),
        _scaled("FLOP", [row.step_flops for row in rows], 1000, ("", "k", "M", "G", "T", "P")),
    )


def _phase_lines(rows: Sequence[RunRow]) -> Iterator[ComparisonLine]:
    """Phases of a step, where scripts are compared, and the share of the peak rate that they reach."""
    if not any(row.recognised for row in rows):
        return
    for name in dict.fromkeys(name for row in rows for name in row.phases_s):
        times = (_milliseconds(row.phases_s.get(name)) for row in rows)
        yield _words(f"    {phase_label(name)}, ms", times)
    yield _words("MFU, %", (DASH if row.mfu is None else _three_digits(100 * row.mfu) for row in rows))


def _memory_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    return _known(
        *(
            _scaled(category_label(name) + ",", [row.memory_bytes[name] for row in rows])
            for name in (*CATEGORIES, "peak")
            if any(row.memory_bytes[name].measured or row.memory_bytes[name].predicted for row in rows)
        )
    )


def _communication_lines(rows: Sequence[RunRow]) -> tuple[ComparisonLine, ...]:
    verdicts = {True: say(en="yes", fr="oui"), False: say(en="NO", fr="NON"), None: DASH}
    equal = tuple(ComparisonCell(verdicts[row.exact], equal=row.exact) for row in rows)
    return _known(
        *_traffic_lines(rows, wrapper=True),
        ComparisonLine(say(en="bytes equal", fr="octets égaux"), equal),
        _words(say(en="exposed, ms", fr="exposée, ms"), (_milliseconds(row.communication_exposed_s) for row in rows)),
        _words(say(en="hidden, ms", fr="recouverte, ms"), (_milliseconds(row.communication_hidden_s) for row in rows)),
    )


def _traffic_lines(rows: Sequence[RunRow], *, wrapper: bool) -> Iterator[ComparisonLine]:
    """Bytes and calls of each collective: of what wraps the models, or of the calls of scripts and of clipping."""
    from dlojz.compare import PredictedMeasured

    row_pairs = [[pair for pair in row.communication if (pair.origin == "wrapper") == wrapper] for row in rows]
    # (origin, collective, group) → pair, one dict per run; a run without that message has no key.
    by_name = [{(pair.origin, pair.collective, group_label(pair)): pair for pair in pairs} for pairs in row_pairs]
    names = list(dict.fromkeys(name for pairs in by_name for name in pairs))
    # All messages are of one group: its name is left out.
    one_group = len({group for _, _, group in names}) == 1
    for origin, collective, group in names:
        name = collective if one_group else f"{collective} {group}"
        if origin == "clipping":
            name = say(en=f"gradient clipping: {name}", fr=f"écrêtage des gradients : {name}")
        traffic = [pairs.get((origin, collective, group)) for pairs in by_name]
        message_bytes = [pair.message_bytes if pair else PredictedMeasured() for pair in traffic]
        if wrapper or any(pair.measured for pair in message_bytes):  # a barrier has no bytes
            yield _scaled(f"{name},", message_bytes, judged=True)
            name = ""
        # The calls stand below the bytes, under an empty name.
        calls = [pair.count if pair else PredictedMeasured() for pair in traffic]
        yield _line(f"{name or '   '} " + say(en="calls", fr="appels"), calls, "{:.0f}".format)


def group_label(traffic: TrafficPair) -> str:
    """Name the group of a message: its axis, or its size where the axis has no name."""
    size = traffic.group_size
    return traffic.group or say(en=f"group of {size} ranks", fr=f"groupe de {size} rangs")


def _line(
    label: str, pairs: Sequence[PredictedMeasured], write: Callable[[float], str], judged: bool = False
) -> ComparisonLine:
    def cell(pair: PredictedMeasured) -> ComparisonCell:
        if pair.predicted is None and pair.measured is None:
            return ComparisonCell(DASH)
        predicted, measured = (DASH if value is None else write(value) for value in (pair.predicted, pair.measured))
        return ComparisonCell(measured, predicted, pair.equal if judged else None)

    return ComparisonLine(label, tuple(map(cell, pairs)))


def _scaled(
    label: str, pairs: Sequence[PredictedMeasured], base: int = 1024, prefixes: Sequence[str] = (), judged: bool = False
) -> ComparisonLine:
    """A line in the largest unit in which its largest figure is at least 1, or in which unequal figures look so."""
    prefixes = prefixes or byte_units()
    # The prefix is that of the largest figure of the line, so that all its figures share a unit.
    largest = max((abs(v) for pair in pairs for v in (pair.predicted, pair.measured) if v is not None), default=0)
    power = max((n for n in range(len(prefixes)) if largest >= base**n), default=0)
    # Unequal bytes that would look equal in this unit: whole bytes instead.
    if judged and any(
        pair.equal is False and len({_three_digits((value or 0) / base**power) for value in pair.values}) == 1
        for pair in pairs
    ):
        power = 0
    joined = f"{label} {prefixes[power]}" if label.endswith(",") else f"{prefixes[power]}{label}"
    if not power and base == 1024:
        return _line(joined, pairs, "{:.0f}".format, judged)  # whole bytes
    return _line(joined, pairs, lambda value: _three_digits(value / base**power), judged)


def _three_digits(value: float) -> str:
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    digits = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.005 else "~0"
    return localized(digits)


def _milliseconds(duration_s: float | None) -> str:
    return DASH if duration_s is None else _three_digits(1e3 * duration_s)


def _known(*lines: ComparisonLine) -> tuple[ComparisonLine, ...]:
    # A line is shown if a cell of it has more than a dash.
    return tuple(line for line in lines if any({cell.predicted, cell.measured} - {"", DASH} for cell in line.cells))


class FittedComparison:
    """Comparison for a terminal: as many runs side by side as it has room for, the others below."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        content = grid(self.comparison)
        if sum(_widths(content)) > options.max_width:
            content = grid(self.comparison, compact=True)
        label_width, *widths = _widths(content)
        start = 0
        # As many runs as fit the width, at least one.
        while start < len(widths):
            stop = start + 1
            while stop < len(widths) and label_width + sum(widths[start : stop + 1]) <= options.max_width:
                stop += 1
            yield from _terminal_tables(content, range(start, stop))
            start = stop
        yield Text(say(en="each cell: predicted | measured", fr="chaque case : prédit | mesuré"), style="dim")
        for note in content.notes:
            yield Text(visible(note), style="yellow")


def _widths(content: ComparisonGrid) -> list[int]:
    """Characters of the column of labels and of each run's column, the space after it included."""
    lines = [line for section in content.sections for line in section.lines]
    columns = [
        # A title may break between words, so its longest word counts; a cell may not.
        max(*(len(word) for word in title.split()), *(len(line.cells[index].styled().plain) for line in lines)) + 1
        for index, title in enumerate(content.titles)
    ]
    return [max(len(line.label) for line in lines) + 1, *columns]


def _terminal_tables(content: ComparisonGrid, chosen: range) -> Iterator[rich.table.Table | Text]:
    """One table per section, all with the same columns; the titles stand above the first."""
    label_width, *widths = _widths(content)
    for number, section in enumerate(content.sections):
        table = rich.table.Table(box=None, padding=(0, 1, 0, 0), show_header=number == 0, header_style="bold")
        table.add_column("", width=label_width - 1, no_wrap=True)
        for index in chosen:
            title = Text(visible(content.titles[index]), justify="right")
            table.add_column(title, justify="right", width=widths[index] - 1, vertical="bottom", no_wrap=False)
        for line in section.lines:
            table.add_row(Text(visible(line.label)), *(line.cells[index].styled() for index in chosen))
        if number:
            yield Text(section.heading, style="italic")
        yield table


def _as_table(comparison: Comparison) -> Table:
    content = grid(comparison)
    rows: list[tuple[str, ...]] = []
    for section in content.sections:
        rows.append((section.heading,))
        rows += [(line.label, *(cell.text() for cell in line.cells)) for line in section.lines]
    caption = say(en="Each cell: predicted | measured", fr="Chaque case : prédit | mesuré")
    return Table(("", *content.titles), tuple(rows), caption, notes=content.notes)


def comparison_markdown(comparison: Comparison) -> str:
    """Write a comparison as a Markdown table."""
    return _as_table(comparison).markdown() + "\n"


def comparison_html(comparison: Comparison) -> str:
    """Write a comparison as an HTML table."""
    return _as_table(comparison)._repr_html_()


def footprint_table(config: RunConfig, footprint: Footprint) -> Table:
    """Lay one predicted footprint out, quantity by quantity."""
    memory = footprint.memory
    moment = f" ({phase_label(visible(memory.peak_moment))})" if memory.peak_moment else ""
    rows = [
        *(
            (category_label(name), format_bytes(memory.category(name)))
            for name in CATEGORIES
            if name != "script" or memory.script_bytes
        ),
        (say(en="model states together", fr="états du modèle, ensemble"), format_bytes(memory.states_bytes)),
        (category_label("peak") + moment, format_bytes(memory.peak_bytes)),
    ]
    if memory.device_bytes is not None and memory.needed_bytes:
        rows.append((needed_label(), format_bytes(memory.needed_bytes)))
    rows += beyond_peak(memory) + _traffic_rows(footprint)
    per_step = format_count(footprint.step_flops, "FLOP") + say(en="/step", fr="/pas")
    rows += [
        (say(en="parameters of the model", fr="paramètres du modèle"), format_count(footprint.parameters)),
        (say(en="computation", fr="calcul"), per_step),
    ]
    heading = phrase("predicted for a rank", config=config, footprint=footprint)
    return Table(("", ""), tuple(rows), heading)


def _traffic_rows(footprint: Footprint) -> list[tuple[str, str]]:
    """List what a rank hands to each collective, and how often."""
    rows = []
    for traffic in footprint.communication:
        calls = "" if traffic.count is None else say(en=f", calls: {traffic.count}", fr=f", appels : {traffic.count}")
        often = say(en="/step", fr="/pas")
        if traffic.every_steps > 1:
            often = say(en=f" every {traffic.every_steps} steps", fr=f" tous les {traffic.every_steps} pas")
        label = f"{traffic.collective} ({traffic.group} ×{traffic.group_size}{calls})"
        rows.append((label, format_bytes(traffic.message_bytes) + often))
    return rows


def messages_table(footprint: Footprint) -> Table:
    """Lay out the messages of a footprint: bytes of what is reduced or gathered, and calls."""
    heading = say(en=f"Messages of rank {footprint.rank}, predicted", fr=f"Messages du rang {footprint.rank}, prédits")
    return Table(("", ""), tuple(_traffic_rows(footprint)), heading)


def beyond_peak(memory: Memory) -> list[tuple[str, str]]:
    """List what a rank takes besides its peak, where it is known: reserved, seen by nvidia-smi, host memory, NVMe."""
    amounts = (
        (say(en="reserved by the allocator", fr="réservé par l’allocateur"), memory.reserved_bytes),
        (say(en="as nvidia-smi shows it", fr="vu par nvidia-smi"), memory.device_bytes),
        (say(en="in host memory (RAM)", fr="en mémoire hôte (RAM)"), memory.host_bytes),
        (say(en="on NVMe", fr="sur NVMe"), memory.nvme_bytes),
    )
    return [(label, format_bytes(num_bytes)) for label, num_bytes in amounts if num_bytes]


def cut_label(name: str) -> str:
    """Translate a method or a unit."""
    return label("cut", name)


def cut_headline(model: str, weighed: BlockWeights, stages: int) -> str:
    """Say what is cut, into how many stages, and what is balanced."""
    blocks, model = len(weighed.kinds), visible(model)
    return phrase("headline of a cut", model=model, blocks=blocks, stages=stages, weight=weighed.title())


def stages_table(cut: Partition, weighed: BlockWeights) -> Table:
    """List the stages: blocks, load, share of the mean, what the blocks are."""
    head = phrase.titles("columns of stages")
    rows = []
    mean = sum(cut.loads) / cut.num_stages
    for stage, (block_range, load) in enumerate(zip(cut.stages, cut.loads, strict=True)):
        # Neighbouring blocks of one kind are counted: "12 × encoder".
        kinds = ", ".join(
            kind if count == 1 else f"{count} × {kind}"
            for kind, count in ((kind, len(list(run))) for kind, run in groupby(weighed.kinds[block_range]))
        )
        heaviest = "◀" if load == cut.bottleneck else ""
        span = (
            f"{block_range.start}"
            if block_range.stop == block_range.start + 1
            else f"{block_range.start}–{block_range.stop - 1}"
        )
        ratio = decimal(load / mean if mean else 1.0, 2)
        rows.append((str(stage), span, weighed.text(load), ratio, heaviest, kinds))
    return Table(head, tuple(rows), align="lrrrl", whole=1)


def methods_table(cuts: Mapping[str, Partition], weighed: BlockWeights, micro_batches: int) -> Table:
    """List each method's bottleneck and step over those of the first, which is the optimum."""
    from dlojz.pipeline.partition import total_time  # what is listed of runs needs no schedules

    best = next(iter(cuts.values()))
    head = phrase.titles("columns of methods", micro_batches=micro_batches)
    shortest = total_time(best.loads, micro_batches)
    rows = tuple(
        (
            cut_label(name),
            weighed.text(cut.bottleneck),
            decimal(cut.bottleneck / best.bottleneck if best.bottleneck else 1.0, 2),
            decimal(cut.imbalance, 2),
            "× " + decimal(total_time(cut.loads, micro_batches) / shortest if shortest else 1.0, 2),
            " ".join(str(block_range.stop - block_range.start) for block_range in cut.stages),
        )
        for name, cut in cuts.items()
    )
    return Table(head, rows, align="lrrrrl", whole=1)


def cuts_legend(micro_batches: int) -> str:
    """Explain the signs of the two tables."""
    return phrase("legend of the cuts", micro_batches=micro_batches)


def units_table(imbalances: Mapping[str, Mapping[str, float]]) -> Table:
    """List the imbalance of the cut by each unit, in each unit."""
    units = next(iter(imbalances.values()))
    columns = (say(en=f"imbalance in {cut_label(unit)}", fr=f"déséquilibre en {cut_label(unit)}") for unit in units)
    rows = tuple(
        (cut_label(cut_unit), *(decimal(imbalance, 2) for imbalance in imbalance_by_unit.values()))
        for cut_unit, imbalance_by_unit in imbalances.items()
    )
    return Table((say(en="cut by", fr="découpage selon"), *columns), rows, whole=1)
