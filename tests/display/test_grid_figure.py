"""The figure of a grid: a panel per axis, every rank in it, bars that tell the counted bytes, words not mathematics."""

from pathlib import Path

import pytest
from matplotlib.text import Text

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.config.layout import RankGrid
from dlojz.display.canvas import LabFigure
from dlojz.display.drawing import Box, Line
from dlojz.display.grid_drawing import grid_drawing, grid_figure
from dlojz.display.style import SKY, VERMILION
from dlojz.prediction.link_traffic import Crossing, crossing
from dlojz.results.footprint import Traffic

from .overlap import overlapping

PICTURE = RankGrid(dp=2, pp=4, tp=2, gpus_per_node=8)


def _crossing(grid: RankGrid) -> Crossing:
    """Along dp, an all-reduce of 3 MiB; along pp, 2 MiB sent."""
    each = [
        Traffic(collective="all_reduce", group="dp", group_size=grid.dp, count=1, message_bytes=3 * 2**20),
        Traffic(collective="send", group="pp", group_size=grid.pp, count=1, message_bytes=2 * 2**20),
    ]
    return crossing([each] * grid.world_size, grid)


def _words(figure: LabFigure) -> list[str]:
    return [text.get_text() for text in figure.findobj(Text)]


def test_grid_figure_has_a_panel_per_axis_and_bars_with_the_bytes() -> None:
    figure = grid_figure(PICTURE, _crossing(PICTURE))
    words = _words(figure)
    assert words.count("13") == 3 and words.count("node 1") == 3 and words.count("3,0,1") == 3 and "g3" in words
    assert "48.0 MiB inside, 0 B between nodes" in words  # dp: 16 ranks send 2 · 1/2 · 3 MiB
    assert "24.0 MiB inside, 8.00 MiB between nodes" in words  # pp: 8 ranks at the ends send 2, 8 send 1 and 1
    assert "pp: 4 groups of 4, across nodes" in figure.alt and "tp stays inside" in figure.alt


def test_one_axis_large_grids_and_no_bytes(tmp_path: Path) -> None:
    one = _words(grid_figure(PICTURE, axis="pp"))
    assert one.count("13") == 1 and not any("inside, " in word for word in one)
    large = grid_figure(RankGrid(8, 4, 4, 8), path=tmp_path / "grid.svg", axis="dp")
    assert "127" in _words(large) and "0,0,0" not in _words(large)
    assert (tmp_path / "grid.svg").stat().st_size > 0
    assert "dp = 1: each rank is alone" in _words(grid_figure(RankGrid()))


def test_grid_drawing_has_bars_as_long_as_their_bytes_and_clear_labels() -> None:
    drawing = grid_drawing(PICTURE, _crossing(PICTURE))
    bars = [shape for shape in drawing.shapes if isinstance(shape, Box) and shape.color in (SKY, VERMILION)][-6:]
    assert [bar.width / bars[2].width for bar in bars] == pytest.approx([0, 0, 1, 0, 1 / 2, 1 / 6])
    assert [bar.hatch for bar in bars] == ["", "//"] * 3
    assert overlapping(grid_figure(PICTURE, _crossing(PICTURE))) == []
    assert not any(isinstance(one, Line) and max(y for _, y in one.points) > bars[0].y for one in drawing.shapes)


def test_grid_figure_refusals_and_french(tmp_path: Path) -> None:
    with pytest.raises(LabError, match="at most 512 ranks"):
        grid_figure(RankGrid(dp=1024))
    with pytest.raises(LabError, match="unknown axis"):
        grid_figure(PICTURE, axis="ep")
    with pytest.raises(LabError, match="ending"):
        grid_figure(PICTURE, path=tmp_path / "grid.foo", axis="dp")
    use_language("fr")
    figure = grid_figure(PICTURE, _crossing(PICTURE), axis="pp")
    assert "24,0 Mio dedans, 8,00 Mio entre nœuds" in _words(figure) and "à cheval sur des nœuds" in figure.alt
