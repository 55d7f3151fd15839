"""Traces of torch.profiler: read in little memory, laid on one clock, divided; what is none is refused."""

import gzip
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.results import profiler_trace
from dlojz.results.profiler_trace import TraceFile, rank_of, trace_files
from dlojz.results.rank_activities import (
    RankActivities,
    activities_of,
    aligned,
    check_ranks,
    shares_of,
    spans_of,
    stragglers_of,
)
from tests.profiled import Event, event, write_trace


def ddp(rank: int, late_s: float = 0.0, steps: int = 5) -> list[Event]:
    """Forward, backward, an all-reduce of 2 ms after the last rank has come, half of it hidden, an optimizer step."""
    events = []
    for step in range(steps):
        at = 3.0 + 0.05 * step
        come = at + 0.01 + late_s
        end = at + 0.01 + 0.004 + 0.002  # the slow rank comes 4 ms later
        events += [
            event("cpu_op", "aten::mm", at, at + 0.004),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", at + 0.004, come),
            event("cpu_op", "aten::mm", at + 0.005, come),
            event("user_annotation", "gloo:all_reduce", come, end, 101),
            event("cpu_op", "aten::mm", end - 0.001, end),
            event("user_annotation", "Optimizer.step#SGD.step", end, end + 0.003),
            event("cpu_op", "aten::add_", end, end + 0.003),
        ]
    return events


def two_ranks(folder: Path, shift_s: float = 0.0) -> tuple[RankActivities, ...]:
    write_trace(folder / "rank0.json", 0, ddp(0), 2)
    write_trace(folder / "rank1.json", 1, ddp(1, late_s=0.004), 2, shift_s=shift_s, host="node1")
    return tuple(map(activities_of, trace_files([folder])))


@pytest.mark.parametrize("shift_s", [0.0, 11.5, -86400.0])
def test_the_late_rank_is_named_whatever_its_clock_says(tmp_path: Path, shift_s: float) -> None:
    together = aligned(two_ranks(tmp_path, shift_s))
    assert together.shifts_s[1] == pytest.approx(-shift_s, abs=1e-6) and max(together.uncertain_s) < 1e-6
    (straggler,) = stragglers_of(together)
    assert (straggler.rank, straggler.last, straggler.collectives) == (1, 5, 5)
    assert straggler.late_s == pytest.approx(0.004, abs=1e-6) and straggler.waited_s == pytest.approx(0.02, abs=1e-6)
    first, second = shares_of(together)
    assert first.exposed_s == pytest.approx(5 * 0.005, abs=1e-6) and first.hidden_s == pytest.approx(0.005, abs=1e-6)
    assert first.waited_s == pytest.approx(0.02, abs=1e-6) and second.waited_s == pytest.approx(0.0, abs=1e-6)
    for one in (first, second):
        assert one.computing_s + one.exposed_s + one.idle_s == pytest.approx(together.length_s)
    phases = {span.phase for span in spans_of(together)}
    assert phases == {"forward", "backward", "optimizer", "communication", "wait"}


def test_ranks_that_share_nothing_keep_their_clocks(tmp_path: Path) -> None:
    for rank in range(2):
        write_trace(tmp_path / f"rank{rank}.json", rank, [event("cpu_op", "aten::mm", 1.0, 2.0 + rank)], 2)
    together = aligned([activities_of(one) for one in trace_files([tmp_path])])
    assert together.shifts_s == (0.0, 0.0) and together.uncertain_s == (0.0, float("inf"))


def test_kernels_count_where_there_are_any(tmp_path: Path) -> None:
    events = [
        event("cpu_op", "aten::mm", 0.0, 5.0),
        event("kernel", "sm90_gemm", 1.0, 2.0, 7),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)", 1.5, 3.0, 20, **{"Seq": 4}),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(x)", 3.0, 4.0, 20, **{"Collective name": "_allgather_base"}),
    ]
    one = activities_of(TraceFile(write_trace(tmp_path / "rank0.json", 0, events, 2)))
    assert one.on_device and one.computing.tolist() == [[1.0, 2.0]]
    assert [(each.kind, each.sequence) for each in one.exchanges] == [("all_reduce", 4), ("all_gather", None)]
    assert one.exposed.tolist() == [[2.0, 4.0]]


def test_synthetic_nccl_traces_are_divided_by_what_launches_their_kernels(tmp_path: Path) -> None:
    """Built to Kineto's format by hand, never recorded: forward, backward on another thread, all-reduce of a half."""
    ranks = []
    for rank in range(4):
        node = {"Sequence number": 5, "Fwd thread id": 1}
        group = {"Process Group Name": "0:split:1", "Process Group Ranks": str([rank // 2 * 2, rank // 2 * 2 + 1])}
        come = 1.3 + 0.01 * rank
        events = [
            event("cpu_op", "aten::mm", 0.10, 0.12, **{"Sequence number": 5, "Fwd thread id": 0}),
            event("cuda_runtime", "cudaLaunchKernel", 0.11, 0.111, correlation=1),
            event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 0.20, 0.30, 101, **node),
            event("cuda_driver", "cuLaunchKernelEx", 0.25, 0.251, 101, correlation=2),
            event("user_annotation", "nccl:all_reduce", 0.26, 0.27, 101),
            event("cuda_runtime", "cudaLaunchKernelExC", 0.26, 0.27, 101, correlation=3),
            event("kernel", "sm90_gemm", 1.0, 1.1, 7, stream=7, correlation=1),
            event("kernel", "sm90_gemm", 1.1, 1.3, 7, stream=7, correlation=2),
            event("gpu_user_annotation", "nccl:all_reduce", come, 1.4, 20),
            event(
                "kernel",
                "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
                come,
                1.4,
                20,
                **{"stream": 20, "correlation": 3, "Collective name": "allreduce", "Seq": 7, **group},
            ),
            event("gpu_memset", "Memset (Device)", 1.35, 1.36, 7, stream=7),
        ]
        ranks.append(activities_of(TraceFile(write_trace(tmp_path / f"rank{rank}.json", rank, events, 4))))
    one = ranks[1]
    assert one.on_device and np.allclose(one.backward, [[1.1, 1.3]])
    assert [(each.kind, each.sequence) for each in one.exchanges] == [("all_reduce", 7)]
    assert np.allclose(one.exposed, [[1.31, 1.35], [1.36, 1.4]])
    assert {span.phase for span in spans_of(aligned(ranks))} == {"forward", "backward", "communication", "wait"}
    late = {each.rank: each for each in stragglers_of(aligned(ranks))}
    assert set(late) == {1, 3}, "one half does not wait for the other"
    assert all(each.collectives == 2 and each.waited_s == pytest.approx(0.01, abs=1e-6) for each in late.values())


def test_what_a_node_waits_for_in_a_hook_is_exposed(tmp_path: Path) -> None:
    """FSDP2 awaits an all-gather in the hook of a node of the backward."""
    node = {"Sequence number": 5, "Fwd thread id": 1}
    events = [
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 1.0, 2.0, **node),
        event("cpu_op", "_c10d_functional::wait_tensor", 1.0, 1.6),
        event("user_annotation", "gloo:all_gather", 1.0, 1.6, 101),
        event("cpu_op", "MmBackward0", 1.6, 2.0, **node),
        event("cpu_op", "aten::mm", 1.7, 1.9),
    ]
    one = activities_of(TraceFile(write_trace(tmp_path / "rank0.json", 0, events, 2)))
    assert np.allclose(one.exposed, [[1.0, 1.6]]) and np.allclose(one.backward, [[1.7, 1.9]])


def test_the_rank_is_that_of_the_trace_else_of_the_name(tmp_path: Path) -> None:
    for name, told, rank in (
        ("a.json", {"rank": 3}, 3),
        ("trace_rank12.json", None, 12),
        ("run.5.pt.trace.json", None, 5),
        ("trace.json", None, None),
    ):
        head = {"distributedInfo": told} if told else {}
        path = tmp_path / name
        path.write_text(json.dumps({**head, "traceEvents": [event("cpu_op", "aten::mm", 0.0, 1.0)]}))
        trace = TraceFile(path)
        assert len(list(trace.events())) == 1 and rank_of(trace) == rank


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_trace_is_never_in_memory_as_a_whole(
    tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler_trace, "CHUNK_BYTES", 1 << 16)
    path = tmp_path / ("rank0.json.gz" if packed else "rank0.json")
    one = json.dumps(event("cpu_op", "aten::mm", 0.0, 1.0, text="x" * 200), indent=1)
    with gzip.open(path, "wt") if packed else path.open("w") as file:
        file.write('{"distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": [')
        for number in range(12_000):
            file.write(one.replace('"ts": 0.0', f'"ts": {2e6 * number}') + ",\n")
        file.write(one + "]}")
    tracemalloc.start()
    try:
        read = activities_of(TraceFile(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(read.computing) == 12_000  # the last repeats the first
    assert peak < 2_500_000 < 12_000 * len(one)


def refusal_of(path: Path) -> str:
    """The sentence in English; the French one is another, and one too."""
    told = []
    for language in ("en", "fr"):
        use_language(language)
        with pytest.raises(LabError) as caught:
            check_ranks([activities_of(one) for one in trace_files([path])], ["a", "b"][: 1 if path.is_file() else 2])
        told.append(str(caught.value))
    assert told[0] != told[1] and "\n" not in "".join(told)
    return told[0]


def test_what_is_no_trace_is_refused_in_one_sentence(tmp_path: Path) -> None:
    whole = write_trace(tmp_path / "whole.json", 0, ddp(0), 2).read_bytes()
    packed = gzip.compress(whole)
    simulated = json.dumps({"traceEvents": [{"ph": "X", "cat": "F", "name": "0F0", "ts": 0, "dur": 1}]}).encode()
    nothing = json.dumps({"schemaVersion": 1, "traceEvents": []}).encode()
    unnamed = json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0.0, 1.0)]}).encode()
    many = b'{"traceEvents": [' + b"[" * 200_000
    for content, expected in (
        (whole[: len(whole) // 2], "cut off after"),
        (whole[:-3], "cut off after"),
        (packed[: len(packed) // 2], "cut off after"),
        (packed[:100] + b"\x00" * 50 + packed[150:], "cut off after"),
        (b"", "no Chrome trace"),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), "no Chrome trace"),
        (b"hello", "no Chrome trace"),
        (b'{"a": tru', "no Chrome trace"),
        (b'{"traceEvents": 3}', "no Chrome trace"),
        (many, "no Chrome trace"),
        (b"PK\x03\x04" + bytes(40), "zip archive"),
        (simulated, "another tool"),
        (b"{}", "no Chrome trace"),
        (nothing, "no events"),
        (unnamed, "does not say its rank"),
        (b"[1, 2, 3]", "another tool"),
        (b'[{"ph": "X", "cat": "blink", "name": "Run", "ts": 1, "dur": 2}]', "another tool"),
        (b"\n\x1a\x0b\x08\x01perfetto", "no Chrome trace"),
        (b'{"nodes": [], "strings": []}', "no Chrome trace"),
    ):
        path = tmp_path / "trace.json"
        path.write_bytes(content)
        assert expected in refusal_of(path), content[:40]


def test_an_archive_bomb_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler_trace, "FREE_BYTES", 1 << 20)
    blanks, repeated = tmp_path / "blanks.json.gz", tmp_path / "events.json.gz"
    blanks.write_bytes(gzip.compress(b'{"traceEvents": [' + b" " * (8 << 20)))
    one = json.dumps(event("cpu_op", "aten::mm", 0.0, 1.0)).encode()
    repeated.write_bytes(gzip.compress(b'{"traceEvents": [' + (one + b", ") * 100_000))
    for path in (blanks, repeated):
        assert "unpacks to more than" in refusal_of(path)
    monkeypatch.setattr(profiler_trace, "MOST_VALUE_CHARACTERS", 1 << 20)
    long = tmp_path / "long.json"
    long.write_bytes(b'{"a": "' + b"x" * (4 << 20))
    assert "no Chrome trace" in refusal_of(long)


def test_folders_and_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    assert "there is no file" in refusal_of(tmp_path / "nowhere.json")
    (tmp_path / "empty").mkdir()
    assert "has no trace" in refusal_of(tmp_path / "empty")
    twice = tmp_path / "twice"
    twice.mkdir()
    for name in ("a", "b"):
        write_trace(twice / f"{name}.json", 0, ddp(0), 2)
    assert "rank 0 has two traces, a and b" in refusal_of(twice)
    write_trace(twice / "b.json", 1, ddp(1), 4)
    assert "a is of a run on 2 processes and b of one on 4" in refusal_of(twice)
    os.mkfifo(tmp_path / "pipe.json")
    assert "pipe.json is no regular file" in refusal_of(tmp_path / "pipe.json")


def test_ranks_of_other_moments_are_refused(tmp_path: Path) -> None:
    for rank in range(2):
        events = [event("cpu_op", "aten::mm", 1.0 + 5 * rank, 2.0 + 5 * rank)]
        write_trace(tmp_path / f"rank{rank}.json", rank, events, 2)
    for language, told in (("en", "rank 1 was not traced at the same time"), ("fr", "n’a pas été tracé")):
        use_language(language)
        with pytest.raises(LabError, match=told):
            aligned([activities_of(one) for one in trace_files([tmp_path])])


def test_events_of_any_shape_are_read_over(tmp_path: Path) -> None:
    odd: list[object] = [
        None, 3, "x", [], {}, {"ph": "X"}, {"ph": "X", "cat": 3, "name": 4, "ts": "a", "dur": None},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1e400, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1, "dur": -5},
        {"ph": "X", "cat": "kernel", "name": "nccl", "ts": 1, "dur": 5, "args": 7},
        {"ph": "X", "cat": "user_annotation", "name": "PP:9999999999999999999999F1", "ts": 1, "dur": 5},
    ]  # fmt: skip
    path = tmp_path / "rank0.json"
    path.write_text(json.dumps({"traceEvents": [event("cpu_op", "aten::mm", 0.0, 1.0), *odd]}))
    assert activities_of(TraceFile(path)).computing.tolist() == [[0.0, 1.0]]
