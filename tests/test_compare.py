"""`compare`: the join of records with their predictions, its verdicts, and what it does with runs that went wrong."""

import html
import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.compare import compare, overlay_of
from dlojz.cost_model.measured_machine import Measured, local_step_s
from dlojz.display.tables import grid
from dlojz.pipeline.schedule_catalogue import schedule_of
from dlojz.prediction import predict
from dlojz.results.record import RunRecord, Span, read_record
from dlojz.running.launch import shipped
from tests.planner.test_here import setup_of

_spec = importlib.util.spec_from_file_location("records_by_hand", Path(__file__).parent / "display" / "conftest.py")
assert _spec and _spec.loader
_by_hand = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_by_hand)
make_record = _by_hand.make_record
MakeRecord = Callable[..., RunRecord]

SINGLE = {"engine": "single", "micro_batch": 16, "micro_batches": 2}
DDP = {"dp": 2, "micro_batch": 16}
REPLAYS = list(shipped().values())


def test_every_figure_is_the_one_of_its_source(make_record: MakeRecord) -> None:
    record = make_record(zero=2, engine="deepspeed", **DDP)
    predicted, measured = predict(record.config), record.footprints[0]
    row = compare(record).rows[0]
    for name, pair in row.memory_bytes.items():
        assert pair.predicted == getattr(predicted.memory, f"{name}_bytes"), name
        assert pair.measured == getattr(measured.memory, f"{name}_bytes"), name
    assert row.communication
    for traffic in row.communication:
        assert traffic.message_bytes.predicted == predicted.traffic(traffic.collective, traffic.group)
        assert traffic.message_bytes.measured == measured.traffic(traffic.collective, traffic.group)
    assert row.states_bytes.predicted == predicted.memory.states_bytes


def test_exposed_and_hidden_communication_are_read_from_the_record(make_record: MakeRecord) -> None:
    record = make_record(**DDP)
    measured = record.footprints[0]
    phases = measured.phases.model_copy(update={"communication_exposed_s": 0.0125, "communication_hidden_s": 0.05})
    told = record.model_copy(update={"footprints": (measured.model_copy(update={"phases": phases}),)})
    row = compare(told).rows[0]
    assert (row.communication_exposed_s, row.communication_hidden_s) == (0.0125, 0.05)
    lines = compare([told, make_record(engine="single")]).markdown().splitlines()
    assert "| exposed, ms | 12.5 | — |" in lines and "| hidden, ms | 50.0 | — |" in lines
    assert "exposed" not in compare(record).markdown()


def test_what_was_left_at_its_default_is_told_as_such(make_record: MakeRecord) -> None:
    rows = compare([make_record(**DDP), make_record(bucket_mib=0.5, **DDP)]).rows
    assert [row.title for row in rows] == ["DDP (bucket_mib=default)", "DDP (bucket_mib=0.5)"]


def test_control_traffic_is_not_compared(make_record: MakeRecord) -> None:
    row = compare(make_record(**DDP)).rows[0]
    assert "control" not in {traffic.group for traffic in row.communication}
    assert row.exact is True


@pytest.mark.parametrize("extra_bytes, exact", [(0, True), (1, False), (-1, False)])
def test_one_byte_makes_the_difference(make_record: MakeRecord, extra_bytes: int, exact: bool) -> None:
    comparison = compare([make_record(**SINGLE), make_record(extra_bytes=extra_bytes, **DDP)])
    assert comparison.rows[1].exact is exact
    assert comparison.exact is exact
    assert ("byte for byte: yes" in "\n".join(comparison.findings())) is exact


def test_one_process_predicts_losses_and_ideal_throughput(make_record: MakeRecord) -> None:
    serial, parallel = make_record(rate=50.0, **SINGLE), make_record(loss_shift=0.001, rate=80.0, **DDP)
    alone, row = compare([serial, parallel]).rows
    assert row.samples_per_s.predicted == 2 * 50.0
    assert row.first_loss.predicted == serial.losses[0] and row.last_loss.predicted == serial.losses[-1]
    assert row.loss_gap == max(
        abs(ours - theirs) / theirs for ours, theirs in zip(parallel.losses, serial.losses, strict=True)
    )
    assert alone.serial_losses is None and alone.samples_per_s.predicted is None


def test_a_calibration_predicts_throughput_in_the_place_of_one_process(make_record: MakeRecord) -> None:
    machine = Measured(
        machine="here", processor="a CPU", cores=2, memory_bytes=2**34, date="2026-11-22 10:00 UTC", versions={},
        load=1.5, setups=(setup_of(1), setup_of(2)),
    )  # fmt: skip
    runs = [make_record(rate=50.0, **SINGLE), make_record(**DDP), make_record(zero=2, engine="deepspeed", **DDP)]
    comparison = compare(runs, machine)
    for run, row in zip(runs[:2], comparison.rows, strict=False):
        assert row.samples_per_s.predicted == pytest.approx(32 / local_step_s(machine, run.config))
    assert comparison.rows[2].samples_per_s.predicted is None  # DeepSpeed's own cost was not measured
    words = comparison.rows[1].calibration
    assert words.startswith("calibrated 2026-11-22 10:00 UTC (") and "load 1.5 then" in words
    assert "residual" in words and "old" in words
    assert any(words in section.heading for section in grid(comparison).sections)
    assert any(f"predicted by this machine, {words}" in finding for finding in comparison.findings())
    assert not compare(runs).rows[1].calibration


@pytest.mark.parametrize(
    "different",
    [
        {"seed": 1},
        {"optimizer": "sgd"},
        {"precision": "bf16"},
        {"micro_batches": 1},
        {"micro_batch": 8, "micro_batches": 4},
        {"model": "vit_tiny"},
        {"data": "synthetic"},
        {"learning_rate": 0.1},
    ],
)
def test_another_training_is_no_prediction(make_record: MakeRecord, different: dict[str, Any]) -> None:
    row = compare([make_record(**{**SINGLE, **different}), make_record(**DDP)]).rows[1]
    assert row.serial_losses is None and row.samples_per_s.predicted is None


def test_a_pipeline_is_judged_by_one_process_and_is_none(make_record: MakeRecord) -> None:
    """Its ranks hold parts of one model, so that it has no replicas, as one process has none."""
    serial = make_record(rate=50.0, **SINGLE)
    pipeline = make_record(pp=2, **SINGLE | {"engine": "torch"})
    row = compare([serial, pipeline]).rows[1]
    assert (row.serial_losses, row.model_ranks) == (serial.losses, 2) and row.loss_gap is not None
    assert row.samples_per_s.predicted is not None
    assert 50 < row.samples_per_s.predicted < 100  # two ranks, less the bubble
    assert compare([pipeline, make_record(**DDP)]).rows[1].serial_losses is None


def test_a_shorter_serial_run_judges_the_steps_it_has(make_record: MakeRecord) -> None:
    serial = make_record(steps=3, **SINGLE)
    serial = serial.model_copy(update={"losses": serial.losses[:3]})
    row = compare([serial, make_record(**DDP)]).rows[1]
    assert row.loss_gap == 0
    assert row.first_loss.equal is True and row.last_loss.predicted is None


def test_failed_runs_are_kept_and_explained(make_record: MakeRecord) -> None:
    reason = "rank 1 was killed, probably for want of memory."
    comparison = compare([make_record(**DDP), make_record("oom", reason, measured=False, zero=3, **DDP)])
    row = comparison.rows[1]
    assert (row.status, row.reason, row.exact) == ("oom", reason, None)
    assert row.memory_bytes["weights"].predicted and row.memory_bytes["weights"].measured is None
    assert reason in comparison.markdown().replace("\\", "")
    assert comparison.exact is True


def test_a_run_that_goes_on_has_a_row(make_record: MakeRecord) -> None:
    config = make_record(**DDP).config
    row = compare(SimpleNamespace(run_id="r", config=config, state="running", record=None)).rows[0]
    assert (row.status, row.losses, row.exact) == ("running", (), None)


def test_without_prediction_the_measurement_stays(make_record: MakeRecord, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Any, rank: int = 0, device: Any = None) -> None:
        raise LabError("tp=2 is not predicted yet.")

    record = make_record(**DDP)
    monkeypatch.setattr(importlib.import_module("dlojz.compare"), "predict", refuse)
    comparison = compare(record)
    row = comparison.rows[0]
    assert row.prediction_note == "tp=2 is not predicted yet." and row.exact is None
    assert row.memory_bytes["weights"].measured and row.memory_bytes["weights"].predicted is None
    assert "not predicted" in comparison.markdown()


def test_same_layouts_are_told_apart(make_record: MakeRecord) -> None:
    titles = [row.title for row in compare([make_record(**DDP), make_record(dp=2, micro_batch=8)]).rows]
    assert titles == ["DDP (micro_batch=16)", "DDP (micro_batch=8)"]
    twice = [
        make_record(run_id="20250101-120000-aaaaaaaaaaaa-0001", **DDP),
        make_record(run_id="20250101-120000-aaaaaaaaaaaa-0002", **DDP),
    ]
    assert [row.title for row in compare(twice).rows] == ["DDP (…0001)", "DDP (…0002)"]


def test_nothing_or_nonsense_is_refused() -> None:
    with pytest.raises(LabError, match="no run to compare"):
        compare([])
    with pytest.raises(LabError, match="runs or records, but str"):
        compare(["20250101"])  # type: ignore[list-item]


def test_to_dict_is_json_with_the_verdicts(make_record: MakeRecord) -> None:
    data = json.loads(json.dumps(compare([make_record(**SINGLE), make_record(**DDP)]).to_dict(), allow_nan=False))
    assert data["exact"] is True and [row["exact"] for row in data["rows"]] == [None, True]
    assert data["rows"][1]["loss_gap"] == 0
    predicted = predict(make_record(**DDP).config).memory.activations_bytes
    assert data["rows"][1]["memory_bytes"]["activations"] == {"predicted": predicted, "measured": 36_000_000}
    assert data["rows"][1]["limit_bytes"] is None  # a record that does not tell it, of another machine


def test_memory_is_predicted_for_the_rank_shown_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [
        read_record(path) for path in REPLAYS if read_record(path).config.layout.title == "pipeline 1f1b × 2 (by hand)"
    ]
    assert measured and all(len(record.footprints) == 2 for record in measured)
    forecast_module = importlib.import_module("dlojz.prediction.forecast")
    real, asked = forecast_module.forecast, []

    def counting(config: Any, rank: int = 0, device: Any = None) -> Any:
        asked.append(rank)
        return real(config, rank, device)

    monkeypatch.setattr(forecast_module, "forecast", counting)
    compare(measured)
    assert asked == [0] * len(measured)


@pytest.mark.parametrize("path", REPLAYS, ids=lambda path: path.stem)
def test_the_rank_whose_bytes_differ_is_named(path: Path) -> None:
    record = read_record(path)
    assert compare(record).rows[0].unequal_ranks == ()
    *others, last = record.footprints
    sent = [each for each in last.communication if each.group != "control"]
    if not sent:
        return  # one process
    more = tuple(each.model_copy(update={"message_bytes": each.message_bytes + 1}) for each in last.communication)
    changed = (*others, last.model_copy(update={"communication": more}))
    row = compare(record.model_copy(update={"footprints": changed})).rows[0]
    assert row.unequal_ranks == (last.rank,)


def test_hostile_text_is_shown_letter_by_letter(make_record: MakeRecord) -> None:
    attack = "<img src=x onerror=alert(1)> | $\\foo$ \u202e"
    comparison = compare([make_record("failed", attack, measured=False, **DDP)])
    shown = comparison._repr_html_()
    assert "<img" not in shown and html.escape("<img src=x onerror=alert(1)>") in shown
    assert "\u202e" not in shown and "\\u202e" in shown
    written = comparison.markdown()
    assert "<img" not in written and "\u202e" not in written


def test_overlay_of_takes_one_rank_of_each_stage_where_a_stage_has_several(make_record: MakeRecord) -> None:
    """pp × dp × tp = 2 × 2 × 2: stage 0 is ranks 0 to 3, stage 1 ranks 4 to 7; replica 1 begins at ranks 2 and 6."""
    layout = {"pp": 2, "dp": 2, "tp": 2, "micro_batches": 2, "schedule": "gpipe", "engine": "by_hand"}
    record = make_record(model="gpt_tiny", **layout)
    spans = []
    for rank in range(8):
        stage, replica = rank // 4, rank // 2 % 2
        for position, action in enumerate(schedule_of(record.config.layout).orders[stage]):
            start_s = 10.0 * position + stage + 0.1 * replica
            spans.append(
                Span(rank=rank, step=1, phase="forward", start_s=start_s, end_s=start_s + 1 + rank, action=str(action))
            )
    overlay = overlay_of(record.model_copy(update={"spans": tuple(spans)}), replica=1)
    durations = overlay.measured.ends - overlay.measured.starts
    assert [round(float(duration), 6) for duration in durations] == [3.0] * 4 + [7.0] * 4  # ranks 2 and 6
