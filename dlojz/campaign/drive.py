"""Run a campaign: point after point here, or as job arrays through a scheduler.

It can be interrupted and called again: a finished run is found by its configuration, a queued or running one is waited
for, and only what failed or was never started is started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, colon, say
from dlojz.base.machine import cores_available
from dlojz.campaign.campaign import CampaignPlan
from dlojz.campaign.results import NOTHING, REFUSED, Asked, Outlook, Result, account_of, find_run, result_of, root_of
from dlojz.results.record import STATUSES
from dlojz.running.run import Run
from dlojz.running.store import REUSED

phrase = Sentences(Path(__file__).parent / "data" / "campaign.md")

Backend = Literal["local", "slurm"]
Told = Callable[[Sequence[Result]], None]
QUEUE_POLL_S = 5.0


def drive(
    plan: CampaignPlan,
    outlooks: Sequence[Outlook],
    root: Path,
    *,
    on: Backend,
    again: bool = False,
    time_limit_s: float | None = None,
    asked: Asked = NOTHING,
    on_change: Told = lambda _: None,
) -> list[Result]:
    """Run what has not been run yet and wait for all of it.

    Args:
        on_change: called with all results whenever one of them has changed.

    Raises:
        LabError: if the scheduler refuses a whole array.
        KeyboardInterrupt: on Ctrl-C; here the run under way is cancelled, jobs of a scheduler go on.
    """
    results = [Result(point, predicted) for point, predicted in zip(plan.points, outlooks, strict=True)]
    for index, result in enumerate(results):
        results[index] = result_of(result.point, result.outlook, None if again else find_run(result.point, root))
    on_change(results)
    if on == "local":
        _one_after_the_other(results, root, again, time_limit_s, on_change)
    else:
        _as_arrays(results, root, again, time_limit_s, asked, on_change)
    return results


def cancel_all(plan: CampaignPlan, root: Path) -> list[Run]:
    """Cancel every run of a campaign that is queued or running, here or in a scheduler's queue.

    Returns:
        those that were asked to stop.

    Raises:
        LabError: if one cannot be cancelled; those before it are.
    """
    active_runs = [run for point in plan.points if (run := find_run(point, root)) and run.state not in STATUSES]
    for run in active_runs:
        run.cancel()
    return active_runs


def to_do(results: Sequence[Result]) -> list[int]:
    """Indices of the points without a run that serves."""
    return [index for index, result in enumerate(results) if result.state not in REUSED]


def _one_after_the_other(
    results: list[Result], root: Path, force_new: bool, time_limit_s: float | None, on_change: Told
) -> None:
    """Never two at once: they would slow one another."""
    from dlojz.running.launch import run as launch

    for index, result in enumerate(results):
        # A queued or running one goes through `launch` too, which returns that same run; it is then waited for.
        if result.state in ("completed", "diverged", "oom") and not force_new:
            continue
        try:
            run = launch(
                result.point.config,
                on="local",
                again=force_new,
                wait=False,
                time_limit_s=time_limit_s,
                root=root_of(root, result.point.machine),
            )
        except LabError as error:  # of this point alone: the others are run all the same
            results[index] = replace(result, state=REFUSED, reason=str(error))
            on_change(results)
            continue
        run.until_end(partial(_note, results, index, run, on_change))


def _as_arrays(
    results: list[Result],
    root: Path,
    force_new: bool,
    time_limit_s: float | None,
    scheduler_options: Asked,
    on_change: Told,
) -> None:
    from dlojz.running.launch import submit_many
    from dlojz.running.slurm.slurm_job import recover

    runs: dict[int, Run] = {}
    missing = to_do(results)
    # One submission per machine: each has its own folder of runs, its own account and its own scheduler.
    for machine in dict.fromkeys(results[index].point.machine for index in missing):
        chosen = [index for index in missing if results[index].point.machine == machine]
        submitted = submit_many(
            [results[index].point.config for index in chosen],
            on="slurm",
            machine=machine,
            again=force_new,
            time_limit_s=time_limit_s,
            root=root_of(root, machine),
            account=account_of(machine, scheduler_options),
            qos=scheduler_options.get("qos", ""),
            reservation=scheduler_options.get("reservation", ""),
        )
        runs |= dict(zip(chosen, submitted, strict=True))
    for index, result in enumerate(results):
        if index not in runs and (existing_run := find_run(result.point, root)):
            runs[index] = existing_run
            recover(existing_run.folder)  # who sent it may have died before the number was written down
    while True:
        # Runs that were there already are followed like those just sent.
        for index, run in runs.items():
            _note(results, index, run, on_change)
        if all(results[index].state in STATUSES for index in runs):
            return
        time.sleep(QUEUE_POLL_S)


def _note(results: list[Result], index: int, run: Run, on_change: Told, _: str = "") -> None:
    """Keep what has changed, and tell it."""
    new_result = result_of(results[index].point, results[index].outlook, run)
    before = results[index]
    # While a run goes on, all else in its result stays as it is: the record is read once the run has ended.
    if (new_result.state, new_result.run_id, new_result.waits_for) != (before.state, before.run_id, before.waits_for):
        results[index] = new_result
        on_change(results)


def unfit_backend(plan: CampaignPlan, on: Backend) -> str:
    """Say why a plan cannot be run on a backend; empty where it can."""
    from dlojz.running.launch import MAX_RANKS_PER_CORE

    machines = list(dict.fromkeys(point.machine for point in plan.points))
    if on == "slurm":
        if "" not in machines:
            return ""
        return phrase("no machine")
    if machines != [""]:
        return phrase("campaign of another machine", machines=", ".join(filter(None, machines)))
    # All ranks share this machine's cores.
    max_ranks = MAX_RANKS_PER_CORE * cores_available()
    large = [point for point in plan.points if point.config.layout.world_size > max_ranks]
    if not large:
        return ""
    oversized_points = say(en="; ", fr=" ; ").join(
        f"{point.number} ({point.label}){colon()}{point.config.layout.world_size}" for point in large
    )
    return phrase(
        "too many processes here", cores=cores_available(), max_ranks=max_ranks, oversized_points=oversized_points
    )
