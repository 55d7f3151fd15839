"""The ranks of a SLURM allocation: one per task of a step, which may span several machines.

Each task of the step is the rank that `idr_torch` says it is; whatever was started ends when the notebook's kernel
does, as soon as the ranks miss the controller's heartbeat.

`idr_torch.notebook` starts the same processes (ipcontroller here, `srun ipengine` there), and takes over the kernel's
signals and, by %autopx, every following cell; it waits for ever where srun fails. So only its ranks are taken from it.
A process that ended cannot be started anew inside a step: all ranks then begin again.
"""

from __future__ import annotations

import os
import queue
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.processes.status_board import StatusBoard
from dlojz.ranks import rank_setup
from dlojz.ranks.cluster import START_S, ControllerChannel, Event, last_report, not_started
from dlojz.ranks.rank_setup import RanksRefused, connection_file

_ANSWER_S = 60
_END_S = 10.0
# Times 0.75 s (the controller's heartbeat and what ipyparallel adds): how long ranks outlive the notebook.
_MISSED_HEARTBEATS = 40


def inside_allocation() -> bool:
    """Whether this is a SLURM allocation with several tasks, outside of any step that runs them already."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    inside = "SLURM_JOB_ID" in os.environ and tasks.isdecimal() and int(tasks) > 1
    return inside and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1 and shutil.which("srun") is not None


class SlurmCluster:
    """Ranks in this allocation."""

    replaces_single_ranks = False

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.folder = Path(tempfile.mkdtemp(prefix="dlojz-ranks-"))
        self._controller: subprocess.Popen[bytes] | None = None
        self._step: subprocess.Popen[bytes] | None = None
        self._line: ControllerChannel | None = None
        self._names: dict[int, str] = {}
        self._seats: list[dict[str, Any]] = []
        self._meetings = self._starts = 0
        self._board = ""

    def start(self, size: int, progress: Callable[[], None] = lambda: None) -> None:
        """Have fresh ranks, as many as the allocation has tasks.

        Raises:
            Refused: if another number is asked for.
            LabError: if they do not start.
        """
        tasks = int(os.environ["SLURM_NTASKS"])
        if size != tasks:
            raise RanksRefused(
                say(
                    en=f"this SLURM allocation has {tasks} tasks: write %%ranks {tasks}, or ask for {size} tasks.",
                    fr=f"cette allocation SLURM comporte {tasks} tâches : écrivez %%ranks {tasks}, ou demandez {size} "
                    "tâches.",
                )
            )
        self._end_step()
        if self._line is None:
            command = [sys.executable, "-P", "-m", "dlojz.ranks.rank_setup", str(self.folder), socket.gethostname()]
            self._controller = self._begin(command, {})
            files = [connection_file(self.folder, side) for side in ("client", "engine")]
            self._until(lambda: all(file.exists() and file.read_text().endswith("}") for file in files), progress)
            self._line = ControllerChannel(files[0], self.events)
            self._line.tell_of_losses()
        before = self._line.reachable().keys()
        # The step's tasks learn from their environment how to reach the controller: no file need be shared.
        how = {"IPP_CONNECTION_INFO": connection_file(self.folder, "engine").read_text()}
        options = ["--IPEngine.timeout=60", f"--IPEngine.max_heartbeat_misses={_MISSED_HEARTBEATS}", "--log-level=50"]
        # Overlapping: the notebook may itself be a step, and would keep its cores from another.
        self._step = self._begin(["srun", "--overlap", sys.executable, "-P", "-m", "ipyparallel.engine", *options], how)
        self._until(lambda: len(self._new(before)) == tasks, progress)
        self._find_seats(self._new(before))

    def names(self) -> dict[int, str]:
        """The process of each rank; if one has ended, all are started anew."""
        if self._line is None or not set(self._names.values()) <= self._line.reachable().keys():
            self.start(int(os.environ["SLURM_NTASKS"]))
        return dict(self._names)

    def ask(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Send a call to a process; its answer comes as an event with this ticket, or the event that it died."""
        if self._line is None:
            raise RuntimeError("the ranks have not been started")
        return self._line.ask(name, function, *arguments)

    def signal(self, rank: int, name: str, number: int) -> None:
        """Send a signal to a process, by way of ipyparallel's helper beside it."""
        target = self._line.reachable().get(name) if self._line else None
        if self._line is not None and target is not None:
            self._line.client.send_signal(number, targets=target, block=False)

    def meeting_point(self) -> tuple[str, str]:
        """A file and the guard's board, where all are on the notebook's machine; else the first rank's, unguarded."""
        self._meetings += 1
        if self._board:
            return f"file://{self.folder}/meeting-{self._meetings}", self._board
        port = self._question(self._names[0], rank_setup.free_port)
        return f"tcp://{self._seats[0]['master']}:{port}", ""

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's number among those of its machine, and how many these are, as idr_torch tells."""
        return self._seats[rank]["local_rank"], self._seats[rank]["local_size"]

    def stop(self) -> None:
        """End all ranks."""
        self._end_step()
        if self._line is not None:
            self._line.close()
            self._line = None
        if self._controller is not None:
            _end(self._controller)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _begin(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                env={**os.environ, "IPYTHONDIR": str(self.folder / "ipython"), **environment},
                start_new_session=True,  # an interrupt of the kernel is not for them
            )

    def _end_step(self) -> None:
        self._names = {}
        if self._step is not None:
            _end(self._step)  # srun passes it on to its tasks
            self._step = None

    def _new(self, before: object) -> dict[str, int]:
        known = self._line.reachable() if self._line else {}
        return {name: number for name, number in known.items() if name not in before}  # type: ignore[operator]

    def _find_seats(self, names: dict[str, int]) -> None:
        by_rank = {}
        for name in names:
            told = self._question(name, rank_setup.whereabouts)
            by_rank[told["rank"]] = (name, told)
        self._names = {rank: name for rank, (name, _) in by_rank.items()}
        self._seats = [by_rank[rank][1] for rank in sorted(by_rank)]
        self._starts += 1
        self._board = ""
        if all(each["host"] == socket.gethostname() for each in self._seats):
            self._board = str(self.folder / f"board-{self._starts}")
            StatusBoard.create(Path(self._board), len(self._seats))

    def _question(self, name: str, function: Callable[..., Any]) -> Any:
        if self._line is None:
            raise RuntimeError("the ranks have not been started")
        try:
            return self._line.client[self._line.reachable()[name]].apply_async(function).get(_ANSWER_S)
        except Exception as error:
            raise LabError(not_started(f"{type(error).__name__}: {error}")) from None

    def _until(self, true: Callable[[], bool], progress: Callable[[], None]) -> None:
        deadline_s = time.monotonic() + START_S
        while not true():
            progress()
            ended = [process for process in (self._controller, self._step) if process and process.poll() is not None]
            if ended or time.monotonic() > deadline_s:
                raise LabError(not_started(last_report(self.folder / "log")))
            time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
