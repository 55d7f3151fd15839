"""Memory rank by rank: one bar per pipeline stage, and what a refusal for want of memory says of the fullest.

Layer 4. Invariant: the same closed forms as the search, stage by stage; the fullest stage's sum is the search's.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

import numpy as np

from dlojz.plan.subject import Subject
from dlojz.predict.time import Layouts, Memories
from dlojz.predict.time.estimate import weights_of
from dlojz.predict.time.memory import in_flight, stage_memory
from dlojz.predict.time.stages import stages_of

PARTS: Final = tuple(field.name for field in fields(Memories) if field.name != "host")
"""Categories on the device, in the order in which they are stacked."""


@dataclass(frozen=True)
class RankMemory:
    """One rank of a pipeline stage.

    Attributes:
        stage: its number, from 0.
        layers: layers, or blocks, that it holds.
        in_flight: micro-batches whose activations it keeps at most; of all its chunks together.
        parts: bytes by category (`PARTS`).
        host: bytes in the host's memory.
    """

    stage: int
    layers: int
    in_flight: float
    parts: dict[str, float]
    host: float

    @property
    def total_bytes(self) -> float:
        """As `nvidia-smi` shows them."""
        return sum(self.parts.values())


def rank_memories(subject: Subject, layout: Layouts) -> list[RankMemory]:
    """Memory of a rank of every stage of one layout.

    Args:
        subject: the model.
        layout: one.
    """
    work = subject.workload
    pp = int(layout.pp[0])
    stages = stages_of(work, pp, bool(layout.embedding_slots[0]))
    weights = weights_of(work, layout, stages)
    made = []
    for stage in range(pp):
        own = int(stages.order[stage])
        held = in_flight(layout, stage)
        memory = stage_memory(work, layout, stages.counts[own], held, weights[own])
        parts = {name: float(np.atleast_1d(getattr(memory, name))[0]) for name in PARTS}
        layers = stages.counts[own][1] if work.size is not None else stages.counts[own].sum()
        made.append(RankMemory(stage, int(layers), float(held[0]), parts, float(np.atleast_1d(memory.host)[0])))
    return made


def fullest(ranks: list[RankMemory]) -> RankMemory:
    """The rank with the most bytes; of equal ones the first."""
    return max(ranks, key=lambda one: one.total_bytes)
