"""Panel of the planner.

A plan as the small tables of the planner's widget: the best layout, a layout asked about, the Pareto front.

Nothing is computed here but shares and differences of what the plan holds, and the cost model of the one layout asked
about; cells are texts, which `dlojz.display.widgets.calculator.html_parts` escapes.

The pictures of the planner's twin: the Pareto front against memory and energy; a layout beside the best one.

Draws what the plan holds and computes nothing; a hatch or a marker says whatever a colour says.

What the planner answers to one choice, in three views: the best layout, why not another, the Pareto front.

The widget and its twin show the same tables of the same plan; a question that has no answer is the planner's one
sentence, never a traceback, and every text is escaped.

The planner for notebooks: choose model, cluster, GPUs and batch, and see the best layout, the front, or why not.

Whatever is chosen, the widget answers: with the plan, or with the planner's one sentence in its place; it shows what
`still_planner` gives for the same choice.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import brief_percent, decimal, one_of, say
from dlojz.base.table import safe
from dlojz.cost_model import CHECKPOINTING, SCHEDULES, Parts, step_parts
from dlojz.display.canvas import LabFigure, decimal_marks, finish, new_figure, plain
from dlojz.display.figures.plan_figures import MEMORY_STYLES, PLAN_MOST_DRAWN, SLOWEST, TIME_STYLES
from dlojz.display.memory_tables import FootprintTable
from dlojz.display.plan_tables import layout_columns, layout_row, refusal_columns, refusal_rows, tree_rows
from dlojz.display.style import BLACK, EDGE, SKY, VERMILION, YELLOW
from dlojz.display.widgets.calculator import html_parts
from dlojz.hardware import CLUSTERS, cluster
from dlojz.planner.answer import seconds
from dlojz.planner.ask import NOT_CLUSTERS, plan
from dlojz.planner.planned_model import OFFERS, published
from dlojz.planner.question import MOST_BATCH, MOST_GPUS, whole
from dlojz.planner.search import fullest, simulate_fastest, rank_memories
from dlojz.planner.space import checkpointing_words, gigabytes, layouts_of, part_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dlojz.display.style import Style
    from dlojz.planner.answer import Choice, Plan
    from dlojz.planner.explain import LayoutVerdict

MOST_ROWS: Final = 8


def best_parts(plan: Plan) -> tuple[FootprintTable, ...]:
    """The best layout: what it is, where its step goes, what its fullest GPU holds; its rivals, and the refusals."""
    best = plan.best
    head = plan.lines()[: 2 + len(best.lines())]
    rivals = tuple(layout_row(one) for one in plan.top[:MOST_ROWS])
    return (
        FootprintTable(say(en="In short", fr="En bref"), (), tuple(head)),
        time_part(best.parts),
        memory_part(best.memory, best.question.device_bytes),
        FootprintTable(
            say(en="Fastest layouts (* simulated)", fr="Configurations les plus rapides (* simulées)"),
            layout_columns(), rivals,
        ),
        refusals_part(plan),
        FootprintTable(
            say(en="Which strategy when", fr="Quelle stratégie, quand"), (), tuple(tree_rows(plan)),
            notes=(plan.tree.sentence,),
        ),
    )  # fmt: skip


def time_part(parts: Mapping[str, float]) -> FootprintTable:
    """Seconds of a step by part, in closed form, each with its share."""
    shown, total = [name for name in parts if parts[name] > 0], sum(parts.values())
    rows = [(part_words(name), seconds(parts[name]), brief_percent(parts[name] / total)) for name in shown]
    return FootprintTable(
        say(en="Where the step goes (closed form)", fr="Où va l’itération (forme close)"),
        (say(en="part", fr="poste"), say(en="time", fr="durée"), say(en="share", fr="proportion")),
        tuple(rows),
        tuple(parts[name] / total for name in shown),
        tuple(shown),
    )


def memory_part(parts: Mapping[str, float], device_bytes: float) -> FootprintTable:
    """Bytes of the fullest GPU by category, each as a share of its memory; above 100 % it does not fit."""
    shown = [name for name in parts if parts[name] > 0]
    total = sum(parts.values())
    rows = [(part_words(name), gigabytes(parts[name]), brief_percent(parts[name] / device_bytes)) for name in shown]
    rows.append((say(en="together", fr="ensemble"), gigabytes(total), brief_percent(total / device_bytes)))
    return FootprintTable(
        say(
            en=f"Memory of the fullest GPU, of {gigabytes(device_bytes)}",
            fr=f"Mémoire du GPU le plus rempli, sur {gigabytes(device_bytes)}",
        ),
        (say(en="category", fr="catégorie"), say(en="memory", fr="mémoire"), say(en="share", fr="proportion")),
        tuple(rows),
        tuple(min(1.0, value / device_bytes) for value in (*(parts[name] for name in shown), total)),
        (*shown, ""),
    )


def refusals_part(plan: Plan) -> FootprintTable:
    """How many layouts each reason refuses, with one of them and its smallest change."""
    return FootprintTable(say(en="Refused", fr="Refusées"), refusal_columns(), tuple(refusal_rows(plan)))


def front_parts(plan: Plan) -> tuple[FootprintTable, ...]:
    """The Pareto front, fastest first."""
    front = plan.pareto
    shown = front if len(front) <= MOST_FRONT else _spread(front)
    note = (
        ()
        if len(shown) == len(front)
        else (say(en=f"{len(shown)} of {len(front)} are listed.", fr=f"{len(shown)} sur {len(front)} figurent ici."),)
    )
    title = say(en="Pareto front, fastest first", fr="Front de Pareto, la plus rapide d’abord")
    return (FootprintTable(title, layout_columns(), tuple(layout_row(one) for one in shown), notes=note),)


MOST_FRONT: Final = 16


def _spread(front: tuple[Choice, ...]) -> tuple[Choice, ...]:
    """As many as are listed, from the fastest to the lightest."""
    return tuple(front[int(place)] for place in np.linspace(0, len(front) - 1, MOST_FRONT))


def why_sentence(verdict: LayoutVerdict) -> str:
    """The layout, and what is said of it."""
    return verdict.candidate.title + say(en=": ", fr=" : ") + verdict.sentence


def why_parts(plan: Plan, verdict: LayoutVerdict) -> tuple[FootprintTable, ...]:
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
    parts = [FootprintTable(say(en="Beside the best", fr="À côté de la meilleure"), head, tuple(rows), notes=notes)]
    if verdict.levers:
        yes, no = say(en="fits", fr="suffit"), say(en="not enough", fr="insuffisant")
        parts.append(
            FootprintTable(
                say(en="Single changes", fr="Un changement à la fois"), (),
                tuple((one.words, yes if one.fits else no) for one in verdict.levers),
            )
        )  # fmt: skip
    if known:
        parts += [time_part(asked_times(plan, verdict)), memory_part(asked_memory(plan, verdict), limit)]
    return tuple(parts)


def asked_times(plan: Plan, verdict: LayoutVerdict) -> dict[str, float]:
    """Seconds of a step of a layout asked about, by part, in closed form."""
    question = plan.question
    layout = layouts_of([verdict.candidate], plan.found.space)
    made = step_parts(question.subject.workload, question.cluster, layout, question.calibration)
    return {one.name: float(getattr(made, one.name)[0]) for one in fields(Parts)}


def asked_memory(plan: Plan, verdict: LayoutVerdict) -> dict[str, float]:
    """Bytes of the fullest GPU of a layout asked about, by category; it need not fit."""
    return fullest(rank_memories(plan.found.space, verdict.candidate, plan.question.cluster.gpu.device)).parts


def front_figure(plan: Plan) -> LabFigure:
    """All layouts that fit: step time against the memory that stays free, and against the energy of 1000 steps."""
    found, name, title = plan.found, plan.question.subject.name, plan.best.candidate.title
    fit, number = decimal(found.admitted.size, 0), len(plan.pareto)
    figure = new_figure(
        11.0,
        4.4,
        alt=say(
            en=f"{fit} layouts of {name} that fit: step time against free memory and energy; {number} are on the "
            f"Pareto front; best: {title}.",
            fr=f"{fit} configurations de {name} qui tiennent : durée, mémoire libre et énergie ; {number} sont sur le "
            f"front de Pareto ; la meilleure : {title}.",
        ),
    )
    left, right = figure.subplots(1, 2)
    free = (plan.question.device_bytes - found.memory.total_bytes) / 1e9
    front, best = plan.pareto, plan.best
    _scatter(left, plan, free, [one.margin_bytes / 1e9 for one in front], best.margin_bytes / 1e9)
    left.set_ylabel(say(en="memory that stays free (GB)", fr="mémoire restée libre (Go)"))
    energy = found.energy_j / 3.6e3
    _scatter(right, plan, energy, [one.energy_j / 3.6e3 for one in front], best.energy_j / 3.6e3)
    right.set_ylabel(say(en="kWh of 1000 steps", fr="kWh de 1000 itérations"))
    figure.suptitle(f"{plan.question.subject.name}, {plan.question.cluster.title}", fontsize=10)
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return finish(figure)


def _scatter(axes: Axes, plan: Plan, heights: np.ndarray, front: Sequence[float], best: float) -> None:
    found = plan.found
    slowest = min(SLOWEST * float(found.step_s[0]), 1.1 * float(found.step_s[-1]))
    near = np.flatnonzero(found.step_s <= slowest)
    some = near[np.unique(np.linspace(0, near.size - 1, min(near.size, PLAN_MOST_DRAWN)).astype(int))]
    axes.plot(
        found.step_s[some], heights[some], linestyle="none", marker="o", markersize=3.4, markerfacecolor="none",
        markeredgecolor=SKY, markeredgewidth=0.7, label=say(en="fits", fr="tient"),
    )  # fmt: skip
    axes.plot(
        [one.estimated_s for one in plan.pareto], front, linestyle="none", marker="x", markersize=6, color=BLACK,
        label=say(en="Pareto front", fr="front de Pareto"),
    )  # fmt: skip
    axes.plot(
        [plan.best.estimated_s], [best], linestyle="none", marker="*", markersize=15, color=YELLOW,
        markeredgecolor=VERMILION, label=say(en="best, simulated", fr="la meilleure, simulée"),
    )  # fmt: skip
    axes.set_xscale("log")
    axes.set_xlim(0.9 * float(found.step_s[0]), slowest)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: decimal(value, 0 if value >= 1 else 2)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    decimal_marks(axes.yaxis)
    axes.set_xlabel(say(en="seconds of a step (log.)", fr="secondes d’une itération (log.)"))
    plain(axes)


def beside_figure(plan: Plan, verdict: LayoutVerdict) -> LabFigure | None:
    """A layout asked about over the best one: seconds of a step by part, bytes of the fullest GPU by category.

    Returns:
        The figure; None where the layout asked about means nothing (its degrees do not come to the GPUs).
    """
    if math.isnan(verdict.step_s):
        return None
    best = plan.best
    names = (say(en="this one", fr="celle-ci"), say(en="the best", fr="la meilleure"))
    times = [asked_times(plan, verdict), dict(best.parts)]
    held = [asked_memory(plan, verdict), dict(best.memory)]
    own = f"{seconds(verdict.step_s)}, {gigabytes(verdict.memory_bytes)}"
    other = f"{seconds(best.estimated_s)}, {gigabytes(best.memory_bytes)}"
    figure = new_figure(
        10.0,
        4.6,
        alt=say(
            en=f"{verdict.candidate.title}: {own}, beside the best, {best.candidate.title}: {other}.",
            fr=f"{verdict.candidate.title} : {own}, à côté de la meilleure, {best.candidate.title} : {other}.",
        ),
    )
    upper, lower = figure.subplots(2, 1)
    _stacked(upper, names, times, TIME_STYLES, 1.0)
    upper.set_xlabel(say(en="seconds of a step (closed form)", fr="secondes d’une itération (forme close)"))
    _stacked(lower, names, held, MEMORY_STYLES, 1e9)
    limit = plan.question.device_bytes / 1e9
    lower.axvline(limit, color=VERMILION, linestyle="--", linewidth=1.4, label=plan.question.cluster.gpu.title)
    lower.set_xlim(0, 1.05 * max(limit, *(sum(one.values()) / 1e9 for one in held)))
    lower.set_xlabel(say(en="memory of the fullest GPU (GB)", fr="mémoire du GPU le plus rempli (Go)"))
    for axes in (upper, lower):
        axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return finish(figure)


def _stacked(
    axes: Axes, names: Sequence[str], bars: Sequence[Mapping[str, float]], styles: Mapping[str, Style], unit: float
) -> None:
    lefts = np.zeros(len(bars))
    for name, style in styles.items():
        widths = np.array([one.get(name, 0.0) for one in bars]) / unit
        if widths.max() <= 0:
            continue
        axes.barh(
            range(len(bars)), widths, left=lefts, color=style.color, hatch=style.hatch, edgecolor=EDGE, linewidth=0.5,
            height=0.6, label=part_words(name),
        )  # fmt: skip
        lefts += widths
    axes.set_yticks(range(len(bars)), names)
    axes.invert_yaxis()
    decimal_marks(axes.xaxis)
    plain(axes)


SHOWN: Final = ("best", "why", "pareto")
FREE: Final = ("tp", "pp", "zero", "micro_batch", "checkpointing", "schedule", "engine")
"""What one may ask about in the view "why"; the others are chosen as well as can be."""
DEFAULTS: Final[dict[str, Any]] = {"model": "coatnet_7", "cluster": "jean_zay_a100", "gpus": 8, "batch": 64}
AT_ONCE: Final = 40_000
"""Actions of simulated schedules that take no time to speak of; see `dlojz.planner.search.MOST_ACTIONS`."""


@dataclass(frozen=True, eq=False)
class PlannerAnswer:
    """What a choice leads to; shows itself in a notebook.

    Attributes:
        plan: the planner's answer; None where it refuses.
        show: the view.
        verdict: on the layout asked about; None in the other views.
        refusal: why there is no plan, or no verdict.
        asked: the fields of that layout.
    """

    plan: Plan | None
    show: str = "best"
    verdict: LayoutVerdict | None = None
    refusal: str = ""
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The answer in one sentence."""
        if self.plan is None or self.refusal:
            return self.refusal
        if self.verdict is not None:
            return why_sentence(self.verdict)
        best = self.plan.best
        if self.show == "pareto":
            fit, front = decimal(self.plan.found.admitted.size, 0), len(self.plan.pareto)
            return say(
                en=f"Pareto front: of {fit} layouts that fit, {front} are beaten by no other in step time, GPU-hours, "
                "energy and free memory at once.",
                fr=f"Front de Pareto : des {fit} configurations qui tiennent, {front} ne sont battues par aucune "
                "autre à la fois en durée, heures GPU, énergie et mémoire libre.",
            )
        return say(
            en=f"Best layout: {best.candidate.title}; a step takes {best.time_words}.",
            fr=f"Meilleure configuration : {best.candidate.title} ; une itération prend {best.time_words}.",
        )

    @property
    def parts(self) -> tuple[FootprintTable, ...]:
        """The tables; none where there is no plan."""
        if self.plan is None or self.refusal:
            return ()
        if self.verdict is not None:
            return why_parts(self.plan, self.verdict)
        return front_parts(self.plan) if self.show == "pareto" else best_parts(self.plan)

    @property
    def figure(self) -> LabFigure | None:
        """The picture that can be saved; None where there is nothing to draw."""
        from dlojz.display.figures.plan_figures import plan_figure

        if self.plan is None or self.refusal:
            return None
        if self.verdict is not None:
            return beside_figure(self.plan, self.verdict)
        return front_figure(self.plan) if self.show == "pareto" else plan_figure(self.plan)

    def html(self) -> str:
        """The answer for the widget: the sentence, the front as a picture, the tables with their bars."""
        return self._shown(self.figure if self.show == "pareto" else None)

    def _repr_html_(self) -> str:
        return self._shown(self.figure)

    def _shown(self, figure: LabFigure | None) -> str:
        image = ""
        if figure is not None:
            picture = base64.b64encode(figure._repr_mimebundle_()["image/png"]).decode()
            image = f'<img alt="{safe(figure.alt)}" style="max-width:100%" src="data:image/png;base64,{picture}">'
        return f'<p role="status" aria-live="polite"><b>{safe(self.sentence)}</b></p>{image}{html_parts(self.parts)}'

    def __repr__(self) -> str:
        return self.sentence


@lru_cache(maxsize=4, typed=True)
def searched(model: str, cluster: str, gpus: int, batch: int) -> Plan:
    """The plan of a question, by the closed form; asked again, it is remembered.

    Raises:
        LabError: as `dlojz.plan`.
    """
    return plan(model, cluster, gpus, batch, simulate=0)


@lru_cache(maxsize=4, typed=True)
def played(model: str, cluster: str, gpus: int, batch: int) -> Plan:
    """The same plan with as many layouts played out as `dlojz.plan` does, without another search.

    Raises:
        LabError: as `dlojz.plan`.
    """
    first = searched(model, cluster, gpus, batch)
    question = first.question
    return replace(first, simulations=simulate_fastest(first.found, question.cluster, question.calibration))


def takes_long(first: Plan) -> bool:
    """Whether playing the other fast layouts out takes so long that the first answer should be shown before."""
    one = first.best.candidate
    return 2 * one.pp * one.micro_batches * one.chunks > AT_ONCE


def _key(value: Any) -> Any:
    """A value as it can be remembered by."""
    return tuple(value) if isinstance(value, list) else value


def answered(
    fields: Mapping[str, Any], show: str = "best", layout: Mapping[str, Any] | None = None, *, quick: bool = False
) -> PlannerAnswer:
    """The answer to a choice.

    Args:
        fields: model, cluster, gpus, batch.
        show: the view, of `SHOWN`.
        layout: what the layout asked about has, in the view "why".
        quick: by the closed form, nothing played out yet.
    """
    chosen = {name: value for name, value in (layout or {}).items() if value is not None}
    try:
        if show not in SHOWN:
            raise LabError(one_of("show", show, SHOWN))
        found = (searched if quick else played)(*(_key(fields[name]) for name in DEFAULTS))
    except LabError as error:
        return PlannerAnswer(None, show, refusal=str(error))
    if show != "why":
        return PlannerAnswer(found, show)
    try:
        return PlannerAnswer(found, show, found.why(**chosen), asked=chosen)
    except LabError as error:
        return PlannerAnswer(found, show, refusal=str(error), asked=chosen)


def still_planner(
    model: str = "coatnet_7",
    cluster: str = "jean_zay_a100",
    gpus: int = 8,
    batch: int = 64,
    show: str = "best",
    **layout: Any,
) -> PlannerAnswer:
    """The planner's answer to one choice, as a figure and tables that stand still.

    Args:
        model: of the catalogue, or a published decoder.
        cluster: of `dlojz.hardware`.
        gpus, batch: of one step.
        show: `best`, `why` (why not the layout that the other arguments ask for), or `pareto`.
        **layout: fields of that layout, as `Plan.why` takes them.

    Example:
        `still_planner("bloom-176b", gpus=384, batch=2048, show="why", tp=8, pp=12)`
    """
    return answered({"model": model, "cluster": cluster, "gpus": gpus, "batch": batch}, show, layout)


LABEL_WIDTH: Final = "11em"
CONTROL_WIDTH: Final = "29em"
NUMBERS: Final = ("tp", "pp", "micro_batch")
"""Of a layout asked about: numbers, legal or not; 0 is free."""
WORDS: Final[dict[str, tuple[Any, ...]]] = {
    "zero": (0, 1, 2, 3),
    "checkpointing": CHECKPOINTING,
    "schedule": SCHEDULES,
    "engine": tuple(OFFERS),
}
"""Of a layout asked about: what each of the others may be."""
FREE_WORD: Final = ""
"""Of these, chosen as well as can be."""


def planner(
    model: str = "coatnet_7",
    cluster: str = "jean_zay_a100",
    gpus: int = 8,
    batch: int = 64,
    show: str = "best",
    **layout: Any,
) -> Any:
    """A widget: choose model, cluster, GPUs and batch; see the best layout, why not another, or the Pareto front.

    Args:
        model, cluster, gpus, batch: what is chosen first.
        show: the view that is shown first: `best`, `why` or `pareto`.
        **layout: of the layout asked about first, in the view `why`: tp, pp, zero, micro_batch, checkpointing,
            schedule, engine.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: for a model, a cluster, a view or a field that there is not, or if ipywidgets is not installed;
            `still_planner` needs none.
    """
    question = {"model": model, "cluster": cluster, "gpus": gpus, "batch": batch}
    return Planner(question, show, layout).box


class Planner:
    """The parts of the widget, and what each change does.

    Args:
        question: model, cluster, gpus, batch that are chosen first.
        show: the view that is shown first.
        layout: of the layout asked about first.
    """

    def __init__(
        self, question: Mapping[str, Any], show: str = "best", layout: Mapping[str, Any] | None = None
    ) -> None:
        widgets = _widgets()
        first = layout or {}
        _check(question, show, first)
        wide = {"description_width": LABEL_WIDTH}
        box = {"width": CONTROL_WIDTH}

        def choice(label: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(options=options, value=value, description=label, style=wide, layout=box)

        def number(label: str, value: int, least: int, most: int) -> Any:
            return widgets.BoundedIntText(
                value=value, min=least, max=most, description=label, style=wide, layout=box, continuous_update=False
            )

        self.controls = {
            "model": choice(say(en="model", fr="modèle"), _models(), question["model"]),
            "cluster": choice(say(en="cluster", fr="calculateur"), _clusters(), question["cluster"]),
            "gpus": number("GPU", question["gpus"], 1, MOST_GPUS),
            "batch": number("batch", question["batch"], 1, MOST_BATCH),
        }
        self.show = widgets.ToggleButtons(
            options=_views(), value=show, description=say(en="show", fr="montrer"),
            style={**wide, "button_width": "auto"},
        )  # fmt: skip
        self.numbers = {name: number(_field(name), first.get(name, 0), 0, MOST_GPUS) for name in NUMBERS}
        self.words = {name: choice(_field(name), _words(name), first.get(name, FREE_WORD)) for name in WORDS}
        self.asked = widgets.HBox([widgets.VBox(list(self.numbers.values())), widgets.VBox(list(self.words.values()))])
        self.shown = widgets.HTML()
        own = list(self.controls.values())
        self.box = widgets.VBox(
            [widgets.HBox([widgets.VBox(own[:2]), widgets.VBox(own[2:])]), self.show, self.asked, self.shown]
        )
        self._known: set[str] = set()
        self.answer = PlannerAnswer(None)
        self.compute()
        for control in (*own, self.show, *self.numbers.values(), *self.words.values()):
            control.observe(self._changed, names="value")

    @property
    def fields(self) -> dict[str, Any]:
        """What is chosen, as `still_planner` takes it."""
        chosen = {name: control.value for name, control in self.controls.items()} | {"show": self.show.value}
        if self.show.value == "why":
            chosen |= {name: one.value for name, one in self.numbers.items() if one.value}
            chosen |= {name: one.value for name, one in self.words.items() if one.value != FREE_WORD}
        return chosen

    def compute(self) -> None:
        """Answer what is chosen; where playing layouts out takes a second, the first answer is shown before."""
        show, question = self.show.value, {name: control.value for name, control in self.controls.items()}
        self.asked.layout.display = "" if show == "why" else "none"
        layout = {name: value for name, value in self.fields.items() if name in FREE}
        if question["model"] not in self._known:  # an image model is traced once, which takes a moment
            self._known.add(question["model"])
            self.shown.value = _waiting()
        self.answer = answered(question, show, layout, quick=True)
        if self.answer.plan is not None:
            if takes_long(self.answer.plan):
                self.shown.value = self.answer.html()
            self.answer = answered(question, show, layout)
        self.shown.value = self.answer.html()

    def _changed(self, change: Any = None) -> None:
        self.compute()


def _check(question: Mapping[str, Any], show: str, layout: Mapping[str, Any]) -> None:
    """Refuse what no control can show; what the planner refuses is its sentence in the widget."""
    known = {"model": _models(), "cluster": [name for _, name in _clusters()]}
    for name, legal in known.items():
        if question[name] not in legal:
            raise LabError(one_of(name, question[name], legal))
    whole("gpus", question["gpus"], MOST_GPUS)
    whole("batch", question["batch"], MOST_BATCH)
    if show not in SHOWN:
        raise LabError(one_of("show", show, SHOWN))
    for name, value in layout.items():
        if name not in FREE:
            raise LabError(one_of("field", name, FREE))
        if name in NUMBERS:
            whole(name, value, MOST_GPUS)
        elif value not in WORDS[name]:
            raise LabError(one_of(name, value, WORDS[name]))


def _models() -> list[str]:
    return [*models.names(), *published()]


def _clusters() -> list[tuple[str, str]]:
    return [(cluster(name).title, name) for name in CLUSTERS if name not in NOT_CLUSTERS]


def _views() -> list[tuple[str, str]]:
    titles = (
        say(en="the best layout", fr="la meilleure configuration"),
        say(en="why not another?", fr="pourquoi pas une autre ?"),
        say(en="the Pareto front", fr="le front de Pareto"),
    )
    return list(zip(titles, SHOWN, strict=True))


def _field(name: str) -> str:
    free = say(en=" (0: free)", fr=" (0 : libre)") if name in NUMBERS else ""
    return {
        "zero": "ZeRO",
        "micro_batch": "micro-batch",
        "checkpointing": say(en="recomputation", fr="recalcul"),
        "schedule": say(en="schedule", fr="ordonnancement"),
        "engine": say(en="library", fr="bibliothèque"),
    }.get(name, name) + free


def _words(name: str) -> list[tuple[str, Any]]:
    """What a word may be, and a dash for what is chosen as well as can be."""
    told = [checkpointing_words(value) if name == "checkpointing" else str(value) for value in WORDS[name]]
    return [("—", FREE_WORD), *zip(told, WORDS[name], strict=True)]


def _waiting() -> str:
    text = say(en="Reading the model…", fr="Lecture du modèle…")
    return f'<p role="status" aria-live="polite">{safe(text)}</p>'


def _widgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise LabError(
            say(
                en="the planner’s widget needs ipywidgets: install it (`pip install ipywidgets`), or use "
                "still_planner, which answers one choice.",
                fr="le planificateur interactif demande ipywidgets : installez-le (`pip install ipywidgets`), ou "
                "utilisez still_planner, qui répond à un choix.",
            )
        ) from None
    return ipywidgets
