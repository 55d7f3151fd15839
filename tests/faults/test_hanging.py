"""A rank that does not come to a collective is named, with the collective, by the ranks' own flight recorders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlojz.running.state import read_all_events


def test_a_rank_that_sleeps_is_named_with_the_collective_it_did_not_come_to(
    launch: Callable[..., Any], eventually: Callable[..., Any]
) -> None:
    ward = launch("hanging", image_size=32)
    record = ward.run.wait(240).record
    assert (record.status, len(record.losses)) == ("failed", 2)
    assert "Timed out waiting 2000ms" in record.reason
    told = read_all_events(ward.run.folder)
    reached = [[event for event in told[rank] if event["event"] == "collectives"] for rank in (0, 1)]
    assert [len(events) for events in reached] == [1, 1]
    waited, slept = (events[0]["groups"] for events in reached)
    assert waited["1"] == slept["1"], "in the lab's own control group both had come to the same"
    # One all-reduce per bucket of gradients: the first of the third step is the one after those of the second.
    number, operation, kind, shape = waited["0"][len(slept["0"])]
    assert (number, operation, kind) == (slept["0"][-1][0] + 1, "all_reduce", "Float")
    [finding] = ward.run.diagnosis().findings
    assert (finding.kind, finding.ranks) == ("collective", (1,))
    assert f"Rank 1 did not come to the collective all_reduce Float {shape}" in finding.what
    eventually(lambda: not ward.processes())
