"""Memory snapshots: built by hand to the structure that `torch/cuda/memory.py` documents; no pickle runs anything."""

import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

from dlojz.base.errors import LabError
from dlojz.prediction.allocator import write_snapshot
from dlojz.results import memory_snapshot
from dlojz.results.memory_snapshot import AUTOGRAD, BEFORE, NO_FRAME, grown, is_snapshot, plain_value, snapshot_of

MIB, BASE = 2**20, 0x7F0000000000
TORCH = "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/linear.py"
BUILD = [
    {"filename": TORCH, "line": 9, "name": "__init__"},
    {"filename": "/data/run/train.py", "line": 10, "name": "build"},
]
FORWARD = [
    {"filename": "??", "line": 0, "name": "at::empty_cuda"},
    {"filename": TORCH, "line": 125, "name": "forward"},
    {"filename": "/data/run/model.py", "line": 14, "name": "forward"},
    {"filename": "/data/run/train.py", "line": 30, "name": "<module>"},
]
BACKWARD = [
    {"filename": "/pytorch/torch/csrc/autograd/engine.cpp", "line": 0, "name": "torch::autograd::Engine::thread_main"}
]


def entry(action: str, address: int, size: int, frames: list[Any] | None = None) -> dict[str, Any]:
    address = BASE + address * MIB
    return {"action": action, "addr": address, "size": size, "stream": 0, "time_us": 1, "frames": frames or []}


def block(
    size: int, state: str = "inactive", frames: list[Any] | None = None, requested: int | None = None
) -> dict[str, Any]:
    requested = (size if state != "inactive" else 0) if requested is None else requested
    return {"size": size, "requested_size": requested, "state": state, "frames": frames or []}


def segment(address: int, *blocks: dict[str, Any], device: int = 0) -> dict[str, Any]:
    total = sum(one["size"] for one in blocks)
    place = {"device": device, "address": BASE + address * MIB, "total_size": total, "stream": 0}
    return {**place, "is_expandable": False, "blocks": list(blocks)}


def step(forward: int = 5 * MIB) -> dict[str, Any]:
    """Weights of 8 MiB, 1 KiB of it rounding, and 6 MiB from before the record; 26 MiB in use after the third entry."""
    weights = block(8 * MIB, "active_allocated", BUILD, 8 * MIB - 1024)
    return {
        "segments": [
            segment(0, block(7 * MIB, "active_allocated", BACKWARD), block(13 * MIB)),
            segment(100, weights, block(6 * MIB), block(MIB, "active_allocated"), block(MIB)),
            segment(200, block(2 * MIB)),
        ],
        "device_traces": [
            [
                entry("segment_alloc", 0, 20 * MIB),
                entry("alloc", 7, forward, FORWARD),
                entry("alloc", 0, 7 * MIB, BACKWARD),
                entry("free_requested", 7, forward),
                entry("free_completed", 7, forward),
                entry("free_completed", 108, 6 * MIB),
                entry("alloc", 114, MIB),
                {"action": "oom", "size": 64 * MIB, "device_free": 3 * MIB, "stream": 0, "frames": []},
            ],
            [],
        ],
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
    }


def written(path: Path, value: Any, protocol: int = 4) -> Path:
    path.write_bytes(pickle.dumps(value, protocol))
    return path


def test_snapshot_of_names_what_is_in_use_at_the_peak(tmp_path: Path) -> None:
    taken = snapshot_of(written(tmp_path / "a.pickle", step()))
    weights = 8 * MIB - 1024
    curve = [14, 14, 19, 26, 26, 21, 15, 16, 16]
    assert taken.in_use_bytes.tolist() == [mib * MIB - 1024 for mib in curve]
    assert taken.reserved_bytes.tolist() == [18 * MIB] + [38 * MIB] * 8
    assert taken.peak == 3 and taken.peak_bytes == 26 * MIB - 1024 and taken.recorded
    assert [(row.frame, row.size_bytes) for row in taken.at_peak] == [
        ("run/train.py:10 build", weights),
        (AUTOGRAD, 7 * MIB),
        (BEFORE, 6 * MIB),
        ("run/model.py:14 forward", 5 * MIB),
    ]
    assert [row.frame for row in taken.at_end] == ["run/train.py:10 build", AUTOGRAD, NO_FRAME]
    facts = taken.occupancy
    assert facts is not None and (facts.segments, facts.expandable, facts.awaiting_bytes) == (3, False, 0)
    assert (facts.reserved_bytes, facts.allocated_bytes, facts.requested_bytes) == (38 * MIB, 16 * MIB, 16 * MIB - 1024)
    assert (facts.free_bytes, facts.whole_free_bytes, facts.largest_free_bytes) == (22 * MIB, 2 * MIB, 13 * MIB)
    assert taken.out_of_memory == ((64 * MIB, 3 * MIB),)


def test_snapshot_of_agrees_with_torch_s_tools_and_reads_their_pages(tmp_path: Path) -> None:
    report = _memory_viz.segsum(step())
    assert "total_reserved: 38.0MiB" in report and "total_allocated: 16.0MiB" in report and "segments: 3" in report
    first = snapshot_of(written(tmp_path / "a.pickle", step()))
    for plot in (_memory_viz.trace_plot, _memory_viz.segment_plot):
        (tmp_path / "page.html").write_text(plot(step()))
        assert is_snapshot(tmp_path / "page.html")
        assert snapshot_of(tmp_path / "page.html").at_peak == first.at_peak
    (tmp_path / "plain.json").write_text(json.dumps(step()))
    assert is_snapshot(tmp_path / "plain.json") and snapshot_of(tmp_path / "plain.json").at_peak == first.at_peak


def test_snapshot_of_reads_the_page_of_a_forecast(tmp_path: Path) -> None:
    """`dlojz memory --snapshot` writes one: predicted beside measured, in one format."""
    events = [(0, 3 * MIB), (1, 25 * MIB), (1, -25 * MIB)]
    labels = [("weights", "start"), ("block 1", "forward"), ("block 1", "backward")]
    taken = snapshot_of(write_snapshot(tmp_path / "page.html", events, labels))
    assert taken.peak_bytes == 28 * MIB
    assert [(row.frame, row.size_bytes) for row in taken.at_peak] == [
        ("block 1 forward", 25 * MIB),
        ("weights start", 3 * MIB),
    ]


def test_grown_lays_two_snapshots_side_by_side_though_lines_moved(tmp_path: Path) -> None:
    moved = json.loads(json.dumps(step(9 * MIB)).replace('"line": 14', '"line": 15'))
    rows = grown(
        snapshot_of(written(tmp_path / "a.pickle", step())), snapshot_of(written(tmp_path / "b.pickle", moved))
    )
    assert (rows[0].frame, rows[0].before_bytes, rows[0].after_bytes) == ("run/model.py forward", 5 * MIB, 9 * MIB)
    assert all(row.difference_bytes == 0 for row in rows[1:]) and len(rows) == 4


def test_snapshot_of_says_less_where_fields_are_missing(tmp_path: Path) -> None:
    """Recorded without history; the list of segments alone; `history` of torch 2.0; a device of its own; new fields."""
    bare = {"segments": step()["segments"], "device_traces": [[]], "new": 1}
    taken = snapshot_of(written(tmp_path / "a.pickle", bare))
    assert not taken.recorded and taken.peak_bytes == 16 * MIB - 1024
    assert snapshot_of(written(tmp_path / "a.pickle", step()["segments"])).at_end == taken.at_end
    old = {"size": MIB, "state": "active_allocated", "history": [{"addr": 1, "real_size": 1000, "frames": FORWARD}]}
    other = [segment(0, old), segment(1, block(8 * MIB, "active_allocated"), device=1)]
    taken = snapshot_of(written(tmp_path / "a.pickle", other))
    assert (taken.device, taken.other_devices) == (1, (0,))
    (row,) = snapshot_of(written(tmp_path / "a.pickle", other[:1])).at_end
    assert row == ("run/model.py:14 forward", 1000, 1)
    half = [segment(0, {"size": MIB, "state": "active_allocated"})]
    facts = snapshot_of(written(tmp_path / "a.pickle", half)).occupancy
    assert facts is not None and facts.requested_bytes is None
    huge = {"segments": [], "device_traces": [[entry("alloc", n, 2**62) for n in range(4)]]}
    assert snapshot_of(written(tmp_path / "a.pickle", huge)).peak_bytes == 2**64
    no_frees = {"segments": [], "device_traces": [[entry("alloc", 0, 5), entry("free_requested", 0, 5), "odd", {}]]}
    assert snapshot_of(written(tmp_path / "a.pickle", no_frees)).in_use_bytes.tolist() == [0, 5, 0, 0]


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_value_builds_what_pickle_would(protocol: int) -> None:
    shared = ["é", "a" * 300]
    value = {
        "numbers": [0, 1, -1, 255, 256, 65536, -(2**40), 2**80, 1.5, True, False, None],
        ("a", 1): [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), {}, [], shared, shared, list(range(2500))],
    }
    built = plain_value(pickle.dumps(value, protocol) + b"\0\0", "a")
    assert built == value and built["numbers"][-3] is True
    assert built[("a", 1)][7] is built[("a", 1)][8]


class Evil:
    """Runs a command when a pickle of it is loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        return os.system, (self.command,)


def evil_pickles(command: str) -> dict[str, bytes]:
    """Every opcode that names or calls something, by hand where Python's pickler does not write it."""
    text = command.encode()
    return {
        **{f"reduce {protocol}": pickle.dumps({"segments": [Evil(command)]}, protocol) for protocol in range(6)},
        "inst": b"\x80\x02(X" + len(text).to_bytes(4, "little") + text + b"ios\nsystem\n.",
        "obj": b"\x80\x02(cos\nsystem\nX" + len(text).to_bytes(4, "little") + text + b"o.",
        "newobj": b"\x80\x02cbuiltins\nexec\nX" + len(text).to_bytes(4, "little") + text + b"\x85\x81.",
        "build": b"\x80\x02}}b.",
        "stack global": b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        "extension": b"\x80\x02\x82\x01.",
        "persistent": b"\x80\x02X\x01\x00\x00\x00aQ.",
        "buffer": b"\x80\x05\x97.",
    }


@pytest.mark.parametrize("name", evil_pickles(""))
def test_plain_value_does_nothing_for_a_malicious_pickle(name: str, tmp_path: Path) -> None:
    hit = tmp_path / "hit"
    (tmp_path / "evil.pickle").write_bytes(evil_pickles(f"touch {hit}")[name])
    modules = set(sys.modules)
    with pytest.raises(LabError, match=r"evil.pickle holds more than numbers, .* so it was not loaded") as refused:
        snapshot_of(tmp_path / "evil.pickle")
    assert not hit.exists() and set(sys.modules) == modules and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "content, sentence",
    [
        (b"", "is no whole pickle"),
        (b"hello", "is no whole pickle"),
        (pickle.dumps(step())[:-40], "is no whole pickle"),
        (b"\x80\x04h\x05.", "is no whole pickle"),
        (b"\x80\x04]}\x94].", "holds no memory snapshot"),
        (b"\x80\x04}]K\x01s.", "is no whole pickle"),
        (b"\x80\x04.", "is no whole pickle"),
        (b"\x80\x04X\xff\xff\xff\x7fa.", "is no whole pickle"),
        (b'<html>"base64": "!!"', "is no whole pickle"),
        (b'<html>"base64": "gAQ"', "is no whole pickle"),
        (b'{"segments": [', "is no whole pickle"),
        (pickle.dumps({"model": {}}), "holds no memory snapshot"),
        (pickle.dumps({"segments": [], "device_traces": []}), "holds no memory snapshot"),
        (pickle.dumps({"segments": 7, "device_traces": {"a": 1}}), "holds no memory snapshot"),
    ],
)
def test_snapshot_of_refuses_in_one_sentence(content: bytes, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "bad.pickle").write_bytes(content)
    with pytest.raises(LabError, match=sentence) as refused:
        snapshot_of(tmp_path / "bad.pickle")
    assert "\n" not in str(refused.value)


def test_snapshot_of_refuses_what_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.pickle", step())
    monkeypatch.setattr(memory_snapshot, "MOST_ENTRIES", 5)
    with pytest.raises(LabError, match="more than 5 blocks and entries"):
        snapshot_of(path)
    monkeypatch.setattr(memory_snapshot, "MOST_BYTES", 100)
    with pytest.raises(LabError, match=r"and at most 100 B are read: record fewer entries"):
        snapshot_of(path)
    with pytest.raises(LabError, match="cannot be read: No such file"):
        snapshot_of(tmp_path / "nowhere.pickle")
