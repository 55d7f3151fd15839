"""Panel: controls of ipywidgets, and below them the answer to what they are set to.

Whatever is chosen, a panel answers: with its tables and pictures, or with one sentence in their place; every text is
escaped.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from dlojz.base.errors import LabError
from dlojz.base.language import one_of
from dlojz.base.requirements import missing_library
from dlojz.base.table import safe
from dlojz.display.tables import phrase


def import_widgets(*, en: str, fr: str, instead: str) -> Any:
    """Import ipywidgets.

    Args:
        en, fr: what needs it, the beginning of a sentence.
        instead: function that does without.

    Raises:
        LabError: if it is not installed.
    """
    try:
        import ipywidgets
    except ImportError:
        sentence = missing_library(
            "ipywidgets",
            en=en,
            fr=fr,
            or_en=f"use {instead}, which shows the same without it",
            or_fr=f"utilisez {instead}, qui montre la même chose sans lui",
        )
        raise LabError(sentence) from None
    return ipywidgets


def with_defaults(
    fields: Mapping[str, Any], defaults: Mapping[str, Any], extra_names: Iterable[str] = ()
) -> dict[str, Any]:
    """Fill in the defaults of a panel's fields.

    Args:
        defaults: those that a panel always has.
        extra_names: names of further legal fields.

    Raises:
        LabError: for a field that there is not, or for anything but a whole number where the default is one.
    """
    legal = sorted({*defaults, *extra_names})
    for name, value in fields.items():
        if name not in legal:
            raise LabError(one_of("field", name, legal))
        # type(…) and not isinstance: True is an int, but no number of ranks.
        if isinstance(defaults.get(name), int) and type(value) is not type(defaults[name]):
            raise phrase.refused("a whole number is needed", name=name, value=value)
    return {**defaults, **fields}


def status_html(sentence: str) -> str:
    """Write a sentence that screen readers announce when it changes; nothing for an empty one."""
    return f'<p role="status" aria-live="polite"><b>{safe(sentence)}</b></p>' if sentence else ""


class PanelAnswer(Protocol):
    """Answer to a choice."""

    def html(self) -> str:
        """Write the answer for the panel."""


class Panel:
    """Controls in columns, the answer below.

    Args:
        controls: by the field that each sets.
        in_column: controls of a column.
        label_width, control_width: CSS widths; ipywidgets cuts longer labels short.
    """

    answer: Any

    def __init__(
        self, widgets: Any, controls: dict[str, Any], in_column: int, label_width: str, control_width: str | None = None
    ) -> None:
        self.controls = controls
        for control in controls.values():
            control.style.description_width = label_width
            control.layout.width = control_width
        self.shown = widgets.HTML()
        ordered_controls = list(controls.values())
        columns = [
            widgets.VBox(ordered_controls[start : start + in_column])
            for start in range(0, len(ordered_controls), in_column)
        ]
        # A narrow window shows the columns below one another.
        self.choices = widgets.HBox(columns, layout=widgets.Layout(flex_flow="row wrap"))
        self.box = widgets.VBox([self.choices, self.shown])

    def follow(self, controls: Iterable[Any]) -> None:
        """Answer anew whenever one of the controls changes."""
        for control in controls:
            control.observe(self._changed, names="value")

    @property
    def fields(self) -> dict[str, Any]:
        """What is chosen, by field."""
        return {name: control.value for name, control in self.controls.items()}

    def answered(self) -> PanelAnswer:
        """Answer what is chosen."""
        raise NotImplementedError

    def compute(self) -> None:
        """Show the answer to what is chosen."""
        self.answer = self.answered()
        self.shown.value = self.answer.html()

    def _changed(self, change: Any = None) -> None:
        self.compute()
