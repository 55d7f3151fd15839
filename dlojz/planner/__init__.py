"""Planner: which layout of a model on a cluster is the best compromise, and why the others are not.

Nothing is run and nothing is measured; `alpa` is a readable version of a planner that searches operator by operator.

Read in this order: `planned_model` and `question` (what is planned for), `space` (all layouts), `search` (bytes,
seconds, the front), `explain` (refusals), `tree` (which strategy when), `export` (files), `ask` (`plan` itself).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlojz.planner.answer import Choice, Plan
    from dlojz.planner.ask import plan
    from dlojz.planner.explain import LayoutVerdict

_HOME_OF = {"plan": "ask", "Plan": "answer", "Choice": "answer", "LayoutVerdict": "explain"}


def __getattr__(name: str) -> Any:
    """The four names, fetched when they are first used: `validation` and `alpa` need none of them."""
    if name not in _HOME_OF:
        raise AttributeError(f"dlojz.planner has no name {name!r}")
    import importlib

    return getattr(importlib.import_module(f"dlojz.planner.{_HOME_OF[name]}"), name)


__all__ = ["Choice", "LayoutVerdict", "Plan", "plan"]
