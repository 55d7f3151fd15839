"""Real trainings on two nodes of two ranks: the losses are those of the same ranks on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dlojz.launch import run, submit_many
from dlojz.record import read_events
from dlojz.runs.job import read_job

from .conftest import ask, config, ended, steps, until

pytestmark = pytest.mark.timeout(900)  # twelve ranks that each import torch, on whatever machine this is
CONFIGS = {
    "DDP": config(dp=4),
    "ZeRO-2": config(dp=4, zero=2, engine="deepspeed"),
    "pipeline": config(pp=4, micro_batches=4),
}


def test_ddp_zero_and_a_pipeline_on_two_nodes(here: Path) -> None:
    sent = submit_many(list(CONFIGS.values()), on="slurm", machine="local")
    here_too = [run(one, on="local", again=True, progress=False).record for one in CONFIGS.values()]
    for name, one, local in zip(CONFIGS, sent, here_too, strict=True):
        record = ended(one)
        assert record.status == "completed", f"{name}: {record.reason}"
        assert local is not None
        assert record.losses == local.losses, name
        assert record.weights_sha256 == local.weights_sha256, name
        assert len(record.footprints) == 4, name


def test_told_to_stop_a_training_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(slurm: Any, here: Path) -> None:
    long = config(dp=2, steps=120)
    one = run(long, on="slurm", machine="local", wait=False)
    until(lambda: steps(one) >= 3)
    job = read_job(one.folder)
    assert job is not None
    ask(slurm, "scancel", "--signal=USR2", job.job_id)  # what the scheduler does before the time limit
    record = ended(one)
    assert (record.status, record.reason) == ("completed", "")
    started = [event for event in read_events(one.folder / "events" / "launcher.jsonl") if event["event"] == "started"]
    assert len(started) == 2
    whole = run(long, on="local", again=True, progress=False).record
    assert whole is not None
    assert record.losses == whole.losses
    assert record.weights_sha256 == whole.weights_sha256
