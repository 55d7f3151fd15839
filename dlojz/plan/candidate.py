"""One layout in words and numbers, as a person reads it.

Layer 4. Invariant: a candidate says all that decides its bytes and seconds; two that are equal run alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np

from dlojz.plan.engines import OFFERS
from dlojz.plan.space import DEGREES, Space
from dlojz.predict.time import CHECKPOINTING, OFFLOAD, SCHEDULES, Layouts
from dlojz.text import say

FREE = (
    "tp",
    "pp",
    "cp",
    "ep",
    "zero",
    "micro_batch",
    "schedule",
    "chunks",
    "checkpointing",
    "sequence_parallel",
    "offload",
    "engine",
)
"""What one chooses; dp and the number of micro-batches follow."""


@dataclass(frozen=True)
class Candidate:
    """A layout of a question.

    Attributes:
        gpus: in all, dp × tp × pp × cp.
        dp, tp, pp: replicas, tensor-parallel ranks, pipeline stages.
        zero: stage, 0 to 3.
        micro_batch, micro_batches: samples of one forward; forwards of one replica in a step.
        schedule, chunks: of the pipeline; `1f1b` and 1 without one.
        checkpointing: none, selective or full.
        sequence_parallel: whether tensor-parallel ranks share norms and dropouts out along the sequence.
        offload: what lies in the host's memory: none, optimizer or all.
        engine: of `dlojz.plan.engines.OFFERS`.
        cp: context-parallel ranks, which share each sample's tokens out.
        ep: replicas that share the experts of a mixture out.
    """

    gpus: int
    dp: int
    tp: int
    pp: int
    zero: int
    micro_batch: int
    micro_batches: int
    schedule: str
    chunks: int
    checkpointing: str
    sequence_parallel: bool
    offload: str
    engine: str
    cp: int = 1
    ep: int = 1

    @property
    def global_batch(self) -> int:
        """Samples of one step."""
        return self.dp * self.micro_batch * self.micro_batches

    @property
    def degrees(self) -> str:
        """Its degrees in a few words; cp and ep where there are any."""
        more = (f" · cp {self.cp}" if self.cp > 1 else "") + (f" · ep {self.ep}" if self.ep > 1 else "")
        return f"dp {self.dp} · tp {self.tp} · pp {self.pp}{more}"

    @property
    def title(self) -> str:
        """In one line."""
        parts = [self.engine, self.degrees]
        if self.zero:
            parts.append(f"ZeRO-{self.zero}")
        number = f" × {self.micro_batches}" if self.micro_batches else ""  # none where the batch cannot be dealt out
        parts.append(f"micro-batch {self.micro_batch}{number}")
        if self.pp > 1:
            parts.append(self.schedule + (f" × {self.chunks}" if self.chunks > 1 else ""))
        if self.checkpointing != "none":
            parts.append(checkpointing_words(self.checkpointing))
        if self.sequence_parallel:
            parts.append("SP")
        if self.offload != "none":
            parts.append(say(en=f"offload {self.offload}", fr=f"offload {self.offload}"))
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    def changed_to(self, other: Candidate) -> dict[str, tuple[Any, Any]]:
        """What one would change to get another one: name → (here, there); what follows from it is left out."""
        pairs = {name: (getattr(self, name), getattr(other, name)) for name in ("gpus", *FREE)}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def checkpointing_words(kind: str) -> str:
    """A kind of checkpointing in the reader's language."""
    return {
        "none": say(en="everything kept", fr="tout gardé"),
        "selective": say(en="selective recomputation", fr="recalcul sélectif"),
        "full": say(en="full recomputation", fr="recalcul complet"),
    }[kind]


def candidates_of(space: Space, places: Any) -> list[Candidate]:
    """Layouts of a space by their flat places."""
    columns = {name: column.tolist() for name, column in space.columns(np.atleast_1d(places)).items()}
    words = {"schedule": SCHEDULES, "checkpointing": CHECKPOINTING, "offload": OFFLOAD, "engine": space.names}
    made = []
    for place in range(len(columns["dp"])):
        one: dict[str, Any] = {
            field.name: columns[field.name][place] for field in fields(Candidate) if field.name in columns
        }
        one |= {name: legal[one[name]] for name, legal in words.items()}
        made.append(Candidate(**{**one, "sequence_parallel": bool(one["sequence_parallel"])}))
    return made


def layouts_of(candidates: list[Candidate], space: Space) -> Layouts:
    """Candidates as the cost model takes them, with the precision and attention of a space."""
    offers = [OFFERS[one.engine] for one in candidates]
    taken = (*DEGREES[1:], "zero", "chunks", "schedule", "checkpointing", "offload")
    columns: Mapping[str, Any] = {name: [getattr(one, name) for one in candidates] for name in taken}
    return Layouts.of(
        precision=space.precision,
        **columns,
        sequence_parallel=[int(one.sequence_parallel) for one in candidates],
        engine=[offer.place(one.pp > 1) for offer, one in zip(offers, candidates, strict=True)],
        overlap=[int(offer.overlap) for offer in offers],
        gradient_bytes=[offer.gradient_bytes(space.precision) for offer in offers],
        fused_attention=[int(space.fused_attention)] * len(candidates),
    )
