"""The labs: one source each, checks that answer at once, hints, predictions, progress.

Layer 6, above everything. A notebook opens with two lines, the same in every language:

    from dlojz import labs
    lab = labs.start("01")

Invariant: this package adds nothing to what a notebook can do; it judges, hints and draws. Training, predicting and
comparing are `dlojz`'s own functions.
"""

from __future__ import annotations

from dlojz.labs.catalogue import NUMBERS, start
from dlojz.labs.difference import Difference, diff
from dlojz.labs.lab import Lab
from dlojz.labs.progress_page import overview
from dlojz.labs.verdict import NotDone

__all__ = ["NUMBERS", "Difference", "Lab", "NotDone", "diff", "overview", "start"]
