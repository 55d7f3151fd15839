"""The figures: what is drawn has the lengths of the figures it stands for, nothing overlaps, texts stay texts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.base.table import visible
from dlojz.compare import compare, overlay_of
from dlojz.display.figures.partition_figures import step_sentence
from dlojz.display.figures.run_figures import compare_figure, timeline_figure
from dlojz.display.style import CATEGORY_STYLES
from dlojz.results.footprint import CATEGORIES
from dlojz.results.record import RunRecord, Span, read_record
from dlojz.running.launch import shipped

from .legible import DRAWN_IN
from .overlap import overlapping

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


@pytest.mark.parametrize("language", DRAWN_IN)
def test_compare_figure_and_timeline_figure_lay_no_text_on_another(records: list[RunRecord], language: str) -> None:
    use_language(language)
    for figure in (
        compare_figure(compare(records)),
        timeline_figure(records[1]),
    ):
        assert overlapping(figure) == []


@pytest.mark.parametrize("language", DRAWN_IN)
def test_a_pipeline_s_measured_step_lies_under_its_simulation(records: list[RunRecord], language: str) -> None:
    replayed = map(read_record, shipped().values())
    pipeline = next(record for record in replayed if record.config.layout.title == "pipeline 1f1b × 2 (by hand)")
    use_language(language)
    figure = compare_figure(compare([records[0], pipeline]))
    overlay = overlay_of(pipeline)
    sentence = step_sentence(overlay.simulated, overlay.measured)
    use_language("en")
    assert overlapping(figure) == []
    assert any(sentence in text.get_text() for text in figure.findobj(Text))
    assert compare([records[0]]).figure().axes[-1].get_ylabel() == "loss"  # and no such panel without a pipeline


def test_compare_figure_has_bars_as_long_as_their_bytes(make_record: MakeRecord) -> None:
    record = make_record(**DDP)
    figure = compare_figure(compare(record))
    communication = figure.axes[1]
    expected = record.footprints[0].traffic("all_reduce") / 2**20
    assert [bar.get_width() for bar in communication.patches] == pytest.approx([expected, expected])  # type: ignore[attr-defined]


def test_compare_figure_draws_failed_single_and_unmeasured_runs(make_record: MakeRecord, tmp_path: Path) -> None:
    failed = make_record("failed", "killed", measured=False, **DDP)
    for number, runs in enumerate(([failed], [make_record(engine="single")], [make_record(**DDP), failed])):
        path = tmp_path / f"{number}.png"
        compare_figure(compare(runs), path)
        assert path.read_bytes().startswith(PNG)


def test_a_figure_shows_itself_and_says_what_it_shows(records: list[RunRecord]) -> None:
    shown, _ = compare_figure(compare(records))._repr_mimebundle_()
    assert shown["image/png"].startswith(PNG)
    assert "DDP" in shown["text/plain"]


@pytest.mark.parametrize("name", ["$\\foo$", "_hidden", "a^b_c", "%s {x}", "\x00\u202e"])
def test_compare_figure_draws_hostile_names(records: list[RunRecord], name: str) -> None:
    comparison = compare(records[:2])
    rows = tuple(row.model_copy(update={"title": name, "model": name}) for row in comparison.rows)
    figure = compare_figure(comparison.model_copy(update={"rows": rows}))
    figure.canvas.draw()
    assert all(not text.get_parse_math() for text in figure.findobj(Text) if visible(name) in text.get_text())  # type: ignore[attr-defined]


@pytest.mark.parametrize("name, sentence", [("figure", "needs an ending"), ("figure.exe", "needs an ending")])
def test_compare_figure_refuses_an_unknown_format(
    records: list[RunRecord], tmp_path: Path, name: str, sentence: str
) -> None:
    with pytest.raises(LabError, match=sentence):
        compare_figure(compare(records[0]), tmp_path / name)


def test_compare_figure_refuses_an_unwritable_folder(records: list[RunRecord], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(LabError, match="cannot be written"):
        compare_figure(compare(records[0]), tmp_path / "file" / "figure.png")


def test_timeline_figure_refuses_a_run_that_traced_nothing(make_record: MakeRecord) -> None:
    with pytest.raises(LabError, match="timeline"):
        timeline_figure(make_record("failed", "killed", measured=False, **DDP))


@pytest.fixture
def communicating(make_record: MakeRecord) -> RunRecord:
    """Two buckets per step, the second of which arrives after backward has ended."""
    record = make_record(**DDP)
    spans = [
        Span(rank=rank, step=step, phase=phase, start_s=step + start, end_s=step + end)
        for rank in range(2)
        for step in range(3)
        for phase, start, end in (
            ("communication", 0.4, 0.5),
            ("communication", 0.6, 0.8),
            ("wait", 0.7, 0.8),
        )
    ]
    measured = record.footprints[0]
    phases = measured.phases.model_copy(update={"communication_exposed_s": 0.1, "communication_hidden_s": 0.2})
    return record.model_copy(
        update={
            "spans": (*record.spans, *spans),
            "footprints": (measured.model_copy(update={"phases": phases}),),
        }
    )


def test_timeline_figure_gives_communication_a_lane_below_the_compute(communicating: RunRecord) -> None:
    figure = timeline_figure(communicating)
    assert "100 ms exposed, 200 ms hidden" in figure.axes[0].get_title(loc="left")
    legend = figure.axes[0].get_legend()
    assert legend is not None
    labels = [text.get_text().strip() for text in legend.get_texts()]
    assert labels == ["forward", "backward", "optimizer", "wait for communication", "communication"]
    boxes = {
        label: [path.get_extents() for one in collections for path in one.get_paths()]
        for label, collections in _by_phase(figure, labels).items()
    }
    for rank in range(2):
        of_rank = {name: [box for box in found if rank - 0.5 < box.y0 < rank + 0.5] for name, found in boxes.items()}
        lane = of_rank["communication"]
        assert len(lane) == 6
        assert min(box.y0 for box in lane) >= max(box.y1 for box in of_rank["backward"])
        waits = of_rank["wait for communication"]
        assert all(
            any(back.x0 <= wait.x0 and wait.x1 <= back.x1 + 1e-6 for back in of_rank["backward"]) for wait in waits
        )
    assert overlapping(figure) == []
    assert overlapping(compare_figure(compare(communicating))) == []


def _by_phase(figure: Figure, labels: list[str]) -> dict[str, list[Any]]:
    """The bars of each phase; phases are drawn in the order of the legend, one collection per rank."""
    bars = list(figure.axes[0].collections)
    each = len(bars) // len(labels)
    return {label: bars[number * each : (number + 1) * each] for number, label in enumerate(labels)}


def test_timeline_figure_keeps_full_bars_without_communication(make_record: MakeRecord) -> None:
    heights = {
        round(path.get_extents().height, 6)
        for bars in timeline_figure(make_record(**DDP)).axes[0].collections
        for path in bars.get_paths()
    }
    assert heights == {0.8}


def test_every_category_has_its_own_colour_and_hatch() -> None:
    assert len({CATEGORY_STYLES[name].color for name in CATEGORIES}) == len(CATEGORIES)
    assert len({CATEGORY_STYLES[name].hatch for name in CATEGORIES}) == len(CATEGORIES)
