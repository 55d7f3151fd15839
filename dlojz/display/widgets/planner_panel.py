"""Panel of the planner: choose model, cluster, GPUs and batch; see the best layout, why not another, or the front.

The panel and `still_planner` show the same tables of the same plan; a question without an answer is the planner's one
sentence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from dlojz import models
from dlojz.base.contract import check_whole
from dlojz.base.errors import LabError
from dlojz.base.language import decimal, one_of, say
from dlojz.base.table import Table, tables_html
from dlojz.cost_model import CHECKPOINTING, SCHEDULES
from dlojz.display.canvas import LabFigure
from dlojz.display.figures.plan_figures import beside_figure, front_figure, plan_figure
from dlojz.display.plan_tables import asked_memory, asked_times, best_parts, front_parts, why_parts
from dlojz.display.widgets.panel import Panel, import_widgets, status_html
from dlojz.hardware import CLUSTERS, cluster
from dlojz.planner.ask import NOT_CLUSTERS, plan
from dlojz.planner.planned_model import OFFERS, published
from dlojz.planner.question import MOST_BATCH, MOST_GPUS
from dlojz.planner.search import simulate_fastest
from dlojz.planner.space import checkpointing_words

if TYPE_CHECKING:
    from dlojz.planner.answer import Plan
    from dlojz.planner.explain import LayoutVerdict

SHOWN: Final = ("best", "why", "pareto")
FREE: Final = ("tp", "pp", "zero", "micro_batch", "checkpointing", "schedule", "engine")
"""What one may ask about in the view "why"; the others are chosen as well as can be."""
DEFAULTS: Final[dict[str, Any]] = {"model": "coatnet_7", "cluster": "jean_zay_a100", "gpus": 8, "batch": 64}
AT_ONCE: Final = 40_000
"""Actions of simulated schedules that take no time to speak of; see `dlojz.planner.search.MOST_ACTIONS`."""


@dataclass(frozen=True, eq=False)
class PlannerAnswer:
    """Plan that a choice leads to; shows itself in a notebook.

    Attributes:
        plan: the planner's answer; None where it refuses.
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
            return self.verdict.candidate.title + say(en=": ", fr=" : ") + self.verdict.sentence
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
    def parts(self) -> tuple[Table, ...]:
        """The tables; none where there is no plan."""
        if self.plan is None or self.refusal:
            return ()
        if self.verdict is not None:
            return why_parts(self.plan, self.verdict)
        return front_parts(self.plan) if self.show == "pareto" else best_parts(self.plan)

    @property
    def figure(self) -> LabFigure | None:
        """The picture that can be saved; None where there is nothing to draw."""
        if self.plan is None or self.refusal:
            return None
        if self.verdict is None:
            return front_figure(self.plan) if self.show == "pareto" else plan_figure(self.plan)
        if math.isnan(self.verdict.step_s):  # its degrees do not come to the GPUs: it means nothing
            return None
        times, category_bytes = asked_times(self.plan, self.verdict), asked_memory(self.plan, self.verdict)
        return beside_figure(self.plan, self.verdict, times, category_bytes)

    def html(self) -> str:
        """Write the answer for the panel: the sentence, the front as a picture, the tables."""
        return self._shown(self.figure if self.show == "pareto" else None)

    def _repr_html_(self) -> str:
        return self._shown(self.figure)

    def _shown(self, figure: LabFigure | None) -> str:
        return status_html(self.sentence) + (figure.html() if figure else "") + tables_html(self.parts)

    def __repr__(self) -> str:
        return self.sentence


@lru_cache(maxsize=4, typed=True)
def searched(model: str, cluster: str, gpus: int, batch: int) -> Plan:
    """Plan by the closed form; asked again, the answer is remembered.

    Raises:
        LabError: as `dlojz.plan`.
    """
    return plan(model, cluster, gpus, batch, simulate=0)


@lru_cache(maxsize=4, typed=True)
def played(model: str, cluster: str, gpus: int, batch: int) -> Plan:
    """Simulate as many layouts of the same plan as `dlojz.plan` does, without another search.

    Raises:
        LabError: as `dlojz.plan`.
    """
    searched_plan = searched(model, cluster, gpus, batch)
    question = searched_plan.question
    return replace(
        searched_plan, simulations=simulate_fastest(searched_plan.found, question.cluster, question.calibration)
    )


def takes_long(quick_plan: Plan) -> bool:
    """Tell whether simulating the other fast layouts takes so long that the first answer should be shown before."""
    candidate = quick_plan.best.candidate
    # Actions of a simulation: forward and backward (2) of each micro-batch on each of pp · chunks stages.
    return 2 * candidate.pp * candidate.micro_batches * candidate.chunks > AT_ONCE


def _key(value: Any) -> Any:
    """A value as it can be remembered by."""
    return tuple(value) if isinstance(value, list) else value


def answered(
    fields: Mapping[str, Any], show: str = "best", layout: Mapping[str, Any] | None = None, *, quick: bool = False
) -> PlannerAnswer:
    """Answer a choice.

    Args:
        fields: model, cluster, gpus, batch.
        layout: fields of the layout asked about, in the view "why".
        quick: by the closed form, nothing simulated yet.
    """
    chosen = {name: value for name, value in (layout or {}).items() if value is not None}
    current_plan = None
    try:
        if show not in SHOWN:
            raise LabError(one_of("show", show, SHOWN))
        # Cached by the question, whose lists become tuples for that.
        current_plan = (searched if quick else played)(*(_key(fields[name]) for name in DEFAULTS))
        if show != "why":
            return PlannerAnswer(current_plan, show)
        return PlannerAnswer(current_plan, show, current_plan.why(**chosen), asked=chosen)
    except LabError as error:
        # Without a plan there is no layout to speak of.
        return PlannerAnswer(current_plan, show, refusal=str(error), asked=chosen if current_plan else {})


def still_planner(
    model: str = "coatnet_7",
    cluster: str = "jean_zay_a100",
    gpus: int = 8,
    batch: int = 64,
    show: str = "best",
    **layout: Any,
) -> PlannerAnswer:
    """Answer one choice of the planner's panel, as a figure and tables.

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
    """Show a widget: choose model, cluster, GPUs and batch; see the best layout, why not another, or the front.

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


class Planner(Panel):
    """Panel of the planner.

    Args:
        question: model, cluster, gpus, batch that are chosen first.
        show: the view that is shown first.
        layout: of the layout asked about first.
    """

    def __init__(
        self, question: Mapping[str, Any], show: str = "best", layout: Mapping[str, Any] | None = None
    ) -> None:
        widgets = import_widgets(en="the planner’s widget", fr="le planificateur interactif", instead="still_planner")
        initial_layout = layout or {}
        _check(question, show, initial_layout)
        wide, box = {"description_width": "11em"}, {"width": "29em"}

        def choice(label: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(options=options, value=value, description=label, style=wide, layout=box)

        def number(label: str, value: int, minimum: int, maximum: int) -> Any:
            return widgets.BoundedIntText(
                value=value,
                min=minimum,
                max=maximum,
                description=label,
                style=wide,
                layout=box,
                continuous_update=False,
            )

        controls = {
            "model": choice(say(en="model", fr="modèle"), _models(), question["model"]),
            "cluster": choice(say(en="cluster", fr="calculateur"), _clusters(), question["cluster"]),
            "gpus": number("GPU", question["gpus"], 1, MOST_GPUS),
            "batch": number("batch", question["batch"], 1, MOST_BATCH),
        }
        super().__init__(widgets, controls, in_column=2, label_width="11em", control_width="29em")
        label = say(en="show", fr="montrer")
        buttons = {**wide, "button_width": "auto"}
        self.show = widgets.ToggleButtons(options=_views(), value=show, description=label, style=buttons)
        self.numbers = {name: number(_field(name), initial_layout.get(name, 0), 0, MOST_GPUS) for name in NUMBERS}
        self.words = {name: choice(_field(name), _words(name), initial_layout.get(name, FREE_WORD)) for name in WORDS}
        self.asked = widgets.HBox([widgets.VBox(list(self.numbers.values())), widgets.VBox(list(self.words.values()))])
        self.box.children = (self.choices, self.show, self.asked, self.shown)
        self._known: set[str] = set()
        self.compute()
        # After the first answer: setting the controls above triggers nothing.
        self.follow((*controls.values(), self.show, *self.numbers.values(), *self.words.values()))

    @property
    def fields(self) -> dict[str, Any]:
        """What is chosen, as `still_planner` takes it."""
        chosen = super().fields | {"show": self.show.value}
        if self.show.value == "why":
            # 0 and "" are free: the planner chooses them.
            chosen |= {name: control.value for name, control in self.numbers.items() if control.value}
            chosen |= {name: control.value for name, control in self.words.items() if control.value != FREE_WORD}
        return chosen

    def answered(self) -> PlannerAnswer:
        """Answer what is chosen; where simulating takes a second, the closed form's answer is shown before."""
        show, question = self.show.value, super().fields
        self.asked.layout.display = "" if show == "why" else "none"
        layout = {name: value for name, value in self.fields.items() if name in FREE}
        if question["model"] not in self._known:  # an image model is traced once, which takes a moment
            self._known.add(question["model"])
            self.shown.value = status_html(say(en="Reading the model…", fr="Lecture du modèle…"))
        quick = answered(question, show, layout, quick=True)
        # The closed form already refuses: a simulation would not change that.
        if quick.plan is None:
            return quick
        if takes_long(quick.plan):
            self.shown.value = quick.html()
        return answered(question, show, layout)


def _check(question: Mapping[str, Any], show: str, layout: Mapping[str, Any]) -> None:
    """Refuse what no control can show; what the planner refuses is its sentence in the widget."""
    legal_names = {"model": _models(), "cluster": [name for _, name in _clusters()]}
    for name, legal in legal_names.items():
        if question[name] not in legal:
            raise LabError(one_of(name, question[name], legal))
    check_whole("gpus", question["gpus"], MOST_GPUS)
    check_whole("batch", question["batch"], MOST_BATCH)
    if show not in SHOWN:
        raise LabError(one_of("show", show, SHOWN))
    for name, value in layout.items():
        if name not in FREE:
            raise LabError(one_of("field", name, FREE))
        if name in NUMBERS:
            check_whole(name, value, MOST_GPUS)
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
    labels = [checkpointing_words(value) if name == "checkpointing" else str(value) for value in WORDS[name]]
    return [("—", FREE_WORD), *zip(labels, WORDS[name], strict=True)]
