"""Labels in a notebook: none under 9 pixels, none cut by an edge; where a box has no room, none is written.

The figures themselves are looked at where their tests draw them: `legible_figures` is a fixture of those rooms.
"""

import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

import dlojz
from dlojz.config.layout import RankGrid
from dlojz.display.canvas import figure_of, finish, new_figure, text_pt
from dlojz.display.drawing import Box, Drawing, Words
from dlojz.display.figures.communication_figures import CELL_WIDTH, collective_figure
from dlojz.display.grid_drawing import cell_words, grid_drawing
from dlojz.display.pipeline_drawing import FONT_PT, LEFT_PT, RIGHT_PT, facts_of, scene_drawing, scene_of
from dlojz.display.style import SMALL, legible
from dlojz.pipeline.schedule_catalogue import build
from dlojz.pipeline.simulator import simulate

from .overlap import outside, too_small

THIRTEEN_INCHES_PT = 9 / (110 / 72 * 950 / 1430)
"""A figure of 13 inches has 1430 pixels, and a notebook 950."""


def test_legible_gives_the_sizes_of_a_shrunk_picture() -> None:
    assert pytest.approx(8.867, abs=1e-3) == THIRTEEN_INCHES_PT
    assert legible(7.0, 13 * 72) == pytest.approx(THIRTEEN_INCHES_PT)
    assert legible(9.0, 13 * 72) == 9.0
    assert legible(1.0, 6 * 72) == pytest.approx(9 / 1.4)  # an SVG of 6 inches is not shrunk, but shown at 1.4 px/pt


def test_a_text_that_is_too_small_or_cut_is_seen() -> None:
    figure = Figure(figsize=(13.0, 2.0))
    figure.text(0.5, 0.5, "tiny", fontsize=7)
    figure.text(0.99, 0.5, "beyond the edge", fontsize=12)
    assert too_small(figure) == [("tiny", pytest.approx(7.1, abs=0.02))]
    assert outside(figure) == ["beyond the edge"]


def test_a_finished_figure_has_no_text_under_nine_pixels() -> None:
    figure = new_figure(13.0, 4.0, "what it shows")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], label="line")
    axes.set_title("large", fontsize=14)
    axes.set_xlabel("across", fontsize=6)
    axes.tick_params(which="both", labelsize=5)
    axes.minorticks_on()
    axes.xaxis.set_minor_formatter(lambda value, position: f"{value:.2f}")
    axes.legend(title="legend", fontsize=6, title_fontsize=6)
    finish(figure)
    axes.set_xlim(0, 7)  # whose ticks are made anew
    figure.draw_without_rendering()
    assert too_small(figure) == []
    assert axes.title.get_fontsize() == 14
    assert axes.xaxis.label.get_fontsize() == text_pt(axes) == pytest.approx(THIRTEEN_INCHES_PT)


def test_words_of_a_drawing_are_raised_alike_in_both_media() -> None:
    drawing = Drawing(13 * 72.0, 60.0, "what it shows", (Words(20, 30, "word", 4.0), Words(90, 30, "title", 12.0)))
    assert [shape.size for shape in drawing.shapes if isinstance(shape, Words)] == [
        pytest.approx(THIRTEEN_INCHES_PT),
        12.0,
    ]
    assert 'font-size="8.9"' in drawing.svg()
    assert too_small(figure_of(drawing)) == []


def test_no_figure_asks_for_a_size_in_figures() -> None:
    """Sizes have names, which `finish` raises where a notebook shrinks the figure."""
    number = re.compile(r"(?:fontsize|labelsize)\W{1,3}\d")
    files = sorted(Path(dlojz.__file__).parent.glob("**/*.py"))
    assert [path.name for path in files if number.search(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize("name, micro_batches, written", [("1f1b", 8, True), ("1f1b", 96, False)])
def test_scene_drawing_tells_a_narrow_micro_batch_to_the_pointer_alone(
    name: str, micro_batches: int, written: bool
) -> None:
    timeline = simulate(build(name, 4, micro_batches))
    scene = scene_of(timeline, **facts_of(timeline, critical=False, bounds=False))
    drawing = scene_drawing(scene)
    per_time = (drawing.width - LEFT_PT - RIGHT_PT) / scene.width
    inside = [shape for shape in drawing.shapes if isinstance(shape, Words) and re.fullmatch(r"[FB]?\d+", shape.text)]
    inside = [shape for shape in inside if (shape.size, shape.anchor) == (FONT_PT, "middle")]
    assert bool(inside) == written
    narrowest = min(bar.end - bar.start for bar in scene.bars) * per_time
    assert all(0.62 * shape.size * len(shape.text) < narrowest for shape in inside)
    assert sum(bool(shape.tip) for shape in drawing.shapes if isinstance(shape, Box)) >= len(scene.bars)


def test_weight_versions_fit_into_their_strip() -> None:
    timeline = simulate(build("pipedream", 4, 8))
    for memory in (True, False):
        scene = scene_of(timeline, memory=memory, **facts_of(timeline))
        strips = {band.name for band in scene.strip}
        drawing = scene_drawing(scene)
        boxes = [shape for shape in drawing.shapes if isinstance(shape, Box) and shape.tip.startswith("weight version")]
        assert len(boxes) == len(scene.strip) and min(box.height for box in boxes) >= FONT_PT
        middles = {round(box.y + box.height / 2, 3) for box in boxes}
        numbers = [shape for shape in drawing.shapes if isinstance(shape, Words) and round(shape.y, 3) in middles]
        assert {shape.text for shape in numbers} == strips and min(shape.size for shape in numbers) == FONT_PT


@pytest.mark.parametrize(
    "grid, says",
    [
        (RankGrid(2, 4, 2, 8), "rank, position (pp,dp,tp), group"),
        (RankGrid(dp=16, pp=4, tp=8, gpus_per_node=8), "rank, group"),
    ],
)
def test_each_cell_has_room_for_what_it_says(grid: RankGrid, says: str) -> None:
    drawing = grid_drawing(grid)
    assert says in cell_words(grid)
    cells = [shape for shape in drawing.shapes if isinstance(shape, Box) and shape.tip]
    words = [shape for shape in drawing.shapes if isinstance(shape, Words) and re.fullmatch(r"g?\d+", shape.text)]
    assert len(words) == 2 * len(cells) == 6 * grid.world_size
    least = legible(SMALL, drawing.width)
    for word in words:
        assert word.size >= legible(0.0, drawing.width) and word.size < least + 6
        cell = next(box for box in cells if box.x < word.x < box.x + box.width and box.y < word.y < box.y + box.height)
        assert word.x + 0.62 * len(word.text) * word.size <= cell.x + cell.width + 0.01


def test_long_numbers_of_a_collective_widen_its_cells() -> None:
    figure = collective_figure("ring_all_reduce", values=[[0.123456, -0.654321], [0.333333, 0.666667]])
    assert too_small(figure) == []
    panel = figure.axes[0]
    pitch_px = panel.transData.transform((1, 0))[0] - panel.transData.transform((0, 0))[0]
    numbers = [text for text in panel.texts if "." in text.get_text()]
    assert numbers and max(text.get_window_extent().width for text in numbers) < CELL_WIDTH * pitch_px
