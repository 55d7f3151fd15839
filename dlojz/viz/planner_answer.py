"""What the planner answers to one choice, in three views: the best layout, why not another, the Pareto front.

Layer 4. Invariant: the widget and its twin show the same tables of the same plan; a question that has no answer is the
planner's one sentence, never a traceback, and every text is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from dlojz.plan.ask import plan
from dlojz.plan.reasons import decimal
from dlojz.plan.search import played_out
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.viz.calculator import html_parts
from dlojz.viz.footprint_sheet import Part
from dlojz.viz.markup import safe
from dlojz.viz.planner_parts import best_parts, front_parts, why_parts, why_sentence
from dlojz.viz.planner_svg import front_svg

if TYPE_CHECKING:
    from dlojz.plan.answer import Plan
    from dlojz.plan.explain import Verdict
    from dlojz.viz.canvas import LabFigure

SHOWN: Final = ("best", "why", "pareto")
FREE: Final = ("tp", "pp", "zero", "micro_batch", "checkpointing", "schedule", "engine")
"""What one may ask about in the view "why"; the others are chosen as well as can be."""
DEFAULTS: Final[dict[str, Any]] = {"model": "coatnet_7", "cluster": "jean_zay_a100", "gpus": 8, "batch": 64}
AT_ONCE: Final = 40_000
"""Actions of simulated schedules that take no time to speak of; see `dlojz.plan.search.MOST_ACTIONS`."""


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
    verdict: Verdict | None = None
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
    def parts(self) -> tuple[Part, ...]:
        """The tables; none where there is no plan."""
        if self.plan is None or self.refusal:
            return ()
        if self.verdict is not None:
            return why_parts(self.plan, self.verdict)
        return front_parts(self.plan) if self.show == "pareto" else best_parts(self.plan)

    @property
    def figure(self) -> LabFigure | None:
        """The picture that can be saved; None where there is nothing to draw."""
        from dlojz.viz.planner_figure import beside_figure, front_figure

        if self.plan is None or self.refusal:
            return None
        if self.verdict is not None:
            return beside_figure(self.plan, self.verdict)
        return front_figure(self.plan) if self.show == "pareto" else self.plan.figure()

    def html(self) -> str:
        """The answer for the widget: the sentence, the tables with their bars, the front as a drawing."""
        drawing = front_svg(self.plan) if self.plan is not None and self.show == "pareto" and not self.refusal else ""
        return self._status() + drawing + html_parts(self.parts)

    def _repr_html_(self) -> str:
        figure = self.figure
        if figure is None:
            return self._status() + html_parts(self.parts)
        picture = base64.b64encode(figure._repr_mimebundle_()["image/png"]).decode()
        image = f'<img alt="{safe(figure.alt)}" style="max-width:100%" src="data:image/png;base64,{picture}">'
        return self._status() + image + html_parts(self.parts)

    def _status(self) -> str:
        return f'<p role="status" aria-live="polite"><b>{safe(self.sentence)}</b></p>'

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
    return replace(first, simulations=played_out(first.found, question.cluster, question.calibration))


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
