"""The board's figure: every way drawn, gaps seed by seed, and what is missing said."""

from pathlib import Path

import pytest

from dlojz.base.errors import LabError
from dlojz.base.language import use_language
from dlojz.display.figures.communication_figures import communication_figure
from dlojz.prediction.link_traffic import Reduction
from tests.display.legible import DRAWN_IN

PLAIN = Reduction("AdamW", "AdamW", 4e6, 4e6, 4.0, counted_bytes=4e6, step_s=0.1, losses=(2.0, 2.5))
ONE_BIT = Reduction("1-bit $Adam$", "AdamW", 1e6, 1e5, 2.0, step_s=0.2, losses=(2.02, 2.5))
FAR = Reduction("local SGD", "AdamW", 5e5, 5e5, 0.25, step_s=0.1, losses=(4.0, 4.0))


@pytest.mark.parametrize("language", DRAWN_IN)
def test_every_way_has_a_point_and_a_line(tmp_path: Path, language: str) -> None:
    use_language(language)
    figure = communication_figure([PLAIN, ONE_BIT, FAR], tmp_path / "board.png")
    assert (tmp_path / "board.png").stat().st_size > 10_000
    left, right = figure.axes
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["AdamW", "1-bit $Adam$", "local SGD"]
    points = {line.get_label(): line.get_xydata()[0] for line in left.lines if not line.get_label().startswith("_")}
    assert points["AdamW"] == pytest.approx([4e6, 0.0])
    assert points["1-bit $Adam$"] == pytest.approx([1e6, 0.5])  # the median of 1 % and 0 %
    assert len(right.lines) == 3
    gbits, taken_ms = right.lines[0].get_xdata(), right.lines[0].get_ydata()
    assert taken_ms[0] == pytest.approx(1e3 * (0.1 + PLAIN.link_s(30e-6, gbits[0] * 1e9 / 8)))
    assert "1-bit $Adam$" in figure.alt


def test_communication_figure_without_times_has_one_panel() -> None:
    figure = communication_figure([Reduction("AdamW", "AdamW", 4e6, 4e6, 4.0, losses=(2.0,))])
    assert len(figure.axes) == 1


@pytest.mark.parametrize(
    ("ways", "said"),
    [
        ([Reduction("AdamW", "AdamW", 4e6, 4e6, 4.0)], "at least one way with the losses"),
        ([ONE_BIT], "is held against AdamW"),
    ],
)
def test_communication_figure_says_what_is_missing(ways: list[Reduction], said: str) -> None:
    with pytest.raises(LabError, match=said):
        communication_figure(ways)
