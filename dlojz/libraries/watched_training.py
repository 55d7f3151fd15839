"""Train by a library's program, as a run of the lab, and watch all that such a training or any script calls.

The program's text and command line are those of its user. Only what the lab's runs have in common is added: a loss and
an end that all ranks agree on, and final weights under the lab's names.

While it is watched, torch's calls are wrapped: modules, backward, optimizers, compiled functions, loaders of samples.
The wrappers know nothing of steps: they report to the `TrainingWatch`. Afterwards all is as before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import math
import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import eval_frame
from torch.distributed import device_mesh, distributed_c10d
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data._utils import fetch

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import refusal, say
from dlojz.base.machine import StopRequest
from dlojz.base.requirements import missing_library
from dlojz.config.deepspeed_json import deepspeed_json
from dlojz.config.run_config import RunConfig
from dlojz.libraries.library_catalogue import LIBRARIES, found, require, words_of
from dlojz.libraries.scripts.first_step import Replacements, num_parameters
from dlojz.libraries.step_ledger import StepAccounts
from dlojz.libraries.training_watch import TrainingWatch
from dlojz.results.record import EventLog, Status
from dlojz.train import loop
from dlojz.train.engines.deepspeed import load_deepspeed
from dlojz.train.loop import align_clocks, finish, leave
from dlojz.train.probes import Probes


def eager_while_traced(compiling: Callable[..., Any], watch: TrainingWatch, probes: Probes) -> Callable[..., Any]:
    """Wrap what makes a compiled function: it calls the function itself as long as the probes trace.

    Afterwards a module that was compiled in place (`module.compile()`) calls no hook: it is reported here.
    """

    def made(context: Any, function: Any) -> Any:
        compiled = compiling(context, function)
        if isinstance(function, nn.Module | type):
            return compiled
        owner = getattr(function, "__self__", None)

        @functools.wraps(compiled)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            # Under the probes' dispatch mode torch compiles nothing: the function itself is called.
            if probes.is_tracing:
                return function(*args, **kwargs)
            if not isinstance(owner, nn.Module):
                return compiled(*args, **kwargs)
            watch.called(owner, args)
            result = compiled(*args, **kwargs)
            watch.returned(owner, args, result)
            return result

        chosen._torchdynamo_wrapper_id = id(chosen)  # type: ignore[attr-defined]  # by which torch unwraps it
        return chosen

    return made


@contextlib.contextmanager
def watching(watch: TrainingWatch, probes: Probes) -> Iterator[Replacements]:
    """Watch everything that is called within this context; afterwards all is as before."""
    # Where `torch.compile` meets a wrapper or an optimizer's hook, it breaks its graph, and both are called.
    plain = torch.compiler.disable
    with Replacements() as undo:

        def then(method: Callable[..., Any], note: Callable[..., Any], *, with_self: bool) -> Callable[..., Any]:
            @functools.wraps(method)
            def followed(*args: Any, **kwargs: Any) -> Any:
                result = method(*args, **kwargs)
                note(*args[: int(with_self)])
                return result

            return followed

        # Three modules hold the function under this name.
        for owner in (dist, distributed_c10d, device_mesh):
            if hasattr(owner, "init_process_group"):
                joined = then(owner.init_process_group, watch.meet, with_self=False)
                undo.put(owner, "init_process_group", joined)
        init = then(torch.optim.Optimizer.__init__, watch.made, with_self=True)
        undo.put(torch.optim.Optimizer, "__init__", init)
        undo.put(BaseProcess, "start", then(BaseProcess.start, watch.began_process, with_self=False))
        undo.put(subprocess.Popen, "__init__", then(subprocess.Popen.__init__, watch.began_process, with_self=False))
        for kind in (torch.optim.Optimizer, nn.Module):
            undo.put(kind, "zero_grad", plain(then(kind.zero_grad, watch.zeroed, with_self=True)))
        # The watch of a library's program has ended the recording: it predicts from the configuration.
        if not watch.first.over:
            watch.first.watch()
        compiling = eager_while_traced(eval_frame.OptimizeContext.__call__, watch, probes)
        undo.put(eval_frame.OptimizeContext, "__call__", compiling)
        undo.put(fetch._MapDatasetFetcher, "fetch", while_loading(probes, fetch._MapDatasetFetcher.fetch))
        undo.put(torch.Tensor, "backward", plain(watch.backwards(torch.Tensor.backward)))
        undo.put(torch.autograd, "backward", plain(watch.backwards(torch.autograd.backward)))
        undo.put(torch.amp.GradScaler, "step", plain(watch.scaler_step(torch.amp.GradScaler.step)))
        undo.put(torch.amp.GradScaler, "scale", plain(watch.scaler_scale(torch.amp.GradScaler.scale)))
        watch.time_messages(undo)
        undo.callback(register_module_forward_pre_hook(watch.called).remove)
        # Called where the module raises, too: no call is left open.
        undo.callback(register_module_forward_hook(watch.returned, always_call=True).remove)
        undo.callback(register_optimizer_step_pre_hook(plain(watch.stepped)).remove)
        undo.callback(register_optimizer_step_post_hook(plain(watch.after_update)).remove)
        # Put on the stack last, so that the watch closes before anything is put back.
        undo.callback(watch.close)
        warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
        yield undo


def while_loading(probes: Probes, reader: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads samples, whose memory is none of the training's."""

    def reading(*args: Any, **kwargs: Any) -> Any:
        with probes.loading():
            return reader(*args, **kwargs)

    return reading


class Ended(BaseException):
    """The training ends before its last step; no program catches it."""


class ProgramWatch(TrainingWatch):
    """Watch of a library's program, whose ranks agree at the end of each step, as in the lab's own loop.

    Args:
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
        self._control, self._stop, self._stopping = control, stop, False
        self._usual_forwards = config.layout.micro_batches
        self.first.end()  # what is predicted follows from the configuration
        with torch.device("meta"):
            self._whole = num_parameters([loop.build_model(config)])

    def _train(self, models: list[torch.nn.Module]) -> None:
        super()._train(models)
        self._held = models  # whose final weights are read when the program has ended
        self.parameters = self._whole  # of which this rank may have a slice or a stage

    survives_faults = False

    def _loss(self, accounts: StepAccounts) -> float:
        """The loss of the step on all ranks."""
        local = super()._loss(accounts)
        part = 0.0 if local is None else local * self.config.layout.pp  # of a pipeline, the last stage alone has it
        loss, self._stopping = loop.agree(torch.tensor(part), self._stop.wanted, self._control)
        if not math.isfinite(loss):
            self._end("diverged", loop.diverged(loss, self.step, self.config, updated=True))
        return loss

    def _end_step(self, boundary: Any = None) -> None:
        # The variables of the program's loop hold them until they are used again: the training does not need them.
        self._probes.trace.release(*self._batch, *(loss.value for loss in self._accounts.losses))
        super()._end_step(boundary)
        if self._stopping and self.step < self.config.steps:
            sentence = say(
                en=f"told to stop after {self.step} steps; a library's program keeps no checkpoint, so that it would "
                "begin anew.",
                fr=f"arrêté sur demande après {self.step} pas ; le programme d’une bibliothèque ne garde pas de "
                "checkpoint, il reprendrait donc du début.",
            )
            self._end("timeout", sentence)

    def _end(self, status: Status, reason: str) -> None:
        self.ended = (status, reason)
        raise Ended


DEEPSPEED_FILE = "ds_config.json"
"""DeepSpeed's configuration in the run folder, where the library reads one."""


def train_as_written(
    config: RunConfig, folder: Path, events: EventLog, *, rank: int, local_rank: int, stop: StopRequest
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
    if control is not None:
        align_clocks(probes, control, events)
    probes.start()
    try:
        with contextlib.suppress(Ended), watching(watch, probes) as undo:
            for name, value in (("MASTER_ADDR", "localhost"), ("MASTER_PORT", "0")):  # which some libraries insist on
                if name not in os.environ:
                    os.environ[name] = value
                    undo.callback(os.environ.pop, name, None)
            undo.put(loop, "open_dataset", while_loading(probes, loop.open_dataset))
            undo.put(dist, "init_process_group", lambda *args, **kwargs: None)  # the ranks have met
            program.main(words_of(config, folder / DEEPSPEED_FILE))
    finally:
        watch.report()
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
        sentence = missing_library(
            "transformers",
            en="the DeepSpeed plugin of Accelerate",
            fr="le plugin DeepSpeed d’Accelerate",
            or_en="use library='deepspeed'",
            or_fr="prenez library='deepspeed'",
        )
        raise LabError(sentence)
    if rank == 0:
        write_atomic(folder / DEEPSPEED_FILE, json.dumps(deepspeed_json(config), indent=2))
    if control is not None:
        dist.barrier(group=control)  # Who: all ranks, once, in the control group. What: that the file is there.
