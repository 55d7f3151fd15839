"""The labs: one source each, checks that answer at once, hints, predictions, progress.

A notebook opens with two lines, the same in every language:

    from dlojz import labs
    lab = labs.start("01")

This package adds nothing to what a notebook can do; it judges, hints and draws. Training, predicting and comparing are
`dlojz`'s own functions. A name is fetched when it is first used, so that the list of the labs loads no judge.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlojz.labs.kit.exercise import NotDone
    from dlojz.labs.kit.lab import NUMBERS, Difference, Lab, diff, start
    from dlojz.labs.kit.progress_page import overview
    from dlojz.labs.script.script_judge import judge_in_notebook as judge_script

_HOME_OF = {
    "NotDone": "kit.exercise",
    "judge_script": "script.script_judge:judge_in_notebook",
    "overview": "kit.progress_page",
}
"""Modules of the names that are not in `kit.lab`, and what they are called there."""

__all__ = ["NUMBERS", "Difference", "Lab", "NotDone", "diff", "judge_script", "overview", "start"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"dlojz.labs has no name {name!r}; it offers: {', '.join(__all__)}.")
    module, _, original_name = _HOME_OF.get(name, "kit.lab").partition(":")
    return getattr(importlib.import_module(f"dlojz.labs.{module}"), original_name or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
