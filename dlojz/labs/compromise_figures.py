"""Figures and tables of lab 08, under one name: giants, links, splits, BLOOM, shardings, stages, neighbours, errors.

Layer 6 (labs), on `dlojz.viz`. Invariant: each is drawn by one of the modules `compromise_*_figures`; none is drawn
here.
"""

from __future__ import annotations

from dlojz.labs.compromise_bloom_figures import bloom
from dlojz.labs.compromise_error_figures import errors
from dlojz.labs.compromise_giants_figures import giants
from dlojz.labs.compromise_measured_figures import alpha_beta, neighbours
from dlojz.labs.compromise_sharding_figures import mlp_sharding
from dlojz.labs.compromise_split_figures import bubble_or_all_reduce
from dlojz.labs.compromise_stage_figures import stages

__all__ = [
    "alpha_beta",
    "bloom",
    "bubble_or_all_reduce",
    "errors",
    "giants",
    "mlp_sharding",
    "neighbours",
    "stages",
]
