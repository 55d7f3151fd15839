"""One layout by event simulation of its pipeline: stages as uneven as they are, memory rank by rank.

Layer 3. Invariant: the same seconds per layer, message and update as the fast path; only the pipeline is played out,
action by action, where the fast path uses a closed form. On equal stages both give the same step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dlojz.hardware import Cluster
from dlojz.pipeline.catalogue import build
from dlojz.pipeline.costs import Costs
from dlojz.pipeline.memory import peak_activations
from dlojz.pipeline.simulator import simulate as play
from dlojz.pipeline.timeline import Timeline
from dlojz.predict.time.calibration import Calibration
from dlojz.predict.time.estimate import step_parts, weights_of
from dlojz.predict.time.layouts import SCHEDULES, Layouts, Reals
from dlojz.predict.time.memory import stage_memory
from dlojz.predict.time.passes import Passes, passes_of
from dlojz.predict.time.stages import Stages, stages_of
from dlojz.predict.time.step import Parts, boundary_s
from dlojz.predict.time.workload import Workload
from dlojz.schema import LabError
from dlojz.text import say


@dataclass(frozen=True, eq=False)
class Simulation:
    """A step, played out.

    Attributes:
        step_s: seconds of the step.
        parts: of the fast path, for comparison; their bubble is the closed form's.
        pipeline_s: seconds of the pipeline alone, from the first forward to the last backward.
        timeline: of every action on every stage's rank.
        rank_bytes: bytes of each stage's rank, as `nvidia-smi` shows them.
    """

    step_s: float
    parts: Parts
    pipeline_s: float
    timeline: Timeline
    rank_bytes: tuple[float, ...]


def simulate(workload: Workload, cluster: Cluster, layouts: Layouts, calibration: Calibration) -> Simulation:
    """One layout, played out with the pipeline simulator.

    Args:
        workload: what is trained.
        cluster: on what.
        layouts: one layout.
        calibration: of the cluster's GPUs.

    Raises:
        LabError: if there is not exactly one layout, its layers cannot be dealt out to all chunks, or its schedule
            refuses its numbers.
    """
    if len(layouts) != 1:
        raise LabError(
            say(
                en=f"simulate takes one layout, but {len(layouts)} were received: use estimate for many.",
                fr=f"simulate prend une configuration, mais {len(layouts)} ont été reçues : utilisez estimate.",
            )
        )
    p, v, m = (int(column[0]) for column in (layouts.pp, layouts.chunks, layouts.micro_batches))
    name = SCHEDULES[int(layouts.schedule[0])]
    schedule = build("interleaved" if v > 1 else "1f1b" if name == "interleaved" else name, p, m, **_chunks(v))
    chunks = _chunk_stages(workload, p, v, bool(layouts.embedding_slots[0]))
    passes = passes_of(workload, cluster, layouts, calibration)
    boundary = float(boundary_s(workload, cluster, layouts, calibration)[0]) / v
    forward, backward = _times(chunks, passes)
    costs = Costs(
        forward=tuple(float(one) + boundary for one in forward),
        backward=tuple(float(one) + boundary for one in backward),
        backward_input=tuple((float(one) + boundary) / 2 for one in backward),
        backward_weight=tuple((float(one) + boundary) / 2 for one in backward),
    )
    timeline = play(schedule, costs)
    parts = step_parts(workload, cluster, layouts, calibration)
    beside = float((parts.data + parts.optimizer + parts.constant)[0])
    kept = tuple(peak_activations(schedule))
    return Simulation(
        timeline.makespan + beside,
        parts,
        timeline.makespan,
        timeline,
        _rank_bytes(workload, layouts, p, v, kept, chunks),
    )


def _chunks(v: int) -> dict[str, Any]:
    return {"chunks": v} if v > 1 else {}


def _chunk_stages(workload: Workload, p: int, v: int, embedding_slots: bool) -> Stages:
    """The p·v stages in the order in which a sample passes them."""
    if v > 1 and workload.size is not None and workload.size.layers % (p * v):
        layers = workload.size.layers
        raise LabError(
            say(
                en=f"{layers} layers cannot be dealt out evenly to {p} stages of {v} chunks: {p * v} must divide them.",
                fr=f"{layers} couches ne se répartissent pas sur {p} étages de {v} chunks : {p * v} doit les diviser.",
            )
        )
    return stages_of(workload, p * v, embedding_slots)


def _times(chunks: Stages, passes: Passes) -> tuple[Reals, Reals]:
    """Seconds of the forward and of the backward, with what is computed again, of every chunk in order."""
    forward = chunks.counts @ (passes.forward + passes.tensor_forward)
    backward = chunks.counts @ (passes.backward + passes.again + passes.tensor_backward)
    return forward[chunks.order, 0], backward[chunks.order, 0]


def _rank_bytes(
    workload: Workload, layouts: Layouts, p: int, v: int, kept: tuple[float, ...], chunks: Stages
) -> tuple[float, ...]:
    """Bytes of every rank: its chunks' states, and as many of their micro-batches as the schedule keeps at most."""
    weights = weights_of(workload, layouts, chunks)[:, 0]
    found = []
    for rank in range(p):
        own = chunks.order[rank::p]
        counts, held = chunks.counts[own].sum(axis=0), np.array([kept[rank] / v])
        found.append(stage_memory(workload, layouts, counts, held, np.array([weights[own].sum()])).total_bytes[0])
    return tuple(float(one) for one in found)
