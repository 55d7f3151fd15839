"""Real trainings on two nodes of two ranks: the losses are those of the same ranks on this machine.

They are run by trainings.py, on a cluster that it starts, and judged here.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dlojz.by_hand.optimizers.sent_bytes import message_bytes
from dlojz.results.record import RunRecord, read_events
from dlojz.running.run import find

DAILY, NIGHTLY = ("DDP",), ("ZeRO-2", "pipeline", "1-bit Adam")
pytestmark = pytest.mark.timeout(1200)  # a dozen ranks that each import torch, on whatever machine this is


def prepare(folder: Path) -> None:
    script = Path(__file__).with_name("trainings.py")
    names = (*DAILY, *(NIGHTLY if os.environ.get("DLOJZ_NIGHTLY") else ()))
    done = subprocess.run(
        [sys.executable, str(script), str(folder), *names], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def trainings(prepared: Path) -> Path:
    """Where they lie. As root there must be a cluster; another user cannot start one."""
    if (prepared / "obstacle").exists():
        obstacle = (prepared / "obstacle").read_text()
        if os.geteuid() == 0:
            pytest.fail(obstacle)
        pytest.skip(obstacle)
    return prepared


def record_of(trainings: Path, name: str) -> RunRecord:
    run_id = json.loads((trainings / "sent.json").read_text())[name]
    record = find(run_id, trainings / "runs").record
    assert record is not None
    assert (record.status, record.reason) == ("completed", ""), name
    return record


def trains_as_here(record: RunRecord, here: Path) -> None:
    told = read_events(here / "events" / "rank-0.jsonl")
    assert record.losses == tuple(event["loss"] for event in told if event["event"] == "step")
    [weights_sha256] = {event["sha256"] for event in told if event["event"] == "weights"}
    assert record.weights_sha256 == weights_sha256


@pytest.mark.parametrize("name", [*DAILY, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)])
def test_on_two_nodes_it_trains_as_here(trainings: Path, name: str) -> None:
    record = record_of(trainings, name)
    assert len(record.losses) == record.config.steps and len(record.footprints) == 4
    trains_as_here(record, trainings / "here" / "4" / name)


@pytest.mark.nightly
def test_between_nodes_one_bit_of_each_number_is_sent(trainings: Path) -> None:
    """The first of the four steps is sent in full; the traced one, of the second stage, as signs and scales."""
    for footprint in record_of(trainings, "1-bit Adam").footprints:
        sent = {one.collective: one.message_bytes for one in footprint.communication if one.group == "dp"}
        expected = message_bytes(footprint.parameters or 0, 4)
        assert sent == {"all_to_all": expected, "all_gather": expected}


def test_told_to_stop_a_training_goes_on_from_its_checkpoint_as_if_it_had_never_stopped(trainings: Path) -> None:
    record = record_of(trainings, "long")
    told = read_events(trainings / "runs" / record.run_id / "events" / "launcher.jsonl")
    assert len([event for event in told if event["event"] == "started"]) == 2
    assert len(record.losses) == 120
    trains_as_here(record, trainings / "here" / "2" / "long")
