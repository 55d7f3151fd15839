"""Stand by to launch runs: a process that has imported what takes seconds, and forks a launcher for each run.

Each process that starts runs has one. It ends when that process does; the runs go on. Of this package it has imported
no more than `fork` when it forks, so that a launcher has the code as it is when its run starts. It has one thread.

Run as `python -m dlojz.processes.standby`, with one request on each line of stdin.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path
from typing import IO, Any, NoReturn

import psutil

from dlojz.processes.forks import fork

_ANEW = ("DLOJZ_", "PYTEST_", "PWD", "OLDPWD", "_")
"""How variables begin that nothing reads while it is imported: each launcher has those of its run."""

IDLE_S = 600.0
"""Seconds without a run after which it gives its memory back: 200 MB, and many notebooks share a machine."""


class Standby:
    """Process that stands by, started in an environment that a library may read while it is imported.

    Args:
        log: file for what it prints before its first fork.

    Raises:
        OSError: if it cannot be started.
    """

    def __init__(self, environment: Mapping[str, str], log: IO[bytes]) -> None:
        self._maker, self._lasting = os.getpid(), _lasting(environment)
        self._process = subprocess.Popen(
            # -P: a student's random.py in the current folder must not shadow the standard library's.
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=dict(environment),
        )
        self.pid = self._process.pid
        # Without a wait it would stay a zombie as long as the notebook lives.
        threading.Thread(target=self._process.wait, daemon=True).start()

    def serves(self, environment: Mapping[str, str]) -> bool:
        """Return whether it is alive, this process's own, and of such an environment."""
        is_alive = self._maker == os.getpid() and self._process.returncode is None
        return is_alive and self._lasting == _lasting(environment)

    def launch(self, folder: Path, module: str, environment: Mapping[str, str], preloaded: Sequence[str]) -> None:
        """Ask for a launcher, and return at once.

        Args:
            folder: the run's; `launch.json` there names this process, and then the launcher.
            module: module of the launcher, run as `python -m MODULE FOLDER`.
            preloaded: modules that are imported before the fork, if they can be.

        Raises:
            OSError: if it is gone.
        """
        request: dict[str, Any] = {"folder": str(folder.absolute()), "module": module, "preloaded": list(preloaded)}
        request |= {"environment": dict(environment), "current": None}
        with suppress(OSError):  # a current folder that was deleted
            request["current"] = str(Path.cwd())
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End it as soon as it has done what it was asked for."""
        if self._maker == os.getpid() and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()


def _lasting(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(_ANEW)}


def serve(idle_s: float = IDLE_S) -> None:
    """Fork a launcher for each request on stdin, until it is closed, or nothing is asked for so many seconds."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no launcher that has ended stays a zombie
    # Unbuffered: a line that was read ahead would not be seen by `select`.
    requests = FileIO(0, closefd=False)
    while select.select([requests], [], [], idle_s)[0] and (line := requests.readline()):
        request = json.loads(line)
        for name in request["preloaded"]:
            with suppress(Exception):  # the ranks report in their logs what cannot be imported
                importlib.import_module(name)
        fork(partial(_become, **request), reset=(signal.SIGCHLD,))
    os._exit(0)  # without the second that torch takes to end


def _become(folder: str, module: str, preloaded: Sequence[str], environment: dict[str, str], current: str) -> NoReturn:
    """Become the launcher, in the child."""
    os.setsid()
    # The variables of this run, not those with which the first one began.
    os.environ.clear()
    os.environ.update(environment)
    _redirect(Path(folder, "logs", "launcher.log"))
    with suppress(OSError):  # on a full disk the launcher runs all the same, as it does where it signs itself
        _sign(Path(folder, "launch.json"))
    if current:
        os.chdir(current)
    sys.argv = [module, folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    os._exit(0)


def _redirect(log: Path) -> None:
    for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, os.open(log, os.O_WRONLY | os.O_APPEND))):
        os.dup2(file, number)
        os.close(file)
    os.dup2(1, 2)


def _sign(owner: Path) -> None:
    """Name this process as the one that drives the run: if the package cannot be imported, the run is seen to end."""
    owner_fields = {"pid": os.getpid(), "process_start_s": psutil.Process().create_time()}
    # Written aside and renamed, without the package, whose import may fail.
    draft = owner.with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(json.dumps(json.loads(owner.read_bytes()) | owner_fields), encoding="utf-8")
        draft.replace(owner)
    finally:
        draft.unlink(missing_ok=True)


if __name__ == "__main__":
    serve()
