"""Footprint of a training step on one rank, predicted or measured: one schema for both.

A predicted and a measured footprint of the same run differ only in `source` and in figures, so that comparing them is a
join. `None` means "not known", never zero. Units are in the field names.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

from pydantic import Field

from dlojz.base.contract import Contract

Category = Literal["weights", "gradients", "optimizer", "master", "activations", "buffers", "workspace", "script"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
NO_GRAD: Final = "no_grad"
"""Phase of a script's forward pass without gradients: an evaluation, or a teacher's."""
STATES: tuple[Category, ...] = ("weights", "gradients", "optimizer", "master", "buffers")

Collective = Literal[
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
    "send",
    "recv",
    "barrier",
]


Origin = Literal["wrapper", "clipping", "script"]
ORIGINS: tuple[Origin, ...] = get_args(Origin)
"""Who calls a collective: what wraps the model or drives its training (DDP, FSDP, DeepSpeed, a plan of DTensors, a
pipeline, a sharding optimizer), what clips its gradients, or a script by calls of its own."""


class Memory(Contract):
    """Memory of one rank in bytes, by category: each the largest value within a step."""

    weights_bytes: int | None = Field(None, ge=0, description="parameters used by forward and backward")
    gradients_bytes: int | None = Field(None, ge=0, description="gradients held at the end of the backward pass")
    optimizer_bytes: int | None = Field(None, ge=0, description="optimizer states (Adam: two moments)")
    master_bytes: int | None = Field(
        None, ge=0, description="a second copy of the parameters, which the optimizer updates"
    )
    activations_bytes: int | None = Field(None, ge=0, description="tensors that forward keeps for backward")
    buffers_bytes: int | None = Field(None, ge=0, description="module buffers (BatchNorm statistics, …)")
    workspace_bytes: int | None = Field(None, ge=0, description="temporaries and communication buckets")
    script_bytes: int | None = Field(
        None, ge=0, description="held by variables of a script: former outputs and batches, copies, data sets"
    )
    peak_bytes: int | None = Field(None, ge=0, description="largest sum held at one moment")
    peak_moment: str | None = Field(None, description="phase in which the peak occurs")
    at_peak_bytes: dict[Category, int] | None = Field(None, description="the categories at the moment of the peak")
    reserved_bytes: int | None = Field(None, ge=0, description="what the device allocator reserved (CUDA)")
    device_bytes: int | None = Field(
        None, ge=0, description="taken from the device in all, as nvidia-smi shows it: reserved, context, NCCL"
    )
    host_bytes: int | None = Field(None, ge=0, description="offloaded from the device to host memory, at most")
    nvme_bytes: int | None = Field(None, ge=0, description="offloaded to an NVMe disk, in records of older versions")
    resident_bytes: int | None = Field(None, ge=0, description="largest resident set of the process (host)")

    def category(self, name: Category) -> int | None:
        """Return the bytes of one category."""
        value: int | None = getattr(self, f"{name}_bytes")
        return value

    @property
    def states_bytes(self) -> int:
        """Sum of the model states: weights, gradients, optimizer, master copies and buffers."""
        return sum(self.category(name) or 0 for name in STATES)

    @property
    def needed_bytes(self) -> int | None:
        """Least memory of the device with which the peak is reached: the peak, CUDA's context and NCCL.

        What the allocator has cached on top of the peak it gives back before it gives up. On the host it is the peak.

        Source: torch, `c10/cuda/CUDACachingAllocator.cpp`, `malloc`: `release_cached_blocks`, then once more.
        """
        if self.peak_bytes is None or self.device_bytes is None or self.reserved_bytes is None:
            return self.peak_bytes
        # device − reserved: CUDA's context and NCCL.
        return self.peak_bytes + self.device_bytes - self.reserved_bytes


class Traffic(Contract):
    """Traffic that one rank hands to one collective in one training step, within one group.

    The bytes are those of the *message*: the whole tensor that is reduced (all-reduce, reduce-scatter, reduce),
    gathered (all-gather) or sent (broadcast, send); what crosses each link depends on the algorithm.
    """

    collective: Collective
    group: str = Field(
        description="mesh axis the group runs along: dp (with cp > 1 all that average gradients), tp, pp; cp (ranks "
        "that share the sequences); ep (ranks that divide the experts) or edp (ranks that hold the same experts); or "
        "control (the lab's own); empty for a group of a script whose axis has no name"
    )
    group_size: int = Field(ge=1, description="ranks in the group")
    count: int | None = Field(None, ge=0, description="calls per step")
    message_bytes: int = Field(ge=0, description="bytes per step")
    every_steps: int = Field(
        1, ge=1, repr=False, description="one step in so many sends this: more than 1 where replicas go several alone"
    )
    origin: Origin = Field("wrapper", repr=False, description="who calls it; of a script only the wrapper is predicted")

    @property
    def key(self) -> tuple[Origin, Collective, str, int]:
        """What a prediction and a measurement of it share; the size tells groups without a name apart."""
        return self.origin, self.collective, self.group, 0 if self.group else self.group_size

    @property
    def sent_bytes(self) -> float:
        """Bytes that each rank sends per step when the collective runs as a ring.

        Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations", §3.
        """
        # On a ring of n ranks each sends n − 1 parts of 1/n of the message; an all-reduce does so twice.
        share = (self.group_size - 1) / self.group_size
        factor = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share}
        return factor.get(self.collective, 1.0 if self.group_size > 1 else 0.0) * self.message_bytes


class Phases(Contract):
    """Seconds of one step by phase: the median over the steps measured.

    The exposed communication is part of the phase that waits for it (in DDP the end of `backward_s`); the hidden one
    takes no additional time.
    """

    forward_s: float | None = Field(None, ge=0)
    backward_s: float | None = Field(None, ge=0)
    optimizer_s: float | None = Field(None, ge=0)
    communication_exposed_s: float | None = Field(None, ge=0, description="communication not hidden behind compute")
    communication_hidden_s: float | None = Field(None, ge=0, description="communication while the rank computes")
    bubble_s: float | None = Field(None, ge=0, description="pipeline bubble")
    data_s: float | None = Field(None, ge=0, description="waiting for the next batch")
    step_s: float | None = Field(None, ge=0, description="the whole step")


@dataclass(frozen=True)
class Overlap:
    """Overlap of one step's communication with its computing; seconds of `time.perf_counter`.

    Args:
        intervals: when each communication left and arrived.
        waits: when the rank waited for one.
    """

    intervals: tuple[tuple[float, float], ...]
    waits: tuple[tuple[float, float], ...]

    @classmethod
    def after_backward(cls, intervals: tuple[tuple[float, float], ...], compute_end_s: float) -> Self:
        """Overlap of a step that waits once: from when backward has nothing more to compute to the last arrival."""
        end_s = max([compute_end_s, *(arrived_s for _, arrived_s in intervals)])
        return cls(intervals, ((compute_end_s, end_s),) if end_s > compute_end_s else ())

    @property
    def exposed_s(self) -> float:
        """Seconds of waiting."""
        return _covered_s(self.waits)

    @property
    def hidden_s(self) -> float:
        """Seconds of communication while the rank computed; what overlaps counts once."""
        # The union of both, less the waits: communication outside of every wait.
        return max(0.0, _covered_s(self.intervals + self.waits) - self.exposed_s)  # sums round


def _covered_s(intervals: tuple[tuple[float, float], ...]) -> float:
    """Seconds within at least one interval."""
    covered_s, until_s = 0.0, float("-inf")  # `until_s`: the end of what is counted so far
    for start_s, end_s in sorted(intervals):
        covered_s += max(0.0, end_s - max(start_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


class Footprint(Contract):
    """Footprint of one training step on one rank."""

    schema_version: Literal[1] = 1
    source: Literal["predicted", "measured"]
    rank: int = Field(0, ge=0)
    parameters: int | None = Field(None, ge=0, description="parameters of the whole model")
    memory: Memory = Memory()
    communication: tuple[Traffic, ...] = ()
    phases: Phases = Phases()
    step_flops: float | None = Field(None, ge=0, description="floating-point operations of this rank in one step")
    samples_per_s: float | None = Field(None, ge=0, description="throughput of the whole run")
    mfu: float | None = Field(
        None, ge=0, description="model FLOPs utilisation: FLOP/s of the model, recomputation left out, over the peak's"
    )

    def traffic(self, collective: Collective, group: str = "dp") -> int:
        """Sum the message bytes per step of one collective in one group; 0 where it is not called."""
        return sum(t.message_bytes for t in self.communication if (t.collective, t.group) == (collective, group))
