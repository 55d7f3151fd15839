"""Tables of `dlojz validate`, and the page that they make: goals, errors, the planner's regret, memory, every row.

The page is Markdown in English. What stands between two marks of it is written by the command and all else by hand, so
that a figure is never typed; the rows are a second page beside it.
"""

from __future__ import annotations

import errno
import math
import os
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from dlojz.base.language import decimal, integer, language, refusal, say, spaced_percent, use_language
from dlojz.base.table import Table, titles
from dlojz.cost_model.validation import (
    LEAST_LAYOUTS,
    TOOLS,
    FirstChoice,
    GoalResult,
    MemoryResult,
    Reading,
    RowResult,
    TableResult,
    first_choices,
    goals,
    interval,
)
from dlojz.hardware import cluster
from dlojz.hardware.evidence import Measurement, table


def goals_table(goal_results: Sequence[GoalResult]) -> Table:
    """List goals with what they come to today, and why one is missed."""
    head = titles(en="goal; wanted; now; ; behind it", fr="objectif; voulu; aujourd’hui; ; ce qu’il y a derrière")
    reached, missed = say(en="reached", fr="atteint"), say(en="MISSED", fr="MANQUÉ")
    rows = tuple(
        (
            goal.what,
            _wanted(goal),
            _figure(goal, goal.value),
            reached if goal.reached else missed,
            ". ".join(filter(None, (goal.detail, goal.reason))),
        )
        for goal in goal_results
    )
    number = sum(goal.reached for goal in goal_results)
    caption = say(
        en=f"Goals: {number} of {len(goal_results)} reached",
        fr=f"Objectifs : {number} sur {len(goal_results)} atteints",
    )
    return Table(head, rows, caption, align="lrrl")


def _figure(goal: GoalResult, value: float) -> str:
    return integer(value) if goal.counted else spaced_percent(value)


def _wanted(goal: GoalResult) -> str:
    # inf: no upper bound is wanted.
    lower, upper = _figure(goal, goal.least), "" if goal.most == float("inf") else _figure(goal, goal.most)
    if not upper:
        return f"≥ {lower}"
    if not goal.least:
        return f"≤ {upper}" if goal.most else upper
    return f"{lower.removesuffix(' %')} – {upper}"


def validation_table(results: Sequence[TableResult]) -> Table:
    """List the errors of all tables."""
    head = titles(
        en="table; rows; half; max; left out; max; constant; rank corr.; other tools",
        fr="tableau; lignes; moitié; max; écarté; max; constant; corr. rang; autres outils",
    )
    rows = tuple(
        (
            result.name,
            f"{len(result.held)}/{len(result.rows)}",
            spaced_percent(result.mean),
            spaced_percent(result.worst),
            spaced_percent(result.left_out_mean),
            spaced_percent(result.left_out_worst),
            spaced_percent(result.trivial),
            decimal(result.rank_correlation, 2),
            ", ".join(f"{tool.name} {spaced_percent(tool.mean or 0, None)}" for tool in result.tools),
        )
        for result in results
    )
    title = say(en="Seconds of a step: mean absolute error", fr="Durée d’un pas : erreur absolue moyenne")
    notes = (
        say(
            en="rows: held out of the fit / all; half: on those held out; left out: on all rows, by a fit that saw no "
            "row of the table nor of its software",
            fr="lignes : écartées de l’ajustement / toutes ; moitié : sur les premières ; écarté : sur toutes, par un "
            "ajustement qui n’a vu aucune ligne du tableau ni de son logiciel",
        ),
        say(
            en="constant: FLOP/s per GPU that are the same for all rows, from half of the table, on the other half; "
            "rank corr.: Spearman, of FLOP/s per GPU",
            fr="constant : FLOP/s par GPU égaux pour toutes les lignes, tirés d’une moitié du tableau, sur l’autre ; "
            "corr. rang : Spearman, des FLOP/s par GPU",
        ),
    )
    return Table(head, rows, title, align="lrrrrrrrl", whole=1, notes=notes)


def sources_table(results: Sequence[TableResult]) -> Table:
    """List where each table comes from and what ran there."""
    head = titles(en="table; source; cluster; GPUs; software", fr="tableau; source; machine; GPU; logiciel")
    rows = []
    for result in results:
        gpus = [row.row.gpus for row in result.rows]
        # Lowest and highest number of GPUs of the table's rows.
        between = integer(min(gpus)) + (f" – {integer(max(gpus))}" if max(gpus) > min(gpus) else "")
        engines = ", ".join(dict.fromkeys(row.row.engine for row in result.rows))
        clusters = ", ".join(dict.fromkeys(cluster(row.row.cluster).title for row in result.rows))
        rows.append((result.name, _sources(result.name), clusters, between, engines))
    return Table(head, tuple(rows), align="lllrl", whole=1)


def _sources(name: str) -> str:
    """The sources of a table's rows, each once, without the row."""
    return "; ".join(dict.fromkeys(row.source.rpartition(", ")[0] for row in table(name)))


def tools_table(results: Sequence[TableResult]) -> Table:
    """List what is known of other tools on the same rows."""
    head = titles(en="table; tool; error; found by", fr="tableau; outil; erreur; trouvé par")
    tools_of = {result.name: result.tools for result in results}
    rows = tuple(
        (name, tool.name, spaced_percent(tool.mean or 0, None), tool.note)
        for name in TOOLS
        # Tools of the table as it was validated now; without it, those that are stored.
        for tool in tools_of.get(name, TOOLS[name])
    )
    return Table(head, rows, align="llrl", whole=2)


def regret_table(results: Sequence[TableResult]) -> Table:
    """List what the planner's first choice loses, for each model with enough measured layouts."""
    head = titles(
        en="model; GPUs; batch; layouts; fastest predicted; fastest measured; regret; at random; rank corr.",
        fr="modèle; GPU; batch; configurations; la plus rapide prédite; la plus rapide mesurée; regret; au sort; "
        "corr. rang",
    )
    rows: list[tuple[str, ...]] = []
    for result in results:
        choices = first_choices(result)
        if not choices:
            continue
        regrets = [choice.regret for choice in choices]
        median_and_worst = f"{decimal(100 * statistics.median(regrets))}, {spaced_percent(max(regrets))}"
        correlation = decimal(statistics.fmean(choice.correlation for choice in choices), 2)
        rows.append((result.name,))
        rows += [_choice(choice) for choice in choices]
        words = say(en="median and worst, mean corr.", fr="médiane et pire, corr. moyenne")
        # Under the models of a table: its median and worst regret, its mean correlation.
        rows.append((words, *[""] * 5, median_and_worst, "", correlation))
    title = say(
        en="Regret of the planner's first choice, table left out",
        fr="Regret du premier choix du planificateur, tableau écarté",
    )
    notes = (
        say(
            en=f"of models with at least {LEAST_LAYOUTS} layouts measured on as many GPUs with one batch; regret: "
            "measured seconds of the layout predicted fastest over the least measured, less one; at random: of any "
            "layout, in the mean; layouts: dp·tp·pp·cp, micro-batch",
            fr=f"des modèles dont au moins {LEAST_LAYOUTS} configurations ont été mesurées sur autant de GPU avec un "
            "même batch ; regret : durée mesurée de la configuration prédite la plus rapide sur la moindre mesurée, "
            "moins un ; au sort : d’une configuration quelconque, en moyenne ; configurations : dp·tp·pp·cp, "
            "micro-batch",
        ),
    )
    return Table(head, tuple(rows), title, align="lrrrllr", notes=notes)


def _choice(choice: FirstChoice) -> tuple[str, ...]:
    row = choice.best.row
    billions = decimal(row.size.num_parameters / 1e9)
    return (
        say(en=f"{billions} B", fr=f"{billions} Md") + (f", {row.series}" if row.series else ""),
        integer(row.gpus),
        integer(row.global_batch),
        integer(choice.layouts),
        _layout(choice.chosen),
        _layout(choice.best),
        spaced_percent(choice.regret),
        spaced_percent(choice.random),
        decimal(choice.correlation, 2),
    )


def _degrees(row: Measurement) -> str:
    return f"{row.dp}·{row.tp}·{row.pp}·{row.cp}"


def _layout(row_result: RowResult) -> str:
    return f"{_degrees(row_result.row)}, {row_result.row.micro_batch}"


def memory_table(memory: MemoryResult) -> Table:
    """List how far the memory model is from what was read, from what ran and from what did not."""
    held_out, of_word = [reading for reading in memory.readings if reading.held_out], say(en="of", fr="sur")
    # Predicted over published bytes, less one.
    states = [predicted / published - 1 for _, published, predicted in memory.states]
    reserved = [reading.error for reading in memory.reserved]
    rows = [
        (
            say(en="Jean Zay, half held out", fr="Jean Zay, moitié mise de côté"),
            spaced_percent(memory.mean),
            f"{len(held_out)} {of_word} {len(memory.readings)}",
        ),
        (
            say(en="activations of Korthikanti et al.", fr="activations de Korthikanti et al."),
            spaced_percent(memory.activation_mean),
            str(len(memory.activations)),
        ),
        (
            say(
                en="model states of Korthikanti et al., who leave out the embedding",
                fr="états du modèle de Korthikanti et al., qui omettent l’embedding",
            ),
            _between(states),
            str(len(states)),
        ),
        (
            say(en="reserved by torchtitan's allocator", fr="réservé par l’allocateur de torchtitan"),
            _between(reserved),
            str(len(reserved)),
        ),
        (
            say(en="rows that ran out of memory, found", fr="lignes à court de mémoire, trouvées"),
            f"{len(memory.found)} {of_word} {len(memory.ran_out)}",
            "; ".join(_not_found(reading, memory.readings) for reading in memory.ran_out if not reading.too_much),
        ),
    ]
    table_rows: list[tuple[str, ...]] = [
        *rows,
        (say(en="runs that ran, and how many of them are refused", fr="ce qui a tourné, et combien en est refusé"),),
    ]
    # groupby needs neighbours: rows of one table stand together in `ran`.
    for name, group in groupby(memory.ran, key=lambda reading: reading.row.table):
        table_readings = list(group)
        # Of those that ran, the one that the model fills most; above 100 % it is refused.
        fullest = max(table_readings, key=lambda reading: reading.predicted_bytes / reading.capacity_bytes)
        share = spaced_percent(fullest.predicted_bytes / fullest.capacity_bytes, 0)
        refused = f"{sum(reading.too_much for reading in table_readings)} {of_word} {len(table_readings)}"
        table_rows.append((name, refused, say(en=f"fullest GPU {share}", fr=f"GPU le plus rempli {share}")))
    title = say(
        en="Memory of the fullest GPU: predicted against read", fr="Mémoire du GPU le plus rempli : prédite et relevée"
    )
    return Table(titles(en="what; figure; of", fr="quoi; chiffre; sur"), tuple(table_rows), title, align="lrl")


def _between(errors: Sequence[float]) -> str:
    low, high = (spaced_percent(value, 0, signed=True) for value in (min(errors), max(errors)))
    return say(en=f"{low} to {high}", fr=f"{low} à {high}")


def _not_found(missed: Reading, readings: Sequence[Reading]) -> str:
    """Say what was predicted of a row that ran out, and how many rows that ran need as much by the prediction."""
    count = sum(reading.predicted_bytes >= missed.predicted_bytes for reading in readings)
    name, gigabytes = missed.row.row, decimal(missed.predicted_bytes / 1e9)
    return say(
        en=f"not found: {name}, predicted at {gigabytes} GB; {count} rows that ran are predicted to need as much",
        fr=f"non trouvée : {name}, prédite à {gigabytes} Go ; {count} lignes qui ont tourné demandent autant selon le "
        "modèle",
    )


def interval_table(results: Sequence[TableResult]) -> Table:
    """List what is called "four in five": factors on a predicted time, and what they cover."""
    head = titles(
        en="GPU; tables; rows; measured over predicted; covered of a table left out",
        fr="GPU; tableaux; lignes; mesuré sur prédit; couvert d’un tableau écarté",
    )
    rows = []
    for profile in dict.fromkeys(result.profile for result in results):
        factors, number = interval(profile), sum(result.profile == profile for result in results)
        between = say(
            en=f"{decimal(factors.low, 2)} to {decimal(factors.high, 2)}",
            fr=f"{decimal(factors.low, 2)} à {decimal(factors.high, 2)}",
        )
        prefix = say(en="its own held-out half: ", fr="sa propre moitié mise de côté : ") if number == 1 else ""
        rows.append(
            (profile.upper(), str(number), str(factors.rows), between, prefix + spaced_percent(factors.coverage, 0))
        )
    return Table(head, tuple(rows), align="lrrr")


def rows_table(result: TableResult, *, seconds: bool = False) -> Table:
    """List every row of one table, with the error of each way of predicting it.

    Args:
        seconds: whether the seconds that the others predict stand before their errors.
    """
    tools = list(dict.fromkeys(figure.tool for row_result in result.rows for figure in row_result.row.published))
    head = titles(
        en="row; GPUs; dp·tp·pp·cp; micro-batch; measured s; predicted s; error; ",
        fr="ligne; GPU; dp·tp·pp·cp; micro-batch; mesuré s; prédit s; erreur; ",
    )
    other_columns = titles(en="left out; constant", fr="écarté; constant")
    error = say(en="error", fr="erreur")
    # With seconds each way of predicting takes two columns, else one.
    head += tuple(
        title for column in (*other_columns, *tools) for title in ((f"{column} s", error) if seconds else (column,))
    )
    fitted = say(en="fitted", fr="ajusté")
    rows = []
    for row_result in result.rows:
        published = {figure.tool: figure.step_s for figure in row_result.row.published}
        predicted = [row_result.left_out_s, row_result.trivial_s, *(published.get(tool) for tool in tools)]
        # Column by column as in the titles: the row, its layout, the measurement, then each prediction with its error.
        cells = [
            row_result.row.row.partition("/")[2],
            str(row_result.row.gpus),
            _degrees(row_result.row),
            str(row_result.row.micro_batch),
            decimal(row_result.measured_s, 2),
            *_against(row_result.predicted_s, row_result.measured_s, seconds=True),
            "" if row_result.held_out else fitted,
        ]
        for value in predicted:
            cells += _against(value, row_result.measured_s, seconds=seconds)
        rows.append(tuple(cells))
    return Table(head, tuple(rows), result.name, align="lrlr", whole=3)


def _against(predicted_s: float | None, measured_s: float, *, seconds: bool) -> list[str]:
    """Seconds if wanted, and their error; empty where nothing was published."""
    if predicted_s is None:
        return [""] * (1 + seconds)
    error = spaced_percent(predicted_s / measured_s - 1, signed=True)
    return [decimal(predicted_s, 2), error] if seconds else [error]


def readings_table(memory: MemoryResult) -> Table:
    """List every published reading of memory with its prediction, and the rows that ran out."""
    out_label, fitted = say(en="ran out", fr="à court"), say(en="fitted", fr="ajusté")
    head = titles(en="row; read GB; predicted GB; error; ", fr="ligne; relevé Go; prédit Go; erreur; ")
    readings = {reading.row.row: reading for reading in (*memory.readings, *memory.reserved, *memory.ran_out)}
    rows: list[tuple[str, ...]] = []
    for reading in readings.values():
        # Bytes to GB.
        predicted = decimal(reading.predicted_bytes / 1e9)
        # Readings have measured bytes; rows that ran out of memory have none.
        if reading.measured_bytes:
            error = spaced_percent(reading.error, signed=True)
            fit = fitted if reading.row.table == "jean-zay-a100" and not reading.held_out else ""
            rows.append((reading.row.row, decimal(reading.measured_bytes / 1e9), predicted, error, fit))
        else:
            capacity = decimal(reading.capacity_bytes / 1e9)
            rows.append((reading.row.row, out_label, predicted, say(en=f"of {capacity}", fr=f"sur {capacity}"), ""))
    for name, published, predicted_bytes in (*memory.states, *memory.activations):
        # Some of the activations are published relative to those without recomputation: below 10 it is no byte count.
        share = published < 10
        texts = [spaced_percent(value) if share else decimal(value / 1e9) for value in (published, predicted_bytes)]
        rows.append((name, *texts, spaced_percent(predicted_bytes / published - 1, signed=True), ""))
    return Table(head, tuple(rows), align="lrrrl")


MARK: Final = "<!-- dlojz validate: {} -->"
END: Final = "<!-- end -->"
_HEADINGS: Final = {
    "goals": "Goals",
    "tables": "Seconds of a step, table by table",
    "regret": "What the planner's first choice loses",
    "interval": "The interval called four in five",
    "memory": "Memory",
}
"""Blocks of the page, and the headings that a new one gets."""


@contextmanager
def _in_english() -> Iterator[None]:
    before = language()
    use_language("en")
    try:
        yield
    finally:
        use_language(before)


def blocks(results: Sequence[TableResult], memory: MemoryResult, rows: str) -> dict[str, str]:
    """Write each block of the page, by its name.

    Args:
        results: of all tables.
        rows: name of the page with the rows.
    """
    with _in_english():
        rows_link = f"Every row, with what each predicts: [{rows}]({rows})."
        tools = f"Other tools on the same rows:\n\n{_body(tools_table(results))}"
        sources = f"Where the tables come from:\n\n{_body(sources_table(results))}"
        return {
            "goals": _unbroken(goals_table(goals(results, memory))),
            "tables": f"{_body(validation_table(results))}\n\n{tools}\n\n{sources}\n\n{rows_link}",
            "regret": _body(regret_table(results)),
            "interval": _body(interval_table(results)),
            "memory": _body(memory_table(memory)),
        }


def _body(content: Table) -> str:
    """A table below a heading, which says what its caption does."""
    return _unbroken(replace(content, caption=""))


def _unbroken(content: Table) -> str:
    """A table in Markdown, in which a percent sign stays on the line of its number."""
    return content.markdown().replace(" %", "\u00a0%")


def filled(text: str, block_texts: dict[str, str], name: str) -> str:
    """Put blocks between their marks; all else stays.

    Args:
        text: the page; empty for a new one.
        block_texts: as `blocks` returns it.
        name: of the page, for a message.

    Raises:
        LabError: if the page has text, but not each mark once with its end.
    """
    if not text.strip():
        parts = [f"## {_HEADINGS[key]}\n\n{MARK.format(key)}\n{END}\n" for key in block_texts]
        text = "# The cost model, held against published measurements\n\n" + "\n".join(parts)
    for key, block in block_texts.items():
        mark = MARK.format(key)
        before, _, after = text.partition(mark)
        replaced, end, following_text = after.partition(END)
        # A missing end, or a mark of another block before it, would swallow text written by hand.
        if text.count(mark) != 1 or not end or "<!--" in replaced:
            raise refusal(
                en=f"{name} must hold the line {mark!r} once, and {END!r} after it, to say where {key!r} is written: "
                "add them, or name a file that does not exist.",
                fr=f"{name} doit contenir une fois la ligne {mark!r}, suivie de {END!r}, pour dire où écrire {key!r} : "
                "ajoutez-les, ou nommez un fichier qui n’existe pas.",
            )
        text = f"{before}{mark}\n\n{block}\n\n{END}{following_text}"
    return text


def rows_page(results: Sequence[TableResult], memory: MemoryResult, page: str) -> str:
    """Write the page of all rows.

    Args:
        page: name of the page that leads to it.
    """
    with _in_english():
        parts = [
            "# Every published row, and what is predicted for it\n\n"
            f"Written by the command that writes [{page}]({page}), which explains it; not to be edited.\n\n"
            "*Predicted*: by the shipped calibration, which *fitted* rows were fitted on. *Left out*: by a fit that "
            "saw no row of the table nor of its software. *Constant*: FLOP/s per GPU that are the same for all rows. "
            "Where another tool has published what it predicts for a row, that stands last.\n"
        ]
        for result in results:
            parts.append(
                f"## {result.name}\n\nSource: {_sources(result.name)}.\n\n{_body(rows_table(result, seconds=True))}\n"
            )
            parts += _unused(result)
        parts.append(f"## Readings of memory\n\n{_body(readings_table(memory))}\n")
        return "\n".join(parts)


def _unused(result: TableResult) -> Iterator[str]:
    """List rows that are published and not used, with the reason."""
    used_rows = {row_result.row.row for row_result in result.rows}
    # Published, but out of the validation: excluded by hand, out of memory, or without a time.
    unused_rows = [row for row in table(result.name) if row.row not in used_rows]
    if unused_rows:
        rows = tuple((row.row.partition("/")[2], row.excluded or _why_unused(row)) for row in unused_rows)
        yield f"Not compared:\n\n{Table(('row', 'why'), rows, align='l').markdown()}\n"


def _why_unused(row: Measurement) -> str:
    if row.outcome == "oom":
        return f"ran out of memory{f': {row.note}' if row.note else ''}"
    return row.series if row.seconds is not None else "prints no time"


def present_page(path: Path) -> str:
    """Read the page that is to be written, with nothing between its marks; a new one has headings alone.

    Args:
        path: of a Markdown file; its folder is made.

    Raises:
        LabError: if the page has another ending, has text without the marks, or cannot be read or written.
    """
    if path.suffix != ".md":
        raise refusal(
            en=f"the page is Markdown, but {path.name!r} was received: give it the ending .md.",
            fr=f"la page est en Markdown, mais {path.name!r} a été reçu : donnez-lui la terminaison .md.",
        )
    with _refusing_page(path):
        # All that would refuse the page at the end is asked now, before the errors are computed.
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        path.parent.mkdir(parents=True, exist_ok=True)
        for target in (path.parent, path, _rows_beside(path)):
            if target.exists() and not os.access(target, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return filled(text, dict.fromkeys(_HEADINGS, ""), path.name)


def _rows_beside(path: Path) -> Path:
    return path.with_name(f"{path.stem}_rows.md")


@contextmanager
def _refusing_page(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise refusal(
            en=f"the page {path} cannot be read and written: {error}; give another path.",
            fr=f"la page {path} ne peut pas être lue et écrite : {error} ; donnez un autre chemin.",
        ) from None


def write_page(path: Path, results: Sequence[TableResult], memory: MemoryResult) -> Path:
    """Write the page, and the one of its rows beside it.

    Args:
        path: of the page, a Markdown file; what stands outside its marks is kept.
        results: of all tables.

    Returns:
        The path of the page of the rows.

    Raises:
        LabError: as `present_page` does.
    """
    rows_path = _rows_beside(path)
    text = filled(present_page(path), blocks(results, memory, rows_path.name), path.name)
    with _refusing_page(path):
        rows_path.write_text(rows_page(results, memory, path.name), encoding="utf-8")
        path.write_text(text, encoding="utf-8")
    return rows_path


def validation_document(
    results: Sequence[TableResult], goal_results: Sequence[GoalResult], memory: MemoryResult | None, *, rows: bool
) -> dict[str, Any]:
    """Lay out what the tables show as plain values, for JSON.

    Args:
        goal_results: the goals.
        memory: None where single tables are asked for.
        rows: whether every row is shown.
    """
    documents: list[dict[str, Any]] = []
    for result in results:
        document = result.as_dict()
        document["first_choices"] = [
            {
                "chosen": choice.chosen.row.row,
                "best": choice.best.row.row,
                "layouts": choice.layouts,
                "regret": choice.regret,
                "random": choice.random,
                # JSON has no NaN.
                "rank_correlation": None if math.isnan(choice.correlation) else choice.correlation,
            }
            for choice in first_choices(result)
        ]
        if rows:
            document["each"] = [_row_document(row) for row in result.rows]
        documents.append(document)
    content: dict[str, Any] = {"goals": [goal.as_dict() for goal in goal_results], "tables": documents}
    if memory is not None:
        profiles = dict.fromkeys(result.profile for result in results)
        content["intervals"] = {profile: interval(profile)._asdict() for profile in profiles}
        content["memory"] = memory.as_dict()
    return content


def _row_document(row_result: RowResult) -> dict[str, Any]:
    return {
        "row": row_result.row.row,
        "measured_s": row_result.measured_s,
        "predicted_s": row_result.predicted_s,
        "error": row_result.error,
        "held_out": row_result.held_out,
        "left_out_s": row_result.left_out_s,
        "constant_s": row_result.trivial_s,
        "published": {figure.tool: figure.step_s for figure in row_result.row.published},
    }
