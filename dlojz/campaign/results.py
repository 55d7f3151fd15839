"""Runs of a campaign: drive its points, and judge each: what was predicted, which run stands for it, what it measured.

A campaign is run point after point here, or as job arrays through a scheduler. It can be interrupted and called again:
a finished run is found by its configuration, a queued or running one is waited for, and only what failed or was never
started is started. A point's run is found in the run folders by its configuration; neither a replayed record nor a run
made on another machine stands for it. Memory is compared on one rank, the heaviest.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from dlojz import hardware
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, colon, format_bytes, say
from dlojz.base.machine import cores_available
from dlojz.campaign.campaign import CampaignPlan, CampaignPoint
from dlojz.hardware import Device
from dlojz.results.footprint import Footprint, Memory
from dlojz.results.record import STATUSES, RunRecord
from dlojz.running.folder import DEFAULT_WORKER, read_job
from dlojz.running.run import Run
from dlojz.running.slurm.slurm_queue import explain_reason, view_of
from dlojz.running.store import REUSED, runs_of

phrase = Sentences(Path(__file__).parent / "data" / "campaign.md")

Asked = Mapping[str, str]
"""Of the scheduler: `account`, `qos` and `reservation`, as far as they are given."""
NOTHING: Asked = MappingProxyType({})
MAX_SHOWN = 80
"""Characters of a refused name that are shown."""


@dataclass(frozen=True)
class Outlook:
    """Prediction for a point.

    Args:
        rank: the one that takes most memory.
        memory: of that rank; None where it cannot be predicted.
        limit_bytes: what such a rank may take there; None where it is not known.
        communication_bytes: messages of rank 0 in one step.
        limit_name: whose limit that is.
        most_hours: what the point can cost at most: GPU-hours billed by its machine, or ranks × time limit here; None
            without a time limit.
        normalised_hours: the same as the site counts them, where it does.
        refusals: why its machine would not take it.
        note: why something is not predicted.
    """

    rank: int = 0
    memory: Memory | None = None
    limit_bytes: int | None = None
    communication_bytes: int | None = None
    limit_name: str = ""
    most_hours: float | None = None
    normalised_hours: float | None = None
    refusals: tuple[str, ...] = ()
    note: str = ""

    @property
    def taken_bytes(self) -> int | None:
        """What the rank takes: of a GPU as nvidia-smi shows it, of a CPU the largest sum of its tensors."""
        return None if self.memory is None else self.memory.needed_bytes

    @property
    def fits(self) -> bool | None:
        """Whether it stays within the limit; None where one is not known."""
        if self.taken_bytes is None or self.limit_bytes is None:
            return None
        return self.taken_bytes <= self.limit_bytes


def outlook(point: CampaignPoint, time_limit_s: float | None, scheduler_options: Asked = NOTHING) -> Outlook:
    """Predict one point; what cannot be predicted is said in the note.

    Args:
        time_limit_s: of its run, > 0.

    Raises:
        LabError: if there is no machine file of that name, or it is not legal.
    """
    from dlojz.prediction.communication import predict_communication
    from dlojz.prediction.forecast import heaviest
    from dlojz.prediction.shapes import RankPart

    base_outlook, device = _place(point, time_limit_s, scheduler_options)
    try:
        forecast = heaviest(point.config, device)
        traffic = predict_communication(RankPart(point.config))
    except LabError as error:
        # The limit, the cost and the refusals stand even where memory cannot be predicted.
        return replace(base_outlook, note=str(error))
    # Bytes that rank 0 hands to its group per step; `control` is the lab's own bookkeeping, no part of training.
    sent_bytes = sum(operation.message_bytes for operation in traffic if operation.group != "control")
    return replace(base_outlook, rank=forecast.rank, memory=forecast.memory, communication_bytes=sent_bytes)


def _place(point: CampaignPoint, time_limit_s: float | None, scheduler_options: Asked) -> tuple[Outlook, Device | None]:
    """What is known of where a point runs, and its GPU; None for a CPU."""
    ranks = point.config.layout.world_size
    if not point.machine:
        from dlojz.base.machine import rank_limit, share_words

        limit = rank_limit(ranks)
        name = share_words(limit.code, ranks)
        # rank-hours: ranks × seconds / 3600; None where there is no time limit.
        hours = time_limit_s and ranks * time_limit_s / 3600
        return Outlook(limit_bytes=limit.num_bytes, limit_name=name, most_hours=hours), None
    from dlojz.hardware.clusters import machine
    from dlojz.running.limits import JobRequest, allocate

    site = machine(point.machine)
    # The account has an ending that depends on the machine, and is checked with it in `account_of`.
    checked_options = {
        option: _named(option, value) for option, value in scheduler_options.items() if option != "account"
    }
    job_options = {**checked_options, "account": account_of(point.machine, scheduler_options)}
    granted, refusals = allocate(site, point.config, JobRequest(time_limit_s=time_limit_s, **job_options))
    factor = site.normalised_hour_factor
    gpu = None if site.device == "cpu" else hardware.device(site.device)
    base_outlook = Outlook(
        limit_bytes=gpu.memory_bytes if gpu else None,
        limit_name=gpu.title if gpu else site.name,
        most_hours=granted.gpu_hours,
        normalised_hours=None if factor is None else granted.gpu_hours * factor,
        refusals=tuple(refusals),
    )
    return base_outlook, gpu


def account_of(machine_name: str, scheduler_options: Asked) -> str:
    """Account that a machine bills; a project without an ending gets that of the machine.

    Args:
        scheduler_options: its `account`, else `$DLOJZ_ACCOUNT`; empty where neither tells one.

    Raises:
        LabError: if there is no machine file of that name, or it is not legal, or no account can have that name.
    """
    from dlojz.hardware.clusters import machine
    from dlojz.running.limits import ACCOUNT_VARIABLE

    account = scheduler_options.get("account") or os.environ.get(ACCOUNT_VARIABLE, "")
    # A name with @ has its ending already.
    ending = "" if not account or "@" in account else machine(machine_name).account_suffix
    return _named("account", account, ending)


def _named(option: str, name: str, ending: str = "") -> str:
    """What is asked of the scheduler, if it can be the name of such a thing: it is written into a job script."""
    from dlojz.hardware.clusters import NAME_PATTERN
    from dlojz.running.limits import ACCOUNT_VARIABLE

    # An empty name asks for nothing.
    if not name or re.fullmatch(NAME_PATTERN, name + ending):
        return name + ending
    short_name = name if len(name) <= MAX_SHOWN else f"{name[:MAX_SHOWN]}…"
    correct = f"--{option}" + (say(en=" or $", fr=" ou $") + ACCOUNT_VARIABLE if option == "account" else "")
    raise phrase.refused("no name of the scheduler", option=option, short_name=short_name, correct=correct)


def root_of(root: Path, machine: str) -> Path:
    """Folder of the runs of a machine; each has one, as the same run elsewhere measures something else."""
    return root / f"on-{machine}" if machine else root


WAITING, REFUSED = "waiting", "refused"
"""States of a point without a run: not started yet; refused when it was to be started."""


@dataclass(frozen=True)
class Result:
    """Result of a point: what was predicted, and what its run measured so far.

    Args:
        state: of the run; `waiting` or `refused` where there is none.
        waits_for: why its job waits, in the scheduler's own word; empty where it does not wait, or says nothing.
        predicted_samples_per_s: from a run on one process in the campaign, of the same training, or of what each
            replica does, times the replicas.
        strong_efficiency: of strong scaling: throughput per rank over that of the fewest ranks that train with the
            same global batch, fewer than its own; 1 for that base itself, None where there is no such pair.
        weak_efficiency: of weak scaling: the same with as many samples per rank in place of the same global batch.
    """

    point: CampaignPoint
    outlook: Outlook
    state: str = WAITING
    reason: str = ""
    run_id: str = ""
    record: RunRecord | None = None
    waits_for: str = ""
    predicted_samples_per_s: float | None = None
    strong_efficiency: float | None = None
    weak_efficiency: float | None = None

    @property
    def footprint(self) -> Footprint | None:
        """What the heaviest rank measured."""
        return self.record.footprint(self.outlook.rank) if self.record else None

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of a run that completed; of another it means nothing."""
        footprint = self.record.footprint() if self.record and self.record.status == "completed" else None
        return footprint.samples_per_s if footprint else None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step."""
        footprint = self.record.footprint() if self.record else None
        return footprint.phases.step_s if footprint else None

    @property
    def memory_bytes(self) -> tuple[int | None, int | None]:
        """Predicted and measured of the heaviest rank, the same quantity: of the device where both know it."""
        predicted = self.outlook.memory
        measured = self.footprint.memory if self.footprint else None
        # Compare like with like: nvidia-smi's figure where both have one, else the allocator's peaks.
        if predicted and measured and predicted.device_bytes is not None and measured.device_bytes is not None:
            return predicted.device_bytes, measured.device_bytes
        if measured is None or measured.peak_bytes is None:
            return self.outlook.taken_bytes, None
        return predicted.peak_bytes if predicted else None, measured.peak_bytes

    @property
    def communication_bytes(self) -> int | None:
        """Messages of rank 0 in one step, measured; the lab's own control traffic is left out."""
        footprint = self.record.footprint() if self.record else None
        return (
            sum(operation.message_bytes for operation in footprint.communication if operation.group != "control")
            if footprint
            else None
        )

    @property
    def rank_hours(self) -> float | None:
        """Ranks × elapsed time of the run; 0 before it has ended, None where its time is not known."""
        if self.record is None:
            return 0.0
        elapsed_s = self.record.elapsed_s
        return None if elapsed_s is None else self.point.config.layout.world_size * elapsed_s / 3600


def find_run(point: CampaignPoint, root: Path) -> Run | None:
    """Find the newest run of a point: one that needs not be repeated, else any other.

    Raises:
        LabError: if the folder of the runs cannot be read.
    """
    newest = None
    for folder, state in runs_of(point.config, root_of(root, point.machine), DEFAULT_WORKER):
        # A run that need not be repeated goes before a newer one that failed.
        if state in REUSED:
            return Run(folder)
        newest = newest or folder
    return Run(newest) if newest else None


def result_of(point: CampaignPoint, predicted: Outlook, run: Run | None) -> Result:
    """Read the result of a point from its run."""
    if run is None:
        return Result(point, predicted)
    state = run.state
    # While a run goes on there is no final record.
    record = run.record if state in STATUSES else None
    reason = record.reason if record else ""
    if state == "oom":
        reason = _does_not_fit(predicted, reason)
    waits_for = _waits_for(run) if state == "queued" else ""
    return Result(point, predicted, state, reason or explain_reason(waits_for), run.run_id, record, waits_for=waits_for)


def _waits_for(run: Run) -> str:
    """The scheduler's reason for a run that waits in its queue; it has been asked for the state just now."""
    job = read_job(run.folder)
    view = view_of(job) if job else None
    return view.reason if view and (view.standing == "pending" or view.state == "PENDING") else ""


def _does_not_fit(predicted: Outlook, reason: str) -> str:
    """Running out of memory is a result."""
    demand, limit = format_bytes(predicted.taken_bytes), format_bytes(predicted.limit_bytes)
    sentence = phrase("does not fit", demand=demand, limit=limit)
    return f"{sentence}. {reason}".strip()


def judged(results: Sequence[Result]) -> list[Result]:
    """Complete results by their neighbours: throughput predicted from one process, efficiency of the scaling."""
    predicted = _predicted_rates(results)
    strong, weak = (_efficiencies(results, predicate) for predicate in (_same_batch, _same_batch_per_rank))
    return [
        replace(
            result,
            predicted_samples_per_s=predicted.get(result.run_id),
            strong_efficiency=strong.get(result.point.number),
            weak_efficiency=weak.get(result.point.number),
        )
        for result in results
    ]


def _predicted_rates(results: Sequence[Result]) -> dict[str, float]:
    from dlojz.compare import compare

    rates: dict[str, float] = {}
    for machine in dict.fromkeys(result.point.machine for result in results):
        # Never across machines: one process elsewhere says nothing about the ranks here.
        records = [result.record for result in results if result.record and result.point.machine == machine]
        # `compare` predicts from a single process among the records.
        if any(record.config.layout.strategy == "single" for record in records) and len(records) > 1:
            for row in compare(records).rows:
                if row.samples_per_s.predicted is not None and row.world_size > 1:
                    rates[row.run_id] = row.samples_per_s.predicted
    for result in results:
        layout = result.point.config.layout
        single_process = next((candidate for candidate in results if _is_replica_of(candidate, result)), None)
        if single_process and single_process.samples_per_s and result.run_id:
            # dp replicas, each as fast as that process if communication cost nothing. `compare`'s figure goes first.
            rates.setdefault(result.run_id, single_process.samples_per_s * layout.dp)
    return rates


def _is_replica_of(single: Result, replicated: Result) -> bool:
    """Whether one process has measured just what each replica of another point does."""
    single_layout, replicated_layout = single.point.config.layout, replicated.point.config.layout
    same_work = (single_layout.micro_batch, single_layout.micro_batches, single_layout.checkpointing) == (
        replicated_layout.micro_batch,
        replicated_layout.micro_batches,
        replicated_layout.checkpointing,
    )
    # Pure data parallelism: each rank is one whole replica, and nothing lies in host memory.
    only_replicas = (
        replicated_layout.dp > 1
        and replicated_layout.dp == replicated_layout.world_size
        and replicated_layout.offload == "none"
    )
    return (
        single_layout.world_size == 1
        and same_work
        and only_replicas
        and bool(single.samples_per_s)
        and _same_training(single, replicated)
    )


def _efficiencies(results: Sequence[Result], same_series: Callable[[Result, Result], bool]) -> dict[int, float]:
    """Throughput per rank over that of the fewest ranks alike, by the point's number; 1 for a base of others.

    Args:
        same_series: whether two results belong to one series of such a scaling.
    """
    efficiencies: dict[int, float] = {}
    rated = [(result, result.samples_per_s) for result in results if result.samples_per_s]
    for result, rate in rated:
        ranks = result.point.config.layout.world_size
        smaller = [
            (candidate.point.config.layout.world_size, candidate.point.number, other_rate)
            for candidate, other_rate in rated
            if candidate.point.config.layout.world_size < ranks
            and _same_training(candidate, result)
            and same_series(candidate, result)
        ]
        if smaller:
            # The fewest ranks; of several such points, the one with the lowest number.
            base_ranks, base, base_rate = min(smaller)
            efficiencies[result.point.number] = (rate / ranks) / (base_rate / base_ranks)
            # The base itself is at 100 %.
            efficiencies.setdefault(base, 1.0)
    return efficiencies


def _same_training(result: Result, reference: Result) -> bool:
    """The same training on the same machine, but for its batch and its layout."""
    config, reference_config = result.point.config, reference.point.config
    # `steps` may differ as well: the rate of a step does not depend on how many were run.
    return result.point.machine == reference.point.machine and config.model_dump(
        exclude={"layout", "steps"}
    ) == reference_config.model_dump(exclude={"layout", "steps"})


def _same_batch(result: Result, reference: Result) -> bool:
    return result.point.config.layout.global_batch == reference.point.config.layout.global_batch


def _same_batch_per_rank(result: Result, reference: Result) -> bool:
    layout, reference_layout = result.point.config.layout, reference.point.config.layout
    # global batch / ranks, compared without a division.
    return layout.global_batch * reference_layout.world_size == reference_layout.global_batch * layout.world_size


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
