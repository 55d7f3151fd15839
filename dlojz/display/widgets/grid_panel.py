"""Panel of the grid of ranks: choose degrees, nodes and the order of the axes; see who shares a group and a link.

The panel writes as SVG the drawing that its figure paints. Where only the bytes are unknown, the picture stands and a
sentence says why.
"""

from dataclasses import dataclass
from typing import Any

from dlojz import models
from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.base.table import Table, safe, tables_html
from dlojz.config.layout import DEFAULT_GPUS_PER_NODE, DEFAULT_ORDER, GRID_AXES, ORDERS, Layout, RankGrid
from dlojz.config.run_config import HIDDEN, RunConfig
from dlojz.display.canvas import LabFigure
from dlojz.display.grid_drawing import (
    advice,
    axis_title,
    cell_words,
    crossing_rows,
    crossing_titles,
    grid_drawing,
    grid_figure,
    scene_of,
    size_sentence,
)
from dlojz.display.widgets.panel import Panel, import_widgets, status_html, with_defaults
from dlojz.prediction.link_traffic import Crossing, link_traffic

DEFAULTS: dict[str, Any] = {
    "dp": 2,
    "pp": 2,
    "tp": 2,
    "cp": 1,
    "gpus_per_node": DEFAULT_GPUS_PER_NODE,
    "order": DEFAULT_ORDER,
    "axis": "tp",
    "model": "gpt_tiny",
    "micro_batch": 4,
    "micro_batches": 4,
}
MOST = 8
"""Degrees that the sliders reach; with it a picture has at most 512 ranks."""


@dataclass(frozen=True)
class GridAnswer:
    """Grid of ranks that a choice leads to; shows itself in a notebook.

    Attributes:
        grid: the ranks; None where the choice makes none.
        axis: the one whose groups are coloured.
        crossing: what a step sends on its links; None where that is not known.
        problem: why there is no grid, or no bytes; empty if nothing is wrong.
    """

    grid: RankGrid | None
    axis: str = "tp"
    crossing: Crossing | None = None
    problem: str = ""

    @property
    def figure(self) -> LabFigure | None:
        """All axes of the grid as a matplotlib figure, which can be saved."""
        return grid_figure(self.grid, self.crossing) if self.grid else None

    def html(self) -> str:
        """Write the answer for the panel: sentences, an SVG of one axis with its bytes, a table of bytes."""
        if self.grid is None:
            return status_html(self.problem)
        return (
            f"<p>{safe(size_sentence(self.grid))}</p>"
            + status_html(advice(self.grid))
            + grid_drawing(self.grid, self.crossing, axis=self.axis, titled=False).svg()
            + f"<p>{safe(cell_words(self.grid, self.axis))}</p>"
            + status_html(self.problem)
            + self._table()
        )

    def _repr_html_(self) -> str:
        figure = self.figure
        return (figure.html() if figure else "") + status_html(self.problem) + self._table()

    def __repr__(self) -> str:
        sentences = f"{size_sentence(self.grid)}. {advice(self.grid)}" if self.grid else ""
        return f"{sentences} {self.problem}".strip()

    def _table(self) -> str:
        if self.crossing is None:
            return ""
        caption = say(en="Bytes per step, sent by all ranks", fr="Octets par pas, envoyés par tous les rangs")
        return tables_html([Table(crossing_titles(), tuple(crossing_rows(self.crossing)), caption, align="llr")])


def still_grid(**fields: Any) -> GridAnswer:
    """Answer one choice of the panel: a picture and its bytes, or the sentence that refuses.

    Args:
        fields: dp, pp, tp, cp, gpus_per_node, order (axes, innermost first), axis (whose groups the panel colours), and
            those of a run (model, micro_batch, micro_batches, sequence_length, engine, zero, …), for the bytes.
    """
    try:
        chosen = _fields(fields)
        axis, placed = chosen.pop("axis"), {name: chosen.pop(name) for name in ("gpus_per_node", "order")}
        grid = RankGrid(**{name: chosen[name] for name in GRID_AXES}, **placed)
        # Raises where the grid is too large to draw, before anything is computed.
        scene_of(grid, axis)
    except LabError as error:
        return GridAnswer(None, problem=str(error))
    # The picture needs no model; the bytes do.
    try:
        return GridAnswer(grid, axis, link_traffic(RunConfig.of(**chosen), grid))
    except LabError as error:
        unknown = say(en="The bytes are not known: ", fr="Les octets ne sont pas connus : ")
        return GridAnswer(grid, axis, problem=unknown + str(error))


def grid_panel(**fields: Any) -> Any:
    """Show a widget: choose a grid of ranks and a model, and see the groups, the nodes and what crosses which link.

    Args:
        fields: what is shown first, as `still_grid` takes them.

    Returns:
        An ipywidgets box.

    Raises:
        LabError: for an unknown field, a value out of reach, or if ipywidgets is not installed; `still_grid` needs
            none.
    """
    return GridPanel(**fields).box


class GridPanel(Panel):
    """Panel of the grid; `fields` are what is shown first."""

    def __init__(self, **fields: Any) -> None:
        chosen = _fields(fields)
        initial = still_grid(**chosen)
        if initial.grid is None:
            raise LabError(initial.problem)
        models.spec(chosen["model"])  # refuses what is none
        widgets = import_widgets(en="the panel", fr="le panneau", instead="still_grid")

        def number(name: str, label: str, maximum: int) -> Any:
            # A degree given beyond the slider's end extends it.
            return widgets.IntSlider(value=chosen[name], min=1, max=max(maximum, chosen[name]), description=label)

        def choice(name: str, label: str, options: Any) -> Any:
            return widgets.Dropdown(options=options, value=chosen[name], description=label)

        axes = [(f"{axis}: {axis_title(axis)}", axis) for axis in GRID_AXES]
        controls = {
            "dp": number("dp", "dp (data)", MOST),
            "pp": number("pp", "pp (pipeline)", MOST),
            "tp": number("tp", "tp (tensor)", MOST),
            "cp": number("cp", "cp (context)", MOST),
            "gpus_per_node": number("gpus_per_node", say(en="GPUs per node", fr="GPU par nœud"), 16),
            "order": choice("order", say(en="order (inside first)", fr="ordre (intérieur…)"), ORDERS),
            "axis": choice("axis", say(en="colour", fr="couleur"), axes),
            "model": choice("model", say(en="model", fr="modèle"), models.names()),
            "micro_batch": number("micro_batch", "micro-batch", 64),
            "micro_batches": number("micro_batches", "micro-batches", 64),
        }
        super().__init__(widgets, controls, in_column=3, label_width="10em", control_width="25em")
        self._others = {name: value for name, value in chosen.items() if name not in controls}
        self.follow(controls.values())
        self.answer = initial
        self.shown.value = initial.html()

    def answered(self) -> GridAnswer:
        """Answer what is chosen."""
        return still_grid(**self._others, **self.fields)


def _fields(fields: dict[str, Any]) -> dict[str, Any]:
    run_fields = {*RunConfig.model_fields, *Layout.model_fields} - set(HIDDEN)
    return with_defaults(fields, DEFAULTS, run_fields)
