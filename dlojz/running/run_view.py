"""Watch a run: its progress bar, its panel in a notebook, its snapshot in a terminal.

All of it is read from the run's folder, each event once, and the run does not depend on it. The HTML and the text say
the same: state, why it waits, progress, loss, memory, step time, estimated end; what is not known yet is left out.

The panel of `run.watch()` is fed by a daemon thread, while the kernel stays free. Once the run has ended, static HTML
takes the place of the widget, which a notebook opened without its kernel would show as an error.
"""

from __future__ import annotations

import contextvars
import math
import re
import statistics
import sys
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from dlojz.base.display_hook import in_notebook, wanted
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, decimal, format_bytes, format_seconds, integer, say, significant
from dlojz.base.table import Table, facts, safe, visible
from dlojz.config.run_config import RunConfig
from dlojz.display.style import BLUE, GREEN, GREY, ORANGE, SHADE, SKY, VERMILION, VERMILION_TINT, WHITE
from dlojz.display.style import QUIET as STYLE_QUIET
from dlojz.display.tables import status_label
from dlojz.results.footprint import Memory
from dlojz.results.record import RunRecord, parse_events
from dlojz.running.ending import Ending
from dlojz.running.folder import Job, open_regular, read_job, read_owner
from dlojz.running.slurm.slurm_queue import JobView, explain_reason, view_of
from dlojz.running.state import EVENTS, LAUNCHER_EVENTS, RunFolder, assemble, is_final, quiet_s

phrase = Sentences(Path(__file__).parent / "data" / "runs.md")

_MOST_BYTES = 16 * 2**20


class EventTail:
    """Reader of the new events of one file: each once, a line only when it is complete."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> list[dict[str, Any]]:
        """Read the events written since the last call."""
        file = open_regular(self._path)
        if file is None:
            return []
        with file:
            file.seek(self._offset)
            data = file.read(_MOST_BYTES)
        # A full piece without the end of a line is none of our events: it is skipped.
        complete_lines = data[: data.rfind(b"\n") + 1] or data[: len(data) // _MOST_BYTES * _MOST_BYTES]
        # An incomplete last line is read again by the next call.
        self._offset += len(complete_lines)
        return parse_events(complete_lines)


QUIET_S = 10.0
QUIET_STEPS = 10
"""A run of which nothing was written for so many seconds, and for the time of so many steps, is said to be quiet."""


class Halts:
    """Reader of what keeps a run from going on: ranks or a launcher that a signal such as SIGSTOP has stopped."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tail = EventTail(folder / EVENTS / LAUNCHER_EVENTS)
        self._pids: dict[int, int] = {}

    def look(self, step_s: float | None = None) -> str:
        """Read what keeps the run from going on, in a sentence; empty where nothing does.

        Args:
            step_s: seconds of its steps, if known.
        """
        for event in self._tail.read():
            rank, pid = event.get("rank"), event.get("pid")
            if event["event"] == "stopped" and type(rank) is int and type(pid) is int:
                self._pids[rank] = pid
            elif event["event"] == "continued" and type(rank) is int:
                self._pids.pop(rank, None)
        owner = read_owner(self._folder)
        if owner is not None and owner.is_stopped(self._folder):
            return phrase("launcher stopped", owner=owner)
        if self._pids:
            ranks, pids = ", ".join(map(str, self._pids)), " ".join(map(str, self._pids.values()))
            return phrase("ranks stopped", ranks=ranks, pids=pids)
        quiet = quiet_s(self._folder)
        if step_s is None or quiet < max(QUIET_S, QUIET_STEPS * step_s):
            return ""
        return phrase("no step has ended", quiet=quiet, step_s=step_s)


def print_on_stderr(text: str) -> None:
    """Print a line for whoever looks, beside an answer on stdout."""
    print(text, file=sys.stderr, flush=True)


class ProgressBar:
    """Progress bar over the steps of one run, on stderr or as a widget; does nothing where none is wanted."""

    def __init__(self, folder: Path, config: RunConfig, *, enabled: bool) -> None:
        self._tail = EventTail(folder / EVENTS / "rank-0.jsonl")
        self._halts = Halts(folder)
        self._halted = ""
        self._config = config
        self._bar: Any = None
        if enabled:
            from tqdm.auto import tqdm

            steps, unit = config.asked_steps, say(en="step", fr="pas")
            self._bar = tqdm(total=steps, unit=unit, file=sys.stderr, desc=config.title, dynamic_ncols=True)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def tell(self, text: str) -> None:
        """Print on stderr, above the bar if there is one."""
        if self._bar is None:
            print_on_stderr(text)
        else:
            self._bar.write(text, file=sys.stderr)

    def update(self, state: str) -> None:
        """Draw the steps finished since the last call."""
        if self._bar is None:
            return
        steps = [event for event in self._tail.read() if event["event"] == "step" and type(event.get("loss")) is float]
        if steps:
            if not self._bar.n:
                self._bar.reset()  # the rate and the time left do not count the start
            self._bar.set_postfix_str(self._figures(steps[-1]), refresh=False)
            self._bar.update(len(steps))
        elif state == "running" and (halted := self._halts.look()) != self._halted:
            self._halted = halted
            self._bar.set_postfix_str(halted, refresh=True)
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
            f", {self._config.layout.global_batch / step_s:.0f} {say(en='samples/s', fr='échantillons/s')}"
            if isinstance(step_s, float) and step_s > 0 and self._config.script is None
            else ""
        )
        return f"{say(en='loss', fr='perte')} {decimal(event['loss'], 4)}{rate}"


RANKS_SHOWN = 8
CURVE_POINTS = 200
BAR_CHARACTERS = 24
NO_FORMULAS = "mathjax_ignore tex2jax_ignore"
"""Classes of text in which JupyterLab is not to look for formulas: `$HOME` and `$PATH` of a log are none."""
_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 420, 130, 46, 18
# A mark beside the colour: told apart without seeing colours.
_LOOK = {
    "queued": ("…", STYLE_QUIET),
    "running": ("▶", BLUE),
    "completed": ("✓", GREEN),
    "timeout": ("⧗", ORANGE),
    "cancelled": ("■", STYLE_QUIET),
}
_FAULT = ("✗", VERMILION)


@dataclass(frozen=True)
class RunView:
    """State of a run at one moment, as it is shown.

    Args:
        state: queued, running, or how it ended.
        reason: why it ended so, in a sentence; empty otherwise.
        waiting: why it waits, in words; empty otherwise.
        job: the scheduler's job and where it runs, in words; empty for a run of this machine.
        last_known: that the scheduler does not answer, and the age of its last answer; empty otherwise.
        steps, losses: number of steps asked for, and the loss of each finished step.
        peaks_bytes: by rank, its peak on its device so far.
        limit_bytes, limit_of: limit of a rank, and whose limit that is; None where it is not known.
        step_s: median of the last steps; None before the first.
        samples_per_s: rate of the whole run at that step time.
        remaining_s: until the last step, at that step time; None where it is not known or nothing remains.
        halted: what keeps it from going on, in words; empty otherwise.
        starts, job_left: expected start of the job, and rest of its time limit; empty if not known.
    """

    run_id: str
    title: str
    state: str
    steps: int
    reason: str = ""
    waiting: str = ""
    job: str = ""
    last_known: str = ""
    losses: tuple[float, ...] = ()
    peaks_bytes: tuple[tuple[int, int], ...] = ()
    limit_bytes: int | None = None
    limit_of: str = ""
    step_s: float | None = None
    samples_per_s: float | None = None
    remaining_s: float | None = None
    halted: str = ""
    starts: str = ""
    job_left: str = ""


PANEL: Final = f'class="{NO_FORMULAS}" style="padding:0.3em 0.9em;max-width:62em;border-left:4px solid '
"""Attributes of a panel in a notebook, to be ended by the colour of its border."""


def run_html(view: RunView) -> str:
    """Show the run as one `<div>`, every text escaped."""
    mark, color = _LOOK.get(view.state, _FAULT)
    return (
        f'<div {PANEL}{color}">'
        f'<div><b style="color:{color}"><span aria-hidden="true">{mark}</span> {safe(status_label(view.state))}</b>'
        f" · <b>{safe(view.title)}</b> · <code>{safe(view.run_id)}</code></div>"
        + _bar_html(view)
        + '<div style="display:flex;flex-wrap:wrap;gap:1.5em;align-items:flex-start">'
        + facts_of(view)._repr_html_()
        + _curve_svg(view.losses)
        + (f"<div>{memory._repr_html_()}</div>" if (memory := peaks_of(view)) else "")
        + "</div></div>"
    )


def run_text(view: RunView) -> str:
    """Show the run as lines of text, for a terminal."""
    mark, _ = _LOOK.get(view.state, _FAULT)
    finished_steps = min(len(view.losses), view.steps)
    full = round(BAR_CHARACTERS * finished_steps / max(1, view.steps))
    bar = "█" * full + "░" * (BAR_CHARACTERS - full)
    fact_table = facts_of(view, *([(say(en="losses", fr="pertes"), _sparks(view.losses))] if view.losses else []))
    lines = [
        f"{mark} {status_label(view.state)} · {view.title} · {view.run_id}",
        f"  {bar} {finished_steps}/{view.steps}",
        *(f"  {line}" for table in (fact_table, peaks_of(view)) if table for line in str(table).splitlines() if line),
    ]
    return "\n".join(map(visible, lines))


def facts_of(view: RunView, *extra_rows: tuple[str, str]) -> Table:
    """List what is known in words, names and values; further ones follow."""
    names = phrase.titles("columns of a run")
    running, remaining_time = view.state == "running", format_seconds(view.remaining_s)
    values = (
        view.reason,
        view.waiting,
        view.halted,
        view.starts if view.state == "queued" else "",
        view.job,
        view.last_known,
        decimal(view.losses[-1], 4) if view.losses else "",
        _speed(view),
        say(en=f"in {remaining_time}", fr=f"dans {remaining_time}") if running and view.remaining_s is not None else "",
        view.job_left if running else "",
    )
    return facts(*zip(names, values, strict=True), *extra_rows)


def _speed(view: RunView) -> str:
    if view.step_s is None:
        return ""
    if view.samples_per_s is None:
        return format_seconds(view.step_s)
    rate = f"{view.samples_per_s:.0f}"
    step = format_seconds(view.step_s)
    return say(en=f"{step}, {rate} samples/s", fr=f"{step}, {rate} échantillons/s")


def _bar_html(view: RunView) -> str:
    finished_steps = min(len(view.losses), view.steps)
    share = 100 * finished_steps / max(1, view.steps)
    label = say(en=f"{finished_steps} of {view.steps} steps", fr=f"{finished_steps} pas sur {view.steps}")
    return (
        f'<div role="progressbar" aria-valuemin="0" aria-valuemax="{view.steps}" aria-valuenow="{finished_steps}" '
        f'aria-label="{safe(label)}" style="background:{SHADE};height:0.7em;margin:0.4em 0;max-width:36em">'
        f'<div style="background:{BLUE};height:100%;width:{share:.1f}%"></div></div>'
        f'<div style="color:{STYLE_QUIET};margin-bottom:0.4em">{safe(label)}</div>'
    )


def _curve_svg(losses: Sequence[float]) -> str:
    """Draw the loss against the steps done; nothing before the second step."""
    if len(losses) < 2:
        return ""
    points = _thinned(losses)
    low, high = min(losses), max(losses)
    height, width = _HEIGHT - 2 * _BOTTOM, _WIDTH - _LEFT - 10

    def place(step: int, loss: float) -> str:
        # Pixels, counted from the top: the lowest loss lies at the bottom.
        across = step / (len(losses) - 1)
        up = (loss - low) / (high - low) if high > low else 0.5
        return f"{_LEFT + across * width:.1f},{_BOTTOM + (1 - up) * height:.1f}"

    description = phrase("curve of losses", first_loss=losses[0], last_loss=losses[-1], last_step=len(losses) - 1)
    path = " ".join(place(step, loss) for step, loss in points)
    return (
        f'<svg role="img" aria-label="{safe(description)}" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'style="width:100%;max-width:{_WIDTH}px;background:{WHITE}" xmlns="http://www.w3.org/2000/svg" '
        f'font-family="sans-serif" font-size="11">'
        f'<path d="M{_LEFT},{_BOTTOM - 6} V{_HEIGHT - _BOTTOM} H{_WIDTH - 4}" fill="none" stroke="{GREY}"/>'
        f'<polyline points="{path}" fill="none" stroke="{BLUE}" stroke-width="1.8"/>'
        f'<text x="{_LEFT - 4}" y="{_BOTTOM + 4}" text-anchor="end">{safe(significant(high))}</text>'
        f'<text x="{_LEFT - 4}" y="{_HEIGHT - _BOTTOM}" text-anchor="end">{safe(significant(low))}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 4}">0</text>'
        f'<text x="{_WIDTH - 10}" y="{_HEIGHT - 4}" text-anchor="end">{len(losses) - 1}</text>'
        f'<text x="{_LEFT + width / 2:.0f}" y="{_HEIGHT - 4}" text-anchor="middle">{safe(say(en="step", fr="pas"))}'
        f'</text><text x="{_LEFT + 6}" y="{_BOTTOM - 6}">{safe(say(en="loss", fr="perte"))}</text></svg>'
    )


def _thinned(losses: Sequence[float]) -> list[tuple[int, float]]:
    """Choose at most `CURVE_POINTS` steps, the first and the last among them."""
    stride = max(1, math.ceil(len(losses) / CURVE_POINTS))
    # Every stride-th step, and the last one in any case.
    steps = [*range(0, len(losses) - 1, stride), len(losses) - 1]
    return [(step, losses[step]) for step in steps]


def peaks_of(view: RunView) -> Table | None:
    """List the peaks of the fullest ranks beside their limit, in the order of ranks; None where none is known."""
    if not view.peaks_bytes:
        return None
    going = view.state in ("queued", "running")
    title = say(en="peak memory", fr="pic de mémoire") + (say(en=" so far", fr=" jusqu’ici") if going else "")
    notes = []
    if view.limit_bytes:  # below: a heading wraps where the panel shares a notebook's width
        notes.append(phrase("limit of a rank", view=view))
    # The longest bar is the limit, or the largest peak where that exceeds it.
    scale = max(1, view.limit_bytes or 0, *(peak for _, peak in view.peaks_bytes))
    rank_peaks = sorted(sorted(view.peaks_bytes, key=lambda pair: (-pair[1], pair[0]))[:RANKS_SHOWN])
    unshown = len(view.peaks_bytes) - len(rank_peaks)
    if unshown:
        notes.insert(0, say(en=f"and {unshown} ranks that hold less", fr=f"et {unshown} rangs moins chargés"))
    warning_fill = f"repeating-linear-gradient(45deg,{VERMILION} 0 5px,{VERMILION_TINT} 5px 8px)"
    return Table(
        ("", ""),
        tuple((say(en=f"rank {rank}", fr=f"rang {rank}"), _peak_words(view, peak)) for rank, peak in rank_peaks),
        title,
        shares=tuple(peak / scale for _, peak in rank_peaks),
        # Hatched above 90 % of the limit: seen without colours too.
        colors=tuple(
            warning_fill if view.limit_bytes and peak > 0.9 * view.limit_bytes else SKY for _, peak in rank_peaks
        ),
        notes=tuple(notes),
    )


def _peak_words(view: RunView, peak: int) -> str:
    if not view.limit_bytes:
        return format_bytes(peak)
    share = 100 * peak / view.limit_bytes
    return f"{format_bytes(peak)}, {integer(share) if share >= 1 else significant(share, 1)} %"


def _sparks(losses: Sequence[float]) -> str:
    """Draw a curve in one line of text, at most 24 characters wide."""
    stride = max(1, math.ceil(len(losses) / BAR_CHARACTERS))
    chosen = [*losses[:-1:stride], losses[-1]]
    low, high = min(losses), max(losses)
    signs = "▁▂▃▄▅▆▇█"
    heights = ((loss - low) / (high - low) if high > low else 0.0 for loss in chosen)
    drawn = "".join(signs[min(len(signs) - 1, int(height * len(signs)))] for height in heights)
    return f"{decimal(losses[0], 4)} {drawn} {decimal(losses[-1], 4)}"


STEPS_TIMED = 20
# As squeue writes the time left: [days-][hours:]minutes:seconds.
_DURATION = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")


class Tracker:
    """Incremental reader of a run's state."""

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        ranks = range(run.config.layout.world_size)
        self._halts = Halts(run.folder)
        self._tails = [EventTail(run.folder / EVENTS / f"rank-{rank}.jsonl") for rank in ranks]
        self._losses: dict[int, float] = {}
        self._peaks: dict[int, int] = {}
        self._step_s: deque[float] = deque(maxlen=STEPS_TIMED)
        self._warming_up = True
        self._starts: dict[int, list[dict[str, Any]]] = {}
        self._limit: tuple[int, str] | None = None

    def look(self) -> RunView:
        """Read the run as it is now.

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
        remaining_steps = (config.asked_steps or 0) - len(losses)
        job = read_job(self._run.folder)
        halted = self._halts.look(step_s) if state == "running" else ""
        # No end is estimated while it starts up or stands still.
        going = state == "running" and not halted and not self._warming_up
        return RunView(
            run_id=self._run.run_id,
            title=self._run.title,
            state=state,
            steps=config.asked_steps or len(losses),
            reason=record.reason if record else "",
            losses=losses,
            peaks_bytes=tuple(sorted(self._peaks.items())),
            limit_bytes=limit[0] if (limit := self._limit_of(record)) else None,
            limit_of=limit[1] if limit else "",
            step_s=step_s,
            samples_per_s=config.layout.global_batch / step_s if step_s and config.script is None else None,
            remaining_s=remaining_steps * step_s if going and step_s and remaining_steps > 0 else None,
            halted=halted,
            **(job_words(job, None if is_final(state) else view_of(job)) if job else {}),
        )

    def _take(self, rank: int, event: dict[str, Any]) -> None:
        name, step, loss, step_s = event["event"], event.get("step"), event.get("loss"), event.get("step_s")
        if name == "step" and type(step) is int and type(loss) is float and math.isfinite(loss):
            self._losses[step] = loss
            # Of rank 0 only: in every step the ranks wait for one another.
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
            peak_bytes = memory.device_bytes or memory.peak_bytes
            if peak_bytes:
                self._peaks[rank] = max(peak_bytes, self._peaks.get(rank, 0))
        elif name in ("start", "device") and rank == 0:
            self._starts.setdefault(0, []).append(event)
            # The limit is that of the machine of this attempt: it is looked up anew.
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
        """Find the limit of a rank where the run runs, once."""
        if self._limit is None and self._starts and self._peaks:
            from dlojz.compare import limit_of

            # Of a run that goes on: a record made of its first events alone knows the machine.
            so_far = record or assemble(self._run.run_id, self._run.config, self._starts, Ending("cancelled"), 0.0)
            self._limit = limit_of(so_far)
        return self._limit


def job_words(job: Job, view: JobView | None) -> dict[str, str]:
    """Describe a run's job: number, why it waits, when it starts, and whether the scheduler still answers.

    Args:
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
    """Explain a reason of the scheduler, with its own word in parentheses."""
    words = explain_reason(reason)
    return words if not reason or reason in words else f"{words} ({reason})"


def unknown_words(view: JobView) -> str:
    """Write that the scheduler does not answer: its last state of the job, how old that is, and its error."""
    if view.age_s is None:
        sentence = say(en="it has not answered yet", fr="il n’a pas encore répondu")
    else:
        ago = format_seconds(view.age_s)
        state = view.state or "?"
        sentence = say(en=f"last known, {ago} ago: {state}", fr=f"dernier état connu, il y a {ago} : {state}")
    return f"{sentence} — {view.problem}" if view.problem else sentence


def local_time(time_utc: str) -> str:
    """Convert a time of the scheduler to the clock of this machine; empty where it is none."""
    try:
        return datetime.fromisoformat(time_utc).astimezone().strftime("%Y-%m-%d %H:%M")
    except ValueError:
        return ""


def time_words(text: str) -> str:
    """Convert a duration of the scheduler (`1-02:03:04`, `59:58`) to words; unchanged where it is none."""
    match = _DURATION.fullmatch(text)
    if not match:
        return text
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    hours += 24 * days
    return f"{hours} h {minutes:02d} min" if hours else format_seconds(60 * minutes + seconds)


EVERY_S = 1.0


class RunWatch:
    """Panel of a run: a widget in a notebook, HTML where there is none, text in a terminal.

    Args:
        live: draw a widget that follows the run; by default in a notebook that somebody looks at.
        every_s: seconds between two looks, > 0.
    """

    def __init__(self, run: RunFolder, *, live: bool | None = None, every_s: float = EVERY_S) -> None:
        self.run = run
        self._tracker = Tracker(run)
        self._every_s = every_s
        self._one_at_a_time = threading.Lock()
        self._over = threading.Event()
        self._view: RunView | None = None
        self._problem = ""
        self._thread: threading.Thread | None = None
        self._places: list[str] = []
        self._placing = threading.Lock()
        self._at_end = False
        self.widget = _html_widget() if (live if live is not None else in_notebook() and wanted(None)) else None
        if self.widget is not None:
            self.widget.observe(self._closed, names="comm")
            # In the context of the cell that asks, or a notebook would not know whose output is replaced at the end.
            follow = contextvars.copy_context().run
            self._thread = threading.Thread(
                target=follow, args=(self._follow,), name=f"watch {run.run_id}", daemon=True
            )
            self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still follows the run."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Stop following; the run goes on, and what was shown last stays."""
        self._over.set()

    def html(self) -> str:
        """Show the run as it is now, as HTML, every text escaped."""
        view = self._looked()
        markup = run_html(view) if view is not None else ""
        return markup + (f'<p role="status"><b>{safe(self._problem)}</b></p>' if self._problem else "")

    def _looked(self) -> RunView | None:
        # The widget's thread and a cell may ask at once; each event is read only once.
        with self._one_at_a_time:
            try:
                self._view, self._problem = self._tracker.look(), ""
            except (LabError, OSError) as error:  # a file system that is away for a moment
                self._problem = str(error)
            return self._view

    def _follow(self) -> None:
        while not self._over.is_set():
            markup = self.html()
            # Only a change is sent to the browser.
            if self.widget is not None and self.widget.value != markup:
                self.widget.value = markup
            if self._view is not None and is_final(self._view.state) and not self._problem:
                self._settle()
                return
            self._over.wait(self._every_s)

    def _settle(self) -> None:
        """Replace every widget that was shown by static HTML."""
        with self._placing:
            # What is displayed from now on is static at once; the lock lets no display slip in between.
            self._at_end = True
            for display_id in self._places:
                _display(self._repr_mimebundle_(), display_id, update=True)

    def _closed(self, change: Any) -> None:
        # No view shows the widget any more.
        if change["new"] is None:
            self.stop()

    def __repr__(self) -> str:
        view = self._looked()
        return "\n".join([*([run_text(view)] if view else []), *([visible(self._problem)] if self._problem else [])])

    def _repr_html_(self) -> str:
        return self.html()

    def _ipython_display_(self) -> None:
        with self._placing:
            if self.widget is None or self._at_end:
                raise NotImplementedError  # IPython then asks for the bundle, as of anything that does not change
            self._places.append(uuid.uuid4().hex)
            _display(self._repr_mimebundle_(), self._places[-1])

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        bundle: dict[str, Any] = {"text/plain": repr(self), "text/html": self.html()}
        if self.widget is not None and not self._at_end:
            widget_bundle = self.widget._repr_mimebundle_()
            data = widget_bundle[0] if isinstance(widget_bundle, tuple) else widget_bundle
            bundle |= {kind: value for kind, value in (data or {}).items() if kind not in bundle}
        return bundle


def _display(bundle: dict[str, Any], display_id: str, *, update: bool = False) -> None:
    """Show a bundle under a display id, or update what was shown under it."""
    from IPython.display import display

    display(bundle, raw=True, display_id=display_id, update=update)  # type: ignore[no-untyped-call]


def _html_widget() -> Any:
    """Make an empty widget of HTML; None where ipywidgets is not installed."""
    try:
        import ipywidgets
    except ImportError:
        return None
    return ipywidgets.HTML()
