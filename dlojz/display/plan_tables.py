"""Tables of a plan, for a terminal (rich) and for a notebook (HTML)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from dlojz.base.language import decimal, say
from dlojz.base.table import Table, safe, tables_html
from dlojz.planner.space import gigabytes, reason_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dlojz.planner.answer import Choice, Plan
    from dlojz.planner.explain import LayoutVerdict
    from dlojz.planner.this_machine import Here


def layouts_table(title: str, layouts: Iterable[Choice], notes: tuple[str, ...] = ()) -> Table:
    """List layouts: step, cost, energy, memory; the step of a simulated one is marked by a star."""
    head = (
        say(en="layout", fr="configuration"),
        say(en="step (s)", fr="itération (s)"),
        say(en="GPU-h / 1000", fr="h GPU / 1000"),
        "kWh / 1000",
        say(en="fullest GPU", fr="GPU le plus rempli"),
        say(en="free", fr="libre"),
    )
    rows = (
        (
            one.candidate.title,
            decimal(one.step_s, 3 if one.step_s < 10 else 2) + ("" if one.simulation is None else " *"),
            decimal(1000 * one.gpu_hours, 1),
            decimal(1000 * one.energy_kwh, 1),
            gigabytes(one.memory_bytes),
            gigabytes(one.margin_bytes),
        )
        for one in layouts
    )
    return Table(head, tuple(rows), title, notes=notes)


def short_table(plan: Plan, title: str = "") -> Table:
    """List what was asked, and the best layout."""
    return Table(("", ""), tuple(plan.lines()[: 2 + len(plan.best.lines())]), title, align="l")


def fastest_table(plan: Plan, most: int) -> Table:
    """List the fastest layouts."""
    title = say(en="Fastest layouts (* simulated)", fr="Configurations les plus rapides (* simulées)")
    return layouts_table(title, plan.top[:most])


def refusals_table(plan: Plan) -> Table:
    """List the reasons of refusal: how many layouts each refuses, one of them, and its smallest change."""
    head = (
        say(en="refused because", fr="refusées parce que"),
        say(en="layouts", fr="configurations"),
        say(en="for example, and the smallest change", fr="par exemple, et le plus petit changement"),
    )
    rows = (
        (reason_words(name), decimal(number, 0), plan.refused.by(name).nearest().in_one_line)
        for name, number in plan.refused.counts.items()
    )
    return Table(head, tuple(rows), say(en="Refused", fr="Refusées"), align="lrl")


def tree_table(plan: Plan) -> Table:
    """List the questions of the decision tree, their answers and figures."""
    yes, no = say(en="yes", fr="oui"), say(en="no", fr="non")
    rows = (
        (one.question, yes if one.yes else no, ", ".join(f"{name} {value}" for name, value in one.figures))
        for one in plan.tree.branches
    )
    title = say(en="Which strategy when", fr="Quelle stratégie, quand")
    return Table(("", "", ""), tuple(rows), title, align="l", notes=(plan.tree.sentence,))


def _plan_tables(plan: Plan, most: int) -> tuple[Table, ...]:
    front = say(
        en="Pareto front: no other is better in time, GPU-hours, energy and free memory at once",
        fr="Front de Pareto : aucune autre n’est meilleure à la fois en temps, heures GPU, énergie, mémoire libre",
    )
    if most < len(plan.pareto):
        front += f" ({most} / {len(plan.pareto)})"
    return (
        short_table(plan),
        fastest_table(plan, most),
        layouts_table(front, plan.pareto[:most]),
        refusals_table(plan),
        tree_table(plan),
    )


def plan_table(plan: Plan, most: int = 12) -> RenderableType:
    """Lay a plan out for a terminal.

    Args:
        plan: the answer.
        most: layouts of each list.
    """
    first, *others = _plan_tables(plan, most)
    return Group(first, *(part for table in others for part in ("", table)))


def plan_html(plan: Plan, most: int = 8) -> str:
    """Lay a plan out for a notebook.

    Args:
        plan: the answer.
        most: layouts of each list.
    """
    return tables_html(_plan_tables(plan, most))


def choice_html(choice: Choice) -> str:
    """Write one layout as HTML."""
    return Table(("", ""), tuple(choice.lines()), align="l")._repr_html_()


def verdict_html(verdict: LayoutVerdict) -> str:
    """Write the verdict on a layout as HTML."""
    return "".join(f"<p>{safe(line)}</p>" for line in str(verdict).splitlines())


def here_html(here: Here) -> str:
    """Write the plan for this machine as HTML: what was asked, and the best layout of each kind."""
    head = (
        say(en="layout", fr="configuration"),
        say(en="predicted step", fr="itération prédite"),
        say(en="to the best", fr="au meilleur"),
    )
    title = say(en="best layout of each kind", fr="la meilleure configuration de chaque sorte")
    kinds = Table(head, tuple(here.table()), title, align="l")
    return tables_html([Table(("", ""), tuple(here.lines()), align="l"), kinds])
