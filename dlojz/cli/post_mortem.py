"""What a run held when it ended, for `dlojz doctor RUN`; found out in `dlojz.runs.post_mortem`.

Layer 6. Invariant: nothing is computed here.
"""

from __future__ import annotations

from dlojz.runs.post_mortem import CHEAPEST_FIRST
from dlojz.runs.post_mortem import PostMortem as Diagnosis
from dlojz.runs.post_mortem import post_mortem as diagnose

__all__ = ["CHEAPEST_FIRST", "Diagnosis", "diagnose"]
