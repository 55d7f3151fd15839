"""The table in a terminal: complete, aligned, and readable at 100 columns as well as at fewer or more."""

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from dlojz.base.language import use_language
from dlojz.compare import Comparison, compare
from dlojz.display.tables import grid
from dlojz.prediction import predict
from dlojz.results.record import RunRecord

MakeRecord = Callable[..., RunRecord]
DDP = {"dp": 2, "micro_batch": 16}


@pytest.fixture
def comparison(make_record: MakeRecord) -> Comparison:
    return compare(
        [
            make_record(engine="single", micro_batches=2),
            make_record(**DDP),
            make_record(zero=3, **DDP),
            *(make_record(engine="deepspeed", zero=stage, **DDP) for stage in range(4)),
        ]
    )


def _printed(comparison: Comparison, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(comparison)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_comparison_grid_cuts_no_figure_at_any_width(comparison: Comparison, width: int) -> None:
    printed = _printed(comparison, width)
    assert all(len(line) <= width for line in printed.splitlines())
    assert "…" not in printed
    for line in (line for section in grid(comparison, compact=True).sections for line in section.lines[2:]):
        for cell in line.cells:
            assert cell.predicted in printed and cell.measured in printed


def test_comparison_of_seven_runs_stands_side_by_side_in_100_columns(comparison: Comparison) -> None:
    lines = _printed(comparison, 100).splitlines()
    assert next(line for line in lines if line.startswith("status")).count("completed") == 7
    assert sum(line.startswith("weights") for line in lines) == 1


def test_compare_marks_unequal_bytes_by_a_sign(make_record: MakeRecord) -> None:
    assert "≠" not in _printed(compare(make_record(**DDP)), 100)
    assert "≠" in _printed(compare(make_record(extra_bytes=4096, **DDP)), 100)


def test_units_and_figures_of_a_line(make_record: MakeRecord) -> None:
    record = make_record(**DDP)
    weights = record.footprints[0].memory.weights_bytes
    assert weights is not None
    lines = {line.label: line for section in grid(compare(record)).sections for line in section.lines}
    assert lines["weights, MiB"].cells[0].measured == f"{weights / 2**20:.2f}"
    predicted = predict(record.config).memory.activations_bytes or 0
    assert lines["activations, MiB"].cells[0].predicted == f"{predicted / 2**20:.1f}"


def test_comparison_in_french(comparison: Comparison) -> None:
    use_language("fr")
    printed = _printed(comparison, 140)
    assert "poids" in printed and "terminé" in printed and "chaque case : prédit | mesuré" in printed


def test_markdown_has_one_row_of_equal_length_per_line(comparison: Comparison) -> None:
    rows = [line for line in comparison.markdown().splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {len(comparison.rows) + 2}
