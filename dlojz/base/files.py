"""Paths: the checkout or the installed package, notebooks and machine files; the user's cache folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CHECKOUT = Path(sys.modules["dlojz"].__file__ or "").parent.parent
"""Parent folder of the package; not resolved, so that a job names the path its user knows."""
_PACKAGE = Path(sys.modules["dlojz"].__file__ or "").resolve().parent
COURSE = _PACKAGE / "course" if (_PACKAGE / "course").is_dir() else _PACKAGE.parent
"""Folder of notebooks, sources of the labs, machine files and campaigns: `course/` of an installed package (`setup.py`
copies them there), else the checkout, also where the package is reached through a link."""


def cache_folder(name: str = "") -> Path | None:
    """Folder `$XDG_CACHE_HOME/dlojz/NAME` (`~/.cache/dlojz/NAME` by default), made on first use.

    Returns:
        None where this user has no such folder that can be written and belongs to nobody else.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        found = (base if base.is_absolute() else Path("~/.cache").expanduser()) / "dlojz" / name
        found.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = not found.is_symlink() and found.stat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return None
    return found if ours and os.access(found, os.W_OK) else None
