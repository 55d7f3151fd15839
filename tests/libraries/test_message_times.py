"""Messages of a program timed from outside: what is exposed, what is hidden, and when nothing is reported."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from dlojz.libraries.scripts.first_step import Replacements
from dlojz.libraries.seen_engines import MessageTimes
from dlojz.processes.forks import spmd
from dlojz.results.footprint import Overlap
from dlojz.train.dispatch_trace import CollectiveCall
from tests.by_hand.test_ddp import values

PAUSE_S = 0.2
SENT = CollectiveCall(step=0, collective="all_reduce", group="dp", group_size=2, message_bytes=16)


def _messages(rank: int, size: int) -> list[Any]:
    """Rank 1 sends its part a pause later than rank 0, which waits for two pauses before it asks for the result."""
    times = MessageTimes()
    with Replacements() as undo:
        times.install(undo)
        dist.barrier()
        times.clear()
        time.sleep(PAUSE_S * rank)
        handle = dist.all_reduce(torch.ones(4), async_op=True)
        time.sleep(2 * PAUSE_S)
        handle.wait()
        times.compare([SENT], 0)
        late = times.overlap()
        times.clear()
        time.sleep(PAUSE_S * rank)
        dist.all_reduce(torch.ones(4))  # rank 0 waits for rank 1
        at_once = times.overlap()
        times.clear()
        functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD).sum()
        times.compare([SENT], 0)
        unseen = times.overlap()
    assert late is not None and at_once is not None
    after = torch.ones(4)
    dist.all_reduce(after)  # the methods are torch's again
    return [late.hidden_s, at_once.hidden_s, at_once.exposed_s, unseen, float(after.sum())]


def test_what_travels_while_a_rank_computes_is_hidden_and_its_waits_are_exposed() -> None:
    first, second = values(spmd(_messages, 2))
    assert first[0] >= 0.9 * PAUSE_S
    assert first[1] == pytest.approx(0, abs=0.05 * PAUSE_S) == second[1]
    assert first[2] >= 0.9 * PAUSE_S
    assert first[3] is None and first[4] == second[4] == 8


def test_seconds_that_overlap_count_once() -> None:
    overlap = Overlap(((0, 4), (3, 6), (8, 9)), ((2, 4), (3, 5), (8, 9)))
    assert (overlap.exposed_s, overlap.hidden_s) == (4, 3)
    assert Overlap(((0.1, 0.2), (0.2, 0.9)), ((0.1, 0.9),)).hidden_s == 0  # not −1e-16, by which the sums differ
