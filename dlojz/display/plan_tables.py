"""A plan as tables: for a terminal (rich) and for a notebook (HTML).

Both are made of the same rows (`dlojz.base.table.Table`), and every text reaches HTML escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from dlojz.base.language import decimal, say
from dlojz.base.table import Table, safe
from dlojz.planner.space import gigabytes, reason_words

if TYPE_CHECKING:
    from dlojz.planner.answer import Choice, Plan


def layout_columns() -> tuple[str, ...]:
    """Headings of a list of layouts."""
    return (
        say(en="layout", fr="configuration"),
        say(en="step (s)", fr="itération (s)"),
        say(en="GPU-h / 1000", fr="h GPU / 1000"),
        "kWh / 1000",
        say(en="fullest GPU", fr="GPU le plus rempli"),
        say(en="free", fr="libre"),
    )


def layout_row(one: Choice) -> tuple[str, ...]:
    """A layout's line; a step that was simulated is marked."""
    mark = "" if one.simulation is None else " *"
    return (
        one.candidate.title,
        decimal(one.step_s, 3 if one.step_s < 10 else 2) + mark,
        decimal(1000 * one.gpu_hours, 1),
        decimal(1000 * one.energy_kwh, 1),
        gigabytes(one.memory_bytes),
        gigabytes(one.margin_bytes),
    )


def refusal_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Reason, how many it refuses, one of them with its sentence and the smallest change."""
    rows = []
    for name, number in plan.refused.counts.items():
        nearest = plan.refused.by(name).nearest()
        rows.append((reason_words(name), decimal(number, 0), nearest.in_one_line))
    return rows


def refusal_columns() -> tuple[str, str, str]:
    """Headings of the refusals."""
    return (
        say(en="refused because", fr="refusées parce que"),
        say(en="layouts", fr="configurations"),
        say(en="for example, and the smallest change", fr="par exemple, et le plus petit changement"),
    )


def tree_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """Question, answer, figures."""
    yes, no = say(en="yes", fr="oui"), say(en="no", fr="non")
    return [
        (one.question, yes if one.yes else no, ", ".join(f"{name} {value}" for name, value in one.figures))
        for one in plan.tree.branches
    ]


def _headings() -> dict[str, str]:
    return {
        "top": say(en="Fastest layouts (* simulated)", fr="Configurations les plus rapides (* simulées)"),
        "front": say(
            en="Pareto front: no other is better in time, GPU-hours, energy and free memory at once",
            fr="Front de Pareto : aucune autre n’est meilleure à la fois en temps, heures GPU, énergie, mémoire libre",
        ),
        "refused": say(en="Refused", fr="Refusées"),
        "tree": say(en="Which strategy when", fr="Quelle stratégie, quand"),
    }


def plan_table(plan: Plan, most: int = 12) -> RenderableType:
    """The answer for a terminal.

    Args:
        plan: the answer.
        most: layouts of each list.
    """
    titles = _headings()
    best = Table(("", ""), tuple(plan.lines()[: 2 + len(plan.best.lines())]), align="l")
    front = list(plan.pareto[:most])
    return Group(
        best,
        Text("\n" + titles["top"], style="bold"),
        Table(layout_columns(), tuple(layout_row(one) for one in plan.top[:most])),
        Text("\n" + titles["front"] + _of(len(front), len(plan.pareto)), style="bold"),
        Table(layout_columns(), tuple(layout_row(one) for one in front)),
        Text("\n" + titles["refused"], style="bold"),
        Table(refusal_columns(), tuple(refusal_rows(plan)), align="lrl"),
        Text("\n" + titles["tree"], style="bold"),
        Table(("", "", ""), tuple(tree_rows(plan)), align="l"),
        Text(plan.tree.sentence),
    )


def _of(shown: int, number: int) -> str:
    return "" if shown == number else f" ({shown} / {number})"


def pairs_html(rows: Sequence[tuple[str, str]]) -> str:
    """Names and values for a notebook."""
    return Table(("", ""), tuple(rows), align="l")._repr_html_()


def list_html(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A list with a caption and headings for a notebook."""
    return Table(tuple(columns), tuple(map(tuple, rows)), title, align="l")._repr_html_()


def plan_html(plan: Plan, most: int = 8) -> str:
    """The answer for a notebook.

    Args:
        plan: the answer.
        most: layouts of each list.
    """
    titles = _headings()
    front = list(plan.pareto[:most])
    return "".join(
        (
            pairs_html(plan.lines()[: 2 + len(plan.best.lines())]),
            list_html(titles["top"], layout_columns(), [layout_row(one) for one in plan.top[:most]]),
            list_html(
                titles["front"] + _of(len(front), len(plan.pareto)),
                layout_columns(),
                [layout_row(one) for one in front],
            ),
            list_html(titles["refused"], refusal_columns(), refusal_rows(plan)),
            list_html(titles["tree"], ("", "", ""), tree_rows(plan)),
            f"<p>{safe(plan.tree.sentence)}</p>",
        )
    )
