"""The goals of the cost model, each a test: an error that grows by half a point fails, and one that misses its goal."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.cli.plan import validate_command
from dlojz.cost_model.layouts import Layouts
from dlojz.cost_model.step import memories
from dlojz.cost_model.validation import GOALS, TOOLS, interval, spearman, validate, validate_memory, validated
from dlojz.cost_model.workload import decoder_workload
from dlojz.hardware.evidence import measurements, table

ROOT = Path(__file__).resolve().parents[2]
LAST = {
    "korthikanti-5": 0.0192,
    "sc21-1": 0.0209,
    "sc21-2": 0.0392,
    "jean-zay-a100": 0.0422,
    "vtrain-multi": 0.0597,
    "megatron-h100": 0.0169,
    "torchtitan": 0.0793,
    "llama-3": 0.0130,
    "nemo-h100": 0.0711,
    "jean-zay-v100": 0.1485,
    "mt-nlg": 0.2549,
    "mpt-a100": 0.0477,
    "mpt-h100": 0.0419,
    "mpt-h100-fp8": 0.0444,
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


def test_software_never_seen_is_predicted_decently() -> None:
    """Fits that saw no row of a table; MPT's FSDP runs were never fitted on, and a constant rate had half of them."""
    for name in ("korthikanti-5", "sc21-1", "jean-zay-a100", "vtrain-multi", "megatron-h100"):
        assert validate(name).left_out_mean <= 0.08
    for name in ("mpt-a100", "mpt-h100"):
        result = validate(name)
        long = [abs(one.error) for one in result.rows if one.row.size.sequence_length >= 16384]
        assert result.left_out_mean == result.mean <= 0.06 and sum(long) / len(long) <= 0.08
        assert result.mean < result.trivial


@pytest.mark.parametrize("profile", ["a100", "h100"])
def test_four_in_five_runs_of_other_software_are_within_the_interval(profile: str) -> None:
    """Each table by the interval of all others; its slow side is the wider one, because stragglers only add."""
    found = interval(profile)
    assert 0.75 <= found.coverage <= 0.85
    assert found.high - 1 > 1 - found.low > 0


def test_memory_meets_its_goals() -> None:
    result = validate_memory()
    assert result.mean <= 0.05
    assert len(result.false_alarms) <= 1
    # Row 957 contradicts its neighbour 949, which reads 60 GB with one layer less on each stage: no form finds it.
    assert result.missed == ("jean-zay-a100/957",)
    assert result.activation_mean <= 0.01


def test_the_readme_counts_the_step_times_that_the_model_is_held_against() -> None:
    """Not those of tables that only tell memory or single layers, nor those that are excluded."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    said = re.findall(r"(\d+) (?:published|measured) (?:measurements|step times|steps)", text)
    timed = [row for result in map(validate, validated()) for row in result.rows]
    assert len(said) == 2 and {int(number) for number in said} == {len(timed)}
    assert len(timed) < sum(one.usable and one.seconds is not None for one in measurements()) < len(measurements())


@pytest.fixture(scope="module")
def page() -> str:
    """docs/validation.md with its lines joined, so that a sentence can be looked for."""
    return " ".join((ROOT / "docs" / "validation.md").read_text(encoding="utf-8").split())


def told(share: float | None) -> str:
    """A share as the page prints it."""
    return "" if share is None else f"{100 * share:.1f} %"


def test_the_page_has_one_line_for_each_table() -> None:
    lines = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    assert [cells[0] for cells in rows] == ["table", *validated()]


@pytest.mark.parametrize("name", validated())
def test_the_page_prints_what_is_computed(name: str) -> None:
    result, goal, tool = validate(name), GOALS.get(name), TOOLS.get(name)
    cells = [
        name,
        f"{len(result.held)} / {len(result.rows)}",
        told(result.mean),
        told(result.worst),
        told(goal.mean) if goal else "",
        told(result.trivial),
        told(result.left_out_mean),
        told(result.left_out_worst),
        f"{tool.name} {told(tool.mean)}" if tool else "",
    ]
    lines = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8").splitlines()
    assert f"| {' | '.join(cells)} |" in lines


def test_the_page_tells_memory_and_ranks_as_computed(page: str) -> None:
    result = validate_memory()
    assert f"{told(result.mean)} on the held-out Jean Zay readings ({len(result.readings)} in all)" in page
    assert f"{told(result.activation_mean)} on Korthikanti's activations" in page
    found, alarms = len(result.found), len(result.false_alarms)
    assert f"{found} of {len(result.ran_out)} out-of-memory rows found with {alarms} false alarms" in page
    correlation = validate("jean-zay-a100").rank_correlation
    assert f"Rank correlation of FLOP/s per GPU on Jean Zay's A100 rows: {correlation:.2f}." in page
    figure = [row for row in table("korthikanti-memory") if row.memory_reading == "states"]
    held = [memories(decoder_workload(row.size), Layouts.from_measurements([row])) for row in figure]
    more = [
        float(one.weights[0] + one.gradients[0] + one.optimizer[0]) / (row.memory_bytes or 0) - 1
        for one, row in zip(held, figure, strict=True)
    ]
    assert len(more) == 4
    assert f"the first stage holds {100 * min(more):.0f} to {100 * max(more):.0f} % more" in page


def test_the_page_tells_what_was_chosen_after_errors_were_seen_with_their_figures(page: str) -> None:
    offloaded = [row.error for row in validate("jean-zay-v100").rows if row.row.offload != "none"]
    assert len(offloaded) == 7 and f"from −{-100 * min(offloaded):.0f} to +{100 * max(offloaded):.0f} %" in page
    elsewhere = [row for name in validated() if name != "jean-zay-v100" for row in table(name) if row.offload != "none"]
    assert elsewhere == []


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
