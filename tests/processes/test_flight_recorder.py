"""What a rank that stands still writes about itself: its last collectives and the line of the script."""

import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from dlojz.processes import hang_diagnosis
from dlojz.processes.hang_diagnosis import StallWatch, line_of_main_thread


class Log:
    """Log of events in memory, of a rank whose last step ended so long ago."""

    def __init__(self, step_ends_s: list[float]) -> None:
        self.step_ends_s = step_ends_s
        self.events: list[dict[str, Any]] = []
        self.written = threading.Event()

    def write(self, event: str, **fields: Any) -> None:
        self.events.append({"event": event, **fields})
        self.written.set()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_diagnosis, "_LOOK_EVERY_S", 0.01)


def watched(log: Log) -> StallWatch:
    watch = StallWatch(log)
    watch.start()
    return watch


def test_stall_watch_notes_where_a_rank_stands_and_again_when_that_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["train.py:7 in validate", "train.py:9 in main"]
    calls = {"0": [[1, "all_reduce", "Float", "[10]"]]}
    monkeypatch.setattr(hang_diagnosis, "line_of_main_thread", lambda: lines[0])
    monkeypatch.setattr(hang_diagnosis, "last_calls", lambda: calls)
    now_s = time.monotonic()
    log = Log([now_s - 102, now_s - 101, now_s - 100])
    watch = watched(log)
    assert log.written.wait(60)
    del lines[0]
    log.written.clear()
    assert log.written.wait(60)
    watch.close()
    watch.join(60)
    assert log.events == [
        {"event": "stalled", "groups": calls, "line": line} for line in ("train.py:7 in validate", "train.py:9 in main")
    ]


def test_stall_watch_waits_for_twenty_steps_of_a_slow_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 10 s: 20 of them are 200 s. A rank that made no step is noted too: others may wait for it."""
    monkeypatch.setattr(hang_diagnosis, "last_calls", dict)
    now_s = time.monotonic()
    slow, late, idle = (
        Log([now_s - begin_s for begin_s in begins_s])
        for begins_s in ((130.0, 120.0, 110.0, 100.0), (300.0, 230.0, 220.0, 210.0), (500.0,))
    )
    watches = [watched(log) for log in (slow, late, idle)]
    assert late.written.wait(60) and idle.written.wait(60)
    for watch in watches:
        watch.close()
        watch.join(60)
    assert [len(log.events) for log in (slow, late, idle)] == [0, 1, 1]


def test_line_of_main_thread_is_of_the_engine_where_no_script_is() -> None:
    code = "from dlojz.processes import hang_diagnosis; print(hang_diagnosis.line_of_main_thread())"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.startswith("dlojz/processes/hang_diagnosis.py:") and shown.endswith(" in line_of_main_thread\n")


def test_line_of_main_thread_is_of_the_users_code() -> None:
    assert line_of_main_thread().startswith("test_flight_recorder.py:")
    assert line_of_main_thread().endswith(" in test_line_of_main_thread_is_of_the_users_code")
