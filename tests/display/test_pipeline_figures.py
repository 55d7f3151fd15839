"""The drawings of schedules: what is drawn is the timeline, one collection holds all bars, all is legible."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.display.drawing import Box, Words
from dlojz.display.figures.partition_figures import (
    bubble_figure,
    bubble_points,
    bubble_sentence,
    overlay_figure,
    overlay_scene,
    step_sentence,
)
from dlojz.display.pipeline_drawing import (
    LEFT_PT,
    RIGHT_PT,
    WIDTH_PT,
    compare_figure,
    facts_of,
    framed,
    known_optimum,
    readable,
    scene_drawing,
    scene_of,
    schedule_figure,
)
from dlojz.display.style import IDLE_STYLES, SCHEDULE_STYLES, SERIES
from dlojz.pipeline.analysis import critical_path
from dlojz.pipeline.schedule import Costs
from dlojz.pipeline.schedule_catalogue import SCHEDULES, build
from dlojz.pipeline.simulator import Timeline, memory_curves, simulate

from .overlap import overlapping

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def in_french() -> None:
    """The longer of the two languages."""
    use_language("fr")


def measured(name: str = "1f1b", ranks: int = 4) -> tuple[Timeline, Timeline]:
    """A simulation in seconds, and "measured" times that are 5 % longer and begin at some clock's time."""
    simulated = simulate(build(name, ranks, 8), Costs(forward=0.02, backward=0.04))
    return simulated, Timeline(
        simulated.schedule, 1.05 * simulated.starts + 77, 1.05 * simulated.ends + 77, origin="measured"
    )


def test_schedule_figure_lays_every_bar_where_and_when_it_runs() -> None:
    timeline = simulate(build("zb-h1", 3, 6), Costs(latency=0.5))
    drawing = scene_drawing(scene_of(timeline, memory=False))
    bars = [shape for shape in drawing.shapes if isinstance(shape, Box) and shape.tip]
    names = [shape for shape in drawing.shapes if isinstance(shape, Words) and shape.text.startswith("rank")]
    per_time = (WIDTH_PT - LEFT_PT - RIGHT_PT) / timeline.makespan
    for bar, start, end, action in zip(bars, timeline.starts, timeline.ends, timeline.schedule.actions, strict=True):
        assert (bar.x, bar.x + bar.width) == pytest.approx((LEFT_PT + start * per_time, LEFT_PT + end * per_time))
        assert bar.y < names[timeline.schedule.rank_of(action)].y < bar.y + bar.height
        assert (bar.color, bar.hatch) == SCHEDULE_STYLES[action.kind]
    figure = schedule_figure(timeline, memory=False, critical=False)
    painted = [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]
    corners = [path.get_extents() for one in painted for path in one.get_paths()]
    assert {(round(one.x0, 3), round(one.y0, 3)) for one in corners} >= {(round(b.x, 3), round(b.y, 3)) for b in bars}
    assert len(painted) < 12  # few collections hold all


@pytest.mark.usefixtures("in_french")
@pytest.mark.parametrize(
    "draw",
    [
        lambda: schedule_figure(simulate(build("1f1b", 4, 8), Costs(latency=0.25)), memory_limit=3, idle=True),
        lambda: schedule_figure(simulate(build("interleaved", 4, 8)), color_by="chunk"),
        lambda: schedule_figure(simulate(build("pipedream", 4, 8), Costs(update=0.5)), color_by="version"),
        lambda: compare_figure(simulate(build("gpipe", 4, 8)), simulate(build("zb-h1", 4, 8))),
        lambda: overlay_figure(*measured()),
        lambda: bubble_figure(["gpipe", "1f1b", "zb-v"], 4, [8, 16]),
    ],
)
def test_the_figures_are_legible(draw: Callable[[], Figure]) -> None:
    figure = draw()
    assert overlapping(figure) == [] and figure.get_figwidth() <= 12
    assert figure.alt  # type: ignore[attr-defined]


def test_texts_stand_only_where_they_can_be_read() -> None:
    few, many = (scene_of(simulate(build("1f1b", 4, m))) for m in (8, 100))
    assert [text for _, text in readable(few, 200)] == [bar.label for bar in few.bars]
    assert readable(many, 200) == []
    assert not any(isinstance(shape, Words) and shape.text == "F0" for shape in scene_drawing(many).shapes)
    some = readable(scene_of(simulate(build("1f1b", 8, 32))), 180)
    assert {text for bar, text in some if bar.label == "B30"} == {"30"}
    both = [bar for bar in scene_of(simulate(build("dualpipe", 4, 8))).bars if bar.style == SCHEDULE_STYLES["O"]]
    assert both and all(bar.short.count("+") == 1 for bar in both)  # forward + backward, where no more can be read


def test_schedule_figure_hatches_strike_through_no_letter() -> None:
    timeline = simulate(build("1f1b", 2, 2))
    texts = {text.get_text(): text for text in schedule_figure(timeline).axes[0].texts}
    assert texts["B0"].get_path_effects() and not texts["F0"].get_path_effects()
    assert scene_drawing(scene_of(timeline)).svg().count('paint-order="stroke"') == 4  # the backwards


def test_scene_of_one_rank_and_one_micro_batch_is_singular() -> None:
    assert scene_of(simulate(build("naive", 1, 1))).title == "naive: 1 rank, 1 micro-batch"


def test_axes_have_the_decimal_mark_of_the_language() -> None:
    use_language("fr")
    figure = schedule_figure(simulate(build("naive", 1, 1)))
    assert "0,5" in [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_arranged_and_drawn_alike_in_both_media(name: str) -> None:
    timeline = simulate(build(name, 4, 8), Costs(latency=0.25, update=0.25, evict=0.1, load=0.1))
    scene = scene_of(timeline, memory_limit=4, **facts_of(timeline, idle=True))
    assert len(scene.bars) == len(timeline.schedule.actions) and scene.width >= timeline.makespan
    assert [steps.peak for steps in scene.memory] == [curve.peak for curve in memory_curves(timeline)]
    svg = scene_drawing(scene).svg()
    assert svg.count("<title>") == len(scene.bars) + len(scene.idle) + len(scene.strip) + len(scene.marks)
    assert sum(bar.end - bar.start for bar in scene.bars) == pytest.approx(sum(timeline.work))
    assert sum(band.end - band.start for band in scene.idle) == pytest.approx(sum(timeline.idle))
    assert {band.name for band in scene.idle} <= set(IDLE_STYLES)


def test_the_critical_path_is_framed_from_the_first_start_to_the_last_end() -> None:
    timeline = simulate(build("1f1b", 4, 8))
    frames = framed(scene_of(timeline, critical=critical_path(timeline)))
    assert (frames[0].start, frames[-1].end) == (0, timeline.makespan)
    assert all(before.end == after.start and before.row != after.row for before, after in pairwise(frames))


def test_the_version_strip_tells_the_version_of_every_action() -> None:
    timeline = simulate(build("pipedream", 3, 6), Costs(update=0.5))
    facts = facts_of(timeline)
    scene = scene_of(timeline, color_by="version", **facts)
    for bar, version in zip(scene.bars, facts["versions"], strict=True):
        band = next(
            each for each in scene.strip if each.row == bar.row and each.start <= bar.start and bar.end <= each.end
        )
        assert band.name == str(version) and bar.style.color == SERIES[(version or 0) % len(SERIES)]
    assert scene_of(simulate(build("1f1b", 3, 6)), **facts_of(timeline) | {"versions": ()}).strip == ()


def test_colour_is_never_alone_and_kinds_differ_in_hatch_too() -> None:
    styles = list(SCHEDULE_STYLES.values())
    assert len({style.color for style in styles}) == len(styles)
    assert len({(style.hatch, style.color == "#FFFFFF") for style in styles}) == len(styles)
    assert len({style.hatch for style in IDLE_STYLES.values()}) == len(IDLE_STYLES)
    timeline = simulate(build("zb-h1", 2, 4))
    for color_by in ("kind", "micro_batch", "chunk"):
        bars = scene_of(timeline, color_by=color_by).bars
        hatches = [SCHEDULE_STYLES[action.kind].hatch for action in timeline.schedule.actions]
        assert [bar.style.hatch for bar in bars] == hatches


def test_bounds_and_the_stored_optimum_are_scene_drawing() -> None:
    timeline = simulate(build("1f1b", 4, 8))
    assert known_optimum(timeline) == 33 and known_optimum(timeline, memory_limit=3) == 39
    words = [mark.words for mark in scene_of(timeline, **facts_of(timeline)).marks]
    assert words == ["lower bound 33", "optimum 33"]
    for other in (simulate(build("1f1b", 4, 8), Costs(latency=1)), simulate(build("chimera", 4, 8)), measured()[1]):
        assert known_optimum(other) is None
    assert "lower_bound" not in facts_of(measured()[1])


def test_compare_figure_of_two_schedules_has_one_time_axis(tmp_path: Path) -> None:
    gpipe, zb_h1 = simulate(build("gpipe", 4, 8)), simulate(build("zb-h1", 4, 8))
    figure = compare_figure(gpipe, zb_h1, tmp_path / "ab.svg")
    assert "zb-h1 takes 6 time units less than gpipe (−18.2 %)" in figure.alt
    halves = [text.get_position() for text in figure.axes[0].texts if text.get_text() == "20"]
    assert len(halves) == 2 and halves[0][0] == halves[1][0]
    assert (tmp_path / "ab.svg").read_text().startswith("<?xml")
    assert "take the same time" in compare_figure(gpipe, simulate(build("1f1b", 4, 8))).alt


def test_the_measured_timeline_lies_under_the_simulated_one(tmp_path: Path) -> None:
    predicted, other = measured()
    scene = overlay_scene(predicted, other)
    assert scene.rows[:2] == ("rank 0 predicted", "rank 0 measured") and len(scene.rows) == 8
    half = len(scene.bars) // 2
    for above, below in zip(scene.bars[:half], scene.bars[half:], strict=True):
        assert below.row == above.row + 1 and below.label == above.label
        assert below.start == pytest.approx(1.05 * above.start, abs=1e-6)
    assert step_sentence(predicted, other) == "Step: predicted 660 ms, measured 693 ms (+5.0 %)"
    assert bubble_sentence(predicted, other).startswith("bubble fraction: predicted 27.3 %, measured 27.3 %;")
    figure = overlay_figure(predicted, other, tmp_path / "overlay.png")
    assert (tmp_path / "overlay.png").read_bytes().startswith(PNG)
    line = figure.axes[1].lines[0]
    late_ms = 0.05 * 1e3 * predicted.ends[predicted.of_rank(0)]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx(late_ms.tolist(), abs=1e-6)
    with pytest.raises(LabError, match="simulate the schedule that was executed"):
        overlay_scene(predicted, measured("gpipe")[1])


def test_bubble_points_and_their_panels_are_simulated() -> None:
    """GPipe: (p − 1) / (m + p − 1)."""
    assert bubble_points("gpipe", 4, [8, 16]) == [(8, pytest.approx(3 / 11)), (16, pytest.approx(3 / 19))]
    assert [number for number, _ in bubble_points("chimera", 4, [3, 4, 8])] == [4, 8]
    figure = bubble_figure(["gpipe", "hanayo"], 4, [4, 8])
    assert [axes.lines[0].get_xdata().tolist() for axes in figure.axes] == [[4, 8], [4, 8]]
    with pytest.raises(LabError, match="give other sizes"):
        bubble_figure(["chimera"], 3, [4])


def test_scene_drawing_and_schedule_figure_escape_a_strange_name() -> None:
    timeline = simulate(replace(build("gpipe", 2, 2), name="$x_1$<script>\u202e"))
    scene = scene_of(timeline)
    svg = scene_drawing(scene).svg()
    assert "<script>" not in svg and "\u202e" not in svg
    figure = schedule_figure(timeline)
    assert all(not text.get_parse_math() for text in figure.findobj(Text))


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: schedule_figure(simulate(build("gpipe", 2, 2)), color_by="kinds"), "did you mean 'kind'"),
        (lambda: schedule_figure(simulate(build("gpipe", 2, 2)), color_by="version"), "asynchronous"),
        (lambda: schedule_figure(simulate(build("gpipe", 8, 2000))), "at most 20000"),
        (lambda: schedule_figure(simulate(build("gpipe", 2, 2)), "x.exe"), "needs an ending"),
        (lambda: bubble_figure(["gpip"]), "did you mean 'gpipe'"),
    ],
)
def test_schedule_figure_and_bubble_figure_refusals(call: Callable[[], object], sentence: str) -> None:
    with pytest.raises(LabError, match=sentence):
        call()
