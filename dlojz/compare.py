"""Prediction beside measurement, run by run: `compare`.

Layer 4: above `predict` and `record`, below the command line. Invariant: nothing is estimated here; every figure is
either read from a record or asked from `predict`, and a figure that neither has stays `None`.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter, methodcaller
from typing import Any, Protocol, runtime_checkable

from dlojz.comparison import Comparison, Pair, Row, TrafficPair
from dlojz.config import RunConfig
from dlojz.footprint import CATEGORIES, Collective, Footprint
from dlojz.hardware import DEVICES, Device
from dlojz.libraries import laid_out_otherwise
from dlojz.optimizer_stages import COMPRESSED, does_nothing
from dlojz.overlay import overlay_of
from dlojz.pipeline.cuts import schedule_of
from dlojz.pipeline.measured import Overlay
from dlojz.pipeline.simulator import simulate
from dlojz.pipeline.timeline import Timeline
from dlojz.predict import predict
from dlojz.record import RunRecord
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train.host import rank_limit_bytes

NOT_TWINNED = ("layout", "steps", "device", "data_root", "keep_weights", "library")


@runtime_checkable
class Handle(Protocol):
    """What `compare` needs of a run that may still be going on."""

    @property
    def run_id(self) -> str:
        """Name of the run."""

    @property
    def config(self) -> RunConfig:
        """What was asked."""

    @property
    def state(self) -> str:
        """A final status, or queued or running."""

    @property
    def record(self) -> RunRecord | None:
        """What was measured; None until the run has ended."""


def compare(runs: Iterable[Handle | RunRecord] | Handle | RunRecord) -> Comparison:
    """Lay the measurement of each run over its prediction.

    Args:
        runs: runs or records, or one of them. A run on one process among them gives the losses and the throughput
            that the parallel runs of the same training are judged by.

    Raises:
        LabError: if there is nothing to compare, or something that is no run.
    """
    given = [runs] if isinstance(runs, (RunRecord, Handle)) else list(runs)
    if not given:
        raise LabError("there is no run to compare: start one with dlojz.run(…) or `dlojz run`.")
    for run in given:
        if not isinstance(run, (RunRecord, Handle)):
            raise LabError(f"compare takes runs or records, but {type(run).__name__} was received.")
    records = [record for run in given if (record := run if isinstance(run, RunRecord) else run.record)]
    titles = _titles([run.config for run in given], [run.run_id for run in given])
    return Comparison(rows=tuple(_row(run, title, records) for run, title in zip(given, titles, strict=True)))


def _run_note(config: RunConfig, record: RunRecord | None) -> str:
    """What of a run does nothing, and why; empty where all of it does what was asked."""
    if config.optimizer in COMPRESSED and config.layout.dp == 1:
        return does_nothing(config.optimizer)
    return laid_out_otherwise(config, record.environment.get("wrapped_in", "")) if record else ""


def _titles(configs: list[RunConfig], run_ids: list[str]) -> list[str]:
    """The layouts' titles; where two are the same, what tells the runs apart is added."""
    flat = [{**config.to_dict(), **config.layout.to_dict(), "layout": None} for config in configs]
    titles = []
    for config, own, run_id in zip(configs, flat, run_ids, strict=True):
        alike = [other for other, its in zip(flat, configs, strict=True) if its.layout.title == config.layout.title]
        differing = [
            f"{key}={say(en='default', fr='défaut') if value is None else value}"
            for key, value in own.items()
            if any(other[key] != value for other in alike)
        ]
        told = ", ".join(differing[:2]) or (f"…{run_id[-4:]}" if len(alike) > 1 else "")
        titles.append(config.layout.title + (f" ({told})" if told else ""))
    return titles


def _row(run: Handle | RunRecord, title: str, records: list[RunRecord]) -> Row:
    record = run if isinstance(run, RunRecord) else run.record
    config, layout = run.config, run.config.layout
    gpu = gpu_of(record) if record else None
    predicted, note = _prediction(config, gpu)
    measured = record.footprint() if record else None
    serial = next((other for other in records if _is_twin(other, config)), None)
    losses, serial_losses = record.losses if record else (), serial.losses if serial else ()
    # A rank with other threads is another device: its throughput predicts nothing here.
    alike = serial and record and _device(serial) == _device(record)
    serial_measured = serial.footprint() if serial and alike else None
    serial_rate = serial_measured.samples_per_s if serial_measured else None
    peaks = [peak for each in record.footprints if (peak := each.memory.peak_bytes) is not None] if record else []
    limit = limit_of(record) if record else None
    pipeline = _pipeline(record) if record else None
    return Row(
        run_id=run.run_id,
        title=title + (record.mark if record else ""),
        model=config.model,
        strategy=layout.strategy,
        world_size=layout.world_size,
        global_batch=layout.global_batch,
        status=record.status if record else str(getattr(run, "state", "running")),
        reason=record.reason if record else "",
        prediction_note=note,
        run_note=_run_note(config, record),
        losses=losses,
        serial_losses=serial_losses if serial else None,
        first_loss=Pair(predicted=_at(serial_losses, 0), measured=_at(losses, 0)),
        last_loss=Pair(predicted=_at(serial_losses, len(losses) - 1), measured=_at(losses, len(losses) - 1)),
        samples_per_s=Pair(
            predicted=serial_rate and serial_rate * layout.dp * _pipeline_speedup(config),
            measured=measured.samples_per_s if measured else None,
        ),
        step_s=measured.phases.step_s if measured else None,
        pipeline_s=_both(pipeline, attrgetter("makespan")),
        bubble_fraction=_both(pipeline, attrgetter("bubble_fraction")),
        communication_exposed_s=measured.phases.communication_exposed_s if measured else None,
        communication_hidden_s=measured.phases.communication_hidden_s if measured else None,
        step_flops=_pair(predicted, measured, attrgetter("step_flops")),
        memory_bytes={
            name: _pair(predicted, measured, attrgetter(f"memory.{name}_bytes")) for name in (*CATEGORIES, "peak")
        },
        max_peak_bytes=max(peaks, default=None),
        limit_bytes=limit[0] if limit else None,
        limit_of=limit[1] if limit else "",
        unequal_ranks=_unequal_ranks(record) if record and predicted else (),
        communication=_communication(predicted, measured),
    )


def _pipeline(record: RunRecord) -> Overlay | None:
    """One step of a pipeline, simulated and measured; None where there is none."""
    try:
        return overlay_of(record)
    except LabError:
        return None


def _pipeline_speedup(config: RunConfig) -> float:
    """Over one rank: that of the schedule with even stages, a backward twice as long as a forward, and no messages."""
    if config.layout.pp == 1:
        return 1.0
    return simulate(schedule_of(config.layout)).speedup


def _both(pipeline: Overlay | None, quantity: Callable[[Timeline], float]) -> Pair:
    if pipeline is None:
        return Pair()
    return Pair(predicted=quantity(pipeline.simulated), measured=quantity(pipeline.measured))


def _prediction(config: RunConfig, gpu: Device | None) -> tuple[Footprint | None, str]:
    try:
        return predict(config, rank=0, device=gpu), ""
    except LabError as error:
        return None, str(error)


def gpu_of(record: RunRecord) -> Device | None:
    """The GPU that a run was measured on, where the lab knows its kind; None on a CPU."""
    name = record.environment.get("device", "").replace(" ", "").upper()
    for known in DEVICES.values():
        kind, size = known.title.upper().split(" ", 1)
        alone = sum(other.title.split(" ", 1)[0].upper() == kind for other in DEVICES.values()) == 1
        if kind in name and (alone or size.replace(" ", "") in name):
            return known
    return None


def limit_of(record: RunRecord) -> tuple[int, str] | None:
    """What a rank of a run could take where it ran, in bytes, and whose limit that is; None where it is not known.

    On a CPU the ranks share the memory of the machine. A record that does not tell it was measured before records did:
    then this machine's, if it is the same one.
    """
    gpu = gpu_of(record)
    if gpu is not None:
        return gpu.memory_bytes, gpu.title
    ranks = record.config.layout.world_size
    told = record.environment.get("memory_limit_bytes", "")
    if not told.isdecimal() and record.environment.get("system") != platform.platform():
        return None
    words = (
        say(en=f"a rank's share of the machine ({ranks} ranks)", fr=f"la part d’un rang de la machine ({ranks} rangs)")
        if ranks > 1
        else say(en="the machine", fr="la machine")
    )
    return int(told) if told.isdecimal() else rank_limit_bytes(ranks), words


def _device(record: RunRecord) -> tuple[str | None, str | None]:
    return record.environment.get("device"), record.environment.get("threads_per_rank")


def _unequal_ranks(record: RunRecord) -> tuple[int, ...]:
    """Ranks on which a collective moved other bytes than predicted for that rank."""
    return tuple(
        counted.rank
        for counted in record.footprints
        if any(
            traffic.message_bytes.equal is False
            for traffic in _communication(predict(record.config, counted.rank), counted)
        )
    )


def _is_twin(other: RunRecord, config: RunConfig) -> bool:
    """Whether `other` is this parallel training on one process: same samples per step, in the same micro-batches."""
    ours, theirs = config.layout, other.config.layout
    return (
        (theirs.strategy, ours.strategy == "single") == ("single", False)
        and theirs.global_batch == ours.global_batch
        and theirs.micro_batch == ours.micro_batch  # BatchNorm sees micro-batches
        and other.config.model_dump(exclude=set(NOT_TWINNED)) == config.model_dump(exclude=set(NOT_TWINNED))
    )


def _communication(predicted: Footprint | None, measured: Footprint | None) -> tuple[TrafficPair, ...]:
    """One pair per (collective, group) that either footprint names; the lab's own control traffic is left out."""
    keys = dict.fromkeys(
        (traffic.collective, traffic.group)
        for footprint in (predicted, measured)
        if footprint
        for traffic in footprint.communication
        if traffic.group != "control"
    )
    return tuple(
        TrafficPair(
            collective=collective,
            group=group,
            message_bytes=_pair(predicted, measured, methodcaller("traffic", collective, group)),
            count=_pair(predicted, measured, partial(_calls, collective=collective, group=group)),
        )
        for collective, group in keys
    )


def _pair(predicted: Footprint | None, measured: Footprint | None, quantity: Callable[[Footprint], Any]) -> Pair:
    return Pair(predicted=predicted and quantity(predicted), measured=measured and quantity(measured))


def _calls(footprint: Footprint, collective: Collective, group: str) -> int | None:
    counts = [t.count for t in footprint.communication if (t.collective, t.group) == (collective, group)]
    return None if None in counts else sum(count for count in counts if count is not None)


def _at(losses: tuple[float, ...], index: int) -> float | None:
    return losses[index] if 0 <= index < len(losses) else None
