"""The schedule of traces is recognised, whatever the clocks say; who waits for what, and why, is told."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.pipeline.schedule import Costs, Schedule
from dlojz.pipeline.schedule_catalogue import ENTRIES, build
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.traced_pipeline import (
    TracedPipeline,
    aligned_pipelines,
    head_of_line,
    message_waits,
    recognised,
    slow_stage,
)
from dlojz.results.profiler_trace import trace_files
from dlojz.results.rank_activities import activities_of
from tests.profiled import (
    NumberedRank,
    event,
    numbered_traces,
    stream_times,
    stream_traces,
    timeline_traces,
    with_messages,
    write_trace,
)

COSTS = Costs(forward=1.0, backward_input=1.25, backward_weight=0.75, update=0.125, latency=0.25)
SHIFTS_S = (0.0, 7.5, -3.25, 120.0)


def pipelines_in(folder: Path) -> tuple[TracedPipeline, ...]:
    return aligned_pipelines(sorted(map(activities_of, trace_files([folder])), key=lambda one: one.rank))[1]


@pytest.mark.parametrize("name", [entry.name for entry in ENTRIES])
def test_every_schedule_is_recognised_on_clocks_that_differ(name: str, tmp_path: Path) -> None:
    timeline = simulate(build(name, 4, 8), COSTS)
    (found,) = pipelines_in(timeline_traces(tmp_path, timeline, shifts_s=SHIFTS_S))
    assert name in found.match.names and found.match.share == 1.0 and found.ranks == (0, 1, 2, 3)
    measured = found.overlay.measured
    assert measured.schedule.orders == timeline.schedule.orders
    np.testing.assert_allclose(measured.starts, timeline.starts * 1e-3, atol=0.3e-3)  # a latency is 0.25 ms
    np.testing.assert_allclose(measured.durations, timeline.durations * 1e-3, atol=1e-8)
    assert measured.bubble_fraction == pytest.approx(timeline.bubble_fraction, abs=0.02)


def test_an_order_of_nobody_is_told_with_the_closest(tmp_path: Path) -> None:
    schedule = build("gpipe", 2, 4)
    orders = [list(order) for order in schedule.orders]
    orders[1][4], orders[1][5] = orders[1][5], orders[1][4]  # 1B1 before 1B0
    orders[0][4], orders[0][5] = orders[0][5], orders[0][4]
    traced, match = recognised(orders)
    assert match.names == () and match.closest == "gpipe" and 0.7 < match.share < 1.0
    assert match.first_difference == (0, "0B1", "0B0") and traced.name == "custom"


def test_the_step_of_median_length_is_laid_over_and_parts_of_steps_are_left_out(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 2, 4), COSTS)
    timeline_traces(tmp_path, timeline, steps=3)
    (found,) = pipelines_in(tmp_path)
    assert found.steps == 3 and found.overlay.measured.makespan == pytest.approx(1e-3 * timeline.makespan, rel=0.05)


def test_replicas_are_pipelines_of_their_own(tmp_path: Path) -> None:
    timeline = simulate(build("1f1b", 2, 4), COSTS)
    for replica in range(2):
        timeline_traces(tmp_path / str(replica), timeline)
        for stage in range(2):
            made = tmp_path / str(replica) / f"rank{stage}.json.gz"
            events = [one for one in _events(made) if one.get("ph") == "X"]
            write_trace(tmp_path / f"rank{2 * stage + replica}.json", 2 * stage + replica, events, 4)
    found = pipelines_in(tmp_path)
    assert [one.ranks for one in found] == [(0, 2), (1, 3)] and found[0].match.names[0] == "1f1b"


def _events(path: Path) -> list[dict[str, Any]]:
    (trace,) = trace_files([path])
    return list(trace.events())


def test_a_slow_stage_and_the_waits_for_its_messages_are_named(tmp_path: Path) -> None:
    costs = COSTS.with_(forward=(1.0, 1.0, 3.0, 1.0), backward=(2.0, 2.0, 6.0, 2.0))
    (found,) = pipelines_in(timeline_traces(tmp_path, simulate(build("1f1b", 4, 8), costs)))
    slow = slow_stage(found)
    assert (slow.stage, slow.rank) == (2, 2) and slow.seconds == pytest.approx(9e-3, rel=1e-3)
    waits = message_waits(found)
    assert {wait.rank for wait in waits} >= {0, 1, 3} and waits[0].waited_s >= waits[-1].waited_s
    assert {(wait.source, wait.rank) for wait in waits} >= {(2, 1), (2, 3), (1, 0)}
    assert all(abs(wait.excess_s) < 1e-3 for wait in waits)  # all of it follows from the times of the stages


def lowered(ranks: int, micro_batches: int, chunks: int) -> dict[int, list[str]]:
    """The order of actions and messages that torch's runtime executes for interleaved 1F1B."""
    from torch.distributed.pipelining import schedules, stage

    stub = mock.create_autospec(stage.PipelineStage, instance=True)
    stub.group_rank, stub.group_size, stub.submod, stub.num_stages = 0, ranks, None, ranks * chunks
    made: Any = schedules.ScheduleInterleaved1F1B([stub] * chunks, micro_batches)
    listed = {rank: map(str, order) for rank, order in made.pipeline_order_with_comms.items()}
    return {
        rank: [one for one in order if "SHARD" not in one and "REDUCE" not in one] for rank, order in listed.items()
    }


def test_the_receive_that_torch_posts_too_early_in_interleaved_1f1b_is_found(tmp_path: Path) -> None:
    """github.com/pytorch/pytorch/issues/188833: RECV_F stands where its sender is, before sends that are ready."""
    seconds = {"F": 1e-3, "B": 2e-3}
    orders = lowered(4, 8, 2)
    assert orders[0] == with_messages(build("interleaved", 4, 8))[0]
    times = stream_times(orders, seconds, 0.05e-3)
    (found,) = pipelines_in(stream_traces(tmp_path / "early", times, shifts_s=SHIFTS_S))
    assert "interleaved" in found.match.names
    blocked = head_of_line(found)
    early = [one for one in blocked if one.rank == 0 and one.blocker.startswith("4RECV_F") and one.source == 3]
    assert len(early) >= 3 and {one.delayed_rank for one in early} == {1} and early[0].idle_s > 1e-3
    for one in early:
        assert all("SEND" in name for name in one.blocked)
        assert orders[0].index(one.blocker) < orders[0].index(one.blocked[0])
    assert found.overlay.error > 0.05  # the simulation, which knows of no such queue, is that much shorter


def test_head_of_line_tells_nothing_without_blocking(tmp_path: Path) -> None:
    order = {0: ["0F0", "0SEND_F0", "0RECV_B0", "0B0"], 1: ["1RECV_F0", "1F0", "1B0", "1SEND_B0"]}
    times = stream_times(order, {"F": 1e-3, "B": 2e-3}, 0.05e-3)
    (found,) = pipelines_in(stream_traces(tmp_path, times))
    assert head_of_line(found) == () and found.match.names


def test_forwards_and_backwards_that_only_have_numbers_are_a_stage_of_each_rank(tmp_path: Path) -> None:
    timeline = simulate(build("gpipe", 2, 3), COSTS)
    for rank in range(2):
        part = timeline.of_rank(rank)
        events = [
            event("user_annotation", f"{'Forward' if action.kind == 'F' else 'Backward'} {action.micro_batch}", *times)
            for action, *times in zip(
                timeline.schedule.orders[rank],
                (1e-3 * timeline.starts[part]).tolist(),
                (1e-3 * timeline.ends[part]).tolist(),
                strict=True,
            )
        ]
        write_trace(tmp_path / f"rank{rank}.json", rank, events, 2)
    (found,) = pipelines_in(tmp_path)
    assert "gpipe" in found.match.names


@pytest.mark.parametrize("on_device", [False, True], ids=["gloo", "NCCL, synthetic"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_without_marks_passes_are_those_that_autograd_numbers(ranks: int, on_device: bool, tmp_path: Path) -> None:
    """torch's Schedule1F1B marks nothing."""
    timeline = simulate(build("1f1b", ranks, 8), COSTS.with_(update=0.0))
    (found,) = pipelines_in(numbered_traces(tmp_path, timeline, on_device=on_device))
    assert "1f1b" in found.match.names and found.steps == 1
    measured = found.overlay.measured
    assert measured.schedule.orders == build("1f1b", ranks, 8).orders
    np.testing.assert_allclose(measured.starts - measured.start, timeline.starts * 1e-3, atol=0.02e-3)
    np.testing.assert_allclose(measured.ends - measured.start, timeline.ends * 1e-3, atol=0.02e-3)


def test_messages_without_a_pipeline_make_none(tmp_path: Path) -> None:
    """A ring all-reduce by hand sends and receives, but all ranks compute at once."""
    for rank in range(2):
        written = NumberedRank(rank, 2)
        for step in range(3):
            at = 1.0 + 0.1 * step
            written.computed(True, step, at, at + 0.02)
            written.computed(False, step, at + 0.03, at + 0.07)
            written.message("send", 1 - rank, at + 0.08)
            written.message("recv", 1 - rank, at + 0.09)
        write_trace(tmp_path / f"rank{rank}.json", rank, written.events, 2)
    assert pipelines_in(tmp_path) == ()


def test_recognised_refuses_stages_without_a_whole_step(tmp_path: Path) -> None:
    whole = build("1f1b", 4, 4)
    with pytest.raises(LabError, match="no whole step"):
        recognised(whole.orders[1:])
    assert isinstance(recognised(whole.orders)[0], Schedule)
