"""A hub as tests start it (slurm/jupyterhub/start.py), and its end: all of it is gone afterwards."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from dlojz.base.machine import PARENT_VARIABLE

START = Path(__file__).resolve().parents[1] / "slurm" / "jupyterhub" / "start.py"
PROXY = Path(sys.prefix) / "node" / "node_modules" / ".bin" / "configurable-http-proxy"


def need(found: object, what: str) -> None:
    """As root on Debian `make test` has installed all of it: there nothing is skipped."""
    if found:
        return
    reason = f"needs {what}: `make test` installs it when it is run by root on Debian"
    if os.geteuid() == 0:
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class StartedHub:
    """A hub whose processes run; whether it answers yet is another question.

    Args:
        process: what has started all of it.
        folder: homes of the students, data base, log.
        told: what start.py says of it in hub.json.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    told: dict[str, Any]

    def part(self, words: str) -> psutil.Process:
        """The process whose command line holds these words."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):  # it may end while it is looked at
                if words in " ".join(process.cmdline()):
                    found.append(process)
        return found[0]

    def log(self) -> str:
        """The end of what the hub has written."""
        return (self.folder / "hub.log").read_text(errors="replace")[-3000:]


@contextmanager
def started_hub(
    prefix: str, *words: str, patience_s: float, end: signal.Signals = signal.SIGTERM
) -> Iterator[StartedHub]:
    """Start a hub, and end it with every process that it has then; fails if one outlives it.

    Args:
        prefix: of its folder's name.
        words: arguments of start.py besides the folder.
        patience_s: seconds until it has told of itself; the limit is only there to end a test that fails.
        end: what ends it: killed, too, it takes along all that it has started.
    """
    need(PROXY.exists(), "configurable-http-proxy, from the npm registry")
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    folder.chmod(0o755)  # each home in it is closed
    with open(folder / "start.out", "wb") as out:
        command = [sys.executable, str(START), f"--folder={folder}", *words]
        environment = {**os.environ, PARENT_VARIABLE: str(os.getpid())}  # with this process the hub ends too
        process = subprocess.Popen(command, env=environment, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    begun: list[psutil.Process] = []
    try:
        deadline_s = time.monotonic() + patience_s
        while not (folder / "hub.json").exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                pytest.fail(f"the hub did not start:\n{(folder / 'start.out').read_text(errors='replace')}")
            time.sleep(0.1)
        yield StartedHub(process, folder, json.loads((folder / "hub.json").read_text(encoding="utf-8")))
        begun = psutil.Process(process.pid).children(recursive=True)
        assert begun
    finally:
        process.send_signal(end)
        try:
            process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
        _, left = psutil.wait_procs(begun, timeout=20)
        left = [one for one in left if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]
        names = [one.name() for one in left]
        for one in left:
            one.kill()
        shutil.rmtree(folder, ignore_errors=True)
    assert names == [], "processes of the hub have outlived it"
