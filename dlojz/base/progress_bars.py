"""Decide whether a progress bar is drawn: as asked, else where somebody looks."""

from __future__ import annotations

import os
import sys

QUIET = "DLOJZ_PROGRESS"
"""Environment variable: `off` where nobody waits for a notebook and what it shows is compared (CI)."""


def wanted(progress: bool | None) -> bool:
    """Decide whether to draw a bar: as asked, else only in a terminal or a notebook."""
    if progress is not None:
        return progress
    return os.environ.get(QUIET) != "off" and (in_notebook() or sys.stderr.isatty())


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"
