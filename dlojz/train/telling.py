"""What a rank tells of its training: clocks laid over one another, footprints, the checksum of the final weights.

Layer 3, loads torch. Invariant: what was measured is in the event file before anything that can fail after it.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz.config import RunConfig
from dlojz.record import EventLog
from dlojz.train import engines
from dlojz.train.clocks import offset_to_first
from dlojz.train.probes.probes import Probes
from dlojz.train.weights import save_weights, weights_sha256

FOOTPRINT_EVERY = 10
"""Steps between two footprints in the event file: what a killed run still tells."""


def align_clocks(probes: Probes, control: dist.ProcessGroup, events: EventLog) -> None:
    """Let the timelines of all ranks count from one moment of rank 0's clock."""
    clock = offset_to_first(control)
    # Who: all ranks, once, in the control group. What: that all are there, then rank 0's time. How much: 8 bytes.
    dist.barrier(group=control)
    origin_s = torch.tensor([time.perf_counter()], dtype=torch.float64)
    dist.broadcast(origin_s, src=0, group=control)
    probes.clock.align(float(origin_s) - clock.offset_s)
    events.write("clock", offset_s=clock.offset_s, uncertainty_s=clock.uncertainty_s)


def tell_measured(events: EventLog, probes: Probes, step: int, rank: int, parameters: int) -> None:
    """Write what has been measured by the end of a step, where it is time to."""
    if step == probes.steady_step and rank == 0:
        events.write("memory_timeline", samples=[sample.to_dict() for sample in probes.timeline])
    if step == probes.steady_step or step % FOOTPRINT_EVERY == FOOTPRINT_EVERY - 1:
        write_footprint(events, probes, parameters)


def write_footprint(events: EventLog, probes: Probes, parameters: int) -> None:
    """Write all that has been measured so far."""
    if (footprint := probes.footprint(parameters)) is not None:
        events.write("footprint", footprint=footprint.to_dict())


def finish(config: RunConfig, folder: Path, events: EventLog, engine: engines.Engine, rank: int) -> None:
    """Checksum (and, if asked, keep) the final weights, then leave."""
    if rank == 0:
        weights = dict(engine.weights())
        events.write("weights", sha256=weights_sha256(weights))
        if config.keep_weights:
            save_weights(folder / "weights.safetensors", weights)
    else:
        # Gathering is a collective call: every rank takes part, rank 0 alone keeps the result.
        for _ in engine.weights():
            pass
    leave(engine)


def leave(engine: engines.Engine) -> None:
    """Leave the group in good order."""
    engine.close()
    dist.barrier()
    dist.destroy_process_group()
