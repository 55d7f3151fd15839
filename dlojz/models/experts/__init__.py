"""Mixture of experts: many feed-forward networks instead of one, and a gate that sends each token to a few.

    x ──gate──► experts and weights                        (every token, K choices)
    x ──dispatch──► a buffer of C rows for each expert ──all-to-all──► the ranks that hold them
    y ◄──combine─── the weighted rows ◄──all-to-all── the experts' outputs

Importing this loads no torch; `layer`, `gate` and `exchange` do.

Source: Shazeer et al. 2017 (arXiv 1701.06538); Lepikhin et al. 2020, "GShard" (arXiv 2006.16668); Fedus et al. 2021,
"Switch Transformers" (arXiv 2101.03961).
"""

from dlojz.models.experts.routing import Routing, all_to_all_bytes

__all__ = ["Routing", "all_to_all_bytes"]
