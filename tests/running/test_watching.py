"""`run.watch()` returns at once, follows the run in a thread of its own, and ends with it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlojz.config.run_config import RunConfig
from dlojz.results.record import write_record
from dlojz.running.ending import Ending
from dlojz.running.folder import Job
from dlojz.running.run import Run
from dlojz.running.run_view import RunWatch, Tracker, explained, job_words, time_words, unknown_words
from dlojz.running.slurm.slurm_queue import JobView
from dlojz.running.state import assemble, read_all_events

Told = Callable[..., list[dict[str, Any]]]
HOSTILE = "<img src=x onerror=alert(1)>\u202e"
FOOTPRINT = {"source": "measured", "parameters": 7, "memory": {"peak_bytes": 2**20}}


@pytest.fixture
def going(config: RunConfig, make_folder: Callable[..., Path], told: Told) -> Path:
    """The folder of a run that lasts."""
    start = told(0)[0] | {"environment": {"memory_limit_bytes": str(2**22)}}
    footprint = {"event": "footprint", "footprint": FOOTPRINT}
    return make_folder(config, {0: [start, *told(2, footprint)[1:]], 1: told(1)}, alive=True)


def end(folder: Path, config: RunConfig, status: Any = "completed", reason: str = "") -> None:
    """Let the run end."""
    write_record(
        folder / "record.json", assemble(folder.name, config, read_all_events(folder), Ending(status, reason), 1.0)
    )


def test_tracker_looks_at_a_run_piece_by_piece(going: Path, config: RunConfig, told: Told) -> None:
    tracker = Tracker(Run(going))
    view = tracker.look()
    assert (view.state, view.losses, view.steps) == ("running", (2.0, 1.875), 4)
    assert (view.step_s, view.samples_per_s, view.remaining_s) == (0.1, 320.0, pytest.approx(0.2))
    assert (view.peaks_bytes, view.limit_bytes) == (((0, 2**20),), 2**22)
    with open(going / "events" / "rank-1.jsonl", "a", encoding="utf-8") as file:  # any rank's word on a loss will do
        file.write(json.dumps({"event": "step", "step": 2, "loss": 1.5, "step_s": 9.0}) + '\n{"event": "footprint"}\n')
    assert tracker.look().losses == (2.0, 1.875, 1.5) and tracker.look().step_s == 0.1
    end(going, config)
    assert tracker.look().state == "completed" and tracker.look().remaining_s is None


def test_the_first_step_tells_no_rate(config: RunConfig, make_folder: Callable[..., Path], told: Told) -> None:
    start, slow, *_ = told(1)
    folder = make_folder(config, {0: [start, slow | {"step_s": 9.0}]}, alive=True)
    tracker = Tracker(Run(folder))
    assert (tracker.look().step_s, tracker.look().remaining_s) == (9.0, None)
    with open(folder / "events" / "rank-0.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps({"event": "step", "step": 1, "loss": 1.5, "step_s": 0.5}) + "\n")
    assert (tracker.look().step_s, tracker.look().remaining_s) == (0.5, 1.0)


def test_watch_shows_the_run_as_it_is_when_it_is_shown(going: Path, config: RunConfig) -> None:
    watch = Run(going).watch()
    assert watch.widget is None and not watch.alive  # nobody looks at a test
    assert "2/4" in repr(watch) and "2 of 4 steps" in watch._repr_html_()
    end(going, config, "failed", HOSTILE)
    bundle = watch._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert "✗ failed" in bundle["text/plain"] and "<img" not in bundle["text/html"]
    assert "\u202e" not in "".join(bundle.values())


def test_watch_tells_of_a_folder_that_goes_away(going: Path) -> None:
    watch = Run(going).watch()
    (going / "launch.json").unlink()
    (going / "config.json").write_text(HOSTILE)
    assert "config.json" in repr(watch) and "config.json" in watch.html() and "<img" not in watch.html()


def test_the_widget_follows_the_run_and_leaves_its_static_twin(
    going: Path, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    displayed: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **how: displayed.append((bundle, how)))
    watch = RunWatch(Run(going), live=True, every_s=0.01)
    assert watch.widget is not None and watch.alive
    watch._ipython_display_()
    shown = threading.Event()
    watch.widget.observe(lambda change: shown.set() if "completed" in change["new"] else None, names="value")
    end(going, config)
    assert shown.wait(30)
    assert watch._thread is not None
    watch._thread.join(30)
    assert not watch.alive
    (first, where), (last, again) = displayed
    assert "application/vnd.jupyter.widget-view+json" in first and not where["update"]
    assert set(last) == {"text/plain", "text/html"} and again == {**where, "update": True}
    assert "completed" in last["text/html"]
    with pytest.raises(NotImplementedError):  # shown once more, it is what any other output is
        watch._ipython_display_()


def test_it_ends_with_the_widget_and_not_with_the_run(going: Path) -> None:
    watch = RunWatch(Run(going), live=True, every_s=0.01)
    assert watch._thread is not None and watch._thread.daemon and watch.widget is not None
    watch.widget.close()
    watch._thread.join(30)
    assert not watch.alive and Run(going).state == "running"


def test_job_words_tell_how_a_job_stands() -> None:
    job = Job(machine="local", name="r", job_id="12", array_task=3)
    assert job_words(job, None) == {"job": "12_3 on local"}
    waiting = job_words(job, JobView("pending", "PENDING", "PartitionTimeLimit"))
    assert waiting["waiting"].endswith("(PartitionTimeLimit)") and len(waiting["waiting"]) > 40
    assert job_words(job, JobView("running", "RUNNING", left="1-02:03:04"))["job_left"] == "26 h 03 min"
    silent = JobView("unknown", "RUNNING", age_s=95, problem="Unable to contact slurm controller")
    assert job_words(job, silent)["last_known"] == (
        "last known, 95.0 s ago: RUNNING — Unable to contact slurm controller"
    )
    assert "has not answered yet" in unknown_words(JobView("unknown"))
    assert (time_words("59:58"), time_words("UNLIMITED")) == ("59 min 58 s", "UNLIMITED")
    assert explained("") == ""
