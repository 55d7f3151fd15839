"""Tables of lab 08, under one name: the student's figures beside the planner's, the package's, or what was measured.

Layer 6 (labs). Invariant: none is made here; each is made by one of the modules `compromise_*_tables`.
"""

from __future__ import annotations

from dlojz.labs.compromise_layout_tables import (
    bloom_layouts,
    chosen,
    drawn,
    front,
    links,
    messages,
    ranks,
    reasons,
    splits,
    trees,
)
from dlojz.labs.compromise_search_tables import (
    by_batch,
    case,
    documents,
    duels,
    held_out,
    known_steps,
    predicted_and_run,
    stage_times,
)
from dlojz.labs.compromise_stage_exercises import plan_of

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
