"""One time for all ranks: how far each rank's clock is from rank 0's.

Layer 3, loads torch. Invariant: the offset is measured, with the half of the shortest round trip as its uncertainty;
ranks of one node share a clock, and then the offset that is found lies within that uncertainty of zero.

Source: Cristian 1989, "Probabilistic clock synchronization" (Distributed Computing 3), §4: of many round trips the
shortest bounds the error best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUND_TRIPS = 12


class ClockOffset(NamedTuple):
    """What to add to this rank's `time.perf_counter` to have rank 0's, and how wrong that may be."""

    offset_s: float
    uncertainty_s: float


def offset_to_first(group: dist.ProcessGroup | None, now: Callable[[], float] = time.perf_counter) -> ClockOffset:
    """Compare this rank's clock with rank 0's; a collective call.

    Args:
        group: all ranks, of a backend that communicates from the CPU; None with one process.
        now: this rank's clock.
    """
    if group is None or group.size() == 1:
        return ClockOffset(0.0, 0.0)
    message = torch.zeros(1, dtype=torch.float64)
    best = ClockOffset(0.0, float("inf"))
    for other in range(1, group.size()):
        for _ in range(ROUND_TRIPS):
            # Who: rank 0 and one other. What: a question and the time as the answer. How much: 8 bytes each way.
            if group.rank() == 0:
                dist.recv(message, other, group=group)  # of all ranks: each has the same number in it
                message.fill_(now())
                dist.send(message, other, group=group)
            elif group.rank() == other:
                asked_s = now()
                dist.send(message, 0, group=group)
                dist.recv(message, 0, group=group)
                answered_s = now()
                half_s = (answered_s - asked_s) / 2
                if half_s < best.uncertainty_s:
                    best = ClockOffset(float(message) - asked_s - half_s, half_s)
    return best if group.rank() else ClockOffset(0.0, 0.0)
