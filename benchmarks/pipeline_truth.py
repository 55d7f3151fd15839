"""Simulated against executed: how far a schedule's predicted step is from the measured one, on real ranks.

    python benchmarks/pipeline_truth.py [--ranks 2 4] [--milliseconds 20] [--steps 5]

Stages sleep for a known time in forward, in backward for the input and in backward for the weights, so that the ranks
do not share cores and only the runtimes' own overhead and the messages are left to be explained. Each schedule is
executed by the lab's teaching runtime and by torch's; its step is predicted twice: from the times asked for, and from
the measured means of its actions. One table, medians over the steps; the last line is the median over all.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.models.blocks import BlockList
from dlojz.pipeline.runtime import PipelineRuntime, boundaries_of, stage_modules
from dlojz.pipeline.schedule import Action, Costs, Schedule
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import calibrated, measured_timeline, simulate
from dlojz.processes.forks import spmd
from dlojz.results.record import Span

SCHEDULES = (("gpipe", None), ("1f1b", None), ("interleaved", 2), ("zb-h1", None), ("zb-v", None))
WIDTH, SAMPLES = 8, 2


class _SleepInBackward(torch.autograd.Function):
    """The tensor itself, whose gradient takes its time: autograd passes here only where that gradient is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class SleepingBlock(nn.Module):
    """One stage's work: F, I and W seconds. A first stage owes nobody a gradient, so its I takes no time."""

    def __init__(self, times_s: tuple[float, float, float]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))
        self.times_s = times_s

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.times_s[0])
        entered = _SleepInBackward.apply(x, self.times_s[1])
        return entered @ _SleepInBackward.apply(self.weight, self.times_s[2])  # type: ignore[no-any-return]


def execute(schedule: Schedule, rank: int, runtime: str, times_s: tuple[float, float, float], steps: int) -> list[Any]:
    """Spans of this rank: [step, action, start, end]."""
    stages = stage_modules(
        BlockList(SleepingBlock(times_s) for _ in range(schedule.stages)), range(schedule.stages + 1)
    )
    inputs = [torch.ones(SAMPLES, WIDTH) for _ in range(schedule.micro_batches)]
    for stage in stages:
        for block in stage.blocks:
            block.times_s = (0.0, 0.0, 0.0)
    boundaries = boundaries_of(stages, inputs[0])
    for stage in stages:
        for block in stage.blocks:
            block.times_s = times_s
    mine = {(0, s): stages[s] for s, holder in enumerate(schedule.placement[0]) if holder == rank}
    spans: list[Any] = []
    step = 0

    def perform(action: Action, compute: Any) -> None:
        start_s = time.perf_counter()
        compute()
        spans.append([step, str(action), start_s, time.perf_counter()])

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().mean()

    if runtime == "by hand":
        own = PipelineRuntime(schedule, mine, boundaries, loss, perform=perform)
        run = lambda: own.step(inputs, inputs)  # noqa: E731
    else:
        run = _torch_runner(schedule, mine, boundaries, loss, inputs, perform)
    for step in range(steps):  # noqa: B007 - `perform` reads it
        dist.barrier()
        run()
    return spans


def _torch_runner(schedule: Schedule, mine: Any, boundaries: Any, loss: Any, inputs: Any, perform: Any) -> Any:
    from torch.distributed.pipelining import PipelineStage

    from dlojz.train.engines.pipeline_engines import observe, torch_schedule

    made = []
    for (_, stage), module in sorted(mine.items()):
        enters, leaves = (torch.empty(b.shape, dtype=b.dtype, device="meta") for b in boundaries[stage : stage + 2])
        one = PipelineStage(
            module,
            stage,
            schedule.stages,
            torch.device("cpu"),
            input_args=(enters.requires_grad_(stage > 0),),
            output_args=(leaves.requires_grad_(),),
        )
        observe(one, stage, SimpleNamespace(perform=perform))
        made.append(one)
    theirs = torch_schedule(schedule, made, loss)
    held = {stage for _, stage in mine}
    given = (torch.cat(inputs),) if 0 in held else ()
    asked = {"target": torch.cat(inputs)} if schedule.stages - 1 in held else {}
    return lambda: theirs.step(*given, **asked, return_outputs=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--milliseconds", type=float, default=20.0, help="forward of one micro-batch on one rank")
    parser.add_argument("--steps", type=int, default=5)
    given = parser.parse_args()
    errors: dict[str, list[float]] = {"asked": [], "calibrated": []}
    print("ranks  m  schedule       runtime   measured ms  from times asked    from measured means   bubble meas/pred")
    for ranks in given.ranks:
        for name, chunks in SCHEDULES:
            schedule = build(name, ranks, 2 * ranks, chunks=chunks)
            per_stage_s = given.milliseconds / 1e3 / schedule.chunks
            times_s = (per_stage_s, per_stage_s, per_stage_s)
            for_input = (0.0, *[per_stage_s] * (schedule.stages - 1))
            asked = simulate(schedule, Costs(per_stage_s, for_input, per_stage_s)).makespan
            for runtime in ("by hand", "torch"):
                answers = spmd(
                    lambda rank, size: execute(schedule, rank, runtime, times_s, given.steps + 1),  # noqa: B023
                    ranks,
                    wall_s=300,
                    limit_s=120,
                )
                failed = next((a.error for a in answers if a.error), None)
                if failed is not None:
                    raise SystemExit(f"{name} with {runtime} on {ranks} ranks: {failed.message}")
                spans = [
                    Span(rank=a.rank, step=step, phase="", start_s=start, end_s=end, action=action)
                    for a in answers
                    for step, action, start, end in a.value
                ]
                steps = [measured_timeline(schedule, spans, step) for step in range(1, given.steps + 1)]
                predicted = simulate(schedule, calibrated(steps))
                measured_s = statistics.median(step.makespan for step in steps)
                off = {"asked": asked / measured_s - 1, "calibrated": predicted.makespan / measured_s - 1}
                for key, value in off.items():
                    errors[key].append(abs(value))
                bubble = statistics.median(step.bubble_fraction for step in steps)
                print(
                    f"{ranks:5d} {schedule.micro_batches:2d}  {name:14s} {runtime:8s} {1e3 * measured_s:10.1f}   "
                    f"{1e3 * asked:8.1f} ({off['asked']:+6.1%})   {1e3 * predicted.makespan:10.1f} "
                    f"({off['calibrated']:+6.1%})      {bubble:.3f} / {predicted.bubble_fraction:.3f}",
                    flush=True,
                )
    told = ", ".join(f"{key} {statistics.median(values):.1%}" for key, values in errors.items())
    print(f"median |predicted − measured| / measured: {told}; worst calibrated {max(errors['calibrated']):.1%}")


if __name__ == "__main__":
    main()
