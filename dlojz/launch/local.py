"""The local backend: a launcher of its own session, which outlives the notebook that asked for it.

Layer 5. Invariant: the launcher holds nothing of its caller's: no terminal, no pipe, no variable.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

import dlojz
from dlojz.runs.owner import read_owner
from dlojz.runs.state import LOGS
from dlojz.schema import LabError


def start(folder: Path) -> int:
    """Start the launcher of a run folder, detached.

    Returns:
        its process number.

    Raises:
        LabError: if it cannot be started.
    """
    try:
        with open(folder / LOGS / "launcher.log", "ab") as log:
            process = subprocess.Popen(
                # -P: a student's random.py in the current folder must not shadow the standard library's.
                [sys.executable, "-P", "-m", "dlojz.launch.supervisor", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=_environment(),
            )
        owner = read_owner(folder)
        if owner is not None:
            owner.handed_to(process.pid).write(folder)
    except psutil.NoSuchProcess:
        pass
    except OSError as error:
        raise LabError(f"the launcher of {folder.name} cannot be started: {error.strerror or error}.") from None
    # Somebody has to ask for the exit status, or the launcher stays a zombie as long as the notebook lives.
    threading.Thread(target=process.wait, daemon=True).start()
    return process.pid


def _environment() -> dict[str, str]:
    """The caller's environment, in which this very package is found although it may not be installed."""
    package = str(Path(dlojz.__file__ or "").parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
