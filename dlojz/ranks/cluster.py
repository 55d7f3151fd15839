"""Cluster of live ranks: the channel from the notebook's kernel to them, and the supervisor that forks them.

A rank is one process with a unique name. When it ends, an event reports it to whoever waits for its answer, who never
gets the answer of the process that takes its place.

`RankSupervisor` is the parent of the ranks of this machine: it replaces those that end, and when the kernel ends, by
SIGKILL too, it ends all that was started for it or by its cells. It imports torch once, before any thread exists, so
that a rank is a fork: a fraction of a second, with the libraries' memory shared.

Run as `python -m dlojz.ranks.cluster FOLDER KERNEL_PID`; it reads and writes JSON lines. From the kernel: `{"do":
"start", "size": 4, "number": 1}`, `{"do": "signal", "rank": 2, "name": "rank-2-7", "signal": 2}`; the end of the input
means stop. To the kernel: `ready`, `cleared` (number), `born` (rank, name, pid), `died` (rank, name, code), `failed`
(why).

Ranks of a SLURM allocation (`SlurmCluster`) are one per task of a step, which may span several machines; each is the
rank that `idr_torch` says it is. When the notebook's kernel ends, they miss the controller's heartbeat and end too. A
process that ended cannot be replaced inside a step: all ranks then start anew. `idr_torch.notebook` starts the same
processes (ipcontroller here, `srun ipengine` there), but takes over the kernel's signals and, by %autopx, every
following cell, and waits for ever where srun fails: only its ranks are used here.
"""

from __future__ import annotations

import json
import os
import queue
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from dlojz.base.errors import LabError
from dlojz.base.language import say
from dlojz.base.machine import PARENT_VARIABLE, adopt_orphans, cores_available, die_with_parent
from dlojz.processes.forks import fork
from dlojz.processes.status_board import StatusBoard
from dlojz.ranks import rank_setup
from dlojz.ranks.rank_setup import RanksRefused, be_a_rank, connection_file, preload
from dlojz.running.folder import last_line, read_tail
from dlojz.running.supervisor import kill_descendants, prepare

START_S = 120.0
_ASK_ANEW_S = 10.0
_CLOSE_S = 5.0
_LOST = "EngineError"  # ipyparallel's, for a call whose process has ended


class Event(NamedTuple):
    """Answer or end of a rank, or an interrupt.

    Args:
        kind: `answer`, `died`, `failed` (no rank can be reached any more) or `interrupt` (the student's).
        ticket: of the call that is answered.
        name: of the process that died.
        value: the answer, the exit code (negative: signal; None: unknown) of what died, or why all failed.
    """

    kind: str
    ticket: int = 0
    name: str = ""
    value: Any = None


class ControllerChannel:
    """Connection to ipyparallel's controller.

    Args:
        file: connection file that the controller has written.
    """

    def __init__(self, file: Path, events: queue.SimpleQueue[Event]) -> None:
        self._file, self._events, self._tickets = file, events, 0
        self._calls: dict[str, Any] = {}  # the last to each process
        self._losses = False
        self.client = self._connected()

    def _connected(self) -> Any:
        from ipyparallel import Client  # half a second, while the supervisor imports torch

        client = Client(str(self._file), timeout=START_S)
        client._registration_callbacks.append(self._changed)
        self._connected_s = time.monotonic()
        return client

    def _changed(self, change: dict[str, Any]) -> None:
        if self._losses and change["event"] == "unregister":
            self._events.put(Event("died", name=change["uuid"]))

    def report_losses(self) -> None:
        """Report from now on each process that the controller has lost as an event."""
        self._losses = True

    def reachable(self) -> dict[str, int]:
        """Return the processes that the controller has announced, with its own numbers for them."""
        return {name: number for number, name in dict(self.client._engines).items()}

    def wait_for(self, names: Set[str]) -> bool:
        """Return whether these are reachable; reconnect now and then, since an announcement may be missed."""
        if names <= self.reachable().keys():
            return True
        if time.monotonic() - self._connected_s > _ASK_ANEW_S:
            # Connected before the former one is closed: `self.client` is open at every moment.
            previous_client, self.client = self.client, self._connected()
            _close(previous_client)
        return False

    def ask(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
        """Send a call to a process; return the ticket that its answer, as an event, will have."""
        self._tickets += 1
        # Else `published` would give the former call's output for that of this call.
        self._calls.pop(name, None)
        ticket, number = self._tickets, self.reachable().get(name)
        if number is None:
            return ticket  # it has died: another event reports that

        # Runs in a thread of the client: it only puts an event, which whoever waits takes from the queue.
        def arrived(answer: Any) -> None:
            try:
                event = Event("answer", ticket, name, answer.result())
            except BaseException as error:
                kind = getattr(error, "ename", type(error).__name__)
                failure = {"failure": f"{kind}: {getattr(error, 'evalue', error)}"}
                event = Event("died", name=name) if kind == _LOST else Event("answer", ticket, name, failure)
            self._events.put(event)

        self._calls[name] = self.client[number].apply_async(function, *arguments, **options)
        self._calls[name].add_done_callback(arrived)
        return ticket

    def published(self, name: str) -> dict[str, Any]:
        """Return what a process has published since the last call to it began, answered or not."""
        call = self._calls.get(name)
        return {} if call is None else dict(call.metadata["data"])

    def close(self) -> None:
        """Close all sockets."""
        _close(self.client).join(_CLOSE_S)


def _close(client: Any) -> threading.Thread:
    """Close a client's sockets, in a thread: it waits for the client's own, which may be deaf."""

    def close() -> None:
        with suppress(Exception):
            client.close(linger=0)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    return thread


def not_started(reason: str) -> str:
    """Return the message for ranks that did not start."""
    cause = f" ({reason})" if reason else ""
    return say(
        en=f"the ranks did not start{cause}. Run the cell again; if that does not help, restart the kernel.",
        fr=f"les rangs n’ont pas démarré{cause}. Relancez la cellule ; si cela ne suffit pas, redémarrez le noyau.",
    )


def controller_is_ready(folder: Path) -> bool:
    """Return whether the controller has written both connection files."""
    try:
        for side in ("client", "engine"):
            json.loads(connection_file(folder, side).read_text())
    except (OSError, ValueError):
        return False
    return True


_CLUSTER_END_S = 15.0
_MARK = "DLOJZ_RANKS_FOLDER"
_NOTHING: Callable[[], None] = lambda: None  # noqa: E731


class RankCluster(ABC):
    """Base of the places of ranks: this machine (`LocalCluster`) or a SLURM allocation (`SlurmCluster`)."""

    replaces_single_ranks: bool
    """Whether a rank that ended is started anew alone; else all are."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.folder = Path(tempfile.mkdtemp(prefix="dlojz-ranks-"))
        self._names: dict[int, str] = {}
        self._starts = self._meetings = 0
        self._channel: ControllerChannel | None = None

    @abstractmethod
    def start(self, size: int, progress: Callable[[], None] = _NOTHING) -> None:
        """Start `size` fresh ranks, in place of those there are.

        Raises:
            LabError: if they do not start.
        """

    @abstractmethod
    def names(self) -> dict[int, str]:
        """Return the process of each rank, once those that died have been replaced.

        Raises:
            LabError: if they cannot be.
        """

    @abstractmethod
    def signal(self, rank: int, name: str, number: int) -> None:
        """Send a signal to a process; SIGKILL also ends what the process has started."""

    @abstractmethod
    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's number among those of its machine, and how many these are."""

    @abstractmethod
    def stop(self) -> None:
        """End all ranks and what they have started."""

    def ask(self, name: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> int:
        """Send a call to a process; return the ticket of the event that answers it, unless the process dies."""
        return self._connected().ask(name, function, *arguments, **options)

    def published(self, name: str) -> dict[str, Any]:
        """Return what a process has published since the last call to it began, answered or not."""
        return self._connected().published(name)

    def meeting_point(self) -> tuple[str, str]:
        """Return where the ranks meet: a fresh rendezvous of torch, and the guard's board (empty: none)."""
        self._meetings += 1
        return f"file://{self.folder}/meeting-{self._meetings}", str(self._board)

    @property
    def _board(self) -> Path:
        """The board of the present ranks: those before may still have theirs open."""
        return self.folder / f"board-{self._starts}"

    def _problem(self) -> str | None:
        """Return why the ranks cannot start any more; None as long as they may."""
        raise NotImplementedError

    def _until(self, true: Callable[[], bool], progress: Callable[[], None] = _NOTHING) -> None:
        """Wait until something is true."""
        deadline_s = time.monotonic() + START_S
        while not true():
            progress()
            problem = self._problem()
            if problem is not None or time.monotonic() > deadline_s:
                raise LabError(not_started(problem or last_line(read_tail(self.folder / "log"))))
            time.sleep(0.01)

    def _connected(self) -> ControllerChannel:
        if self._channel is None:
            raise RuntimeError("the ranks have not been started")
        return self._channel


class LocalCluster(RankCluster):
    """Ranks of this machine, below a `RankSupervisor`."""

    replaces_single_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._size = self._started = 0
        self._ready = False
        self._failure: str | None = None
        with (self.folder / "log").open("ab") as log:
            self._supervisor = subprocess.Popen(
                [sys.executable, "-P", "-m", "dlojz.ranks.cluster", str(self.folder), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self.folder),
                # An interrupt of the kernel reaches its whole process group; a rank gets its own from `signal`.
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True, name="supervisor").start()

    def start(self, size: int, progress: Callable[[], None] = _NOTHING) -> None:
        """Start `size` fresh ranks; see `RankCluster`."""
        import ipyparallel  # noqa: F401 - half a second, while the supervisor imports torch

        self._until(lambda: self._ready, progress)
        if self._channel is None:
            self._channel = ControllerChannel(connection_file(self.folder, "client"), self.events)
        with self._lock:
            self._size = size
            self._starts += 1
        StatusBoard.create(self._board, size)
        self._send(do="start", size=size, number=self._starts)
        self._until(self._complete, progress)

    def names(self) -> dict[int, str]:
        """Return the process of each rank; see `RankCluster`."""
        self._until(self._complete)
        with self._lock:
            return dict(self._names)

    def signal(self, rank: int, name: str, number: int) -> None:
        """Send a signal to a process; see `RankCluster`."""
        self._send(do="signal", rank=rank, name=name, signal=number)

    def place(self, rank: int) -> tuple[int, int]:
        """Return a rank's number among those of this machine, and how many these are: all."""
        return rank, self._size

    def stop(self) -> None:
        """End all ranks, what they have started, and the supervisor."""
        killed = self._supervisor.poll() is not None
        if self._channel is not None:
            self._channel.close()
        # The end of its input tells the supervisor to stop.
        with suppress(OSError):
            self._supervisor.stdin.close()  # type: ignore[union-attr]
        try:
            self._supervisor.wait(_CLUSTER_END_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()
            killed = True
        if killed:
            _end_strays(self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _complete(self) -> bool:
        names = set(self._names.values())
        # Names of an earlier `start` do not count: "cleared" has brought the number of the latest.
        complete = self._started == self._starts and len(names) == self._size
        return complete and self._connected().wait_for(names)

    def _send(self, **request: Any) -> None:
        try:
            self._supervisor.stdin.write((json.dumps(request) + "\n").encode())  # type: ignore[union-attr]
            self._supervisor.stdin.flush()  # type: ignore[union-attr]
        except (OSError, ValueError):
            self._fail("")

    def _listen(self) -> None:
        """Read the supervisor's reports, in a thread."""
        for line in self._supervisor.stdout or ():
            report = json.loads(line)
            with self._lock:
                if report["event"] == "ready":
                    self._ready = True
                elif report["event"] == "cleared":
                    self._names, self._started = {}, report["number"]
                elif report["event"] == "born":
                    self._names[report["rank"]] = report["name"]
                # Of a rank that was replaced meanwhile, the entry has another name by now.
                elif report["event"] == "died" and self._names.get(report["rank"]) == report["name"]:
                    del self._names[report["rank"]]
                    self.events.put(Event("died", name=report["name"], value=report["code"]))
                elif report["event"] == "failed":
                    self._failure = report["why"]
        self._fail("")

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._failure = self._failure or reason
        self.events.put(Event("failed", value=self._failure))

    def _problem(self) -> str | None:
        return self._failure


def _end_strays(folder: Path) -> None:
    """End what a killed supervisor has left: the system ends its children, but not what these have started."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MARK) == str(folder):
                process.kill()


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment of the supervisor and the ranks."""
    environment = dict(os.environ)
    prepare(environment, 1, "auto", cores_available())
    # The supervisor watches the kernel itself; it is the ranks' parent.
    del environment[PARENT_VARIABLE]
    environment[_MARK] = str(folder)
    environment["IPYTHONDIR"] = str(folder / "ipython")
    # Counting GPUs otherwise starts CUDA, after which a process cannot be forked.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    environment["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    environment.pop("JPY_PARENT_PID", None)
    return environment


_ANSWER_S = 60
_STEP_END_S = 10.0
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
            _terminate(self._controller)
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
            _terminate(self._step)  # srun passes it on to its tasks
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


def _terminate(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        process.terminate()
    try:
        process.wait(_STEP_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_LOOK_EVERY_S = 0.25
_CONTROLLER_S = 60.0
_SUPERVISOR_END_S = 10.0
# A rank that has ended so often soon after its start is not started again.
_SHORT_LIFE_S = 3.0
_SHORT_LIVES = 10


@dataclass
class Child:
    """Process of a rank.

    Args:
        name: by which the kernel addresses it; used once.
        pid: not reused before it is reaped.
        born_s: on the monotonic clock.
    """

    name: str
    pid: int
    born_s: float


class RankSupervisor:
    """Supervisor of the ranks of one notebook.

    Args:
        folder: of connection files and meeting points; removed at the end.
        kernel: process id of the notebook's kernel.
    """

    def __init__(self, folder: Path, kernel: int) -> None:
        self.folder, self._kernel = folder, kernel
        self._children: dict[int, Child] = {}
        self._short_lives: dict[int, int] = {}
        self._names = 0
        self._controller: subprocess.Popen[bytes] | None = None
        self._text = b""

    def run(self) -> None:
        """Serve the kernel until it ends or closes the input."""
        adopt_orphans()
        # Each signal writes a byte into this pipe, which wakes the select below.
        waker, wakened = os.pipe()
        for descriptor in (waker, wakened):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        # set_wakeup_fd writes only for signals with a Python handler, be it an empty one.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            self._open()
            with selectors.DefaultSelector() as selector:
                selector.register(0, selectors.EVENT_READ)
                selector.register(waker, selectors.EVENT_READ)
                # Another parent: the kernel is gone.
                while os.getppid() == self._kernel:
                    ready = {key.fd for key, _ in selector.select(_LOOK_EVERY_S)}
                    if waker in ready:
                        os.read(waker, 4096)
                    self._reap()
                    if 0 in ready and not self._obey():
                        return
        except BrokenPipeError:
            return
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            kill_descendants()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> None:
        command = [sys.executable, "-P", "-m", "dlojz.ranks.rank_setup", str(self.folder)]
        self._controller = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread exists here, and none may
        )
        preload()  # torch and all else: seconds, while the controller starts
        deadline_s = time.monotonic() + _CONTROLLER_S
        while not controller_is_ready(self.folder):
            if self._controller.poll() is not None or time.monotonic() > deadline_s:
                self._report(event="failed", why="the controller did not start")
                sys.exit(1)
            if os.getppid() != self._kernel:
                sys.exit(1)
            time.sleep(0.02)
        self._report(event="ready")

    def _report(self, **event: Any) -> None:
        text = (json.dumps(event) + "\n").encode()
        while text:
            text = text[os.write(1, text) :]

    def _obey(self) -> bool:
        """Do what the kernel requests; return False at the end of the input."""
        text = os.read(0, 2**16)
        if not text:
            return False
        # What stands behind the last line end is the beginning of a message still under way.
        *lines, self._text = (self._text + text).split(b"\n")
        for line in lines:
            request = json.loads(line)
            if request["do"] == "start":
                self._start(request["size"], request["number"])
            elif request["do"] == "signal":
                self._signal(request["rank"], request["name"], request["signal"])
        return True

    def _start(self, size: int, number: int) -> None:
        """End the ranks there are, and start others."""
        previous_children, self._children = self._children, {}
        self._short_lives = {}
        for child in previous_children.values():
            _end(child.pid)
        for child in previous_children.values():
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        self._end_orphans()
        self._report(event="cleared", number=number)
        for rank in range(size):
            self._fork(rank)

    def _fork(self, rank: int) -> None:
        self._names += 1
        name = f"rank-{rank}-{self._names}"

        def child() -> None:
            signal.set_wakeup_fd(-1)
            be_a_rank(self.folder, name)

        pid = fork(child, reset=(signal.SIGCHLD, signal.SIGTERM))
        self._children[rank] = Child(name, pid, time.monotonic())
        self._report(event="born", rank=rank, name=name, pid=pid)

    def _signal(self, rank: int, name: str, number: int) -> None:
        child = self._children.get(rank)
        if child is None or child.name != name:
            return  # it has been replaced in the meantime
        if number == signal.SIGKILL:
            _end(child.pid)
        else:
            with suppress(ProcessLookupError):
                os.kill(child.pid, number)

    def _reap(self) -> None:
        """Collect processes that have ended; start a rank that has ended anew."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._controller and pid == self._controller.pid:
                self._report(event="failed", why="the controller has ended")
                sys.exit(1)
            rank = next((rank for rank, child in self._children.items() if child.pid == pid), None)
            if rank is None:
                continue  # an orphan
            child = self._children.pop(rank)
            self._end_orphans()
            # Told once nothing that the rank had started lives any more.
            self._report(event="died", rank=rank, name=child.name, code=os.waitstatus_to_exitcode(status))
            short = time.monotonic() - child.born_s < _SHORT_LIFE_S
            self._short_lives[rank] = self._short_lives.get(rank, 0) + 1 if short else 0
            if self._short_lives[rank] < _SHORT_LIVES:
                self._fork(rank)
            else:
                self._report(event="failed", why=last_line(read_tail(self.folder / "log")))

    def _end_orphans(self) -> None:
        """End what a rank that is gone has left behind: whatever is a child of the supervisor and no rank."""
        expected_pids = {child.pid for child in self._children.values()}
        if self._controller:
            expected_pids.add(self._controller.pid)
        deadline_s = time.monotonic() + _SUPERVISOR_END_S
        while time.monotonic() < deadline_s:
            orphans = [process for process in psutil.Process().children() if process.pid not in expected_pids]
            alive = [process for process in orphans if process.status() != psutil.STATUS_ZOMBIE]
            if not alive:
                return
            for process in alive:
                _end(process.pid)
            time.sleep(0.01)


def _end(pid: int) -> None:
    """Kill a process and its descendants; it is stopped first so that it starts no more."""
    with suppress(psutil.Error):
        process = psutil.Process(pid)
        process.suspend()
        for descendant in process.children(recursive=True):
            with suppress(psutil.Error):
                descendant.kill()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    RankSupervisor(Path(sys.argv[1]), int(sys.argv[2])).run()
