"""The memory of one rank through one training step: the trace of one process, its engine's overlay, its states.

Layer 3. Invariant: nothing is allocated and no process made. On the CPU what is predicted is what the probe measures
(see tests/predict/test_forecast.py); for a GPU the corrections of `on_gpu` and the allocator's model come on top.

The composition: peak of a rank = largest, over the step, of its states + what the micro-batches in flight keep + what
the running pass takes + the engine's own buffers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from dlojz import hardware
from dlojz.config import RunConfig
from dlojz.footprint import STATES, Category, Memory
from dlojz.hardware import Device
from dlojz.predict import overlays
from dlojz.predict.allocator import replay
from dlojz.predict.model_trace import trace_of
from dlojz.predict.offload import offload_states
from dlojz.predict.parts import axes_of, part_of
from dlojz.predict.rank_trace import micro_batches_in_flight, trace_of_rank
from dlojz.predict.shapes import model_shapes
from dlojz.predict.states import predict_states
from dlojz.predict.step import Step
from dlojz.predict.timeline import Ledger, Movement
from dlojz.record import MemorySample
from dlojz.schema import LabError
from dlojz.text import say

CUBLAS_HANDLES = 2
"""One of the thread that runs forward, one of autograd's."""


@dataclass(frozen=True)
class Forecast:
    """What one rank will hold through one training step.

    Args:
        config: the run.
        rank: from 0.
        device: the GPU it is for; None for the CPU.
        memory: by category, with the peak, its moment, and the categories then.
        peak_micro_batch: number of the micro-batch in which the peak occurs, from 1.
        peak_module: path of the module that computes then; empty in the loss.
        at_peak_by_block: what each block holds at the peak, by category; under an empty name what belongs to none.
        activations_by_module: bytes that each module's forward keeps for backward, for one micro-batch.
        in_flight: micro-batches whose activations are held at once.
        samples: the step as a timeline, in the order of the movements.
        movements: each allocation and release, for the allocator's model and the memory viewer.
    """

    config: RunConfig
    rank: int
    device: Device | None
    memory: Memory
    peak_micro_batch: int
    peak_module: str
    at_peak_by_block: tuple[tuple[str, dict[Category, int]], ...]
    activations_by_module: Mapping[str, int]
    in_flight: int
    samples: tuple[MemorySample, ...]
    movements: tuple[Movement, ...]

    @property
    def events(self) -> tuple[tuple[int, int], ...]:
        """Number of each storage and the bytes by which it grows: what the allocator's model replays."""
        return tuple((movement.key, movement.delta_bytes) for movement in self.movements)

    @property
    def moment(self) -> str:
        """When the peak occurs, in words, e.g. `backward of micro-batch 3, in blocks.2`."""
        phase = self.memory.peak_moment or ""
        number = self.peak_micro_batch
        if phase == "optimizer":
            return say(en="optimizer step", fr="mise à jour de l’optimiseur")
        if phase not in ("forward", "backward"):
            return say(en="between two steps", fr="entre deux pas")
        where = say(en=f", in {self.peak_module}", fr=f", dans {self.peak_module}") if self.peak_module else ""
        if phase == "forward":
            return say(en=f"forward of micro-batch {number}{where}", fr=f"passe avant du micro-batch {number}{where}")
        if not where:
            return say(en=f"loss backward of micro-batch {number}", fr=f"gradient de la loss, micro-batch {number}")
        return say(en=f"backward of micro-batch {number}{where}", fr=f"passe arrière du micro-batch {number}{where}")


def forecast(config: RunConfig, rank: int = 0, device: Device | str | None = None) -> Forecast:
    """Predict one rank's memory through a steady training step.

    Args:
        config: the run; every legal layout, also those that no engine runs yet.
        rank: from 0 to the world size; tensor parallelism innermost, pipeline outermost.
        device: a GPU or its name (see `dlojz.hardware`); by default the CPU, where the engines run in the labs.

    Raises:
        LabError: if the rank or the device does not exist, or the model cannot be cut so.
    """
    check_rank(config, rank)
    return _forecast(config, rank, hardware.device(device) if isinstance(device, str) else device)


def check_rank(config: RunConfig, rank: int) -> None:
    """Refuse a rank that a layout does not have.

    Raises:
        LabError: naming those it has.
    """
    layout = config.layout
    if not isinstance(rank, int) or not 0 <= rank < layout.world_size:
        raise LabError(
            say(
                en=f"rank {rank} does not exist: {layout.degrees} has ranks 0 to {layout.world_size - 1}.",
                fr=f"le rang {rank} n’existe pas : {layout.degrees} a les rangs 0 à {layout.world_size - 1}.",
            )
        )


def heaviest(config: RunConfig, device: Device | str | None = None) -> Forecast:
    """The forecast of the rank that takes most: the first of each pipeline stage is asked.

    Raises:
        LabError: as `forecast`.
    """
    layout = config.layout
    first_of_stage = range(0, layout.world_size, layout.dp * layout.tp)
    forecasts = [forecast(config, rank, device) for rank in first_of_stage]
    return max(forecasts, key=lambda one: one.memory.device_bytes or one.memory.peak_bytes or 0)


@lru_cache(maxsize=256)
def _forecast(config: RunConfig, rank: int, device: Device | None) -> Forecast:
    shapes = model_shapes(config)
    part = part_of(config, shapes, rank)
    dp_rank = axes_of(config, rank)[0]
    states = offload_states(config, part, predict_states(config, part, dp_rank), dp_rank)
    trace = trace_of_rank(config, trace_of(config, rank, on_gpu=device is not None), shapes, rank)
    overlay = overlays.overlay(config, part, dp_rank=dp_rank, on_gpu=device is not None)
    step = Step(config, trace, states, overlay, whole=shapes, rank=rank)
    if device is not None:
        for handle in range(CUBLAS_HANDLES):
            step.ledger.hold(("cublas", handle), "workspace", device.cublas_workspace_bytes)
    ledger = step.run()
    samples = ledger.samples()  # of one step: for a GPU another is run below
    return Forecast(
        config=config,
        rank=rank,
        device=device,
        memory=_memory(config, ledger, states, step, device),
        peak_micro_batch=ledger.peak_detail[0] + 1,
        peak_module=ledger.peak_detail[1],
        at_peak_by_block=ledger.peak_by_block(),
        activations_by_module=trace.by_module,
        in_flight=micro_batches_in_flight(config, rank),
        samples=samples,
        movements=tuple(ledger.movements),
    )


def _memory(config: RunConfig, ledger: Ledger, states: Memory, step: Step, device: Device | None) -> Memory:
    """The ledger's figures; the states as their closed forms have them, which the ledger sees only in part."""
    known: dict[str, object] = {f"{category}_bytes": states.category(category) for category in STATES}
    known["gradients_bytes"] = max(states.gradients_bytes or 0, step.gradient_bytes)
    known["host_bytes"] = (states.host_bytes or 0) + ledger.most_host_bytes
    known["nvme_bytes"] = states.nvme_bytes
    if device is not None:
        step.run()  # a second step finds what the first has left cached
        processes = config.layout.world_size
        replayed = replay([(movement.key, movement.delta_bytes) for movement in ledger.movements])
        known["reserved_bytes"] = replayed.reserved_peak_bytes
        known["device_bytes"] = replayed.reserved_peak_bytes + device.memory_bytes - device.allocatable_bytes(processes)
    return ledger.memory().model_copy(update=known)
