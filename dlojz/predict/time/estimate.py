"""The fast path: seconds and bytes of many layouts at once.

Layer 3. Invariant: one layout gets the same numbers alone and among a hundred thousand; nothing is a loop over layouts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from dlojz.hardware import Cluster
from dlojz.predict.time.calibration import Calibration
from dlojz.predict.time.layouts import Integers, Layouts, Reals
from dlojz.predict.time.memory import CONTEXT_BYTES, Memories, memories_of
from dlojz.predict.time.passes import Passes, passes_of
from dlojz.predict.time.stages import Stages, stages_of
from dlojz.predict.time.step import Parts, parts_of
from dlojz.predict.time.workload import Workload


@dataclass(frozen=True, eq=False)
class Estimates:
    """What the cost model says of layouts, one place per layout.

    Attributes:
        parts: seconds of a step by what they go into.
        memory: bytes on the fullest rank by category.
        fits: whether the fullest rank's bytes are within the GPU's memory.
    """

    parts: Parts
    memory: Memories
    fits: NDArray[np.bool_]

    @property
    def step_s(self) -> Reals:
        """Seconds of one step."""
        return self.parts.step_s

    @property
    def memory_bytes(self) -> Reals:
        """Bytes of the fullest rank, as `nvidia-smi` shows them."""
        return self.memory.total_bytes


def by_stages(layouts: Layouts) -> tuple[Layouts, Integers, list[tuple[int, bool, slice]]]:
    """Layouts in an order in which those that share one list of stages stand together.

    Returns:
        The layouts in that order, the place of each before, and for every list of stages its pp, whether embedding and
        logits count as layers, and where its layouts stand.
    """
    key = layouts.pp * 2 + layouts.embedding_slots
    order = np.argsort(key, kind="stable")
    values, starts = np.unique(key[order], return_index=True)
    ends = [*starts[1:].tolist(), len(key)][: len(values)]  # none at all, of no layouts
    spans = zip(values.tolist(), starts.tolist(), ends, strict=True)
    return layouts[order], order, [(value // 2, bool(value % 2), slice(start, end)) for value, start, end in spans]


def weights_of(workload: Workload, layouts: Layouts, stages: Stages) -> Reals:
    """Weights that one rank of each distinct stage (rows) holds; a tied matrix is on both its stages.

    Experts are shared out over the ep ranks, all else over the tensor-parallel ones.

    Source: Narayanan et al. 2021, §2.3: the embedding's copy on the last stage.
    """
    each = np.array([kind.parameters for kind in workload.kinds], float)
    if workload.size is not None and workload.size.tied and stages.order.size > 1:
        each[-1] = workload.size.vocabulary * workload.size.hidden
    experts = np.array([kind.expert_parameters for kind in workload.kinds], float)
    if not experts.any():
        return (stages.counts @ each)[:, None] / layouts.tp
    shared = (stages.counts @ experts)[:, None]
    return ((stages.counts @ each)[:, None] - shared) / layouts.tp + shared / layouts.ep


def estimate(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Estimates:
    """Seconds and bytes of every layout.

    Args:
        workload: what is trained.
        cluster: on what.
        layouts: how.
        calibration: of the cluster's GPUs.
    """
    made = memories(workload, layouts)
    if not cluster.gpu.device.context_bytes:  # no GPU: nothing takes its part before the model
        made = replace(made, reserve=made.reserve - CONTEXT_BYTES)
    fits = made.total_bytes <= cluster.gpu.device.memory_bytes
    return Estimates(step_parts(workload, cluster, layouts, calibration), made, fits)


def step_parts(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Parts:
    """Seconds of the parts of a step of every layout."""
    ordered, order, groups = by_stages(layouts)
    passes = passes_of(workload, cluster, ordered, calibration)
    parts = {field.name: np.zeros(len(layouts)) for field in fields(Parts)}
    for pp, slots, span in groups:
        some, stages = ordered[span], stages_of(workload, pp, slots)
        own = Passes(*(getattr(passes, field.name)[:, span] for field in fields(Passes)))
        weights = weights_of(workload, some, stages).max(axis=0)
        made = parts_of(workload, cluster, some, calibration, own, stages, weights)
        for name, part in parts.items():
            part[order[span]] = getattr(made, name)
    return Parts(**parts)


def memories(workload: Workload, layouts: Layouts) -> Memories:
    """Bytes of the fullest rank of every layout."""
    ordered, order, groups = by_stages(layouts)
    columns = {field.name: np.zeros(len(layouts)) for field in fields(Memories)}
    for pp, slots, span in groups:
        some, stages = ordered[span], stages_of(workload, pp, slots)
        made = memories_of(workload, some, stages, weights_of(workload, some, stages))
        for name, column in columns.items():
            column[order[span]] = getattr(made, name)
    return Memories(**columns)
