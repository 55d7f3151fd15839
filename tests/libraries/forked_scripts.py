"""Runs of scripts on forks of pytest's process, which has imported torch: an interpreter for each rank takes 5 s.

For modules that look at what is recorded of a step. How a script is started, what it sees and how it ends are tested
with interpreters, as users have them: `test_script.py`, `test_launching.py`, `test_strangers.py`.
"""

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

import dlojz
from dlojz.base.machine import PARENT_VARIABLE
from dlojz.libraries import watched_script
from dlojz.processes import start_rank
from dlojz.processes.forks import fork
from dlojz.processes.script_environment import ProcessIdentity
from dlojz.running import launch, supervisor
from dlojz.running.run import Run

assert watched_script  # imported once, with all that a rank imports before its script


def print_at_once() -> None:
    """Print into this process's descriptors, as with `python -u`: pytest prints into files of its own."""
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        raw = os.fdopen(descriptor, "wb", 0, closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, encoding="utf-8", write_through=True))


def start(folder: Path) -> None:
    """Start the launcher of a run folder, as `launch.start` does."""
    environment = ProcessIdentity(str(folder)).put_into(os.environ)
    pid = fork(partial(_supervise, folder, environment), reset=(signal.SIGTERM, signal.SIGINT))
    launch._hand_over(folder, pid)
    threading.Thread(target=os.waitpid, args=(pid, 0), daemon=True).start()


def _supervise(folder: Path, environment: Mapping[str, str]) -> NoReturn:
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    log = os.open(folder / "logs" / "launcher.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    print_at_once()
    supervisor._become_script = _become_script
    supervisor.supervise(folder)
    os._exit(0)


def _become_script(folder: Path, worker_module: str, rank: int, environment: Mapping[str, str]) -> NoReturn:
    """Become a process of the script, in the child: `supervisor._become_script` without a new interpreter."""
    code = 1
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        parent = str(os.getppid())
        os.environ.clear()
        os.environ.update(environment, **{PARENT_VARIABLE: parent})
        sys.modules.pop(worker_module, None)  # or runpy warns that it runs it a second time
        start_rank.main(str(folder), worker_module, str(rank))
    except SystemExit as end:
        code = start_rank._exit_code(end.code)
    finally:
        os._exit(code)  # what pytest does at its exit is not to be done here


@contextmanager
def on_forks() -> Iterator[None]:
    """Start the scripts of `dlojz.run` on forks within this context."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "start", start)
        yield


def run_on_forks(*words: Any, **options: Any) -> Run:
    """Call `dlojz.run` of a script, on forks, without a word of its progress."""
    with on_forks():
        return dlojz.run(*words, **{"device": "cpu", "progress": False, **options})
