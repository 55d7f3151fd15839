"""Tables of a plan, for a terminal (rich), for a notebook (HTML) and for the planner's panel.

Only shares and differences are computed here, and the cost model of the one layout asked about.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType

from dlojz.base.language import brief_percent, decimal, say
from dlojz.base.table import Table, safe, tables_html, titles
from dlojz.cost_model import Parts, step_parts
from dlojz.display.style import MEMORY_STYLES, TIME_STYLES
from dlojz.planner.answer import seconds
from dlojz.planner.search import fullest, rank_memories
from dlojz.planner.space import gigabytes, layouts_of, part_words, reason_words

if TYPE_CHECKING:
    from dlojz.planner.answer import Choice, Plan
    from dlojz.planner.explain import LayoutVerdict
    from dlojz.planner.this_machine import Here


MOST_ROWS: Final = 8
MOST_FRONT: Final = 16


def layouts_table(title: str, layouts: Iterable[Choice], notes: tuple[str, ...] = ()) -> Table:
    """List layouts: step, cost, energy, memory; the step of a simulated one is marked by a star."""
    head = titles(
        en="layout; step (s); GPU-h / 1000; kWh / 1000; fullest GPU; free",
        fr="configuration; itération (s); h GPU / 1000; kWh / 1000; GPU le plus rempli; libre",
    )
    rows = (
        (
            choice.candidate.title,
            decimal(choice.step_s, 3 if choice.step_s < 10 else 2) + ("" if choice.simulation is None else " *"),
            decimal(1000 * choice.gpu_hours, 1),
            decimal(1000 * choice.energy_kwh, 1),
            gigabytes(choice.memory_bytes),
            gigabytes(choice.margin_bytes),
        )
        for choice in layouts
    )
    return Table(head, tuple(rows), title, notes=notes)


def short_table(plan: Plan, title: str = "") -> Table:
    """List what was asked, and the best layout."""
    return Table(("", ""), tuple(plan.lines()[: 2 + len(plan.best.lines())]), title, align="l")


def fastest_table(plan: Plan, max_rows: int) -> Table:
    """List the fastest layouts."""
    title = say(en="Fastest layouts (* simulated)", fr="Configurations les plus rapides (* simulées)")
    return layouts_table(title, plan.top[:max_rows])


def refusals_table(plan: Plan) -> Table:
    """List the reasons of refusal: how many layouts each refuses, one of them, and its smallest change."""
    head = titles(
        en="refused because; layouts; for example, and the smallest change",
        fr="refusées parce que; configurations; par exemple, et le plus petit changement",
    )
    rows = (
        # Of the layouts refused for one reason, that most like the fastest admitted one.
        (reason_words(name), decimal(number, 0), plan.refused.by(name).nearest().in_one_line)
        for name, number in plan.refused.counts.items()
    )
    return Table(head, tuple(rows), say(en="Refused", fr="Refusées"), align="lrl")


def tree_table(plan: Plan) -> Table:
    """List the questions of the decision tree, their answers and figures."""
    yes, no = say(en="yes", fr="oui"), say(en="no", fr="non")
    rows = (
        (branch.question, yes if branch.yes else no, ", ".join(f"{name} {value}" for name, value in branch.figures))
        for branch in plan.tree.branches
    )
    title = say(en="Which strategy when", fr="Quelle stratégie, quand")
    return Table(("", "", ""), tuple(rows), title, align="l", notes=(plan.tree.sentence,))


def _plan_tables(plan: Plan, max_rows: int) -> tuple[Table, ...]:
    front = say(
        en="Pareto front: no other is better in time, GPU-hours, energy and free memory at once",
        fr="Front de Pareto : aucune autre n’est meilleure à la fois en temps, heures GPU, énergie, mémoire libre",
    )
    if max_rows < len(plan.pareto):
        front += f" ({max_rows} / {len(plan.pareto)})"
    return (
        short_table(plan),
        fastest_table(plan, max_rows),
        layouts_table(front, plan.pareto[:max_rows]),
        refusals_table(plan),
        tree_table(plan),
    )


def plan_table(plan: Plan, max_rows: int = 12) -> RenderableType:
    """Lay a plan out for a terminal."""
    summary, *following_tables = _plan_tables(plan, max_rows)
    return Group(summary, *(part for table in following_tables for part in ("", table)))


def plan_html(plan: Plan, max_rows: int = 8) -> str:
    """Lay a plan out for a notebook."""
    return tables_html(_plan_tables(plan, max_rows))


def choice_html(choice: Choice) -> str:
    """Write one layout as HTML."""
    return Table(("", ""), tuple(choice.lines()), align="l")._repr_html_()


def verdict_html(verdict: LayoutVerdict) -> str:
    """Write the verdict on a layout as HTML."""
    return "".join(f"<p>{safe(line)}</p>" for line in str(verdict).splitlines())


def here_html(layouts: Here) -> str:
    """Write the plan for this machine as HTML: what was asked, and the best layout of each kind."""
    head = titles(en="layout; predicted step; to the best", fr="configuration; itération prédite; au meilleur")
    title = say(en="best layout of each kind", fr="la meilleure configuration de chaque sorte")
    kinds = Table(head, tuple(layouts.table()), title, align="l")
    return tables_html([Table(("", ""), tuple(layouts.lines()), align="l"), kinds])


def best_parts(plan: Plan) -> tuple[Table, ...]:
    """List the best layout, its seconds and bytes, its rivals, the refusals and the decision tree."""
    best = plan.best
    return (
        short_table(plan, say(en="In short", fr="En bref")),
        time_part(best.parts),
        memory_part(best.memory, best.question.device_bytes),
        fastest_table(plan, MOST_ROWS),
        refusals_table(plan),
        tree_table(plan),
    )


def time_part(parts: Mapping[str, float]) -> Table:
    """List the seconds of a step by part, in closed form, each with its share."""
    names, total = [name for name in parts if parts[name] > 0], sum(parts.values())
    return Table(
        (say(en="part", fr="poste"), say(en="time", fr="durée"), say(en="share", fr="proportion")),
        tuple((part_words(name), seconds(parts[name]), brief_percent(parts[name] / total)) for name in names),
        say(en="Where the step goes (closed form)", fr="Où va l’itération (forme close)"),
        shares=tuple(parts[name] / total for name in names),
        colors=tuple(TIME_STYLES[name].color for name in names),
    )


def memory_part(parts: Mapping[str, float], device_bytes: float) -> Table:
    """List the bytes of the fullest GPU by category, each as a share of its memory; above 100 % it does not fit."""
    # Bytes; parts of 0 bytes get no line.
    category_bytes = {part_words(name): parts[name] for name in parts if parts[name] > 0}
    colors = [MEMORY_STYLES[name].color for name in parts if parts[name] > 0]
    category_bytes[say(en="together", fr="ensemble")] = sum(parts.values())
    return Table(
        (say(en="category", fr="catégorie"), say(en="memory", fr="mémoire"), say(en="share", fr="proportion")),
        tuple((name, gigabytes(value), brief_percent(value / device_bytes)) for name, value in category_bytes.items()),
        say(
            en=f"Memory of the fullest GPU, of {gigabytes(device_bytes)}",
            fr=f"Mémoire du GPU le plus rempli, sur {gigabytes(device_bytes)}",
        ),
        shares=tuple(min(1.0, value / device_bytes) for value in category_bytes.values()),
        colors=(*colors, ""),
    )


def front_parts(plan: Plan) -> tuple[Table, ...]:
    """List the Pareto front from the fastest to the lightest, evenly thinned out where it is long."""
    front, number = plan.pareto, len(plan.pareto)
    choices, notes = front, tuple[str, ...]()
    if number > MOST_FRONT:
        # MOST_FRONT of `number` at equal distances, the first and the last among them.
        choices = tuple(front[index * (number - 1) // (MOST_FRONT - 1)] for index in range(MOST_FRONT))
        notes = (say(en=f"{MOST_FRONT} of {number} are listed.", fr=f"{MOST_FRONT} sur {number} figurent ici."),)
    title = say(en="Pareto front, fastest first", fr="Front de Pareto, la plus rapide d’abord")
    return (layouts_table(title, choices, notes),)


def why_parts(plan: Plan, verdict: LayoutVerdict) -> tuple[Table, ...]:
    """Compare a layout with the best: seconds, bytes, the smallest change, and what single changes would bring."""
    best, limit = plan.best, plan.question.device_bytes
    # NaN: the degrees do not come to the number of GPUs, so there is nothing to estimate.
    is_estimated = not math.isnan(verdict.step_s)
    head = ("", say(en="this one", fr="celle-ci"), say(en="the best", fr="la meilleure"))
    rows = [
        (say(en="layout", fr="configuration"), verdict.candidate.title, best.candidate.title),
        (
            say(en="step (closed form)", fr="itération (forme close)"),
            seconds(verdict.step_s) if is_estimated else "—",
            seconds(best.estimated_s),
        ),
        (
            say(en="memory of the fullest GPU", fr="mémoire du GPU le plus rempli"),
            f"{gigabytes(verdict.memory_bytes)} / {gigabytes(limit)}" if is_estimated else "—",
            f"{gigabytes(best.memory_bytes)} / {gigabytes(limit)}",
        ),
    ]
    if verdict.rank:
        admitted = decimal(plan.found.admitted.size, 0)
        # Places count from 0.
        rows.append((say(en="rank", fr="rang"), f"{verdict.rank} / {admitted}", str(best.place + 1)))
    notes: tuple[str, ...] = ()
    if verdict.change is not None:
        notes = (say(en="Smallest change: ", fr="Plus petit changement : ") + verdict.change.words + ".",)
    caption = say(en="Beside the best", fr="À côté de la meilleure")
    parts = [Table(head, tuple(rows), caption, align="l", notes=notes)]
    if verdict.levers:
        yes, no = say(en="fits", fr="suffit"), say(en="not enough", fr="insuffisant")
        levers = tuple((lever.words, yes if lever.fits else no) for lever in verdict.levers)
        parts.append(Table(("", ""), levers, say(en="Single changes", fr="Un changement à la fois")))
    if is_estimated:
        parts += [time_part(asked_times(plan, verdict)), memory_part(asked_memory(plan, verdict), limit)]
    return tuple(parts)


def asked_times(plan: Plan, verdict: LayoutVerdict) -> dict[str, float]:
    """Estimate the seconds of a step of a layout asked about, by part, in closed form."""
    question = plan.question
    layout = layouts_of([verdict.candidate], plan.found.space)
    estimate = step_parts(question.subject.workload, question.cluster, layout, question.calibration)
    # Arrays of length 1: one layout.
    return {part.name: float(getattr(estimate, part.name)[0]) for part in fields(Parts)}


def asked_memory(plan: Plan, verdict: LayoutVerdict) -> dict[str, float]:
    """Estimate the bytes of the fullest GPU of a layout asked about, by category; it need not fit."""
    return fullest(rank_memories(plan.found.space, verdict.candidate, plan.question.cluster.gpu)).parts
