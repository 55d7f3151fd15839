"""No rank outlives its launcher: Linux kills a process whose parent is gone, and hands its orphans to an ancestor.

Layer 3, standard library only, so that a rank can hold on to the lifeline before anything heavy is imported.
Invariant: after `die_with_parent()` returns, the parent's end (SIGKILL included) is this process's end.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT_VARIABLE = "DLOJZ_LAUNCHER_PID"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> bool:
    """Call Linux's prctl; False where the system has none."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0
    except (AttributeError, OSError):
        return False


def die_with_parent() -> bool:
    """Ask the system to kill this process as soon as its parent ends; False where it cannot.

    The parent is the process of `$DLOJZ_LAUNCHER_PID` where the launcher set it. If it is gone already, this process
    ends at once with exit code 1.
    """
    tied = _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_VARIABLE, "")
    # The parent may have died before the call above: then the signal will never come.
    if tied and expected.isdecimal() and os.getppid() != int(expected):
        os._exit(1)
    return tied


def adopt_orphans() -> bool:
    """Make the helpers of a rank that died (data loaders, …) children of this process; False where it cannot."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)
