"""The progress bar of a run, fed by the events of rank 0.

Layer 5. Invariant: it only reads, never blocks, and writes to stderr or a notebook widget, never to stdout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dlojz.config import RunConfig
from dlojz.runs.state import EVENTS
from dlojz.schema import LabError, parse_json
from dlojz.text import say

QUIET = "DLOJZ_PROGRESS"
"""Environment variable: `off` where nobody waits for a notebook and what it shows is compared (CI)."""
_MOST_BYTES = 16 * 2**20


def wanted(progress: bool | None) -> bool:
    """Whether to draw a bar: as asked, else only where somebody looks (a terminal or a notebook)."""
    if progress is not None:
        return progress
    return os.environ.get(QUIET) != "off" and (in_notebook() or sys.stderr.isatty())


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return type(shell).__name__ == "ZMQInteractiveShell"


class EventTail:
    """New events of one file, each read once, a line only when it is whole."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """The events written since the last call."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._offset)
                data = file.read(_MOST_BYTES)
        except OSError:
            return []
        # A piece that is full and has no end of a line belongs to no event of ours: it is passed over.
        whole = data[: data.rfind(b"\n") + 1] or data[: len(data) // _MOST_BYTES * _MOST_BYTES]
        self._offset += len(whole)
        events = []
        for line in whole.splitlines():
            try:
                event = parse_json(line)
            except LabError:
                continue
            if isinstance(event, dict) and "event" in event:
                events.append(event)
        return events


class Progress:
    """A bar over the steps of one run; does nothing where none is wanted."""

    def __init__(self, folder: Path, config: RunConfig, *, shown: bool) -> None:
        self._tail = EventTail(folder / EVENTS / "rank-0.jsonl")
        self._config = config
        self._bar: Any = None
        if shown:
            from tqdm.auto import tqdm

            self._bar = tqdm(total=config.steps, unit="step", file=sys.stderr, desc=config.title, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def update(self, state: str) -> None:
        """Draw what has happened since the last call."""
        if self._bar is None:
            return
        steps = [event for event in self._tail.read() if event["event"] == "step" and type(event.get("loss")) is float]
        if steps:
            if not self._bar.n:
                self._bar.reset()  # the rate and the time left do not count the start
            self._bar.set_postfix_str(self._figures(steps[-1]), refresh=False)
            self._bar.update(len(steps))
        elif not self._bar.n and state in ("queued", "running") and not self._bar.postfix:
            processes = self._config.layout.world_size
            self._bar.set_postfix_str(
                say(
                    en=f"starting {processes} process{'es' if processes > 1 else ''}",
                    fr=f"démarrage de {processes} processus",
                ),
                refresh=True,
            )

    def _figures(self, event: dict[str, Any]) -> str:
        step_s = event.get("step_s")
        rate = (
            f", {self._config.layout.global_batch / step_s:.0f} samples/s"
            if isinstance(step_s, float) and step_s > 0
            else ""
        )
        return f"loss {event['loss']:.4f}{rate}"
