"""What a campaign knows of each point: what was predicted, which run stands for it, what that run measured.

Layer 6. Invariant: the run folders are the only truth; a point's run is found by its configuration, and neither a
replayed record nor a run made on another machine stands for it. What is compared is of one rank: the heaviest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlojz.campaign.outlook import Outlook, root_of
from dlojz.campaign.plan import Point
from dlojz.footprint import Footprint
from dlojz.record import STATUSES, RunRecord
from dlojz.runs import Run
from dlojz.runs.job import read_job
from dlojz.runs.owner import DEFAULT_WORKER, read_owner
from dlojz.runs.reasons import explain_reason
from dlojz.runs.scheduler import view_of
from dlojz.runs.store import REUSED, run_folder, run_ids
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.units import format_bytes

WAITING, REFUSED = "waiting", "refused"
"""States of a point without a run: not started yet; refused when it was to be started."""


@dataclass(frozen=True)
class Result:
    """A point, what was predicted of it, and what its run measured so far.

    Args:
        state: of the run; `waiting` or `refused` where there is none.
        reason: why it ended so, or why its job waits.
        waits_for: why its job waits, in the scheduler's own word; empty where it does not wait, or says nothing.
        predicted_samples_per_s: from a run on one process in the campaign, of the same training, or of what each
            replica does, times the replicas.
        efficiency: throughput per rank over that of the fewest ranks with the same work per replica.
    """

    point: Point
    outlook: Outlook
    state: str = WAITING
    reason: str = ""
    run_id: str = ""
    record: RunRecord | None = None
    waits_for: str = ""
    predicted_samples_per_s: float | None = None
    efficiency: float | None = None

    @property
    def footprint(self) -> Footprint | None:
        """What the heaviest rank measured."""
        return self.record.footprint(self.outlook.rank) if self.record else None

    @property
    def samples_per_s(self) -> float | None:
        """Throughput of a run that completed; of another it means nothing."""
        first = self.record.footprint() if self.record and self.record.status == "completed" else None
        return first.samples_per_s if first else None

    @property
    def step_s(self) -> float | None:
        """Seconds of a step."""
        first = self.record.footprint() if self.record else None
        return first.phases.step_s if first else None

    @property
    def memory_bytes(self) -> tuple[int | None, int | None]:
        """Predicted and measured of the heaviest rank, the same quantity: of the device where both know it."""
        predicted = self.outlook.memory
        measured = self.footprint.memory if self.footprint else None
        if predicted and measured and predicted.device_bytes is not None and measured.device_bytes is not None:
            return predicted.device_bytes, measured.device_bytes
        if measured is None or measured.peak_bytes is None:
            return self.outlook.taken_bytes, None
        return predicted.peak_bytes if predicted else None, measured.peak_bytes

    @property
    def communication_bytes(self) -> int | None:
        """Messages of rank 0 in one step, measured; the lab's own control traffic is left out."""
        first = self.record.footprint() if self.record else None
        return message_bytes(first) if first else None

    @property
    def rank_hours(self) -> float:
        """Ranks × elapsed time of the run."""
        return self.point.config.layout.world_size * self.record.elapsed_s / 3600 if self.record else 0.0


def message_bytes(footprint: Footprint) -> int:
    """All messages of one step but the lab's own."""
    return sum(traffic.message_bytes for traffic in footprint.communication if traffic.group != "control")


def find_run(point: Point, root: Path) -> Run | None:
    """The newest run that stands for a point: one that needs not be made again, else any other.

    Raises:
        LabError: if the folder of the runs cannot be read.
    """
    base = root_of(root, point.machine)
    others = []
    for run_id in run_ids(base, point.config.hash):
        try:
            folder = run_folder(base, run_id)
            owner = read_owner(folder)
            run = Run(folder)
            if run.config != point.config or (owner is not None and owner.worker_module != DEFAULT_WORKER):
                continue
            if run.state in REUSED:
                return run
        except LabError:
            continue
        others.append(run)
    return others[0] if others else None


def result_of(point: Point, predicted: Outlook, run: Run | None) -> Result:
    """A point with its run, as it stands now."""
    if run is None:
        return Result(point, predicted)
    state = run.state
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
    taken, limit = format_bytes(predicted.taken_bytes), format_bytes(predicted.limit_bytes)
    told = say(
        en=f"does not fit: {taken} predicted for a rank, limit {limit}",
        fr=f"ne tient pas : {taken} prédits pour un rang, limite {limit}",
    )
    return f"{told}. {reason}".strip()


def judged(results: Sequence[Result]) -> list[Result]:
    """The results with what only their neighbours tell: throughput predicted from one process, scaling efficiency."""
    predicted = _predicted_rates(results)
    return [
        replace(result, predicted_samples_per_s=predicted.get(result.run_id), efficiency=_efficiency(result, results))
        for result in results
    ]


def _predicted_rates(results: Sequence[Result]) -> dict[str, float]:
    from dlojz.compare import compare

    found: dict[str, float] = {}
    for machine in dict.fromkeys(result.point.machine for result in results):
        records = [result.record for result in results if result.record and result.point.machine == machine]
        if any(record.config.layout.strategy == "single" for record in records) and len(records) > 1:
            for row in compare(records).rows:
                if row.samples_per_s.predicted is not None and row.world_size > 1:
                    found[row.run_id] = row.samples_per_s.predicted
    for result in results:
        layout = result.point.config.layout
        alone = next((one for one in results if _is_replica_of(one, result)), None)
        if alone and alone.samples_per_s and result.run_id:
            found.setdefault(result.run_id, alone.samples_per_s * layout.dp)
    return found


def _is_replica_of(one: Result, other: Result) -> bool:
    """Whether one process has measured just what each replica of another point does."""
    own, its = one.point.config.layout, other.point.config.layout
    alike = (own.micro_batch, own.micro_batches, own.checkpointing) == (
        its.micro_batch,
        its.micro_batches,
        its.checkpointing,
    )
    whole = its.dp > 1 and its.dp == its.world_size and its.offload == "none"
    return own.world_size == 1 and alike and whole and bool(one.samples_per_s) and _scaled_alike(one, other)


def _efficiency(result: Result, results: Sequence[Result]) -> float | None:
    rate = result.samples_per_s
    alike = [other for other in results if other.samples_per_s and _scaled_alike(other, result)]
    if rate is None or not alike:
        return None
    base = min(alike, key=lambda other: (other.point.config.layout.world_size, other.point.number))
    base_ranks, ranks = base.point.config.layout.world_size, result.point.config.layout.world_size
    if base.samples_per_s is None or (base_ranks == ranks and base is not result and ranks > 1):
        return None
    return (rate / ranks) / (base.samples_per_s / base_ranks)


def _scaled_alike(one: Result, other: Result) -> bool:
    """The same training with the same work per replica, on other ranks or in another layout."""
    own, its = one.point.config, other.point.config
    return (
        one.point.machine == other.point.machine
        and own.layout.micro_batch * own.layout.micro_batches == its.layout.micro_batch * its.layout.micro_batches
        and own.model_dump(exclude={"layout", "steps"}) == its.model_dump(exclude={"layout", "steps"})
    )


__all__ = [
    "REFUSED",
    "WAITING",
    "Outlook",
    "Result",
    "find_run",
    "judged",
    "message_bytes",
    "result_of",
    "root_of",
]
