"""Campaigns as they are written, and their points: ordered, whole, and refused before anything is run."""

from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.campaign.campaign import MAX_POINTS, Campaign, campaigns_folder, expand, find_campaign, read_campaign

BASE = {"model": "vit_tiny", "image_size": 32, "steps": 4}


def _of(**fields: object) -> Campaign:
    return Campaign.from_dict({"title": "t", "base": BASE, **fields})


def test_the_first_axis_varies_slowest_and_repeats_fastest(campaign: Campaign) -> None:
    points = expand(campaign.model_copy(update={"repeats": 2})).points
    assert [point.number for point in points] == list(range(1, 9))
    assert [(p.config.layout.dp, p.config.layout.micro_batch, p.config.seed) for p in points] == [
        (dp, batch, seed) for dp in (1, 2) for batch in (2, 4) for seed in (0, 1)
    ]
    assert points[0].label == "alone, micro_batch 2" and points[1].label == "alone, micro_batch 2, #2"
    assert len({point.config.hash for point in points}) == 8
    assert expand(campaign) == expand(campaign)


def test_every_impossible_point_is_listed_with_its_sentence() -> None:
    campaign = _of(axes={"zero": [0, 1, 2], "precision": ["fp32", "fp16"]})
    with pytest.raises(LabError) as refusal:
        expand(campaign)
    text = str(refusal.value)
    assert text.startswith("nothing was submitted: 4 of")
    assert "zero 1, fp32: engine 'torch' has no ZeRO-1" in text
    assert "zero 0, fp16: precision='fp16' cannot be run yet" in text
    assert "zero 0, fp32" not in text


def test_exclusions_take_points_out_with_their_reason_before_they_are_judged() -> None:
    axes = {"zero": [0, 1, 2], "dp": [1, 2]}
    plan = expand(_of(axes=axes, exclude=[{"zero": 1, "reason": "torch has none"}, {"dp": [2, 4], "reason": "alone"}]))
    assert [(p.config.layout.zero, p.config.layout.dp) for p in plan.points] == [(0, 1), (2, 1)]
    assert plan.excluded == (
        ("zero 0, dp 2", "alone"),
        ("zero 1, dp 1", "torch has none"),
        ("zero 1, dp 2", "torch has none"),
        ("zero 2, dp 2", "alone"),
    )


def test_an_exclusion_sees_defaults_and_one_that_matches_nothing_is_refused() -> None:
    axes = {"layout": [{"name": "a", "dp": 1}, {"name": "b", "dp": 2, "zero": 2, "engine": "deepspeed"}]}
    assert len(expand(_of(axes=axes, exclude=[{"engine": "torch", "reason": "r"}])).points) == 1
    with pytest.raises(LabError, match="matches no point"):
        expand(_of(axes=axes, exclude=[{"zero": 3, "reason": "r"}]))
    with pytest.raises(LabError, match="has no point"):
        expand(_of(exclude=[{"model": "vit_tiny", "reason": "r"}]))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"axes": {"micro_bach": [1]}}, "did you mean 'micro_batch'"),
        ({"base": {"modell": "x"}}, "did you mean 'model'"),
        ({"axes": {"dp": []}}, "list of values"),
        ({"axes": {"dp": [1, {"dp": 2}]}}, "list of values"),
        ({"axes": {"x": [{"name": "only a name"}]}}, "list of values"),
        ({"axes": {"dp": [1], "x": [{"dp": 2}]}}, "both set 'dp'"),
        ({"exclude": [{"dp": 1}]}, "reason"),
        ({"exclude": [{"reason": "r"}]}, "match"),
        ({"repeats": 0}, "at least 1"),
        ({"repeats": 10**9}, "at most 20"),
        ({"time_limit_s": -1}, "greater than 0"),
        ({"title": ""}, "title"),
        ({"axis": {}}, "did you mean 'axes'"),
    ],
)
def test_what_is_written_wrongly_is_refused_in_a_sentence(fields: dict[str, object], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        _of(**fields)


def test_points_that_are_one_run_and_too_many_points_are_refused() -> None:
    with pytest.raises(LabError, match="are the same run"):
        expand(_of(axes={"x": [{"name": "a", "dp": 1}, {"name": "b", "dp": 1}]}))
    with pytest.raises(LabError, match=str(MAX_POINTS)):
        expand(_of(axes={name: list(range(1, 200)) for name in ("dp", "micro_batch", "seed", "steps")}))


def test_machines_are_an_axis_are_replaced_by_one_and_must_be_plain_names() -> None:
    campaign = _of(axes={"machine": ["a", "b"], "dp": [1, 2]})
    assert [point.machine for point in expand(campaign).points] == ["a", "a", "b", "b"]
    assert [point.machine for point in expand(campaign, "c").points] == ["c", "c"]
    for name in ("../x", "a; rm -rf", ".hidden", "a\nb", "$(x)"):
        with pytest.raises(LabError, match="a machine is named"):
            expand(campaign, name)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.toml", b"title = ", "campaign a.toml cannot be used"),
        ("a.toml", b"\xff\xfe", "cannot be used"),
        ("a.toml", b"title = 'x'\n" + b"#" * 300_000, "larger than"),
        ("a; rm -rf.toml", b"title = 'x'", "rename it"),
        (".a.toml", b"title = 'x'", "rename it"),
    ],
)
def test_a_file_that_is_no_campaign_is_refused(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(LabError, match=sentence):
        read_campaign(tmp_path / name)
    with pytest.raises(LabError, match="cannot be used: No such file"):
        read_campaign(tmp_path / "none.toml")


@pytest.mark.parametrize("path", sorted(campaigns_folder().glob("*.toml")), ids=lambda path: path.stem)
def test_the_campaigns_of_the_course_are_legal(path: Path) -> None:
    plan = expand(read_campaign(find_campaign(path.stem)))
    assert 2 <= len(plan.points) <= 60
    if path.stem.endswith("_local"):
        assert {point.machine for point in plan.points} == {""}
        assert max(point.config.layout.world_size for point in plan.points) <= 2
    else:
        assert all(point.machine for point in plan.points)


def test_the_course_has_its_campaigns() -> None:
    names = {path.stem for path in campaigns_folder().glob("*.toml")}
    for subject in ("data_parallelism", "zero_stages", "pipeline_chunks", "tensor_degrees", "compromise"):
        assert {subject, f"{subject}_local"} <= names
    with pytest.raises(LabError, match="did you mean"):
        find_campaign("zero_stage")
