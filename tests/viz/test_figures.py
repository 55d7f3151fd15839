"""The figures: what is drawn has the lengths of the figures it stands for, nothing overlaps, texts stay texts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from dlojz.compare import compare
from dlojz.footprint import CATEGORIES
from dlojz.record import RunRecord
from dlojz.schema import LabError
from dlojz.text import use_language
from dlojz.viz.compare_figure import compare_figure
from dlojz.viz.markup import visible
from dlojz.viz.memory_figure import memory_figure
from dlojz.viz.palette import CATEGORY_STYLES
from dlojz.viz.timeline_figure import timeline_figure

MakeRecord = Callable[..., RunRecord]
DDP = {"dp": 2, "micro_batch": 16}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def records(make_record: MakeRecord) -> list[RunRecord]:
    return [
        make_record(engine="single", micro_batches=2),
        make_record(**DDP),
        *(make_record(engine="deepspeed", zero=stage, **DDP) for stage in range(4)),
    ]


def _overlapping(figure: Figure) -> list[tuple[str, str]]:
    """Pairs of visible texts whose boxes intersect."""
    figure.canvas.draw()
    axes = [axis for panel in figure.axes for axis in (panel.xaxis, panel.yaxis)]
    beyond = {
        label
        for axis in axes
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [
        text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and text not in beyond
    ]
    boxes = [(text.get_text(), text.get_window_extent().shrunk(0.95, 0.8)) for text in texts]
    return [(one, other) for (one, box), (other, its) in combinations(boxes, 2) if box.overlaps(its)]


@pytest.mark.parametrize("language", ["en", "fr"])
def test_no_text_lies_on_another(records: list[RunRecord], language: str) -> None:
    use_language(language)
    try:
        for figure in (
            compare_figure(compare(records)),
            memory_figure(records[1], limit_bytes=10**7),
            timeline_figure(records[1]),
        ):
            assert _overlapping(figure) == []
    finally:
        use_language("en")


def test_bars_are_as_long_as_their_bytes(make_record: MakeRecord) -> None:
    record = make_record(**DDP)
    figure = compare_figure(compare(record))
    communication = figure.axes[1]
    expected = record.footprints[0].traffic("all_reduce") / 2**20
    assert [bar.get_width() for bar in communication.patches] == pytest.approx([expected, expected])  # type: ignore[attr-defined]


def test_failed_single_and_unmeasured_runs_are_drawn(make_record: MakeRecord, tmp_path: Path) -> None:
    failed = make_record("failed", "killed", measured=False, **DDP)
    for number, runs in enumerate(([failed], [make_record(engine="single")], [make_record(**DDP), failed])):
        path = tmp_path / f"{number}.png"
        compare_figure(compare(runs), path)
        assert path.read_bytes().startswith(PNG)


def test_a_figure_shows_itself_and_says_what_it_shows(records: list[RunRecord]) -> None:
    shown = compare_figure(compare(records))._repr_mimebundle_()
    assert shown["image/png"].startswith(PNG)
    assert "DDP" in shown["text/plain"]


@pytest.mark.parametrize("name", ["$\\foo$", "_hidden", "a^b_c", "%s {x}", "\x00\u202e"])
def test_hostile_names_are_drawn(records: list[RunRecord], name: str) -> None:
    comparison = compare(records)
    rows = tuple(row.model_copy(update={"title": name, "model": name}) for row in comparison.rows)
    figure = compare_figure(comparison.model_copy(update={"rows": rows}))
    figure.canvas.draw()
    assert all(not text.get_parse_math() for text in figure.findobj(Text) if visible(name) in text.get_text())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name, sentence", [("figure", "needs an ending"), ("figure.exe", "needs an ending")])
def test_an_unknown_format_is_refused(records: list[RunRecord], tmp_path: Path, name: str, sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        compare_figure(compare(records), tmp_path / name)


def test_an_unwritable_folder_is_refused(records: list[RunRecord], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(LabError, match="cannot be written"):
        compare_figure(compare(records), tmp_path / "file" / "figure.png")


def test_memory_figure_marks_the_peak_and_the_limit(records: list[RunRecord]) -> None:
    record = records[1]
    highest = max(sum(sample.bytes_by_category.values()) for sample in record.memory_timeline) / 2**20
    lines = memory_figure(record, limit_bytes=3 * 2**20).axes[0].lines
    assert [line.get_ydata()[0] for line in lines if line.get_marker() == "D"] == pytest.approx([highest])  # type: ignore[index]
    assert 3.0 in [line.get_ydata()[0] for line in lines]  # type: ignore[index]


@pytest.mark.parametrize("draw", [memory_figure, timeline_figure])
def test_a_run_that_traced_nothing_is_refused(make_record: MakeRecord, draw: Callable[..., Any]) -> None:
    with pytest.raises(LabError, match="timeline"):
        draw(make_record("failed", "killed", measured=False, **DDP))


def test_every_category_has_its_own_colour_and_hatch() -> None:
    assert len({CATEGORY_STYLES[name].color for name in CATEGORIES}) == len(CATEGORIES)
    assert len({CATEGORY_STYLES[name].hatch for name in CATEGORIES}) == len(CATEGORIES)
