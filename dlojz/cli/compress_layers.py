"""`dlojz compress --layers FILE`: how far each layer of each quantization is from the teacher's, as a picture.

Layer 6. Invariant: nothing is measured here; what is drawn are the medians over the board's seeds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from dlojz.cli.answer import tell
from dlojz.compress.board_record import Board, LayerSnr
from dlojz.compress.method import LayerError
from dlojz.compress.methods import METHODS
from dlojz.schema import LabError
from dlojz.text import say


def check_layers(methods: Sequence[str]) -> None:
    """Refuse the picture where none of the methods leaves layers to compare.

    Raises:
        LabError: without a method of quantization.
    """
    if not any(METHODS[name].family == "quantization" for name in methods):
        listed = ", ".join(name for name, one in METHODS.items() if one.family == "quantization")
        raise LabError(
            say(
                en=f"--layers draws the error of quantized layers, but {', '.join(methods)} quantizes none: add one of "
                f"{listed}.",
                fr=f"--layers dessine l’erreur des couches quantifiées, mais {', '.join(methods)} n’en quantifie "
                f"aucune : ajoutez l’une de {listed}.",
            )
        )


def layers_of(board: Board) -> dict[str, list[LayerError]]:
    """For each method that quantizes, its layers in the order of the model: medians over the seeds."""
    found = {}
    for line in board.lines():
        trials = [trial.layer_errors for trial in board.of(line.method) if trial.layer_errors]
        if trials:
            found[line.method] = [_middle(one) for one in zip(*trials, strict=True)]
    return found


def draw_layers(board: Board, path: Path) -> None:
    """Write the picture; more methods than it has markers for are left out, which is told.

    Raises:
        LabError: if the picture cannot be written, or there is nothing to draw.
    """
    from dlojz.viz.quantization_figure import MOST_SETTINGS, sqnr_figure

    errors = layers_of(board)
    shown = dict(list(errors.items())[:MOST_SETTINGS])
    if len(shown) < len(errors):
        names = ", ".join(name for name in errors if name not in shown)
        tell(
            say(
                en=f"--layers draws {MOST_SETTINGS} methods at most: without {names}.",
                fr=f"--layers dessine {MOST_SETTINGS} méthodes au plus : sans {names}.",
            )
        )
    sqnr_figure(shown, path)


def _middle(seeds: Sequence[LayerSnr]) -> LayerError:
    measured = [math.inf if one.measured_sqnr_db is None else one.measured_sqnr_db for one in seeds]
    foreseen = [one.predicted_sqnr_db for one in seeds if one.predicted_sqnr_db is not None]
    return LayerError(
        name=seeds[0].name,
        predicted_sqnr_db=statistics.median(foreseen) if foreseen else None,
        measured_sqnr_db=statistics.median(measured),
        bits=seeds[0].bits,
    )
