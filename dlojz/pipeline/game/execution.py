"""Execute a schedule that was built by hand on ranks of this machine, and time its actions.

Every rank is a process of its own, forked from one that has imported torch; each stage is a chain of linear layers,
as many as its forward takes units of time, so that uneven stages are uneven here too. The runtime is the package's own
(`dlojz.pipeline.runtime`), whose actions are the schedule's.

    python -m dlojz.pipeline.game.execution < REQUEST      # JSON on stdin, JSON lines on stdout

A server with threads starts it so, as a process of its own: forking from threads is not safe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any

from dlojz.base.errors import LabError
from dlojz.base.language import language
from dlojz.base.machine import PARENT_VARIABLE, die_with_parent
from dlojz.pipeline.exchange_formats import from_csv, to_csv
from dlojz.pipeline.game.position import sentence
from dlojz.pipeline.schedule import Action, Costs, Schedule
from dlojz.pipeline.simulator import MeasuredOverlay, overlay
from dlojz.results.record import Span

if TYPE_CHECKING:
    from torch import Tensor

STEPS, WARM_UP_STEPS = 3, 1
"""Steps that are timed, and before them those in which memory is allocated and connections are made."""
WIDTH, SAMPLES = 512, 128
"""Features of a layer and samples of a micro-batch: some milliseconds for a forward of one layer on one core."""
WALL_S = 600.0
"""Seconds after which a run is stopped."""


def layers_of(costs: Costs, stages: int) -> list[int]:
    """Choose how many layers each stage has: in proportion to the times of the forwards, one at least."""
    times = costs.per_stage("forward", stages)
    return [max(1, round(time_units / min(times))) for time_units in times]


class ScheduleExecution:
    """Execution of a schedule in a process of its own; the caller goes on meanwhile.

    Args:
        schedule: complete and valid.
        costs: their forwards say how long the stages are beside one another.
    """

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.schedule = schedule
        self.progress = sentence("ranks_start")
        self._spans: list[Span] = []
        self._error = ""
        request = {"csv": to_csv(schedule), "layers": layers_of(costs, schedule.stages)}
        environment = {**os.environ, "DLOJZ_LANG": language(), PARENT_VARIABLE: str(os.getpid())}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "dlojz.pipeline.game.execution"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            # Ctrl-C in the terminal is for the server, which stops this process itself.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request))
        self._process.stdin.close()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def is_running(self) -> bool:
        """Whether the ranks still run."""
        return self._reader.is_alive()

    def stop(self) -> None:
        """End the ranks."""
        self._process.kill()
        self._process.wait()

    def overlay(self) -> MeasuredOverlay:
        """Return the measured step of median length with its simulation, after the end.

        Raises:
            LabError: if a rank failed, with the reason.
        """
        self._reader.join()
        if self._error or not self._spans:
            raise LabError(sentence("run_failed", reason=self._error or sentence("ended_early")))
        return overlay(self.schedule, self._spans)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            message = json.loads(line)
            self.progress = message.get("progress", self.progress)
            self._error = message.get("error", self._error)
            self._spans += [Span(**span) for span in message.get("spans", ())]
        self._process.wait()


def timed_spans(schedule: Schedule, layers: Sequence[int], rank: int, report: Callable[[int], None]) -> list[Span]:
    """Run the steps on one rank of a process group, and time each action.

    Args:
        layers: of each stage.
        report: is called with the number of each step, from 1, as it begins.
    """
    import torch
    import torch.distributed as dist

    from dlojz.models.blocks import BlockList
    from dlojz.pipeline.runtime import Boundary, PipelineRuntime, stage_modules

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.GELU()) for _ in range(sum(layers))]
    bounds = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
    stages = stage_modules(BlockList(blocks), bounds)
    inputs = [torch.randn(SAMPLES, WIDTH) for _ in range(schedule.micro_batches)]
    spans: list[Span] = []
    step, start_s = 0, 0.0

    def perform(action: Action, compute: Callable[[], None]) -> None:
        begin_s = time.monotonic()
        compute()
        times = {"start_s": begin_s - start_s, "end_s": time.monotonic() - start_s}
        spans.append(Span(rank=rank, step=step, phase="pipeline", action=str(action), **times))

    def mean_square(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    runtime = PipelineRuntime(
        schedule,
        {
            (pipe, stage): stages[stage]
            for pipe, ranks in enumerate(schedule.placement)
            for stage, holder in enumerate(ranks)
            if holder == rank
        },
        [Boundary((SAMPLES, WIDTH), torch.float32)] * (schedule.stages + 1),
        mean_square,
        perform=perform,
    )
    for number in range(WARM_UP_STEPS + STEPS):
        step = number
        report(number + 1)
        # All ranks begin a step together; the clock is the machine's, so it is the same on all of them.
        dist.barrier()
        start_s = time.monotonic()
        runtime.step(inputs, inputs)
    return [span for span in spans if span.step >= WARM_UP_STEPS]


def _main(source: IO[str]) -> None:
    from dlojz.processes.forks import first_failure, spmd

    die_with_parent()
    request = json.load(source)
    schedule, layers = from_csv(request["csv"]), [int(number) for number in request["layers"]]
    total = WARM_UP_STEPS + STEPS

    def report(number: int) -> None:
        _write({"progress": sentence("step_of", number=number, total=total)})

    def work(rank: int, size: int) -> list[dict[str, Any]]:
        # The first rank speaks for all.
        spans = timed_spans(schedule, layers, rank, report if rank == 0 else lambda number: None)
        return [span.model_dump() for span in spans]

    answers = spmd(work, schedule.ranks, wall_s=WALL_S, limit_s=WALL_S)
    failure = first_failure(answers)
    if failure:
        _write({"error": sentence("rank_failed", rank=failure[0], reason=failure[1])})
        return
    for answer in answers:
        _write({"spans": answer.value})


def _write(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        _main(sys.stdin)
    except LabError as refused:
        _write({"error": str(refused)})
