"""Tables of a plan, for a terminal (rich), for a notebook (HTML) and for the planner's panel.

Only shares and differences are computed here, and the cost model of the one layout asked about.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from dlojz.base.display_hook import Summary
from dlojz.base.language import colon, decimal, say, yes_no
from dlojz.base.table import Lines, Table, facts, safe, tables_html, titles
from dlojz.display.tables import DASH, phrase
from dlojz.planner.space import gigabytes, more_percent, reason_words

if TYPE_CHECKING:
    from dlojz.config.foreign_configs.foreign_meaning import ForeignConfig
    from dlojz.planner.answer import Choice, Plan
    from dlojz.planner.ask import ForeignPlan
    from dlojz.planner.explain import LayoutVerdict
    from dlojz.planner.this_machine import Here
    from dlojz.planner.tree import Tree


def layouts_table(title: str, layouts: Iterable[Choice]) -> Table:
    """List layouts: step, cost, energy, memory; the step of a simulated one is marked by a star."""
    head = phrase.titles("columns of layouts")
    rows = (
        (
            choice.title,
            decimal(choice.step_s, 3 if choice.step_s < 10 else 2) + ("" if choice.simulation is None else " *"),
            decimal(1000 * choice.gpu_hours, 1),
            decimal(1000 * choice.energy_kwh, 1),
            gigabytes(choice.memory_bytes),
            gigabytes(choice.margin_bytes),
        )
        for choice in layouts
    )
    return Table(head, tuple(rows), title)


def fastest_table(plan: Plan, max_rows: int) -> Table:
    """List the fastest layouts."""
    title = say(en="Fastest layouts (* simulated)", fr="Configurations les plus rapides (* simulées)")
    return layouts_table(title, plan.top[:max_rows])


def refusals_table(plan: Plan) -> Table:
    """List the reasons of refusal: how many layouts each refuses, one of them, and its smallest change."""
    head = phrase.titles("columns of refusals")
    rows = (
        # Of the layouts refused for one reason, that most like the fastest admitted one.
        (reason_words(name), decimal(number, 0), plan.refused.by(name).nearest().in_one_line)
        for name, number in plan.refused.counts.items()
    )
    return Table(head, tuple(rows), say(en="Refused", fr="Refusées"), align="lrl")


def tree_table(tree: Tree) -> Table:
    """List the questions of the decision tree, their answers and figures, and where it ends."""
    rows = (
        (branch.question, yes_no(branch.yes), ", ".join(f"{name} {value}" for name, value in branch.figures))
        for branch in tree.branches
    )
    title = say(en="Which strategy when", fr="Quelle stratégie, quand")
    return Table(("", "", ""), tuple(rows), title, align="l", notes=(tree.sentence,))


def _plan_tables(plan: Plan, max_rows: int) -> tuple[Table, ...]:
    front = phrase("title of the front")
    if max_rows < len(plan.pareto):
        front += f" ({max_rows} / {len(plan.pareto)})"
    return (
        # What was asked, and the best layout.
        Table(("", ""), tuple(plan.lines()[: 2 + len(plan.best.lines())]), align="l"),
        fastest_table(plan, max_rows),
        layouts_table(front, plan.pareto[:max_rows]),
        refusals_table(plan),
        tree_table(plan.tree),
    )


def plan_table(plan: Plan, max_rows: int = 12) -> RenderableType:
    """Lay a plan out for a terminal."""
    summary, *following_tables = _plan_tables(plan, max_rows)
    return Group(summary, *(part for table in following_tables for part in ("", table)))


def plan_html(plan: Plan, max_rows: int = 8) -> str:
    """Lay a plan out for a notebook."""
    return tables_html(_plan_tables(plan, max_rows))


def summary_html(answer: Summary) -> str:
    """Write names and values, e.g. of one layout, as HTML."""
    return Table(("", ""), tuple(answer.lines()), align="l")._repr_html_()


def tree_html(tree: Tree) -> str:
    """Lay the decision tree out for a notebook."""
    return tree_table(tree)._repr_html_()


def verdict_html(verdict: LayoutVerdict) -> str:
    """Write the verdict on a layout as HTML."""
    return "".join(f"<p>{safe(line)}</p>" for line in str(verdict).splitlines())


def here_html(layouts: Here) -> str:
    """Write the plan for this machine as HTML: what was asked, and the best layout of each kind."""
    head = titles(en="layout; predicted step; to the best", fr="configuration; itération prédite; au meilleur")
    title = say(en="best layout of each kind", fr="la meilleure configuration de chaque sorte")
    kinds = Table(head, tuple(layouts.table()), title, align="l")
    return tables_html([Table(("", ""), tuple(layouts.lines()), align="l"), kinds])


def foreign_keys_table(config: ForeignConfig) -> Table:
    """List what each key of another program's configuration means here; those without effect by their reason."""
    head = titles(en="key; value; here", fr="clé; valeur; ici")
    groups = {status: [meaning for meaning in config.meanings if meaning.status == status] for status in _STATUS_ORDER}
    counts = {status: len(meanings) for status, meanings in groups.items()}
    headings = {
        "taken": say(en=f"taken ({counts['taken']})", fr=f"prises en compte ({counts['taken']})"),
        "unknown": say(en=f"unknown ({counts['unknown']})", fr=f"inconnues ({counts['unknown']})"),
        "effectless": phrase("keys without effect", keys=counts["effectless"]),
    }
    rows: list[tuple[str, ...]] = []
    for status, meanings in groups.items():
        rows += [(headings[status],)] if meanings else []
        if status == "effectless":
            reasons = dict.fromkeys(meaning.meaning for meaning in meanings)
            keys_of = {reason: [m.key for m in meanings if m.meaning == reason] for reason in reasons}
            rows += [(", ".join(keys), "", reason) for reason, keys in keys_of.items()]
        else:
            rows += [(meaning.key, meaning.value, meaning.meaning) for meaning in meanings]
    notes = [
        say(en=f"not read, for want of a value: {text}…", fr=f"non lu, faute de valeur : {text}…")
        for text in config.document.unread
    ]
    return Table(head, tuple(rows), f"{config.document.name}{colon()}{config.program.title}", "l", notes=tuple(notes))


_STATUS_ORDER = ("taken", "unknown", "effectless")


def foreign_plan_tables(plan: ForeignPlan) -> tuple[Table, ...]:
    """Show what a configuration comes to, and the cheapest changes as lines of its file."""
    head = titles(en="in the file; changes; memory; step", fr="dans le fichier; changements; mémoire; itération")
    rows = []
    for change, lines in plan.changes:
        changed = ", ".join(f"{name} {before} → {after}" for name, (before, after) in change.changed.items())
        known = change.step_ratio == change.step_ratio  # not nan: the layout of the file has a meaning
        sign = "+" if change.memory_delta_bytes >= 0 else ""
        memory = sign + gigabytes(change.memory_delta_bytes) if known else DASH
        rows.append((Lines("\n".join(lines)), changed, memory, more_percent(change.step_ratio) if known else DASH))
    title = say(en="Cheapest changes that fit", fr="Changements les moins chers qui tiennent")
    summary = facts(*plan.lines())
    return (summary, Table(head, tuple(rows), title, "llrr")) if rows else (summary,)
