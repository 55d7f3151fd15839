"""What the processes printed, safe to show: the tail of a file, its control characters made visible.

Layer 5. Invariant: text from a log never moves a cursor, hides a character or fills a notebook.
"""

from __future__ import annotations

import errno
import os
import stat
import unicodedata
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 64 * 1024
MAX_FILE_BYTES = 1024 * 1024
"""More than any of the small files of a run's folder has."""
_MAX_LINE_CHARS = 300


def visible(text: str) -> str:
    """The text with every control or direction-changing character written as an escape.

    Example:
        >>> visible("50%\\r100%\\x1b[0m")
        '50%\\\\r100%\\\\x1b[0m'
    """
    text = text.replace("\r\n", "\n")
    return "".join(
        char
        if char in "\n\t" or unicodedata.category(char) not in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def open_regular(path: Path) -> BinaryIO | None:
    """A regular file, open for reading; None where there is none, or only a link, a folder or a pipe."""
    try:
        return _opened(path)
    except OSError:
        return None


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The whole content of a regular file; who waits for a pipe, or reads a file without end, waits for ever.

    Raises:
        OSError: if there is none, it is a link, a folder or a pipe, or has more than `most_bytes` bytes.
    """
    with _opened(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes} bytes", str(path))
    return content


def _opened(path: Path) -> BinaryIO:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_tail(path: Path, limit_bytes: int = MAX_LOG_BYTES) -> str:
    """The end of a regular file, visible and at most `limit_bytes` long; empty where there is none.

    Symbolic links are not followed.
    """
    file = open_regular(path)
    if file is None:
        return ""
    with file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - limit_bytes))
        text = visible(file.read(limit_bytes).decode("utf-8", errors="replace"))
    # Escapes are longer than what they stand for.
    return text[-limit_bytes:]


def last_line(text: str) -> str:
    """The last line that says something, shortened to 300 characters."""
    line = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    return line if len(line) <= _MAX_LINE_CHARS else f"{line[:_MAX_LINE_CHARS]}…"


def read_tails(folder: Path, names: Sequence[str]) -> str:
    """The ends of several logs under their names, one after the other, which share `MAX_LOG_BYTES` out.

    Args:
        folder: of the logs.
        names: without `.log`; one that is empty or not there is left out.
    """
    share = MAX_LOG_BYTES // len(names) - 32
    tails = {name: read_tail(folder / f"{name}.log", share) for name in names}
    return "\n".join(f"── {name} ──\n{tail.rstrip()}" for name, tail in tails.items() if tail)
