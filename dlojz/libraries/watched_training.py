"""Watch a library's program from outside: its own `main` as a run of the lab, with the probes attached.

The program's text and command line are those of its user. A program trains the same with and without its watch, which
reads the library's own objects, the calls of the outermost module, backward, the optimizers' steps, and the course's
`report`, which ends a micro-batch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch

from dlojz.base.language import refusal, say
from dlojz.base.machine import StopRequest
from dlojz.config.deepspeed_json import deepspeed_json
from dlojz.config.run_config import RunConfig
from dlojz.libraries import course_training
from dlojz.libraries.library_catalogue import LIBRARIES, found, require, words_of
from dlojz.results.record import EventLog, Status, write_atomic
from dlojz.train import loop
from dlojz.train.engines.base import Engine, Inventory, locals_of, optimizer_states
from dlojz.train.engines.deepspeed import DeepSpeedEngine, load_deepspeed
from dlojz.train.engines.replicated import DDPEngine
from dlojz.train.loop import align_clocks, finish, leave, report_measured, write_footprint
from dlojz.train.probes import Probes

_WRAPPERS = ("module.", "network.", "_orig_mod.")


def plain_name(name: str) -> str:
    """Remove the wrappers' names from a parameter's name."""
    while name.startswith(_WRAPPERS):
        name = name.split(".", 1)[1]
    return name


class SeenTorch(Engine):
    """Engine around a model that torch trains, built by a program.

    Args:
        module: the outermost module, which the program calls.
    """

    def __init__(self, config: RunConfig, module: nn.Module, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model = self.module = module
        self.optimizers: list[torch.optim.Optimizer] = []
        """Those that have made a step, in the order of their first step."""

    @property
    def group_names(self) -> dict[str, str]:
        """Axis of each process group: none is named, since all ranks are replicas."""
        return {}

    def inventory(self) -> Inventory:
        parameters = list(self.module.parameters())
        return locals_of(
            {
                "weights": [*parameters],
                "gradients": [parameter.grad for parameter in parameters if parameter.grad is not None],
                "optimizer": [state for optimizer in self.optimizers for state in optimizer_states(optimizer)],
                "buffers": list(self.module.buffers()),
            }
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            whole = parameter.detach()
            # Who: all ranks. What: one parameter, all-gathered whole where it is sharded; at the end of the run only.
            yield plain_name(name), (whole.full_tensor() if isinstance(whole, DTensor) else whole).cpu()

    def close(self) -> None:
        """Close nothing: the objects are the program's."""


class SeenDDP(SeenTorch):
    """Engine around torch's DDP, which times its messages."""

    def __init__(self, config: RunConfig, module: DistributedDataParallel, device: torch.device) -> None:
        super().__init__(config, module, device)
        module._set_ddp_runtime_logging_sample_rate(1)  # a few clock readings per step: it times every step

    communications = DDPEngine.communications


class SeenDeepSpeed(DeepSpeedEngine):
    """Engine around a model that DeepSpeed trains."""

    def __init__(self, config: RunConfig, module: Any, device: torch.device) -> None:
        self.config, self.device, self.offload = config, device, None
        self.model, self.module, self.optimizer = module, module.module, module.optimizer
        self.optimizers: list[torch.optim.Optimizer] = []

    group_names = SeenTorch.group_names

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        for name, weight in super().weights():
            yield plain_name(name), weight


def seen(config: RunConfig, module: nn.Module, device: torch.device) -> SeenTorch | SeenDeepSpeed:
    """Build the engine that the probes read, from the outermost module that a program calls."""
    if config.library == "megatron":
        found: SeenTorch = import_module("dlojz.libraries.megatron_inspection").SeenMegatron(config, module, device)
        return found
    if type(module).__module__.startswith("deepspeed."):
        return SeenDeepSpeed(config, module, device)
    if config.library == "colossalai":
        module = cast(nn.Module, module.module)  # one more wrapper around torch's DDP
    if isinstance(module, DistributedDataParallel):
        return SeenDDP(config, module, device)
    return SeenTorch(config, module, device)


class Ended(BaseException):
    """The training ends before its last step; no program catches it."""


class ProgramWatch:
    """Report the calls of one rank's program to the probes and to the event file.

    Args:
        probes: of this rank, started.
        control: the lab's own group; None with one process.
        stop: whether this rank is asked to stop.
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
        """Begin a phase of time and memory."""
        self._timed.close()
        self._phase = phase
        if phase:
            self._timed.enter_context(self._probes.clock.phase(phase))

    def meet(self) -> None:
        """Align the ranks' clocks, before a later stage of a pipeline waits in its first step."""
        if self._control is not None:
            align_clocks(self._probes, self._control, self._events)

    def called(self, module: nn.Module, inputs: Any) -> None:
        """Note the call of a module: the outermost one, if no forward pass has begun yet."""
        if get_worker_info() is not None:  # a forked process that loads: an image transform is a module too
            return
        if self._module is None:
            self._module = module
            self.engine = seen(self.config, module, self._device)
            self._probes.attach(self.engine)
            one = LIBRARIES[self.config.library]
            self._events.write(
                "device",
                device=loop.describe_device(self._device),
                library=f"{one.title} {one.version}".strip(),
                wrapped_in=type(module).__name__,
            )
            self._probes.start_step(0)
            self._enter("data")
        if module is not self._module or self._phase in ("backward", ""):  # within it, or recomputed
            return
        self._forwards += 1
        self._enter("forward")
        self._batch = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        self._probes.loaded(*self._batch)

    def stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Note the optimizer that is about to update."""
        if self.engine is not None and optimizer not in self.engine.optimizers:
            self.engine.optimizers.append(optimizer)

    def backwards(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a library's call for backward; calls within it are part of it."""

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
        """End a micro-batch, and with the last one its step."""
        self._losses.append(loss.detach())
        if len(self._losses) < self.config.layout.micro_batches:
            return
        mean = torch.stack(self._losses).float().mean().cpu()
        self._losses.clear()
        self._forwards = 0
        # The variables of the program's loop hold them until they are used again: the training does not need them.
        self._probes.trace.release(*self._batch, loss)
        self._batch = []
        value, stopping = loop.agree(mean, self._stop.wanted, self._control)
        self._enter("")
        step_s = self._probes.end_step()
        if math.isfinite(value):
            self._events.write("step", step=self.step, loss=value, step_s=step_s)
            report_measured(self._events, self._probes, self.step, self._probes.rank, self.parameters)
        else:
            self._end("diverged", loop.diverged(value, self.step, self.config, updated=True))
        self.step += 1
        if stopping and self.step < self.config.steps:
            sentence = say(
                en=f"told to stop after {self.step} steps; a library's program keeps no checkpoint, so that it would "
                "begin anew.",
                fr=f"arrêté sur demande après {self.step} pas ; le programme d’une bibliothèque ne garde pas de "
                "checkpoint, il reprendrait donc du début.",
            )
            self._end("timeout", sentence)
        if self.step < self.config.steps:
            self._probes.start_step(self.step)
            self._enter("data")

    def _end(self, status: Status, reason: str) -> None:
        self.ended = (status, reason)
        raise Ended

    def close(self) -> None:
        """Stop watching."""
        self._timed.close()


@contextlib.contextmanager
def watching(watch: ProgramWatch, probes: Probes) -> Iterator[None]:
    """Watch the program's calls within this context; afterwards all is as before."""
    with contextlib.ExitStack() as undo:

        def put(owner: Any, name: str, value: Any) -> None:
            undo.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)

        def model_built(args: Any) -> course_training.WithLoss:
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

        build_model, data_loader = course_training.build_model, course_training.data_loader
        put(course_training, "build_model", model_built)
        put(course_training, "data_loader", data_loaded)
        put(fetch._MapDatasetFetcher, "fetch", while_loading(fetch._MapDatasetFetcher.fetch))
        put(course_training, "report", watch.report)
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


DEEPSPEED_FILE = "ds_config.json"
"""DeepSpeed's configuration in the run folder, where the library reads one."""


@contextlib.contextmanager
def _as_launched() -> Iterator[None]:
    """Set an address, which some libraries insist on, where the ranks have met without one."""
    set_here = {
        name: value for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")) if name not in os.environ
    }
    os.environ |= set_here
    try:
        yield
    finally:
        for name in set_here:
            os.environ.pop(name, None)


def train_as_written(
    config: RunConfig,
    folder: Path,
    events: EventLog,
    *,
    rank: int,
    local_rank: int,
    stop: StopRequest,
) -> tuple[Status, str]:
    """Run the program of `config.library` on this rank and write its events.

    Returns the status and its reason, as `dlojz.train.loop.train`.

    Raises:
        LabError: if the library is not installed.
    """
    require(config.library)
    layout = config.layout
    device = loop.choose_device(config, local_rank)
    loop.init_process_group(folder, device, rank, layout.world_size)
    control = dist.new_group(backend="gloo", timeout=loop.GROUP_TIMEOUT) if layout.world_size > 1 else None
    events.write("device", device=loop.describe_device(device))
    _prepare(config, folder, device, rank, control)
    program = importlib.import_module(LIBRARIES[config.library].module)
    probes = Probes(config, rank, device, control)
    watch = ProgramWatch(config, events, probes, device, control, stop)
    probes.start()
    try:
        with _as_launched(), watching(watch, probes), contextlib.suppress(Ended):
            program.main(words_of(config, folder / DEEPSPEED_FILE))
    finally:
        probes.close()
        write_footprint(events, probes, watch.parameters)
        events.write("spans", spans=[span.to_dict() for span in probes.clock.spans()])
    if watch.engine is None:
        raise refusal(
            en=f"the program {LIBRARIES[config.library].program.name} has called no model.",
            fr=f"le programme {LIBRARIES[config.library].program.name} n’a appelé aucun modèle.",
        )
    status, reason = watch.ended
    if status == "timeout":
        leave(watch.engine)
    else:
        finish(config, folder, events, watch.engine, rank)
    return status, reason


def _prepare(
    config: RunConfig, folder: Path, device: torch.device, rank: int, control: dist.ProcessGroup | None
) -> None:
    """Write DeepSpeed's file where the program reads one, and load DeepSpeed."""
    if config.layout.engine != "deepspeed":
        return
    load_deepspeed(device)
    if config.library == "accelerate" and device.type == "cuda" and not found("transformers"):
        raise refusal(
            en="the DeepSpeed plugin of Accelerate imports transformers, which is not installed: install it by "
            ".venv/bin/pip install transformers, or use library='deepspeed'.",
            fr="le plugin DeepSpeed d’Accelerate importe transformers, qui n’est pas installé : installez-le par "
            ".venv/bin/pip install transformers, ou prenez library='deepspeed'.",
        )
    if rank == 0:
        write_atomic(folder / DEEPSPEED_FILE, json.dumps(deepspeed_json(config), indent=2))
    if control is not None:
        dist.barrier(group=control)  # Who: all ranks, once, in the control group. What: that the file is there.
