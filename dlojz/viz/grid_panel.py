"""A panel for notebooks: choose degrees, nodes and the order of the axes, and see who shares a group and a link.

Layer 4. Invariant: whatever is chosen, the panel answers: with the picture and its bytes, or with one sentence in
their place; where only the bytes are unknown, the picture stands and a sentence says why. Every text is escaped.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dlojz import models
from dlojz.config import Layout, RunConfig
from dlojz.grid import AXES, DEFAULT_GPUS_PER_NODE, DEFAULT_ORDER, ORDERS, Grid
from dlojz.predict.link_traffic import Crossing, link_traffic
from dlojz.schema import LabError, one_of
from dlojz.text import say
from dlojz.viz.canvas import LabFigure
from dlojz.viz.grid_figure import grid_figure
from dlojz.viz.grid_scene import MOST_JOINED, scene_of
from dlojz.viz.grid_svg import bars_html, grid_svg, table_html
from dlojz.viz.grid_words import advice, axis_title, cell_words, crossing_rows, crossing_titles, size_sentence
from dlojz.viz.markup import safe

DEFAULT_MODEL = "gpt_tiny"
DEFAULTS: dict[str, Any] = {
    "dp": 2,
    "pp": 2,
    "tp": 2,
    "gpus_per_node": DEFAULT_GPUS_PER_NODE,
    "order": DEFAULT_ORDER,
    "axis": "tp",
    "model": DEFAULT_MODEL,
    "micro_batch": 4,
    "micro_batches": 4,
}
MOST = 8
"""Degrees that the sliders reach; with it a picture has at most 512 ranks."""
LABEL_WIDTH, CONTROL_WIDTH = "10em", "25em"


@dataclass(frozen=True)
class GridAnswer:
    """What a choice leads to; shows itself in a notebook.

    Attributes:
        grid: the ranks; None where the choice makes none.
        axis: the one whose groups are coloured.
        crossing: what a step sends on its links; None where that is not known.
        problem: why there is no grid, or no bytes; empty if nothing is wrong.
    """

    grid: Grid | None
    axis: str = "tp"
    crossing: Crossing | None = None
    problem: str = ""

    @property
    def figure(self) -> LabFigure | None:
        """All axes of the grid as a matplotlib figure, which can be saved."""
        return grid_figure(self.grid, self.crossing) if self.grid else None

    def html(self) -> str:
        """The answer for the panel: sentences, an SVG of one axis, bars and a table of bytes."""
        if self.grid is None:
            return self._sentence()
        scene = scene_of(self.grid, self.axis)
        return (
            f"<p><b>{safe(axis_title(self.axis))}</b> · {safe(scene.title)}<br>{safe(size_sentence(self.grid))}</p>"
            f'<p role="status" aria-live="polite"><b>{safe(advice(self.grid))}</b></p>'
            + grid_svg(scene, self.axis)
            + f"<p>{safe(cell_words(self.grid.world_size <= MOST_JOINED))}</p>"
            + self._sentence()
            + (bars_html(self.crossing) if self.crossing else "")
            + self._table()
        )

    def _repr_html_(self) -> str:
        figure = self.figure
        if figure is None:
            return self._sentence()
        picture = base64.b64encode(figure._repr_mimebundle_()["image/png"]).decode()
        image = f'<img alt="{safe(figure.alt)}" style="max-width:100%" src="data:image/png;base64,{picture}">'
        return image + self._sentence() + self._table()

    def __repr__(self) -> str:
        told = [f"{size_sentence(self.grid)}. {advice(self.grid)}"] if self.grid else []
        return " ".join([*told, *([self.problem] if self.problem else [])])

    def _sentence(self) -> str:
        return f'<p role="status" aria-live="polite"><b>{safe(self.problem)}</b></p>' if self.problem else ""

    def _table(self) -> str:
        if self.crossing is None:
            return ""
        caption = say(en="Bytes per step, sent by all ranks", fr="Octets par pas, envoyés par tous les rangs")
        return table_html(caption, crossing_titles(), crossing_rows(self.crossing))


def still_grid(**fields: Any) -> GridAnswer:
    """The panel's answer to one choice, standing still: a picture and its bytes, or the sentence that refuses.

    Args:
        fields: dp, pp, tp, gpus_per_node, order (axes, innermost first), axis (whose groups the panel colours), and
            those of a run (model, micro_batch, micro_batches, sequence_length, engine, zero, …), for the bytes.
    """
    try:
        chosen = _fields(fields)
        own = {name: chosen.pop(name) for name in ("gpus_per_node", "order", "axis")}
        degrees = {name: chosen[name] for name in AXES}
        grid = Grid(**degrees, gpus_per_node=own["gpus_per_node"], order=own["order"])
        scene_of(grid, own["axis"])
    except LabError as error:
        return GridAnswer(None, problem=str(error))
    try:
        return GridAnswer(grid, own["axis"], link_traffic(RunConfig.of(**chosen), grid))
    except LabError as error:
        unknown = say(en="The bytes are not known: ", fr="Les octets ne sont pas connus : ")
        return GridAnswer(grid, own["axis"], problem=unknown + str(error))


def grid_panel(**fields: Any) -> Any:
    """A widget: choose a grid of ranks and a model, and see the groups, the nodes and what crosses which link.

    Args:
        fields: what is shown first, as `still_grid` takes them.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: for an unknown field, a value out of reach, or if ipywidgets is not installed; `still_grid` needs
            none.
    """
    return GridPanel(**fields).box


class GridPanel:
    """The parts of the widget, and what each change does.

    Args:
        fields: what is shown first.
    """

    def __init__(self, **fields: Any) -> None:
        chosen = _fields(fields)
        first = still_grid(**chosen)
        if first.grid is None:
            raise LabError(first.problem)
        models.spec(chosen["model"])  # refuses what is none
        widgets = _widgets()

        def number(name: str, label: str, most: int) -> Any:
            return widgets.IntSlider(value=chosen[name], min=1, max=max(most, chosen[name]), description=label)

        def choice(name: str, label: str, options: Any) -> Any:
            return widgets.Dropdown(options=options, value=chosen[name], description=label)

        self.controls: dict[str, Any] = {
            "dp": number("dp", "dp (data)", MOST),
            "pp": number("pp", "pp (pipeline)", MOST),
            "tp": number("tp", "tp (tensor)", MOST),
            "gpus_per_node": number("gpus_per_node", say(en="GPUs per node", fr="GPU par nœud"), 16),
            "order": choice("order", say(en="order (inside first)", fr="ordre (intérieur…)"), ORDERS),
            "axis": choice(
                "axis", say(en="colour", fr="couleur"), [(f"{one}: {axis_title(one)}", one) for one in AXES]
            ),
            "model": choice("model", say(en="model", fr="modèle"), models.names()),
            "micro_batch": number("micro_batch", "micro-batch", 64),
            "micro_batches": number("micro_batches", "micro-batches", 64),
        }
        self._others = {name: value for name, value in chosen.items() if name not in self.controls}
        self.shown = widgets.HTML()
        for control in self.controls.values():
            control.observe(self._changed, names="value")
            control.style.description_width = LABEL_WIDTH
            control.layout.width = CONTROL_WIDTH
        listed = list(self.controls.values())
        columns = [widgets.VBox(listed[start : start + 3]) for start in range(0, len(listed), 3)]
        wrapped = widgets.Layout(flex_flow="row wrap")  # a narrow window shows the columns below one another
        self.box = widgets.VBox([widgets.HBox(columns, layout=wrapped), self.shown])
        self.answer = first
        self.shown.value = first.html()

    def _changed(self, change: Any = None) -> None:
        """Answer what is chosen."""
        chosen = {name: control.value for name, control in self.controls.items()}
        self.answer = still_grid(**self._others, **chosen)
        self.shown.value = self.answer.html()


def _fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with what was given.

    Raises:
        LabError: for a field that neither the panel nor a run has.
    """
    legal = {*DEFAULTS, *RunConfig.model_fields, *Layout.model_fields} - {"layout", "schema_version"}
    for name, value in fields.items():
        if name not in legal:
            raise LabError(one_of("field", name, sorted(legal)))
        if isinstance(DEFAULTS.get(name), int) and (isinstance(value, bool) or not isinstance(value, int)):
            raise LabError(
                say(
                    en=f"{name} must be a whole number, but {value!r} was received: write one such as 4.",
                    fr=f"{name} doit être un nombre entier, mais {value!r} a été reçu : écrivez par exemple 4.",
                )
            )
    return {**DEFAULTS, **fields}


def _widgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise LabError(
            say(
                en="the panel needs ipywidgets: install it (`pip install ipywidgets`), or use still_grid, which "
                "answers one choice.",
                fr="le panneau demande ipywidgets : installez-le (`pip install ipywidgets`), ou utilisez still_grid, "
                "qui répond à un choix.",
            )
        ) from None
    return ipywidgets
