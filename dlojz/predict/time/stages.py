"""Which layers a pipeline stage holds, for a whole model at once.

Layer 3. Invariant: every layer lies in exactly one stage. Stages that hold the same layers are computed once; the first
of them stands for all, because it keeps the most micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np

from dlojz.pipeline.partition import exact
from dlojz.predict.time.layouts import Integers, Reals
from dlojz.predict.time.workload import Cut, Workload


@dataclass(frozen=True, eq=False)
class Stages:
    """The stages of a pipeline, those that hold the same layers taken together.

    Attributes:
        counts: layers of each kind (columns) in each distinct stage (rows).
        first: number of the first such stage.
        times: how many such stages there are.
        order: which distinct stage each stage of the pipeline is.
    """

    counts: Reals
    first: Integers
    times: Integers
    order: Integers


@lru_cache(maxsize=4096)
def stages_of(workload: Workload, pp: int, embedding_slots: bool = False) -> Stages:
    """The stages that libraries make.

    A decoder's layers are shared out evenly; if they do not divide, the first stages hold one more, as many as it
    takes (78 layers on 12 stages: 7 on eleven and 1 on the last, as DeepSpeed dealt them). With `embedding_slots`
    embedding and logits count as a layer each. Blocks of an image model are cut so that the heaviest stage is as light
    as can be, by operations.

    Source: DeepSpeed, `runtime/utils.py`, `partition_balanced`; the Jean Zay rows from line 841 on.
    """
    bounds = _decoder_bounds(workload, pp, embedding_slots) if workload.size else _balanced_bounds(workload, pp)
    blocks = np.repeat(np.arange(len(workload.kinds)), [kind.count for kind in workload.kinds])
    rows = [tuple(np.bincount(blocks[start:stop], minlength=len(workload.kinds))) for start, stop in pairwise(bounds)]
    distinct = list(dict.fromkeys(rows))
    order = np.array([distinct.index(row) for row in rows])
    first = np.array([rows.index(row) for row in distinct])
    return Stages(np.array(distinct, float), first, np.bincount(order, minlength=len(distinct)), order)


def _decoder_bounds(workload: Workload, pp: int, embedding_slots: bool) -> list[int]:
    layers = workload.kinds[1].count
    blocks = layers + 2
    if pp == 1:
        return [0, blocks]
    if embedding_slots:
        each = -(-blocks // pp)
        return [min(each * stage, blocks) for stage in range(pp)] + [blocks]
    each = -(-layers // pp)
    return [0, *(1 + min(each * stage, layers) for stage in range(1, pp)), blocks]


def _balanced_bounds(workload: Workload, pp: int) -> list[int]:
    cut = Cut(1)
    weights: list[float] = []
    for kind in workload.kinds:
        flops = sum(product.flops for one in kind.operators(cut) for product in one.forward)
        weights += [flops] * kind.count
    return list(exact(weights, pp).bounds)
