"""`run.watch()`: the run as it goes, in a notebook, while the kernel stays free.

Layer 5. Invariant: making one returns at once; a daemon thread looks, and it ends with the run, with the widget, or
with the kernel. The run does not depend on it. Once it has ended, what a notebook holds is the static twin: a widget is
of its kernel, and a notebook that is opened without it would show an error in its place.
"""

from __future__ import annotations

import contextvars
import threading
import uuid
from typing import TYPE_CHECKING, Any

from dlojz.runs.progress import in_notebook, wanted
from dlojz.runs.snapshot import Tracker
from dlojz.runs.state import is_final
from dlojz.schema import LabError
from dlojz.viz.markup import safe, visible
from dlojz.viz.run_panel import RunView, run_html, run_text

if TYPE_CHECKING:
    from dlojz.runs.handle import Run

EVERY_S = 1.0


class Watch:
    """A run that is being watched; shows itself as a widget, as HTML where there is none, as text in a terminal.

    Args:
        run: which.
        live: draw a widget that follows the run; by default in a notebook that somebody looks at.
        every_s: seconds between two looks, > 0.
    """

    def __init__(self, run: Run, *, live: bool | None = None, every_s: float = EVERY_S) -> None:
        self.run = run
        self._tracker = Tracker(run)
        self._every_s = every_s
        self._one_at_a_time = threading.Lock()
        self._over = threading.Event()
        self._view: RunView | None = None
        self._problem = ""
        self._thread: threading.Thread | None = None
        self._places: list[str] = []
        self._placing = threading.Lock()
        self._at_end = False
        self.widget = _html_widget() if (live if live is not None else in_notebook() and wanted(None)) else None
        if self.widget is not None:
            self.widget.observe(self._closed, names="comm")
            # In the context of the cell that asks, or a notebook would not know whose output is replaced at the end.
            follow = contextvars.copy_context().run
            self._thread = threading.Thread(
                target=follow, args=(self._follow,), name=f"watch {run.run_id}", daemon=True
            )
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still looks."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Look no more; the run goes on, and what was shown last stays."""
        self._over.set()

    def html(self) -> str:
        """The run as it is now, as HTML, every text escaped."""
        view = self._looked()
        shown = run_html(view) if view is not None else ""
        return shown + (f'<p role="status"><b>{safe(self._problem)}</b></p>' if self._problem else "")

    def _looked(self) -> RunView | None:
        with self._one_at_a_time:
            try:
                self._view, self._problem = self._tracker.look(), ""
            except (LabError, OSError) as error:  # a file system that is away for a moment
                self._problem = str(error)
            return self._view

    def _follow(self) -> None:
        while not self._over.is_set():
            shown = self.html()
            if self.widget is not None and self.widget.value != shown:
                self.widget.value = shown
            if self._view is not None and is_final(self._view.state) and not self._problem:
                self._settle()
                return
            self._over.wait(self._every_s)

    def _settle(self) -> None:
        """Put the static twin in the place of every widget that was shown."""
        with self._placing:
            self._at_end = True
            for place in self._places:
                _display(self._repr_mimebundle_(), place, update=True)

    def _closed(self, change: Any) -> None:
        if change["new"] is None:
            self.stop()

    def __repr__(self) -> str:
        view = self._looked()
        return "\n".join([*([run_text(view)] if view else []), *([visible(self._problem)] if self._problem else [])])

    def _repr_html_(self) -> str:
        return self.html()

    def _ipython_display_(self) -> None:
        with self._placing:
            if self.widget is None or self._at_end:
                raise NotImplementedError  # IPython then asks for the bundle, as of anything that does not change
            self._places.append(uuid.uuid4().hex)
            _display(self._repr_mimebundle_(), self._places[-1])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self.html()}
        if self.widget is not None and not self._at_end:
            shown = self.widget._repr_mimebundle_()
            data = shown[0] if isinstance(shown, tuple) else shown
            bundle |= {kind: value for kind, value in (data or {}).items() if kind not in bundle}
        return bundle


def _display(bundle: dict[str, Any], place: str, *, update: bool = False) -> None:
    """Show a bundle in a place of the notebook that can be found again, or in that place what it held before."""
    from IPython.display import display

    display(bundle, raw=True, display_id=place, update=update)  # type: ignore[no-untyped-call]


def _html_widget() -> Any:
    """An empty widget of HTML; None where ipywidgets is not installed."""
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets.HTML()
