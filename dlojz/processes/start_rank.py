"""Start a rank: end with the launcher, redirect stdout and stderr to the rank's log, then become the worker.

Forked by the launcher, or run as `python -m dlojz.processes.start_rank RUN_FOLDER MODULE [RANK]`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import NoReturn

from dlojz.base.machine import die_with_parent


def main(folder: str, module: str, rank: str | None = None) -> None:
    """Become the worker module, as `python -m MODULE RUN_FOLDER` would.

    Args:
        rank: by default that of the environment.
    """
    die_with_parent()
    print_into(Path(folder), int(os.environ["RANK"] if rank is None else rank))
    sys.argv = [module, folder]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def print_into(folder: Path, rank: int) -> None:
    """Let what this process prints be the rank's log from now on."""
    log = os.open(folder / "logs" / f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def fork_main(folder: str, module: str) -> NoReturn:
    """Become the worker module in a forked process, and end as an interpreter would."""
    code = 1
    try:
        faulthandler.enable()  # a new interpreter reads $PYTHONFAULTHANDLER
        main(folder, module)
        code = 0
    except SystemExit as end:
        code = _exit_code(end.code)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # Exit handlers, inherited from the launcher, must not run.
        os._exit(code)


def _exit_code(code: object) -> int:
    """Return the exit code that `sys.exit` was given, in one of the ways it takes."""
    if code is None or isinstance(code, int):
        # Eight bits of an exit code count.
        return (code or 0) & 0xFF
    print(code, file=sys.stderr)
    return 1


if __name__ == "__main__":
    main(*sys.argv[1:])
