"""Goals of the planner's cost model, each with what it comes to today, and why one is missed; in English, for the page.

`benchmarks/validation_page.py` writes them into docs/validation.md; `tests/cost_model/test_validation.py` holds them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from dlojz.base.language import brief_percent, integer, spaced_percent
from dlojz.base.table import Table
from dlojz.cost_model.validation import MemoryResult, RowResult, TableResult, first_choices, interval


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
    "mpt-a100": Goal(0.06),
    "mpt-h100": Goal(0.06),
}
"""On all rows of a table, by a fit that saw none of them."""
REGRET_GOAL: Final = Goal(0.02, 0.05)
"""Of the first choice: median of a table, and its worst model."""
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
                "ZeRO-3 rows of V100 and SC21 do not print what was kept elsewhere beside the states: of some, the "
                "layer inputs alone exceed the GPU. NeMo does not print recomputation; none is taken."
            )
        case "constant":
            return (
                "MT-NLG is one layout on three numbers of GPUs, which one number meets; its software is slower than "
                "the same layout of Narayanan et al., and nothing was fitted on it."
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
    beaten = [result.name for result in results if result.left_out_mean >= result.trivial]
    words = "tables on which a constant rate is as good"
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
