"""What a run held when it ended: for one that ran out of memory, what filled it and what to do about it.

Layer 5. Invariant: it is said which figures were measured and which are predicted; a lever is only proposed with its
effect on this very run and the command that tries it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dlojz.footprint import Memory
from dlojz.record import RunRecord
from dlojz.runs.memory_words import command, cost
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.viz.grid import status_label

if TYPE_CHECKING:
    from dlojz.hardware import Device
    from dlojz.predict.advice import Lever
    from dlojz.runs.handle import Run

LEVERS_SHOWN = 3
WORTH = 0.02
"""Share of what is taken that a lever has to save to be proposed."""
NEAR = 0.7
"""Share of the limit from which on a peak explains that memory ran out: the process itself and caches take the rest."""
CHEAPEST_FIRST = (
    "micro-batch",
    "zero-1",
    "zero-2",
    "selective",
    "precision",
    "zero-3",
    "checkpointing",
    "offload-optimizer",
    "offload-activations",
    "tp",
    "pp",
)


@dataclass(frozen=True)
class PostMortem:
    """What is known of a run's memory.

    Args:
        record: of the run.
        out_of_memory: whether it ended for want of memory.
        measured: whether `memory` was measured; it is predicted otherwise.
        rank: the fullest one known.
        memory: of that rank.
        limit_bytes, limit_of: what the rank could take, and whose limit that is; None where it is not known.
        levers: the cheapest that help, those that can be run first; only for a run out of memory.
    """

    record: RunRecord
    out_of_memory: bool
    measured: bool
    rank: int
    memory: Memory
    limit_bytes: int | None
    limit_of: str
    levers: tuple[Lever, ...]

    @property
    def taken_bytes(self) -> int:
        """What the rank takes of its device, at its peak."""
        return self.memory.device_bytes or self.memory.peak_bytes or 0

    @property
    def limit_explains(self) -> bool:
        """Whether the rank's peak comes near the limit known; memory was refused by something else otherwise."""
        return self.limit_bytes is not None and self.taken_bytes >= NEAR * self.limit_bytes

    def fits(self, lever: Lever) -> bool | None:
        """Whether the run would fit with a lever alone; None where what limited it is not known."""
        return lever.taken_bytes <= (self.limit_bytes or 0) if self.limit_explains else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {
            "run_id": self.record.run_id,
            "status": self.record.status,
            "reason": self.record.reason,
            "out_of_memory": self.out_of_memory,
            "source": "measured" if self.measured else "predicted",
            "rank": self.rank,
            "memory": self.memory.to_dict(),
            "limit_bytes": self.limit_bytes,
            "limit_of": self.limit_of,
            "levers": [
                {
                    "name": lever.name,
                    "change": lever.change,
                    "cost": cost(lever.name),
                    "taken_bytes": lever.taken_bytes,
                    "saved_bytes": lever.saved_bytes,
                    "host_bytes": lever.host_bytes,
                    "fits": self.fits(lever),
                    "runnable": lever.runnable,
                    "command": command(lever),
                }
                for lever in self.levers
            ],
        }


def post_mortem(run: Run) -> PostMortem:
    """Find out what filled the memory of a run that has ended.

    Raises:
        LabError: if the run has not ended yet, or can be neither read nor predicted.
    """
    from dlojz.compare import gpu_of, limit_of
    from dlojz.predict.forecast import heaviest

    record = run.record
    if record is None:
        raise LabError(
            say(
                en=f"the run {run.run_id} is {run.state} and has no record yet: wait for its end, or stop it with "
                f"`dlojz cancel {run.run_id}`.",
                fr=f"l’exécution {run.run_id} n’est pas terminée (état : {status_label(run.state)}) : attendez sa fin, "
                f"ou arrêtez-la par `dlojz cancel {run.run_id}`.",
            )
        )
    gpu = gpu_of(record)
    limit = limit_of(record)
    told = [footprint for footprint in record.footprints if footprint.memory.at_peak_bytes]
    if told:
        fullest = max(told, key=lambda footprint: footprint.memory.peak_bytes or 0)
        rank, memory = fullest.rank, fullest.memory
    else:
        forecast = heaviest(record.config, gpu)
        rank, memory = forecast.rank, forecast.memory
    found = PostMortem(
        record=record,
        out_of_memory=record.status == "oom" or "ran out of memory" in record.reason,
        measured=bool(told),
        rank=rank,
        memory=memory,
        limit_bytes=limit[0] if limit else None,
        limit_of=limit[1] if limit else "",
        levers=(),
    )
    return replace(found, levers=_cheapest(found, gpu)) if found.out_of_memory else found


def _cheapest(diagnosis: PostMortem, gpu: Device | None) -> tuple[Lever, ...]:
    """Levers worth their price: what can be run first, then what suffices alone, then the cheapest."""
    from dlojz.predict.advice import levers

    helping = [
        lever
        for lever in levers(diagnosis.record.config, gpu)
        if lever.saved_bytes >= WORTH * (lever.saved_bytes + lever.taken_bytes)
        # Without a GPU the memory of the device is the host's: there is nowhere to move to.
        and (gpu is not None or not lever.name.startswith("offload"))
    ]

    def price(lever: Lever) -> tuple[bool, bool, int]:
        known = lever.name in CHEAPEST_FIRST
        place = CHEAPEST_FIRST.index(lever.name) if known else len(CHEAPEST_FIRST)
        return not lever.runnable, diagnosis.fits(lever) is False, place

    return tuple(sorted(helping, key=price)[:LEVERS_SHOWN])
