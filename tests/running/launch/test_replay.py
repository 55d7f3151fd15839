"""Replayed records: found by what is asked, marked wherever they are, and never taken for a measurement made here."""

import json
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.prediction import predict
from dlojz.results.record import read_record
from dlojz.running import launch
from dlojz.running.store import claim

DDP = RunConfig.of(model="coatnet_tiny", dp=2)


def test_every_shipped_record_is_whole_small_and_named_by_what_was_run() -> None:
    files = launch.shipped()
    records = [read_record(path) for path in files.values()]
    assert [record.config.hash for record in records] == list(files)
    assert {record.status for record in records} == {"completed"}
    assert all(record.environment["cores"] and record.started_utc for record in records)
    assert not any(launch.is_replayed(record) for record in records)
    assert sum(path.stat().st_size for path in files.values()) < 350_000
    strategies = {record.config.layout.strategy for record in records}
    assert {"single", "ddp", "fsdp2", "zero-0", "zero-1", "zero-2", "zero-3"} <= strategies
    assert any(record.config.layout.pp == 2 for record in records)
    assert any(record.config.layout.tp == 2 for record in records)


def test_predict_still_agrees_with_the_replays_that_are_shipped() -> None:
    record = launch.find(DDP)
    measured, predicted = record.footprint(), predict(DDP)
    assert measured is not None
    assert measured.traffic("all_reduce") == predicted.traffic("all_reduce")
    assert measured.memory.states_bytes == predicted.memory.states_bytes


def test_the_same_configuration_is_replayed_once_and_marked(tmp_path: Path) -> None:
    run = launch.replayed_run(DDP, tmp_path)
    assert run.state == "completed" and run.record is not None
    assert launch.is_replayed(run.record)
    assert "measured" in run.record.environment[launch.REPLAYED_FROM]
    assert run.record.run_id == run.folder.name
    assert run.losses == launch.find(DDP).losses
    assert launch.replayed_run(DDP, tmp_path) == run


def test_replayed_run_is_not_found_by_a_run_that_measures(tmp_path: Path) -> None:
    replayed = launch.replayed_run(DDP, tmp_path)
    folder, new = claim(DDP, tmp_path)
    assert new and folder != replayed.folder
    assert launch.replayed_run(DDP, tmp_path) == replayed  # nor the other way round


def test_replayed_run_that_was_cut_short_is_finished_by_the_next(tmp_path: Path) -> None:
    folder, _ = claim(DDP, tmp_path, worker_module=launch.WORKER)
    assert launch.replayed_run(DDP, tmp_path).folder == folder
    assert read_record(folder / "record.json").run_id == folder.name


def test_replayed_run_refuses_what_is_not_shipped_and_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(LabError, match=r"did you mean.* coatnet_tiny, DDP ×2 \(steps=20\)"):
        launch.replayed_run(RunConfig.of(model="coatnet_tiny", dp=2, steps=21), tmp_path)
    with pytest.raises(LabError, match="llama_tiny"):
        launch.find(RunConfig.of(model="llama_tiny", dp=2))
    assert not list(tmp_path.iterdir())


def test_find_says_that_no_replays_are_shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    with pytest.raises(LabError, match="no record to replay"):
        launch.find(DDP)


def test_find_refuses_a_replay_whose_record_was_altered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((launch.FOLDER / f"{DDP.hash}.json").read_text())
    (tmp_path / f"{DDP.hash}.json").write_text(json.dumps({**content, "elapsed_s": 1.0}))
    monkeypatch.setattr(launch, "FOLDER", tmp_path)
    with pytest.raises(LabError, match="checksum"):
        launch.find(DDP)


def test_replayed_run_refuses_a_configuration_without_a_record_in_few_words(tmp_path: Path) -> None:
    with pytest.raises(LabError) as refused:
        launch.replayed_run(RunConfig.of(model="coatnet_7", dp=2, zero=2, engine="deepspeed"), tmp_path)
    assert "layout=" not in str(refused.value) and len(str(refused.value)) < 700
