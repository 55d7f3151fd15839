"""Figures, tables and panels of the lab: nothing is computed here.

A category has one colour and one hatch everywhere, and texts of users are never interpreted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from dlojz.base.display_hook import View

DRAWERS: Final[dict[tuple[str, View], str]] = {
    ("Comparison", "markdown"): "tables:comparison_markdown",
    ("Comparison", "html"): "tables:comparison_html",
    ("Comparison", "table"): "tables:FittedComparison",
    ("Comparison", "figure"): "figures.run_figures:compare_figure",
    ("Plan", "html"): "plan_tables:plan_html",
    ("Plan", "table"): "plan_tables:plan_table",
    ("Plan", "figure"): "figures.plan_figures:plan_figure",
    ("Summary", "html"): "plan_tables:summary_html",
    ("LayoutVerdict", "html"): "plan_tables:verdict_html",
    ("Tree", "html"): "plan_tables:tree_html",
    ("Timeline", "figure"): "pipeline_drawing:schedule_figure",
    ("Here", "html"): "plan_tables:here_html",
    ("Here", "figure"): "figures.plan_figures:here_figure",
}
"""Functions that draw objects of lower rooms, by class and view; `dlojz.base.display_hook` loads them when asked."""
