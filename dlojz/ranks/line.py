"""How the notebook's kernel speaks with ranks, wherever they live.

Layer 5. Invariant: a rank is one process with a name of its own; when it ends, whoever waits for its answer is told,
and never gets the answer of the process that takes its place.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from dlojz.text import say

START_S = 120.0
_ASK_ANEW_S = 10.0
_CLOSE_S = 5.0
_LOST = "EngineError"  # ipyparallel's, for a question that a process has taken to its grave


class Event(NamedTuple):
    """Something that happened.

    Args:
        kind: `answer`, `died`, `failed` (no rank can be reached any more) or `interrupt` (the student's).
        ticket: of the question that is answered.
        name: of the process that died.
        value: the answer, the exit code (negative: signal; None: unknown) of what died, or why all failed.
    """

    kind: str
    ticket: int = 0
    name: str = ""
    value: Any = None


class Cluster(Protocol):
    """Where ranks live: on this machine (`LocalCluster`) or in a SLURM allocation (`slurm.SlurmCluster`)."""

    events: queue.SimpleQueue[Event]
    replaces_single_ranks: bool
    """Whether a rank that ended is started anew alone; else all are."""

    def start(self, size: int, progress: Callable[[], None]) -> None:
        """Have `size` fresh ranks, in place of those there are."""

    def names(self) -> dict[int, str]:
        """The process of each rank, once those that died have been replaced."""

    def ask(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Send a call to a process; its answer comes as an event with this ticket, or the event that it died."""

    def signal(self, rank: int, name: str, number: int) -> None:
        """Send a signal to a process; SIGKILL takes with it what the process has started."""

    def meeting_point(self) -> tuple[str, str]:
        """Where the ranks find one another: a fresh rendezvous of torch, and the guard's board (empty: none)."""

    def place(self, rank: int) -> tuple[int, int]:
        """A rank's number among those of its machine, and how many these are."""

    def stop(self) -> None:
        """End all ranks and what they have started."""


class Line:
    """The connection to ipyparallel's controller.

    Args:
        file: that tells how to reach it.
        events: where answers go.
    """

    def __init__(self, file: Path, events: queue.SimpleQueue[Event]) -> None:
        self._file, self._events, self._tickets = file, events, 0
        self._losses = False
        self.client = self._connected()

    def _connected(self) -> Any:
        from ipyparallel import Client  # half a second, while the keeper imports torch

        client = Client(str(self._file), timeout=START_S)
        client._registration_callbacks.append(self._changed)
        self._connected_s = time.monotonic()
        return client

    def _changed(self, change: dict[str, Any]) -> None:
        if self._losses and change["event"] == "unregister":
            self._events.put(Event("died", name=change["uuid"]))

    def tell_of_losses(self) -> None:
        """From now on, a process that the controller has lost is an event."""
        self._losses = True

    def reachable(self) -> dict[str, int]:
        """The processes that the controller has announced, with its own numbers for them."""
        return {name: number for number, name in dict(self.client._engines).items()}

    def wait_for(self, names: Set[str]) -> bool:
        """Whether these are reachable; asks anew now and then, since an announcement may pass by unheard."""
        if names <= self.reachable().keys():
            return True
        if time.monotonic() - self._connected_s > _ASK_ANEW_S:
            former, self.client = self.client, self._connected()
            _close(former)
        return False

    def ask(self, name: str, function: Callable[..., Any], *arguments: Any) -> int:
        """Send a call to a process; its answer becomes an event with this ticket."""
        self._tickets += 1
        ticket, number = self._tickets, self.reachable().get(name)
        if number is None:
            return ticket  # it has died: that is the event to come

        def arrived(answer: Any) -> None:
            try:
                event = Event("answer", ticket, name, answer.result())
            except BaseException as error:
                kind = getattr(error, "ename", type(error).__name__)
                failure = {"failure": f"{kind}: {getattr(error, 'evalue', error)}"}
                event = Event("died", name=name) if kind == _LOST else Event("answer", ticket, name, failure)
            self._events.put(event)

        self.client[number].apply_async(function, *arguments).add_done_callback(arrived)
        return ticket

    def close(self) -> None:
        """Close all sockets."""
        _close(self.client).join(_CLOSE_S)


def _close(client: Any) -> threading.Thread:
    """Close a client's sockets, in a thread: it waits for the client's own, which may be deaf."""

    def close() -> None:
        with suppress(Exception):
            client.close(linger=0)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    return thread


def not_started(why: str) -> str:
    """The sentence for ranks that did not start."""
    cause = f" ({why})" if why else ""
    return say(
        en=f"the ranks did not start{cause}. Run the cell again; if that does not help, restart the kernel.",
        fr=f"les rangs n’ont pas démarré{cause}. Relancez la cellule ; si cela ne suffit pas, redémarrez le noyau.",
    )


def last_report(log: Path) -> str:
    """The last line of what the processes have reported outside of cells; empty where they have not."""
    try:
        lines = log.read_text(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "")
