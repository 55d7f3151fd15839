"""The labs: one source each, checks that answer at once, hints, predictions, progress.

A notebook opens with two lines, the same in every language:

    from dlojz import labs
    lab = labs.start("01")

This package adds nothing to what a notebook can do; it judges, hints and draws. Training, predicting and comparing are
`dlojz`'s own functions.
"""

from __future__ import annotations

from dlojz.labs.kit.exercise import NotDone
from dlojz.labs.kit.lab import NUMBERS, Difference, Lab, diff, start
from dlojz.labs.kit.progress_page import overview
from dlojz.labs.script.script_judge import judge_in_notebook as judge_script

__all__ = ["NUMBERS", "Difference", "Lab", "NotDone", "diff", "judge_script", "overview", "start"]
