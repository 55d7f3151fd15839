"""The answer to a choice of schedule and costs: its drawing and figures, and all that is wrong with it.

Layer 4. Invariant: a schedule that breaks the memory limit is still drawn, with what it breaks; one that cannot be
executed is answered in sentences alone.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass, field

from dlojz.pipeline.costs import Costs
from dlojz.pipeline.schedule import Schedule
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.timeline import Timeline
from dlojz.pipeline.torch_csv import read_csv, torch_refusal
from dlojz.pipeline.validity import problems
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure
from dlojz.viz.markup import safe
from dlojz.viz.pipeline_arrange import scene_of
from dlojz.viz.pipeline_facts import Facts, facts_of
from dlojz.viz.pipeline_figure import schedule_figure
from dlojz.viz.pipeline_scene import Scene
from dlojz.viz.pipeline_svg import legend_html, scene_svg
from dlojz.viz.pipeline_words import figure_lines, figures_sentence, title_of


@dataclass(frozen=True)
class ScheduleAnswer:
    """What a choice leads to; shows itself in a notebook.

    Attributes:
        timeline: the simulation; None where the schedule cannot be executed.
        problems: what is wrong, in sentences; empty if nothing is.
        scene: the drawing.
        facts: what is known of it besides its times.
        look: how it is drawn, as `schedule_figure` takes it.
    """

    timeline: Timeline | None
    problems: tuple[str, ...]
    scene: Scene | None = None
    facts: Facts = field(default_factory=Facts)
    look: dict[str, object] = field(default_factory=dict)

    @property
    def figure(self) -> LabFigure | None:
        """The same drawing as a matplotlib figure, which can be saved."""
        return schedule_figure(self.timeline, **self.look) if self.timeline else None  # type: ignore[arg-type]

    def html(self) -> str:
        """The answer for the panel: sentences, an SVG drawing, the figures by name."""
        if self.timeline is None or self.scene is None:
            return self._sentences()
        colon = say(en=":", fr=" :")
        heading = f"<p><b>{safe(title_of(self.timeline.schedule))}</b>{colon} {safe(self.scene.subtitle)}</p>"
        return self._sentences() + heading + scene_svg(self.scene) + legend_html(self.scene) + self._figures()

    def _repr_html_(self) -> str:
        figure = self.figure
        if figure is None:
            return self._sentences()
        picture = base64.b64encode(figure._repr_mimebundle_()["image/png"]).decode()
        return (
            self._sentences()
            + f'<img alt="{safe(figure.alt)}" style="max-width:100%" src="data:image/png;base64,{picture}">'
            + self._figures()
        )

    def __repr__(self) -> str:
        told = [*self.problems]
        if self.timeline:
            colon = say(en=":", fr=" :")
            told.append(f"{title_of(self.timeline.schedule)}{colon} {figures_sentence(self.timeline)}")
        return " ".join(told)

    def _sentences(self) -> str:
        if not self.problems:
            return ""
        listed = "".join(f"<li>{safe(problem)}</li>" for problem in self.problems)
        return f'<ul role="status" aria-live="polite" style="font-weight:bold">{listed}</ul>'

    def _figures(self) -> str:
        if self.timeline is None:
            return ""
        lines = [*figure_lines(self.timeline, self.facts.get("lower_bound"), self.facts.get("optimum"))]
        refusal = torch_refusal(self.timeline.schedule)
        lines.append(
            (
                say(en="torch’s runtime", fr="exécution par torch"),
                refusal or say(en="executes it (export: CSV)", fr="possible (export : CSV)"),
            )
        )
        rows = "".join(
            f'<tr><th scope="row" style="text-align:left">{safe(name)}</th><td style="text-align:left">{safe(value)}'
            "</td></tr>"
            for name, value in lines
        )
        return f"<table>{rows}</table>"


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
    if unsound:
        return ScheduleAnswer(None, tuple(unsound))
    broken = problems(schedule, memory_limit, costs) if memory_limit is not None else []
    timeline = simulate(schedule, costs)
    facts = facts_of(timeline, critical=critical, idle=idle, memory_limit=memory_limit)
    scene = scene_of(timeline, color_by=color_by, memory_limit=memory_limit, **facts)
    look = {"color_by": color_by, "critical": critical, "idle": idle, "memory_limit": memory_limit}
    return ScheduleAnswer(timeline, tuple(broken), scene, facts, look)


def answer_of_csv(
    text: str, costs_for: Callable[[int], Costs], memory_limit: float | None = None, **look: bool | str
) -> ScheduleAnswer:
    """The same for an order written by hand; `costs_for` gives the costs for its number of stages."""
    try:
        schedule = read_csv(text)
    except LabError as error:
        return ScheduleAnswer(None, (str(error),))
    return answer_of(schedule, costs_for(schedule.stages), memory_limit, **look)  # type: ignore[arg-type]
