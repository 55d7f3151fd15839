"""Show an object through the drawing room, which stands above it: the room registers who draws what.

This is the one place that names the drawing room; what has figures and tables to show imports this module, and nothing
of the room is loaded before something is shown.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

DRAWING_ROOM: Final = "dlojz.display"
"""The package that registers its drawers while it is imported."""
View = Literal["figure", "html", "markdown", "table"]
_P = ParamSpec("_P")
_T = TypeVar("_T")
_DRAWERS: dict[tuple[str, View], Callable[..., Any]] = {}


def draws(kind: str, view: View) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Register a function as what draws one view of a class.

    Args:
        kind: name of the class, which is unique in the package: so the class itself need not be loaded.
        view: which of its views.
    """

    def register(drawer: Callable[_P, _T]) -> Callable[_P, _T]:
        _DRAWERS[kind, view] = drawer
        return drawer

    return register


def _drawn(view: View, thing: object, *given: Any) -> Any:
    importlib.import_module(DRAWING_ROOM)
    for kind in type(thing).__mro__:
        if drawer := _DRAWERS.get((kind.__name__, view)):
            return drawer(thing, *given)
    raise TypeError(f"{DRAWING_ROOM} draws no {view} of a {type(thing).__name__}.")


def figure_of(thing: object, *given: Any) -> Figure:
    """Draw an object; what is given besides goes to its drawer."""
    figure: Figure = _drawn("figure", thing, *given)
    return figure


def html_of(thing: object) -> str:
    """Write an object as HTML, its texts escaped."""
    return str(_drawn("html", thing))


def markdown_of(thing: object) -> str:
    """Write an object as Markdown, its texts escaped."""
    return str(_drawn("markdown", thing))


def table_of(thing: object, *given: Any) -> RenderableType:
    """Lay an object out as a table that rich prints."""
    table: RenderableType = _drawn("table", thing, *given)
    return table
