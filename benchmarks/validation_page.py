"""The pages of the cost model's errors, as `dlojz validate` prints them: goals, tables, regret, memory, every row.

    python benchmarks/validation_page.py docs/validation.md

The page is Markdown in English. What stands between two marks of it is written by this command and all else by hand, so
that a figure is never typed; the rows are a second page beside it. Goals, with what each comes to today and why one is
missed, stand on the page alone; `tests/cost_model/test_validation.py` holds them.
"""

from __future__ import annotations

import errno
import math
import os
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, NamedTuple

import tyro

from dlojz.base.language import brief_percent, decimal, integer, language, refusal, say, spaced_percent, use_language
from dlojz.base.table import Table, titles
from dlojz.cost_model.validation import (
    TOOLS,
    MemoryResult,
    RowResult,
    TableResult,
    first_choices,
    interval,
    validate,
    validate_memory,
    validated,
)
from dlojz.display.validation_tables import (
    interval_table,
    memory_table,
    regret_table,
    rows_table,
    validation_table,
)
from dlojz.hardware import cluster
from dlojz.hardware.evidence import Measurement, table


class Goal(NamedTuple):
    """Target error of the cost model.

    Attributes:
        mean: mean absolute error, as a share.
        worst: of a single row; None where none is set.
    """

    mean: float
    worst: float | None = None


GOALS: Final = {
    "korthikanti-5": Goal(0.035, 0.08),
    "sc21-1": Goal(0.07),
    "sc21-2": Goal(0.07),
    "jean-zay-a100": Goal(0.05),
    "vtrain-multi": Goal(0.06),
    "megatron-h100": Goal(0.08),
    "torchtitan": Goal(0.08),
    "llama-3": Goal(0.08),
}
"""On the half of a table that was not fitted on."""
LEFT_OUT_GOALS: Final = {
    "torchtitan": Goal(0.05),
    "vtrain-multi": Goal(0.06, 0.25),
    "mpt-a100": Goal(0.05),
    "mpt-h100": Goal(0.06),
    "fms-a100": Goal(0.06),
    "fms-h100": Goal(0.06),
    "nemo-long": Goal(0.07),
    "bridge-moe": Goal(0.15),
}
"""On all rows of a table, by a fit that saw none of them."""
REGRET_GOAL: Final = Goal(0.02, 0.05)
"""Of the first choice: median of a table, and its worst model."""
FEW: Final = 8
"""Rows up to which a constant rate fitted on them is no rival: it has seen each of them."""
LONG: Final = 16384
"""Tokens from which a sequence is called long."""
COVERED: Final = (0.75, 0.85)
"""Share of a table's rows that an interval called "four in five" may cover."""


@dataclass(frozen=True)
class GoalResult:
    """Goal of the cost model, and what it comes to today.

    Attributes:
        name: of the goal.
        what: in words.
        value: a share, or a number of rows or tables where `counted`.
        least, most: between which it is wanted.
        counted: whether the value is a number.
        detail: figures behind the value, in words.
    """

    name: str
    what: str
    value: float
    least: float = 0.0
    most: float = math.inf
    counted: bool = False
    detail: str = ""

    @property
    def reached(self) -> bool:
        """Whether the value is where it is wanted."""
        return self.least <= self.value <= self.most

    @property
    def reason(self) -> str:
        """Why the goal is missed, as far as is known; empty where it is reached or nothing is known."""
        return "" if self.reached else _reason(self.name)


def _reason(name: str) -> str:
    """Why a goal is missed, without a figure that could change; `docs/validation.md` says more."""
    match name:
        case "torchtitan, left out":
            return (
                "Its rows with several context-parallel ranks are slower than kernel and messages explain; nothing "
                "in the layout says why."
            )
        case "vtrain-multi, left out" | "vtrain-multi, left out, worst":
            return (
                "Some runs took 50% longer than the same layout with another micro-batch, one twice as long: "
                "a slow node or network, which no layout tells."
            )
        case "refused":
            return (
                "ZeRO-3 rows of V100 do not print what was kept elsewhere beside the states: of some, the "
                "layer inputs alone exceed the GPU."
            )
        case "fms-a100, left out" | "fms-h100, left out":
            return "Which blocks are computed again is not printed, and of the network only a node's bandwidth."
        case "bridge-moe, left out":
            return (
                "Recomputation and how tokens are spread are not printed, and a layout took up to twice as long in "
                "another container."
            )
    return ""


def table_goals(result: TableResult) -> tuple[GoalResult, ...]:
    """List the goals of one table: its held-out half, its rows by the fit without it, its first choices."""
    name = result.name
    goal_results = []
    half, left_out_goal = GOALS.get(name), LEFT_OUT_GOALS.get(name)
    if left_out_goal is not None:
        words = f"{name}, table left out"
        detail = _long_rows(result) if any(_is_long(row_result) for row_result in result.rows) else ""
        goal_results.append(
            GoalResult(f"{name}, left out", words, result.left_out_mean, most=left_out_goal.mean, detail=detail)
        )
        if left_out_goal.worst is not None:
            worst = max(result.rows, key=lambda row_result: abs(row_result.left_out_error))
            words = f"{name}, table left out, worst row"
            limit, row = left_out_goal.worst, worst.row.row
            goal_results.append(
                GoalResult(f"{name}, left out, worst", words, result.left_out_worst, most=limit, detail=row)
            )
    if half is not None:
        words = f"{name}, half held out"
        goal_results.append(GoalResult(f"{name}, half", words, result.mean, most=half.mean))
        if half.worst is not None:
            words = f"{name}, half held out, worst row"
            goal_results.append(GoalResult(f"{name}, half, worst", words, result.worst, most=half.worst))
    regrets = [choice.regret for choice in first_choices(result)]
    if regrets and REGRET_GOAL.worst is not None:
        words = f"{name}, regret of the first choice, "
        median, greatest = "median", "worst"
        models = f"{len(regrets)} models"
        middle, limit = statistics.median(regrets), REGRET_GOAL.mean  # seconds lost by the first choice, as a share
        goal_results.append(GoalResult(f"{name}, regret", words + median, middle, most=limit, detail=models))
        limit = REGRET_GOAL.worst
        goal_results.append(GoalResult(f"{name}, regret, worst", words + greatest, max(regrets), most=limit))
    return tuple(goal_results)


def _is_long(result: RowResult) -> bool:
    return result.row.size.sequence_length >= LONG


def _long_rows(result: TableResult) -> str:
    """Say how a table's long sequences do, and the others."""
    phrases = []
    for long, words in (
        (False, f"below {LONG} tokens"),
        (True, "from there on"),
    ):
        errors = [abs(row_result.left_out_error) for row_result in result.rows if _is_long(row_result) == long]
        phrases += [f"{words} {brief_percent(statistics.fmean(errors))} ({len(errors)})"] if errors else []
    return ", ".join(phrases)


def goals(results: Sequence[TableResult], memory: MemoryResult) -> tuple[GoalResult, ...]:
    """List all goals: those of each table, and those of several tables.

    Args:
        results: of all tables.
    """
    long = {result.name: [abs(row.left_out_error) for row in result.rows if _is_long(row)] for result in results}
    all_errors = [error for errors in long.values() for error in errors]
    error_text = ", ".join(
        f"{name} {brief_percent(statistics.fmean(errors))} ({len(errors)})" for name, errors in long.items() if errors
    )
    words = f"sequences of {LONG} tokens and more, table left out"
    general_goals = [GoalResult("long", words, statistics.fmean(all_errors), most=0.08, detail=error_text)]
    many = [result for result in results if len(result.rows) > FEW]
    beaten = [result.name for result in many if result.left_out_mean >= result.trivial]
    words = f"tables of more than {FEW} rows on which a constant rate, fitted on the same rows, is as good"
    general_goals.append(GoalResult("constant", words, len(beaten), most=0, counted=True, detail=", ".join(beaten)))
    words = "runs that ran and are refused"
    share = len(memory.refused) / len(memory.ran)
    general_goals.append(GoalResult("refused", words, share, most=0.02, detail=_refusals(memory)))
    words = "out-of-memory rows found"
    detail = f"of {len(memory.ran_out)}"
    general_goals.append(GoalResult("out of memory", words, len(memory.found), least=5, counted=True, detail=detail))
    words = "memory read on Jean Zay, half held out"
    general_goals.append(GoalResult("memory", words, memory.mean, most=0.035))
    for profile in dict.fromkeys(result.profile for result in results):
        if sum(result.profile == profile for result in results) > 1:
            covered = interval(profile).coverage
            words = f"rows of a table left out within the interval, {profile.upper()}"
            general_goals.append(GoalResult(f"interval, {profile}", words, covered, *COVERED))
    single_table_goals = [goal for result in results for goal in table_goals(result)]
    return (*sorted(single_table_goals, key=lambda goal: _KINDS.index(goal.name.split(", ")[1])), *general_goals)


_KINDS: Final = ("left out", "half", "regret")


def _refusals(memory: MemoryResult) -> str:
    """Tables with refused rows that ran, and how many."""
    ran = Counter(reading.row.table for reading in memory.ran)
    lost = Counter(reading.row.table for reading in memory.ran if reading.too_much)
    preposition = "of"
    counts = [f"{name} {number} {preposition} {ran[name]}" for name, number in lost.items()]
    remaining_runs = sum(number for name, number in ran.items() if name not in lost)
    return ", ".join([*counts, f"all others 0 of {remaining_runs}"])


def goals_table(goal_results: Sequence[GoalResult]) -> Table:
    """List goals with what they come to today, and why one is missed."""
    head = ("goal", "wanted", "now", "", "behind it")
    reached, missed = "reached", "MISSED"
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
    caption = f"Goals: {number} of {len(goal_results)} reached"
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


def sources_table(results: Sequence[TableResult]) -> Table:
    """List where each table comes from and what ran there."""
    head = titles(en="table; source; cluster; GPUs; software", fr="tableau; source; machine; GPU; logiciel")
    rows = []
    for result in results:
        gpus = [row.row.gpus for row in result.rows]
        # Lowest and highest number of GPUs of the table's rows.
        between = integer(min(gpus)) + (f" – {integer(max(gpus))}" if max(gpus) > min(gpus) else "")
        clusters = ", ".join(dict.fromkeys(cluster(row.row.cluster).title for row in result.rows))
        rows.append((result.name, _sources(result.name), clusters, between, _software(result)))
    return Table(head, tuple(rows), align="lllrl", whole=1)


def _software(result: TableResult) -> str:
    """Engines of a table's rows with the versions and kernels that they ran with, as far as is printed or assumed."""
    words = [row.row.engine for row in result.rows]
    for name, title in (("torch", "torch"), ("transformer_engine", "Transformer Engine"), ("attention_kernel", "")):
        for row in (row_result.row for row_result in result.rows):
            value = getattr(row, name)
            if value is not None and (name != "attention_kernel" or row.fused_attention):
                words.append(f"{title} {value}".strip() + (" (assumed)" if name in row.assumed else ""))
    return ", ".join(dict.fromkeys(words))


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
