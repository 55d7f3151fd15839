"""A program run as a run of the lab: its own `main`, on real ranks, with the probes attached from outside.

Layer 3, loads torch. Invariant: the program's text is the one that its user would start, with the words that its user
would type; how it ends is told as of any run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from dlojz.config import RunConfig
from dlojz.libraries import LIBRARIES, found, require
from dlojz.libraries.watch import Ended, Watch, watching
from dlojz.libraries.words import words_of
from dlojz.record import EventLog, Status, write_atomic
from dlojz.schema import LabError
from dlojz.text import say
from dlojz.train import loop
from dlojz.train.deepspeed_json import deepspeed_json
from dlojz.train.engines.deepspeed import load_deepspeed
from dlojz.train.probes.probes import Probes
from dlojz.train.stop import StopRequest
from dlojz.train.telling import finish, leave, write_footprint

DEEPSPEED_FILE = "ds_config.json"
"""DeepSpeed's configuration in the run folder, where the library reads one."""


@contextlib.contextmanager
def _as_launched() -> Iterator[None]:
    """Where the ranks have met without an address, libraries that insist on one are told some."""
    before = {name: os.environ.get(name) for name in ("MASTER_ADDR", "MASTER_PORT")}
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
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
    """Run the program of `config.library` on this rank and write what happens into `events`.

    Returns how it ended and why, as `dlojz.train.loop.train`.

    Raises:
        LabError: if the library is not installed, or the run was to go on from a checkpoint.
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
    watch = Watch(config, events, probes, device, control, stop)
    probes.start()
    try:
        with _as_launched(), watching(watch, probes), contextlib.suppress(Ended):
            program.main(words_of(config, folder / DEEPSPEED_FILE))
    finally:
        probes.close()
        write_footprint(events, probes, watch.parameters)
        events.write("spans", spans=[span.to_dict() for span in probes.clock.spans()])
    if watch.engine is None:
        raise LabError(
            say(
                en=f"the program {LIBRARIES[config.library].program.name} has called no model.",
                fr=f"le programme {LIBRARIES[config.library].program.name} n’a appelé aucun modèle.",
            )
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
    """Write DeepSpeed's file where the program reads one, and load what it takes."""
    if config.layout.engine != "deepspeed":
        return
    load_deepspeed(device)
    if config.library == "accelerate" and device.type == "cuda" and not found("transformers"):
        raise LabError(
            say(
                en="the DeepSpeed plugin of Accelerate imports transformers, which is not installed: install it by "
                ".venv/bin/pip install transformers, or use library='deepspeed'.",
                fr="le plugin DeepSpeed d’Accelerate importe transformers, qui n’est pas installé : installez-le par "
                ".venv/bin/pip install transformers, ou prenez library='deepspeed'.",
            )
        )
    if rank == 0:
        write_atomic(folder / DEEPSPEED_FILE, json.dumps(deepspeed_json(config), indent=2))
    if control is not None:
        dist.barrier(group=control)  # Who: all ranks, once, in the control group. What: that the file is there.
