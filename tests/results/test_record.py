import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog, RunRecord, read_events, read_record, write_record


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


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "est abîmé : il est illisible : No such file or directory."),
        ("[]", "est abîmé : il ne contient pas d’objet JSON."),
        ("{}", "est abîmé : sa somme de contrôle ne correspond pas à son contenu."),
        ('{"schema_version": 99}', "est d’une version 99 du schéma, plus récente que ce dlojz n’en connaît"),
        (" " * 65, "est abîmé : il fait 65 octets, au-delà des 64 qu’un bilan peut avoir."),
    ],
)
def test_a_record_is_refused_in_french_too(
    content: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_language("fr")
    monkeypatch.setattr("dlojz.results.record.MAX_RECORD_BYTES", 64)
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LabError, match=words) as refusal:
        read_record(path)
    assert str(refusal.value).startswith(f"le bilan {path} est ")


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
    events = EventLog(path)  # of the next attempt: its first event is not lost with the cut line
    events.write("step", step=1)
    events.write("step", step=2)
    events.close()
    assert [event["step"] for event in read_events(path)] == [0, 1, 2]
    EventLog(path).close()
    assert path.read_bytes().count(b"\n\n") == 0
    assert read_events(tmp_path / "absent.jsonl") == []


@pytest.mark.parametrize("kind", ["link", "folder", "pipe", "endless"])
def test_what_is_no_file_of_events_has_none(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who opens a pipe waits for ever, and who reads a file without end fills its memory."""
    path, other = tmp_path / "task-0.jsonl", tmp_path / "other.jsonl"
    other.write_text('{"event": "exit"}\n' * 3)
    assert len(read_events(other)) == 3
    if kind == "link":
        path.symlink_to(other)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        monkeypatch.setattr("dlojz.results.record.MAX_EVENTS_BYTES", other.stat().st_size - 1)
        path = other
    assert read_events(path) == []


def test_an_event_is_on_disk_before_the_next_one_happens(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "rank-0.jsonl")
    events.write("step", step=0)
    [told] = read_events(tmp_path / "rank-0.jsonl")
    assert abs(told.pop("time_s") - time.time()) < 3600 and told == {"event": "step", "step": 0}
    events.close()
