"""Seconds by phase, by timing an engine's own methods from outside.

Layer 3. Invariant: attaching wraps three methods of one engine object and detaching gives them back; the engine's code
is untouched. Durations are monotonic.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dlojz.footprint import Overlap, Phases
from dlojz.pipeline.action import FORWARD, UPDATE, Action
from dlojz.record import Span
from dlojz.train.engines.base import Engine
from dlojz.train.engines.pipeline import PipelineEngine

PHASE_OF_METHOD = {"forward": "forward", "backward": "backward", "update": "optimizer"}
_PHASE_OF_ACTION = {FORWARD: "forward", UPDATE: "optimizer"}
KEPT_SPANS = 3
Perform = Callable[[Action, Callable[[], None]], None]


class PhaseClock:
    """Times the phases of every step on this rank.

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
        if isinstance(engine, PipelineEngine):
            engine.perform = self._performed(engine.perform)  # type: ignore[method-assign,assignment]

    def detach(self, engine: Engine) -> None:
        """Give the engine its own methods back."""
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
        """Around a step's whole schedule: the time in which no action of this rank computes is its bubble."""
        seconds = self._steps.setdefault(self._step, defaultdict(float))
        start_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - start_s
        seconds["bubble"] += max(0.0, took_s - seconds["forward"] - seconds["backward"])

    @contextmanager
    def phase(self, name: str, action: str = "") -> Iterator[None]:
        """Time what happens within as one phase of the present step."""
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

    def align(self, origin_s: float) -> None:
        """Count the timeline from this moment of the rank's own clock, which is the same moment on all ranks."""
        self._origin_s, self._aligned = origin_s, True

    def start_step(self, step: int) -> None:
        """Begin a step; the timeline keeps the last few."""
        if not self._steps and not self._aligned:
            self._origin_s = time.perf_counter()
        self._step = step
        self._spans = [span for span in self._spans if span.step > step - KEPT_SPANS]
        self._started_s = time.perf_counter()

    def end_step(self) -> float:
        """End the step; returns its seconds."""
        step_s = time.perf_counter() - self._started_s
        self._steps.setdefault(self._step, defaultdict(float))["step"] = step_s
        return step_s

    def communicated(self, overlap: Overlap) -> None:
        """Note how the present step's communication lay beside its backward pass: a span for each, one for the wait."""
        seconds = self._steps.setdefault(self._step, defaultdict(float))
        seconds["communication_exposed"] = overlap.exposed_s
        seconds["communication_hidden"] = overlap.hidden_s
        for left_s, arrived_s in overlap.intervals:
            self._keep("communication", left_s, arrived_s)
        if overlap.exposed_s:
            self._keep("wait", overlap.compute_end_s, overlap.compute_end_s + overlap.exposed_s)

    def phases(self, first_step: int) -> Phases:
        """Median seconds by phase over the steps from `first_step` on; all None where there is none."""
        steps = [seconds for step, seconds in self._steps.items() if step >= first_step]
        names = {name for seconds in steps for name in seconds if f"{name}_s" in Phases.model_fields}
        return Phases(**{f"{name}_s": statistics.median(seconds[name] for seconds in steps) for name in names})

    def spans(self) -> tuple[Span, ...]:
        """Timeline of the last steps."""
        return tuple(self._spans)
