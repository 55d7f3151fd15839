"""A panel for notebooks: choose a schedule and its costs, or write the order by hand, and see at once what follows.

Layer 4. Invariant: whatever is typed, the panel answers: with the drawing and its figures, or with one sentence in
their place; nothing typed is executed, and all of it is escaped. Drawing is SVG, so that sliders move without delay.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from dlojz.pipeline.catalogue import SCHEDULES, build, entry
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.torch_csv import to_csv
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.viz.pipeline_answer import ScheduleAnswer, answer_of, answer_of_csv
from dlojz.viz.pipeline_arrange import COLOURS

DEFAULTS: dict[str, Any] = {
    "schedule": "1f1b",
    "ranks": 4,
    "micro_batches": 8,
    "chunks": 0,
    "forward": 1.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
    "latency": 0.0,
    "stage_times": "",
    "memory_limit": "",
    "color_by": "kind",
    "critical": True,
    "idle": False,
}
MOST_RANKS, MOST_MICRO_BATCHES = 32, 128
LABEL_WIDTH, CONTROL_WIDTH = "12.5em", "27em"
"""Wide enough for the longest label in either language: ipywidgets cuts the others short."""


def still_panel(**fields: Any) -> ScheduleAnswer:
    """The panel's answer to one choice, standing still: a picture and its figures, or the sentence that refuses.

    Args:
        fields: those of the panel: schedule, ranks, micro_batches, chunks (0: the schedule's own), forward,
            backward_input, backward_weight, latency, stage_times (relative times of the stages, "1, 2, 1, 1"),
            memory_limit (stage-micro-batches, "" for none), color_by, critical, idle; or csv, an order written by hand.
    """
    try:
        chosen = _fields(fields)
        written = chosen.pop("csv", None)
        return _answer(chosen, written)
    except LabError as error:
        return ScheduleAnswer(None, (str(error),))


def pipeline_panel(**fields: Any) -> Any:
    """A widget: choose a schedule, its size and its costs, or edit its order, and see what follows.

    Args:
        fields: what is shown first, as `still_panel` takes them.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: for an unknown field, or if ipywidgets is not installed; `still_panel` needs none.
    """
    return PipelinePanel(**fields).box


class PipelinePanel:
    """The parts of the widget, and what each change does.

    Args:
        fields: what is shown first.
    """

    def __init__(self, **fields: Any) -> None:
        chosen = _fields(fields)
        widgets = _widgets()
        written = chosen.pop("csv", None)

        def number(key: str, en: str, fr: str, most: int, least: int = 1) -> Any:
            return widgets.IntSlider(
                value=chosen[key], min=least, max=most, description=say(en=en, fr=fr), continuous_update=True
            )

        def time(key: str, label: str) -> Any:
            return widgets.FloatSlider(value=chosen[key], min=0.0, max=5.0, step=0.25, description=label)

        self.controls: dict[str, Any] = {
            "schedule": widgets.Dropdown(
                options=[(one.title(), name) for name, one in SCHEDULES.items()],
                value=entry(chosen["schedule"]).name,
                description=say(en="schedule", fr="ordonnancement"),
            ),
            "ranks": number("ranks", "ranks p", "rangs p", MOST_RANKS),
            "micro_batches": number("micro_batches", "micro-batches m", "micro-batches m", MOST_MICRO_BATCHES),
            "chunks": number("chunks", "chunks v (0: its own)", "étages/rang v (0 : auto)", 8, least=0),
            "forward": time("forward", say(en="forward F", fr="passe avant F")),
            "backward_input": time("backward_input", say(en="backward, input I", fr="arrière, entrée I")),
            "backward_weight": time("backward_weight", say(en="backward, weights W", fr="arrière, poids W")),
            "latency": widgets.FloatSlider(
                value=chosen["latency"], min=0.0, max=2.0, step=0.05, description=say(en="latency c", fr="latence c")
            ),
            "stage_times": widgets.Text(
                value=chosen["stage_times"],
                placeholder="1, 2, 1, 1",
                description=say(en="stages ×", fr="étages ×"),
            ),
            "memory_limit": widgets.Text(
                value=str(chosen["memory_limit"]),
                placeholder=say(en="none", fr="aucune"),
                description=say(en="memory limit", fr="limite mémoire"),
            ),
            "color_by": widgets.Dropdown(
                options=list(zip(_colour_names(), COLOURS, strict=True)),
                value=chosen["color_by"],
                description=say(en="colour", fr="couleur"),
            ),
            "critical": widgets.Checkbox(
                value=chosen["critical"], description=say(en="critical path", fr="chemin critique")
            ),
            "idle": widgets.Checkbox(
                value=chosen["idle"], description=say(en="causes of idle time", fr="causes d’inactivité")
            ),
        }
        self.by_hand = widgets.Checkbox(
            value=written is not None, description=say(en="edit the order", fr="modifier l’ordre"), indent=False
        )
        self.order = widgets.Textarea(
            value=written or "", layout=widgets.Layout(width="98%", height="8em"), disabled=written is None
        )
        self.shown = widgets.HTML()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self.order.observe(self._changed, names="value")
        self.by_hand.observe(self._edit, names="value")
        listed = list(self.controls.values())
        for control in listed:
            control.style.description_width = LABEL_WIDTH
            control.layout.width = CONTROL_WIDTH
        columns = [widgets.VBox(listed[start : start + 5]) for start in range(0, len(listed), 5)]
        hint = say(
            en="One row per rank, cells such as 0F3 (stage 0, forward, micro-batch 3), 0B3, 0I3, 0W3.",
            fr="Une ligne par rang, des cases comme 0F3 (étage 0, passe avant, micro-batch 3), 0B3, 0I3, 0W3.",
        )
        editor = widgets.VBox([widgets.HBox([self.by_hand, widgets.Label(hint)]), self.order])
        wrapped = widgets.Layout(flex_flow="row wrap")  # a narrow window shows the columns below one another
        self.box = widgets.VBox([widgets.HBox(columns, layout=wrapped), self.shown, editor])
        self._quiet = False
        self.answer = ScheduleAnswer(None, ())
        self._changed()

    def _changed(self, change: Any = None) -> None:
        """Answer what is chosen; the order by hand follows the choice until it is edited."""
        if self._quiet:
            return
        chosen = {name: control.value for name, control in self.controls.items()}
        try:
            self.answer = _answer(chosen, self.order.value if self.by_hand.value else None)
        except LabError as error:
            self.answer = ScheduleAnswer(None, (str(error),))
        if not self.by_hand.value and self.answer.timeline is not None:
            self._quiet = True
            self.order.value = to_csv(self.answer.timeline.schedule)
            self._quiet = False
        self.shown.value = self.answer.html()

    def _edit(self, change: Any = None) -> None:
        """From now on the order is what is written in the field; or again what the schedule's name says."""
        self.order.disabled = not self.by_hand.value
        for name in ("schedule", "ranks", "micro_batches", "chunks"):
            self.controls[name].disabled = self.by_hand.value
        self._changed()


def _answer(chosen: Mapping[str, Any], written: str | None) -> ScheduleAnswer:
    limit = _limit(chosen["memory_limit"])
    look = {key: chosen[key] for key in ("color_by", "critical", "idle")}
    if written is not None:
        return answer_of_csv(written, lambda stages: _costs(chosen, stages), limit, **look)
    name = entry(chosen["schedule"]).name
    free = "chunks" in SCHEDULES[name].options or "waves" in SCHEDULES[name].options
    costs = _costs(chosen, None)
    schedule = build(
        name,
        chosen["ranks"],
        chosen["micro_batches"],
        chunks=(chosen["chunks"] or None) if free else None,
        costs=costs,
        memory_limit=limit if "memory_limit" in SCHEDULES[name].options else None,
    )
    return answer_of(schedule, _costs(chosen, schedule.stages), limit, **look)


def _costs(chosen: Mapping[str, Any], stages: int | None) -> Costs:
    """Times of every stage; `stages` says how many there are, None that they are taken for equal."""
    forward, for_input, for_weight = (float(chosen[key]) for key in ("forward", "backward_input", "backward_weight"))
    factors = [_number(word) for word in str(chosen["stage_times"]).replace(";", ",").split(",") if word.strip()]
    if not factors or stages is None:
        return Costs(forward, for_input, for_weight, latency=float(chosen["latency"]))
    if len(factors) != stages:
        raise LabError(
            say(
                en=f"{len(factors)} stage times are given, but the schedule has {stages} stages: give {stages} "
                "numbers, or none.",
                fr=f"{len(factors)} temps d’étage sont donnés, mais l’ordonnancement a {stages} étages : donnez "
                f"{stages} nombres, ou aucun.",
            )
        )
    each = (tuple(value * factor for factor in factors) for value in (forward, for_input, for_weight))
    forwards, for_inputs, for_weights = each
    return Costs(forwards, for_inputs, for_weights, latency=float(chosen["latency"]))


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise LabError(
            say(
                en=f"{word.strip()[:40]!r} is no number that is 0 or more: write numbers such as 1, 2.5, separated by "
                "commas.",
                fr=f"{word.strip()[:40]!r} n’est pas un nombre positif ou nul : écrivez des nombres comme 1, 2.5, "
                "séparés par des virgules.",
            )
        )
    return value


def _limit(text: Any) -> float | None:
    return _number(str(text)) if str(text).strip() else None


def _fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with what was given.

    Raises:
        LabError: for a field that the panel has not.
    """
    for name, value in fields.items():
        if name not in DEFAULTS and name != "csv":
            raise LabError(one_of("field", name, [*DEFAULTS, "csv"]))
        if isinstance(DEFAULTS.get(name), int) and not isinstance(value, int):
            raise LabError(
                say(
                    en=f"{name} must be a whole number, but {value!r} was received: write one such as 8.",
                    fr=f"{name} doit être un nombre entier, mais {value!r} a été reçu : écrivez par exemple 8.",
                )
            )
    return {**DEFAULTS, **fields}


def _colour_names() -> tuple[str, ...]:
    return (
        say(en="kind", fr="genre"),
        "micro-batch",
        say(en="chunk", fr="étage du rang"),
        say(en="weight version", fr="version des poids"),
    )


def _widgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise LabError(
            say(
                en="the panel needs ipywidgets: install it (`pip install ipywidgets`), or use still_panel, which "
                "answers one choice.",
                fr="le panneau demande ipywidgets : installez-le (`pip install ipywidgets`), ou utilisez still_panel, "
                "qui répond à un choix.",
            )
        ) from None
    return ipywidgets
