"""What the machine offers, told in a notebook.

Layer 6 (labs). Invariant: the kernel stays light; `dlojz doctor` looks at the libraries in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from dlojz.text import language, say

_SHOWN = ("torch", "deepspeed", "cores", "memory", "gloo", "slurm")
_MARKS = {"ok": "✓", "warning": "!", "problem": "✗"}
_TIMEOUT_S = 180


def environment() -> list[str]:
    """One line per thing looked at, then what to do about what is missing."""
    command = [sys.executable, "-c", "import sys; from dlojz.cli import main; sys.exit(main())", "doctor", "--json"]
    try:
        answer = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "DLOJZ_LANG": language()},
        )
        checks = json.loads(answer.stdout)["checks"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError) as error:
        return [
            say(
                en=f"`dlojz doctor` gave no answer ({type(error).__name__}): run it in a terminal.",
                fr=f"`dlojz doctor` n’a pas répondu ({type(error).__name__}) : lancez-le dans un terminal.",
            )
        ]
    lines = [f"✓ {'python':<10} {sys.version.split()[0]}"]
    for check in checks:
        if check["name"] in _SHOWN or check["state"] != "ok":
            found = check["found"].replace(sys.executable, "python").replace(str(Path.home()), "~")
            lines.append(f"{_MARKS[check['state']]} {_label(check['name']):<10} {found}")
            if check["advice"]:
                lines.append(f"  → {check['advice']}")
    return lines


def _label(name: str) -> str:
    return {"cores": say(en="cores", fr="cœurs"), "memory": say(en="memory", fr="mémoire")}.get(name, name)
