"""Probes of a training: memory, communication, FLOPs and the clock, attached to an engine from outside.

Attaching wraps methods of one engine object, detaching restores them. The first steps are traced (memory and
communication), the others timed, so that tracing slows down no step whose time is reported. Durations are monotonic.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.config.run_config import RunConfig
from dlojz.config.schedules import SETTLING_STEPS, first_whole_step, sending_interval, settled_step
from dlojz.hardware.gpus import Device, Precision, device_of_driver
from dlojz.pipeline.schedule import FORWARD, UPDATE, Action
from dlojz.results.footprint import Footprint, Memory, Overlap, Phases
from dlojz.results.record import MemorySample, Span
from dlojz.train.dispatch_trace import MemoryProbe, StorageTrace, bytes_of, traffic_of
from dlojz.train.engines.base import Engine

PHASE_OF_METHOD = {"forward": "forward", "backward": "backward", "update": "optimizer"}
_PHASE_OF_ACTION = {FORWARD: "forward", UPDATE: "optimizer"}
KEPT_SPANS = 3
Perform = Callable[[Action, Callable[[], None]], None]


class StepMark(NamedTuple):
    """Moment within a step at which it may have ended, with what was counted of it until then."""

    time_s: float
    seconds: dict[str, float]
    num_storages: int
    num_calls: int
    flops: Counter[torch.dtype]


class PhaseClock:
    """Clock of the phases of every step on this rank.

    Args:
        rank: written into the spans.
        device: on CUDA each phase ends with a synchronisation, so that it counts its own kernels.
        on_phase: called with the name of each phase that begins.
    """

    def __init__(self, rank: int, device: torch.device, on_phase: Callable[[str], None] | None = None) -> None:
        self._rank, self._cuda, self._on_phase = rank, device.type == "cuda", on_phase
        self._origin_s = time.perf_counter()
        self._step = -1
        self._aligned = False
        self._steps: dict[int, dict[str, float]] = {}
        self._spans: list[Span] = []

    def attach(self, engine: Engine) -> None:
        """Time forward, backward and update of this engine from now on."""
        for method, phase in PHASE_OF_METHOD.items():
            setattr(engine, method, self._timed(getattr(engine, method), phase))
        if (perform := getattr(engine, "perform", None)) is not None:  # a pipeline's
            engine.__dict__["perform"] = self._performed(perform)

    def detach(self, engine: Engine) -> None:
        """Restore the engine's own methods."""
        for method in (*PHASE_OF_METHOD, "perform"):
            engine.__dict__.pop(method, None)

    def _timed(self, method: Callable[..., Any], phase: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(phase):
                return method(*args, **kwargs)

        return timed

    def _performed(self, perform: Perform) -> Perform:
        def performed(action: Action, compute: Callable[[], None]) -> None:
            with self.phase(_PHASE_OF_ACTION.get(action.kind, "backward"), str(action)):
                perform(action, compute)
            if self._on_phase is not None:
                self._on_phase("communication")  # what is received from here on belongs to no action

        return performed

    @contextmanager
    def pipeline(self) -> Iterator[None]:
        """Time a step's whole schedule: the part in which no action of this rank computes is its bubble."""
        seconds = self._steps.setdefault(self._step, defaultdict(float))
        start_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - start_s
        seconds["bubble"] += max(0.0, took_s - seconds["forward"] - seconds["backward"])

    @contextmanager
    def phase(self, name: str, action: str = "") -> Iterator[None]:
        """Time one phase of the present step."""
        if self._on_phase is not None:
            self._on_phase(name)
        start_s = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        end_s = time.perf_counter()
        seconds = self._steps.setdefault(self._step, defaultdict(float))
        seconds[name] += end_s - start_s
        self._keep(name, start_s, end_s, action)

    def _keep(self, phase: str, start_s: float, end_s: float, action: str = "") -> None:
        self._spans.append(
            Span.model_construct(
                rank=self._rank,
                step=self._step,
                phase=phase,
                start_s=start_s - self._origin_s,
                end_s=end_s - self._origin_s,
                action=action,
            )
        )

    def become(self, rank: int) -> None:
        """Take another rank, with the timeline so far."""
        self._rank = rank
        self._spans = [span.model_copy(update={"rank": rank}) for span in self._spans]

    def align(self, origin_s: float) -> None:
        """Count the timeline from this moment of the rank's clock, which is the same moment on all ranks."""
        self._origin_s, self._aligned = origin_s, True

    def start_step(self, step: int, since_s: float | None = None) -> None:
        """Start a step, now or at a moment of this clock; the timeline keeps the last few."""
        if not self._steps and not self._aligned:
            self._origin_s = time.perf_counter()
        self._step = step
        self._spans = [span for span in self._spans if span.step > step - KEPT_SPANS]
        self._started_s = time.perf_counter() if since_s is None else since_s

    def seconds(self) -> dict[str, float]:
        """Copy the seconds by phase of the present step so far."""
        return dict(self._steps.get(self._step, {}))

    def end_step(self, mark: StepMark | None = None) -> float:
        """End the step, now or at a mark; what has followed the mark is the next step's. Returns its seconds."""
        seconds = self._steps.setdefault(self._step, defaultdict(float))
        if mark is None:
            seconds["step"] = time.perf_counter() - self._started_s
            return seconds["step"]
        later = self._steps.setdefault(self._step + 1, defaultdict(float))
        for name in list(seconds):
            # Seconds up to the mark stay; the rest moves to the next step.
            later[name] += seconds[name] - mark.seconds.get(name, 0.0)
            seconds[name] = mark.seconds.get(name, 0.0)
        begun_s = mark.time_s - self._origin_s
        self._spans = [
            span.model_copy(update={"step": self._step + 1}) if span.start_s >= begun_s else span
            for span in self._spans
        ]
        seconds["step"] = mark.time_s - self._started_s
        return seconds["step"]

    def communicated(self, overlap: Overlap) -> None:
        """Record the overlap of the present step's communication with its computing: a span for each, and each wait."""
        seconds = self._steps.setdefault(self._step, defaultdict(float))
        seconds["communication_exposed"] = overlap.exposed_s
        seconds["communication_hidden"] = overlap.hidden_s
        for left_s, arrived_s in overlap.intervals:
            self._keep("communication", left_s, arrived_s)
        for start_s, end_s in overlap.waits:
            self._keep("wait", start_s, end_s)

    def phases(self, first_step: int, without: Container[int] = ()) -> Phases:
        """Compute median seconds by phase over the whole steps from `first_step` on; all None where there is none.

        Args:
            without: steps that are left out, since they were traced.
        """
        steps = [
            seconds
            for step, seconds in self._steps.items()
            if step >= first_step and step not in without and "step" in seconds
        ]
        names = {name for seconds in steps for name in seconds if f"{name}_s" in Phases.model_fields}
        return Phases(**{f"{name}_s": statistics.median(seconds[name] for seconds in steps) for name in names})

    def spans(self) -> tuple[Span, ...]:
        """Timeline of the last steps."""
        return tuple(self._spans)


TRACED_STEPS = SETTLING_STEPS + 1
"""Step 0 makes the optimizer states, step 1 lets DDP and DeepSpeed settle their buckets, step 2 is the steady one. Of
an optimizer of two stages it is the second step of the second stage, with rare communication a step with a meeting, of
a curriculum the second with whole samples; what lies between is not traced."""
NO_STEP = -1


def seconds_at_peak(flops: Mapping[torch.dtype, int], gpu: Device | None) -> float | None:
    """Compute the seconds that a GPU takes at its dense peak rates; None where a rate is not known.

    Args:
        flops: floating-point operations by the type of their numbers.
    """
    tf32 = torch.backends.cuda.matmul.allow_tf32
    names: dict[torch.dtype, Precision] = {
        torch.float32: "tf32" if tf32 else "fp32",
        torch.bfloat16: "bf16",
        torch.float16: "fp16",
    }
    rates = [gpu.peak_flops.get(names[dtype]) if gpu and dtype in names else None for dtype in flops]
    peak_rates = [rate for rate in rates if rate]
    # One type without a known rate, and the sum would be too small.
    if not flops or len(peak_rates) < len(rates):
        return None
    return sum(count / rate for count, rate in zip(flops.values(), peak_rates, strict=True))


class Probes:
    """Probes of one rank.

    Args:
        control: the group of the lab's own bookkeeping, counted apart; None with one process.
        trace: of the storages to measure; by default of those on the device.
    """

    def __init__(
        self,
        config: RunConfig,
        rank: int,
        device: torch.device,
        control: dist.ProcessGroup | None = None,
        trace: StorageTrace | None = None,
    ) -> None:
        self.config, self.rank, self._device = config, rank, device
        names = {str(control.group_name): "control"} if control is not None else {}
        self.trace = trace or StorageTrace(names, device_type=device.type)
        self.trace.tells_origins = config.script is not None
        self.memory = MemoryProbe(self.trace)
        self.clock = PhaseClock(rank, device, on_phase=self._phase_begins)
        self.timeline: tuple[MemorySample, ...] = ()
        self.steady_step = self._steady_from(0)
        """The step whose memory and communication are reported; the last traced one."""
        self._tracing = self._pauses = False
        self._engine: Engine | None = None
        self._phase = "setup"
        self._measured: Footprint | None = None
        self.global_batch: int | None = config.layout.global_batch
        """Samples of a step over all replicas; None where that is not known."""
        self._peak_s: float | None = None
        self.first_timed = 0
        """First step whose time counts, once one was measured."""
        self._traced_steps: set[int] = set()
        """Steps whose time does not count, of a script."""
        self._is_driven = False

    @property
    def is_tracing(self) -> bool:
        """Whether memory and communication are traced at this moment."""
        return self._tracing

    def become(self, rank: int) -> None:
        """Take another rank, with what was timed so far: that of a process which learns late who it is."""
        self.rank = rank
        self.clock.become(rank)

    def start(self) -> None:
        """Start tracing; to be called before the model is built."""
        self.trace.__enter__()
        self._tracing = True

    def attach(self, engine: Engine) -> None:
        """Attach all probes to an engine."""
        self._engine = engine
        self.trace.name_groups(engine.group_names)
        self.clock.attach(engine)
        self.memory.claim(engine.inventory())

    def begin_at(self, step: int) -> None:
        """Trace from this step on, after a resume.

        If too few steps are left to reach a steady one, none is traced: the first attempt's measurement stands.
        """
        if step and self.config.steps - step < TRACED_STEPS:
            self.close()
            self.steady_step = NO_STEP
        else:
            self.steady_step = self._steady_from(step)

    def _steady_from(self, step: int) -> int:
        first_full_step = first_whole_step(self.config) if self.config.curriculum != "none" else 0
        return settled_step(self.config, step, at_least=first_full_step + 1)

    def _phase_begins(self, phase: str) -> None:
        if not self._tracing or self._engine is None:
            return
        if phase == "data":
            if self._phase != "data":  # a pipeline reads all micro-batches before its first forward
                self.memory.before_forward(self._engine.inventory())
        elif self._phase == "forward":
            self.memory.claim_host(self._engine.offloaded())
            self.memory.after_forward(self._engine.inventory())
        else:
            self.memory.claim(self._engine.inventory())
        self._phase = self.trace.phase = phase

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Leave out memory that reading samples takes."""
        self.trace.loading = True
        try:
            yield
        finally:
            self.trace.loading = False

    def loaded(self, *batch: Tensor) -> None:
        """Track a micro-batch that was read, where the model will read it."""
        if self._tracing:
            for tensor in batch:
                self.trace.see(tensor)

    # A script's steps are traced as its watch decides: from one step on, or from a forward pass on whose inputs are
    # larger than those before.

    def follow_watch(self) -> None:
        """Leave it to the watch of a script which steps are traced and measured."""
        self._is_driven = self.memory.keeps_variables = True

    def resume(self, phase: str = "data") -> None:
        """Trace from here on, in this phase of a step; what an engine holds has been made since the last traced one."""
        self.start()
        self._phase = self.trace.phase = phase
        if self._engine is not None:
            self.memory.before_forward(self._engine.inventory())
        self._traced_steps.add(self.trace.step)

    def pause(self) -> None:
        """Trace no further for now."""
        self.close()

    def optimizer_bytes(self) -> int:
        """Sum the bytes of the optimizers' states at this moment."""
        return bytes_of(self._engine.inventory().get("optimizer", ())) if self._engine is not None else 0

    def enter_thread(self) -> None:
        """Trace what the calling thread computes too."""
        if self._tracing:
            self.trace.__enter__()

    def mark(self) -> StepMark:
        """Mark a moment at which the present step may have ended."""
        recorded = self.trace.trace
        of_step = ((kind, count) for (step, kind), count in recorded.flops_of_type.items() if step == self.trace.step)
        flops = Counter(dict(of_step))
        seconds = self.clock.seconds()
        return StepMark(time.perf_counter(), seconds, len(recorded.storages), len(recorded.calls), flops)

    def start_step(self, step: int, mark: StepMark | None = None) -> None:
        """Start a step, now or at a mark within the one before."""
        self.trace.step = step
        if self._is_driven and self._tracing:
            self._traced_steps.add(step)
        # One step before the steady one, so that what that step leaves behind is seen.
        if self._pauses and step == self.steady_step - 1:
            self._pauses = False
            self.start()
        self.clock.start_step(step, mark.time_s if mark is not None else None)

    def end_step(self, mark: StepMark | None = None) -> float:
        """End a step, now or at a mark within it; returns its seconds."""
        step_s = self.clock.end_step(mark)
        if self._tracing and self._engine is not None:
            if mark is not None:
                self.trace.trace.split(self.trace.step, mark.num_storages, mark.num_calls, mark.flops)
            self.memory.after_step(self._engine.inventory())
            if self._is_driven:
                pass  # its watch decides
            elif self.trace.step == self.steady_step:
                self._stop_tracing()
            elif self.trace.step < self.steady_step - 2:
                self._pauses = True  # all that outlives a step has been seen
                self.close()
        elif self._engine is not None and (overlap := self._engine.communications()) is not None:
            self.clock.communicated(overlap)
        return step_s

    def settle(self) -> None:
        """Report the last whole step, where the training has ended before the steady one."""
        if self._tracing and self.trace.step > 0 and self._measured is None:
            self.steady_step = self.trace.step - 1
            self._stop_tracing()
        self.close()

    def measure_if_largest(self, step: int) -> bool:
        """Measure a step that was traced, unless one with a larger peak was; returns whether it is the largest."""
        memory, timeline = self.memory.measure(step, self._device)
        before = self._measured.memory.peak_bytes if self._measured is not None else None
        if self._measured is None:
            self.first_timed = self.trace.step + 1
        # Of equal steps the first stays.
        if before is not None and (memory.peak_bytes or 0) <= before:
            return False
        self.steady_step = step
        self._measure(memory, timeline)
        return True

    def variables(self, named_tensors: Iterable[tuple[str, Tensor]]) -> dict[str, int]:
        """Claim what variables of a script hold, and sum its bytes by the variables' names, the largest first."""
        return self.memory.claim_variables(named_tensors)

    def _stop_tracing(self) -> None:
        self.close()
        self.first_timed = self.steady_step + 1
        self._measure(*self.memory.measure(self.steady_step, self._device))

    def _measure(self, memory: Memory, timeline: tuple[MemorySample, ...]) -> None:
        trace = self.trace.trace
        flops = {kind: count for (step, kind), count in trace.flops_of_type.items() if step == self.steady_step}
        gpu = device_of_driver(torch.cuda.get_device_name(self._device)) if self._device.type == "cuda" else None
        # Model FLOPs: what checkpointing computes again is work of the GPU and none of the model (PaLM, appendix B).
        of_model = {
            kind: count - trace.recomputed_of_type.get((self.steady_step, kind), 0) for kind, count in flops.items()
        }
        self._peak_s = seconds_at_peak(of_model, gpu)
        self.timeline = timeline
        computed_elsewhere = self.steady_step in self.trace.elsewhere  # other threads' operations are not seen
        self._measured = Footprint(
            source="measured",
            rank=self.rank,
            memory=memory,
            communication=traffic_of(trace.calls, self.steady_step, dp_every_steps=sending_interval(self.config)),
            step_flops=None if computed_elsewhere else trace.flops_of_step.get(self.steady_step, 0),
        )

    def close(self) -> None:
        """Stop tracing."""
        if self._tracing:
            self.trace.leave()
            self._tracing = False

    def footprint(self, parameters: int) -> Footprint | None:
        """Return the measurements so far; None before the steady step has ended."""
        if self._measured is None:
            return None
        phases: Phases = self.clock.phases(self.first_timed, without=self._traced_steps)
        samples_per_s = self.global_batch / phases.step_s if self.global_batch and phases.step_s else None
        # Seconds of the model's FLOPs at the peak rate over the measured ones.
        mfu = self._peak_s / phases.step_s if self._peak_s and phases.step_s else None
        return self._measured.model_copy(
            update={"parameters": parameters, "phases": phases, "samples_per_s": samples_per_s, "mfu": mfu}
        )
