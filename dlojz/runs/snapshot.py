"""What a run looks like just now, read from its folder piece by piece.

Layer 5. Invariant: it only reads, and reads every event once, however often it looks.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import deque
from datetime import datetime
from typing import TYPE_CHECKING, Any

from dlojz.footprint import Memory
from dlojz.record import RunRecord
from dlojz.runs.assemble import assemble
from dlojz.runs.ending import Ending
from dlojz.runs.job import Job, read_job
from dlojz.runs.progress import EventTail
from dlojz.runs.reasons import explain_reason
from dlojz.runs.scheduler import View, view_of
from dlojz.runs.state import EVENTS, is_final
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_seconds
from dlojz.viz.run_panel import RunView

if TYPE_CHECKING:
    from dlojz.runs.handle import Run

STEPS_TIMED = 20
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


class Tracker:
    """A run, looked at again and again.

    Args:
        run: which.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        ranks = range(run.config.layout.world_size)
        self._tails = [EventTail(run.folder / EVENTS / f"rank-{rank}.jsonl") for rank in ranks]
        self._losses: dict[int, float] = {}
        self._peaks: dict[int, int] = {}
        self._step_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._warming_up = True
        self._starts: dict[int, list[dict[str, Any]]] = {}
        self._limit: tuple[int, str] | None = None

    def look(self) -> RunView:
        """The run as it is now.

        Raises:
            LabError: if its folder can no longer be read.
        """
        state = self._run.state  # first: what is written before the end is then there to be read
        for rank, tail in enumerate(self._tails):
            for event in tail.read():
                self._take(rank, event)
        record = self._run.record if is_final(state) else None
        losses = record.losses if record else self._finished()
        step_s = statistics.median(self._step_s) if self._step_s else None
        config = self._run.config
        left = config.steps - len(losses)
        job = read_job(self._run.folder)
        return RunView(
            run_id=self._run.run_id,
            title=self._run.title,
            state=state,
            steps=config.steps,
            reason=record.reason if record else "",
            losses=losses,
            peaks_bytes=tuple(sorted(self._peaks.items())),
            limit_bytes=limit[0] if (limit := self._limit_of(record)) else None,
            limit_of=limit[1] if limit else "",
            step_s=step_s,
            samples_per_s=config.layout.global_batch / step_s if step_s else None,
            remaining_s=left * step_s if state == "running" and step_s and left > 0 and not self._warming_up else None,
            **(job_words(job, None if is_final(state) else view_of(job)) if job else {}),
        )

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        name, step, loss, step_s = event["event"], event.get("step"), event.get("loss"), event.get("step_s")
        if name == "step" and type(step) is int and type(loss) is float and math.isfinite(loss):
            self._losses[step] = loss
            if rank == 0 and isinstance(step_s, float) and step_s > 0:
                if self._step_s and self._warming_up:  # the first step also loads and compiles: it tells no rate
                    self._step_s.clear()
                    self._warming_up = False
                self._step_s.append(step_s)
        elif name == "footprint":
            try:
                memory = Memory.from_dict(dict(event["footprint"])["memory"])
            except (LabError, KeyError, TypeError, ValueError):
                return
            taken = memory.device_bytes or memory.peak_bytes
            if taken:
                self._peaks[rank] = max(taken, self._peaks.get(rank, 0))
        elif name in ("start", "device") and rank == 0:
            self._starts.setdefault(0, []).append(event)
            self._limit = None
            if name == "start":  # a resumed run: the time of its steps may be another
                self._step_s.clear()
                self._warming_up = True

    def _finished(self) -> tuple[float, ...]:
        losses: list[float] = []
        while len(losses) in self._losses:
            losses.append(self._losses[len(losses)])
        return tuple(losses)

    def _limit_of(self, record: RunRecord | None) -> tuple[int, str] | None:
        """What a rank may take where the run runs; found out once."""
        if self._limit is None and self._starts and self._peaks:
            from dlojz.compare import limit_of

            so_far = record or assemble(self._run.run_id, self._run.config, self._starts, Ending("cancelled"), 0.0)
            self._limit = limit_of(so_far)
        return self._limit


def job_words(job: Job, view: View | None) -> dict[str, str]:
    """What is said of a run's job: which it is, why it waits, when it starts, and whether that is still known.

    Args:
        job: of the run.
        view: what the scheduler says of it; None once the run has ended.
    """
    number = job.number or (view.number if view else "") or say(en="(no number yet)", fr="(pas encore de numéro)")
    words = {"job": say(en=f"{number} on {job.machine}", fr=f"{number} sur {job.machine}")}
    if view is None:
        return words
    if view.standing == "pending" or (view.standing == "unknown" and view.state == "PENDING"):
        words["waiting"] = explained(view.reason or view.state)
        words["starts"] = local_time(view.start_utc)
    if view.standing == "running":
        words["job_left"] = time_words(view.left)
    if view.standing == "unknown":
        words["last_known"] = unknown_words(view)
    return words


def explained(reason: str) -> str:
    """A reason of the scheduler in words, with its own word behind."""
    words = explain_reason(reason)
    return words if not reason or reason in words else f"{words} ({reason})"


def unknown_words(view: View) -> str:
    """That the scheduler does not answer, since when, what it last said, and what it says instead."""
    if view.age_s is None:
        known = say(en="it has not answered yet", fr="il n’a pas encore répondu")
    else:
        ago = format_seconds(view.age_s)
        state = view.state or "?"
        known = say(en=f"last known, {ago} ago: {state}", fr=f"dernier état connu, il y a {ago} : {state}")
    return f"{known} — {view.problem}" if view.problem else known


def local_time(time_utc: str) -> str:
    """A time of the scheduler on the clock of this machine; empty where it is none."""
    try:
        return datetime.fromisoformat(time_utc).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return ""


def time_words(text: str) -> str:
    """A duration of the scheduler (`1-02:03:04`, `59:58`) as people read it; as it is where it is none."""
    found = _DURATION.fullmatch(text)
    if not found:
        return text
    days, hours, minutes, seconds = (int(part or 0) for part in found.groups())
    hours += 24 * days
    return f"{hours} h {minutes:02d} min" if hours else format_seconds(60 * minutes + seconds)


def snapshot(run: Run) -> RunView:
    """A run as it is now, looked at once.

    Raises:
        LabError: if its folder cannot be read.
    """
    return Tracker(run).look()
