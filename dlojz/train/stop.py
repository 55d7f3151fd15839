"""SIGUSR2: what a scheduler sends some time before the limit, so that a run ends by itself and can go on later.

Layer 3, standard library only, so that the handler is there before anything heavy is imported: until then the signal
ends the process. Invariant: the handler sets a flag and does nothing else.
"""

from __future__ import annotations

import signal
from types import FrameType


class StopRequest:
    """Whether the signal has come; the loop looks at each step's end."""

    def __init__(self) -> None:
        self.wanted = False

    def listen(self) -> None:
        """Note the signal from now on; processes that this one forks inherit the handler, which does them no harm."""
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.wanted = True


def ignore_stop_signal(worker: int) -> None:
    """What a data loader's worker does first: the signal goes to every process of a job's step, and would end it."""
    del worker
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
