"""Layouts side by side on real ranks, and the calibration they are held against."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.config.run_config import RunConfig
from dlojz.cost_model.measured_machine import read_measured
from dlojz.running import measure
from dlojz.running.measure import calibrated, measure_rounds, measure_steps


def of(**fields: object) -> RunConfig:
    return RunConfig.of(model="coatnet_tiny", device="cpu", **fields)


def test_measure_rounds_takes_layouts_by_turns_on_the_same_ranks() -> None:
    some = [of(dp=2, micro_batch=2), of(pp=2, micro_batch=2, micro_batches=2), of(dp=2, micro_batch=2, zero=3)]
    rounds = measure_rounds(some, rounds=2)
    assert [len(one) for one in rounds] == [2, 2, 2]
    assert all(seconds > 0 for one in rounds for seconds in one)


def test_measure_steps_gives_one_median_of_one_process() -> None:
    assert len(measure_steps([of(micro_batch=2)], rounds=3)) == 1


def test_libraries_run_anew_from_the_second_round_on(monkeypatch: pytest.MonkeyPatch) -> None:
    again: list[bool] = []

    def run(config: RunConfig, **more: Any) -> SimpleNamespace:
        again.append(more["again"])
        return SimpleNamespace(record=None)

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(measure, "rows", lambda records, **_: records)
    assert list(measure.run_libraries(["torch"], rounds=3, model="gpt_tiny")) == ["torch"]
    assert again == [False, True, True]


@pytest.mark.parametrize("rounds", [0, 1001])
def test_rounds_are_counted_from_one(rounds: int) -> None:
    with pytest.raises(LabError, match="1 to 1000"):
        measure_rounds([of(dp=2, micro_batch=2)], rounds=rounds)


def test_measure_rounds_compares_no_layouts_of_different_sizes() -> None:
    with pytest.raises(LabError, match=r"\[1, 2\] ranks"):
        measure_rounds([of(micro_batch=2), of(dp=2, micro_batch=2)])


def test_a_machine_is_measured_once_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "calibration.json"
    first = calibrated((1,), path=path)
    assert read_measured(path) == first
    kinds = {one.what for one in first.setups[0].timings}
    assert {"product", "convolution", "pass", "launch", "update", "checkpoint"} <= kinds
    monkeypatch.setattr(measure, "wanted", lambda progress: True)
    assert calibrated((1,), path=path) == first  # read, not measured: its date and figures are those
    told = capsys.readouterr().err
    assert first.date in told and "fresh=True" in told
    path.write_text("{}", encoding="utf-8")
    assert calibrated((1,), path=path).date >= first.date  # a damaged file is no reason to stop
