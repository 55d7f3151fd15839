"""The pages of the cost model's errors, as `dlojz validate` prints them: goals, tables, regret, memory, every row.

    python benchmarks/validation_page.py docs/validation.md

The page is Markdown in English. What stands between two marks of it is written by this command and all else by hand, so
that a figure is never typed; the rows are a second page beside it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

import tyro

from benchmarks.validation_goals import goals, goals_table
from dlojz.base.language import decimal, integer, language, refusal, say, spaced_percent, use_language
from dlojz.base.table import Table, titles
from dlojz.cost_model.validation import TOOLS, MemoryResult, TableResult, validate, validate_memory, validated
from dlojz.display.validation_tables import (
    interval_table,
    memory_table,
    regret_table,
    rows_table,
    validation_table,
)
from dlojz.hardware import cluster
from dlojz.hardware.evidence import Measurement, table


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


def main(path: tyro.conf.Positional[Path]) -> None:
    """Validate all tables and write the pages.

    Args:
        path: of the page, a Markdown file.
    """
    present_page(path)  # refused now, not after the half minute that the errors take
    rows = write_page(path, [validate(name) for name in validated()], validate_memory())
    print(f"{path}, {rows}")


if __name__ == "__main__":
    tyro.cli(main)
