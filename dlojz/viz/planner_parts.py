"""A plan as the small tables of the planner's widget: the best layout, a layout asked about, the Pareto front.

Layer 4. Invariant: nothing is computed here but shares and differences of what the plan holds, and the cost model of
the one layout asked about; cells are texts, which `dlojz.viz.calculator.html_parts` escapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Final

import numpy as np

from dlojz.plan.candidate import layouts_of
from dlojz.plan.choice import seconds
from dlojz.plan.ranks import fullest, rank_memories
from dlojz.plan.reasons import decimal, gigabytes, part_words
from dlojz.predict.time import Parts, step_parts
from dlojz.text import say
from dlojz.viz.footprint_sheet import Part
from dlojz.viz.footprint_words import percent
from dlojz.viz.plan_tables import layout_columns, layout_row, refusal_columns, refusal_rows, tree_rows

if TYPE_CHECKING:
    from dlojz.plan.answer import Plan
    from dlojz.plan.choice import Choice
    from dlojz.plan.explain import Verdict

MOST_ROWS: Final = 8


def best_parts(plan: Plan) -> tuple[Part, ...]:
    """The best layout: what it is, where its step goes, what its fullest GPU holds; its rivals, and the refusals."""
    best = plan.best
    head = plan.lines()[: 2 + len(best.lines())]
    rivals = tuple(layout_row(one) for one in plan.top[:MOST_ROWS])
    return (
        Part(say(en="In short", fr="En bref"), (), tuple(head)),
        time_part(best.parts),
        memory_part(best.memory, best.question.device_bytes),
        Part(
            say(en="Fastest layouts (* simulated)", fr="Configurations les plus rapides (* simulées)"),
            layout_columns(), rivals,
        ),
        refusals_part(plan),
        Part(
            say(en="Which strategy when", fr="Quelle stratégie, quand"), (), tuple(tree_rows(plan)),
            notes=(plan.tree.sentence,),
        ),
    )  # fmt: skip


def time_part(parts: Mapping[str, float]) -> Part:
    """Seconds of a step by part, in closed form, each with its share."""
    shown, total = [name for name in parts if parts[name] > 0], sum(parts.values())
    rows = [(part_words(name), seconds(parts[name]), percent(parts[name] / total)) for name in shown]
    return Part(
        say(en="Where the step goes (closed form)", fr="Où va l’itération (forme close)"),
        (say(en="part", fr="poste"), say(en="time", fr="durée"), say(en="share", fr="proportion")),
        tuple(rows),
        tuple(parts[name] / total for name in shown),
        tuple(shown),
    )


def memory_part(parts: Mapping[str, float], device_bytes: float) -> Part:
    """Bytes of the fullest GPU by category, each as a share of its memory; above 100 % it does not fit."""
    shown = [name for name in parts if parts[name] > 0]
    total = sum(parts.values())
    rows = [(part_words(name), gigabytes(parts[name]), percent(parts[name] / device_bytes)) for name in shown]
    rows.append((say(en="together", fr="ensemble"), gigabytes(total), percent(total / device_bytes)))
    return Part(
        say(
            en=f"Memory of the fullest GPU, of {gigabytes(device_bytes)}",
            fr=f"Mémoire du GPU le plus rempli, sur {gigabytes(device_bytes)}",
        ),
        (say(en="category", fr="catégorie"), say(en="memory", fr="mémoire"), say(en="share", fr="proportion")),
        tuple(rows),
        tuple(min(1.0, value / device_bytes) for value in (*(parts[name] for name in shown), total)),
        (*shown, ""),
    )


def refusals_part(plan: Plan) -> Part:
    """How many layouts each reason refuses, with one of them and its smallest change."""
    return Part(say(en="Refused", fr="Refusées"), refusal_columns(), tuple(refusal_rows(plan)))


def front_parts(plan: Plan) -> tuple[Part, ...]:
    """The Pareto front, fastest first."""
    front = plan.pareto
    shown = front if len(front) <= MOST_FRONT else _spread(front)
    note = (
        ()
        if len(shown) == len(front)
        else (say(en=f"{len(shown)} of {len(front)} are listed.", fr=f"{len(shown)} sur {len(front)} figurent ici."),)
    )
    title = say(en="Pareto front, fastest first", fr="Front de Pareto, la plus rapide d’abord")
    return (Part(title, layout_columns(), tuple(layout_row(one) for one in shown), notes=note),)


MOST_FRONT: Final = 16


def _spread(front: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """As many as are listed, from the fastest to the lightest."""
    return tuple(front[int(place)] for place in np.linspace(0, len(front) - 1, MOST_FRONT))


def why_sentence(verdict: Verdict) -> str:
    """The layout, and what is said of it."""
    return verdict.candidate.title + say(en=": ", fr=" : ") + verdict.sentence


def why_parts(plan: Plan, verdict: Verdict) -> tuple[Part, ...]:
    """A layout asked about beside the best: seconds and bytes, the smallest change, what single changes would bring."""
    best, limit = plan.best, plan.question.device_bytes
    nothing = "—"
    known = not np.isnan(verdict.step_s)
    head = ("", say(en="this one", fr="celle-ci"), say(en="the best", fr="la meilleure"))
    rows = [
        (say(en="layout", fr="configuration"), verdict.candidate.title, best.candidate.title),
        (
            say(en="step (closed form)", fr="itération (forme close)"),
            seconds(verdict.step_s) if known else nothing,
            seconds(best.estimated_s),
        ),
        (
            say(en="memory of the fullest GPU", fr="mémoire du GPU le plus rempli"),
            f"{gigabytes(verdict.memory_bytes)} / {gigabytes(limit)}" if known else nothing,
            f"{gigabytes(best.memory_bytes)} / {gigabytes(limit)}",
        ),
    ]
    if verdict.rank:
        rows.append(
            (say(en="rank", fr="rang"), f"{verdict.rank} / {decimal(plan.found.admitted.size, 0)}", str(best.place + 1))
        )
    change = verdict.change
    notes = () if change is None else (say(en="Smallest change: ", fr="Plus petit changement : ") + change.words + ".",)
    parts = [Part(say(en="Beside the best", fr="À côté de la meilleure"), head, tuple(rows), notes=notes)]
    if verdict.levers:
        yes, no = say(en="fits", fr="suffit"), say(en="not enough", fr="insuffisant")
        parts.append(
            Part(
                say(en="Single changes", fr="Un changement à la fois"), (),
                tuple((one.words, yes if one.fits else no) for one in verdict.levers),
            )
        )  # fmt: skip
    if known:
        parts += [time_part(asked_times(plan, verdict)), memory_part(asked_memory(plan, verdict), limit)]
    return tuple(parts)


def asked_times(plan: Plan, verdict: Verdict) -> dict[str, float]:
    """Seconds of a step of a layout asked about, by part, in closed form."""
    question = plan.question
    layout = layouts_of([verdict.candidate], plan.found.space)
    made = step_parts(question.subject.workload, question.cluster, layout, question.calibration)
    return {one.name: float(getattr(made, one.name)[0]) for one in fields(Parts)}


def asked_memory(plan: Plan, verdict: Verdict) -> dict[str, float]:
    """Bytes of the fullest GPU of a layout asked about, by category; it need not fit."""
    return fullest(rank_memories(plan.question.subject, layouts_of([verdict.candidate], plan.found.space))).parts
