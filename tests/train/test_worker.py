"""The real worker through the front door: how runs end."""

import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

import dlojz
from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.results.record import read_events
from dlojz.runnable import check_runnable

QUICK = {"image_size": 32, "micro_batch": 4, "steps": 4}


def test_a_run_on_two_processes_ends_with_a_whole_record(tmp_path: Path) -> None:
    run = dlojz.run(dp=2, root=tmp_path, progress=False, **QUICK)
    record = run.record
    assert record is not None
    assert (record.status, record.reason) == ("completed", "")
    assert len(record.losses) == 4
    assert [footprint.rank for footprint in record.footprints] == [0, 1]
    phases = {span.phase for span in record.spans}
    assert {"data", "forward", "backward", "optimizer", "communication"} <= phases
    assert phases <= {"data", "forward", "backward", "optimizer", "communication", "wait"}
    assert {span.step for span in record.spans if span.phase == "communication"} == {3}, "the traced steps tell none"
    assert {span.rank for span in record.spans} == {0, 1}
    assert record.memory_timeline
    assert record.weights_sha256
    assert record.environment["torch"]
    throughput = record.footprints[0].samples_per_s
    assert throughput and throughput > 0
    assert dlojz.run(dp=2, root=tmp_path, progress=False, **QUICK).run_id == run.run_id


def test_dlojz_run_trains_the_same_configuration_to_the_same_bits(tmp_path: Path) -> None:
    fields = {**QUICK, "steps": 3, "model": "gpt_tiny", "image_size": None, "sequence_length": 32}
    first = dlojz.run(root=tmp_path, progress=False, **fields)
    second = dlojz.run(root=tmp_path, progress=False, again=True, **fields)
    assert first.run_id != second.run_id
    assert first.record and second.record
    assert first.record.weights_sha256 == second.record.weights_sha256 is not None
    assert first.losses == second.losses


def test_dlojz_run_ends_on_every_rank_at_a_loss_that_is_no_number(tmp_path: Path) -> None:
    run = dlojz.run(dp=2, root=tmp_path, progress=False, optimizer="sgd", learning_rate=1e25, **QUICK | {"steps": 30})
    assert run.state == "diverged"
    assert run.record
    assert 0 < len(run.losses) < 30
    assert "smaller learning rate than 1e+25" in run.record.reason


def test_worker_main_leaves_events_where_memory_is_refused_as_a_result(tmp_path: Path) -> None:
    """A limit on the address space makes the real allocator refuse a real model."""
    (tmp_path / "events").mkdir()
    config = RunConfig.of(model="coatnet_5", data="synthetic", image_size=64, micro_batch=1)
    (tmp_path / "config.json").write_text(config.to_json())
    code = (
        "import resource, sys, torch\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 10**9,) * 2)\n"
        "from pathlib import Path; from dlojz.running.worker import main; sys.exit(main(Path(sys.argv[1])))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    end = read_events(tmp_path / "events" / "rank-0.jsonl")[-1]
    assert done.returncode == 1
    assert (end["event"], end["status"]) == ("end", "oom")
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tp": 2, "engine": "deepspeed"}, "tp=2 is not run with engine 'deepspeed'"),
        ({"precision": "fp16"}, "precision='fp16' cannot be run yet by any engine: use precision='fp32'"),
        ({"optimizer": "adamw_8bit"}, "use optimizer='adamw'"),
    ],
)
def test_check_runnable_refuses_before_anything_starts_what_no_engine_runs(
    fields: dict[str, object], words: str
) -> None:
    with pytest.raises(LabError, match=words):
        check_runnable(RunConfig.of(**fields))


def test_cancel_leaves_in_the_record_what_a_stopped_run_has_measured(tmp_path: Path) -> None:
    """Stopped right after the steady step: memory, communication, timeline and spans are there."""
    run = dlojz.run(dp=2, root=tmp_path, progress=False, wait=False, **QUICK | {"steps": 100_000})
    deadline = time.monotonic() + 240
    while len(run.losses) < 4 and time.monotonic() < deadline:
        time.sleep(0.05)
    run.cancel()
    record = run.wait(timeout_s=240).record
    assert record is not None
    assert record.status == "cancelled"
    assert [footprint.rank for footprint in record.footprints] == [0, 1]
    assert record.footprints[0].communication
    assert record.memory_timeline
    assert {span.rank for span in record.spans} == {0, 1}
    assert record.environment["device"] == "CPU"
