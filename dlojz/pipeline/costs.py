"""What the actions of a pipeline cost: time per stage, the links, memory per micro-batch.

Layer 2. Invariant: costs are numbers that somebody chose or measured; a schedule knows nothing of them. Times have the
unit of their maker (time units in figures, seconds for measured means); the simulator only adds and compares them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from dlojz.schema import LabError, one_of
from dlojz.text import say

PerStage = float | tuple[float, ...]
"""One value for every stage, or one per stage."""
PerLink = float | tuple[tuple[float, ...], ...]
"""One value for every link, or a matrix [from rank][to rank]."""
Sends = Literal["buffered", "paired", "rendezvous"]
SENDS: tuple[Sends, ...] = ("buffered", "paired", "rendezvous")

_PER_STAGE = (
    "forward", "backward_input", "backward_weight", "backward", "overlapped", "update", "kept_for_input",
    "kept_for_weight",
)  # fmt: skip
_SCALARS = ("message_bytes", "evict", "load", "eviction_transfer")


@dataclass(frozen=True)
class Costs:
    """Times and memory of the actions.

    Attributes:
        forward, backward_input, backward_weight: time of one stage for one micro-batch.
        backward: time of a whole backward; by default the sum of its two parts.
        overlapped: time of a forward and a backward that run at once; by default the sum of both, so no gain.
        update: time of a stage's own optimizer step, in schedules that have one.
        overhead: time a rank needs between two of its actions, which is no work.
        latency: time a message is under way between two ranks, besides its bytes.
        bandwidth: bytes per unit of time; None: messages take their latency only.
        message_bytes: bytes of one message (one micro-batch's boundary activation, or its gradient).
        sends: "buffered" (the sender goes on at once; the literature's assumption), "paired" (the sender waits until
            the receiver has it; what a rank sends and receives between two actions is posted together), "rendezvous"
            (the same, but one after the other: where a careless runtime deadlocks).
        kept_for_input, kept_for_weight: activation memory of one micro-batch in one stage, in stage-micro-batches:
            from the start of its forward to the end of its backward for the input, and from there to the end of its
            backward for the weights (M_B and M_W of Qi et al. 2024, §2.3). A whole backward frees all at its end.
        slice_times: relative time of each token slice (TeraPipe); they are applied to forward and backward alike.
        evict, load: time that a rank spends on starting an eviction or a fetch (BPipe); `eviction_transfer` is how
            long the activations are under way, while both ranks compute.

    Raises:
        LabError: for a time that is negative or not finite.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    backward: PerStage | None = None
    overlapped: PerStage | None = None
    update: PerStage = 0.0
    overhead: float = 0.0
    latency: PerLink = 0.0
    bandwidth: PerLink | None = None
    message_bytes: float = 0.0
    sends: Sends = "buffered"
    kept_for_input: PerStage = 1.0
    kept_for_weight: PerStage = 1.0
    slice_times: tuple[float, ...] = ()
    evict: float = 0.0
    load: float = 0.0
    eviction_transfer: float = 0.0

    def __post_init__(self) -> None:
        if self.sends not in SENDS:
            raise LabError(one_of("sends", self.sends, SENDS))
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "sends" or value is None:
                continue
            if isinstance(value, list):
                value = tuple(tuple(row) if isinstance(row, list) else row for row in value)
                object.__setattr__(self, field.name, value)
            for number in _numbers(value):
                positive = field.name == "bandwidth"
                if not (
                    isinstance(number, int | float)
                    and math.isfinite(number)
                    and (number > 0 or (not positive and number == 0))
                ):
                    raise LabError(_refused(field.name, number, positive))

    def of_stage(self, name: str, stage: int) -> float:
        """The value of a per-stage field for one stage.

        Raises:
            LabError: if the field holds fewer values than there are stages.
        """
        value = getattr(self, name)
        if value is None:
            if name == "backward":
                return self.of_stage("backward_input", stage) + self.of_stage("backward_weight", stage)
            raise LabError(one_of("cost", name, _PER_STAGE))
        if not isinstance(value, tuple):
            return float(value)
        if stage >= len(value):
            raise LabError(
                say(
                    en=f"{name} holds {len(value)} values, but the schedule has a stage {stage}: give one value per "
                    "stage, or one for all.",
                    fr=f"{name} contient {len(value)} valeurs, mais l’ordonnancement a un étage {stage} : donnez une "
                    "valeur par étage, ou une pour tous.",
                )
            )
        return float(value[stage])

    def per_stage(self, name: str, stages: int) -> list[float]:
        """The values of a per-stage field for all stages; more values than stages are refused too."""
        value = getattr(self, name)
        if isinstance(value, tuple) and len(value) != stages:
            raise LabError(
                say(
                    en=f"{name} holds {len(value)} values, but the schedule has {stages} stages: give one value per "
                    "stage, or one for all.",
                    fr=f"{name} contient {len(value)} valeurs, mais l’ordonnancement a {stages} étages : donnez une "
                    "valeur par étage, ou une pour tous.",
                )
            )
        return [self.of_stage(name, stage) for stage in range(stages)]

    def delay(self, source: int, destination: int) -> float:
        """Time between the end of a producer and the moment its consumer on another rank may start."""
        if source == destination:
            return 0.0
        delay = _of_link("latency", self.latency, source, destination)
        if self.bandwidth is not None and self.message_bytes:
            delay += self.message_bytes / _of_link("bandwidth", self.bandwidth, source, destination)
        return delay

    def with_(self, **changes: object) -> Costs:
        """The same costs but for some fields."""
        return replace(self, **changes)  # type: ignore[arg-type]


def _numbers(value: object) -> Sequence[object]:
    if isinstance(value, tuple):
        return [number for row in value for number in (row if isinstance(row, tuple) else (row,))]
    return (value,)


def _refused(name: str, number: object, positive: bool) -> str:
    least_en, least_fr = ("above 0", "plus grand que 0") if positive else ("0 or more", "au moins égal à 0")
    return say(
        en=f"{name} must be a finite number, {least_en}, but {number!r} was received.",
        fr=f"{name} doit être un nombre fini, {least_fr}, mais {number!r} a été reçu.",
    )


def _of_link(name: str, value: PerLink, source: int, destination: int) -> float:
    if not isinstance(value, tuple):
        return float(value)
    try:
        return float(value[source][destination])
    except IndexError:
        raise LabError(
            say(
                en=f"{name} is a matrix of {len(value)} ranks, but the link {source} to {destination} is needed: give "
                "a square matrix [from rank][to rank], or one value for all links.",
                fr=f"{name} est une matrice de {len(value)} rangs, mais il faut le lien {source} vers {destination} : "
                "donnez une matrice carrée [rang source][rang destination], ou une valeur pour tous les liens.",
            )
        ) from None
