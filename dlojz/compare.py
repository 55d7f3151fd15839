"""Compare runs with each other and with their predictions: rows, findings, a measured step over its simulation.

Every figure is read from a record or asked from `predict`; sums and verdicts are derived from these pairs alone, and a
figure that is not known stays `None`. The step of a pipeline is simulated with the run's own schedule and the means of
what the run measured, and nothing else is fitted: a difference is what the simulator leaves out.
"""

from __future__ import annotations

import platform
import shlex
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from pydantic import Field, InstanceOf

from dlojz.base.contract import Contract
from dlojz.base.display_hook import figure_of, html_of, markdown_of, table_of
from dlojz.base.errors import LabError
from dlojz.base.language import Sentences, format_bytes, format_count, gap_text, minus, refusal, say, significant
from dlojz.base.machine import rank_limit, share_words
from dlojz.config.optimizers import COMPRESSED
from dlojz.config.run_config import RunConfig, fallback_note
from dlojz.config.schedules import no_effect_note
from dlojz.hardware import Device
from dlojz.hardware.gpus import device_of_driver
from dlojz.models.foreign.elsewhere import executing_no_file
from dlojz.models.foreign.names import is_elsewhere
from dlojz.pipeline.schedule import Action, parse_action
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.pipeline.simulator import MeasuredOverlay, Timeline, overlay, simulate, steps_of
from dlojz.pipeline.traced_pipeline import recognised
from dlojz.prediction import predict
from dlojz.results.footprint import CATEGORIES, NO_GRAD, STATES, Collective, Footprint, Origin, Traffic
from dlojz.results.record import RunRecord, memory_growth

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import RenderableType

    from dlojz.cost_model.measured_machine import Measured

phrase = Sentences(Path(__file__).parent / "results" / "data" / "compare.md")


class PredictedMeasured(Contract):
    """One quantity, predicted and measured; `None` where not known."""

    predicted: int | float | None = None
    measured: int | float | None = None

    @property
    def equal(self) -> bool | None:
        """Whether both are the same number; None where one is not known."""
        return None if self.predicted is None or self.measured is None else self.predicted == self.measured

    @property
    def values(self) -> tuple[int | float | None, int | float | None]:
        """Both of them."""
        return self.predicted, self.measured


class TrafficPair(Contract):
    """What rank 0 hands to one collective per step, predicted and measured; of a script's own calls counted alone."""

    collective: Collective
    group: str = Field(description="mesh axis; empty for a group of a script whose axis has no name")
    group_size: int = Field(1, description="ranks in the group")
    origin: Origin = Field("wrapper", description="who calls it")
    message_bytes: PredictedMeasured
    count: PredictedMeasured


class RunRow(Contract):
    """One run: how it ended, and each quantity predicted and measured (rank 0, per training step)."""

    run_id: str
    title: str = Field(description="the layout as a person names it")
    model: str
    strategy: str
    recognised: dict[str, str] = Field(default_factory=dict, description="of a script: what wraps its model, and so on")
    world_size: int
    model_ranks: int = Field(1, description="ranks that divide one model: along the tensor and pipeline axes")
    global_batch: int | None = Field(description="samples per step; None where a script's are not known")
    status: str = Field(description="a final status, or queued or running")
    reason: str = Field("", description="why the run ended so; empty for a completed run")
    prediction_note: str = Field("", description="why there is no prediction; empty where there is one")
    run_note: str = Field("", description="what of the run does nothing or is not predicted, and why; mostly empty")
    script_notes: tuple[str, ...] = Field((), description="of a script: what grew, what its variables hold, and so on")
    steps: int | None = Field(None, description="steps made, of a script")
    threads: str = Field("", description="threads that a process of a script computed with")
    steps_of: dict[str, int] = Field(default_factory=dict, description="of a script with several optimizers: of each")
    named_losses: dict[str, tuple[float, ...]] = Field(
        default_factory=dict, description="of a script with several losses, by name"
    )
    losses: tuple[float, ...] = ()
    serial_losses: tuple[float, ...] | None = Field(
        None, description="of the same training on one process, if it is among the records: what parallel must give"
    )
    first_loss: PredictedMeasured = PredictedMeasured()
    last_loss: PredictedMeasured = PredictedMeasured()
    samples_per_s: PredictedMeasured = Field(
        PredictedMeasured(),
        description="predicted: from this machine's calibration where one is given, else that of the same training on "
        "one process × the ranks, less a pipeline's bubble",
    )
    calibration: str = Field("", description="by which the throughput is predicted, with its age; empty without one")
    step_s: float | None = None
    tokens_per_s: float | None = Field(None, description="measured, of a script that reads text")
    phases_s: dict[str, float] = Field(default_factory=dict, description="measured: median seconds of each phase")
    mfu: float | None = Field(None, description="measured: achieved over peak FLOP/s, where the peak is known")
    pipeline_s: PredictedMeasured = Field(
        PredictedMeasured(),
        description="a pipeline's schedule, without the update; predicted: simulated with the measured actions",
    )
    bubble_fraction: PredictedMeasured = Field(
        PredictedMeasured(), description="idle share of the ranks in it, simulated likewise and measured"
    )
    overlay: InstanceOf[MeasuredOverlay] | None = Field(
        None, exclude=True, repr=False, description="a pipeline's step, measured and simulated so"
    )
    communication_exposed_s: float | None = Field(None, description="measured: waiting for it")
    communication_hidden_s: float | None = Field(None, description="measured: under way while the rank computed")
    step_flops: PredictedMeasured = PredictedMeasured()
    memory_bytes: dict[str, PredictedMeasured] = Field(default_factory=dict, description="by category, and `peak`")
    max_peak_bytes: int | None = Field(None, description="largest measured peak over all ranks")
    limit_bytes: int | None = Field(
        None, description="what a rank could take where it ran: memory of its GPU, or its share of the machine's"
    )
    limit_of: str = Field("", description="whose limit that is, in words")
    communication: tuple[TrafficPair, ...] = ()
    unequal_ranks: tuple[int, ...] = Field((), description="ranks whose collectives moved other bytes than predicted")

    @property
    def exact(self) -> bool | None:
        """Whether, on every rank, every collective moved exactly the bytes predicted; None where one is not known."""
        verdict = _all(traffic.message_bytes.equal for traffic in self.communication)
        return verdict and not self.unequal_ranks

    @property
    def loss_gap(self) -> float | None:
        """Largest relative difference to the losses of one process, over the steps that both have."""
        common = list(zip(self.losses, self.serial_losses or (), strict=False))
        # A loss of 0 has no relative difference.
        return max((abs(loss - serial) / max(abs(serial), 1e-30) for loss, serial in common), default=None)

    @property
    def communication_bytes(self) -> PredictedMeasured:
        """Message bytes of one step, of a script those of what wraps its model."""
        return _summed(traffic.message_bytes for traffic in self.communication if traffic.origin == "wrapper")

    @property
    def sent_bytes(self) -> float | None:
        """What rank 0 sends per step when the collectives it was seen to call run as rings; None if none was seen."""
        ring_bytes = [
            Traffic(
                collective=pair.collective,
                group=pair.group,
                group_size=pair.group_size,
                message_bytes=int(pair.message_bytes.measured),
            ).sent_bytes
            for pair in self.communication
            if pair.message_bytes.measured is not None
        ]
        return sum(ring_bytes) if ring_bytes else None

    @property
    def states_bytes(self) -> PredictedMeasured:
        """Weights, gradients, optimizer states, master copies and buffers together."""
        return _summed(self.memory_bytes[name] for name in STATES)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, with what is derived from it."""
        return {**super().to_dict(), "exact": self.exact, "loss_gap": self.loss_gap}


class Comparison(Contract):
    """Several runs side by side; shows itself as a table in a notebook and in a terminal."""

    schema_version: Literal[1] = 1
    rows: tuple[RunRow, ...]

    @property
    def exact(self) -> bool | None:
        """Whether every run that was measured moved exactly the bytes predicted; None if none was."""
        return _all(row.exact for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON data, with what is derived from it."""
        return {
            "schema_version": self.schema_version,
            "exact": self.exact,
            "rows": [row.to_dict() for row in self.rows],
        }

    def markdown(self) -> str:
        """The table as Markdown: quantities as rows, runs as columns, each cell predicted | measured."""
        return markdown_of(self)

    def figure(self, path: str | Path | None = None) -> Figure:
        """Memory, communication, throughput, a pipeline's step and losses in one figure; saved if a path is given.

        Raises:
            LabError: if the picture cannot be written.
        """
        return figure_of(self, path)

    def findings(self) -> list[str]:
        """Conclude from the table, in sentences computed from it."""
        return findings(self) + self._limits()

    def _limits(self) -> list[str]:
        """Report how near the fullest rank came to its memory limit."""
        limited_rows = [row for row in self.rows if row.limit_bytes and row.max_peak_bytes]
        if not limited_rows:
            return []
        row = max(limited_rows, key=lambda row: (row.max_peak_bytes or 0) / (row.limit_bytes or 1))
        share = significant(100 * (row.max_peak_bytes or 0) / (row.limit_bytes or 1), 2)
        limit, peak = format_bytes(row.limit_bytes), format_bytes(row.max_peak_bytes)
        return [phrase("nearest to its limit", row=row, peak=peak, share=share, limit=limit)]

    def __repr__(self) -> str:
        return self.markdown()

    def _repr_html_(self) -> str:
        return html_of(self)

    def __rich__(self) -> RenderableType:
        return table_of(self)


def _summed(pairs: Iterable[PredictedMeasured]) -> PredictedMeasured:
    """Sums of what is known; None where nothing is."""
    pairs = list(pairs)
    sums = {}
    for name in PredictedMeasured.model_fields:
        # Fields that are None are left out of the sum.
        numbers = [value for pair in pairs if (value := getattr(pair, name)) is not None]
        sums[name] = sum(numbers) if numbers else None
    return PredictedMeasured(**sums)


def _all(verdicts: Iterable[bool | None]) -> bool | None:
    conclusive = [verdict for verdict in verdicts if verdict is not None]
    return all(conclusive) if conclusive else None


def overlay_of(record: RunRecord, step: int | None = None, replica: int = 0) -> MeasuredOverlay:
    """Simulate one step of a pipeline run with its measured costs.

    Args:
        record: a run with pp > 1 that timed its actions.
        step: which of those kept; by default the one of median length.
        replica: which of the dp pipelines.

    Raises:
        LabError: if the run is no pipeline, or did not time that step.
    """
    layout = record.config.layout
    if record.config.script and steps_of(record.spans):
        return _overlay_of_script(record, step, replica)
    if layout.pp == 1:
        raise phrase.refused("no pipeline to lay over", run_id=record.run_id)
    if not steps_of(record.spans):
        raise phrase.refused("no timed step", run_id=record.run_id)
    from dlojz.prediction.shapes import RankPart

    # Of each stage of that replica the first rank of its tensor-parallel group: all of a group act at the same times.
    parts = [RankPart(record.config, rank) for rank in range(layout.world_size)]
    ranks = {part.rank: part.pp_rank for part in parts if (part.dp_rank, part.tp_rank) == (replica, 0)}
    return overlay(schedule_of(layout), record.spans, step, ranks)


def _overlay_of_script(record: RunRecord, step: int | None, replica: int) -> MeasuredOverlay:
    """Simulate a step of a script's pipeline, whose schedule is recognised by the order of its actions."""
    last_step = steps_of(record.spans)[-1]
    orders: dict[int, list[Action]] = defaultdict(list)
    for span in sorted(record.spans, key=attrgetter("start_s")):  # by time: the order of actions tells the schedule
        if span.action and span.step == last_step:
            orders[span.rank].append(parse_action(span.action))
    pipelines: dict[frozenset[int], list[int]] = defaultdict(list)
    for rank, order in sorted(orders.items()):
        # Ranks with the same stages are replicas of each other.
        pipelines[frozenset(action.stage for action in order)].append(rank)
    # Of each pipeline rank one process.
    ranks = sorted(replica_ranks[min(replica, len(replica_ranks) - 1)] for replica_ranks in pipelines.values())
    schedule, _ = recognised([orders[rank] for rank in ranks])
    return overlay(schedule, record.spans, step, {rank: index for index, rank in enumerate(ranks)})


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


def compare(runs: Iterable[Handle | RunRecord] | Handle | RunRecord, machine: Measured | None = None) -> Comparison:
    """Compare the measurement of each run with its prediction.

    A model's own file that this user has not executed is not executed: its row says so, and has no prediction.

    Args:
        runs: runs or records, or one of them. A run on one process among them gives the losses and the throughput
            that the parallel runs of the same training are judged by.
        machine: calibration of the machine that they ran on, by which their throughput is then predicted.

    Raises:
        LabError: if there is nothing to compare, or something that is no run.
    """
    run_list = [runs] if isinstance(runs, (RunRecord, Handle)) else list(runs)
    if not run_list:
        raise phrase.refused("no run to compare")
    for run in run_list:
        if not isinstance(run, (RunRecord, Handle)):
            raise refusal(
                en=f"compare takes runs or records, but {type(run).__name__} was received.",
                fr=f"compare prend des exécutions ou des bilans, mais {type(run).__name__} a été reçu.",
            )
    # Runs that go on have no record yet.
    records = [record for run in run_list if (record := run if isinstance(run, RunRecord) else run.record)]
    titles = _titles([run.config for run in run_list], [run.run_id for run in run_list])
    with executing_no_file():
        rows = (_row(run, title, records, machine) for run, title in zip(run_list, titles, strict=True))
        return Comparison(rows=tuple(rows))


def _calibrated_rate(config: RunConfig, machine: Measured) -> float | None:
    """Samples per second by a machine's calibration; None for what it cannot time."""
    from dlojz.cost_model.measured_machine import local_step_s

    try:
        return config.layout.global_batch / local_step_s(machine, config)
    except LabError:  # an engine or a schedule that was not measured
        return None


def _run_note(config: RunConfig, record: RunRecord | None, gpu: Device | None, *, is_predicted: bool) -> str:
    """Note an option without effect, and what of a model from elsewhere is not predicted; empty where there is none."""
    if config.optimizer in COMPRESSED and config.layout.dp == 1:
        return no_effect_note(config.optimizer)
    notes = [fallback_note(config, record.environment.get("wrapped_in", ""))] if record else []
    if is_predicted and not config.script and is_elsewhere(config.model):
        from dlojz.prediction.forecast import forecast  # loads torch

        notes += forecast(config, 0, gpu).notes
    return " ".join(filter(None, notes))


def _titles(configs: list[RunConfig], run_ids: list[str]) -> list[str]:
    """Title the runs by their layouts; where two are the same, add the fields that differ."""
    flat = [_differences_of(config) for config in configs]
    names = [config.script.name if config.script else config.layout.title for config in configs]
    titles = []
    for name, differences, run_id in zip(names, flat, run_ids, strict=True):
        # The run itself is among them.
        same_title = [fields for fields, other_name in zip(flat, names, strict=True) if other_name == name]
        differing = [
            _words_of(str(value), [str(fields[key]) for fields in same_title])
            if key == "arguments"
            # None is what the run itself chooses.
            else f"{key}={say(en='default', fr='défaut') if value is None else value}"
            for key, value in differences.items()
            if any(fields.get(key) != value for fields in same_title)  # itself never differs
        ]
        # At most two fields, else the end of its name.
        suffix = ", ".join(differing[:2]) or (f"…{run_id[-4:]}" if len(same_title) > 1 else "")
        titles.append(name + (f" ({suffix})" if suffix else ""))
    return titles


def _words_of(line: str, other_lines: Sequence[str]) -> str:
    """The words of a script's command line that tell it apart from the others, each behind its option."""
    words, lines = shlex.split(line), [shlex.split(other_line) for other_line in other_lines]
    if len({len(line_words) for line_words in lines}) > 1:  # words do not pair up
        return line or say(en="no arguments", fr="sans arguments")
    # Of all command lines, word by word.
    differing = [number for number, of_all in enumerate(zip(*lines, strict=True)) if len(set(of_all)) > 1]
    # The option before a value, too.
    indices = {number - 1 for number in differing if number and words[number - 1].startswith("-")} | {*differing}
    return shlex.join(words[number] for number in sorted(indices))


def _differences_of(config: RunConfig) -> dict[str, Any]:
    """List by name what may tell two runs of one title apart."""
    if config.script:
        return {"arguments": shlex.join(config.script.arguments)}
    # The layout's fields stand by themselves, so that `layout` would tell nothing more.
    return {**config.to_dict(), **config.layout.to_dict(), "layout": None, "script": None}


def _row(run: Handle | RunRecord, title: str, records: list[RunRecord], machine: Measured | None = None) -> RunRow:
    record = run if isinstance(run, RunRecord) else run.record
    config, layout = run.config, run.config.layout
    gpu = gpu_of(record) if record else None
    predicted, note = _of_script(record) if config.script else _prediction(config, gpu)
    measured = record.footprint() if record else None
    # Its losses are what parallel must give.
    serial = next((candidate for candidate in records if _is_twin(candidate, config)), None)
    losses, serial_losses = record.losses if record else (), serial.losses if serial else ()
    # A rank with other threads is another device: its throughput predicts nothing here.
    same_device = serial and record and _device(serial) == _device(record)
    serial_measured = serial.footprint() if serial and same_device else None
    serial_rate = serial_measured.samples_per_s if serial_measured else None
    # Ranks whose peak was not measured are left out.
    peaks = (
        [peak for footprint in record.footprints if (peak := footprint.memory.peak_bytes) is not None] if record else []
    )
    limit = limit_of(record) if record else None
    pipeline = _pipeline(record) if record else None
    return RunRow(
        run_id=run.run_id,
        title=title + (record.mark if record else ""),
        model=config.model,
        strategy=layout.strategy,
        recognised=record.script_prediction.recognised if record and record.script_prediction else {},
        world_size=layout.world_size,
        model_ranks=layout.tp * layout.pp,
        global_batch=_global_batch(config, record),
        status=record.status if record else str(getattr(run, "state", "running")),
        reason=record.reason if record else "",
        prediction_note=note,
        run_note=_run_note(config, record, gpu, is_predicted=predicted is not None),
        script_notes=tuple(_script_notes(record)) if record and config.script else (),
        steps=len(record.step_s) if record and config.script and not record.watch_ended else None,
        threads=record.environment.get("threads", "") if record and config.script else "",
        steps_of=record.steps_of if record else {},
        named_losses=record.named_losses if record else {},
        losses=losses,
        serial_losses=serial_losses if serial else None,
        first_loss=PredictedMeasured(predicted=_at(serial_losses, 0), measured=_at(losses, 0)),
        last_loss=PredictedMeasured(
            predicted=_at(serial_losses, len(losses) - 1), measured=_at(losses, len(losses) - 1)
        ),
        samples_per_s=PredictedMeasured(
            predicted=_calibrated_rate(config, machine)
            if machine
            # Ideal: the serial rate on all ranks, less the pipeline's bubble.
            else serial_rate and serial_rate * layout.replicas * layout.tp * _pipeline_speedup(config),
            measured=measured.samples_per_s if measured else None,
        ),
        calibration=machine.words(layout.world_size) if machine else "",
        step_s=measured.phases.step_s if measured else None,
        tokens_per_s=_tokens_per_s(record, measured) if record and measured else None,
        phases_s=_phases(measured) if measured else {},
        mfu=measured.mfu if measured else None,
        pipeline_s=_both(pipeline, attrgetter("makespan")),
        bubble_fraction=_both(pipeline, attrgetter("bubble_fraction")),
        overlay=pipeline,
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
        communication=_compare_communication(predicted if _messages_known(record) else None, measured),
    )


def _tokens_per_s(record: RunRecord, measured: Footprint) -> float | None:
    if not record.config.script or not record.step_tokens or not measured.phases.step_s:
        return None
    return statistics.median_low(record.step_tokens) / measured.phases.step_s  # tokens of a step, of the median step


def _phases(measured: Footprint) -> dict[str, float]:
    """The phases that follow each other in a step."""
    phase_s = {name: getattr(measured.phases, f"{name}_s") for name in ("data", "forward", "backward", "optimizer")}
    return {name: seconds for name, seconds in phase_s.items() if seconds is not None}


def _global_batch(config: RunConfig, record: RunRecord | None) -> int | None:
    """Samples per step: as asked, or of a script as its model was seen to read them (None where that is not known)."""
    if config.script is None:
        return config.layout.global_batch
    measured = record.footprint() if record else None
    if measured is not None and measured.samples_per_s and measured.phases.step_s:
        return round(measured.samples_per_s * measured.phases.step_s)  # samples/s × seconds of a step
    samples = record.step_samples if record else ()
    return statistics.median_low(samples) or None if samples else None  # no step was timed


FEW_STEPS = 3
_VARIABLES_NAMED = 4


def _script_notes(record: RunRecord) -> Iterator[str]:
    """Say of a script's run what its figures do not show."""
    yield from record.notes
    if 0 < len(record.step_s) <= FEW_STEPS:
        yield phrase("first steps are traced", steps=len(record.step_s), traced=FEW_STEPS)
    if growth := memory_growth(record.held_bytes):
        yield growth.text()
    footprint = record.footprint()
    if footprint and footprint.memory.peak_moment == NO_GRAD:
        yield phrase("peak without gradients")
    least_bytes = (footprint.memory.peak_bytes or 0) / 50 if footprint else 0  # 2 % of the peak
    largest = [pair for pair in record.variables.items() if pair[1] > least_bytes][:_VARIABLES_NAMED]
    if largest:
        names = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in largest)
        yield phrase("variables of the script", names=names)


def _pipeline(record: RunRecord) -> MeasuredOverlay | None:
    """Simulate one step of a pipeline; None where the run is none or timed no step."""
    try:
        return overlay_of(record)
    except LabError:
        return None


def _pipeline_speedup(config: RunConfig) -> float:
    """Speed-up over one rank: even stages, a backward twice as long as a forward, no messages."""
    if config.layout.pp == 1:
        return 1.0
    return simulate(schedule_of(config.layout)).speedup


def _both(pipeline: MeasuredOverlay | None, quantity: Callable[[Timeline], float]) -> PredictedMeasured:
    if pipeline is None:
        return PredictedMeasured()
    return PredictedMeasured(predicted=quantity(pipeline.simulated), measured=quantity(pipeline.measured))


def _prediction(config: RunConfig, gpu: Device | None) -> tuple[Footprint | None, str]:
    try:
        return predict(config, rank=0, device=gpu), ""
    except LabError as error:
        return None, str(error)


def _of_script(record: RunRecord | None) -> tuple[Footprint | None, str]:
    """The prediction that a script's first step has led to, and what is not in it."""
    prediction = record.script_prediction if record else None
    if prediction is None and record is not None and record.step_s:
        return None, phrase("first step not recorded")
    if prediction is None:
        return None, phrase("no step made")
    return prediction.footprint, prediction.note


def _messages_known(record: RunRecord | None) -> bool:
    """Whether the prediction says what is sent; not where a hook of the script's own sends the gradients."""
    return record is None or record.script_prediction is None or record.script_prediction.messages_known


def gpu_of(record: RunRecord) -> Device | None:
    """Find the GPU that a run was measured on, where the lab knows its kind; None on a CPU."""
    return device_of_driver(record.environment.get("device", ""))


def limit_of(record: RunRecord) -> tuple[int, str] | None:
    """Find the memory limit of a rank where it ran, in bytes, and whose limit it is; None where it is not known.

    On a CPU the ranks share the memory of the machine, or of the job or container. A record that does not tell it was
    measured before records did: then this machine's, if it is the same one.
    """
    gpu = gpu_of(record)
    if gpu is not None:
        return gpu.memory_bytes, gpu.title
    ranks = record.config.layout.world_size
    recorded_limit = record.environment.get("memory_limit_bytes", "")
    if not recorded_limit.isdecimal() and record.environment.get("system") != platform.platform():
        return None
    if recorded_limit.isdecimal():
        return int(recorded_limit), share_words(record.environment.get("memory_limit_of", ""), ranks)
    limit = rank_limit(ranks)
    return limit.num_bytes, share_words(limit.code, ranks)


def _device(record: RunRecord) -> tuple[str | None, str | None]:
    return record.environment.get("device"), record.environment.get("threads_per_rank")


def _unequal_ranks(record: RunRecord) -> tuple[int, ...]:
    """List the ranks on which a collective moved other bytes than predicted for that rank."""
    if not record.footprints:
        return ()
    from dlojz.prediction.communication import communication_by_place
    from dlojz.prediction.forecast import check_rank
    from dlojz.prediction.shapes import RankPart

    config, unequal = record.config, []
    if config.script:
        prediction = record.script_prediction
        pairs = {
            footprint.rank: _compare_communication(
                prediction.of_rank(footprint.rank) if prediction and prediction.messages_known else None, footprint
            )
            for footprint in record.footprints
        }
        return tuple(
            rank for rank, rank_pairs in pairs.items() if any(pair.message_bytes.equal is False for pair in rank_pairs)
        )
    predicted = communication_by_place(config)
    for counted in record.footprints:
        check_rank(config, counted.rank)
        part = RankPart(config, counted.rank)  # where the rank stands on the axes
        communication = predicted[part.pp_rank, part.tp_rank]
        traffic = Footprint(source="predicted", rank=counted.rank, communication=communication)
        # False, not None: a pair that is not known is no difference.
        if any(pair.message_bytes.equal is False for pair in _compare_communication(traffic, counted)):
            unequal.append(counted.rank)
    return tuple(unequal)


def _is_twin(record: RunRecord, config: RunConfig) -> bool:
    """Whether `record` is this parallel training on one process: same samples per step, in the same micro-batches."""
    ours, theirs = config.layout, record.config.layout
    return (
        config.script is None
        # Without parallelism of any kind.
        and (theirs.strategy, theirs.world_size, ours.world_size > 1) == ("single", 1, True)
        and theirs.global_batch == ours.global_batch
        and theirs.micro_batch == ours.micro_batch  # BatchNorm sees micro-batches
        and record.config.model_dump(exclude=set(NOT_TWINNED)) == config.model_dump(exclude=set(NOT_TWINNED))
    )


def _compare_communication(predicted: Footprint | None, measured: Footprint | None) -> tuple[TrafficPair, ...]:
    """Pair the traffic of either footprint, without the lab's control traffic; only a wrapper's is predicted."""
    of_key: dict[tuple[Origin, Collective, str, int], Traffic] = {}
    for footprint in (predicted, measured):
        for traffic in footprint.communication if footprint else ():
            if traffic.group != "control" and (traffic.origin == "wrapper" or footprint is measured):
                of_key.setdefault(traffic.key, traffic)
    return tuple(
        TrafficPair(
            collective=traffic.collective,
            group=traffic.group,
            group_size=traffic.group_size,
            origin=traffic.origin,
            # Of a script's own calls only the measured side is known.
            message_bytes=_pair(expected, measured, partial(_message_bytes, key=key)),
            count=_pair(expected, measured, partial(_calls, key=key)),
        )
        for key, traffic in of_key.items()
        for expected in (predicted if traffic.origin == "wrapper" else None,)  # a name for the two pairs
    )


def _pair(
    predicted: Footprint | None, measured: Footprint | None, quantity: Callable[[Footprint], Any]
) -> PredictedMeasured:
    return PredictedMeasured(predicted=predicted and quantity(predicted), measured=measured and quantity(measured))


def _message_bytes(footprint: Footprint, key: tuple[Origin, Collective, str, int]) -> int:
    return sum(traffic.message_bytes for traffic in footprint.communication if traffic.key == key)


def _calls(footprint: Footprint, key: tuple[Origin, Collective, str, int]) -> int | None:
    counts = [traffic.count for traffic in footprint.communication if traffic.key == key]
    # One unknown count makes the sum unknown.
    return None if None in counts else sum(count for count in counts if count is not None)


def _at(losses: tuple[float, ...], index: int) -> float | None:
    return losses[index] if 0 <= index < len(losses) else None


def findings(comparison: Comparison) -> list[str]:
    """Write sentences about parity, communication, memory and speed, in the reader's language."""
    rows = comparison.rows
    sentences = [_parity(rows), _communication(comparison), *_memory(rows), _speed(rows), *map(_bubble, rows)]
    return [sentence for sentence in sentences if sentence]


def _parity(rows: tuple[RunRow, ...]) -> str | None:
    judged = [(row.loss_gap, row) for row in rows if row.loss_gap is not None]
    if not judged:
        return None
    gap, worst = max(judged, key=lambda pair: pair[0])
    if gap == 0:
        return phrase("losses equal", runs=len(judged))
    return phrase("losses differ", runs=len(judged), gap=gap_text(gap), worst=worst)


def _communication(comparison: Comparison) -> str | None:
    if comparison.exact is None:
        return None
    if comparison.exact:
        return phrase("bytes equal")
    wrong = "; ".join(
        f"{row.title} {traffic.collective}: {traffic.message_bytes.predicted} ≠ {traffic.message_bytes.measured}"
        for row in comparison.rows
        for traffic in row.communication
        if traffic.message_bytes.equal is False
    )
    return phrase("bytes differ", wrong=wrong)


def _memory(rows: tuple[RunRow, ...]) -> list[str]:
    states_of_rows = [  # a pipeline's ranks hold other blocks, not another share of the same
        (row.states_bytes.measured, row)
        for row in rows
        if row.states_bytes.measured and row.world_size > 1 and row.pipeline_s.measured is None
    ]
    if len(states_of_rows) < 2:  # nothing to compare it with
        return []
    high, low = max(states_of_rows, key=lambda pair: pair[0]), min(states_of_rows, key=lambda pair: pair[0])
    sentences = []
    if high[0] > low[0]:  # equal states need no sentence
        sentences.append(
            phrase(
                "states of two runs",
                high_bytes=high[0],
                high_title=high[1].title,
                low_bytes=low[0],
                low_title=low[1].title,
                times=high[0] / low[0],
            )
        )
        if price := _price(high[1], low[1]):
            sentences.append(price)
    return sentences


def _price(largest: RunRow, smallest: RunRow) -> str | None:
    before, after = largest.sent_bytes, smallest.sent_bytes  # bytes per step, as rings send them
    if not before or not after:
        return None
    return phrase("price of sharding", after=after, before=before, times=after / before)


def _speed(rows: tuple[RunRow, ...]) -> str | None:
    parallel = [(row.samples_per_s.measured, row) for row in rows if row.samples_per_s.measured and row.world_size > 1]
    if not parallel:
        return None
    rate, fastest = max(parallel, key=lambda pair: pair[0])
    ideal = fastest.samples_per_s.predicted
    of_ideal = ""
    if ideal and fastest.calibration:
        of_ideal = phrase("speed predicted by a calibration", ideal=format_count(ideal), fastest=fastest)
    elif ideal and rate > ideal:
        of_ideal = phrase("faster than predicted", ideal=format_count(ideal))
    elif ideal:
        of_ideal = phrase("share of the ideal", share=100 * rate / ideal)
    return phrase("fastest run", fastest=fastest, rate=format_count(rate), of_ideal=of_ideal)


def _bubble(row: RunRow) -> str | None:
    """Report how far a pipeline's step was from its simulation."""
    step_s, bubble = row.pipeline_s, row.bubble_fraction
    if not step_s.measured or not step_s.predicted or bubble.measured is None or bubble.predicted is None:
        return None
    off = minus(f"{100 * (step_s.measured / step_s.predicted - 1):+.0f}")  # percent, with its sign
    shares = [f"{100 * share:.0f}" for share in (bubble.measured, bubble.predicted)]
    return phrase("bubble of a pipeline", row=row, off=off, measured=shares[0], simulated=shares[1])
