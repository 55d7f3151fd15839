"""What the pool hears from its ranks."""

import queue
import signal
from types import SimpleNamespace
from typing import Any

from dlojz.ranks.cluster import Event
from dlojz.ranks.live import RankPool


def test_looking_for_what_has_happened_never_waits_for_ever() -> None:
    """CPython 3.11's own wait with a short limit may hang here: with 1e-7 s it does so within a few tries."""

    def late(*_: Any) -> None:
        raise AssertionError("a look without a limit of its own took 10 s")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(10)
    try:
        for _ in range(10_000):
            assert RankPool(SimpleNamespace(events=queue.SimpleQueue()), 1)._next_event(0) is None  # type: ignore[arg-type]
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def test_events_come_in_their_order() -> None:
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    pool = RankPool(SimpleNamespace(events=events), 1)  # type: ignore[arg-type]
    for name in ("first", "second"):
        events.put(Event("died", name=name))
    heard = [pool._next_event(0.1) for _ in range(3)]
    assert [event.name for event in heard if event is not None] == ["first", "second"]
