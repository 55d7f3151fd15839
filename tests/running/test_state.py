"""The state of a run is told from its folder alone, and damage loses nothing."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlojz.base.language import use_language
from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog, RunRecord, read_record, write_record
from dlojz.running.ending import Ending
from dlojz.running.folder import read_owner
from dlojz.running.run import Run, survey
from dlojz.running.state import UNHEARD_S, assemble, read_all_events, read_state
from dlojz.running.store import claim

Told = Callable[..., list[dict[str, Any]]]
MakeFolder = Callable[..., Path]
COMPLETED = {"event": "end", "status": "completed", "reason": ""}


def finish(folder: Path, config: RunConfig) -> RunRecord:
    """Write the record of a folder whose ranks have completed, as the launcher does."""
    record = assemble(folder.name, config, read_all_events(folder), Ending("completed"), 1.0)
    write_record(folder / "record.json", record)
    return record


def test_queued_then_running_then_what_the_record_says(config: RunConfig, make_folder: MakeFolder, told: Told) -> None:
    folder = make_folder(config, alive=True)
    assert read_state(folder) == ("queued", None)
    (folder / "events" / "rank-1.jsonl").write_text(json.dumps(told(1)[0]) + "\n")
    assert read_state(folder) == ("running", None)
    record = finish(folder, config)
    assert read_state(folder) == ("completed", record)


def test_a_vanished_launcher_is_a_failure_that_keeps_the_losses(
    config: RunConfig, make_folder: MakeFolder, told: Told
) -> None:
    folder = make_folder(config, {0: told(3), 1: told(2)})
    state, record = read_state(folder)
    assert state == "failed" and record is not None
    assert record.losses == (2.0, 1.875, 1.75)
    assert "the launcher vanished after step 3" in record.reason
    assert read_record(folder / "record.json") == record


def test_read_state_is_completed_where_the_launcher_vanished_after_the_last_rank(
    config: RunConfig, make_folder: MakeFolder, told: Told
) -> None:
    folder = make_folder(config, {0: told(4, COMPLETED), 1: told(4, COMPLETED)})
    assert read_state(folder)[0] == "completed"


def test_read_state_is_running_once_one_rank_has_told(config: RunConfig, make_folder: MakeFolder, told: Told) -> None:
    folder = make_folder(config, {0: told(1), 1: []}, alive=True)
    assert read_state(folder)[0] == "running"
    (folder / "events" / "rank-0.jsonl").write_text("")
    assert read_state(folder)[0] == "queued"


def test_a_process_number_used_again_is_not_the_launcher(config: RunConfig, make_folder: MakeFolder) -> None:
    folder = make_folder(config, alive=True)
    owner = read_owner(folder)
    assert owner is not None and owner.is_alive(folder)
    type(owner)(**{**owner.to_dict(), "process_start_s": owner.process_start_s - 3600}).write(folder)
    assert read_state(folder)[0] == "failed"


def test_read_owner_on_another_machine_is_believed_alive(config: RunConfig, make_folder: MakeFolder) -> None:
    folder = make_folder(config)
    owner = read_owner(folder)
    assert owner is not None
    type(owner)(**{**owner.to_dict(), "host": "another-node"}).write(folder)
    assert read_state(folder)[0] == "queued"


def test_read_state_gives_up_a_launcher_elsewhere_that_hears_no_cancel(
    config: RunConfig, make_folder: MakeFolder, told: Told
) -> None:
    """A machine that is gone for good (a container made anew) would have its runs run for ever."""
    folder = make_folder(config, {0: told(3)})
    owner = read_owner(folder)
    assert owner is not None
    type(owner)(**{**owner.to_dict(), "host": "another-node"}).write(folder)
    (folder / "cancel").touch()
    long_ago_s = time.time() - UNHEARD_S - 60

    def old(*names: str) -> None:
        for name in names:
            os.utime(folder / name, (long_ago_s, long_ago_s))

    old("events/rank-0.jsonl", "events", "logs")
    assert read_state(folder)[0] == "running", "it was asked just now"
    old("cancel")
    (folder / "events" / "rank-0.jsonl").touch()
    assert read_state(folder)[0] == "running", "it still writes"
    old("events/rank-0.jsonl")
    state, record = read_state(folder)
    assert state == "cancelled" and record is not None and record.losses == (2.0, 1.875, 1.75)


@pytest.mark.parametrize("name", ["record.json", "config.json", "launch.json", "job.json", "events/rank-0.jsonl"])
def test_survey_never_waits_for_a_pipe(name: str, config: RunConfig, make_folder: MakeFolder, told: Told) -> None:
    """Nobody writes into it: opening it would wait for ever, and every listing with it."""
    folder = make_folder(config, {0: told(4, COMPLETED), 1: told(4, COMPLETED)})
    if name != "record.json":
        finish(folder, config)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    good, bad = survey(folder.parent)
    assert [run.folder for run in good] == [folder] and not bad
    assert good[0].losses == (2.0, 1.875, 1.75, 1.625)
    other = make_folder(config)
    (other / "config.json").unlink()
    os.mkfifo(other / "config.json")
    assert "no regular file" in survey(folder.parent).bad[other.name]


def test_read_owner_that_is_a_zombie_is_not_alive(config: RunConfig, make_folder: MakeFolder) -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = make_folder(config)
    owner = read_owner(folder)
    assert owner is not None and process.stdin is not None
    owner.handed_to(process.pid).write(folder)
    assert read_state(folder)[0] == "queued"
    process.stdin.close()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    assert read_state(folder)[0] == "failed"
    process.wait()


@pytest.mark.parametrize(
    "damage", [b"", b"null", b"[]", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"sha256": 7}', b'{"a": NaN}', b"9" * 5000]
)
def test_a_damaged_record_is_set_aside_and_rebuilt(
    damage: bytes, config: RunConfig, make_folder: MakeFolder, told: Told
) -> None:
    folder = make_folder(config, {0: told(4, COMPLETED), 1: told(4, COMPLETED)})
    record = finish(folder, config)
    (folder / "record.json").write_bytes(damage)
    run = Run(folder)
    assert (run.state, run.losses) == (record.status, record.losses)
    assert run.record is not None
    assert "damaged" in run.record.reason and "rebuilt from the events" in run.record.reason
    assert [path.read_bytes() for path in (folder / "quarantine").iterdir()] == [damage]
    assert Run(folder).record == run.record


def test_the_cause_survives_the_record(config: RunConfig, make_folder: MakeFolder, told: Told) -> None:
    folder = make_folder(config, {0: told(2)})
    log = EventLog(folder / "events" / "launcher.jsonl")
    log.write("end", status="failed", reason="rank 1 was killed by signal 9.")
    log.close()
    (folder / "record.json").write_text("garbage")
    record = Run(folder).record
    assert record is not None and record.status == "failed"
    assert record.reason.startswith("rank 1 was killed by signal 9; its record was damaged")


def test_the_record_of_another_run_is_not_believed(config: RunConfig, make_folder: MakeFolder, told: Told) -> None:
    one = make_folder(config, {0: told(4, COMPLETED), 1: told(4, COMPLETED)})
    two = make_folder(config, {0: told(2)})
    finish(one, config)
    (two / "record.json").write_bytes((one / "record.json").read_bytes())
    assert Run(two).losses == (2.0, 1.875)
    (two / "record.json").write_bytes((one / "record.json").read_bytes())
    use_language("fr")
    record = Run(two).record
    assert record is not None
    words = f"son bilan était abîmé (il est de l’exécution {one.name}) : il a été mis de côté dans quarantine/"
    assert words in record.reason


def test_survey_leaves_a_newer_record_alone_and_names_it(config: RunConfig, make_folder: MakeFolder) -> None:
    folder = make_folder(config)
    newer = json.dumps({"schema_version": 2, "splendid": True})
    (folder / "record.json").write_text(newer)
    good, bad = survey(folder.parent)
    assert good == [] and "update dlojz" in bad[folder.name]
    assert (folder / "record.json").read_text() == newer


def test_damaged_configuration_with_and_without_a_record(
    config: RunConfig, make_folder: MakeFolder, told: Told
) -> None:
    kept, lost = (make_folder(config, {0: told(4, COMPLETED), 1: told(4, COMPLETED)}) for _ in range(2))
    finish(kept, config)
    for folder in (kept, lost):
        (folder / "config.json").write_text("{")
    good, bad = survey(kept.parent)
    assert [(run.folder, run.config) for run in good] == [(kept, config)]
    assert "config.json" in bad[lost.name]


def test_a_folder_that_takes_no_record_still_tells(config: RunConfig, make_folder: MakeFolder, told: Told) -> None:
    folder = make_folder(config, {0: told(3)})
    program = (
        f"from pathlib import Path; from dlojz.running.run import Run; run = Run(Path({str(folder)!r})); "
        "print(run.state, run.losses)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, 64)),
    )
    assert answer.stdout == "failed (2.0, 1.875, 1.75)\n"
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "events", "launch.json", "logs"]


def test_owner_and_record_have_utc_times_in_any_time_zone(
    config: RunConfig, make_folder: MakeFolder, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fourteen hours ahead of UTC: names, times and durations are those of everybody else."""
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")
    time.tzset()
    try:
        before = datetime.now(UTC)
        folder = make_folder(config, {0: told(4, COMPLETED), 1: told(4, COMPLETED)})
        record = Run(folder).record
        owner = read_owner(folder)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert owner is not None and record is not None
    submitted = datetime.fromisoformat(owner.submitted_utc)
    assert submitted.utcoffset() == timedelta(0)
    assert timedelta(seconds=-2) < submitted - before < timedelta(hours=1)
    born = datetime.strptime(f"{folder.name[:15]}+0000", "%Y%m%d-%H%M%S%z")
    assert abs(born - submitted) < timedelta(hours=1)
    assert record.elapsed_s is None, "no event after the start says when it was written"


START_S = 1_790_000_000.0


def at(second: float, event: str, **fields: Any) -> dict[str, Any]:
    """An event written so many seconds after the first start."""
    return {"event": event, "time_s": START_S + second, **fields}


def attempt(start: float, *steps: float) -> list[dict[str, Any]]:
    moment = datetime.fromtimestamp(START_S + start, UTC).isoformat(timespec="seconds")
    return [{"event": "start", "time_utc": moment}, *(at(one, "step", step=i, loss=2.0) for i, one in enumerate(steps))]


OLD_STEP = {"event": "step", "step": 0, "loss": 2.0}
LENGTHS: dict[str, tuple[dict[int, list[dict[str, Any]]], float | None]] = {
    "one attempt": ({0: attempt(0, 5, 30), 1: attempt(1, 6, 31)}, 31.0),
    "of two attempts the ten hours between them are no computing": (
        {0: attempt(0, 5, 30) + attempt(36_000, 36_010, 36_012)},
        42.0,
    ),
    "ranks that start one after the other": ({0: attempt(0, 30), 1: attempt(20, 50)}, 50.0),
    "ranks, one of which came to no second attempt": ({0: attempt(0, 10) + attempt(100, 105), 1: attempt(0, 12)}, 17.0),
    "events of an older dlojz, which have no times": ({0: [*attempt(0), OLD_STEP]}, None),
    "no events": ({}, None),
    "a start alone": ({0: attempt(0)}, 0.0),
    "a last event without a time": ({0: [*attempt(0, 7), OLD_STEP]}, 7.0),
    "a time that is none": ({0: [*attempt(0, 7), {**OLD_STEP, "time_s": "x"}, {**OLD_STEP, "time_s": True}]}, 7.0),
    "a clock that was set back behind the start": ({0: attempt(0, -3600)}, None),
    "a time of another century": ({0: attempt(0, 4e9)}, None),
    "a time that is no date": ({0: [{"event": "start", "time_utc": "once"}, at(4, "step", step=0, loss=1.0)]}, None),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_a_rebuilt_record_lasts_as_long_as_its_events_say(
    case: str, config: RunConfig, make_folder: MakeFolder
) -> None:
    """Neither the submission, ten hours before, nor the times of the files, a month old or new, count."""
    events, seconds = LENGTHS[case]
    folder = make_folder(config, events)
    owner = read_owner(folder)
    assert owner is not None
    submitted = datetime.fromtimestamp(START_S - 36_000, UTC).isoformat()
    type(owner)(**{**owner.to_dict(), "submitted_utc": submitted}).write(folder)
    for number, path in enumerate((folder / "events").iterdir()):
        os.utime(path, (START_S + number * 2.6e6, START_S + number * 2.6e6))
    record = Run(folder).record
    assert record is not None and record.elapsed_s == seconds


def test_a_rebuilt_record_lasts_as_long_as_its_launcher_has_measured(
    config: RunConfig, make_folder: MakeFolder
) -> None:
    folder = make_folder(config, {0: [*attempt(0, 5), {**COMPLETED, "time_s": START_S + 6}]})
    write = (folder / "events" / "launcher.jsonl").write_text
    write(json.dumps(at(9, "end", status="completed", reason="", elapsed_s=12.5)))
    record = Run(folder).record
    assert record is not None and (record.elapsed_s, record.ended_utc) == (12.5, "2026-09-21T14:13:29+00:00")
    (folder / "record.json").write_text("damaged")
    write(json.dumps(at(9, "end", status="completed", reason="", elapsed_s="12.5")))
    record = Run(folder).record
    assert record is not None and (record.elapsed_s, record.ended_utc) == (9.0, "2026-09-21T14:13:29+00:00")


# Made once: hypothesis damages copies of it.
@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, RunRecord]:
    config = RunConfig.of(model="coatnet_tiny", dp=1, steps=4)
    folder, _ = claim(config, tmp_path_factory.mktemp("sound"))
    events = [{"event": "step", "step": i, "loss": 2.0 - i / 8, "step_s": 0.1} for i in range(4)]
    (folder / "events" / "rank-0.jsonl").write_text("".join(json.dumps(e) + "\n" for e in [*events, COMPLETED]))
    record = finish(folder, config)
    return folder, (folder / "record.json").read_bytes(), record


def check_damage(sound: tuple[Path, bytes, RunRecord], damaged: bytes) -> None:
    """Whatever the bytes, listing does not raise, and the run is either left out by name or tells the truth."""
    folder, _, record = sound
    (folder / "record.json").write_bytes(damaged)
    good, bad = survey(folder.parent)
    assert len(good) + len(bad) == 1
    for run in good:
        found = run.record
        assert found is not None
        assert (found.config, found.status, found.losses) == (record.config, record.status, record.losses)


@settings(max_examples=60)
@given(data=st.data())
def test_survey_bears_any_truncation(sound: tuple[Path, bytes, RunRecord], data: st.DataObject) -> None:
    whole = sound[1]
    check_damage(sound, whole[: data.draw(st.integers(0, len(whole) - 1))])


@settings(max_examples=150)
@given(data=st.data())
def test_any_changed_byte(sound: tuple[Path, bytes, RunRecord], data: st.DataObject) -> None:
    whole = sound[1]
    place, mask = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    check_damage(sound, whole[:place] + bytes([whole[place] ^ mask]) + whole[place + 1 :])


@settings(max_examples=60)
@given(data=st.data())
def test_survey_bears_any_value_of_another_type(sound: tuple[Path, bytes, RunRecord], data: st.DataObject) -> None:
    content = json.loads(sound[1])
    key = data.draw(st.sampled_from(sorted(content)))
    content[key] = data.draw(st.sampled_from([None, True, -1, 1.5, "x", [], {}, [1], {"a": None}, 10**30]))
    check_damage(sound, json.dumps(content).encode())
