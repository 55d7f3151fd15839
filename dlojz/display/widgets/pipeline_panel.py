"""Panel of a pipeline schedule: choose a schedule and its costs, or write the order by hand, and see what follows.

The panel writes as SVG the drawing that its figure paints. A schedule that breaks the memory limit is drawn, with what
it breaks; one that cannot be executed is answered in sentences alone. Nothing typed is executed.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.base.table import Table, safe, titles
from dlojz.display.canvas import LabFigure, figure_of
from dlojz.display.drawing import Drawing
from dlojz.display.pipeline_drawing import COLOURS, facts_of, figure_lines, figures_sentence, scene_drawing, scene_of
from dlojz.display.pipeline_drawing import title_of as schedule_title
from dlojz.display.tables import phrase
from dlojz.display.widgets.panel import Panel, import_widgets, with_defaults
from dlojz.pipeline.exchange_formats import read_csv, to_csv, torch_refusal
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build, entry
from dlojz.pipeline.simulator import Timeline, simulate
from dlojz.pipeline.validity import problems


@dataclass(frozen=True)
class ScheduleAnswer:
    """Simulated schedule that a choice leads to; shows itself in a notebook.

    Attributes:
        timeline: the simulation; None where the schedule cannot be executed.
        problems: what is wrong, in sentences; empty if nothing is.
        bounds: the lower bound and the proven optimum of its makespan, where they are known.
    """

    timeline: Timeline | None
    problems: tuple[str, ...]
    drawing: Drawing | None = None
    bounds: tuple[float | None, float | None] = (None, None)

    @property
    def figure(self) -> LabFigure | None:
        """The same drawing as a matplotlib figure, which can be saved."""
        return figure_of(self.drawing) if self.drawing else None

    def html(self) -> str:
        """Write the answer for the panel: sentences, an SVG drawing, the figures by name."""
        return self._shown(self.drawing.svg() if self.drawing else "")

    def _repr_html_(self) -> str:
        figure = self.figure
        return self._shown(figure.html() if figure else "")

    def __repr__(self) -> str:
        sentences = [*self.problems]
        if self.timeline:
            colon = say(en=":", fr=" :")
            sentences.append(f"{schedule_title(self.timeline.schedule)}{colon} {figures_sentence(self.timeline)}")
        return " ".join(sentences)

    def _shown(self, picture: str) -> str:
        bullets = "".join(f"<li>{safe(problem)}</li>" for problem in self.problems)
        problems_html = (
            f'<ul role="status" aria-live="polite" style="font-weight:bold">{bullets}</ul>' if bullets else ""
        )
        if self.timeline is None:
            return problems_html
        executable = say(en="executes it (export: CSV)", fr="possible (export : CSV)")
        lines = (
            *figure_lines(self.timeline, *self.bounds),
            (say(en="torch’s runtime", fr="exécution par torch"), torch_refusal(self.timeline.schedule) or executable),
        )
        return problems_html + picture + Table(("", ""), lines, align="l")._repr_html_()


def answer_of(
    schedule: Schedule,
    costs: Costs,
    memory_limit: float | None = None,
    *,
    color_by: str = "kind",
    critical: bool = True,
    idle: bool = False,
) -> ScheduleAnswer:
    """Simulate and arrange a schedule.

    Raises:
        LabError: if costs or colours do not fit it.
    """
    unsound = problems(schedule, costs=costs)
    # An unsound order cannot be executed, so there is nothing to simulate.
    if unsound:
        return ScheduleAnswer(None, tuple(unsound))
    broken = problems(schedule, memory_limit, costs) if memory_limit is not None else []
    timeline = simulate(schedule, costs)
    facts = facts_of(timeline, critical=critical, idle=idle, memory_limit=memory_limit)
    scene = scene_of(timeline, color_by=color_by, memory_limit=memory_limit, **facts)
    bounds = facts.get("lower_bound"), facts.get("optimum")
    return ScheduleAnswer(timeline, tuple(broken), scene_drawing(scene), bounds)


def answer_of_csv(
    text: str, costs_for: Callable[[int], Costs], memory_limit: float | None = None, **scene_options: bool | str
) -> ScheduleAnswer:
    """Simulate and arrange an order written by hand; `costs_for` gives the costs for its number of stages."""
    try:
        schedule = read_csv(text)
    except LabError as error:
        return ScheduleAnswer(None, (str(error),))
    return answer_of(schedule, costs_for(schedule.stages), memory_limit, **scene_options)  # type: ignore[arg-type]


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


def still_panel(**fields: Any) -> ScheduleAnswer:
    """Answer one choice of the panel: a picture and its figures, or the sentence that refuses.

    Args:
        fields: those of the panel: schedule, ranks, micro_batches, chunks (0: the schedule's own), forward,
            backward_input, backward_weight, latency, stage_times (relative times of the stages, "1, 2, 1, 1"),
            memory_limit (stage-micro-batches, "" for none), color_by, critical, idle; or csv, an order written by hand.
    """
    try:
        # csv has no default: it is legal, and absent where no order is written.
        chosen = with_defaults(fields, DEFAULTS, ("csv",))
        return _answer(chosen, chosen.pop("csv", None))
    except LabError as error:
        return ScheduleAnswer(None, (str(error),))


def pipeline_panel(**fields: Any) -> Any:
    """Show a widget: choose a schedule, its size and its costs, or edit its order, and see what follows.

    Args:
        fields: what is shown first, as `still_panel` takes them.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: for an unknown field, or if ipywidgets is not installed; `still_panel` needs none.
    """
    return PipelinePanel(**fields).box


class PipelinePanel(Panel):
    """Panel of a schedule; `fields` are what is shown first."""

    def __init__(self, **fields: Any) -> None:
        chosen = with_defaults(fields, DEFAULTS, ("csv",))
        widgets = import_widgets(en="the panel", fr="le panneau", instead="still_panel")
        written = chosen.pop("csv", None)

        def number(name: str, label: str, maximum: int, minimum: int = 1) -> Any:
            return widgets.IntSlider(value=chosen[name], min=minimum, max=maximum, description=label)

        def time(name: str, label: str, maximum: float = 5.0, step: float = 0.25) -> Any:
            return widgets.FloatSlider(value=chosen[name], min=0.0, max=maximum, step=step, description=label)

        def text(name: str, label: str, example: str) -> Any:
            return widgets.Text(value=str(chosen[name]), placeholder=example, description=label)

        def choice(label: str, options: Any, value: Any) -> Any:
            return widgets.Dropdown(options=options, value=value, description=label)

        def tick(name: str, label: str) -> Any:
            return widgets.Checkbox(value=chosen[name], description=label)

        schedules = [(catalogue_entry.title(), name) for name, catalogue_entry in SCHEDULES.items()]
        colours = list(zip(_colour_names(), COLOURS, strict=True))
        chunks = say(en="chunks v (0: its own)", fr="étages/rang v (0 : auto)")
        none = say(en="none", fr="aucune")
        controls = {
            "schedule": choice(say(en="schedule", fr="ordonnancement"), schedules, entry(chosen["schedule"]).name),
            "ranks": number("ranks", say(en="ranks p", fr="rangs p"), MOST_RANKS),
            "micro_batches": number("micro_batches", "micro-batches m", MOST_MICRO_BATCHES),
            "chunks": number("chunks", chunks, 8, minimum=0),
            "forward": time("forward", say(en="forward F", fr="passe avant F")),
            "backward_input": time("backward_input", say(en="backward, input I", fr="arrière, entrée I")),
            "backward_weight": time("backward_weight", say(en="backward, weights W", fr="arrière, poids W")),
            "latency": time("latency", say(en="latency c", fr="latence c"), 2.0, 0.05),
            "stage_times": text("stage_times", say(en="stages ×", fr="étages ×"), "1, 2, 1, 1"),
            "memory_limit": text("memory_limit", say(en="memory limit", fr="limite mémoire"), none),
            "color_by": choice(say(en="colour", fr="couleur"), colours, chosen["color_by"]),
            "critical": tick("critical", say(en="critical path", fr="chemin critique")),
            "idle": tick("idle", say(en="causes of idle time", fr="causes d’inactivité")),
        }
        super().__init__(widgets, controls, in_column=5, label_width="12.5em", control_width="27em")
        self.by_hand = widgets.Checkbox(
            value=written is not None, description=say(en="edit the order", fr="modifier l’ordre"), indent=False
        )
        self.order = widgets.Textarea(
            value=written or "", layout=widgets.Layout(width="98%", height="8em"), disabled=written is None
        )
        hint = phrase("cells of a schedule")
        self.box.children += (widgets.HBox([self.by_hand, widgets.Label(hint)]), self.order)
        self.follow((*controls.values(), self.order))
        self.by_hand.observe(self._edit, names="value")
        self._quiet = False
        self.compute()

    def answered(self) -> ScheduleAnswer:
        """Answer what is chosen, or the order written by hand."""
        try:
            return _answer(self.fields, self.order.value if self.by_hand.value else None)
        except LabError as error:
            return ScheduleAnswer(None, (str(error),))

    def _changed(self, change: Any = None) -> None:
        """Answer what is chosen; the order by hand follows the choice until it is edited."""
        if not self._quiet:
            self.compute()

    def compute(self) -> None:
        """Show the answer, and its order where none is written by hand."""
        super().compute()
        if not self.by_hand.value and self.answer.timeline is not None:
            # Else setting the text would trigger an answer to itself.
            self._quiet = True
            self.order.value = to_csv(self.answer.timeline.schedule)
            self._quiet = False

    def _edit(self, change: Any = None) -> None:
        """From now on the order is what is written in the field; or again what the schedule's name says."""
        self.order.disabled = not self.by_hand.value
        for name in ("schedule", "ranks", "micro_batches", "chunks"):
            self.controls[name].disabled = self.by_hand.value
        self.compute()


def _answer(chosen: Mapping[str, Any], written: str | None) -> ScheduleAnswer:
    limit = _number(str(chosen["memory_limit"])) if str(chosen["memory_limit"]).strip() else None
    scene_options = {key: chosen[key] for key in ("color_by", "critical", "idle")}
    if written is not None:
        return answer_of_csv(written, lambda stages: _costs(chosen, stages), limit, **scene_options)
    name = entry(chosen["schedule"]).name
    # Only these schedules let one choose the number of stages per rank.
    free = "chunks" in SCHEDULES[name].options or "waves" in SCHEDULES[name].options
    # Before the schedule is built its number of stages is unknown: equal stages.
    costs = _costs(chosen, None)
    schedule = build(
        name,
        chosen["ranks"],
        chosen["micro_batches"],
        chunks=(chosen["chunks"] or None) if free else None,
        costs=costs,
        memory_limit=limit if "memory_limit" in SCHEDULES[name].options else None,
    )
    return answer_of(schedule, _costs(chosen, schedule.stages), limit, **scene_options)


def _costs(chosen: Mapping[str, Any], stages: int | None) -> Costs:
    """Times of every stage; `stages` says how many there are, None that they are taken for equal."""
    forward, for_input, for_weight = (float(chosen[key]) for key in ("forward", "backward_input", "backward_weight"))
    factors = [_number(word) for word in str(chosen["stage_times"]).replace(";", ",").split(",") if word.strip()]
    if not factors or stages is None:
        return Costs(forward, for_input, for_weight, latency=float(chosen["latency"]))
    if len(factors) != stages:
        raise phrase.refused("stage times do not fit", count=len(factors), stages=stages)
    # One cost per stage: its factor times the common time, of forward, input and weight passes.
    scaled_times = (tuple(value * factor for factor in factors) for value in (forward, for_input, for_weight))
    forwards, for_inputs, for_weights = scaled_times
    return Costs(forwards, for_inputs, for_weights, latency=float(chosen["latency"]))


def _number(word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise phrase.refused("no time", word=word.strip()[:40])
    return value


def _colour_names() -> tuple[str, ...]:
    return titles(
        en="kind; micro-batch; chunk; weight version", fr="genre; micro-batch; étage du rang; version des poids"
    )
