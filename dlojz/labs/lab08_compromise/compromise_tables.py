"""Tables of lab 08, under one name: the student's figures beside the planner's, the package's, or what was measured.

None is made here; each is made by one of the modules `compromise_*_tables`.
"""

from __future__ import annotations

from dlojz.labs.lab08_compromise.exercises_alpa import plan_of
from dlojz.labs.lab08_compromise.figures_tables import (
    bloom_layouts,
    by_batch,
    case,
    chosen,
    documents,
    drawn,
    duels,
    front,
    held_out,
    known_steps,
    links,
    messages,
    predicted_and_run,
    ranks,
    reasons,
    splits,
    stage_times,
    trees,
)

__all__ = [
    "bloom_layouts",
    "by_batch",
    "case",
    "chosen",
    "documents",
    "drawn",
    "duels",
    "front",
    "held_out",
    "known_steps",
    "links",
    "messages",
    "plan_of",
    "predicted_and_run",
    "ranks",
    "reasons",
    "splits",
    "stage_times",
    "trees",
]
