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
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlojz.base.language import refusal, say
from dlojz.base.machine import StopRequest
from dlojz.config.deepspeed_json import deepspeed_json
from dlojz.config.run_config import RunConfig
from dlojz.libraries import course_training
from dlojz.libraries.library_catalogue import LIBRARIES, found, require, words_of
from dlojz.libraries.training_watch import SeenDeepSpeed, SeenTorch, TrainingWatch, seen, watching_torch, while_loading
from dlojz.results.record import EventLog, Status, write_atomic
from dlojz.train import loop
from dlojz.train.engines.deepspeed import load_deepspeed
from dlojz.train.loop import align_clocks, finish, leave, report_measured, write_footprint
from dlojz.train.probes import Probes


def seen_program(config: RunConfig, module: nn.Module, device: torch.device) -> SeenTorch | SeenDeepSpeed:
    """Build the engine that the probes read, from the outermost module that a library's program calls."""
    if config.library == "megatron":
        found: SeenTorch = import_module("dlojz.libraries.megatron_inspection").SeenMegatron(config, module, device)
        return found
    if config.library == "colossalai":
        module = cast(nn.Module, module.module)  # one more wrapper around torch's DDP
    return seen(config, module, device)


class Ended(BaseException):
    """The training ends before its last step; no program catches it."""


class ProgramWatch(TrainingWatch):
    """Watch of a library's program, whose `report` ends a micro-batch.

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
        super().__init__(config, events, probes, device)
        self._control, self._stop = control, stop
        self._losses: list[Tensor] = []
        self._module: nn.Module | None = None

    def meet(self) -> None:
        """Align the ranks' clocks, before a later stage of a pipeline waits in its first step."""
        if self._control is not None:
            align_clocks(self._probes, self._control, self._events)

    def _is_trained(self, module: nn.Module) -> bool:
        """Whether it is the module that was called first of all."""
        if self._module is None:
            self._module = module
            one = LIBRARIES[self.config.library]
            engine = seen_program(self.config, module, self._device)
            self._attach(engine, module, library=f"{one.title} {one.version}".strip())
        return module is self._module

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


@contextlib.contextmanager
def watching(watch: ProgramWatch, probes: Probes) -> Iterator[None]:
    """Watch the program's calls within this context; afterwards all is as before."""
    with watching_torch(watch, probes) as undo:

        def model_built(args: Any) -> course_training.WithLoss:
            model = build_model(args)
            watch.parameters = sum(parameter.numel() for parameter in model.parameters())
            return model

        def data_loaded(*args: Any, **kwargs: Any) -> Any:
            found = while_loading(probes, data_loader)(*args, **kwargs)
            watch.meet()
            return found

        build_model, data_loader = course_training.build_model, course_training.data_loader
        undo.put(course_training, "build_model", model_built)
        undo.put(course_training, "data_loader", data_loaded)
        undo.put(course_training, "report", watch.report)
        for place in LIBRARIES[watch.config.library].backward:
            module, owner, method = place.split(":")
            found = getattr(importlib.import_module(module), owner)
            undo.put(found, method, watch.backwards(getattr(found, method)))
        for name in ("init_process_group", "destroy_process_group"):  # the ranks have met, and leave together
            undo.put(dist, name, lambda *args, **kwargs: None)
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
