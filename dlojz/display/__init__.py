"""Figures and tables of the lab.

Nothing is computed here; each function reads a `Comparison` or a `RunRecord` and draws it, with the colour and the
hatch that a category has everywhere, and with texts of users never interpreted.

What this module registers is how the objects of lower rooms show themselves (`dlojz.base.display_hook`); a drawer is
loaded when it is first asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dlojz.base.display_hook import draws

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from dlojz.compare import Comparison
    from dlojz.display.canvas import LabFigure
    from dlojz.planner.answer import Choice, Plan
    from dlojz.planner.explain import LayoutVerdict
    from dlojz.planner.this_machine import Here


@draws("Comparison", "markdown")
def _comparison_markdown(comparison: Comparison) -> str:
    from dlojz.display.tables import markdown

    return markdown(comparison)


@draws("Comparison", "html")
def _comparison_html(comparison: Comparison) -> str:
    from dlojz.display.tables import html_table

    return html_table(comparison)


@draws("Comparison", "table")
def _comparison_table(comparison: Comparison) -> RenderableType:
    from dlojz.display.tables import comparison_table

    return comparison_table(comparison)


@draws("Comparison", "figure")
def _comparison_figure(comparison: Comparison, path: str | Path | None = None) -> LabFigure:
    from dlojz.display.figures.run_figures import compare_figure

    return compare_figure(comparison, path)


@draws("Plan", "html")
def _plan_html(plan: Plan) -> str:
    from dlojz.display.plan_tables import plan_html

    return plan_html(plan)


@draws("Plan", "table")
def _plan_table(plan: Plan, most: int = 12) -> RenderableType:
    from dlojz.display.plan_tables import plan_table

    return plan_table(plan, most)


@draws("Plan", "figure")
def _plan_figure(plan: Plan, path: str | Path | None = None) -> LabFigure:
    from dlojz.display.figures.plan_figures import plan_figure

    return plan_figure(plan, path)


@draws("Choice", "html")
def _choice_html(choice: Choice) -> str:
    from dlojz.display.plan_tables import pairs_html

    return pairs_html(choice.lines())


@draws("LayoutVerdict", "html")
def _verdict_html(verdict: LayoutVerdict) -> str:
    from dlojz.base.table import safe

    return "".join(f"<p>{safe(line)}</p>" for line in str(verdict).splitlines())


@draws("Here", "html")
def _here_html(here: Here) -> str:
    from dlojz.display.figures.plan_figures import here_html

    return here_html(here)


@draws("Here", "figure")
def _here_figure(here: Here, measured_s: Mapping[str, float], path: str | Path | None = None) -> LabFigure:
    from dlojz.display.figures.plan_figures import here_figure

    return here_figure(here.kinds(), measured_s, path)
