"""`Run`: what a student holds of a run, now, after a kernel restart, or next week.

Layer 5. Invariant: a `Run` keeps nothing that its folder does not tell; any number of them may stand for one run.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dlojz.config import RunConfig
from dlojz.footprint import Footprint
from dlojz.record import ExpertLoad, RunRecord
from dlojz.runs.assemble import losses_of
from dlojz.runs.expert_loads import loads_of
from dlojz.runs.job import read_job
from dlojz.runs.logs import read_tail, read_tails
from dlojz.runs.progress import Progress, wanted
from dlojz.runs.scheduler import cancel
from dlojz.runs.state import CANCEL, LOGS, State, is_final, look, read_all_events, read_config
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_seconds

if TYPE_CHECKING:
    from dlojz.checkpoint import Checkpoint
    from dlojz.comparison import Comparison
    from dlojz.runs.diagnosis import Diagnosis
    from dlojz.runs.watching import Watch
    from dlojz.viz.canvas import LabFigure

_POLL_S, _JOB_POLL_S = 0.2, 1.0
_SETTLE_S = 30.0


class Run:
    """One run, by its folder.

    Args:
        folder: run folder.

    Raises:
        LabError: if the folder holds neither a readable configuration nor a readable record.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._record: RunRecord | None = None
        try:
            self._config = read_config(folder)
        except LabError:
            self._record = look(folder)[1]
            if self._record is None:
                raise
            self._config = self._record.config

    @property
    def run_id(self) -> str:
        """Name of the run, which is the name of its folder."""
        return self.folder.name

    @property
    def config(self) -> RunConfig:
        """What was asked."""
        return self._config

    @property
    def title(self) -> str:
        """What was asked, as tables name it; a replayed run says that it is one."""
        return self.record.title if self.record else self._config.title

    @property
    def state(self) -> State:
        """`queued`, `running`, or how it ended: completed, oom, timeout, cancelled, failed, diverged."""
        if self._record is not None:
            return self._record.status
        state, self._record = look(self.folder)
        return state

    @property
    def record(self) -> RunRecord | None:
        """What was measured; None until the run has ended."""
        return self._record if is_final(self.state) else None

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of every finished step so far."""
        return self.record.losses if self.record else losses_of(read_all_events(self.folder))

    @property
    def expert_loads(self) -> tuple[ExpertLoad, ...]:
        """What each mixture of experts did with the tokens of every finished step so far; empty without experts."""
        return self.record.expert_loads if self.record else loads_of(read_all_events(self.folder))

    @property
    def predicted(self) -> Footprint:
        """What rank 0 was predicted to cost."""
        from dlojz.predict import predict

        footprint: Footprint = predict(self.config)
        return footprint

    def compare(self) -> Comparison:
        """The measurement laid over the prediction."""
        from dlojz.compare import compare

        return compare([self])

    def overlay(self, path: str | Path | None = None, step: int | None = None) -> LabFigure:
        """A pipeline's measured step under its simulation, as a figure; `dlojz.overlay.overlay_of` gives the figures.

        Args:
            path: picture to write, if any.
            step: one of the steps kept; by default the one of median length.

        Raises:
            LabError: if the run has not ended, is no pipeline, or did not time that step.
        """
        from dlojz.overlay import overlay_figure_of

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
        """Seconds between two looks: what a scheduler says does not change five times a second."""
        return _POLL_S if read_job(self.folder) is None else _JOB_POLL_S

    def watch(self) -> Watch:
        """Watch the run while the kernel stays free: state, why it waits, progress, loss, memory, estimated end.

        Returns:
            what shows itself: a widget that follows the run in a notebook, the run as it is now elsewhere.
        """
        from dlojz.runs.watching import Watch

        return Watch(self)

    def follow(self, progress: bool | None = None) -> Self:
        """Follow the run with a progress bar until it ends; Ctrl-C cancels it and keeps what was measured.

        Args:
            progress: True or False for a bar or none; by default a bar where somebody looks.

        Raises:
            KeyboardInterrupt: on Ctrl-C, once the run is cancelled.
        """
        if is_final(self.state):
            return self
        try:
            with Progress(self.folder, self.config, shown=wanted(progress)) as bar:
                while True:
                    state = self.state
                    bar.update(state)
                    if is_final(state):
                        return self
                    time.sleep(self._poll_s)
        except KeyboardInterrupt:
            self.cancel()
            self._settle()
            raise

    def _settle(self) -> None:
        """Wait for a cancelled run to write its record, then say what is kept."""
        try:
            self.wait(_SETTLE_S)
        except LabError as error:
            print(error, file=sys.stderr)
            return
        steps = len(self.losses)
        print(
            say(
                en=f"{self.run_id}: {self.state} after {steps} steps; all that was measured is kept.",
                fr=f"{self.run_id} : {self.state} après {steps} pas ; tout ce qui a été mesuré est conservé.",
            ),
            file=sys.stderr,
        )

    def cancel(self) -> str:
        """Ask the launcher, or the scheduler, to stop the run; on a run that has ended this changes nothing.

        Returns:
            one sentence that says what was done.

        Raises:
            LabError: if the request cannot be written, or the scheduler refuses it.
        """
        state = self.state
        if is_final(state):
            return say(
                en=f"the run {self.run_id} has ended already ({state}): there is nothing to cancel.",
                fr=f"l’exécution {self.run_id} est déjà terminée ({state}) : il n’y a rien à annuler.",
            )
        try:
            (self.folder / CANCEL).touch()
        except OSError as error:
            raise LabError(f"the run {self.run_id} cannot be cancelled: {error.strerror}.") from None
        job = read_job(self.folder)
        if job is not None:
            cancel(job)
        return say(
            en=f"the run {self.run_id} is asked to stop; what has been measured is kept.",
            fr=f"l’arrêt de l’exécution {self.run_id} est demandé ; ce qui a été mesuré est conservé.",
        )

    def logs(self, rank: int | None = None) -> str:
        """The end of what was printed, at most 64 KB, control characters made visible.

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
        return read_tails(self.folder / LOGS, ["launcher", "slurm", *(f"rank-{rank}" for rank in range(world_size))])

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The checkpoints that it can go on from, the newest first."""
        from dlojz.checkpoint import listing

        return listing(self.folder)

    def diagnosis(self) -> Diagnosis:
        """What went wrong, rank by rank, and what to do about it; of a run that goes well, that it does."""
        from dlojz.runs.diagnosis import diagnose

        return diagnose(self)

    def diff(self, exercise: str | None = None) -> object:
        """The student's code beside the solution, for one exercise of the lab that is open.

        Args:
            exercise: id, as in `lab.check("attention", …)`; by default the last one checked before this run was asked
                for, else the last one checked.

        Raises:
            LabError: if no lab is open, none of its exercises has been checked yet, or there is none of this name.
        """
        from dlojz.runs.student_code import beside_the_solution

        return beside_the_solution(self, exercise)

    def _lines(self) -> list[tuple[str, str]]:
        """What there is to say of this run, as pairs of name and value."""
        state, losses = self.state, self.losses
        lines = [
            ("run", self.run_id),
            (say(en="asked", fr="demandé"), self.config.title),
            (say(en="state", fr="état"), state),
        ]
        if losses:
            lines.append((say(en="steps", fr="pas"), f"{len(losses)}/{self.config.steps}, loss {losses[-1]:.4f}"))
        if self.record and self.record.reason:
            lines.append((say(en="why", fr="raison"), self.record.reason))
        if self.record and self.record.replayed_from:
            lines.append((say(en="replayed", fr="rejouée"), self.record.replayed_from))
        return lines

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self._lines())

    def _repr_html_(self) -> str:
        from dlojz.viz.markup import safe

        rows = "".join(
            f"<tr><th style='text-align:left'>{safe(name)}</th><td style='text-align:left'>{safe(value)}</td></tr>"
            for name, value in self._lines()
        )
        return f"<table>{rows}</table>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.folder == other.folder

    def __hash__(self) -> int:
        return hash(self.folder)
