from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlojz.config import RunConfig
from dlojz.record import EventLog, RunRecord, read_events, read_record, write_atomic, write_record
from dlojz.schema import LabError


def record() -> RunRecord:
    return RunRecord(run_id="one", config=RunConfig.of(dp=2), status="completed", losses=(2.5, 2.25), elapsed_s=3.5)


def test_a_record_comes_back_as_it_was(tmp_path: Path) -> None:
    write_record(tmp_path / "record.json", record())
    assert read_record(tmp_path / "record.json") == record()
    assert os.listdir(tmp_path) == ["record.json"]


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_record_never_gives_a_wrong_number(tmp_path: Path, position: int, bit: int, cut: bool) -> None:
    path = tmp_path / "record.json"
    write_record(path, record())
    content = bytearray(path.read_bytes())
    position %= len(content)
    damaged = (
        bytes(content[:position])
        if cut
        else bytes(byte ^ (1 << bit) if index == position else byte for index, byte in enumerate(content))
    )
    path.write_bytes(damaged)
    try:
        found = read_record(path)
    except LabError as error:
        assert "record" in str(error)
    else:
        assert found == record()


def test_nan_is_refused() -> None:
    with pytest.raises(LabError):
        RunRecord(run_id="x", config=RunConfig.of(), status="completed", losses=(float("nan"),))


def test_a_record_of_a_newer_version_is_refused_readably(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text(json.dumps({"schema_version": 99}))
    with pytest.raises(LabError, match="schema version 99, newer than this dlojz knows"):
        read_record(tmp_path / "record.json")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    """A real full disk is caused in tests/faults; here the rename finds a folder in its way."""
    target = tmp_path / "record.json"
    target.mkdir()
    with pytest.raises(OSError, match="record.json"):
        write_atomic(target, "new")
    assert os.listdir(tmp_path) == ["record.json"]


def test_events_survive_a_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    events = EventLog(path)
    events.write("step", step=0, loss=2.5)
    events.write("step", step=1, loss=2.25)
    events.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    assert [event["step"] for event in read_events(path)] == [0]
    assert read_events(tmp_path / "absent.jsonl") == []


def test_an_event_is_on_disk_before_the_next_one_happens(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "rank-0.jsonl")
    events.write("step", step=0)
    assert read_events(tmp_path / "rank-0.jsonl") == [{"event": "step", "step": 0}]
    events.close()
