"""Find stale locks in torch's cache of compiled extensions.

A build that was killed leaves its lock, a file named `lock`, behind; each later program that needs the extension
(DeepSpeed's CPU Adam, for instance) then waits for ever, without a word.

Source: torch 2.13, `torch/utils/file_baton.py`, and `_get_build_directory` of `torch/utils/cpp_extension.py`.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dlojz.base.language import say

OLD_S = 300.0


def stale_locks() -> list[Path]:
    """List the locks that are older than `OLD_S` seconds and that no process here holds, of this user's extensions."""
    chosen_folder = os.environ.get("TORCH_EXTENSIONS_DIR", "")
    locks = folder().glob("*/lock" if chosen_folder else "*/*/lock")
    old = []
    for lock in locks:
        with suppress(OSError):  # its build has just ended
            if time.time() - lock.stat().st_mtime > OLD_S:
                # Without links, as `open_files` names it.
                old.append(lock.resolve())
    open_paths = _open_files() if old else set()
    return sorted(lock for lock in old if str(lock) not in open_paths)


def folder() -> Path:
    """Return where torch keeps extensions; if nothing else is asked for, there is a folder for each Python beneath."""
    if chosen_folder := os.environ.get("TORCH_EXTENSIONS_DIR", ""):
        return Path(chosen_folder)
    if sys.platform == "darwin":
        return Path("~/Library/Caches/torch_extensions").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "torch_extensions"


def _open_files() -> set[str]:
    """List the files that processes have open, as far as this user may see: a build keeps its lock open."""
    paths = set[str]()
    for process in psutil.process_iter():
        with suppress(OSError, psutil.Error):
            paths.update(file.path for file in process.open_files())
    return paths


def told(locks: Sequence[Path]) -> str:
    """Write what stale locks do, and the command that removes them."""
    remove = shlex.join(["rm", *map(str, locks)])
    return say(
        en="a build that was killed left a lock, on which every script waits for ever that needs this extension of "
        f"torch (DeepSpeed compiles some). Unless another machine is building it now: {remove}",
        fr="une compilation tuée a laissé un verrou, que tout script qui a besoin de cette extension de torch attend "
        f"sans fin (DeepSpeed en compile). Sauf si une autre machine la compile en ce moment : {remove}",
    )
