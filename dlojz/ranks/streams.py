"""What a cell says on one rank: prints, figures and values in their order, up to a limit.

Layer 5. Invariant: whatever is printed, by whichever way (print, os.write, a child process, a library in C), is read at
once and kept up to `TEXT_BYTES` a cell; the rest is counted and thrown away, so that nothing fills up or blocks.
"""

from __future__ import annotations

import base64
import fcntl
import os
import sys
import termios
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

TEXT_BYTES = 64 * 2**10
IMAGE_BYTES = 1024 * 2**10
"""Of all figures of a cell, as PNG."""
_DRAIN_S = 0.3
# gloo tells the world how many peers it has, each time a group is made.
_CHATTER = ("[Gloo] Rank ",)


class Streams:
    """The streams of this process, from its start to its end.

    Args:
        log: file for what the process itself has to report outside of cells, errors of its start above all.
    """

    def __init__(self, log: Path | None = None) -> None:
        self._read, self._write = (_out_of_the_way(descriptor) for descriptor in os.pipe())
        self._lock = threading.Lock()
        self._listening = False
        self._parts: list[dict[str, Any]] = []
        self._kept_bytes = self._image_bytes = 0
        self._cut = False
        if log is not None:
            report = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            # Loggers that are made later hold on to this one.
            sys.__stderr__ = open(_out_of_the_way(report), "w", buffering=1, errors="replace")  # type: ignore[misc]  # noqa: SIM115
            sys.stderr = sys.__stderr__
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        self._point_here()
        # The lock may be held at the very moment a cell forks; in the child nobody would give it back.
        os.register_at_fork(after_in_child=self._forget_lock)
        threading.Thread(target=self._listen, daemon=True, name="streams").start()

    def begin(self) -> None:
        """A cell begins: forget what was said before, and mend streams that a cell has closed."""
        with self._lock:
            self._parts, self._kept_bytes, self._image_bytes, self._cut = [], 0, 0, False
            self._listening = True
        self._point_here()
        self._stdout_before, self._stderr_before = sys.stdout, sys.stderr
        sys.stdout = sys.stderr = open(1, "w", buffering=1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115

    def show(self, bundle: dict[str, Any]) -> None:
        """Add a value or figure after what was printed before it.

        Args:
            bundle: representations by MIME type; its text and its PNG are kept, never its HTML.
        """
        self._drain()
        text = str(bundle.get("text/plain", ""))
        image = bundle.get("image/png")
        with self._lock:
            if image is not None:
                encoded = image if isinstance(image, str) else base64.b64encode(image).decode()
                encoded = "".join(encoded.split())
                if self._image_bytes + len(encoded) <= IMAGE_BYTES:
                    self._image_bytes += len(encoded)
                    self._parts.append({"kind": "image", "png": encoded, "text": text[:200]})
                    return
                self._cut = True
            self._keep("value", text.encode("utf-8", "replace"))

    def end(self) -> tuple[list[dict[str, Any]], bool]:
        """The cell has ended: its parts in order, and whether something had to be left out."""
        self._drain()
        with self._lock:
            self._listening = False
            parts, cut = self._parts, self._cut
            self._parts = []
        with suppress(OSError, ValueError):
            sys.stdout.close()
        self._point_here()
        sys.stdout, sys.stderr = self._stdout_before, self._stderr_before
        answer = []
        for part in parts:
            said = dict(part)
            if part["kind"] != "image":
                said["text"] = part["text"].decode("utf-8", "replace")
            if part["kind"] == "printed":
                lines = said["text"].splitlines(keepends=True)
                said["text"] = "".join(line for line in lines if not line.startswith(_CHATTER))
            if said["text"] or "png" in said:
                answer.append(said)
        return answer, cut

    def _forget_lock(self) -> None:
        self._lock = threading.Lock()

    def _point_here(self) -> None:
        for descriptor in (1, 2):
            os.dup2(self._write, descriptor)

    def _keep(self, kind: str, text: bytes) -> None:
        kept = text[: TEXT_BYTES - self._kept_bytes]
        self._cut |= len(kept) < len(text)
        self._kept_bytes += len(kept)
        if not kept:
            return
        if kind == "printed" and self._parts and self._parts[-1]["kind"] == "printed":
            self._parts[-1]["text"] += kept
        else:
            self._parts.append({"kind": kind, "text": bytearray(kept)})

    def _listen(self) -> None:
        import select

        while True:
            select.select([self._read], [], [])
            with self._lock:  # held over reading and keeping: whoever has it and finds the pipe empty has all
                text = os.read(self._read, 2**16)
                if self._listening:
                    self._keep("printed", text)

    def _drain(self) -> None:
        """Wait until what was printed has been read; not for ever, since a child may print for ever."""
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        deadline_s = time.monotonic() + _DRAIN_S
        while time.monotonic() < deadline_s:
            with self._lock:
                waiting = fcntl.ioctl(self._read, termios.FIONREAD, b"\0" * 4)
            if not any(waiting):
                return
            time.sleep(0.001)


def _out_of_the_way(descriptor: int) -> int:
    """The same file under a number that no cell closes by accident, not inherited by what it starts."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(descriptor)
    return moved
