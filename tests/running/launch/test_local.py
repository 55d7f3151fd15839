"""The local launcher: what happens where it cannot be started."""

import errno
import io
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.running import launch
from dlojz.running.launch import run
from dlojz.running.run import runs


@pytest.fixture(autouse=True)
def nobody_stands_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_standby", None)


def test_the_launcher_has_a_session_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the terminal that asked for the run does not reach it."""
    started: list[dict[str, Any]] = []

    class Launcher:
        pid, returncode, stdin = os.getpid(), None, io.BytesIO()

        def __init__(self, command: list[str], **more: Any) -> None:
            started.append(more)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(subprocess, "Popen", Launcher)
    run(model="coatnet_tiny", root=tmp_path, wait=False)
    assert [one["start_new_session"] for one in started] == [True]


@pytest.mark.parametrize(("language", "words"), [("en", "cannot be started"), ("fr", "ne peut pas être démarré")])
def test_runs_has_none_that_seems_to_wait_where_the_launcher_cannot_be_started(
    language: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process left for this user: the run would stay queued for as long as the notebook that asked for it lives."""

    def none_left(*given: object, **more: object) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    use_language(language)
    monkeypatch.setattr(subprocess, "Popen", none_left)
    with pytest.raises(LabError, match=f"{words} ?: Resource temporarily unavailable"):
        run(model="coatnet_tiny", root=tmp_path, wait=False)
    [one] = runs(tmp_path)
    assert one.record is not None
    assert one.record.status == "failed" and words in one.record.reason
