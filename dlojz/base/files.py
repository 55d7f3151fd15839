"""Paths of the checkout or the installed package, and of the user's cache folder; files written whole or not at all."""

from __future__ import annotations

import os
import socket
import sys
import uuid
from pathlib import Path

from dlojz.base.fault_injection import faultpoint

CHECKOUT = Path(sys.modules["dlojz"].__file__ or "").parent.parent
"""Parent folder of the package; not resolved, so that a job names the path its user knows."""
_PACKAGE = Path(sys.modules["dlojz"].__file__ or "").resolve().parent
COURSE = _PACKAGE / "course" if (_PACKAGE / "course").is_dir() else _PACKAGE.parent
"""Folder of notebooks, sources of the labs and campaigns: `course/` of an installed package (`setup.py` copies
them there), else the checkout, also where the package is reached through a link."""


def config_folder() -> Path:
    """Folder of the user's configuration: `$XDG_CONFIG_HOME/dlojz`, else `~/.config/dlojz`."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config", "dlojz")


def cache_folder(name: str = "") -> Path | None:
    """Folder `$XDG_CACHE_HOME/dlojz/NAME` (`~/.cache/dlojz/NAME` by default), made on first use.

    Returns:
        None where this user has no such folder that can be written and belongs to nobody else.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        folder = (base if base.is_absolute() else Path("~/.cache").expanduser()) / "dlojz" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        ours = not folder.is_symlink() and folder.stat().st_uid == os.getuid()
    except (OSError, RuntimeError):
        return None
    return folder if ours and os.access(folder, os.W_OK) else None


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: a crash or a full disk leaves the old file as it was.

    Raises:
        OSError: if it cannot be written; the error names `path`, where nothing has changed then.
    """
    # Several machines and processes may write into one folder.
    temporary = path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex}.tmp")
    try:
        faultpoint("record.write:1")
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Before the rename: else a crash could leave the new name with an empty file.
            os.fsync(file.fileno())
        faultpoint("record.write:2")
        os.replace(temporary, path)
        faultpoint("record.write:3")
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:
            # A write to a full disk names no file, and whoever reads the sentence knows no temporary one.
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
