"""Memory that others have published: the page has today's forecasts, each within the bound, or says why not."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import estimators
from benchmarks.memory_reports import BOUND, answer, answer_of, reports, rows_of, write_models

PAGE = Path(__file__).parents[2] / "docs" / "memory_reports.md"
BY_DAY = ("nanogpt", "swift-qwen-1.8b", "torchtune-8b-4090", "bert-adafactor")
"""A verdict, a figure in plain bf16 with checkpointing, one with paged states in backward, one of Adafactor."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in reports()]
)
def test_memory_reports_page_has_what_the_command_says_today(name: str, tmp_path: Path) -> None:
    write_models(tmp_path)
    report = reports()[name]
    entry = answer(report, tmp_path)
    assert rows_of([entry])[name] in PAGE.read_text(encoding="utf-8"), "run benchmarks/memory_reports.py --page again"
    # A report without an answer says why, one that is further off too.
    assert entry.is_right or report.unsaid or report.beside


@pytest.mark.nightly
@pytest.mark.parametrize("question", estimators.QUESTIONS, ids=lambda question: question.title)
def test_estimators_page_has_what_this_package_says_today(question: estimators.Question, tmp_path: Path) -> None:
    answer_gb = estimators.ours(question, estimators.write_config(question, tmp_path))
    assert answer_gb is not None
    assert abs(answer_gb / question.measured_gb - 1) < estimators.LIMIT_PERCENT / 100
    page = PAGE.with_name("estimators.md").read_text(encoding="utf-8")
    assert f"| {question.title} | {question.measured_gb:.2f} | {answer_gb:.1f} (" in page


def test_reports_are_of_sixteen_sources_and_each_has_a_command_or_a_reason() -> None:
    known = reports()
    assert len({report.source for report in known.values()}) == 16
    for report in known.values():
        assert bool(report.command) != bool(report.unsaid), report.id
        assert bool(report.verdict) != (report.gib is not None), report.id


def test_answer_of_a_document_compares_what_the_report_has_read_off() -> None:
    """8 GiB allocated, 9 reserved, 10 shown by nvidia-smi, 8.5 needed; 12 % from 10 is the last that is right."""
    gib = 2**30
    memory = {"peak_bytes": 8 * gib, "reserved_bytes": 9 * gib, "device_bytes": 10 * gib}
    document = {"memory": memory, "taken_bytes": int(8.5 * gib), "fits": True}
    report = reports()["bert-4"]
    for shown, expected in (("allocated", 8), ("reserved", 9), ("nvidia-smi", 10), ("needed", 8.5)):
        changed = type(report)(id="a", source="", setting="", shown=shown, gib=expected / (1 + BOUND))
        entry = answer_of(changed, document)
        assert entry.gib == expected and entry.off == pytest.approx(BOUND)
        too_small = type(report)(id="a", source="", setting="", shown=shown, gib=expected / 1.2)
        assert answer_of(too_small, document).is_right is False
    verdict = type(report)(id="a", source="", setting="", verdict="out of memory")
    assert answer_of(verdict, document).is_right is False


def test_answer_of_a_compiled_step_is_right_within_its_range_and_at_most_the_bound_beside_it() -> None:
    """4 to 8 GiB: 6 lies within, 8.5 is 6 % above, 10 is 20 % above, 3 is a third below."""
    gib = 2**30
    document = {"compiled": {"low_bytes": 4 * gib, "high_bytes": 8 * gib, "fits": True}}
    report = reports()["torchtune-3b-compiled"]
    entries = {figure: answer_of(replace(report, gib=figure), document) for figure in (6.0, 8.5, 10.0, 3.0)}
    assert [entry.off for entry in entries.values()] == pytest.approx([0, 8 / 8.5 - 1, -0.2, 1 / 3])
    assert [entry.is_right for entry in entries.values()] == [True, True, False, False]
    assert entries[6.0].cells()[4] == "4.0 to 8.0"
