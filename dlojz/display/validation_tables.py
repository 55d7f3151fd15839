"""Tables of `dlojz validate`: errors, the planner's regret, memory, every row."""

import math
import statistics
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dlojz.base.language import Sentences, decimal, integer, say, spaced_percent
from dlojz.base.table import Table, titles
from dlojz.cost_model.validation import (
    LEAST_LAYOUTS,
    FirstChoice,
    MemoryResult,
    Reading,
    RowResult,
    TableResult,
    first_choices,
    interval,
)
from dlojz.hardware.evidence import Measurement

phrase = Sentences(Path(__file__).parent / "data" / "validation_tables.md")


def validation_table(results: Sequence[TableResult]) -> Table:
    """List the errors of all tables."""
    head = phrase.titles("columns of errors")
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
    notes = (phrase("rows and halves"), phrase("constant and rank correlation"))
    return Table(head, rows, title, align="lrrrrrrrl", whole=1, notes=notes)


def regret_table(results: Sequence[TableResult]) -> Table:
    """List what the planner's first choice loses, for each model with enough measured layouts."""
    head = phrase.titles("columns of regrets")
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
    title = phrase("title of regret")
    notes = (phrase("regret", layouts=LEAST_LAYOUTS),)
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
        (phrase("states without the embedding"), _between(states), str(len(states))),
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
    title = phrase("title of memory")
    return Table(titles(en="what; figure; of", fr="quoi; chiffre; sur"), tuple(table_rows), title, align="lrl")


def _between(errors: Sequence[float]) -> str:
    low, high = (spaced_percent(value, 0, signed=True) for value in (min(errors), max(errors)))
    return say(en=f"{low} to {high}", fr=f"{low} à {high}")


def _not_found(missed: Reading, readings: Sequence[Reading]) -> str:
    """Say what was predicted of a row that ran out, and how many rows that ran need as much by the prediction."""
    count = sum(reading.predicted_bytes >= missed.predicted_bytes for reading in readings)
    name, gigabytes = missed.row.row, decimal(missed.predicted_bytes / 1e9)
    return phrase("not found", name=name, gigabytes=gigabytes, count=count)


def interval_table(results: Sequence[TableResult]) -> Table:
    """List what is called "four in five": factors on a predicted time, and what they cover."""
    head = phrase.titles("columns of intervals")
    rows = []
    for profile in dict.fromkeys(result.profile for result in results):
        factors, number = interval(profile), sum(result.profile == profile for result in results)
        between = phrase("interval", factors=factors)
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
    head = phrase.titles("columns of rows")
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


def validation_document(results: Sequence[TableResult], memory: MemoryResult | None, *, rows: bool) -> dict[str, Any]:
    """Lay out what the tables show as plain values, for JSON.

    Args:
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
    content: dict[str, Any] = {"tables": documents}
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
