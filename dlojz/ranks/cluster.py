"""The ranks of this machine, as the notebook's kernel starts, interrupts and ends them.

Layer 5. Invariant: a rank is one process with a name of its own; when it ends, whoever waits for its answer is told at
once, and never gets the answer of the process that takes its place.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from dlojz.launch.workers import cores_available, prepare
from dlojz.ranks.board import Board
from dlojz.ranks.controller import connection_file
from dlojz.ranks.line import START_S, Event, Line, not_started
from dlojz.schema import LabError
from dlojz.train.lifeline import PARENT_VARIABLE

_END_S = 15.0
_MARK = "DLOJZ_RANKS_FOLDER"
_NOTHING: Callable[[], None] = lambda: None  # noqa: E731


class LocalCluster:
    """Ranks on this machine, below a keeper (see `keeper`)."""

    replaces_single_ranks = True

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.folder = Path(tempfile.mkdtemp(prefix="dlojz-ranks-"))
        self._changed = threading.Condition()
        self._names: dict[int, str] = {}
        self._size = self._meetings = self._starts = self._started = 0
        self._ready = False
        self._failure: str | None = None
        self._line: Line | None = None
        with (self.folder / "log").open("ab") as log:
            self._keeper = subprocess.Popen(
                [sys.executable, "-P", "-m", "dlojz.ranks.keeper", str(self.folder), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self.folder),
                # An interrupt of the kernel reaches its whole process group; a rank gets its own from `signal`.
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True, name="keeper").start()

    def start(self, size: int, progress: Callable[[], None] = _NOTHING) -> None:
        """Have `size` fresh ranks, in place of those there are.

        Raises:
            LabError: if they do not start.
        """
        import ipyparallel  # noqa: F401 - half a second, while the keeper imports torch

        self._until(lambda: self._ready, progress)
        if self._line is None:
            self._line = Line(connection_file(self.folder, "client"), self.events)
        with self._changed:
            self._size = size
            self._starts += 1
        # A board of their own: those before may still have theirs open.
        Board.create(self._board, size)
        self._tell(do="start", size=size, number=self._starts)
        self._until(self._whole, progress)

    def names(self) -> dict[int, str]:
        """The process of each rank, once those that died have been replaced.

        Raises:
            LabError: if they cannot be.
        """
        self._until(self._whole)
        with self._changed:
            return dict(self._names)

    def ask(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Send a call to a process; its answer comes as an event with this ticket, or the event that it died."""
        if self._line is None:
            raise RuntimeError("the ranks have not been started")
        return self._line.ask(name, function, *arguments)

    def signal(self, rank: int, name: str, number: int) -> None:
        """Send a signal to a process; SIGKILL takes with it what the process has started."""
        self._tell(do="signal", rank=rank, name=name, signal=number)

    def meeting_point(self) -> tuple[str, str]:
        """A file in the folder, never used before, and the board."""
        self._meetings += 1
        return f"file://{self.folder}/meeting-{self._meetings}", str(self._board)

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's number among those of this machine, and how many these are: all."""
        return rank, self._size

    def stop(self) -> None:
        """End all ranks, what they have started, and the keeper."""
        ended_before_its_time = self._keeper.poll() is not None
        if self._line is not None:
            self._line.close()
        with suppress(OSError):
            self._keeper.stdin.close()  # type: ignore[union-attr]
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
            ended_before_its_time = True
        if ended_before_its_time:
            _end_strays(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _board(self) -> Path:
        return self.folder / f"board-{self._starts}"

    def _whole(self) -> bool:
        names = set(self._names.values())
        complete = self._started == self._starts and len(names) == self._size
        return complete and self._line is not None and self._line.wait_for(names)

    def _tell(self, **wish: Any) -> None:
        try:
            self._keeper.stdin.write((json.dumps(wish) + "\n").encode())  # type: ignore[union-attr]
            self._keeper.stdin.flush()  # type: ignore[union-attr]
        except (OSError, ValueError):
            self._fail("")

    def _listen(self) -> None:
        """In a thread: take note of what the keeper tells."""
        for line in self._keeper.stdout or ():
            told = json.loads(line)
            with self._changed:
                if told["event"] == "ready":
                    self._ready = True
                elif told["event"] == "cleared":
                    self._names, self._started = {}, told["number"]
                elif told["event"] == "born":
                    self._names[told["rank"]] = told["name"]
                elif told["event"] == "died" and self._names.get(told["rank"]) == told["name"]:
                    del self._names[told["rank"]]
                    self.events.put(Event("died", name=told["name"], value=told["code"]))
                elif told["event"] == "failed":
                    self._failure = told["why"]
                self._changed.notify_all()
        self._fail("")

    def _fail(self, why: str) -> None:
        with self._changed:
            self._failure = self._failure or why
            self.events.put(Event("failed", value=self._failure))
            self._changed.notify_all()

    def _until(self, true: Callable[[], bool], progress: Callable[[], None] = _NOTHING) -> None:
        deadline_s = time.monotonic() + START_S
        while not true():
            progress()
            if self._failure is not None or time.monotonic() > deadline_s:
                raise LabError(not_started(self._failure or ""))
            with self._changed:
                self._changed.wait(0.02)


def _end_strays(folder: Path) -> None:
    """End what a keeper that was killed has left: the system ends its children, but not what these have started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == str(folder):
                process.kill()


def _environment(folder: Path) -> dict[str, str]:
    """What the keeper and the ranks inherit."""
    environment = dict(os.environ)
    prepare(environment, 1, "auto", cores_available())
    # The keeper watches over the kernel itself; the ranks' parent is the keeper.
    del environment[PARENT_VARIABLE]
    environment[_MARK] = str(folder)
    environment["IPYTHONDIR"] = str(folder / "ipython")
    # Counting GPUs otherwise starts CUDA, after which a process cannot be forked.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    environment.pop("JPY_PARENT_PID", None)
    return environment
