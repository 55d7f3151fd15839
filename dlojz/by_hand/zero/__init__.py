"""ZeRO taken apart: what data parallelism keeps N times, each rank keeps one N-th of. Stage 1, 2 and 3 in plain torch.

After a step all ranks have the weights that one process would have, and no rank has kept more than its stage says. With
Ψ parameters of 4 bytes, Adam's 8 bytes of moments, and N ranks:

    stage   weights   gradients   moments   sent per step (elements)
    DDP     4Ψ        4Ψ          8Ψ        2Ψ   all-reduce
    1       4Ψ        4Ψ          8Ψ/N      2Ψ   reduce-scatter, all-gather
    2       4Ψ        4Ψ/N        8Ψ/N      2Ψ   the same, bucket by bucket during backward
    3       4Ψ/N      4Ψ/N        8Ψ/N      3Ψ   all-gather twice (forward, backward), reduce-scatter

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (arXiv
1910.02054), §5 (memory) and §7 (communication).
"""

from __future__ import annotations

from dlojz.by_hand.zero.flat import FlatWeights, MakeOptimizer, Zero
from dlojz.by_hand.zero.stage1 import ZeroStage1
from dlojz.by_hand.zero.stage2 import ZeroStage2
from dlojz.by_hand.zero.stage3 import ZeroStage3

__all__ = ["FlatWeights", "MakeOptimizer", "Zero", "ZeroStage1", "ZeroStage2", "ZeroStage3"]
