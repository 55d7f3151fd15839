"""The goals of the cost model, each a test: an error that grows by half a point fails, and one that misses its goal."""

import json
import math
import re
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import pytest

from benchmarks.validation_page import GOALS, blocks, filled, goals, goals_table, present_page, rows_page, write_page
from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.cli.plan import validate_command
from dlojz.cost_model.validation import (
    MemoryResult,
    TableResult,
    first_choices,
    interval,
    spearman,
    validate,
    validate_memory,
    validated,
)
from dlojz.display.validation_tables import rows_table
from dlojz.hardware.evidence import measurements, table

ROOT = Path(__file__).resolve().parents[2]
LAST = {
    "korthikanti-5": 0.0194,
    "sc21-1": 0.0249,
    "sc21-2": 0.0497,
    "jean-zay-a100": 0.0414,
    "vtrain-multi": 0.0582,
    "megatron-h100": 0.0162,
    "torchtitan": 0.0589,
    "llama-3": 0.0225,
    "nemo-h100": 0.0634,
    "jean-zay-v100": 0.1593,
    "mt-nlg": 0.2546,
    "mpt-a100": 0.0437,
    "mpt-h100": 0.0453,
    "mpt-h100-fp8": 0.0220,
    "fms-a100": 0.0314,
    "fms-h100": 0.0230,
    "nemo-long": 0.0572,
    "bridge-moe": 0.2035,
}
"""Mean absolute errors on held-out rows when last looked at."""


@pytest.mark.parametrize("name", validated())
def test_validate_gets_worse_on_no_table_by_more_than_half_a_point(name: str) -> None:
    assert validate(name).mean <= LAST[name] + 0.005


@pytest.mark.parametrize("name", sorted(GOALS))
def test_each_goal_is_reached_and_the_trivial_model_beaten(name: str) -> None:
    result, goal = validate(name), GOALS[name]
    assert result.mean <= goal.mean and result.worst <= (goal.worst or math.inf)
    assert result.mean < result.trivial


def test_validate_ranks_jean_zays_layouts_as_measured() -> None:
    assert validate("jean-zay-a100").rank_correlation >= 0.85


def test_validate_predicts_software_never_seen_decently() -> None:
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


def test_validate_counts_the_step_times_that_the_page_of_commands_does() -> None:
    """Not those of tables that only tell memory or single layers, nor those that are excluded."""
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    said = re.findall(r"(\d+) (?:published|measured) (?:measurements|step times|steps)", text)
    timed = [row for result in map(validate, validated()) for row in result.rows]
    assert len(said) == 2 and {int(number) for number in said} == {len(timed)}
    assert len(timed) < sum(one.usable and one.seconds is not None for one in measurements()) < len(measurements())


NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def differences(one: str, other: str) -> list[str]:
    """Lines of two pages that differ by more than the last digit of a number."""
    lines = list(zip_longest(one.splitlines(), other.splitlines(), fillvalue=""))
    return [f"- {old}\n+ {new}" for old, new in lines if not alike(old, new)]


def alike(old: str, new: str) -> bool:
    """Whether two lines have the same words, and the same numbers but for one in the last digit."""
    if NUMBER.sub("#", old.replace("−0.0", "+0.0")) != NUMBER.sub("#", new.replace("−0.0", "+0.0")):
        return False
    for was, now in zip(NUMBER.findall(old), NUMBER.findall(new), strict=True):
        unit = 10.0 ** -len(was.partition(".")[2])
        if abs(float(was.replace(",", "")) - float(now.replace(",", ""))) > 1.01 * unit:
            return False
    return True


@pytest.fixture(scope="module")
def results() -> list[TableResult]:
    return [validate(name) for name in validated()]


@pytest.fixture(scope="module")
def memory() -> MemoryResult:
    return validate_memory()


def test_the_pages_are_what_the_command_writes(results: list[TableResult], memory: MemoryResult) -> None:
    """Within the last digit; whoever changes the model writes them again and looks at the difference."""
    page, rows = ROOT / "docs" / "validation.md", ROOT / "docs" / "validation_rows.md"
    kept = page.read_text(encoding="utf-8")
    again = "run: python benchmarks/validation_page.py docs/validation.md"
    made = filled(kept, blocks(results, memory, rows.name), page.name)
    assert differences(kept, made) == [], again
    assert differences(rows.read_text(encoding="utf-8"), rows_page(results, memory, page.name)) == [], again


def test_validation_page_that_differs_is_seen() -> None:
    assert differences("error 3.4 % of 12", "error 3.5 % of 12") == []
    assert differences("error 3.4 % of 12", "error 3.6 % of 12") == ["- error 3.4 % of 12\n+ error 3.6 % of 12"]
    assert differences("a 1\n", "a 1\nb") and differences("+1.2 %", "−1.2 %") and differences("-0.1", "0.1")


def test_each_goal_that_is_missed_says_why(results: list[TableResult], memory: MemoryResult) -> None:
    """A goal that newly fails needs a sentence in `benchmarks/validation_page.py`, or a better model."""
    found = goals(results, memory)
    assert len({one.name for one in found}) == len(found)
    assert [one.name for one in found if not one.reached and not one.reason] == []
    assert [one.name for one in found if one.reached and one.reason] == []
    [constant] = [one for one in found if one.name == "constant"]
    assert constant.reached and constant.detail == ""


def test_goals_table_says_what_is_reached(results: list[TableResult], memory: MemoryResult) -> None:
    found = goals(results, memory)
    shown = goals_table(found).markdown()
    assert shown.count("| reached |") == sum(one.reached for one in found) and "≤ 5.0" in shown


def test_goals_are_those_that_were_set(results: list[TableResult], memory: MemoryResult) -> None:
    wanted: dict[str, object] = {one.name: (one.least, one.most) for one in goals(results, memory)}
    assert wanted["torchtitan, left out"] == (0, 0.05)
    assert wanted["vtrain-multi, left out"] == (0, 0.06) and wanted["vtrain-multi, left out, worst"] == (0, 0.25)
    assert wanted["mpt-a100, left out"] == (0, 0.05) and wanted["nemo-long, left out"] == (0, 0.07)
    assert wanted["mpt-h100, left out"] == wanted["fms-a100, left out"] == wanted["fms-h100, left out"] == (0, 0.06)
    assert wanted["bridge-moe, left out"] == (0, 0.15)
    assert wanted["long"] == (0, 0.08) and wanted["refused"] == (0, 0.02) and wanted["memory"] == (0, 0.035)
    assert wanted["out of memory"] == (5, math.inf) and wanted["constant"] == (0, 0)
    assert wanted["interval, a100"] == wanted["interval, h100"] == (0.75, 0.85)
    for name in ("jean-zay-a100", "vtrain-multi"):
        assert wanted[f"{name}, regret"] == (0, 0.02) and wanted[f"{name}, regret, worst"] == (0, 0.05)


def test_regret_is_what_the_first_choice_loses() -> None:
    """By hand: five layouts, of which one was measured twice; the one predicted fastest took 3 s, the best 2 s."""
    first = next(one for one in validate("sc21-2").rows if one.row.row == "sc21-2/ptd-174.6-384")
    seconds = {1: (3.0, 1.0), 2: (2.0, 2.0), 4: (4.0, 3.0), 8: (5.0, 4.0), 16: (6.0, 5.0)}
    rows = [
        replace(first, row=replace(first.row, micro_batch=size), measured_s=measured, left_out_s=predicted)
        for size, (measured, predicted) in seconds.items()
    ]
    [one] = first_choices(TableResult("sc21-2", "a100", (*rows, replace(rows[1], measured_s=2.0))))
    assert (one.layouts, one.chosen.row.micro_batch, one.best.row.micro_batch) == (5, 1, 2)
    assert [one.regret, one.random, one.correlation] == pytest.approx([0.5, 1.0, 0.9])
    assert first_choices(TableResult("sc21-2", "a100", tuple(rows[:4]))) == ()
    other = [replace(row, row=replace(row.row, global_batch=768)) for row in rows[:2]]
    assert first_choices(TableResult("sc21-2", "a100", (*rows[2:], *other))) == ()


def test_tools_that_have_published_a_row_are_told_with_it() -> None:
    result = validate("mt-nlg")
    assert [[figure.step_s for figure in one.row.published] for one in result.rows] == [[60.0], [49.98], [44.6]]
    [tool] = result.tools
    assert tool.mean == pytest.approx((0.1 / 60.1 + 0.22 / 50.2 + 0.2 / 44.4) / 3)
    assert "given the rate s" in str(rows_table(result, seconds=True))
    assert [one.name for one in validate("vtrain-multi").tools] == ["vTrain", "Calculon"]


def test_runs_that_ran_are_refused_on_three_tables_at_most(memory: MemoryResult) -> None:
    tables = {name.partition("/")[0] for name in memory.refused}
    assert tables <= {"sc21-2", "nemo-h100", "jean-zay-v100"}
    assert len(memory.refused) <= 14 and len(memory.ran) > 450


def test_the_rows_that_offload_are_those_that_the_page_speaks_of() -> None:
    offloaded = [row.error for row in validate("jean-zay-v100").rows if row.row.offload != "none"]
    text = " ".join((ROOT / "docs" / "validation.md").read_text(encoding="utf-8").split())
    assert len(offloaded) == 7 and f"from −{-100 * min(offloaded):.0f} to +{100 * max(offloaded):.0f} %" in text
    elsewhere = [row for name in validated() if name != "jean-zay-v100" for row in table(name) if row.offload != "none"]
    assert elsewhere == []


@pytest.fixture
def validated_once(results: list[TableResult], memory: MemoryResult, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command shows what is computed already, since a page takes all tables."""
    told = {one.name: one for one in results}
    monkeypatch.setattr("dlojz.cost_model.validation.validate", lambda name, *_: told[name])
    monkeypatch.setattr("dlojz.cost_model.validation.validate_memory", lambda: memory)


def test_write_page_keeps_what_was_written_by_hand(
    tmp_path: Path, results: list[TableResult], memory: MemoryResult
) -> None:
    page = tmp_path / "deep" / "truth.md"
    assert write_page(page, results, memory) == page.with_name("truth_rows.md")
    first = page.read_text(encoding="utf-8")
    assert "[truth_rows.md](truth_rows.md)" in first and "## 530B" not in first
    assert "vtrain-multi" in page.with_name("truth_rows.md").read_text(encoding="utf-8")
    page.write_text(f"by hand\n{first.replace('missed', 'wrong').replace('%', 'wrong')}by hand too\n", encoding="utf-8")
    use_language("fr")
    write_page(page, results, memory)
    assert page.read_text(encoding="utf-8") == f"by hand\n{first}by hand too\n"


def test_present_page_leaves_a_page_without_marks_alone(tmp_path: Path) -> None:
    notes = tmp_path / "notes.md"
    notes.write_text("# My notes\n", encoding="utf-8")
    with pytest.raises(LabError, match=r"notes.md must hold the line '<!-- dlojz validate: goals -->' once"):
        present_page(notes)
    assert notes.read_text(encoding="utf-8") == "# My notes\n" and list(tmp_path.iterdir()) == [notes]
    with pytest.raises(LabError, match=r"Markdown, but 'page.html' was received"):
        present_page(tmp_path / "page.html")
    with pytest.raises(LabError, match="give another path"):
        present_page(notes / "page.md")


def test_spearman_is_the_rank_correlation() -> None:
    assert spearman([1, 2, 3], [10, 20, 30]) == pytest.approx(1)
    assert spearman([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(math.sqrt(3) / 2)
    assert math.isnan(spearman([1, 1], [1, 2]))


@pytest.mark.usefixtures("validated_once")
def test_the_command_answers_in_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert validate_command(["korthikanti-5", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert len(document["tables"][0]["each"]) == 9
    validate_command(["--json"])
    document = json.loads(capfd.readouterr().out)
    assert [len(one["first_choices"]) for one in document["tables"]] == [0, 0, 0, 4, 4, *[0] * 13]
    assert set(document["intervals"]) == {"a100", "h100", "v100"} and "refused" in document["memory"]


def test_the_command_shows_every_row(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert validate_command(["llama-3"]) == 0
    shown = capfd.readouterr().out
    assert "8192-gpus" in shown and "fitted" in shown


def test_validate_refuses_a_table_that_does_not_exist() -> None:
    with pytest.raises(LabError, match="korthikanti-5"):
        validate("korthikanti-6")
    with pytest.raises(LabError, match="'korthikanti-4' prints no step times of whole models"):
        validate("korthikanti-4")
    with pytest.raises(LabError, match="twice"):
        validate_command(["sc21-1", "sc21-1"])


def test_validate_names_the_tables_that_have_step_times_for_an_unknown_one() -> None:
    with pytest.raises(LabError) as refused:
        validate("nonsense")
    assert str(refused.value) == f"unknown table 'nonsense': legal values: {', '.join(validated())}."
