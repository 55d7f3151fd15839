"""One pipeline rank's share of a trace: its stages' blocks.

Layer 3. Invariant: with pp = 1 it is the trace itself. What tensor parallelism shares out is so in the trace already,
which is of the rank's own part of the layers.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from math import ceil

from dlojz.config import RunConfig
from dlojz.pipeline.action import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from dlojz.pipeline.cuts import schedule_of
from dlojz.pipeline.memory import peak_activations
from dlojz.predict.parts import axes_of, bounds_of, rank_stages
from dlojz.predict.shapes import ModelShapes
from dlojz.predict.tracing import Allocation, Mark, Trace


def block_of(module: str) -> str:
    """Name of the block that a module belongs to: the first two parts of its path."""
    return ".".join(module.split(".")[:2])


def trace_of_rank(config: RunConfig, trace: Trace, shapes: ModelShapes, rank: int) -> Trace:
    """What one rank allocates of what a single process would.

    Args:
        config: the run.
        trace: of all blocks.
        shapes: of the whole model.
        rank: whose share.
    """
    if config.layout.pp == 1:
        return trace
    stages, bounds = rank_stages(config, rank), bounds_of(config, shapes)
    own = {f"blocks.{number}" for stage in stages for number in range(*bounds[stage : stage + 2])}
    if len(bounds) - 2 in stages:
        own.add("")  # the loss
    received = {trace.output_of.get(f"blocks.{bounds[stage] - 1}", -1) for stage in stages if stage > 0} - {-1}

    def is_own(event: Allocation) -> bool:
        if event.storage in received:
            return True
        if event.phase == "data":
            return False  # a pipeline reads all micro-batches before its first forward: see `Step`
        return block_of(event.module) in own

    events: list[Allocation | Mark] = []
    bytes_of: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, Mark):
            if event.name == "" or block_of(event.name) in own:
                events.append(event)
        elif is_own(event):
            events.append(event)
            bytes_of[event.storage] = max(bytes_of.get(event.storage, 0), event.delta_bytes)
    kept = frozenset(storage for storage in trace.kept if storage in bytes_of)
    return replace(trace, events=tuple(events), kept=kept, bytes_of=bytes_of)


def micro_batches_in_flight(config: RunConfig, rank: int) -> int:
    """Micro-batches whose activations a rank holds at once, rounded up where its stages hold different numbers."""
    if config.layout.pp == 1:
        return 1
    peaks = peak_activations(schedule_of(config.layout))
    return max(1, ceil(peaks[axes_of(config, rank)[2]] / len(rank_stages(config, rank))))


def in_flight_bytes(config: RunConfig, trace: Trace, shapes: ModelShapes, rank: int) -> tuple[int, ...]:
    """Activations of other micro-batches that a pipeline rank keeps while each one's backward runs.

    Counted from the schedule's own order, each stage with its own bytes; a backward that is split frees all at its
    end (for the weights). Empty without a pipeline.

    Args:
        config: the run.
        trace: of this rank.
        shapes: of the whole model.
        rank: this rank.
    """
    layout = config.layout
    if layout.pp == 1:
        return ()
    schedule = schedule_of(layout)
    kept_bytes = _kept_by_stage(config, trace, bounds_of(config, shapes), rank, schedule.stages)
    held: dict[int, int] = {}
    others = [0] * layout.micro_batches
    for action in schedule.orders[axes_of(config, rank)[2]]:
        for element in action.elements:
            number = element.micro_batch
            if element.kind == FORWARD:
                held[number] = held.get(number, 0) + kept_bytes[element.stage]
            elif element.kind in (BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT):
                others[number] = max(others[number], sum(held.values()) - held.get(number, 0))
                if element.kind != BACKWARD_INPUT:
                    held[number] -= kept_bytes[element.stage]
    return tuple(others)


def _kept_by_stage(config: RunConfig, trace: Trace, bounds: tuple[int, ...], rank: int, stages: int) -> list[int]:
    """Bytes that each stage of a rank keeps of one micro-batch for its backward."""
    stage_of = {f"blocks.{block}": bisect_right(bounds, block) - 1 for block in range(bounds[-1])}
    own = rank_stages(config, rank)
    kept_bytes = [0] * stages
    counted: set[int] = set()
    for event in trace.events:
        if isinstance(event, Allocation) and event.storage in trace.kept - trace.on_host - counted:
            counted.add(event.storage)
            stage = stage_of.get(block_of(event.module), stages - 1)  # outside of all blocks is the loss
            # What a stage has received was made by the stage before.
            kept_bytes[stage if stage in own else stage + 1] += trace.bytes_of[event.storage]
    return kept_bytes
