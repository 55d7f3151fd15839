"""What every rank does first: hold on to the launcher, send what it prints to its own log, then become the worker.

Layer 5. Invariant: both streams of a rank go to one file, in the order printed.

Run as `python -m dlojz.launch.rank RUN_FOLDER MODULE`.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from dlojz.train.lifeline import die_with_parent


def main(folder: str, module: str) -> None:
    """Become the worker module, as `python -m MODULE RUN_FOLDER` would."""
    die_with_parent()
    log = os.open(
        Path(folder, "logs", f"rank-{int(os.environ['RANK'])}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644
    )
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.argv = [module, folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
