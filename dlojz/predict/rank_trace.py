"""One rank's share of a trace: its pipeline stage's blocks, and its part of what tensor parallelism shares out.

Layer 3. Invariant: with tp = pp = 1 it is the trace itself. Tensors of a tensor-parallel region are 1/tp as large; with
sequence parallelism token streams outside of these regions are too.

Source: Korthikanti et al. 2022 (arXiv 2205.05198), §4.2.1 and §4.2.2, for what is shared out and what is not.
"""

from __future__ import annotations

from dataclasses import replace

from dlojz.config import RunConfig
from dlojz.predict.parts import axes_of, stage_blocks
from dlojz.predict.tracing import Allocation, Mark, Trace

TOKEN_STREAM_DIMS = 3
"""Dimensions of `x_BTD`, a batch of token streams."""


def block_of(module: str) -> str:
    """Name of the block that a module belongs to: the first two parts of its path."""
    return ".".join(module.split(".")[:2])


def trace_of_rank(config: RunConfig, trace: Trace, num_blocks: int, rank: int) -> Trace:
    """What one rank allocates of what a single process would.

    Args:
        config: the run.
        trace: of the whole model.
        num_blocks: of the model.
        rank: whose share.
    """
    layout = config.layout
    if layout.tp == layout.pp == 1:
        return trace
    stage = axes_of(config, rank)[2]
    own = {f"blocks.{number}" for number in stage_blocks(num_blocks, layout.pp, stage)}
    if stage == layout.pp - 1:
        own.add("")  # the loss
    received = -1
    if stage > 0:
        former = f"blocks.{stage_blocks(num_blocks, layout.pp, stage - 1)[-1]}"
        received = trace.output_of.get(former, -1)

    def is_own(event: Allocation) -> bool:
        if event.storage == received:
            return True
        if event.phase == "data":
            return stage == 0
        return block_of(event.module) in own

    def share(event: Allocation) -> Allocation:
        tokens = layout.sequence_parallel and event.dims == TOKEN_STREAM_DIMS
        shared = event.shared or tokens or event.storage in halved
        if shared:
            halved.add(event.storage)
            return replace(event, delta_bytes=-(-event.delta_bytes // layout.tp))
        return event

    halved: set[int] = set()
    events: list[Allocation | Mark] = []
    bytes_of: dict[int, int] = {}
    for event in trace.events:
        if isinstance(event, Mark):
            if event.name == "" or block_of(event.name) in own:
                events.append(event)
        elif is_own(event):
            shared = share(event)
            events.append(shared)
            bytes_of[event.storage] = max(bytes_of.get(event.storage, 0), shared.delta_bytes)
    kept = frozenset(storage for storage in trace.kept if storage in bytes_of)
    return replace(trace, events=tuple(events), kept=kept, bytes_of=bytes_of)
