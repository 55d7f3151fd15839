"""A collective to step through by hand: the same drawing as in the figure, one step at a time.

Layer 4. Invariant: whatever the picture shows is also there as text, so that it can be used without eyes and without a
mouse (all controls are those of the notebook, reached by keyboard).
"""

from __future__ import annotations

import base64
from typing import Any

from dlojz.collectives.catalogue import ALGORITHMS, algorithm, check_size
from dlojz.collectives.simulation import Simulation, simulate
from dlojz.collectives.words import held_words, step_words
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.canvas import LabFigure, finish, new_figure
from dlojz.viz.collective_figure import (
    check_drawable,
    draw_panel,
    heading,
    legend_handles,
    panel_inches,
)
from dlojz.viz.markup import safe

MAX_STEPPED_RANKS = 16


def stepper(name: str = "ring_all_reduce", size: int = 4) -> Any:
    """A widget: choose an algorithm and a number of ranks, then go through the steps.

    Args:
        name: the algorithm shown first.
        size: the number of ranks shown first, 1 to 16.

    Returns:
        An ipywidgets box; its controls are the algorithm, the ranks, the step, back and forth.

    Raises:
        LabError: if the name or the number is not legal, or ipywidgets is not installed.
    """
    algorithm(name)
    check_drawable(check_size(size))
    return Stepper(name, size).box


class Stepper:
    """The parts of the widget, and what each change does.

    Args:
        name: the algorithm shown first.
        size: the number of ranks shown first.
    """

    def __init__(self, name: str, size: int) -> None:
        widgets = _widgets()
        self.choice = widgets.Dropdown(
            options=[(entry.title(), key) for key, entry in ALGORITHMS.items()],
            value=name,
            description=say(en="algorithm", fr="algorithme"),
        )
        self.ranks = widgets.BoundedIntText(
            value=size, min=1, max=MAX_STEPPED_RANKS, description=say(en="ranks", fr="rangs")
        )
        self.step = widgets.IntSlider(value=0, min=0, max=1, description=say(en="step", fr="étape"))
        self.back = widgets.Button(description=say(en="◀ previous", fr="◀ précédente"))
        self.forth = widgets.Button(description=say(en="next ▶", fr="suivante ▶"))
        self.picture, self.sentences = widgets.HTML(), widgets.HTML()
        self.simulation: Simulation = simulate(name, size)
        self.choice.observe(self._restart, names="value")
        self.ranks.observe(self._restart, names="value")
        self.step.observe(self._show, names="value")
        self.back.on_click(lambda _: self._move(-1))
        self.forth.on_click(lambda _: self._move(+1))
        controls = [widgets.HBox([self.choice, self.ranks]), widgets.HBox([self.back, self.step, self.forth])]
        self.box = widgets.VBox([*controls, self.sentences, self.picture])
        self._restart()

    def _restart(self, change: Any = None) -> None:
        self.simulation = simulate(self.choice.value, self.ranks.value)
        last = len(self.simulation.transfers)
        with self.step.hold_trait_notifications():
            self.step.value = 0
            self.step.max = max(last, 1)
        self.step.disabled = last == 0
        self._show()

    def _move(self, by: int) -> None:
        self.step.value = min(max(self.step.value + by, 0), len(self.simulation.transfers))

    def _show(self, change: Any = None) -> None:
        step = min(self.step.value, len(self.simulation.transfers))
        self.back.disabled, self.forth.disabled = step == 0, step == len(self.simulation.transfers)
        self.sentences.value = sentences_html(self.simulation, step)
        self.picture.value = picture_html(self.simulation, step)


def sentences_html(simulation: Simulation, step: int) -> str:
    """One sentence per message, marked as a status for screen readers, and what is held, as a table."""
    said = "".join(f"<li>{safe(sentence)}</li>" for sentence in step_words(simulation, step))
    total = len(simulation.transfers)
    place = say(en=f"Step {step} of {total}", fr=f"Étape {step} sur {total}")
    chunks = range(len(simulation.states[step][0]))
    head = "".join(f'<th scope="col">{safe(say(en=f"chunk {c}", fr=f"morceau {c}"))}</th>' for c in chunks)
    rows = "".join(
        f'<tr><th scope="row">{safe(say(en=f"rank {rank}", fr=f"rang {rank}"))}</th>'
        + "".join(f"<td>{safe(held_words(row[c], simulation.done(step, rank, c)))}</td>" for c in chunks)
        + "</tr>"
        for rank, row in enumerate(simulation.states[step])
    )
    summary = say(en="what each rank holds, as text", fr="ce que chaque rang détient, en texte")
    return (
        f'<div role="status" aria-live="polite"><b>{safe(place)}</b><ul>{said}</ul></div>'
        f"<details><summary>{safe(summary)}</summary><table><thead><tr><td></td>{head}</tr></thead>"
        f"<tbody>{rows}</tbody></table></details>"
    )


def picture_html(simulation: Simulation, step: int) -> str:
    """The drawing of one step as an image that carries its description."""
    figure = step_figure(simulation, step)
    picture = base64.b64encode(figure._repr_mimebundle_()["image/png"]).decode()
    return f'<img alt="{safe(figure.alt)}" style="max-width:100%" src="data:image/png;base64,{picture}">'


def step_figure(simulation: Simulation, step: int) -> LabFigure:
    """One step, drawn alone."""
    wide, high = panel_inches(simulation)
    alt = heading(simulation) + ". " + "; ".join(step_words(simulation, step)) + "."
    figure = new_figure(max(wide + 3.6, 6.0), high + 0.4, alt=alt)
    draw_panel(figure.subplots(), simulation, step)
    figure.legend(handles=legend_handles(simulation), loc="outside right upper", frameon=False, fontsize=9)
    return finish(figure)


def _widgets() -> Any:
    try:
        import ipywidgets
    except ImportError:
        raise LabError(
            say(
                en="the stepper needs ipywidgets: install it (`pip install ipywidgets`), or use collective_figure, "
                "which shows all steps at once.",
                fr="le pas à pas demande ipywidgets : installez-le (`pip install ipywidgets`), ou utilisez "
                "collective_figure, qui montre toutes les étapes.",
            )
        ) from None
    return ipywidgets
