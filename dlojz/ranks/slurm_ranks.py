"""Ranks of a SLURM allocation: one per task of a step, which may span several machines.

Each task of the step is the rank that `idr_torch` says it is. When the notebook's kernel ends, the ranks miss the
controller's heartbeat and end too. A process that ended cannot be replaced inside a step: all ranks then start anew.

`idr_torch.notebook` starts the same processes (ipcontroller here, `srun ipengine` there), but takes over the kernel's
signals and, by %autopx, every following cell, and waits for ever where srun fails: only its ranks are used here.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dlojz.base.errors import LabError
from dlojz.processes.status_board import StatusBoard
from dlojz.ranks import rank_setup
from dlojz.ranks.cluster import ControllerChannel, RankCluster, controller_is_ready, not_started
from dlojz.ranks.rank_setup import RanksRefused, connection_file
from dlojz.running.folder import last_line, read_tail

_ANSWER_S = 60
_END_S = 10.0
# Times 0.75 s (the controller's heartbeat and what ipyparallel adds): how long ranks outlive the notebook.
_MISSED_HEARTBEATS = 40


def inside_allocation() -> bool:
    """Return whether this is a SLURM allocation with several tasks, outside of any step that runs them already."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    inside = "SLURM_JOB_ID" in os.environ and tasks.isdecimal() and int(tasks) > 1
    # A step of one task, such as the shell of salloc or a notebook under srun, may start ranks beside itself.
    return inside and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) == 1 and shutil.which("srun") is not None


class SlurmCluster(RankCluster):
    """Ranks in this allocation."""

    replaces_single_ranks = False

    def __init__(self) -> None:
        super().__init__()
        self._controller: subprocess.Popen[bytes] | None = None
        self._step: subprocess.Popen[bytes] | None = None
        self._places: list[dict[str, Any]] = []
        self._one_machine = False

    def start(self, size: int, progress: Callable[[], None] = lambda: None) -> None:
        """Start fresh ranks, as many as the allocation has tasks.

        Raises:
            RanksRefused: if another number is asked for.
            LabError: if they do not start.
        """
        tasks = int(os.environ["SLURM_NTASKS"])
        if size != tasks:
            raise RanksRefused(
                en=f"this SLURM allocation has {tasks} tasks: write %%ranks {tasks}, or ask for {size} tasks.",
                fr=f"cette allocation SLURM comporte {tasks} tâches : écrivez %%ranks {tasks}, ou demandez {size} "
                "tâches.",
            )
        self._end_step()
        if self._channel is None:
            command = [sys.executable, "-P", "-m", "dlojz.ranks.rank_setup", str(self.folder), socket.gethostname()]
            self._controller = self._begin(command, {})
            self._until(lambda: controller_is_ready(self.folder), progress)
            self._channel = ControllerChannel(connection_file(self.folder, "client"), self.events)
            self._channel.report_losses()
        # The ranks of this step are the processes that were not reachable before it.
        before = self._channel.reachable().keys()
        # The step's tasks learn from their environment how to reach the controller: no file need be shared.
        how = {"IPP_CONNECTION_INFO": connection_file(self.folder, "engine").read_text()}
        options = ["--IPEngine.timeout=60", f"--IPEngine.max_heartbeat_misses={_MISSED_HEARTBEATS}", "--log-level=50"]
        # Overlapping: the notebook may itself be a step, and would keep its cores from another.
        self._step = self._begin(["srun", "--overlap", sys.executable, "-P", "-m", "ipyparallel.engine", *options], how)
        self._until(lambda: len(self._connected().reachable().keys() - before) == tasks, progress)
        self._find_places(self._channel.reachable().keys() - before)

    def names(self) -> dict[int, str]:
        """Return the process of each rank; if one has ended, all are started anew."""
        if self._channel is None or not set(self._names.values()) <= self._channel.reachable().keys():
            self.start(int(os.environ["SLURM_NTASKS"]))
        return dict(self._names)

    def signal(self, rank: int, name: str, number: int) -> None:
        """Send a signal to a process, by way of ipyparallel's helper beside it."""
        channel = self._connected()
        target = channel.reachable().get(name)
        if target is not None:
            channel.client.send_signal(number, targets=target, block=False)

    def meeting_point(self) -> tuple[str, str]:
        """Return a file and the guard's board, if all ranks are on this machine; else a port of rank 0, unguarded."""
        if self._one_machine:
            return super().meeting_point()
        port = self._question(self._names[0], rank_setup.free_port)
        return f"tcp://{self._places[0]['master']}:{port}", ""

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's number among those of its machine, and how many these are, by idr_torch."""
        return self._places[rank]["local_rank"], self._places[rank]["local_size"]

    def stop(self) -> None:
        """End all ranks."""
        self._end_step()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
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

    def _find_places(self, names: set[str]) -> None:
        whereabouts_by_name = {name: self._question(name, rank_setup.whereabouts) for name in names}
        self._names = {whereabouts["rank"]: name for name, whereabouts in whereabouts_by_name.items()}
        self._places = sorted(whereabouts_by_name.values(), key=lambda whereabouts: int(whereabouts["rank"]))
        self._starts += 1
        self._one_machine = all(whereabouts["host"] == socket.gethostname() for whereabouts in self._places)
        if self._one_machine:
            StatusBoard.create(self._board, len(self._places))

    def _question(self, name: str, function: Callable[..., Any]) -> Any:
        channel = self._connected()
        try:
            return channel.client[channel.reachable()[name]].apply_async(function).get(_ANSWER_S)
        except Exception as error:
            raise LabError(not_started(f"{type(error).__name__}: {error}")) from None

    def _problem(self) -> str | None:
        ended = [process for process in (self._controller, self._step) if process and process.poll() is not None]
        return last_line(read_tail(self.folder / "log")) if ended else None


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
