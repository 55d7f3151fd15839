"""Mixture of experts: many feed-forward networks in the place of one, and a gate that sends each token to a few.

Invariant: ``import dlojz.models.experts`` loads no torch; `layer`, `gate`, `experts`, `exchange` and `parallel` do.

    x ──gate──► which experts, with which weights          (every token, K choices)
    x ──dispatch──► a buffer of C rows for each expert ──all-to-all──► the ranks that hold them
    y ◄──combine─── the rows again, weighted ◄──all-to-all── the experts' outputs

Source: Shazeer et al. 2017 (arXiv 1701.06538); Lepikhin et al. 2020, "GShard" (arXiv 2006.16668); Fedus et al. 2021,
"Switch Transformers" (arXiv 2101.03961).
"""

from __future__ import annotations

from dlojz.models.experts.routing import Routing, all_to_all_bytes

__all__ = ["Routing", "all_to_all_bytes"]
