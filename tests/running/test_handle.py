"""`Run`: what a student sees and may ask."""

import io
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tqdm.auto
import tqdm.std

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.running.folder import MAX_LOG_BYTES
from dlojz.running.run import Run
from dlojz.running.run_view import EventTail, ProgressBar, wanted

Told = Callable[..., list[dict[str, Any]]]
HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J"


def test_run_that_lasts_has_no_record_and_can_be_cancelled(
    config: RunConfig, make_folder: Callable[..., Path], told: Told
) -> None:
    run = Run(make_folder(config, {0: told(2), 1: told(1)}, alive=True))
    assert (run.state, run.record, run.losses, run.config) == ("running", None, (2.0, 1.875), config)
    with pytest.raises(LabError, match="still running"):
        run.wait(timeout_s=0.01)
    assert "is asked to stop" in run.cancel()
    assert (run.folder / "cancel").exists()


def test_who_waits_looks_until_the_run_has_ended(
    config: RunConfig, make_folder: Callable[..., Path], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, looks = Run(make_folder(config, {0: told(2)}, alive=True)), []
    ended = make_folder(config, {0: told(2)}) / "launch.json"

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        (run.folder / "launch.json").write_bytes(ended.read_bytes())

    monkeypatch.setattr(time, "sleep", sleep)
    assert run.wait(timeout_s=600).state == "failed"
    assert len(looks) == 1


def test_run_that_has_ended_has_its_record_and_is_not_cancelled(
    config: RunConfig, make_folder: Callable[..., Path], told: Told
) -> None:
    run = Run(make_folder(config, {0: told(2)}))
    assert run.wait() is run.follow() is run
    assert run.record is not None and run.losses == run.record.losses
    assert "has ended already (failed)" in run.cancel()
    assert not (run.folder / "cancel").exists()


def test_follow_cancels_at_ctrl_c_waits_for_the_record_and_says_what_is_kept(
    config: RunConfig,
    make_folder: Callable[..., Path],
    told: Told,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The launcher, here a thread of the test, ends the run 0.5 s after it is asked to."""
    run = Run(make_folder(config, {0: told(2), 1: told(2)}, alive=True))
    ended = make_folder(config, {0: told(2), 1: told(2)}) / "launch.json"

    def end() -> None:
        (run.folder / "launch.json").write_bytes(ended.read_bytes())

    def interrupted(bar: ProgressBar, state: str) -> None:
        threading.Timer(0.5, end).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(ProgressBar, "update", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.follow(progress=False)
    assert (run.folder / "cancel").exists()
    assert capsys.readouterr().err == f"{run.run_id}: cancelled after 2 steps; all that was measured is kept.\n"


def test_html_is_escaped(config: RunConfig, make_folder: Callable[..., Path], told: Told) -> None:
    run = Run(make_folder(config, {0: told(1, {"event": "end", "status": "failed", "reason": HOSTILE})}))
    page = run._repr_html_()
    assert "<img" not in page and "&lt;img" in page
    assert "\x1b" not in page + repr(run)
    assert run.run_id in repr(run) and "failed" in repr(run)


def test_logs(config: RunConfig, make_folder: Callable[..., Path]) -> None:
    run = Run(make_folder(config))
    assert run.logs() == run.logs(0) == ""
    for name in ("launcher", "rank-0", "rank-1"):
        (run.folder / "logs" / f"{name}.log").write_text(f"{name} begins\n" + "x" * 10**6 + f"\n\x1b[1m{name} ends")
    assert run.logs(1).endswith("\nrank-1 ends")  # without a terminal's colours
    assert len(run.logs(1)) <= MAX_LOG_BYTES
    whole = run.logs()
    assert len(whole.encode()) <= MAX_LOG_BYTES
    assert all(f"{name} ends" in whole for name in ("launcher", "rank-0", "rank-1"))
    for rank in (2, -1):
        with pytest.raises(LabError, match="ranks 0 to 1"):
            run.logs(rank)


def test_runs_of_one_folder_are_one(config: RunConfig, make_folder: Callable[..., Path]) -> None:
    folder = make_folder(config)
    assert len({Run(folder), Run(folder)}) == 1


def test_a_line_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    tail = EventTail(path)
    assert tail.read() == []
    with open(path, "a", encoding="utf-8") as file:
        file.write('{"event": "step", "step": 0}\nnonsense\n{"event": "st')
        file.flush()
        assert tail.read() == [{"event": "step", "step": 0}]
        assert tail.read() == []
        file.write('ep", "step": 1}\n')
        file.flush()
        assert tail.read() == [{"event": "step", "step": 1}]
        file.write('{"event": "step", "step": 2}\n')
        file.flush()
        assert tail.read() == [{"event": "step", "step": 2}]
        assert tail.read() == []


def test_progress_bar_tells_state_steps_loss_and_rate(
    config: RunConfig, make_folder: Callable[..., Path], told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    # The bar of a terminal: tqdm chooses once per process, and another test may have looked like a notebook.
    monkeypatch.setattr("tqdm.auto.tqdm", tqdm.std.tqdm)
    folder = make_folder(config, alive=True)
    bar = ProgressBar(folder, config, enabled=True)
    bar.update("queued")
    assert "starting 2 processes" in screen.getvalue()
    make_events = make_folder(config, {0: told(4)}) / "events" / "rank-0.jsonl"
    (folder / "events" / "rank-0.jsonl").write_bytes(make_events.read_bytes())
    bar.update("running")
    bar.close()
    last = screen.getvalue().rsplit("\r", 1)[-1]
    # 2 replicas × 16 samples in 0.1 s.
    assert "4/4" in last and "loss 1.6250" in last and "320 samples/s" in last


def test_progress_bar_is_not_wanted_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert (wanted(None), wanted(True), wanted(False)) == (False, True, False)
