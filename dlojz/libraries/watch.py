"""The probes attached to a program from outside: which calls of it begin a phase, and which end a step.

Layer 3, loads torch. Invariant: a program trains the same with and without its watch. What is looked at: the calls of
the outermost module, backward, the optimizers' steps, and the course's `report`, which ends a micro-batch.
"""

from __future__ import annotations

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from dlojz.config import RunConfig
from dlojz.libraries import LIBRARIES, course
from dlojz.libraries.seen import SeenDeepSpeed, SeenTorch, seen
from dlojz.record import EventLog, Status
from dlojz.text import say
from dlojz.train import loop
from dlojz.train.probes.probes import Probes
from dlojz.train.stop import StopRequest
from dlojz.train.telling import align_clocks, tell_measured


class Ended(BaseException):
    """The training ends before its last step; no program catches it."""


class Watch:
    """What one rank's program does, told to the probes and to the event file.

    Args:
        config: the run.
        events: this rank's.
        probes: of this rank, started.
        control: the lab's own group; None with one process.
        stop: whether this rank was told to stop.
    """

    def __init__(
        self,
        config: RunConfig,
        events: EventLog,
        probes: Probes,
        device: torch.device,
        control: dist.ProcessGroup | None,
        stop: StopRequest,
    ) -> None:
        self.engine: SeenTorch | SeenDeepSpeed | None = None
        self.parameters = 0
        self.step = 0
        self.ended: tuple[Status, str] = ("completed", "")
        self.config, self._events, self._probes, self._device = config, events, probes, device
        self._control, self._stop = control, stop
        self._losses: list[Tensor] = []
        self._batch: list[Tensor] = []
        self._phase = ""
        self._timed = contextlib.ExitStack()
        self._depth = self._forwards = 0
        self._module: nn.Module | None = None

    def _enter(self, phase: str) -> None:
        """From here on time and memory belong to this phase."""
        self._timed.close()
        self._phase = phase
        if phase:
            self._timed.enter_context(self._probes.clock.phase(phase))

    def meet(self) -> None:
        """All ranks are here, and none waits for another yet, as a later stage of a pipeline does in its first step."""
        if self._control is not None:
            align_clocks(self._probes, self._control, self._events)

    def called(self, module: nn.Module, inputs: Any) -> None:
        """A module is called: the outermost one, where a forward pass has not begun yet."""
        if get_worker_info() is not None:  # a forked process that loads: what transforms an image is a module too
            return
        if self._module is None:
            self._module = module
            self.engine = seen(self.config, module, self._device)
            self._probes.attach(self.engine)
            one = LIBRARIES[self.config.library]
            told = {"library": f"{one.title} {one.version}".strip(), "wrapped_in": type(module).__name__}
            self._events.write("device", device=loop.describe_device(self._device), **told)
            self._probes.start_step(0)
            self._enter("data")
        if module is not self._module or self._phase in ("backward", ""):  # within it, or recomputed
            return
        self._forwards += 1
        self._enter("forward")
        self._batch = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._probes.loaded(*self._batch)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to update."""
        if self.engine is not None and optimizer not in self.engine.optimizers:
            self.engine.optimizers.append(optimizer)

    def backwards(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """A library's call for backward, watched: what it calls in turn is part of it."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._depth == 0 and self._phase:
                self._enter("backward")
            self._depth += 1
            try:
                return method(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0 and self._phase == "backward":
                    self._enter("optimizer" if self._forwards == self.config.layout.micro_batches else "data")

        return watched

    def report(self, loss: Tensor) -> None:
        """A micro-batch is over, and with the last one its step."""
        self._losses.append(loss.detach())
        if len(self._losses) < self.config.layout.micro_batches:
            return
        mean = torch.stack(self._losses).float().mean().cpu()
        self._losses.clear()
        self._forwards = 0
        # The variables of the program's loop hold them until they are used again, which is no need of the training.
        self._probes.trace.release(*self._batch, loss)
        self._batch = []
        value, stopping = loop.agree(mean, self._stop.wanted, self._control)
        self._enter("")
        step_s = self._probes.end_step()
        if math.isfinite(value):
            self._events.write("step", step=self.step, loss=value, step_s=step_s)
            rank = self._probes.rank
            tell_measured(self._events, self._probes, self.step, rank, self.parameters)
        else:
            self._end("diverged", _diverged(value, self.step, self.config.learning_rate))
        self.step += 1
        if stopping and self.step < self.config.steps:
            self._end("timeout", _stopped(self.step))
        if self.step < self.config.steps:
            self._probes.start_step(self.step)
            self._enter("data")

    def _end(self, status: Status, reason: str) -> None:
        self.ended = (status, reason)
        raise Ended

    def close(self) -> None:
        """Nothing is watched any more."""
        self._timed.close()


def _diverged(loss: float, step: int, learning_rate: float) -> str:
    return (
        f"the loss became {loss} at step {step}; the weights were updated with it. "
        f"Try a smaller learning rate than {learning_rate:g}."
    )


def _stopped(steps: int) -> str:
    return say(
        en=f"told to stop after {steps} steps; a library's program keeps no checkpoint, so that it would begin anew.",
        fr=f"arrêté sur demande après {steps} pas ; le programme d’une bibliothèque ne garde pas de checkpoint, il "
        "reprendrait donc du début.",
    )


@contextlib.contextmanager
def watching(watch: Watch, probes: Probes) -> Iterator[None]:
    """While the program runs, its calls are seen; afterwards all is as before."""
    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        def model_built(args: Any) -> course.WithLoss:
            model = build_model(args)
            watch.parameters = sum(parameter.numel() for parameter in model.parameters())
            return model

        def while_loading(read: Callable[..., Any]) -> Callable[..., Any]:
            def reading(*args: Any, **kwargs: Any) -> Any:
                with probes.loading():
                    return read(*args, **kwargs)

            return reading

        def data_loaded(*args: Any, **kwargs: Any) -> Any:
            found = while_loading(data_loader)(*args, **kwargs)
            watch.meet()
            return found

        build_model, data_loader = course.build_model, course.data_loader
        put(course, "build_model", model_built)
        put(course, "data_loader", data_loaded)
        put(fetch._MapDatasetFetcher, "fetch", while_loading(fetch._MapDatasetFetcher.fetch))
        put(course, "report", watch.report)
        put(torch.Tensor, "backward", watch.backwards(torch.Tensor.backward))
        for place in LIBRARIES[watch.config.library].backward:
            module, owner, method = place.split(":")
            found = getattr(importlib.import_module(module), owner)
            put(found, method, watch.backwards(getattr(found, method)))
        for name in ("init_process_group", "destroy_process_group"):  # the ranks have met, and leave together
            put(dist, name, lambda *args, **kwargs: None)
        undo.callback(register_module_forward_pre_hook(watch.called).remove)
        undo.callback(register_optimizer_step_pre_hook(watch.stepped).remove)
        undo.callback(watch.close)
        yield
