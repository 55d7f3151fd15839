"""Collectives per step, from the c10d operators that a trace has seen.

Layer 3. Invariant: counted, never computed: the bytes are those of the tensors handed to c10d.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from dlojz.footprint import Traffic
from dlojz.train.probes.trace import CollectiveCall


def traffic_of(calls: Iterable[CollectiveCall], step: int, *, dp_every_steps: int = 1) -> tuple[Traffic, ...]:
    """One step's calls, added up by collective and group; a group of one rank communicates nothing.

    Args:
        calls: of all steps that were traced.
        step: which one.
        dp_every_steps: one step in so many sends what this one does along the data axis.
    """
    count: dict[tuple[str, str, int], int] = defaultdict(int)
    message_bytes: dict[tuple[str, str, int], int] = defaultdict(int)
    for call in calls:
        if call.step == step and call.group_size > 1:
            key = (call.collective, call.group, call.group_size)
            count[key] += 1
            message_bytes[key] += call.message_bytes
    return tuple(
        Traffic(
            collective=collective,
            group=group,
            group_size=size,
            count=count[key],
            message_bytes=message_bytes[key],
            every_steps=dp_every_steps if group == "dp" else 1,
        )
        for key in sorted(count)
        for collective, group, size in [key]
    )
