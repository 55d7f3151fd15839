"""Where the student is: the notebook that is open, and so the language to speak.

Layer 6 (labs). Invariant: the code of a lab is the same in every language; the language comes from the notebook's own
file, so no cell ever names one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from dlojz.text import LANGUAGES, Language, language

MAX_NOTEBOOK_BYTES = 64 * 2**20


def notebook_language() -> Language:
    """The language of the open notebook.

    JupyterLab gives the kernel the path of the notebook (`$JPY_SESSION_NAME`); nbclient, nbval and most other tools
    start the kernel in the notebook's folder. In this order: the metadata of the file, the name of its folder, the
    name of the working folder, then the general choice (`$DLOJZ_LANG`, else English).
    """
    return next(_clues(), language())


def _clues() -> Iterator[Language]:
    session = os.environ.get("JPY_SESSION_NAME")
    names = []
    if session:
        path = Path(session)
        names += [_metadata_language(path), path.parent.name]
    for name in [*names, Path.cwd().name]:
        yield from (known for known in LANGUAGES if name == known)


def _metadata_language(path: Path) -> str | None:
    """What `dlojz labs build` wrote into the notebook; None where the file is no such notebook."""
    try:
        if path.stat().st_size > MAX_NOTEBOOK_BYTES:
            return None
        name = json.loads(path.read_bytes())["metadata"]["dlojz"]["language"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if isinstance(name, str) else None
