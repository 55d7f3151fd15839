"""What a campaign knows of its points, and what it writes of them."""

import csv
import io
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.campaign.campaign import Campaign, CampaignPlan, expand, read_campaign
from dlojz.campaign.report import (
    brief,
    csv_text,
    findings,
    harmless,
    hours,
    markdown,
    marks_of,
    measured,
    row_of,
    write_report,
)
from dlojz.campaign.results import Outlook, Result, find_run, judged, outlook, result_of, root_of
from dlojz.display.tables import DASH
from dlojz.results.footprint import Footprint, Memory
from dlojz.running import launch
from dlojz.running.folder import Job
from dlojz.running.store import claim
from tests.fakeslurm import fixture

SHIPPED = Path(__file__).resolve().parents[2] / "slurm" / "campaigns" / "tiny_local.toml"
HOSTILE = "<img src=x onerror=alert(1)>$\\foo$ |_*`"
Keep = Callable[..., Path]


def _results(plan: CampaignPlan, root: Path) -> list[Result]:
    known = Outlook(memory=Memory(peak_bytes=2**20), limit_bytes=2**30, limit_name="a machine", communication_bytes=0)
    return [result_of(point, known, find_run(point, root)) for point in plan.points]


def test_a_run_is_found_by_its_configuration_and_a_good_one_is_preferred(
    campaign: Campaign, keep_record: Keep, tmp_path: Path
) -> None:
    point = expand(campaign).points[0]
    assert find_run(point, tmp_path) is None
    good = keep_record(point.config, tmp_path)
    keep_record(point.config, tmp_path, status="failed")
    assert find_run(point, tmp_path).folder == good  # type: ignore[union-attr]


def test_neither_a_replay_nor_a_run_of_another_machine_stands_for_a_point(keep_record: Keep, tmp_path: Path) -> None:
    [point] = expand(Campaign(title="t", base={"model": "coatnet_tiny", "dp": 2})).points
    launch.replayed_run(point.config, tmp_path)
    assert find_run(point, tmp_path) is None
    keep_record(point.config, tmp_path)
    assert find_run(replace(point, machine="elsewhere"), tmp_path) is None
    there = keep_record(point.config, root_of(tmp_path, "elsewhere"))
    assert find_run(replace(point, machine="elsewhere"), tmp_path).folder == there  # type: ignore[union-attr]


def test_scaling_is_judged_by_the_fewest_ranks_with_the_same_batch(
    campaign: Campaign, keep_record: Keep, tmp_path: Path
) -> None:
    plan = expand(campaign)  # alone 2, alone 4, DDP 2, DDP 4
    for point, rate in zip(plan.points, (100.0, 120.0, 150.0, 240.0), strict=True):
        keep_record(point.config, tmp_path, rate=rate)
    results = judged(_results(plan, tmp_path))
    assert [result.weak_efficiency for result in results] == [1.0, 1.0, 0.75, 1.0]
    assert [result.strong_efficiency for result in results] == [None, 1.0, 0.625, None]
    assert results[0].rank_hours == 0.5 and results[2].rank_hours == 1.0


def test_the_base_of_a_scaling_is_the_run_on_the_fewest_ranks(keep_record: Keep, tmp_path: Path) -> None:
    """1, 2 and 4 ranks at 100, 180 and 320 samples/s: 180/2 and 320/4 over 100, not 80 over 90."""
    axes = {"layout": [{"name": f"{ranks} ranks", "dp": ranks, "engine": "torch"} for ranks in (1, 2, 4)]}
    plan = expand(Campaign(title="t", base={"model": "vit_tiny", "image_size": 32, "steps": 4}, axes=axes))
    for point, rate in zip(plan.points, (100.0, 180.0, 320.0), strict=True):
        keep_record(point.config, tmp_path, rate=rate)
    assert [one.weak_efficiency for one in judged(_results(plan, tmp_path))] == [1.0, 0.9, 0.8]


def test_rank_hours_count_the_ranks_of_all_axes(keep_record: Keep, tmp_path: Path) -> None:
    """Half an hour on 2 replicas of 2 stages; unknown where the time is."""
    [point] = expand(Campaign(title="t", base={"model": "vit_tiny", "dp": 2, "pp": 2, "micro_batches": 2})).points
    keep_record(point.config, tmp_path)
    assert _results(CampaignPlan((point,)), tmp_path)[0].rank_hours == 2.0


def test_the_shipped_campaign_scales_strongly_and_not_weakly(keep_record: Keep, tmp_path: Path) -> None:
    """The same batch on one process and on two: 163 samples/s beside 144."""
    shipped = read_campaign(SHIPPED)
    plan = expand(shipped)
    for point, rate in zip(plan.points, (144.0, 163.0), strict=True):
        keep_record(point.config, tmp_path, rate=rate)
    results = judged(_results(plan, tmp_path))
    assert [row[11:] for row in measured(results).rows] == [("100%", DASH), ("57%", DASH)]
    assert [row[-1] for row in brief(results).rows] == [f"100% | {DASH}", f"57% | {DASH}"]
    drawn = [(mark.strong_efficiency, mark.weak_efficiency) for mark in marks_of(shipped, results)]
    assert drawn == [(1.0, None), (pytest.approx(163 / 288), None)]


@pytest.mark.parametrize(
    ("measured_bytes", "told"),
    [
        (2**20, "predicted to the byte"),
        (2**20 + 1, "within 0.1%"),
        (2**20 + 10_000, "within 1%"),
        (2**20 + 20_000, "within 1.9%"),
    ],
)
def test_errors_of_memory_are_written_as_a_person_writes_them(
    campaign: Campaign, keep_record: Keep, tmp_path: Path, measured_bytes: int, told: str
) -> None:
    plan = expand(campaign)
    keep_record(plan.points[0].config, tmp_path)
    (result,) = [one for one in _results(plan, tmp_path) if one.record]
    record = result.record
    assert record is not None
    memory = Memory(peak_bytes=measured_bytes)
    footprints = (Footprint(source="measured", memory=memory),)
    changed = replace(result, record=record.model_copy(update={"footprints": footprints}))
    assert any(told in sentence for sentence in findings([changed]))


def test_points_of_too_few_steps_are_told_and_their_messages_not_judged(
    campaign: Campaign, keep_record: Keep, tmp_path: Path
) -> None:
    for steps, said in ((2, True), (3, False)):
        plan = expand(campaign.model_copy(update={"base": {**campaign.base, "steps": steps}}))
        keep_record(plan.points[0].config, tmp_path)
        sentences = "\n".join(findings(_results(plan, tmp_path)))
        assert ("1 of 1 completed points made at most 2 steps" in sentences) is said
        assert ("of 1 completed points are those predicted" in sentences) is not said


def test_running_out_of_memory_is_a_result_with_prediction_and_limit(
    campaign: Campaign, keep_record: Keep, tmp_path: Path
) -> None:
    plan = expand(campaign)
    keep_record(plan.points[0].config, tmp_path, status="oom", reason="rank 0 asked for too much.")
    result = _results(plan, tmp_path)[0]
    assert result.reason == "does not fit: 1.00 MiB predicted for a rank, limit 1.00 GiB. rank 0 asked for too much."
    assert result.samples_per_s is None


@pytest.mark.parametrize(
    ("language", "label", "why"),
    [
        ("en", "queued (Priority)", "other jobs go first; a shorter time limit"),
        ("fr", "en attente (Priority)", "d’autres travaux passent avant ; une limite de temps plus courte"),
    ],
)
def test_a_job_that_waits_says_why(
    campaign: Campaign, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, language: Any, label: str, why: str
) -> None:
    plan = expand(campaign)
    folder, _ = claim(plan.points[0].config, tmp_path, force_new=True)
    Job(machine="local", name=folder.name, job_id="12", submitted_utc="2020-01-01T00:00:00+00:00").write(folder)
    use_language(language)
    with fixture.scheduler(tmp_path, monkeypatch) as fake:
        fake.plays(fixture.squeue(fixture.line("12", "PENDING", "Priority", name=folder.name)))
        waits, other = _results(plan, tmp_path)[:2]
        assert len(fake.calls) == 1, "state and reason are one question"
    assert (waits.state, waits.waits_for) == ("queued", "Priority") and waits.reason.startswith(why)
    assert (other.state, other.waits_for, other.reason) == ("waiting", "", "")
    assert [row[2] for row in brief([waits]).rows] == [label]
    report = markdown(campaign, plan, [waits, other], {})
    assert "\\(Priority\\)" in report and why not in report  # to wait is no failure


def test_french_tables_have_commas_and_spaced_colons(tmp_path: Path) -> None:
    use_language("fr")
    axes: dict[str, Any] = {"learning_rate": [0.5, 1], "layout": [{"micro_batch": 2, "weight_decay": 0.25}]}
    plan = expand(Campaign(title="t", base={"model": "vit_tiny"}, axes=axes))
    assert [point.label for point in plan.points] == [
        "learning_rate 0,5, micro_batch 2, weight_decay 0,25",
        "learning_rate 1, micro_batch 2, weight_decay 0,25",
    ]
    use_language("en")
    assert [hours(value) for value in (None, 0.0167, 999.4, 1234.5, 1e6)] == [
        "—",
        "0.0167",
        "999",
        "1,234",
        "1,000,000",
    ]
    use_language("fr")
    assert [hours(value) for value in (0.0167, 1234.5)] == ["0,0167", "1\u202f234"]
    results = [replace(result, reason="cassé") for result in _results(plan, tmp_path)]
    assert "1. learning_rate 0,5, micro_batch 2, weight_decay 0,25 \\(pas encore exécuté\\) : cassé" in markdown(
        Campaign(title="t"), plan, results, {}
    )


def test_a_point_is_predicted_with_its_limit_and_its_most_hours(campaign: Campaign) -> None:
    point = expand(campaign).points[3]
    told = outlook(point, campaign.time_limit_s)
    assert told.taken_bytes and told.limit_bytes and told.fits
    assert told.communication_bytes and told.communication_bytes > 4 * 700_000  # every gradient once
    assert told.most_hours == 2.0
    assert replace(told, limit_bytes=1000).fits is False
    with pytest.raises(LabError, match="nowhere"):
        outlook(replace(point, machine="nowhere"), None)


def test_the_table_has_every_field_of_every_point_and_no_formula(
    campaign: Campaign, keep_record: Keep, tmp_path: Path
) -> None:
    plan = expand(campaign)
    keep_record(plan.points[0].config, tmp_path, status="failed", reason='=HYPERLINK("http://x")')
    lines = list(csv.DictReader(io.StringIO(csv_text(_results(plan, tmp_path)))))
    assert [line["point"] for line in lines] == ["1", "2", "3", "4"]
    assert lines[0]["reason"] == '\'=HYPERLINK("http://x")' and lines[0]["state"] == "failed"
    assert lines[2]["dp"] == "2" and lines[2]["engine"] == "torch" and lines[2]["state"] == "waiting"
    assert {"predicted_memory_bytes", "measured_samples_per_s", "step_s", "schedule", "sub_group_size"} <= set(lines[0])


@pytest.mark.parametrize("text", ["=1", "+1", "-1", "@x", "\t=1", "\r=1", " =1", "\n=1", "%x", "|x"])
def test_a_cell_that_a_spreadsheet_would_run_is_quoted(text: str) -> None:
    assert str(harmless(text)).startswith("'")


def test_other_cells_stay_as_they_are() -> None:
    assert [harmless(value) for value in ("coatnet_tiny", -1, None, 2.5, "a=b")] == [
        "coatnet_tiny",
        -1,
        None,
        2.5,
        "a=b",
    ]


def test_the_report_is_whole_at_any_time_and_everything_in_it_is_escaped(
    campaign: Campaign, keep_record: Keep, tmp_path: Path
) -> None:
    hostile = Campaign(
        **{
            **campaign.to_dict(),
            "title": HOSTILE,
            "description": HOSTILE,
            "axes": {"layout": [{"name": HOSTILE, "dp": 1}, {"name": "_hidden", "dp": 2}], "micro_batch": [2, 4]},
        }
    )
    plan = replace(expand(hostile), excluded=((HOSTILE, HOSTILE),))
    keep_record(plan.points[0].config, tmp_path, status="failed", reason=HOSTILE)
    keep_record(plan.points[1].config, tmp_path)
    keep_record(plan.points[2].config, tmp_path, status="oom")
    results = judged(_results(plan, tmp_path))
    folder = tmp_path / "campaigns" / "hostile"
    files = write_report(hostile, plan, results, folder)
    assert {path.name for path in files} == {path.name for path in folder.iterdir()}
    page = (folder / "report.html").read_text()
    assert "<img src=x" not in page and "&lt;img src=x onerror=alert(1)&gt;" in page
    addresses = re.findall(r"<[^<>]*\b(?:src|href)=([^ >]*)", page)
    assert len(addresses) == 4 and all(address.startswith('"data:image/png;base64,') for address in addresses)
    text = markdown(hostile, plan, results, {})
    assert "<img" not in text and "1 of 4 points completed; 1 do not fit" in text
    assert all(row_of(result)["label"] for result in results)


def test_a_folder_that_cannot_be_written_is_said_in_a_sentence(campaign: Campaign, tmp_path: Path) -> None:
    (tmp_path / "campaigns").write_text("in the way")
    plan = expand(campaign)
    with pytest.raises(LabError, match="the report cannot be written"):
        write_report(campaign, plan, _results(plan, tmp_path), tmp_path / "campaigns" / "x")


def test_throughput_is_predicted_from_one_process_that_does_what_a_replica_does(
    campaign: Campaign, keep_record: Keep, tmp_path: Path
) -> None:
    plan = expand(campaign)  # one process with 2 and 4 samples, then two replicas of each
    for point, rate in zip(plan.points, (10.0, 12.0, 15.0, 30.0), strict=True):
        keep_record(point.config, tmp_path, rate=rate)
    found = [result.predicted_samples_per_s for result in judged(_results(plan, tmp_path))]
    assert found[:2] == [None, None] and found[3] == 24.0


def test_one_batch_cut_into_more_and_more_micro_batches_is_drawn_against_their_number(tmp_path: Path) -> None:
    cuts = [{"name": str(n), "micro_batch": 8 // n, "micro_batches": n} for n in (1, 2, 4)]
    pipeline = Campaign(title="t", base={"model": "vit_tiny", "pp": 2, "engine": "by_hand"}, axes={"batch": cuts})
    marks = marks_of(pipeline, _results(expand(pipeline), tmp_path))
    assert [mark.batch for mark in marks] == [1, 2, 4] and len({mark.series for mark in marks}) == 1
