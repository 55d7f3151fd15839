"""Replay a training step of one rank: the trace of a micro-batch, the states and the engine's memory into a ledger.

A step without a pipeline is replayed here; that of a pipeline's rank, action by action, in `pipeline_memory`.
"""

from __future__ import annotations

from dlojz.config.run_config import RunConfig
from dlojz.prediction.engine_memory import EngineMemory, Ledger
from dlojz.prediction.model_trace import block_of
from dlojz.prediction.trace import Allocation, MemoryTrace, TraceMark
from dlojz.results.footprint import STATES, Category, Memory

REPLAYED_MICRO_BATCHES = 3
"""The second micro-batch stands for all that follow it but the last."""


class StepReplay:
    """Replay of a step: the trace of one micro-batch through a ledger, as often as the step has micro-batches.

    Args:
        config: the run.
        trace: of this rank.
        states: of this rank, as they are from step to step.
        overlay: of the engine.
        samples_bytes: kept of the step's samples.
        ledger: to write in; by default a new one.
    """

    def __init__(
        self,
        config: RunConfig,
        trace: MemoryTrace,
        states: Memory,
        overlay: EngineMemory,
        *,
        samples_bytes: int = 0,
        ledger: Ledger | None = None,
    ) -> None:
        self.config, self.trace, self.overlay = config, trace, overlay
        self.ledger = ledger or Ledger()
        self.micro_batch = 0
        self.gradient_bytes = 0
        """Bytes of the gradients that autograd makes, where the engine keeps them; larger than the parameters where a
        gradient is a view of a larger tensor."""
        self.without_gradient: tuple[str, ...] = ()
        """Names of parameters that backward does not reach though they are not frozen."""
        self._samples_bytes = samples_bytes
        self.states = states
        self._is_gradient = {
            event.storage: event.name
            for event in trace.events
            if isinstance(event, TraceMark) and event.what == "ready"
        }
        self._accumulated: set[str] = set()
        self._phase = ""

    @property
    def last(self) -> bool:
        """Whether no other micro-batch follows in this step."""
        return self.micro_batch == self.config.layout.micro_batches - 1

    def free_gradient(self, name: str) -> None:
        """Free the gradient that autograd has just made."""
        self.ledger.drop(("gradient", name))

    def run(self) -> Ledger:
        """Replay the whole step; called again, the next one."""
        ledger = self.ledger
        self._at("between steps")
        if not ledger.holds(("state", "weights", 0)):
            self._hold_states()
        self.overlay.begin_step(self)
        self._at("forward")
        if self._samples_bytes:
            ledger.hold(("samples",), "activations", self._samples_bytes)
        self._micro_batches()
        ledger.drop(("samples",))
        self._at("optimizer")
        self.overlay.update(self)
        for name in self.overlay.by_name:
            self.free_gradient(name)
        self.overlay.end_step(self)
        self._accumulated.clear()
        return ledger

    def _micro_batches(self) -> None:
        """Replay forward and backward of the micro-batches."""
        former, count = -1, self.config.layout.micro_batches
        for number in range(count):
            if number < REPLAYED_MICRO_BATCHES - 1 or number == count - 1:
                self.micro_batch = number
                self._pass(former)
                former = number
        self._forget_batch(self.micro_batch)

    def _hold_states(self) -> None:
        for category in STATES:
            if category == "gradients" and not self.overlay.gradients_stay:
                continue
            own = self.states.category(category) or 0
            if category == "weights":
                own -= self.overlay.gathered_bytes()
            if category == "optimizer":
                own -= self.overlay.renewed_bytes()
            for number, piece in enumerate(self.overlay.pieces(category, own)):
                self.ledger.hold(("state", category, number), category, piece)
        for name, (category, num_bytes) in self.overlay.standing().items():
            self.ledger.hold(("standing", name), category, num_bytes)

    def _at(self, phase: str, module: str = "") -> None:
        if phase != self._phase and phase == "backward":
            self._phase = phase
            self.overlay.begin_backward(self)
        self._phase = self.ledger.moment = phase
        self.ledger.detail = (self.micro_batch, module)

    def _forget_batch(self, number: int) -> None:
        for storage in self.trace.kept:
            self.ledger.drop(("storage", number, storage))

    def _pass(self, former: int) -> None:
        """Forward and backward of a micro-batch; the `former` one's samples go once this one's are there."""
        number = self.micro_batch
        for event in self.trace.events:
            if isinstance(event, TraceMark):
                self._mark(event)
                continue
            if event.phase == "forward" and former >= 0:
                self._forget_batch(former)
                former = -1
            self._at(event.phase, event.module)
            self._allocate(event, number)
        self.end_backward()

    def end_backward(self) -> None:
        """End the backward pass of a micro-batch."""
        self.overlay.end_backward(self)
        kept = [name for name in self.overlay.by_name if self.ledger.holds(("gradient", name))]
        self.gradient_bytes = max(self.gradient_bytes, sum(self.ledger.bytes_of(("gradient", name)) for name in kept))

    def _allocate(self, event: Allocation, number: int) -> None:
        name, block = self._is_gradient.get(event.storage), block_of(event.module)
        if name is not None:
            if event.delta_bytes > 0:
                added = name in self._accumulated or not self.overlay.keeps_gradients
                category: Category = "gradients" if self.overlay.gradients_are_states and not added else "workspace"
                self.ledger.hold(("gradient", name, "new"), category, event.delta_bytes, block)
            return
        key = ("storage", number, event.storage)
        if event.delta_bytes < 0:
            self.ledger.drop(key)
        elif event.delta_bytes == 0:
            self.ledger.hold(("nothing",), "workspace", 0, block)  # a slot begins, or a sum in place
        elif event.storage in self.trace.on_host:
            self.ledger.hold_on_host(key, event.delta_bytes)
        else:
            category = "activations" if event.storage in self.trace.kept else "workspace"
            self.ledger.hold(key, category, event.delta_bytes, block)

    def _mark(self, event: TraceMark) -> None:
        if event.what == "weights":
            return  # the weights' half of a backward; its gradients follow
        if event.what != "ready":
            getattr(self.overlay, event.what)(self, event.name)
            return
        new, kept = ("gradient", event.name, "new"), ("gradient", event.name)
        if event.name in self._accumulated and self.overlay.keeps_gradients:
            self.ledger.drop(new)  # added into the gradient that is there
        else:
            self.ledger.rename(new, kept)
            self._accumulated.add(event.name)
        parameter = self.overlay.by_name.get(event.name)
        if parameter is not None:
            self.overlay.ready(self, parameter)
