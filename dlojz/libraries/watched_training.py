"""Train by a library's program: its own `main` as a run of the lab, watched from outside as any training is.

The program's text and command line are those of its user. Only what the lab's runs have in common is added: a loss and
an end that all ranks agree on, and final weights under the lab's names.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlojz.base.errors import LabError
from dlojz.base.files import write_atomic
from dlojz.base.language import refusal, say
from dlojz.base.machine import StopRequest
from dlojz.base.requirements import missing_library
from dlojz.config.deepspeed_json import deepspeed_json
from dlojz.config.run_config import RunConfig
from dlojz.libraries.library_catalogue import LIBRARIES, found, require, words_of
from dlojz.libraries.scripts.first_step import num_parameters
from dlojz.libraries.step_ledger import StepAccounts
from dlojz.libraries.training_watch import TrainingWatch
from dlojz.libraries.watching import watching, while_loading
from dlojz.results.record import EventLog, Status
from dlojz.train import loop
from dlojz.train.engines.deepspeed import load_deepspeed
from dlojz.train.loop import align_clocks, finish, leave
from dlojz.train.probes import Probes


class Ended(BaseException):
    """The training ends before its last step; no program catches it."""


class ProgramWatch(TrainingWatch):
    """Watch of a library's program, whose ranks agree at the end of each step, as in the lab's own loop.

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
