"""Handle of one run, and the list of all of them.

A `Run` keeps nothing that its folder does not hold: it can be made again after a kernel restart. A damaged folder never
hinders the listing of the others.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, Self

import psutil

from dlojz.base.display_hook import wanted
from dlojz.base.errors import LabError
from dlojz.base.language import decimal, format_seconds, say
from dlojz.base.table import Table, Tabular, facts
from dlojz.display.tables import status_label
from dlojz.models.foreign.elsewhere import executing_no_file
from dlojz.results.footprint import Footprint
from dlojz.running.folder import MAX_LOG_BYTES, read_job, read_owner, read_tail
from dlojz.running.run_view import ProgressBar, phrase, print_on_stderr
from dlojz.running.slurm.slurm_queue import cancel
from dlojz.running.state import CANCEL, LOGS, RunFolder, is_final
from dlojz.running.store import run_folder, run_ids, runs_root

if TYPE_CHECKING:
    from dlojz.compare import Comparison
    from dlojz.display.canvas import LabFigure
    from dlojz.running.failures.diagnosis import Diagnosis
    from dlojz.running.run_view import RunWatch
    from dlojz.train.checkpoint_files import Checkpoint

_POLL_S, _JOB_POLL_S = 0.2, 1.0
_SETTLE_S = 30.0


@contextlib.contextmanager
def _interruptions() -> Iterator[Callable[[], bool]]:
    """Note each Ctrl-C: a KeyboardInterrupt that is raised while Python collects garbage is dropped, and lost."""
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        noted.append(number)
        signal.default_int_handler(number, frame)

    # Python runs signal handlers in the main thread only, and another handler than Python's is the user's own.
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(noted)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Run(RunFolder, Tabular):
    """Handle of one run.

    Raises:
        LabError: if the folder holds neither a readable configuration nor a readable record.
    """

    @property
    def predicted(self) -> Footprint:
        """Footprint predicted for rank 0."""
        from dlojz.prediction import predict

        with executing_no_file():
            footprint: Footprint = predict(self.config)
        return footprint

    def compare(self) -> Comparison:
        """Compare the measurement with the prediction."""
        from dlojz.compare import compare

        return compare([self])

    def overlay(self, path: str | Path | None = None, step: int | None = None) -> LabFigure:
        """Draw a pipeline's measured step under its simulation; `dlojz.compare.overlay_of` gives the figures.

        Args:
            step: one of the steps kept; by default the one of median length.

        Raises:
            LabError: if the run has not ended, is no pipeline, or did not time that step.
        """
        from dlojz.display.figures.partition_figures import overlay_figure_of

        if self.record is None:
            raise LabError(f"the run {self.run_id} has not ended: follow it with follow(), then call overlay().")
        return overlay_figure_of(self.record, path, step)

    def wait(self, timeout_s: float | None = None) -> Self:
        """Wait for the end, without a bar.

        Raises:
            LabError: if it has not ended after `timeout_s` seconds; the run goes on.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not is_final(state := self.state):
            if deadline is not None and time.monotonic() >= deadline:
                raise LabError(
                    f"the run {self.run_id} is still {state} after {format_seconds(timeout_s)}: wait "
                    "longer, or stop it with cancel()."
                )
            time.sleep(self._poll_s)
        return self

    @property
    def _poll_s(self) -> float:
        """Seconds between two looks, longer for a job of a scheduler."""
        return _POLL_S if read_job(self.folder) is None else _JOB_POLL_S

    def watch(self) -> RunWatch:
        """Watch the run while the kernel stays free: state, why it waits, progress, loss, memory, estimated end.

        Returns:
            a widget that follows the run in a notebook, the run as it is now elsewhere.
        """
        from dlojz.running.run_view import RunWatch

        return RunWatch(self)

    def follow(self, progress: bool | None = None) -> Self:
        """Follow the run with a progress bar until it ends; Ctrl-C cancels it and keeps what was measured.

        Where no step ends for long, it says who misses which collective, and where each rank stands in the script.

        Args:
            progress: True or False for a bar or none; by default a bar where somebody looks.

        Raises:
            KeyboardInterrupt: on Ctrl-C, once the run is cancelled.
        """
        if is_final(self.state):
            return self
        bar = ProgressBar(self.folder, self.config, enabled=wanted(progress))
        return self.until_end(bar.update, bar.close, bar.tell)

    def until_end(
        self,
        on_state: Callable[[str], object],
        close: Callable[[], object] = lambda: None,
        tell: Callable[[str], object] = print_on_stderr,
    ) -> Self:
        """Look at the run again and again until it ends; Ctrl-C cancels it and keeps what was measured.

        Args:
            on_state: called with its state, the last time with its end.
            close: called when nothing more is looked at.
            tell: called with what a run stands still for, where no step ends for long; by default it is printed.

        Raises:
            KeyboardInterrupt: on Ctrl-C, once the run is cancelled.
        """
        from dlojz.running.failures.diagnosis import StandstillReport

        interrupted: Callable[[], bool] = bool
        report = StandstillReport(self.folder, tell)
        try:
            with _interruptions() as interrupted, contextlib.ExitStack() as at_end:
                at_end.callback(close)
                while True:
                    if interrupted():
                        raise KeyboardInterrupt
                    state = self.state
                    on_state(state)
                    report.look(state)
                    if is_final(state):
                        return self
                    time.sleep(self._poll_s)
        except (KeyboardInterrupt, OSError) as error:
            # What is drawn on a terminal that has hung up raises too.
            if isinstance(error, KeyboardInterrupt) or interrupted():
                self.cancel()
                with contextlib.suppress(OSError):
                    self._settle()
            raise

    def _settle(self) -> None:
        """Wait for a cancelled run to write its record, then print what is kept."""
        try:
            self.wait(_SETTLE_S)
        except LabError as error:
            print(error, file=sys.stderr)
            return
        steps = self.num_steps
        print(phrase("cancelled and kept", run_id=self.run_id, state=self.state, steps=steps), file=sys.stderr)

    def cancel(self) -> str:
        """Ask the launcher, or the scheduler, to stop the run; a run that has ended stays as it is.

        Returns:
            one sentence on what was done.

        Raises:
            LabError: if the request cannot be written, or the scheduler refuses it.
        """
        state = self.state
        if is_final(state):
            return phrase("ended already", run_id=self.run_id, state=state)
        try:
            # `supervisor.Stop` polls for this file.
            (self.folder / CANCEL).touch()
        except OSError as error:
            raise LabError(f"the run {self.run_id} cannot be cancelled: {error.strerror}.") from None
        job = read_job(self.folder)
        if job is not None:
            cancel(job)
        owner = read_owner(self.folder)
        if job is None and owner is not None and owner.is_stopped(self.folder):
            # A stopped launcher polls nothing; once continued it finds the request.
            os.kill(owner.pid, signal.SIGCONT)
            return phrase("stopped launcher asked to stop", run_id=self.run_id)
        return phrase("asked to stop", run_id=self.run_id)

    def logs(self, rank: int | None = None) -> str:
        """Read the end of the logs, at most 64 KB, control characters made visible.

        Args:
            rank: one rank; by default the launcher, the scheduler's job and all ranks, one after the other.

        Raises:
            LabError: if the run has no such rank.
        """
        world_size = self.config.layout.world_size
        if rank is not None:
            if not 0 <= rank < world_size:
                raise LabError(f"the run {self.run_id} has ranks 0 to {world_size - 1}, but rank {rank} was received.")
            return read_tail(self.folder / LOGS / f"rank-{rank}.log")
        names = ["launcher", "slurm", *(f"rank-{rank}" for rank in range(world_size))]
        share = MAX_LOG_BYTES // len(names) - 32  # of each, with its name
        tails = {name: read_tail(self.folder / LOGS / f"{name}.log", share) for name in names}
        return "\n".join(f"── {name} ──\n{tail.rstrip()}" for name, tail in tails.items() if tail)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Checkpoints from which the run can go on, the newest first."""
        from dlojz.train.checkpoint_files import listing

        return listing(self.folder)

    def diagnosis(self) -> Diagnosis:
        """Diagnose what went wrong, rank by rank, and what to do about it."""
        from dlojz.running.failures.diagnosis import diagnose

        return diagnose(self)

    def diff(self, exercise: str | None = None) -> object:
        """Show the student's code beside the solution, for one exercise of the lab that is open.

        Args:
            exercise: id, as in `lab.check("attention", …)`; by default the last one checked before this run was asked
                for, else the last one checked.

        Raises:
            LabError: if no lab is open, none of its exercises has been checked yet, or there is none of this name.
        """
        if not _ANSWERS:
            raise phrase.refused("no lab open")
        return _ANSWERS[0](self, exercise)

    def table(self) -> Table:
        """Lay out its state: names and values."""
        losses, record = self.losses, self.record
        step_total = f"/{self.config.asked_steps}" if self.config.asked_steps else ""
        loss = say(en="loss", fr="perte")
        progress = f"{self.num_steps}{step_total}, {loss} {decimal(losses[-1], 4)}" if losses else ""
        state = status_label(self.state)
        names = phrase.titles("columns of one run")
        ended = (record.reason, record.replayed_from) if record else ("", "")
        return facts(*zip(names, (self.run_id, self.config.title, state, progress, *ended), strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.folder == other.folder

    def __hash__(self) -> int:
        return hash(self.folder)


class Survey(NamedTuple):
    """Runs of a root: those that can be read, newest first, and by name why the others cannot."""

    good: list[Run]
    bad: dict[str, str]


def survey(root: str | os.PathLike[str] | None = None) -> Survey:
    """Read every run folder; list the damaged ones with their reasons.

    Raises:
        LabError: if the root itself cannot be read.
    """
    base = runs_root(root)
    good, bad = [], {}
    for run_id in run_ids(base):
        try:
            run = Run(run_folder(base, run_id))
            _ = run.state  # which sets a damaged record aside and rebuilds it
            good.append(run)
        except (LabError, OSError) as error:
            bad[run_id] = str(error)
    return Survey(good, bad)


def runs(root: str | os.PathLike[str] | None = None) -> list[Run]:
    """List all runs that can be read, newest first; name the others on stderr.

    Raises:
        LabError: if the root itself cannot be read.
    """
    good, bad = survey(root)
    for run_id, reason in bad.items():
        left_out = say(en=f"{run_id} is left out: {reason}", fr=f"{run_id} est laissée de côté : {reason}")
        print(left_out, file=sys.stderr)
    return good


def find(run_id: str, root: str | os.PathLike[str] | None = None) -> Run:
    """Find a run by its name, by the beginning of its name, or by its folder.

    Raises:
        LabError: if there is none, or more than one, with the nearest names.
    """
    base = runs_root(root)
    names = run_ids(base)
    if os.sep in run_id and Path(run_id).expanduser().resolve().parent == base.resolve():
        run_id = Path(run_id).name
    # A name in full, even where others begin with it.
    matching = [run_id] if run_id in names else [name for name in names if run_id and name.startswith(run_id)]
    if len(matching) == 1:
        return Run(run_folder(base, matching[0]))
    if matching:
        examples = ", ".join(matching[:5])
        raise phrase.refused("several runs of that name", run_id=run_id, matching=len(matching), examples=examples)
    # Without any that is near, the newest.
    close = difflib.get_close_matches(run_id, names, n=3, cutoff=0.3) or names[:3]
    nearest = ", ".join(close)
    if close:
        raise phrase.refused("no run of that name", run_id=run_id[:100], nearest=nearest)
    raise phrase.refused("no run yet", run_id=run_id[:100], base=base)


_LAUNCHER_LOG = re.compile(r"/([^/]+)/logs/launcher\.log(?: \(deleted\))?$")


def cancel_lost(run_id: str) -> str | None:
    """Stop the run of this name, or beginning of a name, whose folder is not among the runs any more.

    Its launcher is known by the log that it has open; only processes of this user on this machine are looked at.

    Returns:
        one sentence on what was done; None where there is no such run, or more than one.
    """
    launcher_pids: dict[str, int] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(OSError, psutil.Error):
            # Descriptor 1 of a launcher is its log; the kernel keeps its path up to date when the folder is moved.
            log = _LAUNCHER_LOG.search(str(Path(f"/proc/{process.pid}/fd/1").readlink()))
            if log and run_id and log[1].startswith(run_id) and os.getsid(process.pid) == process.pid:
                launcher_pids[log[1]] = process.pid
    if len(launcher_pids) != 1:
        return None
    ((name, pid),) = launcher_pids.items()
    os.kill(pid, signal.SIGTERM)
    # A launcher that is stopped handles SIGTERM only once it goes on.
    os.kill(pid, signal.SIGCONT)
    return phrase("lost run asked to stop", name=name)


Answer = Callable[["Run", str | None], object]
_ANSWERS: list[Answer] = []


def answer_with(answer: Answer | None) -> None:
    """Register what `Run.diff` shows, or nothing; the labs, which stand above this room, do so when one is opened.

    Args:
        answer: called with a run and the id of an exercise, or None for the exercise that the run belongs to.
    """
    _ANSWERS[:] = [answer] if answer is not None else []
