"""`dlojz` in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path


def dlojz_process(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command line, in English unless the environment that is given says otherwise."""
    return subprocess.run(
        [sys.executable, "-m", "dlojz", *words],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=cwd,
        env={**os.environ, "DLOJZ_LANG": "en", **environment},
    )
