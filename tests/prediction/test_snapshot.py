"""The predicted snapshot as torch's own tools read it."""

from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from dlojz.base.errors import LabError
from dlojz.prediction.allocator import replay, snapshot, write_snapshot

MIB = 2**20
EVENTS = [(0, 3 * MIB), (1, 5000), (2, 25 * MIB), (2, -25 * MIB), (3, 11 * MIB)]
LABELS = [("weights", "start"), ("block 0", "forward"), ("block 1", "forward"), ("block 1", "backward"), ("loss", "é")]


def in_the_end(taken: dict[str, Any]) -> tuple[int, int]:
    """Allocated and reserved bytes, found by going through the trace as the viewer does."""
    live: dict[int, int] = {}
    segments: dict[int, int] = {}
    for entry in taken["device_traces"][0]:
        held = segments if entry["action"].startswith("segment") else live
        if entry["action"] in ("alloc", "segment_alloc"):
            assert entry["addr"] not in held
            held[entry["addr"]] = entry["size"]
        elif entry["action"] in ("free_completed", "segment_free"):
            assert held.pop(entry["addr"]) == entry["size"]
    return sum(live.values()), sum(segments.values())


def test_snapshot_is_read_by_torch_s_tools() -> None:
    taken = snapshot(EVENTS, LABELS)
    for report in (_memory_viz.segsum, _memory_viz.trace):
        assert report(taken)
    assert "total_reserved" in _memory_viz.segsum(taken)
    for page in (_memory_viz.trace_plot(taken), _memory_viz.segment_plot(taken)):
        assert page.lstrip().startswith("<!DOCTYPE html>") and "base64" in page
    assert in_the_end(taken) == (14 * MIB + 5000, sum(segment["total_size"] for segment in taken["segments"]))


def test_snapshot_says_in_trace_and_segments_who_and_when() -> None:
    taken = snapshot(EVENTS, LABELS)
    allocations = [entry for entry in taken["device_traces"][0] if entry["action"] == "alloc"]
    assert [entry["frames"][0]["filename"] for entry in allocations] == ["weights", "block 0", "block 1", "loss"]
    assert [entry["frames"][0]["name"] for entry in allocations] == ["start", "forward", "forward", "é"]
    released = [entry for entry in taken["device_traces"][0] if entry["action"] == "free_completed"]
    assert [(entry["frames"][0]["name"], entry["time_us"]) for entry in released] == [("backward", 3)]
    assert sorted((segment["segment_type"], segment["total_size"] // MIB) for segment in taken["segments"]) == [
        ("large", 20),
        ("large", 26),
        ("small", 2),
    ]
    live = [block for segment in taken["segments"] for block in segment["blocks"] if block["frames"]]
    assert {block["frames"][0]["filename"] for block in live} == {"weights", "block 0", "loss"}
    assert sum(block["requested_size"] for block in live) == 14 * MIB + 5000


def test_where_memory_runs_out_the_trace_ends() -> None:
    taken = snapshot(EVENTS, LABELS, limit_bytes=25 * MIB)
    assert taken["device_traces"][0][-1] == {
        "action": "oom",
        "addr": 0,
        "size": 25 * MIB,
        "stream": 0,
        "time_us": 2,
        "frames": [{"filename": "block 1", "line": 0, "name": "forward"}],
        "device_free": 3 * MIB,
    }
    assert _memory_viz.trace(taken)
    assert in_the_end(taken) == (3 * MIB + 5000, 22 * MIB)


def test_write_snapshot_makes_a_page(tmp_path: Path) -> None:
    path = write_snapshot(str(tmp_path / "step.html"), EVENTS, [("</script><script>alert(1)", "x")] * len(EVENTS))
    page = path.read_text(encoding="utf-8")
    assert "MemoryViz" in page
    assert "alert(1)" not in page


def test_write_snapshot_refuses_bad_input_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"named .html, but .*step.json"):
        write_snapshot(tmp_path / "step.json", EVENTS)
    with pytest.raises(LabError, match="5 events and 1 labels"):
        write_snapshot(tmp_path / "step.html", EVENTS, LABELS[:1])
    with pytest.raises(LabError, match="event 0 frees 1 bytes"):
        write_snapshot(tmp_path / "step.html", [(0, -1)])
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.html").mkdir()
    for path in ("nowhere/step.html", "file/step.html", "folder.html"):
        with pytest.raises(LabError, match=r"cannot be written to .*: choose a folder that exists"):
            write_snapshot(tmp_path / path, EVENTS)
    assert sorted(file.name for file in tmp_path.rglob("*")) == ["file", "folder.html"]


def test_an_empty_step_is_a_snapshot_too() -> None:
    assert snapshot([])["segments"] == [] == snapshot([])["device_traces"][0]
    assert replay([]).reserved_peak_bytes == 0
