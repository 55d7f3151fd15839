"""Show an object through the drawing room, which stands above it; show a progress bar, or none where nobody looks.

The room names the drawer of each class and view. What has figures and tables to show imports this module; nothing of
the room is loaded before something is shown.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Literal

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

DRAWING_ROOM: Final = "dlojz.display"
"""The package whose `DRAWERS` maps a class's name and a view to `module:function` below it."""
View = Literal["figure", "html", "markdown", "table"]


def _drawn(view: View, subject: object, *arguments: Any) -> Any:
    drawers: dict[tuple[str, View], str] = importlib.import_module(DRAWING_ROOM).DRAWERS
    for kind in type(subject).__mro__:  # class names are unique in the package: the class itself need not be loaded
        if target := drawers.get((kind.__name__, view)):
            module, _, function = target.partition(":")
            return getattr(importlib.import_module(f"{DRAWING_ROOM}.{module}"), function)(subject, *arguments)
    raise TypeError(f"{DRAWING_ROOM} draws no {view} of a {type(subject).__name__}.")


def figure_of(subject: object, *arguments: Any) -> Figure:
    """Draw an object; what is given besides goes to its drawer."""
    figure: Figure = _drawn("figure", subject, *arguments)
    return figure


def html_of(subject: object) -> str:
    """Write an object as HTML, its texts escaped."""
    return str(_drawn("html", subject))


def markdown_of(subject: object) -> str:
    """Write an object as Markdown, its texts escaped."""
    return str(_drawn("markdown", subject))


def table_of(subject: object, *arguments: Any) -> RenderableType:
    """Lay an object out as a table that rich prints."""
    table: RenderableType = _drawn("table", subject, *arguments)
    return table


class Summary:
    """Base of an answer that is shown as names and values, and in a notebook by its drawer."""

    def lines(self) -> list[tuple[str, str]]:
        """Pairs of name and value."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.lines())

    def _repr_html_(self) -> str:
        return html_of(self)


QUIET = "DLOJZ_PROGRESS"
"""Environment variable: `off` where nobody waits for a notebook and what it shows is compared (CI)."""


def wanted(progress: bool | None) -> bool:
    """Decide whether to draw a bar: as asked, else only in a terminal or a notebook."""
    if progress is not None:
        return progress
    return os.environ.get(QUIET) != "off" and (in_notebook() or sys.stderr.isatty())


def bar(total: int) -> Callable[[int], None]:
    """Open a progress bar, shown from the first second on where one is wanted; it takes what is done so far."""
    if not wanted(None):
        return lambda steps_done: None
    from tqdm.auto import tqdm

    progress = tqdm(total=total, file=sys.stderr, dynamic_ncols=True, leave=False, delay=1)

    def show(steps_done: int) -> None:
        # tqdm takes what is new since the last call.
        progress.update(min(steps_done, total) - progress.n)
        if steps_done >= total:
            progress.close()

    return show


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    # Nothing is imported for this: in a kernel IPython is loaded.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"
