"""Hide from this package what only Linux has: loaded by every Python process that has this folder on its path."""

import io
import os
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import filelock  # noqa: F401
import psutil
import torch  # noqa: F401 - these three chose by the system while they were imported, as Python's build does here

sysconfig.get_config_vars()


def _hide(function: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse paths of /proc to everybody but psutil, which reads something else on other systems."""

    def without_proc(path: Any = ".", *words: Any, **named: Any) -> Any:
        if str(path).startswith("/proc"):
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_globals.get("__package__") != psutil.__name__:
                frame = frame.f_back
            if frame.f_back is None:
                raise FileNotFoundError(2, "hidden", str(path))
        return function(path, *words, **named)

    return without_proc


for module, name in ((io, "open"), (os, "readlink"), (os, "stat"), (os, "scandir"), (os, "listdir")):
    setattr(module, name, _hide(getattr(module, name)))
del os.sched_getaffinity
for name in ("fcntl", "pwd", "resource"):
    sys.modules[name] = None  # type: ignore[assignment]
sys.platform = "darwin"
