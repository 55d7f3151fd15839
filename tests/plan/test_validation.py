"""The goals of the cost model, each a test: an error that grows by half a point fails, and one that misses its goal."""

from __future__ import annotations

import json
import math

import pytest

from dlojz.cli.validate import validate_command
from dlojz.plan.validation import GOALS, spearman, validate, validated
from dlojz.plan.validation_memory import validate_memory
from dlojz.schema import LabError

LAST = {
    "korthikanti-5": 0.0206,
    "sc21-1": 0.0191,
    "sc21-2": 0.0400,
    "jean-zay-a100": 0.0416,
    "vtrain-multi": 0.0556,
    "megatron-h100": 0.0368,
    "torchtitan": 0.0504,
    "llama-3": 0.0434,
    "nemo-h100": 0.0435,
    "jean-zay-v100": 0.1509,
    "mt-nlg": 0.2503,
}
"""Mean absolute errors on held-out rows when last looked at."""


@pytest.mark.parametrize("name", validated())
def test_no_table_gets_worse_by_more_than_half_a_point(name: str) -> None:
    assert validate(name).mean <= LAST[name] + 0.005


@pytest.mark.parametrize("name", sorted(GOALS))
def test_each_goal_is_reached_and_the_trivial_model_beaten(name: str) -> None:
    result = validate(name)
    assert result.reached
    assert result.mean < result.trivial


def test_jean_zays_layouts_are_ranked_as_measured() -> None:
    assert validate("jean-zay-a100").rank_correlation >= 0.85


def test_models_never_seen_are_predicted_decently() -> None:
    """Fits that saw no row of a model, on all rows of that model."""
    for name in ("korthikanti-5", "sc21-1", "jean-zay-a100", "vtrain-multi"):
        unseen = validate(name).left_out_mean
        assert unseen is not None and unseen <= 0.10


def test_memory_meets_its_goals() -> None:
    result = validate_memory()
    assert result.mean <= 0.05
    assert len(result.false_alarms) <= 1
    # Row 957 contradicts its neighbour 949, which reads 60 GB with one layer less on each stage: no form finds it.
    assert result.missed == ("jean-zay-a100/957",)
    assert result.activation_mean <= 0.01


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(spearman([1, 1], [1, 2]))


def test_the_command_answers_in_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert validate_command(["korthikanti-5", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["tables"][0]["reached"] is True
    assert len(document["tables"][0]["each"]) == 9


def test_the_command_shows_every_row(capfd: pytest.CaptureFixture[str]) -> None:
    assert validate_command(["llama-3"]) == 0
    shown = capfd.readouterr().out
    assert "8192-gpus" in shown and "fitted" in shown


def test_a_table_that_does_not_exist_is_refused() -> None:
    with pytest.raises(LabError, match="korthikanti-5"):
        validate("korthikanti-6")
    with pytest.raises(LabError, match="twice"):
        validate_command(["sc21-1", "sc21-1"])
