"""Figures of lab 08 under one name, as its notebook imports them."""

from __future__ import annotations

from dlojz.labs.lab08_compromise.figures_published import bloom, bubble_or_all_reduce, giants
from dlojz.labs.lab08_compromise.figures_search import alpha_beta, errors, mlp_sharding, neighbours, stages

__all__ = ["alpha_beta", "bloom", "bubble_or_all_reduce", "errors", "giants", "mlp_sharding", "neighbours", "stages"]
