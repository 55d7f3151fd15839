"""What the figures of lab 08 share: a picture with its table, numbers of an axis, the calibration of a cluster.

Layer 6 (labs), on `dlojz.viz`. Invariant: the table beneath a picture has the figures that the picture draws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec

from matplotlib.axis import Axis
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from dlojz.hardware import Cluster
from dlojz.labs.pipeline_figures import Picture, Sheet, or_to_do
from dlojz.labs.verdict import Verdict
from dlojz.plan.ask import PROFILE_OF_GPU
from dlojz.plan.reasons import decimal
from dlojz.predict.time import Calibration, calibration
from dlojz.text import say
from dlojz.viz.canvas import LabFigure

_P = ParamSpec("_P")
PLATE = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.85}
"""A number stays legible where a line or a hatch lies under it."""
EDGE = "#333333"
HEAT = "Blues"


@dataclass(frozen=True, eq=False)
class Illustrated:
    """A picture and, beneath it, a table: two outputs of one cell, so that either is shown wherever notebooks are.

    Attributes:
        picture: in few colours.
        sheet: the figures, row by row.
    """

    picture: Picture
    sheet: Sheet

    @property
    def figure(self) -> LabFigure:
        """The picture's figure."""
        return self.picture.figure

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.picture)
        display(self.sheet)

    def __repr__(self) -> str:
        return f"{self.figure.alt}\n{self.sheet}"


def illustrated(draw: Callable[_P, tuple[LabFigure, Sheet]]) -> Callable[_P, Illustrated | Verdict]:
    """`or_to_do` of a function that gives a figure and its table."""

    @wraps(draw)
    def drawn(*args: _P.args, **kwargs: _P.kwargs) -> Illustrated:
        figure, sheet = draw(*args, **kwargs)
        return Illustrated(Picture(figure), sheet)

    return or_to_do(drawn)


def calibration_of(site: Cluster) -> Calibration:
    """The calibration of a cluster's GPUs, as the planner takes it."""
    profile = PROFILE_OF_GPU.get(site.gpu.name.split("-")[0])
    return Calibration(site.gpu.name) if profile is None else calibration(profile)


def short(value: float) -> str:
    """A number with at most three digits and the decimal mark of the reader's language."""
    if value == 0 or abs(value) >= 100:
        return decimal(value, 0).replace("-", "−")
    return say(en=f"{value:.3g}", fr=f"{value:.3g}".replace(".", ",")).replace("-", "−")


def figure_of(value: float) -> str:
    """A cost or a time: whole from a thousand on, else with four digits."""
    if abs(value) >= 1000:
        return decimal(value, 0)
    return say(en=f"{value:.4g}", fr=f"{value:.4g}".replace(".", ","))


def logarithmic(axis: Axis, marks: tuple[float, ...] = (1.0,)) -> None:
    """Plain numbers at some marks of every decade of an axis that is logarithmic already."""
    axis.set_major_locator(LogLocator(subs=marks, numticks=12))
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
    axis.set_minor_formatter(NullFormatter())


def thousands(axis: Axis) -> None:
    """Plain numbers on a linear axis, with the marks of the reader's language."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def given(value: Any, *arguments: Any) -> Any:
    """A value, or what a student's function gives for it."""
    return value(*arguments) if callable(value) else value
