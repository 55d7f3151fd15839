"""The local backend: a launcher of its own session, which outlives the notebook that asked for it.

Layer 5. Invariant: the launcher holds nothing of its caller's: no terminal, no pipe, no variable.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import psutil

import dlojz
from dlojz.launch.slurm import record_refusal
from dlojz.runs.owner import read_owner
from dlojz.runs.state import LOGS
from dlojz.schema import LabError
from dlojz.text import say


def start(folder: Path) -> int:
    """Start the launcher of a run folder, detached.

    Returns:
        its process number.

    Raises:
        LabError: if it cannot be started; the run is recorded as failed then.
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
    except OSError as error:
        why = say(
            en=f"the launcher of {folder.name} cannot be started: {error.strerror or error}.",
            fr=f"le lanceur de {folder.name} ne peut pas être démarré : {error.strerror or error}.",
        )
        record_refusal(folder, why)  # or it would seem to wait for as long as this process lives
        raise LabError(why) from None
    owner = read_owner(folder)
    # The launcher names itself, too: this only saves the time until then.
    with contextlib.suppress(psutil.NoSuchProcess, OSError):
        if owner is not None:
            owner.handed_to(process.pid).write(folder)
    # Somebody has to ask for the exit status, or the launcher stays a zombie as long as the notebook lives.
    threading.Thread(target=process.wait, daemon=True).start()
    return process.pid


def _environment() -> dict[str, str]:
    """The caller's environment, in which this very package is found although it may not be installed."""
    package = str(Path(dlojz.__file__ or "").parent.parent)
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
