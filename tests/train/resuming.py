"""Trains, cuts off, goes on and carries over, all on ranks that are forked once.

A file of jobs is a JSON list, done in order by all ranks:
    {"train": FOLDER}                     as FOLDER/config.json says, going on where there is a checkpoint
    {"train": FOLDER, "stop_after": 3}    the last rank is told to stop in that step
    {"train": FOLDER, "nan_at": 4}        on the last rank the loss of that step is no number
    {"carry": [FROM, …], "to": FOLDER}    into the engine of FOLDER/config.json, and out again: FOLDER/0, FOLDER/1, …
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dlojz.base.machine import StopRequest
from dlojz.config.run_config import RunConfig
from dlojz.results.record import EventLog
from dlojz.running.worker import trainer_of
from dlojz.train import loop
from dlojz.train.checkpoint_files import CheckpointPolicy, newest
from dlojz.train.checkpoint_tensors import CheckpointTensors
from dlojz.train.checkpoints import CheckpointManager
from dlojz.train.engines import base
from tests.train import matrix


class StopAfter(StopRequest):
    """As if the signal came in the step of this number."""

    def __init__(self, step: int | None, first: int = 0) -> None:
        self._left = None if step is None else step - first

    @property
    def wanted(self) -> bool:  # type: ignore[override]
        if self._left is None:
            return False
        self._left -= 1
        return self._left < 0


def train(job: dict[str, Any], rank: int, last: bool) -> None:
    run = Path(job["train"])
    config = RunConfig.from_json((run / "config.json").read_text())
    (run / "events").mkdir(exist_ok=True)
    events = EventLog(run / "events" / f"rank-{rank}.jsonl")
    stop = StopAfter(job.get("stop_after") if last else None)
    whole, steps = loop.accumulate, iter(range(10**6))

    def accumulate(*args: Any) -> torch.Tensor:
        loss = whole(*args)
        return loss * float("nan") if last and next(steps) == job.get("nan_at") else loss

    loop.accumulate = accumulate
    try:
        status, reason = trainer_of(config)(config, run, events, rank=rank, local_rank=rank, stop=stop)
    finally:
        loop.accumulate = whole
    matrix.forget_deepspeed()
    events.write("end", status=status, reason=reason)
    events.close()


def carry(job: dict[str, Any], rank: int) -> None:
    to = Path(job["to"])
    config = RunConfig.from_json((to / "config.json").read_text())
    device = torch.device("cpu")
    loop.init_process_group(to, device, rank, config.layout.world_size)
    control = dist.new_group(backend="gloo") if config.layout.world_size > 1 else None
    engine = base.build(config, loop.build_model(config), device)
    for number, origin in enumerate(job["carry"]):
        folder = to / f"{number}"
        folder.mkdir(exist_ok=True)
        events = EventLog(folder / f"rank-{rank}.jsonl")
        found = newest(Path(origin))
        assert found.folder and found.manifest
        with CheckpointTensors(found.folder, found.manifest) as source:
            engine.restore(source)
            engine.restore_buffers(source)
        keeper = CheckpointManager(config, folder, CheckpointPolicy(), events, engine, control)
        assert keeper.save(found.manifest.step), keeper.problem
    engine.close()
    dist.barrier()
    dist.destroy_process_group()
    matrix.forget_deepspeed()


def do_all(jobs: Path, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ.pop("MASTER_ADDR", None)
    join = loop.init_process_group
    for number, job in enumerate(json.loads(jobs.read_text())):
        # A store of its own for each job, as each attempt of a real run has one.
        stores = Path(job.get("train") or job["to"]) / f"stores-{number}"
        stores.mkdir(exist_ok=True)
        loop.init_process_group = lambda folder, *rest, stores=stores: join(stores, *rest)
        last = rank == int(os.environ["WORLD_SIZE"]) - 1
        if "train" in job:
            train(job, rank, last)
        else:
            carry(job, rank)
