"""All probes of one rank, attached together.

Layer 3. Invariant: the first steps are traced (memory and communication), the others timed; a step is never both, so
that tracing slows down no step whose time is reported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from dlojz.config import RunConfig
from dlojz.curriculum import first_whole_step
from dlojz.footprint import Footprint, Phases
from dlojz.optimizer_stages import SETTLING_STEPS, sending_interval, settled_step
from dlojz.record import MemorySample
from dlojz.train.engines.base import Engine
from dlojz.train.probes.clock import PhaseClock
from dlojz.train.probes.communication import traffic_of
from dlojz.train.probes.memory import MemoryProbe
from dlojz.train.probes.trace import StorageTrace

TRACED_STEPS = SETTLING_STEPS + 1
"""Step 0 makes the optimizer states, step 1 lets DDP and DeepSpeed settle their buckets, step 2 is the steady one. Of
an optimizer of two stages it is the second step of the second stage, of one whose replicas go alone a step after which
they meet, of a curriculum the second with whole samples; what lies between is not traced."""
NO_STEP = -1


class Probes:
    """The probes of one rank.

    Args:
        config: the run.
        rank: this rank.
        device: where it trains.
        control: the group of the lab's own bookkeeping, counted apart; None with one process.
    """

    def __init__(
        self, config: RunConfig, rank: int, device: torch.device, control: dist.ProcessGroup | None = None
    ) -> None:
        self.config, self.rank, self._device = config, rank, device
        names = {str(control.group_name): "control"} if control is not None else {}
        self.trace = StorageTrace(names, device_type=device.type)
        self.memory = MemoryProbe(self.trace)
        self.clock = PhaseClock(rank, device, on_phase=self._phase_begins)
        self.timeline: tuple[MemorySample, ...] = ()
        self.steady_step = self._steady_from(0)
        """The step whose memory and communication are reported; the last one that is traced."""
        self._tracing = self._pauses = False
        self._engine: Engine | None = None
        self._phase = "setup"
        self._measured: Footprint | None = None

    def start(self) -> None:
        """Trace from here on: call it before the model is built."""
        self.trace.__enter__()
        self._tracing = True

    def attach(self, engine: Engine) -> None:
        """Observe this engine."""
        self._engine = engine
        self.trace.name_groups(engine.group_names)
        self.clock.attach(engine)
        self.memory.claim(engine.inventory())

    def begin_at(self, step: int) -> None:
        """The run goes on from a checkpoint: the first steps from this one on are traced.

        Where too few are left to reach a steady one, none is: what the first attempt has measured stands.
        """
        if step and self.config.steps - step < TRACED_STEPS:
            self.close()
            self.steady_step = NO_STEP
        else:
            self.steady_step = self._steady_from(step)

    def _steady_from(self, step: int) -> int:
        whole = first_whole_step(self.config) if self.config.curriculum != "none" else 0
        return settled_step(self.config, step, at_least=whole + 1)

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
        """While samples are read: what that takes is no memory of the training."""
        self.trace.loading = True
        try:
            yield
        finally:
            self.trace.loading = False

    def loaded(self, *batch: Tensor) -> None:
        """A micro-batch was read, and is where the model will read it."""
        if self._tracing:
            for tensor in batch:
                self.trace.see(tensor)

    def start_step(self, step: int) -> None:
        """A step begins."""
        self.trace.step = step
        if self._pauses and step == self.steady_step - 1:
            self._pauses = False
            self.start()
        self.clock.start_step(step)

    def end_step(self) -> float:
        """A step has ended; returns its seconds."""
        step_s = self.clock.end_step()
        if self._tracing and self._engine is not None:
            self.memory.after_step(self._engine.inventory())
            if self.trace.step == self.steady_step:
                self._stop_tracing()
            elif self.trace.step < self.steady_step - 2:
                self._pauses = True  # all that outlives a step is seen, and is followed from a distance
                self.close()
        elif self._engine is not None and (overlap := self._engine.communications()) is not None:
            self.clock.communicated(overlap)
        return step_s

    def _stop_tracing(self) -> None:
        self.trace.__exit__(None, None, None)
        self._tracing = False
        memory, self.timeline = self.memory.measure(self.steady_step, self._device)
        self._measured = Footprint(
            source="measured",
            rank=self.rank,
            memory=memory,
            communication=traffic_of(
                self.trace.trace.calls, self.steady_step, dp_every_steps=sending_interval(self.config)
            ),
            step_flops=self.trace.trace.flops_of_step.get(self.steady_step, 0),
        )

    def close(self) -> None:
        """Stop tracing, however the run has ended."""
        if self._tracing:
            self.trace.__exit__(None, None, None)
            self._tracing = False

    def footprint(self, parameters: int) -> Footprint | None:
        """All that is measured so far; None before the steady step has ended."""
        if self._measured is None:
            return None
        phases: Phases = self.clock.phases(first_step=self.steady_step + 1)
        samples_per_s = self.config.layout.global_batch / phases.step_s if phases.step_s else None
        return self._measured.model_copy(
            update={"parameters": parameters, "phases": phases, "samples_per_s": samples_per_s}
        )
