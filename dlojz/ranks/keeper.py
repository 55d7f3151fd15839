"""The parent of the ranks: starts them, starts anew those that end, and sees to it that none outlives the notebook.

Layer 5. Invariant: when the notebook's kernel ends, by SIGKILL too, nothing that was started for it or by its cells is
left after a moment. While the keeper lives every orphan becomes its child; if it is killed itself, its children are.

torch is imported here, once, before any thread exists: a rank is then a fork, which takes a fraction of a second and
shares the libraries' memory. Run as `python -m dlojz.ranks.keeper FOLDER KERNEL_PID`; it speaks JSON lines.

From the kernel: `{"do": "start", "size": 4, "number": 1}`, `{"do": "signal", "rank": 2, "name": "rank-2-7", "signal":
2}`; the end of the input means stop. To the kernel: `ready`, `cleared` (number), `born` (rank, name, pid), `died`
(rank, name, code), `failed` (why).
"""

from __future__ import annotations

import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlojz.ranks.controller import connection_file
from dlojz.ranks.line import last_report
from dlojz.train.lifeline import adopt_orphans, die_with_parent

_LOOK_EVERY_S = 0.25
_CONTROLLER_S = 60.0
_END_S = 10.0
# A rank that ends again and again as soon as it starts will not get better by being started again.
_SHORT_LIFE_S = 3.0
_SHORT_LIVES = 10


@dataclass
class Child:
    """A process that is a rank.

    Args:
        name: by which the kernel addresses it; used once.
        pid: of the process, which is not reused before it is reaped.
        born_s: on the monotonic clock.
    """

    name: str
    pid: int
    born_s: float


class Keeper:
    """The ranks of one notebook.

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
        """Serve the kernel until it ends or wants no more."""
        adopt_orphans()
        waker, wakened = os.pipe()
        for descriptor in (waker, wakened):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wakened, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            self._open()
            with selectors.DefaultSelector() as selector:
                selector.register(0, selectors.EVENT_READ)
                selector.register(waker, selectors.EVENT_READ)
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
            end_all_descendants()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open(self) -> None:
        command = [sys.executable, "-P", "-m", "dlojz.ranks.controller", str(self.folder)]
        self._controller = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - no thread exists here, and none may
        )
        from dlojz.ranks import engine  # torch and all else: seconds, while the controller starts

        self._engine = engine
        deadline_s = time.monotonic() + _CONTROLLER_S
        while not self._reachable():
            if self._controller.poll() is not None or time.monotonic() > deadline_s:
                self._tell(event="failed", why="the controller did not start")
                sys.exit(1)
            if os.getppid() != self._kernel:
                sys.exit(1)
            time.sleep(0.02)
        self._tell(event="ready")

    def _reachable(self) -> bool:
        """Whether both connection files are there, whole."""
        try:
            for side in ("client", "engine"):
                json.loads(connection_file(self.folder, side).read_text())
        except (OSError, ValueError):
            return False
        return True

    def _tell(self, **event: Any) -> None:
        text = (json.dumps(event) + "\n").encode()
        while text:
            text = text[os.write(1, text) :]

    def _obey(self) -> bool:
        """Do what the kernel wants; False where it wants no more."""
        text = os.read(0, 2**16)
        if not text:
            return False
        *lines, self._text = (self._text + text).split(b"\n")
        for line in lines:
            wish = json.loads(line)
            if wish["do"] == "start":
                self._start(wish["size"], wish["number"])
            elif wish["do"] == "signal":
                self._signal(wish["rank"], wish["name"], wish["signal"])
        return True

    def _start(self, size: int, number: int) -> None:
        """End the ranks there are, and start others."""
        former, self._children = self._children, {}
        self._short_lives = {}
        for child in former.values():
            _end(child.pid)
        for child in former.values():
            with suppress(ChildProcessError):
                os.waitpid(child.pid, 0)
        self._end_orphans()
        self._tell(event="cleared", number=number)
        for rank in range(size):
            self._fork(rank)

    def _fork(self, rank: int) -> None:
        self._names += 1
        name = f"rank-{rank}-{self._names}"
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            self._engine.be_a_rank(self.folder, name)
        self._children[rank] = Child(name, pid, time.monotonic())
        self._tell(event="born", rank=rank, name=name, pid=pid)

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
        """Take note of what has ended; a rank that has ended is started anew."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._controller and pid == self._controller.pid:
                self._tell(event="failed", why="the controller has ended")
                sys.exit(1)
            rank = next((rank for rank, child in self._children.items() if child.pid == pid), None)
            if rank is None:
                continue  # an orphan
            child = self._children.pop(rank)
            self._end_orphans()
            self._tell(event="died", rank=rank, name=child.name, code=os.waitstatus_to_exitcode(status))
            short = time.monotonic() - child.born_s < _SHORT_LIFE_S
            self._short_lives[rank] = self._short_lives.get(rank, 0) + 1 if short else 0
            if self._short_lives[rank] < _SHORT_LIVES:
                self._fork(rank)
            else:
                self._tell(event="failed", why=last_report(self.folder / "log"))

    def _end_orphans(self) -> None:
        """End what a rank that is gone has left behind: whatever is a child of the keeper and no rank."""
        import psutil

        known = {child.pid for child in self._children.values()}
        if self._controller:
            known.add(self._controller.pid)
        deadline_s = time.monotonic() + _END_S
        while time.monotonic() < deadline_s:
            left = [process for process in psutil.Process().children() if process.pid not in known]
            alive = [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
            if not alive:
                return
            for process in alive:
                _end(process.pid)
            time.sleep(0.01)


def _end(pid: int) -> None:
    """SIGKILL to a process and its descendants, parents first stopped so that they start no more."""
    import psutil

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        process.suspend()
        for descendant in process.children(recursive=True):
            with suppress(psutil.Error):
                descendant.kill()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def end_all_descendants() -> None:
    """SIGKILL to everything below this process, until nothing is left; orphans have become its children."""
    import psutil

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    deadline_s = time.monotonic() + _END_S
    while time.monotonic() < deadline_s:
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for child in children:
            with suppress(psutil.Error):
                child.kill()
        while True:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    break
            except ChildProcessError:
                break
        time.sleep(0.005)


if __name__ == "__main__":
    Keeper(Path(sys.argv[1]), int(sys.argv[2])).run()
