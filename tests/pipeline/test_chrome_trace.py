"""The trace: slices are the timeline, every message is one arrow that binds to its slices, memory is counted."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.exchange_formats import chrome_trace, write_chrome_trace
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import Timeline, peak_activations, simulate


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe", "terapipe", "pipedream", "bpipe"])
def test_chrome_trace_has_the_timeline_in_slices_that_never_overlap(name: str) -> None:
    timeline = simulate(build(name, 4, 8), Costs(latency=0.25))
    trace = chrome_trace(timeline)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in slices] == [str(action) for action in timeline.schedule.actions]
    assert {event["pid"] for event in slices} == set(range(4))
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(1000 * timeline.makespan)
    for rank in range(4):
        own = [event for event in slices if event["pid"] == rank]
        ends = [event["ts"] + event["dur"] for event in own]
        assert all(after["ts"] >= end - 2e-3 for end, after in zip(ends, own[1:], strict=False))
    for event, action in zip(slices, timeline.schedule.actions, strict=True):
        assert (event["args"]["stage"], event["args"]["kind"]) == (action.stage, action.kind)
        assert event["args"]["micro_batch"] == action.micro_batch and event["dur"] >= 0


def test_the_trace_begins_at_0_whenever_the_step_began() -> None:
    timeline = simulate(build("1f1b", 2, 3), Costs(latency=0.25))
    later = Timeline(timeline.schedule, timeline.starts + 64, timeline.ends + 64, timeline.costs)
    assert chrome_trace(later)["traceEvents"] == chrome_trace(timeline)["traceEvents"]


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe"])
def test_chrome_trace_has_an_arrow_for_every_message_from_maker_to_taker(name: str) -> None:
    timeline = simulate(build(name, 4, 8), Costs(latency=0.25))
    events = chrome_trace(timeline)["traceEvents"]
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] in ("s", "f"):
            flows[event["id"]].append(event)
    graph = timeline.schedule.graph
    edges = [(needed, index) for index, needed in enumerate(graph.needs) if needed < graph.actions] + [
        (needed, index) for index, needed in graph.also
    ]
    messages = sum(graph.rank[one] != graph.rank[other] for one, other in edges)
    assert len(flows) == messages > 0
    slices = [event for event in events if event["ph"] == "X"]
    for start, end in flows.values():
        assert (start["ph"], end["ph"], end["bp"], start["name"]) == ("s", "f", "e", end["name"])
        assert start["pid"] != end["pid"] and start["ts"] < end["ts"]
        maker, _, taker = start["name"].partition(" → ")
        making = next(each for each in slices if each["name"] == maker and each["pid"] == start["pid"])
        taking = next(each for each in slices if each["name"] == taker and each["pid"] == end["pid"])
        assert making["ts"] <= start["ts"] < making["ts"] + making["dur"] and end["ts"] == taking["ts"]


def test_the_counters_are_the_activations_of_each_rank() -> None:
    schedule = build("1f1b", 4, 8)
    counted = [event for event in chrome_trace(simulate(schedule))["traceEvents"] if event["ph"] == "C"]
    peaks = [max(event["args"]["kept"] for event in counted if event["pid"] == rank) for rank in range(4)]
    assert tuple(peaks) == peak_activations(schedule)
    assert all([event for event in counted if event["pid"] == rank][-1]["args"]["kept"] == 0 for rank in range(4))


def test_chrome_trace_tells_versions_where_there_are_several() -> None:
    def versions(name: str) -> set[int | None]:
        events = chrome_trace(simulate(build(name, 4, 8)))["traceEvents"]
        return {event["args"]["version"] for event in events if event["ph"] == "X"}

    assert versions("1f1b") == {None} and {0, 1, 2, 3, 4} <= versions("pipedream")


def test_write_chrome_trace_begins_measured_seconds_at_zero(tmp_path: Path) -> None:
    schedule = build("gpipe", 2, 2)
    simulated = simulate(schedule, Costs(forward=0.02, backward=0.04))
    measured = Timeline(schedule, simulated.starts + 1e6, simulated.ends + 1e6, origin="measured")
    path = write_chrome_trace(measured, tmp_path / "new" / "trace.json")
    trace = json.loads(path.read_text(encoding="utf-8"))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert trace["otherData"]["origin"] == "measured" and min(event["ts"] for event in slices) == 0
    assert slices[0]["dur"] == pytest.approx(20_000, abs=1) and slices[-1]["dur"] == pytest.approx(40_000, abs=1)
    with pytest.raises(LabError, match="cannot be written"):
        write_chrome_trace(measured, path / "below.json")
