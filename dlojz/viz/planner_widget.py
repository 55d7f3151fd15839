"""The planner for notebooks: choose model, cluster, GPUs and batch, and see the best layout, the front, or why not.

Layer 4. Invariant: whatever is chosen, the widget answers: with the plan, or with the planner's one sentence in its
place; it shows what `still_planner` gives for the same choice.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from dlojz import models
from dlojz.hardware import CLUSTERS, cluster
from dlojz.plan.candidate import checkpointing_words
from dlojz.plan.elsewhere import NOT_CLUSTERS
from dlojz.plan.engines import OFFERS
from dlojz.plan.question import MOST_BATCH, MOST_GPUS, whole
from dlojz.plan.subject import published
from dlojz.predict.time import CHECKPOINTING, SCHEDULES
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.viz.markup import safe
from dlojz.viz.planner_answer import FREE, SHOWN, PlannerAnswer, answered, still_planner, takes_long

__all__ = ["Planner", "PlannerAnswer", "planner", "still_planner"]
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
